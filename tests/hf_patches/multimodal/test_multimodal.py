"""Models with media: what `enable()` does to them, and what they refuse inside a step."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import GPT2Config

from hf_patches import enable, shard_in_forward, verify
from hf_patches.multimodal.table import Media, find_decoder
from hf_patches.support import MULTIMODAL
from lightning_cp.step import active_step
from tests.hf_patches.test_enable import trace
from tests.parity import hf, media_zoo, zoo


def run(model, cp, batch):
    with cp.step(batch) as local:
        return model(**local).loss


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "mllama", "chameleon"])
def test_undo_leaves_no_trace(name):
    model = media_zoo.build_model(name)
    before = trace(model)
    handle = enable(model)
    assert trace(model) != before
    handle.undo()
    assert trace(model) == before


def test_outside_of_steps_it_is_the_stock_model():
    model = media_zoo.build_model("qwen3_vl")
    _, batch = media_zoo.build_batches("qwen3_vl", "plain")
    expected = model(**batch).loss
    enable(model)
    assert torch.equal(model(**batch).loss, expected)


def full_logits(model, batch, change=lambda local: None, declare=False):
    """Return the logits of a step on all ranks of a pool, as full sequences."""
    cp = hf.build_cp()
    with cp.step(batch) as local, cp.exempt() if declare else nullcontext():
        change(local)
        logits = model(**local).logits
        return cp.unshard(logits, 1).detach()


def raise_ids(local):
    local["input_ids"].masked_fill_(local["input_ids"] == 30, 31)


def habits():
    """Return the errors of what users do with enabled models in steps, on 2 ranks."""
    model, batch = zoo.build_model("llama").eval(), zoo.sample_batch("llama")
    batch = {"input_ids": batch["input_ids"]}
    expected = model(**batch).logits
    enable(model)
    found = {"declared unsharded": full_logits(model, batch, declare=True) - expected}
    model = media_zoo.build_model("llava")
    _, batch = media_zoo.build_batches("llava", "plain")
    del batch["labels"]
    batch["input_ids"][:, :2] = 30
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    raise_ids(changed)
    expected = model(**changed).logits
    enable(model)
    found["changed in place"] = full_logits(model, batch, raise_ids) - expected
    return {name: x.abs().max().item() for name, x in found.items()}


def test_declarations_and_changes_in_place_keep_their_meaning(ranks):
    for found in ranks(2).run(habits):
        assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize("name", ["llava", "chameleon", "phi4_multimodal", "paligemma"])
def test_the_part_with_towers_is_not_called_alone(cp, name):
    model = media_zoo.build_model(name)
    enable(model)
    batch, _ = media_zoo.build_batches(name, "text")
    with cp.step(batch) as local, pytest.raises(ValueError, match="not the enabled model that"):
        model.base_model(input_ids=local["input_ids"])


def test_ids_of_text_models_are_checked_whatever_the_config_says(cp):
    model = zoo.build_model("llama")
    model.config.pad_token_id = zoo.VOCAB_SIZE
    enable(model)
    ids = torch.full((1, 8), zoo.VOCAB_SIZE)
    with cp.step({"input_ids": ids}) as local, pytest.raises(ValueError, match="vocabulary"):
        model(**local)


def test_an_interrupted_call_leaves_nothing(cp):
    model = media_zoo.build_model("llava")
    enable(model)
    batch, stock = media_zoo.build_batches("llava", "plain")
    expected = model(**stock).loss

    def interrupt(*_):
        raise KeyboardInterrupt

    layer = model.model.language_model.layers[0]
    handle = layer.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(model, cp, batch)
    handle.remove()
    assert torch.equal(model(**stock).loss, expected)
    assert active_step.num_exempt() == 0


def rows_with_media(name):
    """Return the loss and the worst gradient error of a model that shards full sequences."""
    _, batch = media_zoo.build_batches(name, "plain")
    model = media_zoo.build_model(name)
    stock = model(**batch)
    stock.loss.backward()
    exact = hf.gradients(model)
    model.zero_grad()
    shard_in_forward(model, hf.build_cp(), logits="always")
    output = model(**batch)
    output.loss.backward()
    found = hf.averaged(output.loss, model)
    difference = (found.pop("loss") - stock.loss).abs().item()
    return difference, max(hf.errors(found, exact).values()), tuple(output.logits.shape)


@pytest.mark.parametrize(
    "name", ["llava", pytest.param("qwen3_vl", marks=pytest.mark.slow), "gemma3"]
)
def test_models_with_media_take_full_sequences(ranks, name):
    _, batch = media_zoo.build_batches(name, "plain")
    for loss, gradient, shape in ranks(2).run(rows_with_media, name):
        assert loss < 1e-5
        assert gradient < 1e-3
        assert shape[:2] == batch["input_ids"].shape


def test_a_copy_is_enabled_too(cp):
    batch, _ = media_zoo.build_batches("qwen3_vl", "packed")
    model = media_zoo.build_model("qwen3_vl")
    enable(model)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, cp, batch), run(model, cp, batch))


def test_2_d_positions_of_packed_documents_are_counted_again(cp):
    batch, _ = media_zoo.build_batches("qwen3_vl", "packed")
    model = media_zoo.build_model("qwen3_vl")
    enable(model)
    ids = batch["document_ids"]
    starts = torch.stack([torch.searchsorted(row, row) for row in ids])
    positions = {**batch, "position_ids": torch.arange(ids.shape[1]) - starts}
    torch.testing.assert_close(run(model, cp, positions), run(model, cp, batch))


def test_packed_documents_are_refused_where_media_belong_to_samples(cp):
    batch, _ = media_zoo.build_batches("mllama", "plain")
    batch["document_ids"] = (torch.arange(batch["input_ids"].shape[1]) > 20).long().expand(2, -1)
    model = media_zoo.build_model("mllama")
    enable(model)
    with pytest.raises(ValueError, match=r"packed documents, and Mllama.* cannot take them: its"):
        run(model, cp, batch)


def test_missing_placeholders_are_an_error(cp):
    batch, _ = media_zoo.build_batches("llava", "plain")
    batch["input_ids"] = torch.where(batch["input_ids"] == 3, 30, batch["input_ids"])
    model = media_zoo.build_model("llava")
    enable(model)
    with pytest.raises(ValueError, match="Image features and image tokens do not match"):
        run(model, cp, batch)
    good, _ = media_zoo.build_batches("llava", "plain")
    assert run(model, cp, good).isfinite()  # the step before has left nothing behind


def test_dropout_outside_of_the_decoder_is_refused_in_training(cp):
    model = media_zoo.build_model("llava")
    model.model.multi_modal_projector.act = nn.Sequential(nn.GELU(), nn.Dropout(0.1)).eval()
    enable(model, allow_unknown=True)
    batch, _ = media_zoo.build_batches("llava", "plain")
    assert run(model, cp, batch).isfinite()
    model.train()
    with pytest.raises(ValueError, match=r"multi_modal_projector.act.1.p is 0.1 in training"):
        run(model, cp, batch)


def test_a_block_in_several_parts_is_refused(cp):
    batch, _ = media_zoo.build_batches("paligemma", "plain")
    batch["token_type_ids"][0, -3:] = 0
    model = media_zoo.build_model("paligemma")
    enable(model)
    with pytest.raises(ValueError, match=r"a block of sample 0 is in several parts"):
        run(model, cp, batch)


def test_a_text_decoder_of_an_unknown_type_is_refused():
    model = media_zoo.build_model("llava")
    model.model.language_model.config = GPT2Config(model_type="unheard_of")
    model.model.language_model.config.model_type = "unheard_of"
    with pytest.raises(ValueError, match=r"a text decoder of type 'unheard_of', which cannot run"):
        enable(model)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("wishes", (2, 61), r"got `wishes` of shape \(2, 61\) inside a step, as long as the full"),
        ("inputs_embeds", (2, 70, 4), "the model has lengthened its sequences"),
    ],
)
def test_a_decoder_refuses_arguments_of_unknown_meaning(cp, name, shape, message):
    batch, _ = media_zoo.build_batches("llava", "plain")
    model = media_zoo.build_model("llava")
    enable(model)
    model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, name: torch.zeros(shape)}),
        with_kwargs=True,
        prepend=True,
    )
    with pytest.raises(ValueError, match=message):
        run(model, cp, batch)


def test_placeholders_may_lie_outside_of_the_vocabulary(cp):
    model = media_zoo.build_model("llava")
    batch, _ = media_zoo.build_batches("llava", "plain")
    is_image = batch["input_ids"] == model.config.image_token_id
    model.config.image_token_id = 500
    enable(model)
    del batch["labels"]
    for token, said in ((500, "index out of range"), (400, "ids outside of the vocabulary")):
        ids = torch.where(is_image, token, batch["input_ids"])
        # No table of the stock model has such a token either.
        with pytest.raises((ValueError, IndexError), match=said), cp.step(batch) as local:
            model(**{**local, "input_ids": ids})


@pytest.mark.parametrize("name", ["blip", "git", "molmo2", "pi0", "idefics"])
def test_names_are_refused_with_a_reason(name):
    assert MULTIMODAL[name].refusal


def test_a_refused_model_says_why():
    model = media_zoo.build_model("llava")
    model.config.model_type = "molmo2"
    with pytest.raises(ValueError, match="cannot run under context parallelism: all images of a"):
        enable(model)


def test_decoders_are_found():
    for name, path in (
        ("llava", "model.language_model"),
        ("blip-2", "language_model.model.decoder"),
    ):
        assert find_decoder(media_zoo.build_model(name), Media()) == path


def test_verify_gives_media_to_documents_in_their_order(cp):
    batch, _ = media_zoo.build_batches("llava", "plain")
    # One sample of two documents, as many items of media as samples: one image in the second.
    ids = batch["input_ids"][:1].clone()
    image = media_zoo.build_model("llava").config.image_token_id
    per_image = int((batch["input_ids"] == image).sum()) // len(batch["pixel_values"])
    ids = torch.where(ids == image, 30, ids)
    ids[0, 40 : 40 + per_image] = image
    documents = (torch.arange(ids.shape[1]) > 20).long()[None]
    packed = {"input_ids": ids, "labels": ids, "document_ids": documents}
    model = media_zoo.build_model("llava")
    report = verify(model, {**packed, "pixel_values": batch["pixel_values"][:1]}, cp=cp)
    assert report.passed, report
