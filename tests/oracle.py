"""What one device computes, written a second time and as plainly as possible: S x S, float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.geometry.mask import Mask


def visible(mask: Mask, batch: int, length: int) -> Tensor:
    """Return bool [B, S, S]: which query sees which key, straight from the words of `Mask`."""
    position = torch.arange(length)
    query, key = position[:, None], position[None, :]
    rows = []
    for row in range(batch):
        documents = _row(mask.documents, row, length, 0)
        padding = _row(mask.padding, row, length, False).bool()
        allowed = torch.ones(length, length, dtype=torch.bool)
        if mask.causal:
            allowed &= key <= query
        if isinstance(mask.window, tuple):
            allowed &= (key >= query - mask.window[0]) & (key <= query + mask.window[1])
        elif mask.window is not None:
            allowed &= (query - key).abs() < mask.window
        if mask.chunk is not None:
            origin = torch.zeros(length, dtype=torch.long)
            for document in documents.unique():
                members = position[documents == document]
                real = members[~padding[members]]
                origin[members] = (real if len(real) else members)[0]
            number = (position - origin).div(mask.chunk, rounding_mode="floor")
            allowed &= number[:, None] == number[None, :]
        if mask.spans is not None:
            spans = _row(mask.spans, row, length, -1)
            same = (spans[:, None] == spans[None, :]) & (spans[:, None] >= 0)
            later = position[None, :] > position[:, None]
            allowed |= same & later if mask.cut_spans else same
        allowed &= documents[:, None] == documents[None, :]
        allowed &= documents[:, None] != -1
        rows.append(allowed & ~padding[None, :])
    return torch.stack(rows)


def _row(value: Tensor | bool | None, row: int, length: int, default: int) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full((length,), default)
    return value if value.dim() == 1 else value[row]


@dataclass
class Inputs:
    """Tensors of one attention call, whole rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Inputs":
        return self._map(lambda x: x.to(dtype))

    def on(self, device: torch.device) -> "Inputs":
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        sinks = None if self.sinks is None else change(self.sinks)
        return Inputs(*(change(x) for x in (self.q, self.k, self.v, self.dout)), sinks)


def make_inputs(
    *,
    batch: int,
    heads: tuple[int, int],
    length: int,
    dims: tuple[int, int],
    sinks: bool,
    seed: int,
) -> Inputs:
    """Draw inputs that differ in every row, head and token, with scores far from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 1.5

    (num_q, num_kv), (dim, value_dim) = heads, dims
    return Inputs(
        q=draw(batch, num_q, length, dim),
        k=draw(batch, num_kv, length, dim),
        v=draw(batch, num_kv, length, value_dim),
        dout=draw(batch, num_q, length, value_dim),
        sinks=draw(num_q) if sinks else None,
    )


def attend_whole(
    inputs: Inputs,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return out, dq, dk, dv and dsinks of plain attention, in the inputs' precision."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "sinks": inputs.sinks}
    leaves = {n: x.detach().clone().requires_grad_() for n, x in leaves.items() if x is not None}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    seen = visible(mask, q.shape[0], q.shape[2])[:, None]
    scores = scores.masked_fill(~seen, float("-inf"))
    sinks = leaves.get("sinks")
    if sinks is None:
        scores = torch.cat([scores, torch.full_like(scores[..., :1], float("-inf"))], -1)
    else:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    out = weights[..., :-1] @ v
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    named = {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), **named}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative Frobenius error of each tensor.

    A gradient that is zero in theory has no scale of its own, so none counts as smaller than 1e-4
    of the tensors' root mean square.
    """
    norms = {name: float(x.double().norm()) for name, x in exact.items()}
    floor = 1e-4 * (sum(n * n for n in norms.values()) / len(norms)) ** 0.5
    return {
        name: float((found[name].double() - exact[name].double()).norm())
        / max(norms[name], floor, 1e-300)
        for name in exact
    }


def assert_earned(
    found: dict[str, Tensor], same: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Check that errors are at most twice those of one device in the same precision, and 4 ulp."""
    ulp = torch.finfo(dtype).eps
    ours, theirs = errors(found, exact), errors(same, exact)
    for name in exact:
        assert ours[name] <= 2 * theirs[name] + 4 * ulp, (name, ours[name], theirs[name])


def put_back(shards: Sequence[Tensor], order: Tensor, dim: int) -> Tensor:
    """Return a whole row from the shards of all ranks."""
    return torch.cat(list(shards), dim).index_select(dim, order)
