"""Trainers under context parallelism, against the same run without it, on fewer processes."""

import re
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments

from hf_patches import context_parallel
from hf_patches.trainers import trainer_checks
from tests.hf_patches.trainers import trainer_jobs
from tests.hf_patches.trainers.trainer_jobs import Job, differences, train
from tests.parity import zoo
from tests.parity.trainer_step import forget_processes, processes

pytestmark = pytest.mark.ranks

slow = pytest.mark.slow
CASES = [
    # kind, flags, processes, context ranks
    ("trainer", "", 2, 2),
    pytest.param("trainer", "flattened fsdp every_batch few", 2, 2, marks=slow),
    pytest.param("sft", "packed every_batch", 2, 2, marks=slow),
    pytest.param("accelerate", "evaluated", 2, 2, marks=slow),
    ("trainer", "stream short every_batch", 4, 2),
    ("accelerate", "", 4, 2),
    pytest.param("trainer", "own fsdp every_batch few no_predictions", 2, 2, marks=slow),
    pytest.param("trainer", "flattened fsdp", 2, 2, marks=slow),
    pytest.param("sft", "packed", 2, 2, marks=slow),
    pytest.param("dpo", "", 2, 2, marks=slow),
    pytest.param("trainer", "stream", 4, 2, marks=slow),
    pytest.param("trainer", "own fsdp", 2, 2, marks=slow),
    pytest.param("trainer", "reads_logits", 2, 2, marks=slow),
    pytest.param("trainer", "own", 4, 2, marks=slow),
    pytest.param("trainer", "reads_logits fsdp", 3, 3, marks=slow),
    pytest.param("trainer", "flattened checkpointing", 2, 2, marks=slow),
    pytest.param("trainer", "flattened kwargs", 3, 3, marks=slow),
    pytest.param("trainer", "smoothing metrics", 3, 3, marks=slow),
    pytest.param("trainer", "own_average", 4, 2, marks=slow),
    pytest.param("trainer", "", 4, 2, marks=slow),
    pytest.param("trainer", "fsdp", 4, 2, marks=slow),
    pytest.param("trainer", "fsdp checkpointing", 2, 2, marks=slow),
    pytest.param("sft", "", 2, 2, marks=slow),
    pytest.param("sft", "packed fsdp checkpointing", 4, 2, marks=slow),
    pytest.param("dpo", "lora", 4, 2, marks=slow),
    pytest.param("dpo", "fsdp", 2, 2, marks=slow),
    pytest.param("kto", "", 3, 3, marks=slow),
    pytest.param("reward", "", 3, 3, marks=slow),
    pytest.param("grpo", "", 2, 2, marks=slow),
    pytest.param("grpo", "", 4, 2, marks=slow),
    pytest.param("rloo", "", 2, 2, marks=slow),
    pytest.param("grpo", "drift", 2, 2, marks=slow),
]


@pytest.mark.parametrize(("kind", "flags", "num_ranks", "size"), CASES)
def test_a_run_is_that_of_fewer_processes(ranks, kind, flags, num_ranks, size):
    exact = ranks(num_ranks // size).run(train, Job(kind, 0, tuple(flags.split())))[0]
    found = ranks(num_ranks).run(train, Job(kind, size, tuple(flags.split())))[0]
    largest = differences(found, exact)
    if "drift" in flags:
        del largest["reward"]  # the mean over all ranks, whose rewards differ
    assert {name: x for name, x in largest.items() if not x < 2e-6} == {}
    assert len(exact.log) > 3
    assert max(entry["grad_norm"] for entry in exact.log if "grad_norm" in entry) > 0.1


ORDERS = [
    # whether an evaluation or a training comes first, then each after the other
    ("freeze evaluate train unfreeze predict train", "fsdp few"),
    ("freeze evaluate verify train unfreeze train predict train", "fsdp"),
    ("freeze evaluate verify train unfreeze train predict train", ""),
    ("predict train evaluate train", "fsdp"),
    ("verify train train predict train", "lora"),
]


@pytest.mark.parametrize(("calls", "flags"), ORDERS)
@pytest.mark.slow
def test_calls_of_a_trainer_may_come_in_any_order(ranks, calls, flags):
    flags = (*flags.split(), "every_batch", "no_predictions")
    job = Job(flags=flags, calls=tuple(calls.split()), is_tried=True)
    exact = ranks(1).run(train, job)[0]
    found = ranks(2).run(train, replace(job, size=2))[0]
    assert max(differences(found, exact).values()) < 1e-9
    norms = [entry["grad_norm"] for entry in exact.log if "grad_norm" in entry]
    assert len(norms) == (3 if "few" in flags else 5) * job.calls.count("train")


HEADS = [
    ("sequence", "llama", "few"),
    pytest.param("sequence", "llama", "", marks=slow),
    pytest.param("multi_label", "bert", "", marks=slow),
    pytest.param("sequence", "bert", "", marks=slow),
    pytest.param("sequence", "llama", "smoothing", marks=slow),
    pytest.param("regression", "llama", "fsdp", marks=slow),
    pytest.param("token", "llama", "", marks=slow),
    pytest.param("token", "bert", "smoothing", marks=slow),
    pytest.param("masked", "modernbert", "", marks=slow),
    pytest.param("question", "modernbert", "", marks=slow),
    pytest.param("question", "llama", "fsdp", marks=slow),
]


@zoo.needs_transformers("5.19")
@pytest.mark.parametrize(("head", "model", "flags"), HEADS)
def test_a_head_trains_as_the_stock_one_over_accumulated_batches(ranks, head, model, flags):
    """With older versions what is a mean is refused."""
    job = Job(flags=(*flags.split(), "no_predictions"), model=model, head=head)
    exact = ranks(1).run(train, job)[0]
    found = ranks(2).run(train, replace(job, size=2))[0]
    assert max(differences(found, exact).values()) < 1e-9


@pytest.mark.parametrize("processes", [(1,), (1, 2)], ids=len)
@pytest.mark.slow
def test_a_run_resumes_on_other_numbers_of_processes(ranks, tmp_path, processes):
    folder = str(tmp_path)
    exact = ranks(1).run(train, Job(flags=("no_predictions",)))[0]
    saved = ranks(2).run(train, Job(size=2, flags=("save", "no_predictions"), folder=folder))[0]
    assert differences(saved, exact)["weights"] < 1e-9
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(saved.weights[name], x) for name, x in stored.items())
    assert "lightning" not in (tmp_path / "final" / "config.json").read_text()
    for num_ranks in processes:
        job = Job(size=num_ranks - num_ranks % 2, flags=("resume", "no_predictions"), folder=folder)
        resumed = ranks(num_ranks).run(train, job)[0]
        largest = differences(resumed, exact)
        assert {name: x for name, x in largest.items() if not x < 2e-6} == {}, num_ranks


@slow
def test_a_sharded_run_saves_and_resumes(ranks, tmp_path):
    flags = ("fsdp", "no_predictions")
    exact = ranks(1).run(train, Job(flags=flags))[0]
    job = Job(size=2, flags=(*flags, "save"), folder=str(tmp_path))
    saved = ranks(2).run(train, job)[0]
    stored = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(saved.weights[name], x) for name, x in stored.items())
    resumed = ranks(2).run(train, Job(size=2, flags=(*flags, "resume"), folder=str(tmp_path)))[0]
    assert differences(resumed, exact)["weights"] < 2e-6


# ---------------------------------------------------------------- refusals


def build(folder, model=None, **arguments):
    args = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], **arguments)
    given = {"model": trainer_jobs.tiny()} if model is None else {"model": model}
    if model == "init":
        given = {"model_init": lambda: trainer_jobs.tiny()}
    return Trainer(args=args, train_dataset=trainer_jobs.token_rows(4), **given)


def set_value(owner, path, value):
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, name, value)


REFUSALS = [
    # what is set on the trainer, and what the message says
    ("args.auto_find_batch_size", True, "auto_find_batch_size=True .* Switch it off"),
    ("args.neftune_noise_alpha", 5.0, r"neftune_noise_alpha=5.0 .* Set it to None"),
    ("args.use_liger_kernel", True, "use_liger_kernel=True .* Switch it off"),
    ("args.activation_offloading", True, "activation_offloading=True .* gradient_checkpointing"),
    ("args.use_vllm", True, "use_vllm=True .* sampled with transformers"),
    ("args.train_sampling_strategy", "batch_rebalance", "'batch_rebalance' .* Use 'random'"),
    ("is_distributed_loading_by_transformers", True, "distributed_config .* Load it without"),
    ("accelerator.dataloader_config.split_batches", True, "split_batches=True .* Remove it"),
    ("accelerator.dataloader_config.dispatch_batches", True, "dispatch_batches=True .* Remove it"),
    (
        "accelerator.state.parallelism_config",
        "ParallelismConfig(cp_size=2)",
        r"ParallelismConfig\(cp_size=2\).* Remove parallelism_config",
    ),
    (
        "accelerator.state.dynamo_plugin.backend",
        SimpleNamespace(value="INDUCTOR"),
        "torch_compile=True.* Switch it off",
    ),
    (
        "accelerator.state.distributed_type",
        SimpleNamespace(value="DEEPSPEED"),
        "distributed_type=DEEPSPEED .* Use DDP",
    ),
    ("accelerator.state.distributed_type", SimpleNamespace(value="FSDP"), "FSDP1.* Use FSDP2"),
    ("model_wrapped", None, "has wrapped its model already. Call context_parallel.* before train"),
]


def messages(folder):
    """Return the message of every refusal."""
    found = []

    def refuse(*args, **kwargs):
        with pytest.raises((ValueError, TypeError)) as error:
            context_parallel(*args, **kwargs)
        found.append(str(error.value))

    with processes():
        for path, value, _ in REFUSALS:
            trainer = build(folder)
            before = dict(vars(trainer.args))
            set_value(trainer, path, value)
            refuse(trainer, size=2)
            vars(trainer.args).update(before)
            forget_processes()
        trainer = build(folder)
        refuse(trainer, size=0)
        refuse(trainer, size=3)
        refuse(trainer, trainer_jobs.tiny(), size=2)
        refuse(nn.Linear(1, 1), size=2)
        refuse(trainer.accelerator, size=2)
        refuse(trainer.accelerator, DistributedDataParallel(trainer.model), size=2)
        refuse(trainer.accelerator, trainer_jobs.Own(), size=2)
        refuse(build(folder, trainer_jobs.Own()), size=2)
        model = trainer_jobs.tiny()
        model.__class__ = type("Own", (type(model),), {"__module__": "own"})
        refuse(build(folder, model), size=2)
        refuse(build(folder, nn.Linear(1, 1)), size=2)
        refuse(build(folder, "init"), size=2)
        config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=9)
        refuse(build(folder, T5ForConditionalGeneration(config)), size=2)
        context_parallel(trainer, size=2)
        refuse(trainer, size=2)
    return found


def test_what_cannot_be_right_is_refused_by_name(ranks, tmp_path):
    found = ranks(2).run(messages, str(tmp_path))[0]
    expected = [
        *(pattern for *_, pattern in REFUSALS),
        r"size=0\): pass the number of processes",
        r"size=3\) does not divide the 2 processes .* Use one of \[1, 2\], or start 3",
        "got a LlamaForCausalLM that is not in trainer.model. Leave it out",
        "it got a Linear. In Lightning use ContextParallelStrategy",
        "needs the model, before accelerator.prepare.* Add it",
        "a model inside DistributedDataParallel. Call it before",
        r"got Own, .* Name .*: context_parallel\(accelerator, model.backbone, size=...\)",
        r"got Own, .* Name .*: context_parallel\(trainer, trainer.model.backbone, size=...\)",
        r"got Own, .*\(trainer, trainer.model.model, .* enable\(model, allow_unknown=True\) before",
        "got Linear, which is not a class of transformers.* Build it around a model of transf",
        "model_init= builds another model .* Pass model=",
        "is an encoder-decoder model",
        "was called before for this Trainer. Call remove",
    ]
    assert len(found) == len(expected)
    for message, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, message), (message, pattern)


def check_trl(name, module, **attributes):
    """Check a trainer with nothing but what is looked at, whose class TRL could have."""
    model, trainer = nn.Linear(1, 1), type(name, (), {"__module__": module})()
    vars(trainer).update(
        {
            "model": model,
            "model_wrapped": model,
            "model_init": None,
            "get_tp_size": lambda: 1,
            "accelerator": SimpleNamespace(distributed_type=SimpleNamespace(value="NO")),
            "args": SimpleNamespace(per_device_train_batch_size=2, steps_per_generation=2),
            **attributes,
        }
    )
    trainer_checks.check_trainer(trainer, 2)


def check_policy(**changes):
    check_trl("GRPOTrainer", "trl.trainer.grpo_trainer", **{"num_generations": 4, **changes})


OVER_ALL = {
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "normalize_advantages": True,
}


def test_trainers_of_trl_that_were_not_tried_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="ORPOTrainer of TRL has not been tried.*SFTTrainer"):
        check_trl("ORPOTrainer", "trl.experimental.orpo")
    check_policy()
    with pytest.raises(ValueError, match="2 x 2 = 4 completions.*multiple of num_generations=8"):
        check_policy(num_generations=8)
    for name, value in OVER_ALL.items():
        with pytest.raises(ValueError, match=f"{name}={value!r} .*Use the default"):
            check_policy(**{name: value})
    versions = {"trl": "1.16.0", "transformers": "5.18.0"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(ValueError, match="SFTTrainer needs transformers >= 5.19, and 5.18.0 is"):
        check_trl("SFTTrainer", "trl.trainer.sft_trainer")
    trainer = SimpleNamespace(
        model_accepts_loss_kwargs=True, args=SimpleNamespace(average_tokens_across_devices=True)
    )
    trainer_checks.check_factor(trainer, zoo.build_model("llama"))
    with pytest.raises(ValueError, match="a mean .* Install transformers >= 5.19"):
        trainer_checks.check_factor(trainer, zoo.build_model("llama", head="sequence"))
    monkeypatch.setattr(metadata, "version", lambda _: "1.14.2")
    with pytest.raises(ValueError, match="needs trl >= 1.15, and 1.14.2 is installed"):
        check_policy()


# ---------------------------------------------------------------- what else a run may meet


def differing_batches(folder):
    with processes():
        trainer = build(folder, remove_unused_columns=False)
        trainer.data_collator = lambda rows: {
            key: torch.full((2, 9), 5 + dist.get_rank()) for key in ("input_ids", "labels")
        }
        context_parallel(trainer, size=2)
        with pytest.raises(ValueError, match="same batch"):
            trainer.train()


def unwrapped(folder):
    """Train a model that nothing averages, and say what became of the weights."""
    with processes():
        trainer = build(folder)
        # What users replace; the message names it.
        trainer._wrap_model = lambda model, **_: trainer_jobs.Inside(model)
        trainer.data_collator = trainer_jobs.padded
        context_parallel(trainer, size=2)
        before = trainer.model.lm_head.weight.clone()
        with pytest.raises(RuntimeError, match="train Inside, which is in neither DDP nor FSDP2"):
            trainer.train()
        assert torch.equal(before, trainer.model.lm_head.weight)


def test_a_model_whose_gradients_are_not_averaged_is_not_trained(ranks, tmp_path):
    ranks(2).run(unwrapped, str(tmp_path))


def test_batches_that_differ_between_context_ranks_are_refused(ranks, tmp_path):
    ranks(2).run(differing_batches, str(tmp_path))


def undone(folder):
    with processes():
        trainer = build(folder)
        before = set(vars(trainer)), set(vars(trainer.accelerator)), set(vars(trainer.model))
        handle = context_parallel(trainer, size=2, layout="contiguous")
        assert handle.cp.config.layout == "contiguous"
        assert handle.num_data_ranks == 1
        assert trainer.get_total_train_batch_size(trainer.args) == 8
        handle.undo()
        after = set(vars(trainer)), set(vars(trainer.accelerator)), set(vars(trainer.model))
        assert trainer.get_total_train_batch_size(trainer.args) == 16
        assert trainer.accelerator.dataloader_config.dispatch_batches is None
    return [sorted(x ^ y) for x, y in zip(before, after, strict=True)]


def test_undo_restores_trainer_accelerator_and_model(ranks, tmp_path):
    assert ranks(2).run(undone, str(tmp_path))[0] == [[], [], []]


def documents(folder):
    """Return the loss of documents by our ids, and of the same documents in rows of their own."""
    rows = trainer_jobs.token_rows(4)
    for row in rows:
        row["labels"] = row["input_ids"]
    packed = {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "document_ids": [i for i, row in enumerate(rows) for _ in row["input_ids"]],
    }
    packed["labels"] = packed["input_ids"]
    losses = []
    with processes():
        for data in (rows, [packed]):
            trainer = build(folder, per_device_train_batch_size=4, max_steps=1, logging_steps=1)
            trainer.train_dataset, trainer.data_collator = data, trainer_jobs.padded
            if data is not rows:
                trainer.data_collator = lambda rows: {k: torch.tensor([rows[0][k]]) for k in packed}
            context_parallel(trainer, size=2)
            trainer.train()
            losses.append(trainer.state.log_history[0]["loss"])
            forget_processes()
    return losses


def test_document_ids_reach_the_model_and_the_count_of_labels(ranks, tmp_path):
    rows, packed = ranks(2).run(documents, str(tmp_path))[0]
    assert packed == pytest.approx(rows, abs=2e-6)
