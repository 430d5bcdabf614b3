"""`attention()` by FlexAttention over several ranks: only the keys that are needed travel."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from lightning_cp.attn import accumulators, kv_exchange
from lightning_cp.attn.accumulators import NEVER
from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.call import AlibiSlopes
from lightning_cp.attn.choose import count_flex_groups
from lightning_cp.attn.flex import block_mask, from_mask, remote_kv
from lightning_cp.attn.flex import kernel as kernel
from lightning_cp.attn.flex.from_mask import build_flex_call, longest_key_buffer
from lightning_cp.attn.plan import QueryShard
from lightning_cp.attn.ulysses import UlyssesCall, build_swap
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.shard import pad_end, shard
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.geometry.ranges import Range
from tests import torch_names
from tests.attn import cases
from tests.attn.cases import MASKS, make_case
from tests.attn.flex.cases import states
from tests.oracle import Inputs, assert_earned, attend_whole, errors, put_back
from tests.ranks import run_threads

LAYOUTS = ("zigzag", "contiguous", "balanced")


def plain_torch():
    """Return whether functions run in plain torch, as always on a CPU."""
    return True


def build_call(case, transport, split=False):
    """Build this rank's call; neighbours that swap heads count as one rank."""
    inputs, layout = case.inputs, case.build_layout(transport.size)
    heads = inputs.q.shape[1], inputs.k.shape[1]
    place, swap, inside = QueryShard(layout, transport.rank), None, None
    if case.ulysses > 1:
        rank, size = transport.rank, case.ulysses
        swap = build_swap(layout, rank=rank, size=size, num_heads=heads[0], num_key_heads=heads[1])
        start = rank - rank % size
        inside = transport.part(range(start, start + size))
        transport = transport.part(range(rank % size, transport.size, size))
        heads = swap.query_heads[inside.rank].size, swap.num_local_keys(inside.rank)
        place = QueryShard(swap.layout, swap.rank, swap.query_heads[inside.rank].start)
    bounds = case.mask.bounds(layout.seq_len, padded_len=layout.padded_len)
    scale = inputs.q.shape[-1] ** -0.5 if case.scale is None else case.scale
    is_plain = plain_torch()
    buffer_len = None if is_plain else longest_key_buffer(place.layout, bounds, plain=False)
    call = build_flex_call(
        bounds,
        Scores(scale, case.softcap),
        place,
        transport,
        batch=inputs.q.shape[0],
        device=inputs.q.device,
        num_kv_heads=heads[1],
        num_groups=heads[1] if split else 1,
        buffer_len=buffer_len,
        plain=is_plain,
        gradient_wire=case.gradient_wire,
    )
    return call, (None if swap is None else UlyssesCall(swap, inside, call))


def row_rank(transport, case, split=False):
    """Return a rank's part of out and gradients, its key buffer's length, and its groups."""
    inputs, layout = case.inputs, case.build_layout(transport.size)

    def cut(x):
        return shard(x, 2, layout=layout, rank=transport.rank)

    call, swapped = build_call(case, transport, split)
    leaves = [cut(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if inputs.sinks is not None:
        leaves.append(inputs.sinks.clone().requires_grad_())
    bias = case.bias
    if bias is not None and bias.dim() > 1 and bias.shape[2] > 1:
        bias = cut(bias)
    sinks = None if inputs.sinks is None else leaves[3]

    out = (swapped or call).run(*leaves[:3], sinks, cases.typed(bias))
    grads = torch.autograd.grad(out, leaves, cut(inputs.dout))
    names = ("dq", "dk", "dv", "dsinks")
    found = {"out": out.detach(), **dict(zip(names, grads, strict=False))}
    return found, call.keys, len(call.stages), transport.numbers_sent


def run_row(case, cp_size, split=False):
    results = run_threads(cp_size, row_rank, case, split)
    parts, order = [found for found, *_ in results], case.build_layout(cp_size).order
    whole = {
        name: sum(part[name] for part in parts)
        if name == "dsinks"
        else put_back([part[name] for part in parts], order, 2)
        for name in parts[0]
    }
    return whole, results


def exact(case, dtype=torch.float64):
    return attend_whole(
        case.inputs.to(dtype),
        case.mask,
        scale=case.scale,
        softcap=case.softcap,
        bias=case.whole_bias,
    )


def worst_error(case, cp_size, split=False):
    return max(errors(run_row(case, cp_size, split)[0], exact(case)).values())


SLOPES = torch.tensor([0.0, 0.3, 0.1, 0.7], dtype=torch.float64)


def numbers(heads=1):
    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(2, heads, 37, 37, generator=generator, dtype=torch.float64)
    bias[:, :, :, 5] = float("-inf")
    return bias


@pytest.mark.parametrize("cp_size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("mask", MASKS)
def test_out_and_gradients_are_those_of_one_device(mask, cp_size):
    """Each mask with softcap, slopes, a bias, sinks, in one of the layouts each."""
    added = [{"softcap": 2.0}, {"bias": SLOPES}, {"bias": numbers(4)}, {"heads": "mha"}]
    layouts = itertools.cycle(LAYOUTS)
    for _ in range(list(MASKS).index(mask) + cp_size):
        next(layouts)
    for options, layout in zip(added, layouts, strict=False):
        case = make_case(mask, **{"layout": layout, **options})
        assert worst_error(case, cp_size) < 1e-10, (options, layout)


@pytest.mark.parametrize("wire", ["float32", "model"])
def test_gradients_on_any_wire_earn_their_tolerance(wire):
    case = make_case("causal", length=101, gradient_wire=wire)
    assert worst_error(case, 4) < 1e-10  # float64 is never lowered
    case.inputs = case.inputs.to(torch.bfloat16)
    found, same, truth = run_row(case, 4)[0], exact(case, torch.bfloat16), exact(case)
    ours, theirs = errors(found, truth), errors(same, truth)
    for name in ("dk", "dv"):
        assert ours[name] <= 3 * theirs[name] + 4 * torch.finfo(torch.bfloat16).eps, name


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 5])
def test_all_masks_heads_and_layouts_go_together(cp_size):
    choices = itertools.product(MASKS, LAYOUTS, cases.HEADS)
    added = itertools.cycle([None, SLOPES, numbers(), None])
    for (mask, layout, heads), bias in zip(choices, added, strict=False):
        case = make_case(mask, layout=layout, heads=heads, bias=bias, softcap=3.0)
        assert worst_error(case, cp_size) < 1e-10, (layout, heads)
        assert worst_error(case, cp_size, split=True) < 1e-10, (layout, heads)


@pytest.mark.parametrize("heads", cases.HEADS)
def test_groups_of_heads_are_brought_one_after_the_other(heads):
    """One head at a time, where there is no room for two; slopes, biases and sinks are theirs."""
    for bias in (None, SLOPES, numbers(4), numbers(1)):
        case = make_case("documents+window", heads=heads, bias=bias, softcap=2.0)
        whole, results = run_row(case, 3, split=True)
        assert [groups for _, _, groups, _ in results] == [case.inputs.k.shape[1]] * 3
        assert max(errors(whole, exact(case)).values()) < 1e-10


@pytest.mark.parametrize(
    ("num_heads", "num_bytes", "groups"),
    [(8, 100, 1), (8, 101, 2), (8, 200, 2), (8, 201, 4), (8, 900, 8), (6, 150, 2), (7, 120, 7)],
)
def test_groups_are_as_few_as_the_budget_allows_and_of_one_size(num_heads, num_bytes, groups):
    assert count_flex_groups(num_heads, num_bytes, budget=800) == groups


def test_neighbours_swap_heads_and_needed_keys_travel_between_them():
    for mask, layout in itertools.product(["documents+window", "prefix"], LAYOUTS):
        for bias in (None, SLOPES):
            case = make_case(mask, layout=layout, ulysses=2, bias=bias)
            assert worst_error(case, 4) < 1e-10, (mask, layout)


@pytest.mark.parametrize(
    "length", [1, 5, *(pytest.param(length, marks=pytest.mark.slow) for length in (2, 3, 9))]
)
def test_ranks_that_hold_only_padding_take_part(length):
    for layout, mask in itertools.product(["zigzag", "contiguous"], ["causal", "documents"]):
        for bias in (None, SLOPES, numbers()[..., :length, :length]):
            case = make_case(mask, length=length, layout=layout, bias=bias)
            assert worst_error(case, 4) < 1e-10, (layout, mask)


def test_a_rank_whose_queries_see_nothing_takes_part():
    """Rows padded from the left by more than a rank holds: nobody needs its keys."""
    padding = torch.arange(36).expand(2, -1) < torch.tensor([[30], [25]])
    for layout in ("contiguous", "zigzag"):
        case = make_case("causal", length=36, layout=layout)
        case.mask = Mask(causal=True, padding=padding)
        whole, results = run_row(case, 3)
        assert max(errors(whole, exact(case)).values()) < 1e-10
        needed = [len(keys.positions) for _, keys, *_ in results]
        assert max(needed) <= 12


def test_any_ownership_is_exact():
    """Shards that are not in the order of the row: keys of whole rows travel."""
    blocks = [Range(i * 4, (i + 1) * 4) for i in range(9)]
    random.Random(5).shuffle(blocks)
    layout = Layout("by hand", 34, tuple(tuple(blocks[r::3]) for r in range(3)))
    for bias in (None, SLOPES):
        case = make_case("documents", length=34, layout=layout, bias=bias)
        assert worst_error(case, 3) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precisions_earn_their_tolerance(dtype):
    for mask in ("documents", "window"):
        case = make_case(mask, length=101)
        case.inputs = case.inputs.to(dtype)
        found, _ = run_row(case, 4)
        assert_earned(found, exact(case, dtype), exact(case), dtype)


def test_only_what_is_needed_travels():
    case = make_case("window", length=96, layout="contiguous", heads="mha")
    _, results = run_row(case, 4)
    # Its own 24 and the 5 before them.
    assert [len(keys.positions) for _, keys, *_ in results] == [24, 29, 29, 29]
    assert [keys.buffer_len for _, keys, *_ in results] == [24, 29, 29, 29]
    # Forward 5 keys and values, and their gradients back, from either end: 2 rows, 4 heads, 8 + 6.
    assert [sent for *_, sent in results] == [5 * 2 * 4 * 14 * n for n in (1, 2, 2, 1)]


def test_keys_of_a_zigzag_lie_end_to_end():
    case = make_case("window", length=48, layout="zigzag")
    _, results = run_row(case, 2)
    assert results[0][1].positions.tolist() == [*range(12), *range(31, 48)]
    assert results[1][1].positions.tolist() == [*range(7, 36)]


@pytest.mark.parametrize("cp_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_keys_lie_in_blocks_as_in_the_row(monkeypatch, cp_size):
    """A block of queries meets no more blocks of keys than in the row; gaps are seen by nobody."""
    # A row of blocks of 128 would be long.
    monkeypatch.setattr(from_mask, "block_size", lambda *, plain: 4)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)
    num_gaps = 0
    biases = [None, SLOPES, numbers()]
    for (m, mask), (n, layout) in itertools.product(enumerate(MASKS), enumerate(LAYOUTS)):
        case = make_case(mask, layout=layout, bias=biases[(m + n) % 3])
        whole, results = run_row(case, cp_size)
        assert max(errors(whole, exact(case)).values()) < 1e-10, (mask, layout)
        for _, keys, *_ in results:
            places = torch.arange(len(keys.positions))
            filled = torch.ones(len(places), dtype=torch.bool)
            for gap in keys.gaps:
                filled[slice(*gap)] = False
            positions = torch.from_numpy(keys.positions)
            off = (positions - places)[filled]
            assert not keys.gaps or not (off % 4).any(), (mask, layout)
            assert (positions.diff() >= 0).all()
            num_gaps += len(keys.gaps)
    assert num_gaps > 10


def new_nan(x, *size, **options):
    """Make memory that nobody has written noticed."""
    size = size[0] if isinstance(size[0], (tuple, list)) else size
    return torch.full(size, float("nan"), dtype=options.get("dtype") or x.dtype)


def test_what_comes_back_is_added_to_those_tokens_alone(monkeypatch):
    """No accumulator of a shard, where each token has been sent once: only memory shows it."""
    kept = []
    monkeypatch.setattr(
        accumulators.PartialSums, "accumulate_parts", lambda self: kept.append(self) or 1 / 0
    )
    for layout in LAYOUTS:
        case = make_case("window", length=96, layout=layout)
        assert worst_error(case, 3) < 1e-10
    assert not kept


def buffer_len(num_needed, row_len, cp_size):
    layout = build_layout("contiguous", seq_len=row_len, cp_size=cp_size)
    return from_mask.padded_buffer_len(num_needed, layout, plain=False)


def test_buffers_of_fused_kernels_have_few_lengths():
    k = 1024
    ladder = [32 * k, 48 * k, 64 * k, 96 * k, 128 * k, 192 * k, 256 * k]
    assert sorted({buffer_len(n, 256 * k, 8) for n in range(0, 256 * k + 1, 999)}) == ladder
    for length in ladder:
        assert buffer_len(length, 256 * k, 8) == length
        assert buffer_len(length - 1, 256 * k, 8) == length
    assert buffer_len(1, 256 * k, 2) == 128 * k  # never less than a rank holds
    assert buffer_len(1, 64 * k - 1, 8) == 64 * k  # little to win
    assert {buffer_len(n, 128 * k, 8) for n in range(0, 128 * k + 1, 999)} == {32 * k, 128 * k}
    assert {buffer_len(n, 70_000, 8) for n in range(0, 70_001, 999)} == {24 * k, 96 * k}
    odd = {buffer_len(n, 200_001, 3) for n in range(0, 200_002, 7)}
    assert sorted(odd) == [82944, 110592, 165888, 221184]  # of three shards of 73728


def test_lengths_of_queries_and_buffers_are_few():
    """Powers of two for short shards, two sizes up to 16,384, eight per doubling of longer ones."""
    sizes = {block_mask.round_up(length) for length in range(1, 2**17 + 1)}
    assert {size for size in sizes if size <= 16384} == {2**n for n in range(9, 15)} | {12288}
    for power in range(14, 17):
        assert sum(2**power < size <= 2 ** (power + 1) for size in sizes) == 8
    for length in range(1, 2**17 + 1, 7):
        size = block_mask.round_up(length)
        most = 2 if length <= 8192 else 1.5 if length <= 16384 else 1.125
        assert length <= size <= max(512, length * most)
        assert block_mask.round_up(size) == size
    for cp_size in (2, 3, 8):
        pairs = set()
        for seq_len in range(70_000, 140_000, 277):
            layout = build_layout("zigzag", seq_len=seq_len, cp_size=cp_size)
            queries = block_mask.round_up(layout.local_len)
            for needed in (1, seq_len // 3, seq_len // 2, seq_len, layout.padded_len):
                length = from_mask.padded_buffer_len(needed, layout, plain=False)
                assert length >= max(needed, layout.local_len)
                pairs.add((queries, length))
        assert len(pairs) <= 5 * len({queries for queries, _ in pairs})


@pytest.fixture
def counter(monkeypatch):
    """Let the road of fused kernels run on a CPU, and count what is compiled."""
    backend = torch_names.counting_backend("aot_eager")
    torch.compiler.reset()
    torch_names.train_flex_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel, "BACKEND", backend)
    monkeypatch.setitem(globals(), "plain_torch", lambda: False)
    monkeypatch.setattr(from_mask, "SHORT_SEQUENCE", 0)
    yield backend
    torch.compiler.reset()


class Replay:
    """A transport of one rank, which is told what the others send: zeros."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def exchange(self, sends, receives):
        for _, x in receives:
            x.zero_()
        return lambda: None

    def all_gather(self, out, x):
        out.zero_()
        return lambda: None

    def reduce_scatter(self, out, x):
        out.zero_()
        return lambda: None


def draw_documents(seed, length):
    starts = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < 0.005
    return Mask(causal=True, documents=starts.cumsum(1))


@pytest.mark.slow
@pytest.mark.parametrize(("is_short", "num_masks"), [(True, 1), (False, 4)])
def test_other_documents_are_not_compiled_again(counter, monkeypatch, is_short, num_masks):
    """As many graphs as rungs of the ladder; short rows have one, also if nothing travels."""
    monkeypatch.setattr(from_mask, "SHORT_SEQUENCE", 65536 if is_short else 0)
    lengths, needs = set(), set()
    case = make_case("causal", length=1024, heads="mqa")
    layout = case.layout = build_layout("contiguous", seq_len=1024, cp_size=4)
    alone = Mask(causal=True, documents=torch.arange(1024) // 128)
    for mask in [alone, *(draw_documents(seed, 1024) for seed in range(num_masks))]:
        case.mask, inputs = mask, case.inputs
        call, _ = build_call(case, Replay(3, 4))
        assert call.stages[0].has_no_peers == (mask is alone)
        leaves = [
            shard(x, 2, layout=layout, rank=3).requires_grad_()
            for x in (inputs.q, inputs.k, inputs.v)
        ]
        call.run(*leaves, None, None).sum().backward()
        lengths.add(call.keys.buffer_len)
        needs.add(len(call.keys.positions))
    assert len(needs) >= num_masks
    assert lengths <= ({2048} if is_short else {384, 512, 768, 1024, 1536, 2048})
    assert counter.frame_count == len(lengths)


def test_a_parcel_that_is_the_buffer_is_padded_to_its_length(counter):
    """Queries that are padding see keys of the first rank, and none of their own."""
    case = make_case("causal", length=1024, heads="mqa", layout="contiguous")
    case.mask = Mask(causal=True, padding=torch.arange(1024) >= 200)
    call, _ = build_call(case, Replay(3, 4))
    assert call.stages[0].is_one_parcel
    assert (len(call.keys.positions), call.keys.buffer_len) == (200, 384)
    layout, inputs = case.build_layout(4), case.inputs
    q, k, v = (
        shard(x, 2, layout=layout, rank=3).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)
    )
    out = call.run(q, k, v, None, None)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out.any()  # the values that came are 0
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("added", [{}, {"bias": SLOPES}], ids=["plain", "slopes"])
@pytest.mark.slow
def test_the_fused_road_is_exact(counter, monkeypatch, added, dtype):
    """Ranks in turn, with the keys that a stage would bring; groups of one key head."""
    case = make_case("documents+window", length=520, layout="zigzag", softcap=2.0, **added)
    case.inputs = case.inputs.to(dtype)
    case.bias = None if case.bias is None else case.bias.to(dtype)
    layout, inputs = case.build_layout(2), case.inputs
    monkeypatch.setattr(remote_kv, "fetch", lambda *_, buffer_len: lambda: brought(buffer_len))
    plain, outs, grads, sink_grads = [], [], [], []
    for rank in range(2):
        call, _ = build_call(case, Replay(rank, 2), split=True)
        assert len(call.stages) == 2
        assert call.query_len == 512 > layout.local_len
        assert len(call.keys.positions) < call.keys.buffer_len < 2 * call.query_len
        places = torch.from_numpy(call.keys.positions)
        heads = itertools.cycle([0, 1])

        def brought(buffer_len, places=places, heads=heads):
            group = slice(at := next(heads), at + 1)
            found = (x[:, group, places] for x in (inputs.k, inputs.v))
            short = buffer_len - len(places)
            return kv_exchange.KeyValues(*(pad_end(x, 2, short) for x in found))

        q, k, v = (shard(x, 2, layout=layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v))
        plain.append(call.run(q, k, v, None, cases.typed(case.bias)))
        q, sinks = q.requires_grad_(), inputs.sinks.clone().requires_grad_()
        outs.append(call.run(q, k, v, sinks, cases.typed(case.bias)))
        dout = shard(inputs.dout, 2, layout=layout, rank=rank)
        dq, dsinks = torch.autograd.grad(outs[-1], (q, sinks), dout)
        grads.append(dq)
        sink_grads.append(dsinks)
    parts = {"out": [out.detach() for out in outs], "dq": grads}
    found = {name: put_back(part, layout.order, 2) for name, part in parts.items()}
    found["dsinks"] = sum(sink_grads)
    truth = exact(case)
    if dtype == torch.float64:
        case.inputs = replace(inputs, sinks=None)
        assert float((put_back(plain, layout.order, 2) - exact(case)["out"]).abs().max()) < 1e-10
    # torch keeps lse in float32 where gradients are wanted.
    assert max(errors(found, {name: truth[name] for name in found}).values()) < 2e-6


def bias_of(kind, length):
    if kind == "numbers":
        generator = torch.Generator().manual_seed(2)
        return torch.randn(2, 1, length, length, generator=generator, dtype=torch.float64)
    return SLOPES if kind == "slopes" else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "kind", "sinks", "buffer_len"),
    [
        (513, "slopes", True, 768),
        pytest.param(127, "slopes", True, 384, marks=pytest.mark.slow),
        pytest.param(512, "none", False, 512, marks=pytest.mark.slow),
        pytest.param(127, "numbers", False, 384, marks=pytest.mark.slow),
        pytest.param(513, "numbers", True, 768, marks=pytest.mark.slow),
    ],
)
def test_padding_of_queries_and_keys_changes_nothing(counter, length, kind, sinks, buffer_len):
    """Lengths next to the edges of blocks and of lengths that kernels are compiled for."""
    case = make_case("documents+window", length=length, softcap=2.0, bias=bias_of(kind, length))
    case.inputs = replace(case.inputs, sinks=case.inputs.sinks if sinks else None)
    case.layout = build_layout("contiguous", seq_len=length, cp_size=1)
    found, call, *_ = row_rank(LoneRank(), case)
    assert call.buffer_len == buffer_len
    truth = exact(case)
    # torch keeps lse in float32 where gradients are wanted.
    assert max(errors(found, {name: truth[name] for name in found}).values()) < 2e-6


class LoneRank(LoneTransport):
    numbers_sent = 0


@pytest.mark.parametrize("num_lengths", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_length_that_was_never_seen_is_not_compiled_again(counter, num_lengths):
    """Forward and backward: as many graphs as rounded lengths."""
    rounded = set()
    generator = torch.Generator().manual_seed(0)
    for turn in range(num_lengths):
        length = 700 + 53 * turn
        case = make_case("causal", length=length, heads="mqa")
        case.mask = [Mask(causal=True, window=100 + turn), draw_documents(turn, length)][turn % 2]
        layout = case.layout = build_layout("zigzag", seq_len=length, cp_size=2)
        call, _ = build_call(case, Replay(turn % 2, 2))
        leaves = [
            torch.randn(2, layout.local_len, heads, 16, generator=generator).transpose(1, 2)
            for heads in (4, 1, 1)
        ]
        out = call.run(*(x.requires_grad_() for x in leaves), None, None)
        assert out.shape == leaves[0].shape
        assert out.transpose(1, 2)[0].is_contiguous()  # as the model needs it
        out.sum().backward()
        rounded.add((call.query_len, call.keys.buffer_len))
    assert counter.frame_count == len(rounded) <= num_lengths // 2 + 1


def test_blocks_of_a_trimmed_mask_are_those_of_its_pairs(counter):
    """Full blocks are full, empty ones are empty, in places of the buffer."""
    for name, (layout_name, rank) in itertools.product(
        ["window", "documents", "prefix", "left padding"], [("zigzag", 0), ("contiguous", 2)]
    ):
        case = make_case(name, length=1500, layout=layout_name)
        call, _ = build_call(case, Replay(rank, 3))
        lengths = call.query_len, call.keys.buffer_len
        table = call.functions.build_block_mask()
        pairs = states(
            torch_flex.create_block_mask(call.functions.mask_mod, 2, 1, *lengths, device="cpu")
        )
        found = states(table)
        assert table.seq_lengths == lengths
        assert torch.equal(found == 2, pairs == 2)
        assert not ((found == 0) & (pairs > 0)).any()


def test_padding_is_looked_up_only_where_it_lies_between_keys():
    hole = torch.zeros(2, 37).bool()
    hole[1, 20] = True
    codes = []
    for padding in (cases.ends(2, 37, left=True), cases.ends(2, 37, left=False), False, hole):
        case = make_case("causal")
        case.mask = Mask(causal=True, padding=padding)
        assert worst_error(case, 2) < 1e-10
        call, _ = build_call(case, Replay(1, 2))
        codes.append(call.functions.mask_mod.__name__)
        assert call.functions.kind[0] is call.functions.mask_mod.__code__
    assert codes == ["mask_mod"] * 3 + ["mask_mod_of_real"]


def test_functions_of_another_kind_are_told_apart():
    case = make_case("window")
    call, _ = build_call(case, Replay(1, 2))
    shape = (2, 4, call.query_len, 37)
    added = call.functions, AlibiSlopes(SLOPES), shape, call.query_shard
    slopes = block_mask.add_bias(*added, call.keys, fused=False)
    whole = block_mask.add_bias(*added, block_mask.all_keys(call.query_shard.layout), fused=False)
    assert len({call.functions.kind, slopes.kind, whole.kind}) == 3


def test_sinks_are_differentiated_exactly():
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    lse = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64) * 3
    sinks = torch.tensor([-2.0, 0.5, 24.0], dtype=torch.float64)
    args = [x.requires_grad_() for x in (out, lse, sinks)]
    assert torch.autograd.gradcheck(accumulators.with_sinks, args)
    with torch.no_grad():
        weight = lse.exp() / (lse.exp() + sinks[:, None].exp())
        torch.testing.assert_close(
            accumulators.with_sinks(*args), out * weight[..., None], rtol=1e-14, atol=0
        )


def test_a_query_without_keys_and_sink_is_zero():
    out, lse = torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), NEVER)
    sinks = torch.tensor([NEVER, 0.5], requires_grad=True)
    shared = accumulators.with_sinks(out, lse, sinks)
    shared.sum().backward()
    assert torch.equal(shared, out)
    assert torch.equal(sinks.grad, torch.zeros(2))


def test_small_sinks_keep_their_gradient_in_float32():
    """1 - sigmoid would be rounding; blind queries have no share, and no NaN."""
    lse = torch.tensor([[[5.0, 30.0, float("-inf")]]])
    out, sinks = torch.tensor([1.0, 1.0, 0.0])[None, None, :, None], torch.tensor([-10.0])
    args = [x.requires_grad_() for x in (out, lse, sinks)]
    dout, dlse, dsinks = torch.autograd.grad(accumulators.with_sinks(*args).sum(), args)
    assert torch.isfinite(torch.cat([dout.flatten(), dlse.flatten(), dsinks])).all()
    share = torch.tensor(-15.0, dtype=torch.float64).exp()
    assert abs(float(dlse[0, 0, 0]) / float(share / (1 + share)) - 1) < 1e-5
    assert dlse[0, 0, 2] == 0


@pytest.mark.parametrize("with_sinks", [True, False])
def test_second_derivatives_are_refused(with_sinks):
    def run(transport):
        case = make_case("window")
        call, _ = build_call(case, transport)
        layout = case.build_layout(2)
        q, k, v = (
            shard(x, 2, layout=layout, rank=transport.rank).requires_grad_()
            for x in (case.inputs.q, case.inputs.k, case.inputs.v)
        )
        out = call.run(q, k, v, case.inputs.sinks if with_sinks else None, None)
        (grad,) = torch.autograd.grad(out.sum(), k, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match="no second derivative.*without create_graph"):
        run_threads(2, run)


# A test that cannot fail proves nothing: each of these breaks one thing, and parity must notice.


def broken(monkeypatch, case, cp_size=3):
    error = worst_error(case, cp_size)
    monkeypatch.undo()
    assert worst_error(case, cp_size) < 1e-10
    return error


def test_parity_notices_distances_in_the_buffer(monkeypatch):
    monkeypatch.setattr(block_mask.BufferedKeys, "is_prefix", True)
    assert broken(monkeypatch, make_case("window", bias=SLOPES)) > 1e-3


def test_parity_notices_gradients_that_are_not_given_back(monkeypatch):
    monkeypatch.setattr(remote_kv, "scatter_grads", lambda *_: lambda: None)
    assert broken(monkeypatch, make_case("window")) > 1e-3


def test_parity_notices_slopes_of_other_heads(monkeypatch):
    def first(self, heads, q_slice=None):
        return AlibiSlopes(self.values[: heads.stop - heads.start])

    monkeypatch.setattr(AlibiSlopes, "select", first)
    case = make_case("window", bias=SLOPES)
    assert worst_error(case, 2, split=True) > 1e-3


def test_a_buffer_that_is_not_sorted_is_noticed():
    call, _ = build_call(make_case("window"), LoneTransport())
    layout, keys = call.query_shard.layout, call.keys
    bounds = MASKS["window"](2, layout.seq_len).bounds(layout.seq_len, padded_len=layout.padded_len)
    turned = block_mask.BufferedKeys(keys.positions[::-1], keys.buffer_len, keys.seq_len)
    with pytest.raises(AssertionError, match="the key buffer misses a key, or is not sorted"):
        block_mask.mask_functions(
            bounds,
            Scores(1.0),
            call.query_shard,
            batch=2,
            device=torch.device("cpu"),
            fused=False,
            keys=turned,
        )


def test_one_device_brings_nothing():
    case = make_case("documents")
    call, _ = build_call(case, LoneTransport())
    inputs = case.inputs
    found = call.run(inputs.q, inputs.k, inputs.v, inputs.sinks, None)
    assert isinstance(inputs, Inputs)
    assert float((found - exact(case)["out"]).abs().max()) < 1e-10
