"""Mixers whose stock module runs on rows: documents of full sequences, or of ranges and halos."""

import copy
import pickle
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch

from hf_patches import enable
from hf_patches.mixers import replicated
from lightning_cp.geometry.layout import build_layout
from lightning_cp.patch import patches_of
from lightning_cp.sequence.token_map import build_token_map
from tests.parity import zoo
from tests.parity.hf import Double, Job, build_batch, build_cp, compare, errors
from tests.parity.test_hf import check, spread
from tests.ranks import average_over_ranks

PAD = 1
LAYOUTS = ("contiguous", "zigzag", "balanced")


# ---------------------------------------------------------------- rows


def find_rows(layout, rank, *, documents, padding, reach):
    """Return the document tokens of each row, and this rank's tokens as (row, column)."""
    batch_size, seq_len = documents.shape
    tokens = build_token_map(layout, rank, documents=documents, padding=padding)
    if reach is None:
        source = replicated.full_source(tokens, batch_size=batch_size, seq_len=seq_len)
        flat = np.arange(batch_size * seq_len)
    else:
        source = replicated.near_source(tokens, batch_size=batch_size, reach=reach)
        flat = extended(tokens, batch_size, seq_len, reach)
    if not len(source.starts):
        return tokens, [], np.full((batch_size, len(tokens.positions)), -1)
    index, _, back = replicated.pack(source)
    values = np.append(np.concatenate([flat[group].ravel() for group in index]), -1)
    return tokens, [flat[group] for group in index], values[back].reshape(batch_size, -1)


def extended(tokens, batch_size, seq_len, reach):
    """Return the index in the full batch of each token of the ranges and their halos."""
    parts = [np.arange(held.tokens.start - reach, held.tokens.stop) for held in tokens.held]
    return (np.concatenate(parts) + np.arange(batch_size)[:, None] * seq_len).ravel()


DOCUMENTS = np.array([[0] * 5 + [1] + [2] * 7, [0] * 2 + [1] * 11])
PADDING = np.zeros((2, 13), bool)
PADDING[0, :3], PADDING[1, 10:] = True, True


@pytest.mark.parametrize("reach", [None, 1, 2, 20])
@pytest.mark.parametrize("name", LAYOUTS[:2])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_each_real_token_is_found_after_the_tokens_that_it_sees(cp_size, name, reach):
    layout = build_layout(name, seq_len=13, cp_size=cp_size)
    for rank in range(cp_size):
        tokens, groups, own = find_rows(
            layout, rank, documents=DOCUMENTS, padding=PADDING, reach=reach
        )
        for sample in range(2):
            for column, position in enumerate(tokens.positions):
                real = position < 13 and not PADDING[sample, position]
                assert own[sample, column] == (sample * 13 + position if real else -1)
                if real:
                    seen = [
                        p
                        for p in range(
                            max(0, position - (13 if reach is None else reach)), position
                        )
                        if DOCUMENTS[sample, p] == DOCUMENTS[sample, position]
                        and not PADDING[sample, p]
                    ]
                    assert_sees(groups, sample * 13 + position, [sample * 13 + p for p in seen])


def assert_sees(groups, token, seen):
    for row in (row for group in groups for row in group.tolist()):
        if token in row:
            at = row.index(token)
            assert row[max(0, at - len(seen)) : at] == seen
            return
    raise AssertionError(f"{token} is in no row")


def test_rows_are_at_least_half_full():
    lengths = np.array([1, 100, 3, 64, 2, 99, 63])
    ids = np.repeat(np.arange(7), lengths)[None]
    layout = build_layout("contiguous", seq_len=len(ids[0]), cp_size=1)
    tokens = build_token_map(layout, 0, documents=ids, padding=None)
    index, _, _ = replicated.pack(replicated.full_source(tokens, batch_size=1, seq_len=len(ids[0])))
    assert sum(group.size for group in index) < 2 * lengths.sum()


def test_rows_have_a_length_that_the_mixer_takes():
    layout = build_layout("contiguous", seq_len=13, cp_size=1)
    tokens = build_token_map(layout, 0, documents=DOCUMENTS, padding=None)
    index, _, _ = replicated.pack(
        replicated.full_source(tokens, batch_size=2, seq_len=13), multiple=8
    )
    assert {group.shape[1] % 8 for group in index} == {0}


# ---------------------------------------------------------------- models on ranks


@pytest.mark.slow
@pytest.mark.ranks
def test_models_are_those_of_one_process(ranks):
    check(ranks, 2, list(spread(("jamba", "zaya", "deepseek_v4", "recurrent_gemma"))))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("cp_size", [3, 4])
def test_other_numbers_of_ranks_change_nothing(ranks, cp_size):
    check(ranks, cp_size, list(spread(("rwkv", "inkling_text"), ("packed", "left"))))


EXACT = [*spread(("mamba", "zaya", "deepseek_v4"), ("packed", "left"), dtype=torch.float64)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cp_size", "jobs"),
    [(3, EXACT[:-1:2]), pytest.param(2, EXACT, marks=pytest.mark.slow)],
    ids=["3", "2"],
)
def test_in_double_precision_the_algebra_is_exact(ranks, cp_size, jobs):
    check(ranks, cp_size, jobs, limit=1e-9, loss_limit=1e-11)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("names", "reentrant"),
    [
        (("zaya",), False),
        (("recurrent_gemma",), True),  # has a mask, which knows its step
        pytest.param(("jamba",), False, marks=pytest.mark.slow),
        pytest.param(("deepseek_v4",), True, marks=pytest.mark.slow),
    ],
)
def test_layers_may_be_recomputed_in_backward(ranks, names, reentrant):
    check(ranks, 2, list(spread(names, ("packed",), checkpointing=reentrant)))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mamba", pytest.param("zaya", marks=pytest.mark.slow)])
def test_ranks_may_hold_padding_only(ranks, name):
    found = ranks(3).run(short_step, name)[0]
    assert max(found.values()) < 1e-9


def short_step(name):
    """Compare a step on two tokens."""
    batch = {"input_ids": torch.tensor([[7, 8]]), "labels": torch.tensor([[7, 8]])}
    stock, model = (zoo.build_model(name, dtype=torch.float64).eval() for _ in range(2))
    cp = build_cp()
    enable(model)
    with Double():
        stock(**batch, use_cache=False).loss.backward()
        with cp.step(batch) as local:
            loss = model(**local).loss
        loss.backward()
    exact = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if name in exact}
    average_over_ranks(list(found.values()))
    return errors(found, exact)


def lost_gradients():
    full_tokens = replicated.full_tokens
    return mock.patch.object(
        replicated, "full_tokens", lambda x, step: full_tokens(x.detach(), step)
    )


def joined_documents():
    def join(tokens, **options):
        source = full_source(tokens, **options)
        return source if len(source.starts) < 3 else joined(source)

    def joined(source):
        """Join the second document, a single token, and the third, whose tokens have labels."""
        lengths = np.delete(source.lengths, 2)
        lengths[1] += source.lengths[2]
        return replicated.replace(
            source,
            starts=np.delete(source.starts, 2),
            counted=np.delete(source.counted, 2),
            lengths=lengths,
        )

    full_source = replicated.full_source
    return mock.patch.object(replicated, "full_source", join)


def short_reach():
    spec = replicated.SPECS["ZayaCCAProjection"]
    short = replicated.replace(spec, reach=lambda mixer: mixer.conv_kernel_size - 1)
    return mock.patch.dict(replicated.SPECS, {"ZayaCCAProjection": short})


BREAKS = {
    "gradients that are not sent back": (lost_gradients, Job("mamba")),
    "a document that goes on in the next": (joined_documents, Job("mamba", "packed")),
    "a halo one token short": (short_reach, Job("zaya")),
}


@pytest.mark.ranks
@pytest.mark.parametrize("what", BREAKS)
def test_the_suite_notices(ranks, what):
    found = ranks(2).run(compare_broken, what)[0]
    assert found.worst[1] > 1e-2, found.worst


def compare_broken(what):
    breaking, job = BREAKS[what]
    with ExitStack() as stack:
        stack.enter_context(breaking())
        return compare(job)


# ---------------------------------------------------------------- enabling


@pytest.fixture
def batch():
    return build_batch(Job("mamba", "plain"), zoo.VOCAB_SIZE, PAD)


def loss_in_step(model, cp, batch, **given):
    with cp.step(batch) as local:
        return model(**{**local, **given}).loss


@pytest.mark.parametrize("name", ["mamba", "rwkv", "deepseek_v4"])
def test_enabled_models_are_copied_and_restored(cp, batch, name):
    model = zoo.build_model(name)
    loss = model(**batch, use_cache=False).loss
    before = [sorted(module.__dict__) for module in model.modules()]
    handle = enable(model)
    torch.testing.assert_close(model(**batch, use_cache=False).loss, loss)  # outside of steps
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert any(is_replaced(m) for m in other.modules() if m is not other)
        torch.testing.assert_close(loss_in_step(other, cp, batch), loss)
        enable(other).undo()
        assert not any(is_replaced(m) for m in other.modules())
    handle.undo()
    assert [sorted(module.__dict__) for module in model.modules()] == before
    torch.testing.assert_close(model(**batch, use_cache=False).loss, loss)


def is_replaced(module):
    return any(patch.owner is module for patch in patches_of(module, "forward"))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mamba", {"cache_params": object()}, "got `cache_params` inside a step: a state or cache"),
        ("mamba", {"use_cache": True}, "use_cache=True inside a step"),
        ("rwkv", {"state": [torch.zeros(2)]}, "got `state` inside a step"),
        ("xlstm", {"cache_params": object()}, "cache_params|rnn_state"),
    ],
)
def test_states_are_refused(cp, batch, name, given, message):
    model = zoo.build_model(name)
    enable(model)
    with pytest.raises((ValueError, AttributeError), match=message):
        loss_in_step(model, cp, batch, **given)


def test_padding_in_the_middle_is_refused(cp, batch):
    model = zoo.build_model("mamba")
    enable(model)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 7:9] = 0
    with pytest.raises(ValueError, match="hides tokens in the middle of a sequence"):
        loss_in_step(model, cp, {**batch, "attention_mask": mask})


def test_dropout_is_refused():
    model = zoo.build_model("mamba")
    model.backbone.layers[1].mixer.some = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"layers.1.mixer \(MambaMixer\) has dropout \(p = 0.1\)"):
        enable(model)


def test_arguments_of_unknown_tokens_are_refused(cp, batch):
    model = zoo.build_model("deepseek_v4")
    enable(model)
    with pytest.raises(ValueError, match="Attention got `extra`, which is not supported inside"):
        loss_in_step(model, cp, batch, extra=(torch.zeros(2),))


def test_masks_of_the_caller_are_refused(cp, batch):
    model = zoo.build_model("deepseek_v4")
    enable(model)
    mask = torch.ones(2, 1, 61, 61).tril().bool()
    with pytest.raises(ValueError, match="got an attention mask that is not a causal one"):
        loss_in_step(model, cp, {**batch, "attention_mask": mask})
