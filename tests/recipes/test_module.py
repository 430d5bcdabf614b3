"""The module: which model, which weights, which steps; and that ranks change nothing."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from lightning.pytorch import Callback, seed_everything
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import Mxfp4Config

from hf_patches.weights.export import export
from lightning_cp.checkpoint import consolidate
from recipes.data import PasskeyData, TextData
from recipes.module import CausalLMModule
from recipes.schedule import decay_groups, lr_factor
from recipes.tokens import byte_tokenizer
from recipes.weights import change_config, load_config, tiny_config
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment
from tests.recipes.shrunken import ARCHITECTURES, pack_experts, write_config

pytestmark = pytest.mark.slow  # what `make test` runs of recipes is in the other files

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}


# ---------------------------------------------------------------- options


def test_the_learning_rate_rises_and_falls():
    cosine = [lr_factor(s, 10, warmup_steps=4, min_lr_fraction=0.1) for s in range(11)]
    assert cosine[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert cosine[5:] == sorted(cosine[5:], reverse=True)
    assert cosine[10] == pytest.approx(0.1)
    assert lr_factor(99, 10, schedule="linear") == 0
    assert lr_factor(7, 10, schedule="constant") == 1
    shares = [lr_factor(s, 20, warmup_steps=0.2) for s in range(6)]
    assert shares == [lr_factor(s, 20, warmup_steps=4) for s in range(6)]


def test_norms_and_biases_do_not_decay():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].bias.requires_grad_(False)
    shapes = [[tuple(p.shape) for p in g["params"]] for g in decay_groups(model, 0.1)]
    assert shapes == [[(5, 4), (4, 4)], [(4,), (4,)]]
    assert [group["weight_decay"] for group in decay_groups(model, 0.1)] == [0.1, 0.0]


def test_changes_of_a_config_keep_what_they_do_not_name():
    config = tiny_config()
    change_config(config, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0}
    nested = ARCHITECTURES["gemma3"]()
    change_config(nested, {"sliding_window": 5})
    assert nested.text_config.sliding_window == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "schedule='cosin' is unknown"),
        ({"dtype": "half"}, "dtype='half' is unknown"),
        ({"warmup_steps": -1}, "warmup_steps=-1: give a whole number of steps, or a fraction"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5: give a whole number of steps, or a fraction"),
        ({"config": {"hiden_size": 3}}, "no such value. Did you mean `hidden_size`"),
        ({"config": {"zzz": 3}}, "no such value. It has .*vocab_size"),
    ],
)
def test_wrong_options_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        CausalLMModule(**options)


def test_what_is_no_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"nowhere' is not a folder. Give a folder"):
        load_config("./nowhere")
    with pytest.raises(FileNotFoundError, match="holds no config.json"):
        load_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"nobody/nothing' could not be loaded, neither as"):
        load_config("nobody/nothing")
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    with pytest.raises(ValueError, match="could not be loaded.*llamma"):
        load_config(str(tmp_path))
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has type 'vit', of which transformers has no causal"):
        load_config(str(tmp_path))
    told = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(
        json.dumps({**tiny_config().to_dict(), "quantization_config": told})
    )
    with pytest.raises(ValueError, match=r"quantized weights \(gptq\).*Give the model that it was"):
        CausalLMModule(model=str(tmp_path))


# ---------------------------------------------------------------- on ranks


def text_data(folder, **options):
    return TextData(
        **{
            "seq_len": 61,
            "batch_size": 2,
            "max_documents": 3,
            "val_fraction": 0.4,
            "cache_dir": str(folder / "cache"),
            **options,
        }
    )


def on_ranks(fn, folder, *args):
    """Call ``fn(trainer_options, folder, ...)`` as torchrun would, rank 0 first in the cache."""
    with elastic_environment():
        seed_everything(0)
        return fn(folder, *args)


def trainer(folder, **options):
    return build_trainer(
        **{
            "strategy": doors.strategy(),
            "default_root_dir": folder,
            "limit_val_batches": 1,
            "num_sanity_val_steps": 0,
            "max_epochs": -1,
            **options,
        }
    )


class Recorded(CausalLMModule):
    """Remembers losses and learning rates."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append((float(loss.detach()), self.optimizers().param_groups[0]["lr"]))
        return loss

    def on_fit_start(self):
        super().on_fit_start()
        self.seen = []


def validate_pretrained(folder, path, options):
    module = CausalLMModule(model=path, **options)
    data = text_data(folder)
    (found,) = trainer(folder).validate(module, data, verbose=False)
    held = {n: p.dtype for n, p in module.named_parameters() if p.requires_grad}
    return found["val_loss"], len(held)


def is_packed(path):
    return "quantization_config" in json.loads((Path(path) / "config.json").read_text())


def stock_loss(path, folder):
    """The stock model, each document by itself, on the first validation batch."""
    packed = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed(path) else {}
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **packed)
    model.float().eval()
    data = text_data(folder)
    data.prepare_data()
    data.setup("validate")
    batch = next(iter(data.val_dataloader()))
    total, count = 0.0, 0
    for ids, documents in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for document in documents.unique():
            if document >= 0:
                part = ids[documents == document][None]
                if part.shape[1] > 1:
                    with torch.no_grad():
                        loss = model(input_ids=part, labels=part).loss
                    total += float(loss) * (part.shape[1] - 1)
                    count += part.shape[1] - 1
    return total / count


QUICK = ("llama", "qwen3_moe")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*ARCHITECTURES, "gpt_oss packed")
    ],
)
def test_pretrained_weights_reach_ranks_in_parts(name, ranks, tmp_path):
    kind, *packed = name.split()
    path = write_config(kind, tmp_path / "model", weights=True)
    if packed:
        pack_experts(path)
    path = str(path)
    expected = stock_loss(path, tmp_path)
    for options in ({}, {"lora": LORA}):
        for loss, num_trained in ranks(2).run(
            on_ranks, validate_pretrained, tmp_path, path, options
        ):
            assert loss == pytest.approx(expected, rel=2e-5), options
            assert num_trained


def fit(folder, options, trainer_options, ckpt_path=None, data_options=None):
    """Train; return losses and learning rates."""
    module = Recorded(lr=1e-2, warmup_steps=2, **options)
    run = trainer(folder, **trainer_options)
    run.fit(module, text_data(folder, **(data_options or {})), ckpt_path=ckpt_path)
    run.save_checkpoint(folder / "checkpoint.ckpt")
    return module.seen


@pytest.mark.ranks
def test_two_ranks_train_as_one_and_resume_where_they_stopped(ranks, tmp_path):
    for name in ("alone", "shared", "resumed"):
        (tmp_path / name).mkdir()
    options = {"max_steps": 4}
    (alone,) = ranks(1).run(on_ranks, fit, tmp_path / "alone", {}, options)
    shared, same = ranks(2).run(on_ranks, fit, tmp_path / "shared", {}, options)
    assert shared == same
    torch.testing.assert_close(torch.tensor(shared), torch.tensor(alone), rtol=1e-4, atol=0)
    rates = [rate for _, rate in shared]
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2 * (0.1 + 0.9 * 0.5)])

    # Stopped in the middle of an epoch, on one rank; the schedule is that of four steps.
    half = {"max_steps": 4, "limit_train_batches": 1.0, "callbacks": [Stop(2)]}
    folder = tmp_path / "resumed"
    (first,) = ranks(1).run(on_ranks, fit, folder, {}, half)
    path = folder / "checkpoint.ckpt"
    second, _ = ranks(2).run(on_ranks, fit, folder, {}, options, path)
    assert (len(first), len(second)) == (2, 2)
    torch.testing.assert_close(torch.tensor(first + second), torch.tensor(alone), rtol=1e-4, atol=0)


class Stop(Callback):
    """Ends a run before its time."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step == self.step


@pytest.mark.ranks
def test_a_checkpoint_becomes_a_folder_with_the_changed_config(ranks, tmp_path):
    path = write_config("llama", tmp_path / "model", weights=True)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    options = {"model": str(path), "config": {"rope_parameters": yarn}}
    ranks(2).run(on_ranks, fit, tmp_path, options, {"max_steps": 1})
    exported = export(tmp_path / "checkpoint.ckpt", tmp_path / "out")
    assert exported.config.rope_parameters["rope_type"] == "yarn"
    assert exported.config.rope_parameters["rope_theta"] == 500_000.0
    assert exported.config.use_cache
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = AutoModelForCausalLM.from_pretrained(path).state_dict()
    moved = [n for n, w in loaded.state_dict().items() if not torch.equal(w, start[n])]
    assert len(moved) == len(start)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 262
    consolidate(tmp_path / "checkpoint.ckpt", tmp_path / "one.ckpt")
    module = CausalLMModule.load_from_checkpoint(tmp_path / "one.ckpt")
    for name, weight in loaded.state_dict().items():
        assert torch.equal(module.model.state_dict()[name], weight), name


def validate_checkpoint(folder, options, ckpt_path):
    module = CausalLMModule(**options)
    (found,) = trainer(folder).validate(
        module, text_data(folder), ckpt_path=ckpt_path, verbose=False
    )
    return found["val_loss"]


@pytest.mark.ranks
def test_lora_keeps_adapters_alone(ranks, tmp_path):
    path = str(write_config("llama", tmp_path / "model", weights=True))
    options = {"model": path, "lora": LORA}
    ranks(2).run(on_ranks, fit, tmp_path, options, {"max_steps": 3})
    checkpoint = tmp_path / "checkpoint.ckpt"
    consolidate(checkpoint, tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert len(state) == 8
    assert all(".lora_" in name for name in state)
    # The adapter's folder and the checkpoint are the same model.
    stock = AutoModelForCausalLM.from_pretrained(path)
    adapted = PeftModel.from_pretrained(stock, tmp_path / "adapter").merge_and_unload()
    adapted.save_pretrained(tmp_path / "merged")
    byte_tokenizer().save_pretrained(tmp_path / "merged")
    expected = stock_loss(str(tmp_path / "merged"), tmp_path)
    assert expected != pytest.approx(stock_loss(path, tmp_path), rel=1e-3)
    for loss in ranks(2).run(on_ranks, validate_checkpoint, tmp_path, options, checkpoint):
        assert loss == pytest.approx(expected, rel=2e-5)


@pytest.mark.ranks
def test_lora_on_random_weights_keeps_them_too(ranks, tmp_path):
    ranks(2).run(on_ranks, fit, tmp_path, {"lora": LORA}, {"max_steps": 1})
    consolidate(tmp_path / "checkpoint.ckpt", tmp_path / "one.ckpt")
    state = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert any(name.endswith("embed_tokens.weight") for name in state)


def fit_mixed(folder, options):
    module = Recorded(lr=1e-2, **options)
    run = trainer(folder, max_steps=2, precision="bf16-mixed")
    run.fit(module, text_data(folder))
    held = {}
    for name, parameter in module.named_parameters():
        held.setdefault(parameter.requires_grad, set()).add(str(parameter.dtype))
        assert parameter.requires_grad == ("lora" in name or "lora" not in options)
    return module.seen, held


@pytest.mark.ranks
def test_what_is_not_trained_is_held_in_half_precision(ranks, tmp_path):
    for options in ({}, {"lora": LORA}):
        for seen, held in ranks(2).run(on_ranks, fit_mixed, tmp_path, options):
            assert all(3 < loss < 9 for loss, _ in seen)
            assert held[True] == {"torch.float32"}
            assert held.get(False, {"torch.bfloat16"}) == {"torch.bfloat16"}


def find_keys(folder, options):
    data = PasskeyData(seq_len=160, batch_size=2, lengths=[160], depths=[0.2, 0.8])
    module = CausalLMModule(**options)
    run = trainer(folder, limit_val_batches=2)
    (found,) = run.validate(module, data, verbose=False)
    (tested,) = run.test(module, data.val_dataloader(), verbose=False)
    return found, tested


@pytest.mark.ranks
def test_retrieval_is_measured_where_rows_hide_keys(ranks, tmp_path):
    for found, tested in ranks(2).run(on_ranks, find_keys, tmp_path, {}):
        assert set(found) == {"val_loss", "val_retrieval"}
        assert found["val_retrieval"] == 0
        assert set(tested) == {"test_loss", "test_retrieval"}
    for said in ranks(2).run(on_ranks, find_no_keys, tmp_path):
        assert "chunked_loss='always' returns none" in said


def find_no_keys(folder):
    with pytest.raises(ValueError, match="Retrieval is measured with logits") as error:
        find_keys(folder, {"chunked_loss": "always"})
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "data_options", "trainer_options", "message"),
    [
        ({}, {}, {"strategy": "auto"}, "recipes need ContextParallelStrategy"),
        ({"config": {"vocab_size": 200}}, {}, {}, "tokenizer has 262 tokens, but the model 200"),
        ({"config": {"max_position_embeddings": 60}}, {}, {}, "Sequences have 61 tokens, but the"),
        ({"freeze": ["*vision*"]}, {}, {}, "no parameter name matches '\\*vision\\*'"),
        ({"lora": {"target_modules": ["w"]}}, {}, {}, "model.lora: Target modules"),
        ({}, {}, {"max_steps": -1, "max_epochs": -1}, "the number of steps, but this run has none"),
    ],
)
def test_what_would_go_wrong_is_refused(
    options, data_options, trainer_options, message, ranks, tmp_path
):
    (said,) = ranks(1).run(on_ranks, refusal, tmp_path, options, data_options, trainer_options)
    assert re.search(message, said), said


def refusal(folder, options, data_options, trainer_options):
    run = trainer(folder, **{"max_steps": 1, **trainer_options})
    with pytest.raises(ValueError) as error:  # noqa: PT011  its text is what comes back
        run.fit(CausalLMModule(**options), text_data(folder, **data_options))
    return str(error.value)
