"""Which calls are routed, which are refused, and that nothing is left behind. One process."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils.checkpoint import checkpoint

from lightning_cp import routing
from lightning_cp.attn.blockwise.kernels import cpu
from lightning_cp.private.modes import num_function_modes
from lightning_cp.step import active_step
from tests import doors

LENGTH, DIM = 6, 8
ORIGINAL = functional.scaled_dot_product_attention


@pytest.fixture
def routed(monkeypatch):
    """Count the calls that reach attention()."""
    calls = []
    attention = routing.attend

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(routing, "attend", counted)
    return calls


@pytest.fixture
def cp():
    return doors.parallel(None)


@pytest.fixture
def batch():
    return {"inputs_embeds": torch.randn(2, LENGTH, DIM)}


def heads(*shape):
    return torch.randn(*shape or (2, 4, LENGTH, DIM))


def layer(**kwargs):
    return nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0.0, batch_first=True, **kwargs)


CALLERS = {
    "F": lambda x: functional.scaled_dot_product_attention(heads(), heads(), heads()),
    "imported": lambda x: imported(heads(), heads(), heads()),
    "aten": lambda x: torch.ops.aten.scaled_dot_product_attention(heads(), heads(), heads()),
    "aten overload": lambda x: torch.ops.aten.scaled_dot_product_attention.default(
        heads(), heads(), heads()
    ),
    "three dims": lambda x: imported(*[heads(2, LENGTH, DIM)] * 3),
    "five dims": lambda x: imported(*[heads(2, 3, 4, LENGTH, DIM)] * 3),
    "MultiheadAttention": lambda x: nn.MultiheadAttention(DIM, 2, batch_first=True)(
        x, x, x, need_weights=False
    ),
    "MultiheadAttention, eval": lambda x: nn.MultiheadAttention(DIM, 2, batch_first=True).eval()(
        x, x, x, need_weights=False
    ),
    "TransformerEncoderLayer": lambda x: layer()(x),
    "TransformerEncoderLayer, eval": lambda x: layer().eval()(x),
    "TransformerEncoder, eval": lambda x: nn.TransformerEncoder(layer(), 1).eval()(x),
    "TransformerEncoder, eval, padding": lambda x: nn.TransformerEncoder(layer(), 1).eval()(
        x, src_key_padding_mask=torch.zeros(2, LENGTH).bool()
    ),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CALLERS)
def test_calls_are_routed_whichever_way_they_come(name, mode, cp, batch, routed):
    with mode(), cp.step(batch) as local:
        CALLERS[name](local["inputs_embeds"])
    assert len(routed) == 1


@pytest.mark.parametrize("name", CALLERS)
def test_outside_a_step_and_paused_nothing_is_routed(name, cp, batch, routed):
    CALLERS[name](batch["inputs_embeds"])
    with cp.step(batch) as local, cp.paused():
        CALLERS[name](local["inputs_embeds"])
    assert routed == []


def flex(x):
    """Call the operator inside torch's flex_attention, which is what a mode sees of it."""
    no_blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, "cpu")
    operator = torch.ops.higher_order.flex_attention
    return operator(*[heads()] * 3, lambda s, b, h, q, k: s, no_blocks.as_tuple(), 1.0, {})


REFUSED = {
    "need_weights": (
        lambda x: nn.MultiheadAttention(DIM, 2, batch_first=True)(x, x, x),
        "need_weights=True inside a step.*Call it with need_weights=False",
    ),
    "need_weights, eval": (
        lambda x: nn.MultiheadAttention(DIM, 2, batch_first=True).eval()(x, x, x),
        "need_weights=True inside a step",
    ),
    "a kernel of torch": (
        # The operator itself: a kernel that has no public function.
        lambda x: cpu.forward_op.overloadpacket(heads(), heads(), heads()),
        r"_scaled_dot_product_flash_attention_for_cpu.*was called inside a step.*cp.exempt",
    ),
    "an operator of flex attention": (flex, r"flex_attention\(\) was called inside a step"),
    "dropout": (
        lambda x: imported(heads(), heads(), heads(), dropout_p=0.1),
        r"dropout_p=0.1\) inside a step",
    ),
    "dropout of a module": (
        lambda x: nn.MultiheadAttention(DIM, 2, dropout=0.3, batch_first=True)(
            x, x, x, need_weights=False
        ),
        r"dropout_p=0.3\) inside a step.*dropout=0.0",
    ),
    "other keys": (
        lambda x: imported(heads(), heads(2, 4, 9, DIM), heads(2, 4, 9, DIM)),
        r"6 queries and 9 keys inside a step whose ranks hold 6 tokens.*cp.exempt\(module\)",
    ),
    "other queries": (
        lambda x: imported(heads(2, 4, 1, DIM), heads(), heads()),
        r"1 queries and 6 keys inside a step.*cp.paused\(\)",
    ),
    "mask and causal": (
        lambda x: imported(*[heads()] * 3, attn_mask=torch.ones(6, 6).bool(), is_causal=True),
        "pass attn_mask or is_causal, not both",
    ),
    "trained mask": (
        lambda x: imported(*[heads()] * 3, attn_mask=torch.ones(6, 6).requires_grad_()),
        "attn_mask requires a gradient",
    ),
    "a mask that is no plain tensor": (
        lambda x: imported(*[heads()] * 3, attn_mask=causal_upper_left(LENGTH, LENGTH)),
        "attn_mask is a CausalBias.*is_causal=True",
    ),
    "reentrant checkpointing": (
        lambda x: checkpoint(
            lambda q: imported(q, q, q), heads().requires_grad_(), use_reentrant=True
        ),
        "under reentrant activation checkpointing inside a step.*use_reentrant=False",
    ),
    "control flow": (
        lambda x: torch.ops.higher_order.cond(
            torch.tensor(True), lambda q: imported(q, q, q), lambda q: q.clone(), (heads(),)
        ),
        r"cond\(\) was called inside a step",
    ),
    "heads": (
        lambda x: imported(heads(), heads(2, 2, 6, DIM), heads(2, 2, 6, DIM)),
        "4 query heads and 2 key heads: set enable_gqa=True",
    ),
    "a key of its own": (
        lambda x: nn.MultiheadAttention(DIM, 2, add_bias_kv=True, batch_first=True)(
            x, x, x, need_weights=False
        ),
        "6 queries and 7 keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name, cp, batch):
    call, message = REFUSED[name]
    with (
        cp.step(batch) as local,
        pytest.raises((TypeError, ValueError, RuntimeError), match=message),
    ):
        call(local["inputs_embeds"])
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_nothing_is_left_after_steps_exceptions_and_ten_thousand_entries(cp, batch):
    before = num_function_modes()
    for _ in range(10_000):
        with routing.enabled():
            assert functional.scaled_dot_product_attention is ORIGINAL
    for _ in range(50):
        with cp.step(batch), cp.step(batch):
            assert num_function_modes() == before + 2
    with pytest.raises(KeyError), cp.step(batch):
        raise KeyError
    assert num_function_modes() == before
    assert functional.scaled_dot_product_attention is ORIGINAL


def test_nested_steps_route_to_the_inner_one(cp, routed):
    longer = {"inputs_embeds": torch.randn(1, 9, DIM)}
    with cp.step({"inputs_embeds": torch.randn(1, LENGTH, DIM)}):
        with cp.step(longer):
            imported(*[heads(1, 2, 9, DIM)] * 3)
            x = torch.randn(1, 9, DIM)
            nn.MultiheadAttention(DIM, 2, batch_first=True)(x, x, x, need_weights=False)
        imported(*[heads(1, 2, LENGTH, DIM)] * 3)
    assert len(routed) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_patch_of_sdpa_by_another_library_survives_a_routed_module(
    fails, cp, batch, routed, monkeypatch
):
    def patched(*args, **kwargs):
        return ORIGINAL(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", patched)  # after our import
    module = nn.MultiheadAttention(DIM, 2, dropout=0.3 if fails else 0.0, batch_first=True)
    expected = pytest.raises(ValueError, match="dropout_p") if fails else nullcontext()
    with cp.step(batch) as local, expected:
        module(*[local["inputs_embeds"]] * 3, need_weights=False)
    assert functional.scaled_dot_product_attention is patched
    assert len(routed) == (0 if fails else 1)


def test_documents_of_the_batch_do_not_enter_by_themselves(cp, batch):
    batch["document_ids"] = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, -1)
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0, 0]]).expand(2, -1)
    q = heads()
    with cp.step(batch):
        found = imported(q, q, q, is_causal=True)
    torch.testing.assert_close(found, ORIGINAL(q, q, q, is_causal=True))


def test_declared_calls_are_left_alone(cp, batch, routed):
    module = nn.MultiheadAttention(DIM, 2, batch_first=True)
    memory = torch.randn(2, 11, DIM)
    declared = cp.exempt(module)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    with cp.step(batch) as local:
        x = local["inputs_embeds"]
        module(x, memory, memory)
        twin(x, memory, memory)
        with cp.exempt():
            imported(heads(), heads(2, 4, 9, DIM), heads(2, 4, 9, DIM))
        assert routed == []
        with pytest.raises(AssertionError, match="does not match value shape"):
            # The hook that marks the module must be left all the same.
            module(x, memory[:1], memory[:1, :2])
        imported(heads(), heads(), heads())
        declared.undo()
        with pytest.raises(ValueError, match="need_weights"):
            module(x, memory, memory)
    assert len(routed) == 1


def test_a_declaration_that_sticks_ends_with_its_step(cp, batch, routed):
    module = nn.Linear(DIM, DIM)
    cp.exempt(module)
    module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), cp.step(batch) as local:
        module(local["inputs_embeds"])
    assert active_step.num_exempt() == 0
    with cp.step(batch):
        imported(heads(), heads(), heads())
    assert len(routed) == 1


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_step_inside_a_declaration_is_routed(cp, batch, routed):
    with cp.exempt(), cp.step(batch):
        imported(heads(), heads(), heads())
    assert len(routed) == 1


def test_autocast_lowers_what_it_would_lower_for_sdpa(cp, batch):
    q, k = heads(), heads().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = ORIGINAL(q, k, k, is_causal=True)
        with cp.step(batch):
            found = imported(q, k, k, is_causal=True)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)


def test_checkpointing_inside_compiled_code_is_routed(cp, batch, routed):
    def model(q):
        return checkpoint(lambda x: imported(x, x, x), q * 2, use_reentrant=False).sin()

    compiled = torch.compile(model, backend="aot_eager")
    q = heads()
    expected = model(q)
    with cp.step(batch):
        torch.testing.assert_close(compiled(q), expected)
    assert len(routed) == 1


MASKS = {
    "square": (LENGTH, LENGTH),
    "of rows": (2, 1, LENGTH, LENGTH),
    "of heads": (4, LENGTH, LENGTH),
    "of all": (2, 4, LENGTH, LENGTH),
    "of keys": (2, 1, 1, LENGTH),
    "of queries": (LENGTH, 1),
    "a number": (1, 1),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_mean_to_torch(name, dtype, cp, batch):
    q, k, v = heads().requires_grad_(), heads(), heads()
    mask = torch.randn(MASKS[name])
    mask = mask > -1 if dtype == torch.bool else mask
    expected = ORIGINAL(q, k, v, attn_mask=mask)
    (exact,) = torch.autograd.grad(expected.square().sum(), q)
    with cp.step(batch):
        found = imported(q, k, v, attn_mask=mask)
    (grad,) = torch.autograd.grad(found.square().sum(), q)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, exact)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 4), (2, 3, 2, 4)])
def test_any_number_of_leading_dims(lead, cp, batch):
    q, k, v = (heads(*lead, LENGTH, DIM) for _ in range(3))
    mask = torch.randn(*lead, LENGTH, LENGTH)
    with cp.step(batch):
        found = imported(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(found, ORIGINAL(q, k, v, attn_mask=mask, scale=0.3))


def test_code_compiled_outside_a_step_is_routed_inside_one(cp, batch, routed):
    def model(q):
        return functional.scaled_dot_product_attention(q * 2, q, q, is_causal=True).sin()

    graphs = []

    def backend(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    compiled = torch.compile(model, backend=backend)
    q = heads()
    expected = model(q)
    torch.testing.assert_close(compiled(q), expected)
    for _ in range(3):
        with cp.step(batch):
            torch.testing.assert_close(compiled(q), expected)
        torch.testing.assert_close(compiled(q), expected)
    assert len(routed) == 3
    # Once outside; inside, what comes before attention and what comes after it; never again.
    assert graphs == [["mul", "scaled_dot_product_attention", "sin"], ["mul"], ["sin"]]
