"""Gathered keys, ALiBi and indexers: exact, undone, and refused where they must be."""

import copy
import pickle
from unittest import mock

import pytest
import torch

from hf_patches import enable
from hf_patches.mixers import block_indexer, gathered_keys
from lightning_cp.geometry.mask import Mask
from lightning_cp.step import active_step
from tests.hf_patches.test_enable import loss_in_step, trace
from tests.parity import zoo
from tests.parity.hf import Job, build_batch, compare, compare_all, unpack
from tests.parity.test_hf import check, spread

PAD = 1
# One of each: ALiBi as a bias and as slopes, both names of caches, an indexer, blocks, values.
EACH = ("bloom", "mpt", "rembert", "gptj", "deepseek_v32", "minimax_m3_vl_text", "doge")


def batch_of(kind="packed"):
    return build_batch(Job("llama", kind), zoo.VOCAB_SIZE, PAD)


def stock_loss(name, batch, **options):
    return zoo.build_model(name, **options)(**unpack(batch, PAD)).loss


# ---------------------------------------------------------------- on ranks


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["packed", pytest.param("right", marks=pytest.mark.slow)])
def test_each_mechanism_is_exact_in_double_precision(ranks, kind):
    jobs = spread(EACH, (kind,), dtype=torch.float64)
    check(ranks, 2, list(jobs), limit=1e-9, loss_limit=1e-11)


@pytest.mark.ranks
def test_padding_on_the_left_and_other_numbers_of_ranks_change_nothing(ranks):
    check(ranks, 3, list(spread(("falcon:alibi", "codegen"), ("left",))))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("reentrant", "names"),
    [
        (False, ("bloom", "deepseek_v32")),
        (True, ("xglm",)),
        pytest.param(False, ("xglm",), marks=pytest.mark.slow),
        pytest.param(True, ("bloom", "deepseek_v32"), marks=pytest.mark.slow),
    ],
)
def test_layers_may_be_recomputed_in_backward(ranks, reentrant, names):
    check(ranks, 2, list(spread(names, ("packed",), checkpointing=reentrant)))


@pytest.mark.ranks
def test_an_encoder_is_exact(ranks):
    check(ranks, 2, list(spread(("megatron-bert",), ("packed", "left"), head="masked")))


def test_dense_masks_hide_padding_between_tokens(cp):
    batch = {key: x for key, x in batch_of("plain").items() if key != "attention_mask"}
    real = torch.ones_like(batch["input_ids"])
    real[0, 5:9] = real[1, :4] = real[1, 30] = 0
    with cp.step({**batch, "attention_mask": real}):
        found = gathered_keys.visible_keys(
            Mask(causal=True), active_step.current(), torch.device("cpu")
        )
    place = torch.arange(real.shape[1])
    expected = (place <= place[:, None]) & (real[:, None, None] == 1)
    assert torch.equal(found, expected)


# What is broken below has no public name: only a fault inside shows whether the suite is sharp.
_GATHER = gathered_keys.GatheredKeys._gather


def _no_gradient_of_others():
    """Keys of other ranks without their gradient."""

    def cut(self, x):
        full = _GATHER(self, x.detach())
        return full + (_GATHER(self, x) - full).detach() + 0 * x.sum()

    return mock.patch.object(gathered_keys.GatheredKeys, "_gather", cut)


def _other_order():
    """The keys of two tokens exchanged."""
    return mock.patch.object(
        gathered_keys.GatheredKeys, "_gather", lambda self, x: _GATHER(self, x).roll(1, -2)
    )


def _all_documents():
    table = gathered_keys._table
    return mock.patch.object(
        gathered_keys,
        "_table",
        lambda mask, *others: table(Mask(causal=True, documents=False), *others),
    )


def _chooses_locally():
    """An indexer that sees this rank's keys only, and others as zeros."""

    def update(self, keys, *_):
        return 0 * _GATHER(self, keys)

    return mock.patch.object(gathered_keys.GatheredKeys, "update_indexer", update)


def _blocks_of_the_row():
    count = block_indexer.count_positions
    return mock.patch.object(
        block_indexer, "count_positions", lambda _, length: count(None, length)
    )


BREAKS = {
    "keys without the gradient of other ranks": (_no_gradient_of_others, Job("xglm")),
    "keys in another order": (_other_order, Job("xglm")),
    "documents that see each other": (_all_documents, Job("doge", "packed")),
    "an indexer without keys": (_chooses_locally, Job("glm_moe_dsa")),
    "blocks counted over documents": (_blocks_of_the_row, Job("minimax_m3_vl_text", "packed")),
}


def compare_broken(what):
    breaking, job = BREAKS[what]
    with breaking():
        return compare(job)


QUICK = (
    "keys without the gradient of other ranks",
    "documents that see each other",
    "an indexer without keys",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what",
    [what if what in QUICK else pytest.param(what, marks=pytest.mark.slow) for what in BREAKS],
)
def test_the_suite_notices(ranks, what):
    found = ranks(2).run(compare_broken, what)[0]
    assert found.worst[1] > 1e-2, found.worst


# ---------------------------------------------------------------- enable and undo


@pytest.mark.parametrize("name", EACH)
def test_undo_leaves_no_trace(name):
    model = zoo.build_model(name)
    before = trace(model)
    handle = enable(model)
    assert trace(model) != before
    handle.undo()
    assert trace(model) == before


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["falcon", "falcon:alibi", "deepseek_v32", "doge", "gptj"])
def test_outside_of_steps_models_are_the_stock_ones(cp, name, attention):
    attention = "eager" if name == "gptj" else attention
    batch, kind = batch_of("left"), {"attention": attention}
    exact = stock_loss(name, batch, **kind)
    model = zoo.build_model(name, **kind)
    enable(model)
    assert torch.equal(model(**batch).loss, exact)
    torch.testing.assert_close(loss_in_step(model, cp, batch), exact)
    with torch.no_grad():
        cached = model(batch["input_ids"], use_cache=True).past_key_values
    assert cached.get_seq_length() == batch["input_ids"].shape[1]


HIDDEN = torch.ones(61, 61).triu(1) * torch.finfo(torch.float32).min
NOISE = torch.rand(2, 1, 61, 61, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "attention", "mask"),
    [
        ("gptj", "eager", HIDDEN - NOISE),
        ("xglm", "eager", HIDDEN - NOISE),
        ("falcon", "eager", HIDDEN - NOISE),
        ("falcon", "sdpa", HIDDEN - NOISE),
        ("deepseek_v32", "sdpa", HIDDEN - NOISE),
        ("doge", "sdpa", HIDDEN + NOISE),
        ("mpt", "eager", torch.where(NOISE < 0.5, HIDDEN, 0)),  # hides where it is not 0
        ("mpt", "eager", (HIDDEN < 0) & (NOISE < 0.5)),  # hides where it is true
        ("gptj", "eager", (HIDDEN == 0) | (NOISE < 0)),  # adds 1 where it is true
    ],
)
def test_dense_masks_mean_what_the_stock_model_takes_them_for(cp, name, attention, mask):
    batch, model = batch_of("plain"), zoo.build_model(name, attention=attention)
    given = {**batch, "attention_mask": mask}
    exact = model(**given).loss
    assert (exact - model(**batch).loss).abs() > 1e-4
    enable(model)
    torch.testing.assert_close(loss_in_step(model, cp, given), exact)


COPIED = ("falcon", "xglm", "deepseek_v32", "minimax_m3_vl_text")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "deepcopy") for name in COPIED),
        (COPIED[0], "pickle"),
        *(pytest.param(name, "pickle", marks=pytest.mark.slow) for name in COPIED[1:]),
    ],
)
def test_enabled_models_are_copied(cp, way, name):
    batch, model = batch_of(), zoo.build_model(name)
    enable(model)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the copy does not refer to it
    torch.testing.assert_close(loss_in_step(other, cp, batch), stock_loss(name, batch))
    enable(other).undo()
    assert trace(other) == trace(zoo.build_model(name))


# ---------------------------------------------------------------- refusals


def test_attention_that_cannot_take_a_mask_is_refused():
    model = zoo.build_model("gptj")
    # `set_attn_implementation` wants the kernels installed.
    model.config._attn_implementation_internal = "flash_attention_2"
    before = trace(model)
    with pytest.raises(ValueError, match=r"is 'flash_attention_2', but .*needs 'eager' or 'sdpa'"):
        enable(model)
    assert trace(model) == before


@pytest.mark.parametrize(
    ("name", "kind", "given", "message"),
    [
        ("minimax_m3_vl_text", "left", {}, r"padding before tokens.*padding_side = 'right'"),
        ("xglm", "plain", {"attention_mask": torch.ones(2, 1, 61, 9)}, r"shape \(2, 1, 61, 9\) in"),
        ("bloom", "plain", {"output_attentions": True}, "no rank holds the attention weights"),
    ],
)
def test_what_a_step_cannot_serve_is_refused(cp, name, kind, given, message):
    model = zoo.build_model(name)
    enable(model)
    with pytest.raises(ValueError, match=message):
        loss_in_step(model, cp, batch_of(kind), **given)


@pytest.mark.ranks
def test_refused_batches_raise_on_all_ranks(ranks):
    found = ranks(2).run(compare_all, [Job("minimax_m3_vl_text", "left"), Job("xglm")])
    assert all(isinstance(first, str) and "Pad on the right" in first for first, _ in found)
    assert found[0][1].worst[1] < 1e-3


def test_dropout_in_a_part_of_the_config_is_refused():
    model = zoo.build_model("mpt")
    vars(model.config.attn_config)["attn_pdrop"] = 0.1  # transformers 5.22 takes integers only
    with pytest.raises(ValueError, match=r"attn_pdrop = 0.1: attention dropout is not exact"):
        enable(model)


def test_experts_that_see_other_tokens_are_refused():
    model = zoo.build_model("doge")
    model.config.is_moe = True
    with pytest.raises(ValueError, match="the experts of Doge are chosen by the logits of other"):
        enable(model)
