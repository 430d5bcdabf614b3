"""Base models that run on full sequences on every rank: exact, undone, and refused where needed."""

import copy
import pickle
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel

from hf_patches import enable
from hf_patches.mixers import base_model
from tests import doors
from tests.hf_patches.test_enable import loss_in_step, trace
from tests.parity import zoo
from tests.parity.hf import Double, Job, build_batch, compare, errors, gradients, unpack
from tests.parity.test_hf import check, spread

PAD = 1
NAMES = ("big_bird", "gpt_neo", "openai-gpt", "roformer", "xlm")  # xlnet mixes dtypes itself


def batch_of(kind="packed"):
    return build_batch(Job("llama", kind), zoo.VOCAB_SIZE, PAD)


# ---------------------------------------------------------------- on ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cp_size", "kinds"),
    [
        (2, ("packed",)),
        (3, ("left",)),
        pytest.param(1, ("packed", "left"), marks=pytest.mark.slow),
        pytest.param(3, ("packed", "right"), marks=pytest.mark.slow),
    ],
)
def test_models_are_exact_in_double_precision(ranks, cp_size, kinds):
    jobs = spread(NAMES, kinds, dtype=torch.float64)
    check(ranks, cp_size, list(jobs), limit=1e-9, loss_limit=1e-11)


@pytest.mark.ranks
def test_models_without_double_precision_or_a_mask_are_exact(ranks):
    jobs = [*spread(("xlnet",), ("packed", "left")), *spread(("cpmant",), ("left", "right"))]
    check(ranks, 3, jobs)


@pytest.mark.ranks
def test_heads_are_exact(ranks):
    jobs = [
        *spread(("roformer",), ("packed", "left"), head="masked"),
        *spread(("xlnet", "big_bird"), ("packed", "right"), head="token"),
        *spread(("xlnet", "openai-gpt", "xlm"), ("left", "right"), head="sequence"),
    ]
    check(ranks, 2, jobs)


@pytest.mark.ranks
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_may_be_recomputed_in_backward(ranks, reentrant):
    check(ranks, 2, list(spread(("gpt_neo", "roformer"), ("packed",), checkpointing=reentrant)))


@pytest.mark.ranks
@pytest.mark.slow
def test_a_trainer_is_exact(ranks):
    jobs = spread(("xlnet", "gpt_neo"), ("packed", "left"), trained_by="trainer")
    check(ranks, 2, list(jobs))


def sharded_step(kinds):
    """Return the loss and gradients of a step whose data ranks have other numbers of documents."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    every = init_device_mesh("cpu", (4,))
    model = zoo.build_model("gpt_neo", dtype=torch.float64).eval()
    enable(model)
    for layer in model.transformer.h:
        fully_shard(layer, mesh=every)
    fully_shard(model, mesh=every)
    batch = batch_of(kinds[mesh["data"].get_local_rank()])
    with doors.parallel(mesh["context"], mesh["data"]).step(batch) as local, Double():
        loss = model(**local).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.ranks
def test_data_ranks_may_have_other_numbers_of_documents_than_others(ranks):
    kinds = ("packed", "plain")
    model = zoo.build_model("gpt_neo", dtype=torch.float64).eval()
    samples = [unpack(batch_of(kind), PAD) for kind in kinds]
    counts = [(batch["labels"][:, 1:] != -100).sum() for batch in samples]
    pairs = zip(samples, counts, strict=True)
    with Double():
        exact = sum(model(**batch).loss * count for batch, count in pairs) / sum(counts)
    exact.backward()
    for loss, found in ranks(4).run(sharded_step, kinds):
        assert loss == pytest.approx(exact.item(), abs=1e-11)
        assert max(errors(found, gradients(model)).values()) < 1e-9


# What is broken below has no public name: only a fault inside shows whether the suite is sharp.
_BUILD = base_model._build_samples


def _changed(**change):
    """Build samples of which something differs."""

    def build(step):
        samples = _BUILD(step)
        return replace(samples, **{k: f(getattr(samples, k)) for k, f in change.items()})

    return mock.patch.object(base_model, "_build_samples", build)


def _next_tokens():
    return _changed(back=lambda back: (back + 1).clamp(max=int(back.max())))


def _no_mask():
    return _changed(mask=lambda _: None)


def _joined_documents():
    """Samples that are the sequences of the batch."""
    token_map = base_model.token_map

    def joined(step):
        tokens = token_map(step)
        return replace(tokens, first=np.zeros_like(tokens.first))

    return mock.patch.object(base_model, "token_map", joined)


def _other_ids():
    full_value = base_model.full_value
    return mock.patch.object(
        base_model, "full_value", lambda name, x, step: full_value(name, x, step).roll(1, -1)
    )


BREAKS = {
    "the next tokens' hidden states": (_next_tokens, Job("gpt_neo", "packed")),
    "padding that is seen": (_no_mask, Job("xlnet", "packed")),
    "padding of the batch that is seen": (_no_mask, Job("roformer", "left")),
    "documents that see each other": (_joined_documents, Job("xlnet", "packed")),
    "ids of other tokens": (_other_ids, Job("gpt_neo")),
}


def compare_broken(what):
    breaking, job = BREAKS[what]
    with breaking():
        return compare(job)


@pytest.mark.ranks
@pytest.mark.parametrize("what", BREAKS)
def test_the_suite_notices(ranks, what):
    found = ranks(2).run(compare_broken, what)[0]
    assert found.worst[1] > 1e-2, found.worst


# ---------------------------------------------------------------- one process


def test_tokens_of_no_document_are_left_out(cp):
    batch = {key: x for key, x in batch_of("plain").items() if key != "attention_mask"}
    ids = torch.full_like(batch["input_ids"], -1)
    ids[0, 2:30], ids[0, 30], ids[1, :61] = 3, 4, 5
    labels = torch.where(ids < 0, -100, batch["labels"])
    model = zoo.build_model("gpt_neo").eval()
    rows = [(0, slice(2, 30)), (1, slice(0, 61))]
    totals = [
        model(
            input_ids=batch["input_ids"][row : row + 1, at], labels=labels[row : row + 1, at]
        ).loss
        * (labels[row, at][1:] != -100).sum()
        for row, at in rows
    ]
    exact = sum(totals) / sum((labels[row, at][1:] != -100).sum() for row, at in rows)
    enable(model)
    shapes = []
    model.transformer.wte.register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    found = loss_in_step(model, cp, {**batch, "labels": labels, "document_ids": ids})
    torch.testing.assert_close(found, exact)
    assert shapes == [(3, 61)]


def test_a_batch_without_documents_is_computed(cp):
    model, batch = zoo.build_model("gpt_neo").eval(), batch_of("plain")
    enable(model)
    ids = torch.full_like(batch["input_ids"], -1)
    with cp.step({**batch, "document_ids": ids}) as local:
        assert model(input_ids=local["input_ids"]).logits.isfinite().all()


@pytest.mark.parametrize("name", ["big_bird", "xlnet", "xlm"])
def test_models_without_a_head_return_states_of_this_ranks_tokens(cp, name):
    model = AutoModel.from_config(zoo.build_config(name)).eval()
    ids = batch_of("plain")["input_ids"]
    exact = model(ids, output_hidden_states=True)  # BigBird keeps something of its first call
    before = trace(model)
    handle = enable(model)
    with cp.step({"input_ids": ids}) as local:
        found = model(**local, output_hidden_states=True)
    keys = ["last_hidden_state", "hidden_states", "pooler_output"][: 2 + (name == "big_bird")]
    assert sorted(found) == sorted(keys)
    for key in keys:
        torch.testing.assert_close(found[key], exact[key])
    handle.undo()
    assert trace(model) == before
    torch.testing.assert_close(model(ids)[0], exact[0])


def test_gradients_of_embeddings_are_those_of_the_stock_model(cp):
    model, labels = zoo.build_model("gpt_neo").eval(), batch_of("plain")["labels"]
    embeds = torch.randn(2, 61, 64, requires_grad=True)
    (exact,) = torch.autograd.grad(model(inputs_embeds=embeds, labels=labels).loss, embeds)
    enable(model)
    loss = loss_in_step(model, cp, {"inputs_embeds": embeds, "labels": labels})
    torch.testing.assert_close(torch.autograd.grad(loss, embeds)[0], exact)


@pytest.mark.parametrize("name", ["xlnet", "cpmant", "gpt_neo"])
def test_enabled_models_are_copied_and_restored(cp, name):
    batch, model = batch_of("left"), zoo.build_model(name)
    before, exact = trace(model), model(**batch).loss
    handle = enable(model)
    torch.testing.assert_close(model(**batch).loss, exact)  # outside of steps
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert loss_in_step(other, cp, batch).isfinite()
        enable(other).undo()
        assert trace(other) == before
    handle.undo()
    assert trace(model) == before


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "kind", "given", "message"),
    [
        ("cpmant", "packed", {}, r"no mask of padding, but .*several documents. Give each"),
        ("xlnet", "plain", {"perm_mask": torch.zeros(2, 61, 61)}, "got `perm_mask`, which is not"),
        ("xlm", "plain", {"lengths": torch.tensor([61, 61])}, "got `lengths`, which is not"),
        ("gpt_neo", "plain", {"attention_mask": torch.ones(2, 1, 61, 61)}, "got `attention_mask`"),
    ],
)
def test_what_a_step_cannot_serve_is_refused(cp, name, kind, given, message):
    model = zoo.build_model(name)
    enable(model)
    with pytest.raises(ValueError, match=message):
        loss_in_step(model, cp, batch_of(kind), **given)


def test_sparse_blocks_of_big_bird_are_refused():
    config = zoo.build_config("big_bird")
    config.attention_type = "block_sparse"
    model = type(zoo.build_model("big_bird"))(config)
    with pytest.raises(ValueError, match=r"'block_sparse', which is not .*'original_full'"):
        enable(model)


def test_dropout_is_refused():
    model = zoo.build_model("xlnet")
    model.transformer.dropout.p = 0.1
    before = trace(model)
    with pytest.raises(ValueError, match=r"\(Dropout|XLNetModel\) has dropout \(p = 0.1\)"):
        enable(model)
    assert trace(model) == before
