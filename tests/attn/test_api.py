"""The verb on one process; several ranks are in tests/parity."""

import functools
import logging
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_cp import Mask, attention
from lightning_cp.attn import choose
from lightning_cp.attn.api import calls_of
from lightning_cp.attn.blockwise.kernels.base import Request, Scores
from lightning_cp.attn.blockwise.kernels.cpu import CpuKernel
from lightning_cp.attn.call import Bias
from lightning_cp.attn.choose import CallSpec, choose_head_groups
from lightning_cp.attn.cost import CallSize
from lightning_cp.attn.flex.flex_attention import FlexArguments, attend_in_step
from lightning_cp.attn.plan import QueryShard
from lightning_cp.comm.mesh import Groups
from lightning_cp.comm.transport import LoneTransport
from lightning_cp.data.shard import shard, unshard
from lightning_cp.geometry.layout import build_layout
from lightning_cp.step import active_step
from lightning_cp.step.step import Step, StepMask, StepReference
from tests import doors
from tests.attn.cases import say_again
from tests.oracle import attend_whole, errors, make_inputs
from tests.ranks import run_threads


def _step(layout, groups, config, batch_size, position_ids):
    return Step(
        layout=layout,
        groups=groups,
        config=config,
        batch_size=batch_size,
        documents=None,
        padding=None,
        position_ids=position_ids,
        training=True,
    )


def draw(*shape):
    return torch.randn(*shape)


def test_outside_a_step_it_is_plain_attention():
    q, k, v = draw(2, 6, 9, 4), draw(2, 3, 9, 4), draw(2, 3, 9, 4)
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, mask=Mask(causal=True)), expected)
    torch.testing.assert_close(
        attention(q, k, v, mask=Mask(), scale=0.1),
        scaled_dot_product_attention(q, k, v, scale=0.1, enable_gqa=True),
    )


def test_documents_and_padding_come_from_the_step_unless_the_mask_says_otherwise():
    q = draw(1, 2, 6, 4)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    told = attention(q, q, q, mask=Mask(causal=True, documents=ids))
    ignored = attention(q, q, q, mask=Mask(causal=True))
    cp = doors.parallel(None, layout="contiguous")
    with cp.step({"input_ids": torch.arange(6)[None], "document_ids": ids}):
        assert torch.equal(attention(q, q, q, mask=Mask(causal=True)), told)
        assert torch.equal(attention(q, q, q, mask=cp.mask(causal=True)), told)
        assert torch.equal(attention(q, q, q, mask=Mask(causal=True, documents=False)), ignored)


def test_a_bound_mask_outlives_its_step():
    q = draw(1, 2, 6, 4)
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    cp = doors.parallel(None, layout="contiguous")
    with cp.step({"input_ids": torch.arange(6)[None], "document_ids": ids}):
        mask = cp.mask(causal=True)
    told = attention(q, q, q, mask=Mask(causal=True, documents=ids))
    assert torch.equal(attention(q, q, q, mask=mask), told)


def test_what_is_recomputed_in_another_step_does_not_go_backward():
    """A step that is opened inside of a checkpointed function is another one when it runs again."""
    q, cp = draw(1, 2, 6, 4).requires_grad_(), doors.parallel(None)
    batch = {"input_ids": torch.arange(6)[None]}
    batches = iter([batch, {**batch, "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]])}])

    def attend(x):
        with cp.step(next(batches)):
            return attention(x, x, x, mask=Mask(causal=True))

    out = checkpoint(attend, q, use_reentrant=False)
    with pytest.raises(RuntimeError, match="recomputed under another step, not the one it first"):
        out.sum().backward()


@pytest.mark.parametrize("algorithm", ["gather", "ring"])
@pytest.mark.parametrize("length", [13, 2])
def test_ranks_whose_tensors_show_no_padding_hold_different_numbers_of_tokens(algorithm, length):
    inputs = make_inputs(
        batch=2, heads=(4, 2), length=length, dims=(8, 8), sinks=False, seed=length
    )
    bias = torch.randn(1, 4, length, length, dtype=torch.float64)
    layout = build_layout("zigzag", seq_len=length, cp_size=3, shows_padding=False)

    def work(transport):
        def cut(x):
            return shard(x, 2, layout=layout, rank=transport.rank)

        groups = Groups(transport, LoneTransport(), transport, LoneTransport())
        nothing = torch.zeros(2, layout.tensor_len(transport.rank))
        step = Step(
            layout=layout,
            groups=groups,
            config=doors.config(algorithm=algorithm),
            batch_size=2,
            documents=None,
            padding=None,
            position_ids=nothing,
            training=True,
        )
        leaves = [cut(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        mask = StepMask(causal=True, reference=StepReference(step))
        out = attention(*leaves, mask=mask, bias=cut(bias))
        grads = torch.autograd.grad(out, leaves, cut(inputs.dout))
        return [unshard(x, 2, layout=layout, transport=transport) for x in (out.detach(), *grads)]

    exact = attend_whole(inputs, Mask(causal=True), bias=bias)
    for parts in run_threads(3, work):
        found = dict(zip(("out", "dq", "dk", "dv"), parts, strict=True))
        assert max(errors(found, exact).values()) < 1e-10


def test_autocast_does_not_lower_the_sums():
    q = draw(1, 2, 64, 8).requires_grad_()
    plain = attention(q, q, q, mask=Mask(causal=True), softcap=5.0)
    with torch.autocast("cpu", torch.bfloat16):
        inside = attention(q, q, q, mask=Mask(causal=True), softcap=5.0)
    assert torch.equal(plain, inside)


def test_layers_share_one_plan(monkeypatch):
    built = []
    build = choose.build_plan
    monkeypatch.setattr(choose, "build_plan", lambda *a, **kw: built.append(a) or build(*a, **kw))
    q, ids = draw(1, 2, 6, 4), torch.arange(6)[None]
    batch = {"input_ids": ids, "document_ids": ids // 4}
    with doors.parallel(None, layout="contiguous").step(batch):
        for _ in range(5):
            attention(q, q, q, mask=Mask(causal=True))
            attention(q, q, q, mask=Mask(causal=True, window=3))
    assert len(built) == 2


def test_rows_of_one_document_are_planned_once(monkeypatch):
    built, build = [], choose.build_plan

    def count(*args, **kwargs):
        built.append(args)
        return build(*args, **kwargs)

    monkeypatch.setattr(choose, "build_plan", count)
    monkeypatch.setattr(choose, "_shared_plan", functools.lru_cache(count))
    q, found = draw(1, 2, 71, 4), []
    cp = doors.parallel(None, layout="contiguous")
    for length in (71, 71, 67, 71):
        with cp.step({"input_ids": torch.arange(length)[None]}):
            part = q[:, :, :length]
            found.append(attention(part, part, part, mask=Mask(causal=True, window=5)))
    assert len(built) == 2
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[3])
    torch.testing.assert_close(found[0][:, :, :67], found[2])
    with cp.step(
        {"input_ids": torch.arange(71)[None], "document_ids": torch.arange(71)[None] // 9}
    ):
        other = attention(q, q, q, mask=Mask(causal=True, window=5))
    assert not torch.allclose(other, found[0])
    assert len(built) == 3


def test_the_choice_is_logged_once(caplog):
    say_again(choose)
    q = draw(1, 2, 6, 4)
    with (
        caplog.at_level(logging.INFO, logger="lightning_cp"),
        doors.parallel(None, layout="contiguous").step({"input_ids": torch.arange(6)[None]}),
    ):
        attention(q, q, q, mask=Mask(causal=True))
        attention(q, q, q, mask=Mask(causal=True))
    assert [record.message for record in caplog.records] == [
        "attention: cp_size=1 algorithm=gather layout=contiguous kernel=cpu"
    ]


@pytest.mark.parametrize(
    ("q", "k", "v", "error", "message"),
    [
        (draw(1, 2, 3, 4), draw(1, 2, 3, 5), draw(1, 2, 3, 5), ValueError, "do not fit together"),
        (draw(1, 3, 3, 4), draw(1, 2, 3, 4), draw(1, 2, 3, 4), ValueError, "3 query heads cannot"),
        (draw(1, 2, 1, 4), draw(1, 2, 3, 4), draw(1, 2, 3, 4), ValueError, "1 queries and 3 keys"),
        (
            draw(1, 2, 3, 4),
            draw(1, 2, 3, 4),
            draw(1, 2, 3, 4).double(),
            TypeError,
            "one floating dtype, but are torch.float32, torch.float32, torch.float64",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(q, k, v, error, message):
    with pytest.raises(error, match=message):
        attention(q, k, v, mask=Mask(causal=True))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], -1)[..., ::2],
        lambda x: x[..., :1].expand(-1, -1, -1, 8),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    ],
    ids=["transposed", "strided", "expanded", "tokens first"],
)
def test_strides_do_not_matter(view):
    x = view(draw(2, 4, 9, 8)).detach()
    results = []
    for leaf in (x, x.contiguous()):
        leaf = leaf.clone(memory_format=torch.preserve_format).requires_grad_()
        out = attention(leaf, leaf, leaf, mask=Mask(causal=True, window=3))
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        results.append((out, grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_mask_whose_tensor_was_edited_is_worked_out_again():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = Mask(causal=True, documents=ids)
    q = draw(1, 2, 6, 4)
    with doors.parallel(None, layout="contiguous").step({"input_ids": torch.arange(6)[None]}):
        attention(q, q, q, mask=mask)
        ids[:, 1:] = 1
        found = attention(q, q, q, mask=mask)
    assert torch.equal(found, attention(q, q, q, mask=Mask(causal=True, documents=ids)))


def test_compiled_code_breaks_around_it():
    def layer(q):
        return attention(q * 2, q, q, mask=Mask(causal=True)).sin()

    q = draw(1, 2, 6, 4)
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(q), layer(q))
    with doors.parallel(None, layout="contiguous").step({"input_ids": torch.arange(6)[None]}):
        torch.testing.assert_close(compiled(q), layer(q))


def test_a_step_ends_with_its_last_user():
    cp, q = doors.parallel(None, layout="contiguous"), draw(1, 2, 6, 4)
    with cp.step({"input_ids": torch.arange(6)[None]}):
        step = weakref.ref(active_step.current())
        attention(q, q, q, mask=cp.mask(causal=True))
    assert step() is None


def test_a_learned_scale_is_refused():
    q = draw(1, 2, 6, 4)
    with pytest.raises(TypeError, match="got a tensor, whose gradient would be lost"):
        attention(q, q, q, mask=Mask(), scale=torch.tensor(0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"alibi": torch.ones(3)},
            r"of shape \(3,\), but must be one floating slope per query head",
        ),
        ({"alibi": torch.ones(2).int()}, "torch.int32 of shape"),
        ({"alibi": torch.ones(2, requires_grad=True)}, "requires a gradient, which it would not"),
        ({"alibi": torch.ones(2), "bias": torch.zeros(1, 1, 1, 4)}, "got bias and alibi"),
    ],
    ids=["heads", "integers", "gradient", "bias too"],
)
def test_slopes_that_do_not_fit_are_refused(options, message):
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, mask=Mask(causal=True), **options)


def test_slopes_on_one_device():
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)
    place = torch.arange(5)
    slopes = torch.tensor([0.5, 0.25])
    bias = -slopes[:, None, None] * (place[:, None] - place).abs()
    bias = bias.double().masked_fill(place > place[:, None], float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    found = attention(q, k, v, mask=Mask(causal=True), alibi=slopes)
    assert torch.allclose(found, expected, atol=1e-12)


def test_an_empty_row_is_refused():
    q = draw(1, 2, 0, 4)
    with pytest.raises(ValueError, match="sequences of length 0"):
        attention(q, q, q, mask=Mask(causal=True))


def test_memory_for_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"attention=Attention\(memory=-1\): give the GiB .* above 0, or None"
    ):
        doors.parallel(None, attention_memory=-1)


def test_a_wire_that_does_not_exist_is_refused():
    message = "gradient_wire='bf16'.* is unknown. Use one of 'float32', 'model'"
    with pytest.raises(ValueError, match=message):
        doors.parallel(None, gradient_wire="bf16")


def own_step(transport, wire, kernel, layout):
    groups = Groups(transport, LoneTransport(), transport, LoneTransport())
    nothing = torch.zeros(1, layout.local_len)
    config = doors.config(algorithm="gather", kernel=kernel, gradient_wire=wire)
    return Step(
        layout=layout,
        groups=groups,
        config=config,
        batch_size=1,
        documents=None,
        padding=None,
        position_ids=nothing,
        training=True,
    )


@pytest.mark.parametrize("wire", ["float32", "model"])
@pytest.mark.parametrize("kernel", ["auto", "flex", "function"])
def test_the_wire_of_a_step_reaches_all_kinds_of_calls(kernel, wire):
    layout = build_layout("zigzag", seq_len=16, cp_size=2)

    def work(transport):
        step = own_step(transport, wire, "auto" if kernel == "function" else kernel, layout)
        q, k, v = (draw(1, 2, 8, 4).bfloat16().requires_grad_() for _ in range(3))
        if kernel == "function":  # threads share the active step: it is given by hand
            arguments = FlexArguments(None, None, None, AuxRequest(), None)
            out = attend_in_step(step, q, k, v, arguments).out
        else:
            out = attention(q, k, v, mask=StepMask(causal=True, reference=StepReference(step)))
        torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
        return set(transport.dtypes_reduced)

    expected = {"float32": torch.float32, "model": torch.bfloat16}[wire]
    assert run_threads(2, work) == [{expected}] * 2


def test_steps_know_the_wire():
    cp = doors.parallel(None, gradient_wire="model")
    with cp.step({"input_ids": torch.arange(6)[None]}):
        assert active_step.current().config.attention.gradient_wire == "model"


@pytest.mark.parametrize("size", [1, "held"])
def test_neighbours_that_hold_different_numbers_of_tokens_all_send_a_bias(size):
    """Size 1 may be that of one query: what is sent must not follow from what a rank holds."""
    layout = build_layout("contiguous", seq_len=3, cp_size=2, shows_padding=False)
    for rank, held in enumerate([2, 1]):
        assert layout.tensor_len(rank) == held
        bias = torch.randn(1, 2, held if size == "held" else 1, 3)
        values = Bias(bias).per_query(layout.local_len).values
        assert values.shape[2] == (2 if bias.shape[2] == 1 else held)
        assert torch.equal(values[:, :, :1], bias[:, :, :1])


def choose_groups(algorithm, seq_len, cp_size, *, budget=None, inside=1):
    """Return how keys of a causal sequence on GPUs would be exchanged."""
    layout = build_layout("zigzag", seq_len=seq_len, cp_size=cp_size)
    spec = CallSpec(
        Mask(causal=True).bounds(seq_len),
        QueryShard(layout, 0),
        8,
        Request(torch.device("cuda"), torch.bfloat16, Scores(1.0), head_dim=128),
        CallSize(seq_len, cp_size, 32, 8, head_dim=128, value_dim=128, ulysses_size=inside),
        has_bias=False,
        config=doors.config(
            algorithm=algorithm,
            attention_memory=None if budget is None else budget / 2**30,
        ),
    )
    return choose_head_groups(spec)


AUTO = {"algorithm": "auto", "seq_len": 1 << 18, "cp_size": 64}


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, ("gather", 4, 8)),
        ({"budget": 2**29}, ("ring", 1, 1)),
        ({"algorithm": "ring"}, ("ring", 1, 1)),
        ({"algorithm": "gather", "budget": 2**29}, ("gather", 8, 8)),
        ({"algorithm": "gather", "cp_size": 16}, ("gather", 2, 8)),
        ({"seq_len": 1 << 19}, ("gather", 8, 8)),
    ],
    ids=str,
)
def test_how_keys_travel_over_several_nodes(asked, chosen):
    """A gather takes more than the least budget where it saves time."""
    choice = choose_groups(**AUTO | asked)
    groups = (choice.num_groups_forward, choice.num_groups_backward)
    assert (choice.algorithm, *groups) == chosen


def test_a_step_has_its_kernel_for_itself(monkeypatch):
    """One that changes by experience would compute a layer in another way when it is recomputed."""
    for_step = CpuKernel()
    monkeypatch.setattr(CpuKernel, "for_step", lambda self: for_step)
    q = torch.randn(1, 2, 8, 4)
    with doors.parallel(None).step({"input_ids": torch.zeros(1, 8, dtype=torch.long)}):
        attention(q, q, q, mask=Mask(causal=True))
        calls = calls_of(active_step.current())
    assert [call.kernel for call in calls] == [for_step]


def test_a_named_algorithm_that_takes_more_than_its_memory_says_so_once(caplog):
    """And what to use: `auto` would have chosen what fits."""
    say_again(choose)
    with caplog.at_level(logging.WARNING, logger="lightning_cp"):
        for _ in range(2):
            for budget in (None, 2**28):
                choice = choose_groups("gather", 1 << 17, 8, budget=budget)
                assert (choice.algorithm, choice.fits) == ("gather", budget is None)
    (message,) = (record.message for record in caplog.records)
    assert message.startswith("attention: algorithm=gather exceeds its GPU memory budget")
    assert message.endswith("Use algorithm='auto', or raise attention=Attention(memory=...).")
