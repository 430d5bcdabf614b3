"""What a run leaves in the modules and classes of other libraries.

`python -m tests.leftovers fit|train ends|fails FOLDER`. A process of its own: it looks at the
libraries before ours is imported.
"""

import gc
import json
import sys
from types import FunctionType, ModuleType
from typing import Any

import accelerate
import lightning.pytorch
import torch
import torch.distributed.fsdp
import torch.nn.attention.flex_attention
import torch.utils.checkpoint
import torchmetrics
import transformers
import transformers.masking_utils
import transformers.models.llama.modeling_llama
import transformers.trainer

LIBRARIES = ("torch", "lightning", "transformers", "accelerate", "trl", "torchmetrics")
assert all((accelerate, lightning, torchmetrics, transformers))


def name_of(value: Any) -> str:
    """Return a name for a function or a class, by which a replaced one is known."""
    return (
        f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    )


def snapshot() -> dict[str, tuple[int, Any]]:
    """Return functions and classes of the libraries by where they stand, and keys of tables."""
    found: dict[str, tuple[int, Any]] = {}
    for path, module in sorted(sys.modules.items()):
        if path.partition(".")[0] not in LIBRARIES or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            place = f"{path}.{name}"
            if callable(value):
                found[place] = (id(value), value)
            elif isinstance(value, dict | list | set) and not name.startswith("__"):
                found[f"len({place})"] = (len(value), None)
            if isinstance(value, type) and value.__module__ == path:
                for key, entry in list(vars(value).items()):
                    if isinstance(entry, FunctionType | property | classmethod | staticmethod):
                        found[f"{place}.{key}"] = (id(entry), entry)
    found["switch interval"] = (hash(sys.getswitchinterval()), None)
    found["collector"] = (hash((gc.isenabled(), gc.get_threshold())), None)
    return found


def build_model() -> Any:
    """Return a small Llama."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (index + 3)) % 32
        return {"input_ids": ids, "labels": ids}


class FailedError(Exception):
    """What a step raises."""


def fit(folder: str, *, fails: bool) -> None:
    """Train and validate through the strategy."""

    from lightning_cp import ContextParallelStrategy, Memory

    class Module(lightning.pytorch.LightningModule):
        def configure_model(self) -> None:
            self.model = build_model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails and batch_idx == 1:
                raise FailedError
            return self.model(**batch).loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch).loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ContextParallelStrategy(memory=Memory(activation_checkpointing=True, tile=True)),
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(Rows(), batch_size=1)
    trainer.fit(Module(), loader, loader)


def train(folder: str, *, fails: bool) -> None:
    """Train and evaluate by the Trainer of transformers."""
    from hf_patches import context_parallel

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if fails:
                raise FailedError

    args = transformers.TrainingArguments(
        folder, max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    trainer = transformers.Trainer(
        build_model(), args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Stop()]
    )
    handle = context_parallel(trainer, size=1)
    try:
        trainer.train()
        trainer.evaluate()
    finally:
        handle.undo()


RUNS = {"fit": fit, "train": train}


def main(kind: str, outcome: str, folder: str) -> None:
    """Write down, as JSON, what a run has changed."""
    before = snapshot()
    try:
        RUNS[kind](folder, fails=outcome == "fails")
    except FailedError:
        assert outcome == "fails"
    after = snapshot()
    changed = {
        place: (name_of(before[place][1]), name_of(after[place][1]))
        if after[place][1] is not None
        else (before[place][0], after[place][0])
        for place in before.keys() & after.keys()
        if before[place][0] != after[place][0]
    }
    sys.stdout.write("\nchanged " + json.dumps(changed) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
