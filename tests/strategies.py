"""Random masks and lengths for property tests."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_cp.geometry.mask import Mask


@st.composite
def run_ids(draw: st.DrawFn, batch: int, length: int, none_share: float) -> Tensor:
    """Draw rows of ids in runs: short and long ones, some of them -1."""
    rows = []
    for _ in range(batch):
        row: list[int] = []
        while len(row) < length:
            size = draw(st.sampled_from([1, 1, 2, 3, 5, 8, 20]))
            nothing = draw(st.floats(0, 1)) < none_share
            row += [-1 if nothing else len(row)] * size
        rows.append(row[:length])
    return torch.tensor(rows)


@st.composite
def paddings(draw: st.DrawFn, batch: int, length: int) -> Tensor:
    """Draw left padding, right padding, or holes, another in each row."""
    rows = []
    position = torch.arange(length)
    for _ in range(batch):
        width = draw(st.integers(0, length))
        kind = draw(st.sampled_from(["left", "right", "holes"]))
        if kind == "left":
            rows.append(position < width)
        elif kind == "right":
            rows.append(position >= width)
        else:
            bits = draw(st.lists(st.booleans(), min_size=length, max_size=length))
            rows.append(torch.tensor(bits, dtype=torch.bool))
    return torch.stack(rows)


@st.composite
def masks(draw: st.DrawFn, batch: int, length: int) -> Mask:
    """Draw any combination of what a mask can say."""
    return Mask(
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 1, 3, 9, (4, 0), (0, 2), (5, 3)])),
        chunk=draw(st.sampled_from([None, None, 1, 4, 7])),
        documents=draw(st.none() | run_ids(batch, length, 0.15)),
        spans=draw(st.none() | run_ids(batch, length, 0.6)),
        padding=draw(st.none() | paddings(batch, length)),
        cut_spans=draw(st.booleans()),
    )
