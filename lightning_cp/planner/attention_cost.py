# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer: visible pairs, balance, time, memory and bytes on the wire.

Causal attention is `attn.cost`'s. Windows and packed documents run in FlexAttention, of which the
cost model knows visible pairs only; their keys are those that the layout and the mask need.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Final, NamedTuple

import torch

from lightning_cp.attn.cost import (
    CallSize,
    ExchangeName,
    choose_exchange,
    default_memory_budget,
    estimate,
)
from lightning_cp.attn.hardware import FREE, H200, Links
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range, union
from lightning_cp.planner.setup import Setup
from lightning_cp.planner.shapes import LayerShape

FLEX_RATE: Final = 0.72
"""Speed of FlexAttention as a share of the causal kernels' (docs/cost-model.md)."""

MAX_LAYOUT_LEN: Final = 1 << 16
MAX_LAYOUT_RANKS: Final = 32
"""Longer packed sequences, and more ranks, are laid out scaled down: that takes seconds there."""


class Passes(NamedTuple):
    """A number for each pass: one forward, one backward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer's attention on one rank.

    Args:
        algorithm: ``gather``, ``ring`` or ``flex``.
        time: seconds, with exchanges that are not hidden.
        exposed: of them, those that links without any delay would save.
        wire: bytes that a rank receives.
        memory: peak bytes beyond inputs and output.
        pairs: visible pairs of the mean rank, all samples.
    """

    algorithm: str
    time: Passes
    exposed: Passes
    wire: Passes
    memory: float
    pairs: float


def visible_pairs(seq_len: int, window: int | None = None, documents: tuple[int, ...] = ()) -> int:
    """Return the visible (query, key) pairs of a causal sequence.

    Example:
        >>> visible_pairs(4), visible_pairs(4, window=2), visible_pairs(4, documents=(2,))
        (10, 7, 6)
    """
    total = 0
    for length in document_lengths(seq_len, documents):
        width = min(window or length, length)
        total += width * length - width * (width - 1) // 2
    return total


def document_lengths(seq_len: int, documents: tuple[int, ...]) -> tuple[int, ...]:
    """Repeat the lengths of documents until a sequence is full; the last one is cut.

    Example:
        >>> document_lengths(10, (4, 3))
        (4, 3, 3)
    """
    if not documents:
        return (seq_len,)
    lengths, left = [], seq_len
    for length in cycle(documents):
        lengths.append(min(length, left))
        left -= lengths[-1]
        if not left:
            return tuple(lengths)
    raise AssertionError("cycle() does not end")


def problem_of(layer: LayerShape, setup: Setup) -> CallSize:
    """Return the attention call of a layer, for the cost model."""
    return CallSize(
        seq_len=setup.seq_len,
        cp_size=setup.context_size,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        value_dim=layer.value_dim,
        batch_size=setup.batch_size,
        ulysses_size=setup.ulysses_size,
        wire_itemsize=4 if setup.attention.gradient_wire == "float32" else 2,
    )


@lru_cache(maxsize=512)
def attention_cost(layer: LayerShape, setup: Setup, links: Links) -> AttentionCost:
    """Estimate the attention of a layer."""
    if not layer.num_heads:
        return AttentionCost("none", *(Passes(0, 0),) * 3, 0.0, 0.0)
    is_narrow = layer.window is not None and layer.window < setup.seq_len
    if is_narrow or setup.documents:
        return _flex_cost(layer, setup, links)
    problem = problem_of(layer, setup)
    budget = (
        setup.attention.memory * 2**30
        if setup.attention.memory is not None
        else default_memory_budget(problem, links=links)
    )
    choice = choose_exchange(problem, memory_budget=budget, links=links)
    groups = (choice.num_groups_forward, choice.num_groups_backward)
    passes = estimate(choice.algorithm, problem, groups=groups, links=links)
    free = estimate(choice.algorithm, problem, groups=groups, links=FREE)
    return AttentionCost(
        choice.algorithm,
        Passes(passes.forward.time, passes.backward.time),
        Passes(
            max(0.0, passes.forward.time - free.forward.time),
            max(0.0, passes.backward.time - free.backward.time),
        ),
        wire_bytes(problem, choice.algorithm),
        passes.memory,
        setup.batch_size * setup.seq_len**2 / 2 / setup.context_size,
    )


def wire_bytes(problem: CallSize, algorithm: ExchangeName) -> Passes:
    """Return the bytes that a rank receives in each pass, as `attn.cost` counts them.

    Backward fetches the keys again and returns their gradients: a gather sums them in
    ``wire_itemsize`` bytes, a ring sends them in the precision of the keys.
    """
    inner = problem.between_groups() if problem.ulysses_size > 1 else problem
    share = (inner.cp_size - 1) / inner.cp_size
    keys = inner.key_bytes(inner.local_len * inner.cp_size) * share
    itemsize = inner.wire_itemsize if algorithm == "gather" else inner.itemsize
    grads = keys * itemsize / inner.itemsize
    swapped = 0.0
    if problem.ulysses_size > 1:
        numbers = 2 * problem.query_bytes + problem.key_bytes(problem.local_len)
        swapped = numbers * (problem.ulysses_size - 1) / problem.ulysses_size
    return Passes(keys + swapped, keys + grads + swapped)


class _Spread(NamedTuple):
    """How ranks share a mask: work over the mean, remote keys of the rank that needs most."""

    balance: float
    remote: float


@lru_cache(maxsize=64)
def _spread(seq_len: int, cp_size: int, window: int | None, documents: tuple[int, ...]) -> _Spread:
    """Lay a sequence out as a step does, and count the keys that ranks fetch."""
    if cp_size == 1:
        return _Spread(1.0, 0.0)
    if not documents:  # zigzag: two ranges, each needs the keys of a window before it
        assert window is not None  # noqa: S101  the caller has a window or documents
        local = -(-seq_len // cp_size)
        return _Spread(1.0, min(2.0 * (window - 1), seq_len - local))
    scale = max(1, -(-seq_len // MAX_LAYOUT_LEN))
    short = max(1, seq_len // scale)
    cp_size = min(cp_size, MAX_LAYOUT_RANKS, short)
    lengths = document_lengths(short, tuple(max(1, length // scale) for length in documents))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    bounds = Mask(causal=True, documents=ids[None]).bounds(short)
    layout = build_layout("auto", seq_len=short, cp_size=cp_size, bounds=lambda: bounds)
    narrow = bounds
    if window is not None:
        narrow = Mask(True, max(1, window // scale), documents=ids[None]).bounds(short)
    work = layout.work(narrow)
    needed = []
    for owned in layout.owned:
        parts = [part.meet(Range(0, short)) for part in owned if part.start < short]
        keys = union([*(keys for part in parts for keys in narrow.hull(part)), *parts])
        needed.append(_size(keys) - _size(parts))
    mean = sum(work) / len(work)
    return _Spread(max(work) / mean if mean else 1.0, float(scale * max(needed)))


def _size(ranges: Iterable[Range]) -> int:
    return sum(part.size for part in ranges)


def _flex_cost(layer: LayerShape, setup: Setup, links: Links) -> AttentionCost:
    """Estimate a window or packed documents: the keys needed are gathered, then one kernel runs."""
    problem = problem_of(layer, setup)
    size = setup.context_size
    total = visible_pairs(setup.seq_len, layer.window, setup.documents)
    pairs = setup.batch_size * total / size
    spread = _spread(setup.seq_len, size, layer.window, setup.documents)
    keys = problem.key_bytes(spread.remote)
    wire = Passes(keys, keys + keys * problem.wire_itemsize / problem.itemsize)
    times, waits = [], []
    for speed, sent in ((H200.forward, wire.forward), (H200.backward, wire.backward)):
        flops = speed.flops * pairs * spread.balance * layer.num_heads * problem.mean_dim
        compute = flops / (FLEX_RATE * speed.causal_tflops * 1e12)
        exposed = links.collective(sent, size, 1) if sent else 0.0
        times.append(max(compute, speed.host_us / 1e6) + exposed)
        waits.append(exposed)
    shard = problem.key_bytes(problem.local_len)
    # Backward: gradients of queries and keys, delta in float32, all keys and their float32 sums.
    memory = 2 * problem.query_bytes + shard + 3 * (shard + keys)
    return AttentionCost("flex", Passes(*times), Passes(*waits), wire, memory, pairs)
