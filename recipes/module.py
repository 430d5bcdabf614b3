# SPDX-License-Identifier: Apache-2.0
"""`CausalLMModule`: a language model of transformers, trained on sharded sequences.

Knows transformers, PEFT and Lightning. Batches come from `recipes.data`; `ContextParallelStrategy`
shards them, and keeps packed documents apart.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from hf_patches import enable
from hf_patches.model.forward import ChunkedLoss
from hf_patches.support import MULTIMODAL
from hf_patches.weights.auto import auto_class
from lightning_cp.config import check_choice
from recipes.data.passkey import RetrievalGrid, heat_map, retrieval_accuracy
from recipes.processors import TINY_IMAGE
from recipes.schedule import Schedule, check_total, check_warmup, decay_groups, lr_factor
from recipes.weights import (
    LoraOptions,
    WeightDtype,
    add_lora,
    cast,
    change_config,
    find_weights,
    freeze,
    load_config,
    load_pretrained,
    pop_quantization,
)


class CausalLMModule(LightningModule):
    """A causal language model of transformers, with its optimizer and schedule.

    The model is built on the meta device and loaded shard by shard: no rank holds all of it.

    Args:
        model: a folder with a config.json, or a name on the hub. Two models need no download:
            None is a small Llama for the byte tokenizer, ``tiny-image`` a small LLaVA.
        config: changes of the model's config, such as ``{"rope_parameters": {"factor": 16.0}}``.
            A dict in it changes the entries that it names.
        random_weights: start from random weights, although ``model`` may have others.
        media: build the model with its towers for images, video or audio. None: if the data has
            media, or if there is no such model without towers.
        lora: train adapters instead of the model; of a model with media, adapters of its text
            decoder.
        freeze: name patterns of parameters that are not trained, such as ``*vision_tower*``.
        lr: the highest learning rate.
        weight_decay: of matrices; norms and biases have none.
        betas: of AdamW.
        warmup_steps: number of steps over which the learning rate rises; below 1 a fraction of all
            steps.
        schedule: how the learning rate falls after the warm-up.
        min_lr_fraction: the last learning rate, as a fraction of ``lr``.
        gradient_checkpointing: keep one activation per layer, and recompute the others.
        chunked_loss: ``auto`` computes the loss of long sequences in chunks in training;
            ``always`` in validation too, which then has no logits to measure retrieval with.
        dtype: of the weights. ``auto``: the trainer's precision; for ``bf16-mixed`` float32, and
            bfloat16 for weights that are not trained.

    Example:
        >>> module = CausalLMModule(lora=LoraOptions(rank=8), warmup_steps=10)
    """

    def __init__(
        self,
        model: str | None = None,
        config: dict[str, Any] | None = None,
        random_weights: bool = False,
        media: bool | None = None,
        lora: LoraOptions | None = None,
        freeze: list[str] | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: float | None = None,
        schedule: Schedule = "cosine",
        min_lr_fraction: float = 0.1,
        gradient_checkpointing: bool = True,
        chunked_loss: ChunkedLoss = "auto",
        dtype: WeightDtype = "auto",
    ) -> None:
        super().__init__()
        check_choice("schedule", schedule, get_args(Schedule))
        check_choice("dtype", dtype, get_args(WeightDtype))
        check_choice("chunked_loss", chunked_loss, get_args(ChunkedLoss))
        check_warmup(warmup_steps)
        self.save_hyperparameters(ignore=["lora"])
        # A dict, not our class: checkpoints can then be read with weights_only=True.
        self._lora = LoraOptions(**lora) if isinstance(lora, Mapping) else lora
        self.hparams["lora"] = None if self._lora is None else asdict(self._lora)
        self.model: Any = None
        self.grid: RetrievalGrid | None = None
        self._grid_axes: tuple[list[int], list[float]] = ([], [])
        self._config = load_config(model)
        self._dequantize = pop_quantization(self._config, str(model))
        change_config(self._config, config or {})
        self._loads = model not in (None, TINY_IMAGE) and not random_weights
        # Only adapters are saved if the other weights can be loaded from the base model.
        self._saves_adapters = self._lora is not None and self._loads
        self.strict_loading = not self._saves_adapters
        self._total_steps: float = math.inf
        self._base: Path | None = None

    # ---------------------------------------------------------------- the model

    def prepare_data(self) -> None:
        """Download the weights, in one process per node."""
        if self._loads:
            find_weights(str(self.hparams["model"]), fetch=True)

    def setup(self, stage: str) -> None:
        """Check the strategy, the tokenizer and the sequence length."""
        strategy = self.trainer.strategy
        if not hasattr(strategy, "context_parallel"):
            raise ValueError(
                f"This Trainer has a {type(strategy).__name__}, but recipes need "
                "ContextParallelStrategy, also on one device: it keeps packed documents apart. "
                "Leave trainer.strategy out, or set it to lightning_cp.ContextParallelStrategy."
            )
        data = getattr(self.trainer, "datamodule", None)
        text = self._config.get_text_config()
        tokenizer, seq_len = getattr(data, "tokenizer", None), getattr(data, "seq_len", 0)
        if tokenizer is not None and len(tokenizer) > text.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, but the model {text.vocab_size}. Set "
                "data.init_args.tokenizer to the name or folder of model.model."
            )
        limit = getattr(text, "max_position_embeddings", None) or seq_len
        if seq_len > limit:
            raise ValueError(
                f"Sequences have {seq_len} tokens, but the model's max_position_embeddings is "
                f"{limit}. Set model.config.max_position_embeddings to {seq_len}, and model.config."
                "rope_parameters to scale positions (configs/qwen3_8b_yarn_256k.yaml)."
            )
        processor = getattr(data, "processor", None)
        if self.hparams["media"] is None:
            self.hparams["media"] = processor is not None
        if processor is not None:
            self.check_processor(processor)
        if data is not None and hasattr(data, "build_metric"):
            self.grid, self._grid_axes = data.build_metric(), (data.lengths, data.depths)

    def check_processor(self, processor: Any) -> None:
        """Raise if the model does not take what a processor returns."""
        kind = self._config.model_type
        known = MULTIMODAL.get(kind)
        if known is None:
            raise ValueError(
                f"The data has media, but a model of type '{kind}' takes text only. Set "
                "model.model to a model with images or video, or use ChatData."
            )
        if known.media is not None and known.media.packing:
            raise ValueError(
                f"A model of type '{kind}' cannot take packed conversations: {known.media.packing}."
                " Choose another model."
            )
        for name in ("image", "video"):
            # Also those that stand around them: some processors call one of these the token.
            ours = getattr(processor, f"{name}_token_ids", [None])
            names = (f"{name}_token_id", f"{name}_token_index")
            ids = [getattr(self._config, key) for key in names if hasattr(self._config, key)]
            if ours != [None] and ids and not set(ids) & set(ours):
                raise ValueError(
                    f"The processor marks places of {name}s by token {ours[0]}, but a model of "
                    f"type '{kind}' by {ids[0]}. Set data.init_args.processor to the name or "
                    "folder of model.model."
                )

    def configure_model(self) -> None:
        """Build the model on the meta device; the strategy materializes and shards it."""
        if self.model is not None:
            return
        has_trainer = self._trainer is not None  # load_from_checkpoint() has none
        auto = auto_class(self._config, media=bool(self.hparams["media"]))
        with torch.device("meta" if has_trainer else "cpu"):
            # A copy: settings for training do not belong into the exported config.
            model = auto.from_config(copy.deepcopy(self._config))
        model.config.use_cache = False
        if self._lora is not None:
            model = add_lora(model, self._lora)
        freeze(model, self.hparams["freeze"] or ())
        cast(model, self.hparams["dtype"], self.trainer.precision if has_trainer else "32-true")
        if self.hparams["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        enable(model, chunked_loss=self.hparams["chunked_loss"])
        self.model = model.train()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module as its innermost model does. Called by the strategy.

        The outermost model cannot initialize parts of others: the vision tower of a Gemma 3.
        """
        models = [m for m in self.model.modules() if isinstance(m, PreTrainedModel)]
        owners = [m for m in models if any(part is module for part in m.modules())]
        owners[-1]._init_weights(module)

    def _load(self) -> None:
        """Load pretrained weights, unless a checkpoint has restored all of them."""
        restored = self.trainer.ckpt_path is not None and not self._saves_adapters
        if self._loads and not restored:
            folder = find_weights(str(self.hparams["model"]), fetch=False)
            load_pretrained(self.model, folder, dequantize=self._dequantize)
        self._loads = False

    # All of these hooks run after a checkpoint was restored; the first of them loads weights.
    def on_train_start(self) -> None:
        """Load weights; set the number of steps of the schedule, which is only known now."""
        self._load()
        self._total_steps = self.trainer.estimated_stepping_batches
        check_total(self.hparams["schedule"], self._total_steps)
        for scheduled in self.trainer.lr_scheduler_configs:
            scheduler: Any = scheduled.scheduler
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = lr * self._factor(scheduler.last_epoch)

    def on_validation_start(self) -> None:
        """Load weights."""
        self._load()

    on_test_start = on_predict_start = on_validation_start

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the tokens of all ranks."""
        loss: Tensor = self._run(batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss and, for pass-key data, count the keys that were found."""
        self._evaluate(batch, "val_loss")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss and, for pass-key data, count the keys that were found."""
        self._evaluate(batch, "test_loss")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the tokens, and the most likely next token of each."""
        ids = batch["input_ids"]
        inputs = {key: x for key, x in batch.items() if key != "labels"}
        return {"input_ids": ids, "next_ids": self._run(inputs).logits.argmax(-1)}

    def _run(self, batch: Mapping[str, Tensor]) -> Any:
        return self.model(**{key: x for key, x in batch.items() if key != "cell"})

    def _evaluate(self, batch: dict[str, Tensor], name: str) -> None:
        output = self._run(batch)
        self.log(name, output.loss, prog_bar=True)
        if self.grid is None or "cell" not in batch:
            return
        if output.logits is None:
            raise ValueError(
                "Retrieval is measured with logits, but model.chunked_loss='always' returns none. "
                "Use model.chunked_loss=auto."
            )
        strategy: Any = self.trainer.strategy
        answered = retrieval_accuracy(output.logits, batch, cp=strategy.context_parallel)
        self.grid.update(answered, batch["cell"])

    def on_validation_epoch_end(self) -> None:
        """Log the fraction of keys that were found."""
        self._log_grid("val_retrieval")

    def on_test_epoch_end(self) -> None:
        """Log the fraction of keys that were found."""
        self._log_grid("test_retrieval")

    def _log_grid(self, name: str) -> None:
        if self.grid is None:
            return
        mean, accuracy = self.grid.mean(), self.grid.compute()
        self.grid.reset()
        if self.trainer.sanity_checking:
            return
        self.log(name, mean, prog_bar=True, sync_dist=True)
        if self.trainer.is_global_zero:
            print(f"\n{heat_map(accuracy.cpu(), *self._grid_axes)}")

    # ---------------------------------------------------------------- optimization

    def configure_optimizers(self) -> Any:
        """Return AdamW with two groups, and a schedule that advances with each step."""
        options = self.hparams
        optimizer = torch.optim.AdamW(
            decay_groups(self.model, options["weight_decay"]),
            lr=options["lr"],
            betas=tuple(options["betas"]),
        )
        # The number of steps is set later: asking for it now would make Lightning build the
        # loaders before a checkpoint restores their state.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._factor), "interval": "step"},
        }

    def _factor(self, step: int) -> float:
        options = self.hparams
        return lr_factor(
            step,
            self._total_steps,
            warmup_steps=options["warmup_steps"],
            schedule=options["schedule"],
            min_lr_fraction=options["min_lr_fraction"],
        )

    # ---------------------------------------------------------------- files

    def on_fit_start(self) -> None:
        """Write the config, and the tokenizer or the processor, which `hf_patches export` reads."""
        folder = Path(self.trainer.default_root_dir).absolute() / "base"
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._config.save_pretrained(folder)
            data = getattr(self.trainer, "datamodule", None)
            # A processor writes its tokenizer, too.
            processor = getattr(data, "processor", None) or getattr(data, "tokenizer", None)
            if processor is not None:
                processor.save_pretrained(folder)
        self._base = folder

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the folder of the config, for `hf_patches export`; with LoRA keep adapters only."""
        if self._saves_adapters:
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            state = {name: x for name, x in checkpoint["state_dict"].items() if name in trained}
            checkpoint["state_dict"] = state
        elif self._base is not None:
            source = {"model": str(self._base), "config": None, "random_weights": True}
            checkpoint["hyper_parameters"] = {**checkpoint["hyper_parameters"], **source}

    def on_train_end(self) -> None:
        """Write the adapters as PEFT does, for `PeftModel.from_pretrained`."""
        if self._lora is None or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        named = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).cpu() for n, p in named}
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir) / "adapter"
            self.model.save_pretrained(folder, state_dict=full, save_embedding_layers=False)
            print(f"adapters written to {folder}")
