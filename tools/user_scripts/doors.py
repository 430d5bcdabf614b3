"""A script is drawn from its number, and run through Lightning or the Trainer."""

import random
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

import hf_patches
import lightning_cp
from hf_patches import context_parallel
from lightning_cp import ContextParallelStrategy, token_mean
from tests.hf_patches.trainers.trainer_jobs import fsdp_on_cpu, only
from tests.lightning.jobs import build_trainer, elastic_environment
from tests.parity.trainer_step import processes
from tools.user_scripts.models import KINDS, build_batches, next_token_loss, twin
from tools.user_scripts.parts import PARTS, Part, Use

DOORS = ("lightning", "trainer")
STEPS = 3
_OURS = tuple(str(Path(package.__file__).parent) for package in (lightning_cp, hf_patches))


@dataclass(frozen=True)
class Script:
    """What the script of a number is made of; the same for ever."""

    number: int
    door: str
    parts: tuple[Part, ...]
    model: str
    kind: str
    accumulate: int
    clip: float
    is_sharded: bool

    @classmethod
    def draw(cls, number: int) -> "Script":
        rng = random.Random(f"{number}")
        door = DOORS[number % 2]
        known = [part for part in PARTS if door[0].upper() in part.doors]
        main = known[number // 2 % len(known)]
        served = [x for x in main.models if door == "lightning" or x != "own"]
        model = rng.choice(served or main.models)
        name = model.partition("+")[0]
        others = [p for p in known if p.is_harmless and p is not main and name in p.models]
        more = rng.sample(others, rng.choice((0, 0, 1, 2)))
        drawn = cls(
            number=number,
            door=door,
            parts=(main, *more),
            model=model,
            kind=rng.choice(KINDS[name]),
            accumulate=rng.choice((1, 1, 2)),
            clip=rng.choice((0.0, 0.5)),
            is_sharded=rng.random() < (0.7 if door == "lightning" else 0.2),
        )
        return replace(drawn, is_sharded=False) if main.is_replicated else drawn

    def __str__(self) -> str:
        parts = " + ".join(part.name for part in self.parts)
        sharded = ", FSDP2" if self.is_sharded else ""
        options = f"{self.kind}, accumulate {self.accumulate}, clip {self.clip:g}{sharded}"
        return f"{self.number:03d} {self.door}: {parts}; {self.model}, {options}"

    def attach(self, use: Use) -> None:
        for part in self.parts:
            part.attach(use)

    def batches(self) -> list[dict[str, Tensor]]:
        # Under Lightning, accumulated batches weigh by their labels with us, and equally without.
        copies = self.accumulate if self.door == "lightning" else 1
        number = STEPS * self.accumulate // copies
        batches = build_batches(self.model, self.kind, number, f"data {self.number}")
        return [other for batch in batches for other in (batch, twin(batch))[:copies]]


@dataclass
class Found:
    """What a script has printed, logged and trained on one rank, and the error that ended it."""

    values: dict[str, list[float]] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    weights: list[dict[str, Tensor]] = field(default_factory=list)  # after each step
    error: str = ""
    is_ours: bool = False
    place: str = ""

    def add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(float(value))

    def fail(self, error: Exception) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_raised = (frame.line or "").startswith("raise")
        self.is_ours = frame.filename.startswith(_OURS) and is_raised
        self.error = f"{type(error).__name__}: {error}"
        self.place = f"{'/'.join(frame.filename.split('/')[-3:])}:{frame.lineno}"


def run(number: int, size: int) -> Found:
    """Run a script on the ranks of the pool; with ``size`` 0 without us, on one process."""
    warnings.simplefilter("ignore")
    script, found = Script.draw(number), Found()
    uses: list[Use] = []
    try:
        torch.manual_seed(0)
        (_run_lightning if script.door == "lightning" else _run_trainer)(script, size, found, uses)
    except Exception as error:
        found.fail(error)
    finally:
        for handle in [handle for use in uses for handle in use.handles]:
            handle.remove()
    return found


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


# ---------------------------------------------------------------- Lightning


class Module(LightningModule):
    """What a user writes."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.kept: dict[str, list[float]] = {}
        self.use = use = Use("lightning", script.model, self)
        script.attach(use)
        self.model, self.teacher = use.model, use.teacher

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        use = self.use
        use.batch, use.call = batch, self.model
        if use.base == "embeddings":
            inputs = use.inputs()
            embedded = self.model.get_input_embeddings()(inputs.pop("input_ids")) * 1.1
            use.out = self.model(inputs_embeds=embedded, **inputs)
        elif use.base == "logits" or not hasattr(self.model, "config"):
            use.out = self.model(**use.inputs(), **use.arguments)
        else:
            use.out = self.model(**batch, **use.arguments)
        if use.base != "model" or not hasattr(self.model, "config"):
            loss = token_mean(use.logits, batch["labels"])
        else:
            loss = use.out.loss
        for term in use.terms:
            loss = term(loss)
        self.log("train_loss", loss)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for callback in self.use.on_gradients:
            callback()

    def on_train_epoch_end(self) -> None:
        for callback in self.use.on_epoch_end:
            callback()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(groups(self.use, self), lr=0.1)


def groups(use: Use, owner: torch.nn.Module) -> list[dict[str, Any]]:
    """Return a group of parameters for each learning rate."""
    by_rate: dict[float, list[Any]] = {}
    for name, p in owner.named_parameters():
        rate = next((rate for key, rate in use.rates.items() if key in name), 0.1)
        by_rate.setdefault(rate, []).append(p)
    return [{"params": params, "lr": rate} for rate, params in by_rate.items()]


class Watch(Callback):
    """Callbacks of the user, and what is recorded."""

    def __init__(self, found: Found) -> None:
        self.found = found

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        logs = {name: float(x) for name, x in trainer.callback_metrics.items()}
        for name, value in logs.items():
            self.found.add(name, value)
        for callback in module.use.on_logs:
            callback(logs)
        if trainer.global_step > len(self.found.weights):
            self.found.weights.append(snapshot(module.model))
            for callback in module.use.on_step:
                callback()


def _run_lightning(script: Script, size: int, found: Found, uses: list[Use]) -> None:
    with elastic_environment():
        module = Module(script)
        uses.append(module.use)
        found.start = snapshot(module.model)
        manual = not module.automatic_optimization
        options: dict[str, Any] = {"max_epochs": 1, "callbacks": [Watch(found)]}
        if not manual:
            options |= {"accumulate_grad_batches": script.accumulate}
            options |= {"gradient_clip_val": script.clip or None}
        if size:
            sharding = "full" if script.is_sharded else "none"
            strategy = ContextParallelStrategy(parameters=sharding)
            trainer = build_trainer(strategy=strategy, **options)
        else:
            trainer = build_trainer(**options)
            assert isinstance(trainer, LightningTrainer)
        trainer.fit(module, DataLoader(script.batches(), batch_size=None))
        for name, value in trainer.callback_metrics.items():
            found.add(f"final {name}", value)
        found.values |= {f"kept {name}": values for name, values in module.kept.items()}
        found.weights.append(snapshot(module.model))


# ---------------------------------------------------------------- the Trainer


class UserTrainer(Trainer):
    """What a user writes around a loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        use = self.use
        use.items, use.call = num_items_in_batch, model
        use.batch = dict(inputs)
        inputs = {**inputs, **use.arguments}
        if use.base == "model":
            loss, use.out = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
        else:
            labels = inputs.pop("labels")
            if use.base == "embeddings":
                embed = self.accelerator.unwrap_model(model).get_input_embeddings()
                inputs["inputs_embeds"] = embed(inputs.pop("input_ids")) * 1.1
            use.out = model(**inputs)
            loss = next_token_loss(use.logits, labels)
        if model.training:
            for term in use.terms:
                loss = term(loss)
        return (loss, use.out) if return_outputs else loss


class Tell(TrainerCallback):
    """Callbacks of the user, and the weights after each step."""

    def __init__(self, use: Use, found: Found) -> None:
        self.use, self.found = use, found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for callback in self.use.on_gradients:
            callback()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found.weights.append(snapshot(self.use.model))
        for callback in self.use.on_step:
            callback()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for callback in self.use.on_epoch_end:
            callback()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name, value in logs.items():
            if not name.endswith(("time", "per_second", "flos")):
                self.found.add(name, value)
        for callback in self.use.on_logs:
            callback(logs)


@contextmanager
def _set_up(is_sharded: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, processes(), fsdp_on_cpu(is_sharded):
        yield folder


def _run_trainer(script: Script, size: int, found: Found, uses: list[Use]) -> None:
    is_sharded = script.is_sharded and size > 1
    with _set_up(is_sharded) as folder:
        use = Use("trainer", script.model)
        uses.append(use)
        script.attach(use)
        found.start = snapshot(use.model)
        options = {"max_grad_norm": script.clip, "label_smoothing_factor": 0.0} | use.options
        functions = {k: options.pop(k) for k in [*options] if k.startswith("compute_")}
        if is_sharded:
            layer = type(use.layer(0)).__name__
            sharding = {"version": 2, "transformer_layer_cls_to_wrap": [layer]}
            options |= {"fsdp": True, "fsdp_config": sharding}
        changed = use.terms or use.arguments or use.base != "model" or use.methods
        cls = type("MyTrainer", (UserTrainer if changed else Trainer,), use.methods)
        batches = script.batches()
        trainer = cls(
            model=use.model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                per_device_eval_batch_size=1,
                gradient_accumulation_steps=script.accumulate,
                num_train_epochs=1,
                optim="sgd",
                learning_rate=0.1,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                bf16=False,
                remove_unused_columns=False,
                **options,
            ),
            train_dataset=batches,
            eval_dataset=batches[:2],
            data_collator=only,
            callbacks=[Tell(use, found)],
            **functions,
        )
        trainer.remove_callback(PrinterCallback)
        if use.rates:
            trainer.create_optimizer = lambda *_: _optimizer(trainer, use)
        trainer.use, trainer.kept, use.owner = use, {}, trainer
        if size:
            context_parallel(trainer, size=size)
        for call in use.before:
            call()
        trainer.train()
        found.values |= {f"kept {name}": values for name, values in trainer.kept.items()}
        found.weights.append(snapshot(trainer.accelerator.unwrap_model(trainer.model)))
        if dist.group.WORLD.size() > 1:
            dist.barrier()


def _optimizer(trainer: Any, use: Use) -> Any:
    if trainer.optimizer is None:
        trainer.optimizer = torch.optim.SGD(groups(use, trainer.model), lr=0.1)
    return trainer.optimizer
