"""`enable()`: what it does to a model, what it leaves alone, and what it refuses."""

import copy
import functools
import logging
import pickle
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    T5Config,
    masking_utils,
)
from transformers import T5ForConditionalGeneration as T5
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from hf_patches import enable, shard_in_forward
from hf_patches.adapter import adapter
from hf_patches.model import forward, guard
from lightning_cp.loss import chunked_loss
from tests import doors
from tests.parity import zoo
from tests.parity.hf import Job, build_batch, unpack

PAD = 1


@pytest.fixture
def batch():
    return build_batch(Job("llama", "packed"), zoo.VOCAB_SIZE, PAD)


def loss_in_step(model, cp, batch, **given):
    with cp.step(batch) as local:
        return model(**{**local, **given}).loss


def stock_loss(name, batch):
    return zoo.build_model(name)(**unpack(batch, PAD)).loss


def tokens(batch):
    return {key: batch[key] for key in ("input_ids", "labels")}


def test_undo_leaves_no_trace():
    for name in ("llama", "llama4", "llama:dynamic", "bart", "gemma3"):
        model = zoo.build_model(name)
        before = trace(model)
        handle = enable(model)
        assert trace(model) != before
        handle.undo()
        assert trace(model) == before, name
        handle.undo()  # nothing left to undo


def test_undo_of_a_compiled_model_leaves_no_trace():
    model = zoo.build_model("llama")
    compiled = torch.compile(model, backend="eager")
    before = trace(model)
    handle = enable(compiled)
    assert trace(model) != before
    handle.undo()
    assert trace(model) == before


def trace(model):
    """Return what modules have, of hooks too, and which attention is chosen."""
    attributes = [
        (name, {key: len(x) if isinstance(x, dict) else 0 for key, x in vars(m).items()})
        for name, m in model.named_modules()
    ]
    configs = [model.config, *(getattr(model.config, key) for key in model.config.sub_configs)]
    return attributes, list(map(zoo.attention_of, configs)), sorted(model.state_dict())


def test_enabling_twice_is_enabling_once(cp, batch):
    model = zoo.build_model("llama")
    enable(model)
    once = trace(model)
    handle = enable(model)
    assert trace(model) == once
    torch.testing.assert_close(loss_in_step(model, cp, batch), stock_loss("llama", batch))
    handle.undo()
    assert zoo.attention_of(model.config) == "eager"


def test_one_line_says_what_was_chosen(caplog):
    with caplog.at_level(logging.INFO, logger="hf_patches"):
        enable(zoo.build_model("gpt_oss"))
    (line,) = caplog.messages
    assert line == (
        "enabled GptOssForCausalLM: features=sliding window, sinks, mixers=attention, "
        "labels=next token, attention_outside_of_steps=eager"
    )


COPIED = ("llama", "llama4_text", "bart", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "deepcopy") for name in COPIED),
        (COPIED[0], "pickle"),
        *(pytest.param(name, "pickle", marks=pytest.mark.slow) for name in COPIED[1:]),
    ],
)
def test_enabled_models_are_copied(cp, batch, way, name):
    model = zoo.build_model(name)
    enable(model)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loss_in_step(other, cp, batch), stock_loss(name, batch))
    enable(model).undo()
    torch.testing.assert_close(loss_in_step(other, cp, batch), stock_loss(name, batch))
    enable(other).undo()
    assert trace(other) == trace(zoo.build_model(name))
    with torch.no_grad():
        next(other.parameters()).zero_()
    torch.testing.assert_close(model(**unpack(batch, PAD)).loss, stock_loss(name, batch))


def test_a_model_on_the_meta_device_is_enabled(cp, batch):
    weights = zoo.build_model("llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(weights.config)
    enable(model)
    model.to_empty(device="cpu")
    model.load_state_dict(weights.state_dict())
    for (_, buffer), (_, wanted) in zip(
        model.named_buffers(), weights.named_buffers(), strict=True
    ):
        buffer.copy_(wanted)
    torch.testing.assert_close(loss_in_step(model, cp, batch), stock_loss("llama", batch))


def test_outside_of_steps_nothing_changes(cp, batch):
    for attention in ("eager", "sdpa"):
        stock = zoo.build_model("mistral", attention=attention).eval()
        model = zoo.build_model("mistral", attention=attention).eval()
        enable(model)
        given = {"input_ids": batch["input_ids"][:, :9]}
        for each in ({}, {"attention_mask": torch.ones_like(given["input_ids"])}):
            assert torch.equal(model(**given, **each).logits, stock(**given, **each).logits)
        written = model.generate(**given, max_new_tokens=4, do_sample=False)
        assert torch.equal(written, stock.generate(**given, max_new_tokens=4, do_sample=False))
        with cp.step(batch), cp.paused():
            again = model.generate(**given, max_new_tokens=4, do_sample=False)
        assert torch.equal(again, written)
        model(**batch)  # keys that only we know do no harm


def test_what_is_saved_does_not_know_us(tmp_path):
    model = zoo.build_model("llama")
    enable(model)
    model.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.json"):
        assert "lightning_cp" not in file.read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert zoo.attention_of(again.config) == "sdpa"


def test_the_caller_may_leave_out_what_the_step_knows(cp, batch):
    model = zoo.build_model("gpt2")
    enable(model)
    exact = stock_loss("gpt2", batch)
    with cp.step(batch) as local:
        torch.testing.assert_close(model(**tokens(local)).loss, exact)
        torch.testing.assert_close(model(local["input_ids"], labels=local["labels"]).loss, exact)
        as_tuple = model(**tokens(local), return_dict=False)
        torch.testing.assert_close(as_tuple[0], exact)
        embedded = model.get_input_embeddings()(local["input_ids"])
        found = model(inputs_embeds=embedded, labels=local["labels"]).loss
        torch.testing.assert_close(found, exact)
        assert model(local["input_ids"]).loss is None


def test_packing_told_by_position_ids_is_understood(cp, batch):
    model = zoo.build_model("gpt_oss")  # stock gpt_oss lets documents see each other
    enable(model)
    documents = batch["document_ids"]
    place = torch.arange(documents.shape[1]).expand_as(documents)
    new = nn.functional.pad(documents.diff(dim=1) != 0, (1, 0))
    told = {**tokens(batch), "position_ids": place - (place * new).cummax(1).values}
    torch.testing.assert_close(loss_in_step(model, cp, told), stock_loss("gpt_oss", batch))


def test_labels_that_are_already_shifted_are_taken_as_they_are(cp, batch):
    model = zoo.build_model("llama")
    enable(model)
    rows = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    exact = zoo.build_model("llama")(**rows).loss
    with cp.step({**rows, "shift_labels": shifted}) as local:
        torch.testing.assert_close(model(**local).loss, exact)


def test_two_models_in_one_step(cp, batch):
    student, teacher = zoo.build_model("llama"), zoo.build_model("mistral", seed=1)
    handles = [enable(student), enable(teacher)]
    with cp.step(batch) as local:
        with torch.no_grad():
            wanted = teacher(**tokens(local)).logits.softmax(-1)
        found = student(**tokens(local)).logits.log_softmax(-1)
        assert torch.isfinite((wanted * found).sum())
    for handle in handles:
        handle.undo()


@pytest.mark.parametrize("tied", [False, True])
def test_lora_models_are_enabled_inside(cp, batch, tied):
    model = zoo.build_model("llama:tied" if tied else "llama")
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(model, config)
    exact = model(**unpack(batch, PAD)).loss
    handle = enable(model)
    torch.testing.assert_close(loss_in_step(model, cp, batch), exact)
    assert handle.model is model.get_base_model()
    handle.undo()
    torch.testing.assert_close(model(**unpack(batch, PAD)).loss, exact)


@pytest.mark.parametrize(
    "again", [adapter.enable, lambda m: shard_in_forward(m, doors.parallel(None))]
)
def test_adapters_that_come_after_enabling_are_saved_whole(again):
    model = zoo.build_model("llama")
    handle = enable(model)
    outer = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    again(outer).remove()  # as a strategy does, or a trainer
    assert "save_pretrained" in vars(outer)
    enable(outer).undo()
    assert "save_pretrained" not in {*vars(outer), *vars(model)}
    handle.undo()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_ready_mask_is_served(cp, batch, kind):
    model = zoo.build_model("llama").double()
    length = batch["input_ids"].shape[1]
    place = torch.arange(length)
    # Something that no other mask can say: every third key is for everyone before it, too.
    seen = (place[None] <= place[:, None]) | (place[None] % 3 == 0)
    mask = seen.expand(2, 1, -1, -1)
    if kind == "float":
        mask = torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min)
    model.set_attn_implementation("sdpa")
    exact = model(**tokens(batch), attention_mask=mask).loss.double()
    enable(model)
    found = loss_in_step(model, cp, {**tokens(batch), "attention_mask": mask})
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_ready_masks_that_eager_attention_would_add_to_scores_are_refused(cp, batch, dtype):
    model = zoo.build_model("llama", attention="eager")
    length = batch["input_ids"].shape[1]
    mask = torch.ones(length, length).tril().expand(2, 1, -1, -1).to(dtype)
    enable(model)
    with pytest.raises(ValueError, match=rf"mask of {dtype}, .*hide no key. Give .*'sdpa'"):
        loss_in_step(model, cp, {**tokens(batch), "attention_mask": mask})


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blt", r"'blt'\) cannot run .*it groups bytes into patches along the sequence"),
        ("reformer", "its attention is written out and does not go through AttentionInterface"),
        ("git", "its loss needs the pixels of an image before the text"),
    ],
)
def test_what_mixes_tokens_elsewhere_is_refused(name, message):
    model = zoo.build_model(name)
    before = trace(model)
    with pytest.raises(ValueError, match=message):
        enable(model)
    assert trace(model) == before


class Novel(LlamaConfig):
    model_type = "novel"


class NovelForCausalLM(LlamaForCausalLM):
    config_class = Novel


def novel():
    return NovelForCausalLM(Novel(**zoo.build_config("llama").to_dict() | {"model_type": "novel"}))


def test_an_unknown_architecture_is_refused_until_it_is_allowed(cp, batch):
    model = novel()
    with pytest.raises(ValueError, match=r"'novel'\) is not among .* To try it: .*--allow-unk"):
        enable(model)
    enable(model, allow_unknown=True)
    assert torch.isfinite(loss_in_step(model, cp, batch))


def test_other_refusals_say_what_to_do():
    with pytest.raises(TypeError, match=r"it got a Linear\. For a Lightn.* enable\(module"):
        enable(nn.Linear(2, 2))
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        enable(T5(T5Config(**small)))
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PromptTuningConfig, which prepends tokens to each"):
        enable(get_peft_model(zoo.build_model("llama"), prompt))
    model = zoo.build_model("llama")
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout = 0.1: .* attention_dropout=0.0"):
        enable(model)
    with pytest.raises(ValueError, match="chunked_loss='sometimes'"):
        enable(zoo.build_model("llama"), chunked_loss="sometimes")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_cache": True}, r"KV cache would hold this rank's tokens .*cp.paused"),
        ({"logits_to_keep": 3}, r"logits_to_keep=3 inside a step .*cp.unshard"),
        ({"num_items_in_batch": 7}, "num_items_in_batch inside a step: the loss is already"),
        ({"pixel_values": torch.zeros(1)}, "`pixel_values` inside a step: inputs other than text"),
        ({"output_attentions": True}, "no rank holds the attention weights of a full"),
        ({"indices": torch.zeros(1)}, "got indices, which may change what a token sees"),
        ({"input_ids": torch.zeros(2, 7).long()}, "7 tokens per sequence .* hold 61 each"),
        ({"attention_mask": torch.ones(2, 1, 61, 9)}, r"of shape \(2, 1, 61, 9\) inside a step"),
    ],
)
def test_what_a_step_cannot_serve_is_refused(cp, batch, given, message):
    model = zoo.build_model("llama")
    enable(model)
    with pytest.raises(ValueError, match=message):
        loss_in_step(model, cp, tokens(batch), **given)


def test_an_unknown_mask_function_is_refused(cp, batch):
    model = zoo.build_model("llama")
    enable(model)
    model.config.is_causal = False
    from transformers import masking_utils

    def odd(*args):
        return torch.tensor(True)

    create = masking_utils.create_causal_mask
    module = __import__(type(model.model).__module__, fromlist=["create_causal_mask"])
    module.create_causal_mask = lambda **given: create(**given, and_mask_function=odd)
    try:
        with pytest.raises(ValueError, match=r"builds its attention mask with .*odd, which is not"):
            loss_in_step(model, cp, batch)
    finally:
        module.create_causal_mask = create


def test_packed_rows_have_no_score_of_their_own(cp, batch):
    model = zoo.build_model("llama", head="sequence")
    enable(model)
    packed = {**batch, "labels": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match="scores full sequences, but the batch holds"):
        loss_in_step(model, cp, packed)


def test_a_head_that_scores_rows_returns_a_tuple_if_asked(cp, batch):
    model = zoo.build_model("bert", head="sequence")
    enable(model)
    rows = {"input_ids": batch["input_ids"], "labels": torch.tensor([0, 2])}
    with cp.step(rows) as local:
        loss, logits = model(**local, return_dict=False)[:2]
    exact = zoo.build_model("bert", head="sequence")(**rows)
    torch.testing.assert_close(loss, exact.loss)
    torch.testing.assert_close(logits, exact.logits)


def test_large_logits_are_made_in_equal_pieces_without_asking_for_the_vocabulary(
    cp, batch, monkeypatch
):
    exact, model = zoo.build_model("llama"), zoo.build_model("llama")
    stock = exact(**unpack(batch, PAD)).loss
    stock.backward()
    num_tokens, sizes = batch["input_ids"].numel(), []
    largest = zoo.VOCAB_SIZE * (num_tokens - 1)
    monkeypatch.setattr(forward, "LARGEST_LOGITS", 4 * largest)
    monkeypatch.setattr(chunked_loss, "MAX_CHUNK_LOGITS", largest)
    enable(model.train())
    model.lm_head.register_forward_hook(lambda _, __, out: sizes.append(out.shape[:-1].numel()))
    loss = loss_in_step(model, cp, batch)
    loss.backward()
    torch.testing.assert_close(loss, stock)
    found, wanted = model.lm_head.weight.grad, exact.lm_head.weight.grad
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    # One token of each row for the rest of the output, then two pieces.
    assert sizes == [len(batch["input_ids"]), -(-num_tokens // 2), num_tokens // 2]
    sizes.clear()
    monkeypatch.setattr(forward, "LARGEST_LOGITS", 4 * zoo.VOCAB_SIZE * num_tokens)
    loss_in_step(model, cp, batch)
    assert sizes == [num_tokens]


# ---------------------------------------------------------------- what users do around it


def test_generation_with_left_padding_is_that_of_the_stock_model(batch):
    given = {"input_ids": batch["input_ids"][:, :12].clone(), "attention_mask": torch.ones(2, 12)}
    given["input_ids"][0, :5], given["attention_mask"][0, :5] = PAD, 0
    for name in ("gpt2", "roberta", "gemma3"):
        stock, model = zoo.build_model(name).eval(), zoo.build_model(name).eval()
        enable(model)
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
        written = model.generate(**given, **options)
        assert torch.equal(written, stock.generate(**given, **options)), name


def test_attention_that_was_set_after_enabling_is_noticed(cp, batch):
    model = zoo.build_model("llama")
    enable(model)
    model.set_attn_implementation("eager")
    with pytest.raises(
        ValueError, match="is enabled, but its attention has since been set to 'eager'"
    ):
        loss_in_step(model, cp, batch)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_is_not_enabled_is_refused_in_a_step(cp, batch, attention):
    model = zoo.build_model("llama", attention=attention)
    with pytest.raises(ValueError, match=r"type 'llama' runs inside a step and is not enabled"):
        loss_in_step(model, cp, tokens(batch))
    with cp.step(batch), cp.paused():
        model(**tokens(batch))


def test_a_model_with_the_config_of_an_enabled_one_is_refused_in_a_step(cp, batch):
    policy = zoo.build_model("llama")
    reference = LlamaForCausalLM(policy.config)
    enable(policy)
    with pytest.raises(ValueError, match=r"type 'llama' runs inside a step and is not enabled"):
        loss_in_step(reference, cp, tokens(batch))
    enable(reference)
    assert torch.isfinite(loss_in_step(reference, cp, tokens(batch)))


def mask_functions():
    return {name: AttentionMaskInterface()[name] for name in guard.STOCK_NAMES}


def test_stock_mask_functions_are_guarded_while_a_step_is_open_only(cp, batch):
    before = mask_functions()
    assert before["sdpa"] is masking_utils.sdpa_mask
    handle = enable(zoo.build_model("llama"))
    assert mask_functions() == before
    with cp.step(batch):
        guarded = mask_functions()
        assert guarded["sdpa"] is not before["sdpa"]
        with cp.step(batch):
            pass
        assert mask_functions() == guarded
    assert mask_functions() == before
    with cp.step(batch):
        assert mask_functions() == guarded  # else compiled models would be compiled again
    handle.undo()
    assert mask_functions() == before


def test_a_guard_is_installed_once_and_removed_once():
    before = mask_functions()
    installed = guard.install_guard()
    guarded = mask_functions()
    assert all(guarded[name] is not before[name] for name in before)
    again = guard.install_guard()
    assert mask_functions() == guarded
    again.remove()  # it found a guard: that one stays
    assert mask_functions() == guarded
    installed.remove()
    assert mask_functions() == before
    installed.remove()
    assert mask_functions() == before


def test_mask_functions_that_were_registered_under_a_guard_stay():
    before = mask_functions()
    installed = guard.install_guard()
    AttentionMaskInterface.register("eager", before["sdpa"])
    try:
        installed.remove()
        assert mask_functions() == {**before, "eager": before["sdpa"]}
    finally:
        AttentionMaskInterface.register("eager", before["eager"])


def test_losses_of_ones_own_are_refused(cp, batch):
    model = zoo.build_model("llama")
    enable(model)
    with pytest.raises(ValueError, match="ignore_index=-1 is not supported by the loss"):
        loss_in_step(model, cp, tokens(batch), ignore_index=-1)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match="loss_function has been replaced"):
        loss_in_step(model, cp, tokens(batch))
    with cp.step(batch) as local:
        assert model(local["input_ids"]).logits is not None


def test_a_forward_that_a_user_has_wrapped_before_is_refused(cp, batch):
    model = zoo.build_model("llama")
    stock = model.forward

    @functools.wraps(stock)
    def doubled(*args, **kwargs):
        output = stock(*args, **kwargs)
        output.loss = 2 * output.loss
        return output

    model.forward = doubled
    before = trace(model)
    message = r"forward was replaced before enable\(\), by .* Replace it after enable\(model\)"
    for wrap in (lambda model: None, lambda model: add_hook_to_module(model, ModelHook())):
        wrap(model)
        with pytest.raises(ValueError, match=message):
            enable(model)
        remove_hook_from_module(model)
        assert trace(model) == before
    model.forward = stock
    enable(model)
    stock = model.forward
    model.forward = doubled  # around ours
    torch.testing.assert_close(loss_in_step(model, cp, batch), 2 * stock_loss("llama", batch))


def delete_forward(model):
    del model.forward


def test_a_forward_that_was_taken_away_from_an_enabled_model_is_refused(cp, batch):
    for take_away in (delete_forward, remove_hook_from_module):
        model = zoo.build_model("llama")
        exact = model(**unpack(batch, PAD)).loss
        add_hook_to_module(model, ModelHook())
        handle = enable(model)
        take_away(model)
        model(**tokens(batch))  # outside of steps
        for each in (model, get_peft_model(model, LoraConfig(target_modules=["q_proj"]))):
            with pytest.raises(ValueError, match=r"`forward` has since .*, then enable\(model\)"):
                loss_in_step(each, cp, batch)
        handle.undo()
        enable(model)
        torch.testing.assert_close(loss_in_step(model, cp, batch), exact)


@pytest.mark.parametrize("library", ["accelerate", "accelerate hook", "trl"])
def test_a_forward_that_a_library_has_wrapped_before_is_served(cp, batch, library):
    model = zoo.build_model("llama")
    if library == "trl":
        add_fused_lm_head(model)
    elif library == "accelerate":
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    else:
        add_hook_to_module(model, ModelHook())
    enable(model)
    exact = stock_loss("llama", batch)
    tolerance = {"atol": 0.05, "rtol": 0.05} if library == "accelerate" else {}
    torch.testing.assert_close(loss_in_step(model, cp, batch), exact, **tolerance)


CALLS_ITSELF = """
def wrap(stock):
    def forward(*args, **kwargs):
        return stock(*args, **kwargs) if args or kwargs else (forward(), unset)
    if stock is None:
        unset = None
    return forward
"""


def test_what_a_wrapper_has_from_around_it_is_read_once(cp, batch):
    of_accelerate = {"__name__": "accelerate.utils"}
    exec(CALLS_ITSELF, of_accelerate)
    model = zoo.build_model("llama")
    model.forward = of_accelerate["wrap"](model.forward)
    enable(model)
    torch.testing.assert_close(loss_in_step(model, cp, batch), stock_loss("llama", batch))


def test_enabling_that_fails_leaves_no_trace(monkeypatch):
    def fail(model):
        raise RuntimeError("transformers has no such name")

    model = zoo.build_model("llama")
    before = trace(model)
    monkeypatch.setattr(sys.modules[enable.__module__], "add_saving", fail)
    with pytest.raises(RuntimeError, match="no such name"):
        enable(model)
    assert trace(model) == before


def test_a_loss_of_ones_own_is_refused_before_training(monkeypatch):
    model = zoo.build_model("llama")
    before = trace(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ValueError, match=r"loss_function has been replaced, .* token_mean\(\)"):
        enable(model)
    del model._loss_function
    assert trace(model) == before
    renamed = property(fset=lambda self, loss: setattr(self, "loss_of_users", loss))
    monkeypatch.setattr(PreTrainedModel, "loss_function", renamed)
    with pytest.raises(RuntimeError, match=r"has no `PreTrainedModel._loss_function`, by which"):
        enable(model)


def test_a_model_that_takes_full_sequences_stays_enabled(cp, batch):
    model = zoo.build_model("llama")
    handle = enable(model)
    rows = shard_in_forward(model, cp)
    with pytest.raises(ValueError, match=r"takes full .* handle of shard_in_forward\(\) first"):
        handle.undo()
    assert torch.isfinite(model(**tokens(batch)).loss)
    rows.undo()
    handle.undo()
    assert trace(model) == trace(zoo.build_model("llama"))


class Shifting(nn.Linear):
    def forward(self, x):
        return super().forward(x).roll(1, 1)


def test_modules_of_ones_own_make_a_known_type_unknown():
    model = zoo.build_model("llama")
    up = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = Shifting(up.in_features, up.out_features, bias=False)
    message = r"'llama', but model.layers.0.mlp.up_proj \(Shifting\) is not from .*--allow-unknown"
    with pytest.raises(ValueError, match=message):
        enable(model)


def test_attention_of_ones_own_is_refused_and_shared_configs_are_kept(cp, batch):
    model = zoo.build_model("llama")
    # `set_attn_implementation` would fetch it.
    model.config._attn_implementation = "kernels-community/something"
    with pytest.raises(
        ValueError, match="attention is 'kernels-community/something', which is not"
    ):
        enable(model)
    model = zoo.build_model("llama")
    enable(model)
    enable(model.model).undo()
    with pytest.raises(ValueError, match="has since been set to 'eager'"):
        loss_in_step(model, cp, batch)


@pytest.mark.slow
def test_compiled_models_are_enabled_inside(cp, batch):
    model = zoo.build_model("llama")
    compiled = torch.compile(model, backend="eager")
    exact = model(**unpack(batch, PAD)).loss
    enable(compiled)
    torch.testing.assert_close(compiled(**unpack(batch, PAD)).loss, exact)
    torch.testing.assert_close(loss_in_step(compiled, cp, batch), exact)


def test_the_balance_loss_is_there_without_labels(cp, batch):
    model = zoo.build_model("mixtral:aux")
    enable(model)
    with cp.step(batch) as local:
        found = model(input_ids=local["input_ids"]).aux_loss
    exact = zoo.build_model("mixtral:aux")(**unpack(batch, PAD)).aux_loss
    torch.testing.assert_close(found.float(), exact)


def test_reentrant_checkpointing_that_hides_a_gradient_is_refused(cp, batch):
    model = zoo.build_model("mixtral:aux")
    enable(model)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match=r"auxiliary loss of MixtralFor.*'use_reentrant': False"):
        loss_in_step(model, cp, batch)


def test_packed_documents_are_not_searched_for_in_a_step(monkeypatch):
    """transformers waits for the GPU to do so, and the step knows its documents."""
    searched = []
    stock = torch.diff
    monkeypatch.setattr(torch, "diff", lambda *a, **k: searched.append(1) or stock(*a, **k))
    model = zoo.build_model("llama")
    enable(model)
    batch = zoo.sample_batch("llama", rows=2, length=12)
    batch = {name: batch[name] for name in ("input_ids", "labels")}
    with doors.parallel(None).step(batch) as local:
        model(**local)
    assert not searched
    model(**batch, use_cache=False)
    assert searched


def test_a_model_with_attention_of_its_own_keeps_its_documents():
    """It is not ours: the packed documents that transformers finds are all that it knows."""
    AttentionInterface.register("own", sdpa_attention_forward)
    AttentionMaskInterface.register("own", masking_utils.sdpa_mask)
    model = zoo.build_model("llama")
    model.set_attn_implementation("own")
    batch = {
        "input_ids": zoo.sample_batch("llama", rows=1, length=12)["input_ids"],
        "position_ids": torch.tensor([[*range(5), *range(7)]]),
    }
    expected = model(**batch, use_cache=False).logits
    with doors.parallel(None).step(batch) as local:
        found = model(**local, use_cache=False).logits
    torch.testing.assert_close(found, expected)
