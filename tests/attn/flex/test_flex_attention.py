"""Which calls of FlexAttention are ours, what is refused, and that nothing is left behind."""

import copy
import logging
import pickle

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import lightning_cp
from lightning_cp import Mask, attention, routing
from lightning_cp.attn.flex import flex_attention as flex_api
from lightning_cp.attn.flex import kernel
from lightning_cp.private import functions, modes
from tests import doors, torch_names
from tests.attn.flex.cases import (
    MASKS,
    SCORES,
    build,
    differentiate,
    flex_whole,
    make_flex_case,
    weights_of_lse,
)
from tests.oracle import errors

LENGTH = 6
CODE = flex_attention.__code__


@pytest.fixture
def cp():
    return doors.parallel(None)


@pytest.fixture
def batch():
    return {"inputs_embeds": torch.zeros(2, LENGTH, 1)}


@pytest.fixture
def routed(monkeypatch):
    """Count the calls that attend inside a step."""
    calls = []
    attend = flex_api.attend_in_step  # all that differs from a call that is not routed

    def counted(*args):
        calls.append(args)
        return attend(*args)

    monkeypatch.setattr(flex_api, "attend_in_step", counted)
    return calls


def heads(*shape):
    return torch.randn(*shape or (2, 4, LENGTH, 8))


def causal(b, h, q, k):
    return q >= k


CALLERS = {
    "imported": lambda: flex_attention(heads(), heads(), heads()),
    "module": lambda: torch_flex.flex_attention(heads(), heads(), heads()),
    "ours": lambda: lightning_cp.flex_attention(heads(), heads(), heads()),
    "by name": lambda: flex_attention(query=heads(), key=heads(), value=heads(), scale=0.5),
    "compiled": lambda: torch.compile(flex_attention, backend="eager")(heads(), heads(), heads()),
    "compiled around": lambda: torch.compile(
        lambda x: flex_attention(x + 1, x, x).sin(), backend="eager"
    )(heads()),
}


@pytest.mark.parametrize(
    "mode",
    [torch.enable_grad, torch.inference_mode, pytest.param(torch.no_grad, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", CALLERS)
def test_calls_are_routed_whichever_way_they_come(name, mode, cp, batch, routed):
    with mode(), cp.step(batch):
        CALLERS[name]()
    assert len(routed) == 1


@pytest.mark.parametrize("name", CALLERS)
def test_outside_a_step_paused_and_declared_nothing_is_routed(name, cp, batch, routed):
    CALLERS[name]()
    with cp.step(batch), cp.paused():
        CALLERS[name]()
    with cp.step(batch), cp.exempt():
        CALLERS[name]()
    assert routed == []


def test_torchs_function_is_itself_again_after_a_step(cp, batch):
    with cp.step(batch):
        assert flex_attention.__code__ is not CODE
        with cp.step(batch), cp.reference(batch):
            assert flex_attention.__code__ is not CODE
        assert flex_attention.__code__ is not CODE
    assert flex_attention.__code__ is CODE
    with cp.reference(batch):
        assert flex_attention.__code__ is not CODE
    with pytest.raises(KeyError), cp.step(batch):
        raise KeyError
    assert flex_attention.__code__ is CODE


def test_the_stand_in_takes_what_torchs_function_takes():
    assert routing.flex_detour.fits


def test_a_function_with_other_arguments_is_left_alone():
    def theirs(query, key):
        return "theirs"

    def ours(query):
        return "ours"

    def also_ours(query, key):
        return "ours"

    with functions.Detour(theirs, ours) as _, functions.Detour(theirs, ours):
        assert theirs(1, 2) == "theirs"
    kept = functions.copy_function(theirs)
    detour = functions.Detour(theirs, also_ours)
    with detour:
        with detour:
            assert theirs(1, 2) == "ours"
        assert theirs(1, key=2) == "ours"
        assert kept(1, 2) == "theirs"
    assert theirs(1, 2) == "theirs"


class Seen(TorchFunctionMode):
    """Notes calls of two functions."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.sin, torch.cos):
            self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_are_taken_off_and_put_back(cp, batch):
    x = torch.ones(2)
    with Seen() as outer, cp.step(batch), Seen() as inner:
        with modes.without_modes():
            torch.sin(x)
        with pytest.raises(KeyError), modes.without_modes():
            raise KeyError
        assert outer.functions == inner.functions == []
        torch.cos(x)
    assert outer.functions == inner.functions == [torch.cos]


def test_compiled_models_go_in_and_out_of_steps_without_being_compiled_again(cp, batch):
    """Inside, the graph breaks around attention; outside it stays whole."""
    torch.compiler.reset()
    counter = torch_names.counting_backend("eager")
    x = heads()

    @torch.compile(backend=counter)
    def model(x):
        return flex_attention(x + 1, x, x).sin()

    exact = flex_attention(x + 1, x, x).sin()
    counts = []
    for _ in range(3):
        with cp.step(batch):
            inside = model(x)
        counts.append(counter.frame_count)
        outside = model(x)
        counts.append(counter.frame_count)
        assert torch.allclose(inside, exact, atol=1e-5)
        assert torch.allclose(outside, exact, atol=1e-5)
    torch.compiler.reset()
    assert counts == [2, 3, 3, 3, 3, 3]


def leaves_of(case):
    inputs = case.inputs
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "table": case.captured.table}
    return {name: x.requires_grad_() for name, x in leaves.items()}


@pytest.mark.parametrize("score", ["none", "relative"])
@pytest.mark.parametrize("where", ["nowhere", "paused", "unsharded", "alone", "step"])
def test_a_script_trains_on_a_laptop(where, score, cp):
    """torch has no backward on a CPU; ours has, inside a step and outside."""
    case = make_flex_case("document", score)
    leaves = leaves_of(case)
    mask_mod = build("document", MASKS, case.captured)
    block_mask = create_block_mask(mask_mod, 2, None, 37, 37, device="cpu")
    kwargs = {
        "score_mod": build(score, SCORES, case.captured),
        "block_mask": block_mask,
        "enable_gqa": True,
        "return_lse": True,
    }
    q, k, v, _ = leaves.values()
    rows = {"inputs_embeds": torch.zeros(2, 37, 1)}
    if where == "nowhere":
        out, lse = lightning_cp.flex_attention(q, k, v, **kwargs)
    elif where == "alone":
        with cp.reference(rows):
            out, lse = flex_attention(q, k, v, **kwargs)
    else:
        with cp.step(rows):
            if where == "paused":
                with cp.paused():
                    out, lse = flex_attention(q, k, v, **kwargs)
            elif where == "unsharded":
                with cp.exempt():
                    out, lse = flex_attention(q, k, v, **kwargs)
            else:
                kwargs["block_mask"] = cp.block_mask(mask_mod)
                out, lse = flex_attention(q, k, v, **kwargs)
    dlse = weights_of_lse(case.inputs.q[..., 0].detach())
    found = differentiate(out, lse, leaves, case.inputs.dout, dlse)
    assert max(errors(found, flex_whole(case)).values()) < 1e-10


def test_without_gradients_outside_a_step_it_is_torchs():
    q, k = heads(), heads(2, 4, 9, 8)  # cross-attention, too
    with torch.no_grad():
        ours = lightning_cp.flex_attention(q, k, k, return_aux=AuxRequest(lse=True))
        theirs = flex_attention(q, k, k, return_aux=AuxRequest(lse=True))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1].lse, theirs[1].lse)
    assert ours[1].max_scores is None


def test_a_mask_of_a_step_serves_whole_rows_too(cp, batch):
    q = heads()
    with cp.step(batch):
        mask = cp.block_mask(causal)
        inside = flex_attention(q, q, q, block_mask=mask)
        with cp.paused():
            paused = flex_attention(q, q, q, block_mask=mask)
    assert torch.allclose(inside, paused, atol=1e-6)
    exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.allclose(inside, exact, atol=1e-6)


def test_what_is_returned(cp, batch):
    q = heads()
    with cp.step(batch):
        assert isinstance(flex_attention(q, q, q), torch.Tensor)
        _, lse = flex_attention(q, q, q, return_lse=True)
        assert lse.shape == (2, 4, LENGTH)
        _, aux = flex_attention(q, q, q, return_aux=AuxRequest(max_scores=True))
        assert aux.lse is None
        scores = q @ q.mT / 8**0.5
        assert torch.allclose(aux.max_scores, scores.amax(-1), atol=1e-5)
        low = flex_attention(*[q.bfloat16()] * 3, return_lse=True)
        assert (low[0].dtype, low[1].dtype) == (torch.bfloat16, torch.float32)


def test_it_is_said_once_that_functions_run_in_plain_torch(cp, batch, caplog):
    kernel.log_plain_torch.cache_clear()
    with caplog.at_level(logging.INFO, "lightning_cp.attn.flex.kernel"), cp.step(batch):
        for _ in range(3):
            flex_attention(heads(), heads(), heads())
    said = [record.message for record in caplog.records if record.name == kernel.__name__]
    assert said == [
        "FlexAttention has no backward on device=cpu: mask_mod and score_mod are evaluated in "
        "plain torch (exact, but slow)"
    ]


def whole_mask(rows=None, length=LENGTH):
    return create_block_mask(causal, rows, None, length, length, device="cpu")


REFUSED = {
    "other keys": (
        lambda cp: flex_attention(heads(), heads(2, 4, 9, 8), heads(2, 4, 9, 8)),
        r"flex_attention\(\) got 6 queries and 9 keys inside a step.*cp.exempt\(module\)",
    ),
    "other queries": (
        lambda cp: flex_attention(heads(2, 4, 1, 8), heads(), heads()),
        r"flex_attention\(\) got 1 queries and 6 keys inside a step.*cp.paused\(\)",
    ),
    "three dims": (
        lambda cp: flex_attention(*[heads(4, LENGTH, 8)] * 3),
        r"needs \[batch, heads, tokens, head_dim\]; it got q \(4, 6, 8\)",
    ),
    "other rows": (
        lambda cp: flex_attention(heads(), heads(1, 4, LENGTH, 8), heads(1, 4, LENGTH, 8)),
        r"do not fit together: q \(2, 4, 6, 8\), k \(1, 4, 6, 8\)",
    ),
    "heads": (
        lambda cp: flex_attention(heads(), *[heads(2, 2, LENGTH, 8)] * 2),
        "got 4 query heads and 2 key heads: set enable_gqa=True",
    ),
    "uneven heads": (
        lambda cp: flex_attention(heads(), *[heads(2, 3, LENGTH, 8)] * 2, enable_gqa=True),
        "got 4 query heads and 3 key heads.*evenly",
    ),
    "precisions": (
        lambda cp: flex_attention(heads(), heads().double(), heads()),
        "one floating dtype, but are torch.float32, torch.float64, torch.float32",
    ),
    "a mask of other rows": (
        lambda cp: flex_attention(*[heads()] * 3, block_mask=whole_mask(3)),
        "the block mask has 3 samples, but the tensors have a batch of 2",
    ),
    "a mask of other lengths": (
        lambda cp: flex_attention(*[heads()] * 3, block_mask=whole_mask(length=9)),
        r"block mask of 9 x 9 tokens inside a step whose sequences have 6.*cp.block_mask\(mask_mod",
    ),
    "a mask that is none": (
        lambda cp: flex_attention(*[heads()] * 3, block_mask=torch.ones(6, 6).bool()),
        r"got a Tensor. Pass a BlockMask of full sequences, or cp.block_mask\(mask_mod\)",
    ),
    "a mask that was sliced": (
        lambda cp: flex_attention(*[heads()] * 3, block_mask=whole_mask()[:, :, 0]),
        "mask_mod from a sliced BlockMask|block mask of .* inside a step",
    ),
    "lse twice": (
        lambda cp: flex_attention(*[heads()] * 3, return_lse=True, return_aux=AuxRequest()),
        "got return_lse and return_aux. Pass one",
    ),
    "reentrant checkpointing": (
        lambda cp: checkpoint(
            lambda q: flex_attention(q, q, q), heads().requires_grad_(), use_reentrant=True
        ),
        r"flex_attention\(\) was called under reentrant.*use_reentrant=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name, cp, batch):
    call, message = REFUSED[name]
    with (
        cp.step(batch),
        pytest.raises((TypeError, ValueError, RuntimeError), match=message),
    ):
        call(cp)


def test_a_block_mask_belongs_to_a_step(cp, batch):
    with pytest.raises(RuntimeError, match=r"cp.block_mask\(\) was called outside a step"):
        cp.block_mask(causal)
    with (
        doors.parallel(None).step(batch),
        pytest.raises(RuntimeError, match="of another ContextParallel"),
    ):
        cp.block_mask(causal)


def test_the_flex_kernel_wants_whole_rows():
    with pytest.raises(
        ValueError, match=r"kernel='flex'\) computes full sequences in one call.*algorithm='gather'"
    ):
        doors.parallel(None, kernel="flex", algorithm="ring")
    doors.parallel(None, kernel="flex", algorithm="gather")


def test_auto_does_not_take_the_flex_kernel_on_a_cpu(cp, batch, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the flex kernel was taken")

    monkeypatch.setattr("lightning_cp.attn.choose.build_flex_call", never)
    with cp.step(batch):
        attention(heads(), heads(), heads(), mask=Mask(causal=True), softcap=2.0)
    with (
        doors.parallel(None, kernel="flex").step(batch),
        pytest.raises(AssertionError, match="was taken"),
    ):
        attention(heads(), heads(), heads(), mask=Mask(causal=True))


def test_a_recompute_of_ours_outside_its_step_is_refused(cp, batch):
    """Reentrant checkpointing keeps nothing of the forward; ours is called where torch's is."""
    q = heads().requires_grad_()
    with cp.step(batch, training=False):
        out = checkpoint(lambda x: lightning_cp.flex_attention(x, x, x), q, use_reentrant=True)
    with pytest.raises(RuntimeError, match="runs again in backward.*its step has ended"):
        out.sum().backward()


def test_modules_that_hold_the_function_are_copied_and_pickled(cp, batch):
    with cp.step(batch):
        assert copy.deepcopy(flex_attention) is flex_attention
        assert pickle.loads(pickle.dumps(flex_attention)) is flex_attention
