"""The road of fused kernels, on a CPU: torch's FlexAttention traced, and run without a kernel.

torch refuses gradients on a CPU, since its CPU kernel has none; what runs here has, so the check is
taken away. Ranks are taken one after the other, with the keys of the whole row.
"""

import itertools

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from lightning_cp import Mask
from lightning_cp.attn.blockwise.kernels.base import Scores
from lightning_cp.attn.flex import flex_attention as flex_api
from lightning_cp.attn.flex import kernel as kernel
from lightning_cp.attn.flex.block_mask import mask_functions
from lightning_cp.attn.flex.mods import (
    SequenceMask,
    SequenceMaskCache,
    build_functions,
    sequence_mask_of,
)
from lightning_cp.attn.plan import QueryShard
from lightning_cp.data.shard import shard
from lightning_cp.geometry.layout import build_layout
from lightning_cp.private.compiler import exact_backend
from tests import doors, torch_names
from tests.attn import cases
from tests.attn.flex.cases import (
    MASKS,
    SCORES,
    Captured,
    build,
    differentiate,
    flex_whole,
    make_flex_case,
    put_flex_together,
    states,
    weights_of_lse,
)
from tests.oracle import errors


@pytest.fixture
def counter(monkeypatch):
    """Let the road of fused kernels run on a CPU, and count what is compiled."""
    backend = torch_names.counting_backend("aot_eager")
    torch.compiler.reset()
    torch_names.train_flex_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel, "BACKEND", backend)
    yield backend
    torch.compiler.reset()


def run_rank(case, layout, rank, mask=None):
    """Return what `flex_rank` does, by the fused road; keys and their gradients are whole."""
    inputs = case.inputs

    def cut(x):
        return shard(x, 2, layout=layout, rank=rank)

    leaves = {"q": cut(inputs.q), "k": inputs.k, "v": inputs.v, "table": case.captured.table}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    old = case.captured
    captured = Captured(old.documents, old.prefix, old.slopes, leaves["table"])
    mask_mod = build(case.mask, MASKS, captured)
    if mask is None and mask_mod is not None:
        mask = SequenceMask(mask_mod)
    batch, heads = inputs.q.shape[:2]
    mods = build_functions(
        mask,
        build(case.score, SCORES, captured),
        QueryShard(layout, rank),
        batch=batch,
        heads=heads,
        device=inputs.q.device,
        fused=True,
    )
    q, k, v, _ = leaves.values()
    found = kernel.attend_compiled(q, k, v, mods, scale=case.scale, aux=AuxRequest(lse=True))
    whole = weights_of_lse(inputs.q[..., 0])
    return differentiate(found.out, found.lse, leaves, cut(inputs.dout), cut(whole))


def run_ranks(case, cp_size, mask=None):
    layout = case.build_layout(cp_size)
    parts = [run_rank(case, layout, rank, mask) for rank in range(cp_size)]
    found = put_flex_together(
        [{n: x for n, x in p.items() if n not in ("dk", "dv")} for p in parts], case
    )
    for name in ("dk", "dv"):
        found[name] = sum(part[name] for part in parts)
    return found


@pytest.mark.parametrize(
    ("mask", "score", "cp_size"),
    [
        ("document", "relative", 2),
        ("none", "none", 2),
        ("causal", "softcap", 3),
        ("window", "alibi", 2),
        ("nothing", "none", 2),
        ("prefix", "hiding", 2),
        ("by head", "alibi", 3),
    ],
)
@pytest.mark.slow
def test_the_fused_road_is_exact(counter, mask, score, cp_size):
    case = make_flex_case(mask, score, length=301)
    worst = errors(run_ranks(case, cp_size), flex_whole(case))
    assert max(worst.values()) < 1e-10, worst
    assert counter.frame_count > 0


def document_case(seed):
    """Return a batch with other documents, of the same shape."""
    case = make_flex_case("document", "alibi", length=96)
    starts = torch.rand(2, 96, generator=torch.Generator().manual_seed(seed)) < 0.1
    case.captured.documents = starts.cumsum(1)
    return case


@pytest.mark.slow  # quick: test_inside_steps_nothing_is_compiled_again
@pytest.mark.parametrize("way", ["made", "whole"])
def test_other_documents_are_not_compiled_again(counter, way):
    """Three batches, two layers each; one compilation of the mask, one of attention."""
    compiled = []
    for seed in range(3):
        case = document_case(seed)
        layout, mask = case.build_layout(2), None
        if way == "whole":
            mask_mod = build("document", MASKS, case.captured)
            mask = sequence_mask_of(create_block_mask(mask_mod, 2, 1, 96, 96, device="cpu"))
        for _ in range(2):
            run_rank(case, layout, 0, mask)
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[-1] == 2


def test_a_mask_is_not_compiled_again_for_another_batch(counter):
    """kernel="flex": what differs between batches is held in tensors of one shape."""
    inputs = cases.make_case("causal", length=96).inputs
    layout = build_layout("zigzag", seq_len=96, cp_size=2)
    for name in ["documents", "left padding", "causal", "window"]:
        bounds = cases.MASKS[name](2, 96).bounds(96, padded_len=layout.padded_len)
        mods = mask_functions(
            bounds,
            Scores(1.0, 3.0),
            QueryShard(layout, 1),
            batch=2,
            device=inputs.q.device,
            fused=True,
        )
        q = shard(inputs.q, 2, layout=layout, rank=1)
        kernel.attend_compiled(q, inputs.k, inputs.v, mods, scale=1.0, aux=AuxRequest(lse=True))
    assert counter.frame_count == 1


def holes(batch, length):
    return Mask(padding=(torch.arange(length) % 300 == 150).expand(batch, -1))


def one_short(batch, length):
    """The first query sees all but the last key of a block."""
    return Mask(window=(length, 126))


@pytest.mark.parametrize("name", [*cases.MASKS, "holes", "one short"])
def test_blocks_of_a_mask_are_those_of_its_pairs(name):
    """Full blocks are full, empty ones are empty, whatever the layout."""
    length = 700
    bounds_of = {**cases.MASKS, "holes": holes, "one short": one_short}[name](2, length)
    for layout_name, rank in [("zigzag", 0), ("zigzag", 1), ("contiguous", 2)]:
        layout = build_layout(layout_name, seq_len=length, cp_size=3)
        bounds, place = (
            bounds_of.bounds(length, padded_len=layout.padded_len),
            QueryShard(layout, rank),
        )
        mods = mask_functions(
            bounds, Scores(1.0), place, batch=2, device=torch.device("cpu"), fused=True
        )
        table = mods.build_block_mask()
        exact = create_block_mask(mods.mask_mod, 2, 1, *place.lengths, device="cpu")
        found, pairs = states(table), states(exact)
        assert torch.equal(found == 2, pairs == 2)
        assert not ((found == 0) & (pairs > 0)).any()
        assert table.seq_lengths == place.lengths
        assert (found > 0).sum() == (pairs > 0).sum()  # no document is longer than a block


def test_a_block_mask_of_the_row_is_cut_where_blocks_allow_it():
    ids = cases.documents(2, 64)
    whole = create_block_mask(
        lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k + h), 2, 3, 64, 64, "cpu", 8
    )
    mask = sequence_mask_of(whole)
    for cp_size, cut in [(2, True), (4, True), (3, False)]:
        for rank in range(cp_size):
            layout = build_layout("zigzag", seq_len=64, cp_size=cp_size)
            place, heads = QueryShard(layout, rank, head_offset=1), 2
            if not cut:
                with torch.compiler.set_stance("force_eager"):
                    table = mask.block_mask(place, batch=2, heads=heads, device=torch.device("cpu"))
            else:
                table = mask.block_mask(place, batch=2, heads=heads, device=torch.device("cpu"))
            assert table.seq_lengths == place.lengths
            exact = create_block_mask(table.mask_mod, 2, heads, *place.lengths, "cpu", 8)
            assert torch.equal(states(table), states(exact))
            # It sees positions and heads of the model.
            b, h, q, k = (torch.tensor(x) for x in (1, 1, 3, 5))
            at = layout.positions(rank).clamp(max=63)[3]
            assert bool(table.mask_mod(b, h, q, k)) == bool(
                (ids[1, at] == ids[1, 5]) & (at >= 5 + 2)
            )


def test_blocks_that_were_given_count(counter):
    """A block mask may say more than its function: fused kernels never look at empty blocks."""
    num_blocks = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 1, 2], [0, 1, 2], [2, 0, 1]]]], dtype=torch.int32)
    given = torch_flex.BlockMask.from_kv_blocks(
        num_blocks, indices, BLOCK_SIZE=16, seq_lengths=(48, 48)
    )
    seen = torch.zeros(48, 48).bool()
    seen[:16, :16], seen[16:32, :32], seen[32:, 32:] = True, True, True
    visible = sequence_mask_of(given).visible(torch.device("cpu"))
    q, k = torch.arange(48)[:, None], torch.arange(48)
    zero = torch.tensor(0)
    assert torch.equal(visible(zero, zero, q, k), seen)


def test_masks_are_kept_over_steps_while_nothing_changes():
    masks = SequenceMaskCache(size=3)
    ids = torch.zeros(2, 8).long()

    def build_mask(width):
        return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q - k < width)

    first = masks.find(build_mask(3))
    assert masks.find(build_mask(3)) is first
    assert masks.find(build_mask(4)) is not first
    assert masks.find(build_mask(3), batch=1) is not first
    ids[0, 3] = 1
    changed = masks.find(build_mask(3))
    assert changed is not first

    class Model:
        width = 3

        def mask(self, b, h, q, k):
            return q - k < self.width

    model = Model()
    assert masks.find(model.mask) is not masks.find(model.mask)
    found = [masks.find(build_mask(width)) for width in range(5)]
    assert [masks.find(build_mask(width)) is found[width] for width in (2, 3, 4)] == [True] * 3
    assert masks.find(build_mask(1)) is not found[1]  # of those that came last there are three


def test_rows_and_heads_of_a_block_mask_are_found_by_looking():
    ids = torch.zeros(2, 16).long()
    layout = build_layout("contiguous", seq_len=16, cp_size=2)
    looked = []

    def unknown(b, h, q, k):
        looked.append(q)
        if len(looked) <= 2:
            raise IndexError("when it is looked at")
        return q >= k

    shapes = {
        (1, 1): lambda b, h, q, k: q >= k,
        (2, 1): lambda b, h, q, k: ids[b, q] == ids[b, k],
        (1, 3): lambda b, h, q, k: q - k < h,
        (2, 3): unknown,
    }
    for shape, mask_mod in shapes.items():
        mask, kwargs = (
            SequenceMask(mask_mod),
            {"batch": 2, "heads": 3, "device": torch.device("cpu")},
        )
        with torch.compiler.set_stance("force_eager"):
            table = mask.block_mask(QueryShard(layout, 1), **kwargs)
        assert table.kv_num_blocks.shape[:2] == shape
    with torch.compiler.set_stance("force_eager"):
        mask = SequenceMask(shapes[2, 1], block_size=(4, 4))
        table = mask.block_mask(QueryShard(layout, 1), **kwargs)
        assert table.kv_num_blocks.shape == (2, 1, 2)
        assert mask.block_mask(QueryShard(layout, 1), **kwargs) is table
        assert mask.block_mask(QueryShard(layout, 0), **kwargs) is not table
        ids[0, 3] = 5  # the mask is the same, what it captured is not
        again = mask.block_mask(QueryShard(layout, 1), **kwargs)
        assert again is not table
        for rank in range(20):
            mask.block_mask(QueryShard(layout, rank % 2, head_offset=rank), **kwargs)
        assert mask.block_mask(QueryShard(layout, 1), **kwargs) is not again  # not kept for ever


def test_inside_steps_nothing_is_compiled_again(counter, monkeypatch):
    """Two batches with other documents, two layers, gradients inside and outside of the step."""
    monkeypatch.setattr(flex_api, "needs_plain_torch", lambda *_: False)
    cp = doors.parallel(None)
    for seed in range(2):
        case = document_case(seed)
        ids, slopes = case.captured.documents, case.captured.slopes
        q, k, v = (x.requires_grad_() for x in (case.inputs.q, case.inputs.k, case.inputs.v))
        with cp.step({"inputs_embeds": torch.zeros(2, 96, 1)}):
            for _ in range(2):
                block_mask = cp.block_mask(
                    lambda b, h, q, k, ids=ids: (ids[b, q] == ids[b, k]) & (q >= k)
                )
                out, lse = flex_attention(
                    q,
                    k,
                    v,
                    lambda s, b, h, q, k, slopes=slopes: s - slopes[h] * (q - k).abs(),
                    block_mask,
                    enable_gqa=True,
                    return_lse=True,
                )
            wanted = {"q": q, "k": k, "v": v}
            args = (out, lse, wanted, case.inputs.dout, weights_of_lse(q[..., 0].detach()))
            found = differentiate(*args) if seed % 2 else None
        found = found or differentiate(*args)
        exact = flex_whole(case)
        worst = errors(found, {name: exact[name] for name in found})
        assert max(worst.values()) < 1e-10, worst
    assert counter.frame_count == 2


def test_a_model_may_have_more_functions_than_torch_compiles_of_one(counter):
    """torch gives up after 8 compilations of one code, with fullgraph by an error."""
    scores = [lambda s, b, h, q, k: s + 1.0, lambda s, b, h, q, k: s.sin()]
    layout = build_layout("contiguous", seq_len=16, cp_size=1)
    q = torch.randn(1, 2, 16, 16)
    for score_mod in scores:
        place, device = QueryShard(layout, 0), torch.device("cpu")
        mods = build_functions(None, score_mod, place, batch=1, heads=2, device=device, fused=True)
        with torch._dynamo.config.patch(recompile_limit=1):  # of 8; it is set nowhere else
            kernel.attend_compiled(q, q, q, mods, scale=1.0, aux=AuxRequest())
    assert counter.frame_count == 2


def test_a_kernel_that_does_not_fit_the_chip_is_compiled_with_less(monkeypatch):
    asked = []

    def stand_in(kind, *shapes):
        def attend(q, k, v, *, kernel_options, **rest):
            asked.append(kernel_options)
            if kernel_options is None:
                raise RuntimeError("No valid triton configs. out of resource: Required: 249856")
            return q, torch_flex.AuxOutput(None, None)

        return attend

    monkeypatch.setattr(kernel, "compiled_flex_attention", stand_in)
    q = torch.zeros(1, 1, 2, 12)  # a shape of no other test: options are kept by shape
    for _ in range(2):
        kernel.attend_compiled(q, q, q, kernel.FlexFunctions(), scale=None, aux=AuxRequest())
    assert asked == [None, {"num_stages": 1}, {"num_stages": 1}]
    own = {"num_stages": 2}  # the user's stay as they are
    kernel.attend_compiled(
        q, q, q, kernel.FlexFunctions(), scale=None, aux=AuxRequest(), kernel_options=own
    )
    assert asked[-1] is own


@pytest.mark.slow
def test_one_mask_serves_any_precision_and_mode(counter):
    """torch gives up on code that it has compiled 8 times for different arguments."""
    given, trains = torch.randn(1, 2, 128, 16), [(True, True), (True, False), (False, True)]
    for dtype, (trains_q, trains_sinks) in itertools.product(
        [torch.float32, torch.bfloat16], trains
    ):
        q = given.to(dtype, copy=True).requires_grad_(trains_q)
        sinks = torch.nn.Parameter(torch.zeros(2).to(dtype), requires_grad=trains_sinks)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                found = kernel.attend_compiled(
                    q, q, q, kernel.FlexFunctions(), scale=1.0, aux=AuxRequest(), sinks=sinks
                )
            assert found.out.dtype == dtype
    assert counter.frame_count > 8


def test_other_errors_of_the_compiler_are_raised(monkeypatch):
    def stand_in(kind, *shapes):
        def attend(*args, **kwargs):
            raise RuntimeError("a graph break")

        return attend

    monkeypatch.setattr(kernel, "compiled_flex_attention", stand_in)
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="a graph break"):
        kernel.attend_compiled(q, q, q, kernel.FlexFunctions(), scale=None, aux=AuxRequest())


def test_backward_of_compiled_code_may_run_again():
    """Also once it was compiled for a backward that runs once: it may not reuse what it reads."""

    def power(x):
        y = torch.exp(torch.exp(x) + 1)
        return y * torch.exp(y)

    def differentiate_twice(compiled):
        x = torch.full((5,), -3.0, requires_grad=True)
        compiled(x).sum().backward()
        out = compiled(x).sum()
        grads = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
        return all(torch.equal(x.grad, grad) for grad in grads)

    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="donated buffer"):
        differentiate_twice(torch.compile(power, backend="aot_eager"))
    assert differentiate_twice(torch.compile(power, backend=exact_backend("aot_eager")))


@pytest.mark.slow
def test_torchs_compiler_pads_nothing():
    """torch 2.11 reads with padding what it wrote without: forward and backward are built so."""
    padded, config = [], torch_names.code_generator().config
    watch = config.patch(
        post_grad_custom_post_pass=lambda _: padded.append(config.comprehensive_padding),
        disable_padding_cpu=False,
        compile_threads=1,
        force_disable_caches=True,
    )
    x = torch.ones(3, requires_grad=True)
    with watch:
        torch.compile(lambda x: x.exp(), backend=exact_backend("inductor"))(x).sum().backward()
    assert padded == [False, False]
    assert config.comprehensive_padding
