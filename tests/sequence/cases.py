"""Sequences for tests of `lightning_cp.sequence`, and the same layers on one device.

The references know neither ranges nor ranks: they go through the tokens one by one.
"""

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from hypothesis import strategies as st

from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.sequence import recurrence, token_map
from lightning_cp.step import active_step
from lightning_cp.step.guards import check_recompute
from lightning_cp.step.step import Step
from tests import doors

LAYOUTS = ["zigzag", "contiguous", "balanced"]


@dataclass(frozen=True)
class Case:
    """Full sequences: rows of document lengths (-n: n tokens of no document), rows of padding."""

    length: int
    cp_size: int
    layout: str = "zigzag"
    batch: int = 2
    documents: tuple[tuple[int, ...], ...] | None = None
    padding: tuple[tuple[int, ...], ...] | None = None
    shows_padding: bool = True

    @cached_property
    def document_ids(self):
        if self.documents is None:
            return None
        rows = [
            [
                number if size > 0 else -1
                for number, size in enumerate(row)
                for _ in range(abs(size))
            ]
            for row in self.documents
        ]
        return np.stack(rows)

    @cached_property
    def is_padding(self):
        if self.padding is None:
            return None
        rows = np.zeros((self.batch, self.length), np.bool_)
        for row, positions in zip(rows, self.padding, strict=True):
            row[list(positions)] = True
        return rows

    @cached_property
    def _layout(self):
        documents, padding = self.document_ids, self.is_padding

        def bounds():
            return Mask(causal=True).bounds(self.length, documents=documents, padding=padding)

        return build_layout(
            self.layout,
            seq_len=self.length,
            cp_size=self.cp_size,
            bounds=bounds,
            shows_padding=self.shows_padding,
        )

    def build_layout(self):
        return self._layout

    def build_step(self, transport):
        layout = self.build_layout()
        groups = Groups(transport, LoneTransport(), transport, LoneTransport())
        ids = torch.zeros(self.batch, layout.tensor_len(transport.rank))
        documents, padding = self.document_ids, self.is_padding
        return Step(
            layout=layout,
            groups=groups,
            config=doors.config(),
            batch_size=self.batch,
            documents=documents,
            padding=padding,
            position_ids=ids,
            training=True,
        )

    def cut(self, x, dim, rank):
        return shard(x, dim, layout=self.build_layout(), rank=rank)

    def sees(self, sample, token, other):
        """Return whether a token sees an earlier one, or itself."""
        documents, padding = self.document_ids, self.is_padding
        if documents is not None:
            row = documents[min(sample, len(documents) - 1)]
            if row[token] != row[other] or row[token] == -1:
                return False
        return padding is None or not padding[sample, other]

    def starts(self, sample, token):
        """Return whether the state before a token is zero."""
        if token == 0:
            return True
        documents = self.document_ids
        if documents is None:
            return False
        row = documents[min(sample, len(documents) - 1)]
        return bool(row[token] != row[token - 1] or row[token] == -1)


@st.composite
def cases(draw, max_len=26):
    length, batch = draw(st.integers(1, max_len)), draw(st.integers(1, 3))
    documents = padding = None
    if draw(st.booleans()):
        documents = tuple(draw(rows(length)) for _ in range(draw(st.sampled_from([1, batch]))))
    if draw(st.booleans()):
        tokens = st.lists(st.integers(0, length - 1), max_size=length, unique=True).map(tuple)
        padding = tuple(draw(tokens) for _ in range(batch))
    return Case(
        length,
        draw(st.sampled_from([1, 2, 3, 4])),
        draw(st.sampled_from(LAYOUTS)),
        batch,
        documents,
        padding,
        draw(st.booleans()),
    )


@st.composite
def rows(draw, length):
    """Draw lengths of documents: single tokens are common, and tokens of no document appear."""
    sizes = []
    while (left := length - sum(map(abs, sizes))) > 0:
        size = min(left, draw(st.sampled_from([1, 1, 2, 3, 5, 9, 40])))
        sizes.append(draw(st.sampled_from([1, 1, 1, -1])) * size)
    return tuple(sizes)


class Threads:
    """Gives each thread a step of its own: the active step is a variable of the process."""

    def __init__(self, monkeypatch):
        self._local = threading.local()
        for module in (token_map, recurrence):
            monkeypatch.setattr(module, "step_of_call", self.step_of_call)

    def current_step(self):
        return getattr(self._local, "step", None) or active_step.current()

    def step_of_call(self):
        step = self.current_step()
        check_recompute(step)
        return step

    def enter(self, step):
        self._local.step = step


def convolve(case, x, weight, bias):
    """Return the convolution of x [B, D, S], token by token."""
    width = weight.shape[1]
    columns = []
    for token in range(case.length):
        total = torch.zeros_like(x[:, :, 0])
        for back in range(min(width, token + 1)):
            seen = [float(case.sees(b, token, token - back)) for b in range(case.batch)]
            tap = x[:, :, token - back] * weight[:, width - 1 - back]
            total = total + tap * torch.tensor(seen, dtype=x.dtype)[:, None]
        columns.append(total if bias is None else total + bias)
    return torch.stack(columns, 2)


def recur(starts, decays, inputs, apply, state):
    """Return the states after each token, [B, n, ...], from the state before the first.

    ``starts`` is bool [B, n]: the state before such a token is zero.
    """
    states = []
    for token in range(inputs.shape[1]):
        kept = ~starts[:, token].view(-1, *[1] * (state.dim() - 1))
        state = apply(decays[:, token], state * kept) + inputs[:, token]
        states.append(state)
    return torch.stack(states, 1)
