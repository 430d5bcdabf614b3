"""FlexAttention over several ranks (threads of this process) against one device."""

import itertools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cp.attn import kv_exchange
from lightning_cp.attn.flex import kernel as kernel
from lightning_cp.attn.flex import mods, remote_kv
from lightning_cp.attn.flex.flex_attention import flex_attend
from lightning_cp.attn.flex.kernel import FlexFunctions
from lightning_cp.attn.flex.mods import SequenceMask
from lightning_cp.attn.flex.remote_kv import KVRoute, gather_kv
from lightning_cp.attn.plan import QueryShard
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.geometry.ranges import Range
from tests.attn.flex.cases import (
    HEADS,
    MASKS,
    SCORES,
    build,
    flex_rank,
    flex_whole,
    make_flex_case,
    put_flex_together,
)
from tests.oracle import Inputs, assert_earned, errors
from tests.ranks import run_threads
from tests.torch_names import tree_iter


def worst_error(case, cp_size):
    found = put_flex_together(run_threads(cp_size, flex_rank, case), case)
    return max(errors(found, flex_whole(case)).values())


@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))]
)
@pytest.mark.parametrize(
    "mask",
    [x if n % 2 else pytest.param(x, marks=pytest.mark.slow) for n, x in enumerate(MASKS)],
)
def test_out_lse_and_gradients_are_those_of_one_device(mask, cp_size):
    """Each mask with each score, in one of the layouts; which one changes with the rest."""
    layouts = itertools.cycle(["zigzag", "contiguous"])
    if (list(MASKS).index(mask) + cp_size) % 2:
        next(layouts)
    for score, layout in zip(SCORES, layouts, strict=False):
        case = make_flex_case(mask, score, layout=layout, length=29)
        assert worst_error(case, cp_size) < 1e-10, (score, layout)


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [2, 3, 4, 5, 8])
def test_all_masks_scores_and_layouts_go_together(cp_size):
    for mask, score, layout in itertools.product(MASKS, SCORES, ["zigzag", "contiguous"]):
        case = make_flex_case(mask, score, layout=layout, batch=3)
        assert worst_error(case, cp_size) < 1e-10, (mask, score, layout)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("cp_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_heads_are_shared(heads, cp_size):
    for mask, score in [("document", "alibi"), ("by head", "relative")]:
        assert worst_error(make_flex_case(mask, score, heads=heads, scale=0.7), cp_size) < 1e-10


@pytest.mark.parametrize(
    "length", [1, 5, *(pytest.param(length, marks=pytest.mark.slow) for length in (2, 3, 8))]
)
def test_ranks_that_hold_only_padding_take_part(length):
    for layout, score in itertools.product(["zigzag", "contiguous"], ["relative", "alibi"]):
        case = make_flex_case("document", score, length=length, layout=layout)
        assert worst_error(case, 4) < 1e-10


def test_any_ownership_is_exact():
    blocks = [Range(i * 4, (i + 1) * 4) for i in range(9)]
    random.Random(5).shuffle(blocks)
    layout = Layout("by hand", 34, tuple(tuple(blocks[r::3]) for r in range(3)))
    case = make_flex_case("document", "relative", length=34, layout=layout)
    assert worst_error(case, 3) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precisions_earn_their_tolerance(dtype):
    for mask, score in [("causal", "none"), ("document", "alibi"), ("nothing", "relative")]:
        case = make_flex_case(mask, score, length=101).to(dtype)
        found = put_flex_together(run_threads(4, flex_rank, case), case)
        same, exact = flex_whole(case), flex_whole(case.to(torch.float64))
        assert_earned(found, same, exact, dtype)


def test_sums_are_kept_in_float32(monkeypatch):
    """Keys see many tiles and ranks: their gradients are not added up in half precision."""
    monkeypatch.setattr(kernel, "TILE_SCORES", 1)
    case = make_flex_case("none", length=64).to(torch.bfloat16)

    def attend_and_note(transport, case):
        return flex_rank(transport, case), set(transport.dtypes_reduced)

    parts, dtypes = zip(*run_threads(4, attend_and_note, case), strict=True)
    assert set.union(*dtypes) == {torch.float32}
    found = put_flex_together(list(parts), case)
    exact = flex_whole(case.to(torch.float64))
    worst = errors(found, exact)
    assert max(worst[name] for name in ("dk", "dv")) < torch.finfo(torch.bfloat16).eps


def test_heads_of_a_part_of_the_model_keep_their_numbers():
    case = make_flex_case("by head", "relative", heads="mha")
    exact = flex_whole(case)
    for start in (0, 2):
        heads = slice(start, start + 2)
        inputs = case.inputs
        part = make_flex_case("by head", "relative", heads="mha")
        part.inputs = Inputs(*(x[:, heads] for x in (inputs.q, inputs.k, inputs.v, inputs.dout)))
        found = put_flex_together(run_threads(2, flex_rank, part, True, start), part)
        for name in ("out", "lse", "dv"):  # the others depend on numbers drawn by shape
            assert torch.allclose(found[name], exact[name][:, heads], atol=1e-12), name


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of an operator has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [x.numel() for x in tree_iter(out) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *found])
        return out


def largest(transport, case):
    with Largest() as mode:
        flex_rank(transport, case)
    return mode.numel


def test_scores_are_written_out_in_tiles(monkeypatch):
    """In forward and backward: 51 queries with 101 keys, 2 rows and 4 heads are 41208 numbers."""
    case = make_flex_case("document", "alibi", length=101)
    assert min(run_threads(2, largest, case)) >= 2 * 4 * 51 * 101
    monkeypatch.setattr(kernel, "TILE_SCORES", 4096)
    inputs = max(x.numel() for x in (case.inputs.q, case.inputs.k, case.inputs.v))
    assert max(run_threads(2, largest, case)) <= max(4096, 2 * inputs)
    assert worst_error(case, 2) < 1e-10


def test_nothing_that_grows_with_the_square_is_kept_for_backward():
    kept = []
    case = make_flex_case("causal", "softcap", length=256, heads="mqa")

    def pack(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        leaves = [x.requires_grad_() for x in (case.inputs.q, case.inputs.k, case.inputs.v)]
        layout = build_layout("contiguous", seq_len=256, cp_size=1)
        flex_attend(*leaves, FlexFunctions(), KVRoute(layout, LoneTransport(), 0))
    assert max(kept, default=0) <= case.inputs.q.numel()


def row_there_and_back(transport, layout, dtype, gradient_wire):
    generator = torch.Generator().manual_seed(transport.rank)
    k, v = (
        torch.randn(2, 3, layout.local_len, dim, generator=generator).to(dtype) for dim in (4, 5)
    )
    way = KVRoute(layout, transport, 0, gradient_wire)
    k.requires_grad_(), v.requires_grad_()
    whole = gather_kv(k, v, way)
    grads = [torch.full_like(x, transport.rank + 1.0) for x in whole]
    found = torch.autograd.grad(whole, [k, v], grads)
    kept = dtype if gradient_wire == "model" else torch.promote_types(dtype, torch.float32)
    assert transport.dtypes_reduced == [kept]  # one sum
    return [k, v], whole, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [12, 7])
@pytest.mark.parametrize("wire", ["float32", "model"])
def test_rows_are_gathered_in_their_order_and_gradients_are_summed(wire, name, length, dtype):
    """What torch checks of its own gather: forward and its transpose."""
    layout = build_layout(name, seq_len=length, cp_size=3)
    found = run_threads(3, row_there_and_back, layout, dtype, wire)
    for part in (0, 1):
        row = torch.cat([local[part] for local, *_ in found], 2).index_select(2, layout.order)
        for rank, (_, whole, grads) in enumerate(found):
            assert torch.equal(whole[part], row)
            expected = shard(
                torch.full_like(row, 6.0), 2, layout=layout, rank=rank
            )  # 1 + 2 + 3; nothing for padding
            assert torch.equal(grads[part], expected)


def test_second_derivatives_are_refused():
    def run(transport):
        layout = build_layout("zigzag", seq_len=8, cp_size=2)
        q = torch.randn(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
        out = flex_attend(q, q, q, FlexFunctions(), KVRoute(layout, transport, 0)).out
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match="no second derivative.*without create_graph"):
        run_threads(2, run)


# A test that cannot fail proves nothing: this breaks one thing, and parity must notice. More breaks
# are in tools/mutants.


def broken(monkeypatch, case, cp_size=3):
    error = worst_error(case, cp_size)
    monkeypatch.undo()
    assert worst_error(case, cp_size) < 1e-10
    return error


def test_parity_notices_padding_that_is_a_key(monkeypatch):
    """Gather rows with their padding: whoever sees all keys sees it."""

    def with_padding(layout):
        return Layout(layout.name, layout.padded_len, layout.owned)

    gather, scatter = kv_exchange.gather_sequence, kv_exchange.scatter_sequence_grads
    monkeypatch.setattr(
        remote_kv, "gather_sequence", lambda kv, layout, t: gather(kv, with_padding(layout), t)
    )
    monkeypatch.setattr(
        remote_kv,
        "scatter_sequence_grads",
        lambda kv, layout, *way: scatter(kv, with_padding(layout), *way),
    )
    assert broken(monkeypatch, make_flex_case("none")) > 1e-3


def test_padding_reads_nothing_past_the_end_of_what_was_captured():
    case = make_flex_case("document")
    layout = build_layout("contiguous", seq_len=37, cp_size=3)
    mask = SequenceMask(build("document", MASKS, case.captured))
    place, device = QueryShard(layout, 2), torch.device("cpu")
    found = mods.build_functions(mask, None, place, batch=2, heads=4, device=device, fused=False)
    q = shard(case.inputs.q, 2, layout=layout, rank=2)
    out = kernel.attend_plain(q, case.inputs.k, case.inputs.v, found, scale=1.0).out
    assert (out[:, :, -2:] == 0).all()  # 39 positions, 37 tokens
    with pytest.raises(IndexError):  # what was captured has no more
        case.captured.documents[:, layout.positions(2)]
