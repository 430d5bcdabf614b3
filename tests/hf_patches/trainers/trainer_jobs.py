"""Runs of transformers' Trainer, of TRL's trainers and of accelerate, on ranks and alone."""

import contextlib
import functools
import io
import runpy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, set_seed
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
)
from transformers import Trainer as HFTrainer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from hf_patches import context_parallel
from hf_patches.trainers import verify
from lightning_cp.private.modes import plain_functions
from tests.parity import media_zoo, zoo
from tests.parity.hf import Double
from tests.parity.trainer_step import processes

VOCAB = 97
METRICS = (
    *("loss", "eval_loss", "test_loss", "grad_norm", "learning_rate", "num_input_tokens_seen"),
    *("entropy", "mean_token_accuracy", "num_tokens", "eval_entropy", "eval_accuracy"),
    *("eval_mean_token_accuracy", "rewards/margins", "eval_rewards/margins", "logps/chosen"),
    *("rewards/chosen", "kl", "reward", "completions/mean_length", "accuracy"),
)


@dataclass(frozen=True)
class Job:
    """One training run.

    Args:
        kind: of the trainer.
        size: the number of context ranks; 0 for a run without us.
        flags: what is special about it.
        folder: where checkpoints are written.
        model: of the zoo, with the flag ``media`` of the one with media; None for a tiny Llama.
        head: of a model of the zoo.
        calls: of the trainer, one after the other; with "freeze" and "unfreeze" between them.
        is_tried: whether steps are compared with one device before they are believed.
    """

    kind: str = "trainer"
    size: int = 0
    flags: tuple[str, ...] = ()
    folder: str | None = None
    model: str | None = None
    head: str = "causal"
    calls: tuple[str, ...] = ("train",)
    is_tried: bool = False


@dataclass
class Run:
    """What a run has found."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]
    predictions: Any = None
    label_ids: Any = None
    counts: tuple[float, ...] = ()
    is_padded: bool = False


def differences(found: Run, exact: Run) -> dict[str, float]:
    """Return the largest difference of each curve, of the weights and of the predictions."""
    largest = {}
    for name in METRICS:
        curves = [[entry[name] for entry in run.log if name in entry] for run in (found, exact)]
        assert len(curves[0]) == len(curves[1]), (name, curves)
        if curves[0]:
            largest[name] = max(abs(x - y) for x, y in zip(*curves, strict=True))
    assert found.weights.keys() == exact.weights.keys()
    largest["weights"] = max(
        (x - exact.weights[name]).abs().max().item() for name, x in found.weights.items()
    )
    if exact.predictions is not None:
        assert found.predictions.shape == exact.predictions.shape
        assert (found.label_ids == exact.label_ids).all()
        error = abs(found.predictions - exact.predictions)
        if found.is_padded:  # what padding predicts depends on the stock implementation
            error = error[:, :-1][found.label_ids[:, 1:] != -100]
        largest["predictions"] = error.max()
    assert found.counts == exact.counts
    return largest


@contextmanager
def fsdp_on_cpu(is_used: bool) -> Iterator[None]:
    """Let accelerate shard on CPU ranks too; it knows FSDP for GPUs only."""
    stock = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            for state in (AcceleratorState, PartialState):  # whose type has no setter
                state._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    if is_used:
        AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = stock


def tiny(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.3,  # attention that is not uniform
        **changes,
    )
    return LlamaForCausalLM(config).to(dtype)


class Own(nn.Module):
    """A module that is no model of transformers, around one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = tiny().model
        self.head = nn.Linear(self.backbone.config.hidden_size, VOCAB, dtype=torch.float64)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None
    ) -> dict[str, Tensor]:
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        logits = self.head(states.last_hidden_state)
        loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return {"loss": loss, "logits": logits}


class Inside(nn.Module):
    """Calls a model, and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


class ReadsLogits(HFTrainer):
    """Adds a penalty of the logits to the loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        output = model(**inputs)
        loss = output.loss + 0.01 * output.logits.square().mean()
        return (loss, output) if return_outputs else loss


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, VOCAB))]
    vocabulary = {word: i for i, word in enumerate(words)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def token_rows(count: int, seed: int = 1) -> list[dict[str, list[int]]]:
    """Return rows of different lengths, with very different numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(5, 40, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        keep = torch.rand(length, generator=generator) < 0.1 + 0.8 * (i % 3) / 2
        keep[-1] = True
        labels = torch.where(keep, ids, -100)
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def preferences(count: int, seed: int = 1) -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        return " ".join(f"w{int(i)}" for i in ids)

    names = {"prompt": (3, 18), "chosen": (2, 20), "rejected": (2, 20)}
    return [{name: words(*limits) for name, limits in names.items()} for _ in range(count)]


def padded(
    features: list[dict[str, Any]], *, side: str = "right", multiple: int = 1
) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in features)
    longest = -(-longest // multiple) * multiple

    def column(values: list[list[int]], fill: int) -> Tensor:
        parts = [(row, [fill] * (longest - len(row))) for row in values]
        return torch.tensor([row + pad if side == "right" else pad + row for row, pad in parts])

    labels = [row["labels"] for row in features]
    if side == "left":  # what the last padding token predicts depends on the stock implementation
        labels = [[-100, *row[1:]] for row in labels]
    return {
        "input_ids": column([row["input_ids"] for row in features], 0),
        "labels": column(labels, -100),
        "attention_mask": column([[1] * len(row) for row in labels], 0),
    }


def labelled_for(head: str, features: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return padded rows with labels as a head takes them: most samples have few of them."""
    batch = padded(features)
    labels = batch.pop("labels")
    first = batch["input_ids"][:, 0]
    if head == "question":
        last = batch["attention_mask"].sum(1) - 1
        return {**batch, "start_positions": last // 2, "end_positions": last}
    if head == "sequence":
        return {**batch, "labels": first % 3}
    if head in ("regression", "multi_label"):
        return {**batch, "labels": (batch["input_ids"][:, :3] % 2).double()}
    return {**batch, "labels": torch.where(labels < 0, labels, labels % 3)}


def packed_by_ids(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return one row with a document for each of the rows, and their `document_ids`."""
    ids = [[i] * len(row["input_ids"]) for i, row in enumerate(features)]
    columns = {name: [row[name] for row in features] for name in ("input_ids", "labels")}
    columns["document_ids"] = ids
    return {
        name: torch.tensor([[x for row in values for x in row]]) for name, values in columns.items()
    }


def media_batches(job: Job, seeds: range) -> list[dict[str, Tensor]]:
    """Return batches with the keys of a processor: several items in a sample or none, or text."""
    kinds = [kind for kind in ("plain", "packed", "text", "left") if kind in job.flags]
    batches = []
    for seed in seeds:
        kind = kinds[seed % len(kinds)]
        with plain_functions():  # the model that counts features is in float32
            pair = media_zoo.build_batches(
                job.model, kind, dtype=torch.float64, length=45, seed=seed
            )
        batch = dict(pair[job.size == 0])  # the stock model gets each document as a sample
        # Trainers count labels of first tokens, where a class is not known to shift labels.
        ids = batch.get("document_ids", torch.zeros_like(batch["labels"]))
        is_first = torch.nn.functional.pad(ids.diff(dim=1) != 0, (1, 0), value=True)
        batches.append({**batch, "labels": batch["labels"].masked_fill(is_first, -100)})
    return batches


def only(features: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch that a dataset holds ready."""
    (batch,) = features
    return batch


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class SaveAt(TrainerCallback):
    """Saves once, in the middle of an epoch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = state.global_step == 3


def _arguments(job: Job, folder: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 1 if "every_batch" in job.flags else 3,
        "num_train_epochs": 1 if "every_batch" in job.flags else 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "seed": 3,
        "bf16": False,
        "disable_tqdm": True,
        "include_num_input_tokens_seen": "all",
        "gradient_checkpointing": "checkpointing" in job.flags,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "context_fn": _recompute},
    }
    if "fsdp" in job.flags and dist.group.WORLD.size() > 1:
        arguments["fsdp"] = True
        arguments["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": [_layer_class(job)],
            "state_dict_type": "FULL_STATE_DICT",
        }
    if "hf_cp" in job.flags:
        arguments["parallelism_config"] = ParallelismConfig(cp_size=dist.group.WORLD.size())
    if "stream" in job.flags:
        arguments |= {"max_steps": 2 if "short" in job.flags else 4, "eval_strategy": "no"}
        # By default data ranks need batches of equal shapes: rank 0 reads them all.
        if job.size == 0:
            arguments["accelerator_config"] = {"dispatch_batches": False}
    if "brief" in job.flags:
        arguments |= {"max_steps": 2, "eval_strategy": "no"}
    if "smoothing" in job.flags:
        arguments["label_smoothing_factor"] = 0.1
    if "own_average" in job.flags:
        arguments["average_tokens_across_devices"] = False
    return arguments


def _recompute() -> tuple[Any, Any]:
    """Return what is active when layers of a region run, and when they run again."""
    return nullcontext(), Double()


def _layer_class(job: Job) -> str:
    if job.model is None:
        return "LlamaDecoderLayer"
    build = media_zoo.build_model if "media" in job.flags else zoo.build_model
    return type(build(job.model).get_decoder().layers[0]).__name__


def _accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    right = prediction.predictions.argmax(-1)[:, :-1] == labels
    return {"accuracy": float(right[labels != -100].mean())}


def _build_trainer(job: Job, folder: str) -> Any:
    arguments = _arguments(job, folder)
    # An evaluation of packed rows weighs batches otherwise, unless all have as many of them.
    train = token_rows(6 if "few" in job.flags else 10)
    evaluated = token_rows(4 if "even" in job.flags else 5, seed=2)
    collator: Any = padded
    if "left" in job.flags or "multiple" in job.flags:
        side = "left" if "left" in job.flags else "right"
        multiple = 4 if "multiple" in job.flags else 1
        collator = functools.partial(padded, side=side, multiple=multiple)
    elif "document_ids" in job.flags:
        collator = packed_by_ids
    elif "flattened" in job.flags:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs="kwargs" in job.flags)
    model: Any = tiny()
    if "media" in job.flags:
        train, evaluated, collator = (
            media_batches(job, range(8)),
            media_batches(job, range(8, 12)),
            only,
        )
        arguments |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
        model = media_zoo.build_model(job.model, dtype=torch.float64)
    elif job.model:
        attention = "sdpa" if "sdpa" in job.flags else "eager"
        kind = "sequence" if job.head in ("regression", "multi_label") else job.head
        model = zoo.build_model(job.model, head=kind, dtype=torch.float64, attention=attention)
        if job.head != "causal":
            collator = functools.partial(labelled_for, job.head)
        if job.head != kind:
            model.config.problem_type = {
                "regression": "regression",
                "multi_label": "multi_label_classification",
            }[job.head]
    elif "own" in job.flags:
        model = Own()
    if "lora" in job.flags:
        torch.manual_seed(5)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora)
    return (ReadsLogits if "reads_logits" in job.flags else HFTrainer)(
        model=model,
        args=TrainingArguments(**arguments, remove_unused_columns=False),
        train_dataset=Stream(train) if "stream" in job.flags else train,
        eval_dataset=evaluated,
        data_collator=collator,
        compute_metrics=_accuracy if "metrics" in job.flags else None,
        callbacks=[SaveAt()] if "save" in job.flags else None,
    )


def _build_trl(job: Job, folder: str) -> Any:
    from datasets import Dataset

    arguments = _arguments(job, folder)
    arguments.pop("include_num_input_tokens_seen")
    # TRL's head computes in float32, and AdamW magnifies the rounding of small gradients.
    arguments |= {"optim": "sgd", "learning_rate": 0.1}
    common = {"processing_class": tokenizer()}
    if job.kind == "sft":
        packing = {"packing": "packed" in job.flags, "max_length": 40}
        return SFTTrainer(
            model=tiny(),
            args=SFTConfig(**arguments, **packing),
            train_dataset=Dataset.from_list(token_rows(10)),
            eval_dataset=Dataset.from_list(token_rows(5, seed=2)),
            **common,
        )
    pairs = {
        "train_dataset": Dataset.from_list(preferences(6)),
        "eval_dataset": Dataset.from_list(preferences(5, seed=2)),
    }
    if job.kind == "dpo":
        lora = None
        if "lora" in job.flags:
            lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        losses = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "beta": 0.3}
        return DPOTrainer(
            model=tiny(),
            ref_model=None if lora else tiny(7),
            args=DPOConfig(**arguments, **losses),
            peft_config=lora,
            **pairs,
            **common,
        )
    if job.kind == "reward":
        from transformers import LlamaForSequenceClassification

        config = tiny().config
        config.num_labels = 1
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(config).double()
        return RewardTrainer(model=model, args=RewardConfig(**arguments), **pairs, **common)
    if job.kind == "kto":
        rows = [
            [
                {
                    "prompt": row["prompt"],
                    "completion": row["chosen"] if i % 2 else row["rejected"],
                    "label": bool(i % 2),
                }
                for i, row in enumerate(preferences(count, seed))
            ]
            for count, seed in ((8, 1), (6, 2))
        ]
        return KTOTrainer(
            model=tiny(),
            ref_model=tiny(7),
            args=KTOConfig(**arguments),
            train_dataset=Dataset.from_list(rows[0]),
            eval_dataset=Dataset.from_list(rows[1]),
            **common,
        )
    return _build_policy(job, arguments, common)


def _build_policy(job: Job, arguments: dict[str, Any], common: dict[str, Any]) -> Any:
    from datasets import Dataset

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        scores = [sum(i % 3 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]
        noise = dist.get_rank() if "drift" in job.flags else 0
        return [score + noise * i * i for i, score in enumerate(scores)]

    folder = [str(Path(arguments["output_dir"]) / "reference")]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        tiny(7).save_pretrained(folder[0])
        common["processing_class"].save_pretrained(folder[0])
    dist.barrier()
    model = tiny()
    model.name_or_path = model.config.name_or_path = folder[0]
    arguments |= {"max_steps": 4, "eval_strategy": "no", "gradient_accumulation_steps": 2}
    policy = {"steps_per_generation": 4, "num_generations": 2, "max_completion_length": 12}
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in preferences(16)])
    trainer, config = GRPOTrainer, GRPOConfig
    if job.kind == "rloo":
        trainer, config = RLOOTrainer, RLOOConfig
    return trainer(
        model=model,
        args=config(**arguments, **policy, beta=0.1),
        reward_funcs=reward,
        train_dataset=prompts,
        **common,
    )


def _weights(trainer: Any) -> dict[str, Tensor]:
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        for name, x in state.items()
    }


def _logits(parts: tuple[Any, ...]) -> Any:
    """Return the logits; features of media may follow them."""
    return next(x for x in parts if getattr(x, "ndim", 0) == 3)


def build_trainer(job: Job, folder: str) -> Any:
    """Build the trainer of a job, without context parallelism."""
    build = _build_trainer if job.kind == "trainer" else _build_trl
    return build(job, folder)


def _call(trainer: Any, call: str, job: Job) -> None:
    if call == "train":
        trainer.train(resume_from_checkpoint=True if "resume" in job.flags else None)
    elif call == "predict":
        trainer.state.log_history.append(trainer.predict(trainer.eval_dataset).metrics)
    elif call == "evaluate":
        trainer.evaluate()
    elif call == "verify":
        assert not job.size or verify(trainer)[0].passed
    else:
        trainer.model.get_input_embeddings().requires_grad_(call == "unfreeze")


def train(job: Job) -> Run | None:
    """Train, evaluate and predict; return what rank 0 has found."""
    warnings.simplefilter("ignore")
    with (
        tempfile.TemporaryDirectory() as temporary,
        processes(),
        fsdp_on_cpu("fsdp" in job.flags),
        nullcontext() if "hf_cp" in job.flags else Double(),
    ):
        if job.kind == "accelerate":
            return train_by_accelerate(job)
        trainer = build_trainer(job, job.folder or temporary)
        if job.size:
            named = [trainer.model.backbone] if "own" in job.flags else []
            handle = context_parallel(trainer, *named, size=job.size, verify=job.is_tried)
            if "reads_logits" in job.flags:
                handle.models[0].logits = "always"
            assert len(handle.models) == (1 if getattr(trainer, "ref_model", None) is None else 2)
        if "drift" in job.flags:  # each rank would sample something else
            torch.manual_seed(100 + dist.get_rank())
        log = []
        for number, call in enumerate(job.calls):
            if call == "train" and number:  # which begins a new log
                log += trainer.state.log_history
            _call(trainer, call, job)
        prediction = None
        if job.kind in ("trainer", "sft") and "no_predictions" not in job.flags:
            prediction = trainer.predict(trainer.eval_dataset or token_rows(5, seed=2))
            trainer.state.log_history.append(prediction.metrics)
        run = Run(log + trainer.state.log_history, _weights(trainer))
        run.is_padded = job.model is not None
        run.counts = trainer.state.total_flos, trainer.state.num_input_tokens_seen
        if prediction is not None:
            run.label_ids = prediction.label_ids
            parts = prediction.predictions  # a mixture of experts has the scores of its routers too
            run.predictions = parts if not isinstance(parts, tuple) else _logits(parts)
        if "save" in job.flags:
            trainer.save_model(str(Path(job.folder or temporary) / "final"))
        dist.barrier()
        return run if dist.get_rank() == 0 else None


def train_by_accelerate(job: Job) -> Run | None:
    """Train by a loop, as the guide of transformers counts tokens."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model: Any = tiny()
    if job.size:
        context_parallel(accelerator, model, size=job.size)
    if "evaluated" in job.flags:  # which stock accelerate takes as prepared for training
        model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(token_rows(10), batch_size=2, shuffle=True, collate_fn=padded)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    log = []
    for _ in range(2):
        torch.rand(dist.get_rank())  # as dropout on shards of different lengths may draw
        for batch in loader:
            valid = (batch["labels"][:, 1:] != -100).sum()
            items = accelerator.gather(valid).sum()
            loss = model(**batch, num_items_in_batch=items).loss
            accelerator.backward(loss * accelerator.num_processes)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            whole = accelerator.gather(loss.detach() * accelerator.num_processes).mean()
            rate = schedule.get_last_lr()[0]
            seen = accelerator.gather_for_metrics(batch["input_ids"].sum(1)).sum()
            values = {"loss": whole, "grad_norm": norm, "num_tokens": seen, "learning_rate": rate}
            log.append({name: float(x) for name, x in values.items()})
    state = accelerator.unwrap_model(model).state_dict()
    return Run(log, {name: x.detach().clone() for name, x in state.items()})


def run_example(path: str) -> str:
    """Return what an example prints; its process group is that of the tests, and stays."""
    printed = io.StringIO()
    with processes(), pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(HFTrainer, "end", lambda self: None)
        runpy.run_path(path)["main"]()
    return printed.getvalue()
