"""Functions of FlexAttention that tests share, and what one device makes of them, written out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp.attn.flex.flex_attention import flex_attend
from lightning_cp.attn.flex.mods import SequenceMask, build_functions
from lightning_cp.attn.flex.remote_kv import KVRoute
from lightning_cp.attn.plan import QueryShard
from lightning_cp.comm.transport import Transport
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import Layout, build_layout
from tests.attn.cases import documents
from tests.oracle import Inputs, make_inputs, put_back

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


@dataclass
class Captured:
    """What functions capture: whole rows, different in each."""

    documents: Tensor
    prefix: Tensor
    slopes: Tensor
    table: Tensor

    @classmethod
    def make(cls, batch: int, heads: int, length: int, seed: int = 3) -> "Captured":
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(heads, 2 * length - 1, generator=generator, dtype=torch.float64)
        ids = documents(batch, length)
        if length > 9:  # tokens that belong to none, of other places in each row
            for row in range(batch):
                ids[row, 4 + row : 6 + row] = -1
        return cls(
            documents=ids,
            prefix=torch.arange(batch) * 5 % length + length // 3,
            slopes=2.0 ** -torch.arange(1, heads + 1).double(),
            table=table,
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> "Captured":
        # As parameters are kept: fused kernels sum their gradients in their own precision.
        dtype = torch.promote_types(dtype, torch.float32)
        numbers = (x.to(device, dtype) for x in (self.slopes, self.table))
        return Captured(self.documents.to(device), self.prefix.to(device), *numbers)


def causal(captured):
    return lambda b, h, q, k: q >= k


def document(captured):
    ids = captured.documents

    def mask_mod(b, h, q, k):
        return (ids[b, q] == ids[b, k]) & (ids[b, q] >= 0) & (q >= k)

    return mask_mod


def both_ways(captured):
    ids = captured.documents
    return lambda b, h, q, k: ids[b][q] == ids[b][k]


def window(captured):
    return lambda b, h, q, k: (q >= k) & (q - k < 6)


def prefix(captured):
    lengths = captured.prefix
    return lambda b, h, q, k: (q >= k) | (k < lengths[b])


def by_head(captured):
    return lambda b, h, q, k: (q - k < 3 + 4 * h) & (k - q < 9 - 2 * h)


def nothing(captured):
    """Hide every key from some queries, and some keys from all."""
    return lambda b, h, q, k: (q >= k) & (q % 5 != b) & (k % 4 != 1)


def relative(captured):
    table = captured.table
    middle = table.shape[1] // 2
    return lambda score, b, h, q, k: score + table[h, q - k + middle]


def softcap(captured):
    return lambda score, b, h, q, k: 2.0 * torch.tanh(score / 2.0)


def alibi(captured):
    slopes = captured.slopes
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def hiding(captured):
    return lambda score, b, h, q, k: torch.where(q >= k, score, float("-inf"))


Builder = Callable[[Captured], Callable[..., Tensor]]
MASKS: dict[str, Builder | None] = {
    "none": None,
    "causal": causal,
    "document": document,
    "both ways": both_ways,
    "window": window,
    "prefix": prefix,
    "by head": by_head,
    "nothing": nothing,
}
SCORES: dict[str, Builder | None] = {
    "none": None,
    "relative": relative,
    "softcap": softcap,
    "alibi": alibi,
    "hiding": hiding,
}


@dataclass
class FlexCase:
    """One call of FlexAttention over several ranks."""

    inputs: Inputs
    captured: Captured
    mask: str = "causal"
    score: str = "none"
    layout: str | Layout = "zigzag"
    scale: float | None = None

    def build_layout(self, cp_size: int) -> Layout:
        if isinstance(self.layout, Layout):
            return self.layout
        return build_layout(self.layout, seq_len=self.inputs.q.shape[2], cp_size=cp_size)

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> "FlexCase":
        device = torch.device(device)
        inputs = self.inputs.to(dtype).on(device)
        rest = (self.mask, self.score, self.layout, self.scale)
        return FlexCase(inputs, self.captured.to(device, dtype), *rest)


def make_flex_case(
    mask: str,
    score: str = "none",
    *,
    heads: str = "gqa",
    length: int = 37,
    batch: int = 2,
    dims: tuple[int, int] = (8, 6),
    **kwargs: object,
) -> FlexCase:
    inputs = make_inputs(
        batch=batch, heads=HEADS[heads], length=length, dims=dims, sinks=False, seed=7
    )
    captured = Captured.make(batch, HEADS[heads][0], length)
    return FlexCase(inputs, captured, mask, score, **kwargs)  # type: ignore[arg-type]


def states(block_mask: BlockMask) -> Tensor:
    """Return 0 for empty blocks, 1 for those with a mask, 2 for full ones."""

    def dense(counts: Tensor, indices: Tensor) -> Tensor:
        is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
        return torch.zeros_like(indices).scatter_add(-1, indices.long(), is_listed.to(indices))

    found = dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None:
        return found
    return found + 2 * dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def build(name: str, builders: dict[str, Builder | None], captured: Captured):
    builder = builders[name]
    return None if builder is None else builder(captured)


def weights_of_lse(lse: Tensor) -> Tensor:
    """Return numbers that differ, to take a gradient through lse with."""
    return torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).reshape(lse.shape)


def differentiate(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], dout: Tensor, dlse: Tensor
) -> dict[str, Tensor]:
    """Return out, lse, and gradients of a loss that takes both."""
    seen = torch.where(lse == float("-inf"), 0.0, lse)
    loss = (out * dout).sum() + (seen * dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {
        f"d{name}": torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), grads, strict=True)
    }
    shown = torch.where(lse == float("-inf"), -999.0, lse)
    found = {"out": out.detach(), "lse": shown.detach(), **named}
    return {name: x.cpu() for name, x in found.items()}


def flex_whole(case: FlexCase) -> dict[str, Tensor]:
    """Do what one device does: S x S, by broadcasting, in the inputs' precision."""
    inputs, captured = case.inputs, case.captured
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "table": captured.table}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    q, k, v, table = leaves.values()
    captured = Captured(captured.documents, captured.prefix, captured.slopes, table)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    sizes = scores.shape
    where = [
        torch.arange(size, device=q.device).reshape(-1, *[1] * (3 - dim))
        for dim, size in enumerate(sizes)
    ]
    score_mod, mask_mod = build(case.score, SCORES, captured), build(case.mask, MASKS, captured)
    if score_mod is not None:
        scores = score_mod(scores, *where).to(q.dtype)
    if mask_mod is not None:
        seen = mask_mod(*where) if case.mask != "both ways" else _same(captured.documents)
        scores = scores.masked_fill(~seen, float("-inf"))
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    scores = scores.masked_fill(blind, 0.0)
    out = torch.softmax(scores, -1).masked_fill(blind, 0.0) @ v
    lse = torch.logsumexp(scores, -1).masked_fill(blind[..., 0], float("-inf"))
    return differentiate(out, lse, leaves, inputs.dout, weights_of_lse(lse).to(lse))


def _same(ids: Tensor) -> Tensor:
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def flex_rank(
    transport: Transport, case: FlexCase, plain: bool = True, head_offset: int = 0
) -> dict[str, Tensor]:
    """Run a case on one rank: its part of out, lse, dq, dk, dv, and its share of dtable."""
    inputs, layout = case.inputs, case.build_layout(transport.size)

    def cut(x: Tensor) -> Tensor:
        return shard(x, 2, layout=layout, rank=transport.rank)

    leaves = {"q": cut(inputs.q), "k": cut(inputs.k), "v": cut(inputs.v)}
    leaves["table"] = case.captured.table.clone()
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    captured = Captured(
        case.captured.documents, case.captured.prefix, case.captured.slopes, leaves["table"]
    )
    mask_mod = build(case.mask, MASKS, captured)
    place = QueryShard(layout, transport.rank, head_offset)
    functions = build_functions(
        None if mask_mod is None else SequenceMask(mask_mod),
        build(case.score, SCORES, captured),
        place,
        batch=inputs.q.shape[0],
        heads=inputs.q.shape[1],
        device=inputs.q.device,
        fused=not plain,
    )
    q, k, v, _ = leaves.values()
    found = flex_attend(
        q, k, v, functions, KVRoute(place.layout, transport, 0), scale=case.scale, plain=plain
    )
    whole = weights_of_lse(inputs.q[..., 0]).to(found.lse)
    return differentiate(found.out, found.lse, leaves, cut(inputs.dout), cut(whole))


def put_flex_together(parts: list[dict[str, Tensor]], case: FlexCase) -> dict[str, Tensor]:
    """Return whole rows from all ranks' parts; what each rank has a share of is summed."""
    order = case.build_layout(len(parts)).order
    return {
        name: sum(part[name] for part in parts)  # type: ignore[misc]
        if name == "dtable"
        else put_back([part[name] for part in parts], order, 2)
        for name in parts[0]
    }
