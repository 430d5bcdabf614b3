"""Attention cases that the engine's tests share: masks, and how one rank runs one of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from lightning_cp.attn.accumulators import GradAccumulator, OutputAccumulator, TensorRegion
from lightning_cp.attn.blockwise.function import BlockwiseCall
from lightning_cp.attn.blockwise.kernels.base import BackwardInputs, Kernel, Request, Scores
from lightning_cp.attn.blockwise.kernels.cpu import CpuKernel
from lightning_cp.attn.blockwise.kernels.cudnn import CudnnKernel
from lightning_cp.attn.blockwise.kernels.flash import FlashKernel
from lightning_cp.attn.blockwise.kernels.reference import ReferenceKernel
from lightning_cp.attn.call import AlibiSlopes, Bias, ScoreBias
from lightning_cp.attn.mask_blocks import Block
from lightning_cp.attn.plan import build_plan
from lightning_cp.attn.ulysses import UlyssesCall, build_swap
from lightning_cp.comm.transport import LoneTransport, Transport
from lightning_cp.config import GradientWire
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range
from tests.oracle import Inputs, make_inputs, put_back
from tests.ranks import ThreadTransport

_ALL: tuple[Kernel, ...] = (CpuKernel(), CudnnKernel(), FlashKernel(), ReferenceKernel())
ALL_KERNELS = {kernel.name: kernel for kernel in _ALL}
_ON_CPU = Request(torch.device("cpu"), torch.float64, Scores(1.0), head_dim=8)
KERNELS = {name: k for name, k in ALL_KERNELS.items() if k.unsupported_reason(_ON_CPU) is None}


def say_again(*modules: ModuleType) -> None:
    """Forget what modules compute or say once, so that they say it again."""
    for module in modules:
        for value in vars(module).values():
            getattr(value, "cache_clear", lambda: None)()


def documents(batch: int, length: int) -> Tensor:
    """Return documents that differ by row: long and short ones, of one token, at every border."""
    rows = []
    for row in range(batch):
        sizes = [[7, 1, 1, 13, 2, 9], [1, 5, 16, 3, 1, 8]][row % 2]
        ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        reps = -(-length // len(ids))
        ids = torch.cat([ids + 10 * r for r in range(reps)])[:length]
        rows.append(ids)
    return torch.stack(rows)


def ends(batch: int, length: int, *, left: bool) -> Tensor:
    """Return padding of another width in each row, at one end."""
    width = torch.tensor([length // 3, 2 * length // 3] * batch)[:batch, None]
    position = torch.arange(length)[None]
    return position < width if left else position >= length - width


def _prefix(batch: int, length: int) -> Tensor:
    """Return a prefix and a later span, of other lengths in each row."""
    position = torch.arange(length)[None]
    prefix = torch.tensor([length // 4, length // 2] * batch)[:batch, None]
    later = (position >= 3 * length // 4) & (position < 3 * length // 4 + 5)
    return torch.where(position < prefix, 0, torch.where(later, 1, -1))


MASKS: dict[str, Callable[[int, int], Mask]] = {
    "causal": lambda b, s: Mask(causal=True),
    "bidirectional": lambda b, s: Mask(),
    "window": lambda b, s: Mask(causal=True, window=6),
    "chunk": lambda b, s: Mask(causal=True, chunk=10),
    "documents": lambda b, s: Mask(causal=True, documents=documents(b, s)),
    "documents+window": lambda b, s: Mask(causal=True, window=4, documents=documents(b, s)),
    "prefix": lambda b, s: Mask(causal=True, spans=_prefix(b, s)),
    "left padding": lambda b, s: Mask(causal=True, padding=ends(b, s, left=True)),
    "right padding": lambda b, s: Mask(causal=True, padding=ends(b, s, left=False)),
}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


@dataclass
class Case:
    """One attention call over several ranks."""

    mask: Mask
    inputs: Inputs
    algorithm: str = "gather"
    layout: str | Layout = "zigzag"
    kernel: str = "cpu"
    softcap: float | None = None
    scale: float | None = None
    bias: Tensor | None = None
    ulysses: int = 1
    groups: tuple[int, int] | None = None  # of heads, forward and backward
    gradient_wire: GradientWire = "float32"
    _layouts: dict[tuple[object, ...], tuple[Mask, Layout]] = field(
        default_factory=dict, repr=False
    )

    @property
    def whole_bias(self) -> Tensor | None:
        """The bias written out: slopes are for a row's every pair."""
        if self.bias is None or self.bias.dim() > 1:
            return self.bias
        place = torch.arange(self.inputs.q.shape[2])
        return -self.bias[None, :, None, None] * (place[:, None] - place).abs()

    def build_layout(self, cp_size: int) -> Layout:
        if isinstance(self.layout, Layout):
            return self.layout
        # Ranks that are threads share the case: each of them asks, some of them twice.
        length = self.inputs.q.shape[2]
        key = self.layout, cp_size, length, id(self.mask)
        if key not in self._layouts:
            layout = build_layout(
                self.layout,
                seq_len=length,
                cp_size=cp_size,
                bounds=lambda: self.mask.bounds(length),
            )
            self._layouts[key] = self.mask, layout  # a mask that is held keeps its id
        return self._layouts[key][1]


def make_case(mask: str, *, heads: str = "gqa", length: int = 37, **kwargs: object) -> Case:
    """Build a case by the names of its mask and of its heads."""
    inputs = make_inputs(
        batch=2, heads=HEADS[heads], length=length, dims=(8, 6), sinks=heads == "gqa", seed=7
    )
    return Case(MASKS[mask](2, length), inputs, **kwargs)  # type: ignore[arg-type]


def build_call(case: Case, transport: Transport) -> BlockwiseCall:
    """Build the engine's call for this rank; neighbours that swap heads count as one rank."""
    inputs, layout = case.inputs, case.build_layout(transport.size)
    return _build_call(case, transport, layout, transport.rank, inputs.k.shape[1])


def _build_call(
    case: Case, transport: Transport, layout: Layout, rank: int, num_kv_heads: int
) -> BlockwiseCall:
    inputs = case.inputs
    bounds = case.mask.bounds(layout.seq_len, padded_len=layout.padded_len)
    forward, backward = case.groups or ((1, 2) if case.algorithm == "ring" else (2, 2))
    plan = build_plan(
        case.algorithm,
        layout=layout,
        bounds=bounds,
        rank=rank,
        num_kv_heads=num_kv_heads,
        num_groups=forward,
        num_backward_groups=backward,
    )
    scale = inputs.q.shape[-1] ** -0.5 if case.scale is None else case.scale
    scores = Scores(scale, case.softcap)
    wire = case.gradient_wire
    return BlockwiseCall(plan, transport, ALL_KERNELS[case.kernel], scores, gradient_wire=wire)


def build_swapped_call(case: Case, transport: ThreadTransport) -> UlyssesCall:
    """Build the call of this rank and its neighbours."""
    rank, size = transport.rank, case.ulysses
    swap = build_swap(
        case.build_layout(transport.size),
        rank=rank,
        size=size,
        num_heads=case.inputs.q.shape[1],
        num_key_heads=case.inputs.k.shape[1],
    )
    start = rank - rank % size
    if size == transport.size:
        inside, between = transport, LoneTransport()
    else:
        inside = transport.part(range(start, start + size))
        between = transport.part(range(rank % size, transport.size, size))
    num_keys = max(1, swap.num_local_keys(inside.rank))
    return UlyssesCall(swap, inside, _build_call(case, between, swap.layout, swap.rank, num_keys))


def forward_block(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    block: Block,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a block, its parts put together."""
    output = OutputAccumulator(q, v.shape[-1])
    for part in kernel.forward(q, k, v, typed(bias), block, scores):
        output.add(_place(part.batch, part.q_slice, q), (part.out, part.lse))
    return output.result()


def typed(bias: Tensor | None) -> ScoreBias | None:
    """Return a bias of the engine; a vector holds slopes."""
    if bias is None:
        return None
    return AlibiSlopes(bias) if bias.dim() == 1 else Bias(bias)


def backward_block(
    kernel: Kernel, given: BackwardInputs, bias: Tensor | None, block: Block, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv of a block, its parts put together."""
    sums = [GradAccumulator(x) for x in (given.q, given.k, given.v)]
    for part in kernel.backward(given, typed(bias), block, scores):
        for total, tokens, found in zip(
            sums, (part.q_slice, part.k_slice, part.k_slice), part[3:], strict=True
        ):
            total.add(_place(part.batch, tokens, given.q), found)
    dq, dk, dv = (total.result() for total in sums)
    return dq, dk, dv


def _place(batch: slice, tokens: slice, like: Tensor) -> TensorRegion:
    return TensorRegion(Range(*batch.indices(like.shape[0])[:2]), Range(tokens.start, tokens.stop))


def attend_rank(transport: Transport, case: Case) -> dict[str, Tensor]:
    """Run a case on one rank: its part of out, dq, dk, dv, and its share of dsinks."""
    inputs, layout = case.inputs.on(transport.device), case.build_layout(transport.size)
    build = build_swapped_call if case.ulysses > 1 else build_call
    call = build(case, transport)

    def cut(x: Tensor) -> Tensor:
        return shard(x, 2, layout=layout, rank=transport.rank)

    leaves = [cut(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    bias = None if case.bias is None else _local_bias(case.bias, layout, transport)
    out = call.run(*leaves, sinks, typed(bias))
    names = ["dq", "dk", "dv"] if sinks is None else ["dq", "dk", "dv", "dsinks"]
    wanted = leaves if sinks is None else [*leaves, sinks]
    grads = torch.autograd.grad(out, wanted, cut(inputs.dout))
    named = {"out": out.detach(), **dict(zip(names, grads, strict=True))}
    return {name: x.cpu() for name, x in named.items()}


def _local_bias(bias: Tensor, layout: Layout, transport: Transport) -> Tensor:
    """Return the rows of a whole bias that belong to this rank's queries; slopes as they are."""
    if bias.dim() == 1 or bias.shape[2] == 1:
        return bias.to(transport.device)
    mine = shard(bias, 2, layout=layout, rank=transport.rank)
    return mine.to(transport.device)


def put_together(parts: list[dict[str, Tensor]], case: Case) -> dict[str, Tensor]:
    """Return whole rows from all ranks' parts; what each rank has a share of is summed."""
    order = case.build_layout(len(parts)).order
    return {
        name: sum(part[name] for part in parts)  # type: ignore[misc]
        if name == "dsinks"
        else put_back([part[name] for part in parts], order, 2)
        for name in parts[0]
    }
