# SPDX-License-Identifier: Apache-2.0
"""`CausalLMModule`: a causal language model of transformers, trained on rows that ranks share.

Knows transformers, PEFT and Lightning. Rows come from `recipes.data`; what cuts them is
`ContextParallelStrategy`, without which packed documents would not be kept apart.
"""

import copy
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.quantization_config import Mxfp4Config

from hf_patches import enable
from hf_patches.forward import ChunkedLoss
from lightning_cp.checkpoint import load_weights
from lightning_cp.comm.collective_errors import together
from lightning_cp.options import check_choice
from recipes.data.passkey import RetrievalGrid, heat_map, retrieval_accuracy
from recipes.tokens import byte_tokenizer, first_line, reaches_hub, unreachable

Schedule = Literal["cosine", "linear", "constant"]
WeightDtype = Literal["auto", "float32", "bfloat16"]

_WANTED: Final = ["*.safetensors", "*.json"]
_UNWANTED: Final = ["original/*", "metal/*", "consolidated*"]
"""What is fetched of a model on the hub, and what may be there a second time."""


@dataclass(frozen=True)
class LoraOptions:
    """Train small matrices beside the model's own, which stay as they are (LoRA, by PEFT).

    Args:
        rank: of the matrices.
        alpha: how strongly they count: alpha / rank.
        dropout: on what goes into them.
        target_modules: names of the linear layers that get some; ``all-linear`` is all but the
            head.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class CausalLMModule(LightningModule):
    """A causal language model of transformers, with its optimizer and schedule.

    The model is built on the meta device and filled shard by shard: no rank holds it whole.

    Args:
        model: a folder with a config.json, or a name on the hub. None: a small Llama for the byte
            tokenizer, which needs no download.
        config: changes of the model's config, such as ``{"rope_parameters": {"factor": 16.0}}``.
            A dict in it changes the entries that it names.
        random_weights: begin with random weights though ``model`` may have others.
        lora: train adapters instead of the model.
        freeze: name patterns of parameters that stay as they are, such as ``*vision_tower*``.
        lr: the highest learning rate.
        weight_decay: for matrices; norms and biases have none.
        decay_embeddings: whether embeddings decay too.
        betas: of AdamW.
        warmup_steps: over which the learning rate rises.
        warmup_fraction: the same as a share of all steps; give one of the two.
        schedule: how the learning rate falls from there to the end of training.
        min_lr_fraction: the share of ``lr`` at which it ends.
        gradient_checkpointing: keep one activation per layer, and compute the others again.
        chunked_loss: ``auto`` never holds the logits of long rows in training; ``always`` does so
            in validation too, which then has no logits to measure retrieval with.
        dtype: how weights are held. ``auto``: in the trainer's precision, where for ``bf16-mixed``
            that is float32, and bfloat16 for those that are not trained.

    Example:
        >>> module = CausalLMModule(lora=LoraOptions(rank=8), warmup_steps=10)
    """

    def __init__(
        self,
        model: str | None = None,
        config: dict[str, Any] | None = None,
        random_weights: bool = False,
        lora: LoraOptions | None = None,
        freeze: list[str] | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.1,
        decay_embeddings: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int | None = None,
        warmup_fraction: float | None = None,
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
        _check_warmup(warmup_steps, warmup_fraction)
        self.save_hyperparameters(ignore=["lora"])
        # A dict, not our class: checkpoints are read without running code that they name.
        self._lora = LoraOptions(**lora) if isinstance(lora, Mapping) else lora
        self.hparams["lora"] = None if self._lora is None else asdict(self._lora)
        self.model: Any = None
        self.grid: RetrievalGrid | None = None
        self._places: tuple[list[int], list[float]] = ([], [])
        self._config = read_config(model)
        self._dequantize = _take_quantization(self._config, str(model))
        change_config(self._config, config or {})
        self._loads = model is not None and not random_weights
        # Adapters alone are saved where the rest can be had from the model that they are for.
        self._saves_adapters = self._lora is not None and self._loads
        self.strict_loading = not self._saves_adapters
        self._total_steps: float = math.inf
        self._base: Path | None = None

    # ---------------------------------------------------------------- the model

    def prepare_data(self) -> None:
        """Fetch the weights, in one process per node."""
        if self._loads:
            self._find_weights(fetch=True)

    def setup(self, stage: str) -> None:
        """Refuse what would train, but wrongly."""
        strategy = self.trainer.strategy
        if not hasattr(strategy, "context_parallel"):
            raise ValueError(
                f"Recipes train under ContextParallelStrategy, also on one device, for packed "
                f"documents are kept apart by it; this Trainer has a {type(strategy).__name__}. "
                "Leave trainer.strategy out, or set it to lightning_cp.ContextParallelStrategy."
            )
        data = getattr(self.trainer, "datamodule", None)
        text = self._config.get_text_config()
        tokenizer, seq_len = getattr(data, "tokenizer", None), getattr(data, "seq_len", 0)
        if tokenizer is not None and len(tokenizer) > text.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, but the model {text.vocab_size}. Set "
                "data.init_args.tokenizer to the model's own: the name or folder of model.model."
            )
        limit = getattr(text, "max_position_embeddings", None) or seq_len
        if seq_len > limit:
            raise ValueError(
                f"Rows have {seq_len} tokens, but the model was made for {limit}. Set "
                f"model.config.max_position_embeddings to {seq_len}, and model.config."
                "rope_parameters to how positions are scaled (configs/qwen3_8b_yarn_256k.yaml)."
            )
        if data is not None and hasattr(data, "build_metric"):
            self.grid, self._places = data.build_metric(), (data.lengths, data.depths)

    def configure_model(self) -> None:
        """Build the model on the meta device; the strategy fills and shards it."""
        if self.model is not None:
            return
        alone = self._trainer is None  # load_from_checkpoint() fills the model at once
        with torch.device("cpu" if alone else "meta"):
            # With a copy: what is set for training does not belong into the exported config.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(self._config))
        model.config.use_cache = False
        if self._lora is not None:
            model = _add_lora(model, self._lora)
        _freeze(model, self.hparams["freeze"] or ())
        _cast(model, self.hparams["dtype"], "32-true" if alone else self.trainer.precision)
        if self.hparams["gradient_checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        enable(model, chunked_loss=self.hparams["chunked_loss"])
        self.model = model.train()

    def _init_weights(self, module: nn.Module) -> None:
        """Draw initial values as the innermost model around a module does: the strategy asks.

        The outermost does not know the parts of others: the vision tower of a Gemma 3.
        """
        around = [m for m in self.model.modules() if isinstance(m, PreTrainedModel)]
        inner = [m for m in around if any(part is module for part in m.modules())]
        inner[-1]._init_weights(module)

    def _find_weights(self, *, fetch: bool = False) -> Path:
        """Return the folder of the weights; those of the hub were fetched by `prepare_data`."""
        name = str(self.hparams["model"])
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        try:
            fetched = snapshot_download(
                name,
                allow_patterns=_WANTED,
                ignore_patterns=_UNWANTED,
                local_files_only=not fetch or not reaches_hub(),
            )
        except OSError as error:
            raise ValueError(
                f"model={name!r}: the weights could not be fetched ({first_line(error)}). "
                f"{unreachable()}Check the connection and your access, or give a folder."
            ) from error
        return Path(fetched)

    def _load(self) -> None:
        """Load pretrained weights, unless a checkpoint has brought all of them."""
        restored = self.trainer.ckpt_path is not None and not self._saves_adapters
        if self._loads and not restored:
            load_pretrained(self.model, self._find_weights(), dequantize=self._dequantize)
        self._loads = False

    # All of these are called after a checkpoint was restored; the first of them loads.
    def on_train_start(self) -> None:
        """Load weights; tell the schedule how long training is, which is known only now."""
        self._load()
        self._total_steps = self.trainer.estimated_stepping_batches
        _check_total(self.hparams["schedule"], self._total_steps)
        for scheduled in self.trainer.lr_scheduler_configs:
            scheduler: Any = scheduled.scheduler
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = lr * self._factor(scheduler.last_epoch)

    def on_validation_start(self) -> None:
        """Load weights."""
        self._load()

    def on_test_start(self) -> None:
        """Load weights."""
        self._load()

    def on_predict_start(self) -> None:
        """Load weights."""
        self._load()

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the tokens of all ranks."""
        loss: Tensor = self._run(batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss, and count which keys were found where rows hide some."""
        self._evaluate(batch, "val_loss")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Do the same under another name."""
        self._evaluate(batch, "test_loss")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the tokens, and the likeliest token to follow each of them."""
        ids = batch["input_ids"]
        unlabelled = {key: x for key, x in batch.items() if key != "labels"}
        return {"input_ids": ids, "next_ids": self._run(unlabelled).logits.argmax(-1)}

    def _run(self, batch: Mapping[str, Tensor]) -> Any:
        return self.model(**{key: x for key, x in batch.items() if key != "cell"})

    def _evaluate(self, batch: dict[str, Tensor], name: str) -> None:
        output = self._run(batch)
        self.log(name, output.loss, prog_bar=True)
        if self.grid is None or "cell" not in batch:
            return
        if output.logits is None:
            raise ValueError(
                "Retrieval is measured by logits, but model.chunked_loss='always' leaves none. Use "
                "model.chunked_loss=auto."
            )
        self.grid.update(retrieval_accuracy(output.logits, batch), batch["cell"])

    def on_validation_epoch_end(self) -> None:
        """Log which share of the keys was found."""
        self._log_grid("val_retrieval")

    def on_test_epoch_end(self) -> None:
        """Log which share of the keys was found."""
        self._log_grid("test_retrieval")

    def _log_grid(self, name: str) -> None:
        if self.grid is None:
            return
        share, found = self.grid.mean(), self.grid.compute()
        self.grid.reset()
        if self.trainer.sanity_checking:
            return
        self.log(name, share, prog_bar=True, sync_dist=True)
        if self.trainer.is_global_zero:
            picture = Path(self.trainer.default_root_dir) / f"{name}.png"
            print(f"\n{heat_map(found.cpu(), *self._places, picture)}")

    # ---------------------------------------------------------------- optimization

    def configure_optimizers(self) -> Any:
        """Return AdamW with two groups, and a schedule that moves with each step."""
        options = self.hparams
        optimizer = torch.optim.AdamW(
            decay_groups(
                self.model, options["weight_decay"], embeddings=options["decay_embeddings"]
            ),
            lr=options["lr"],
            betas=tuple(options["betas"]),
        )
        # How many steps there are is asked for later: asking now would have Lightning make the
        # loaders before a checkpoint says where they are.
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
            warmup_fraction=options["warmup_fraction"],
            schedule=options["schedule"],
            min_lr_fraction=options["min_lr_fraction"],
        )

    # ---------------------------------------------------------------- what is kept

    def on_fit_start(self) -> None:
        """Write the config and the tokenizer that the checkpoints belong to."""
        folder = Path(self.trainer.default_root_dir).absolute() / "base"
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._config.save_pretrained(folder)
            tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        self._base = folder

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Name the folder with the config, for `hf_patches export`; of LoRA keep adapters only."""
        if self._saves_adapters:
            trained = {name for name, p in self.named_parameters() if p.requires_grad}
            kept = {name: x for name, x in checkpoint["state_dict"].items() if name in trained}
            checkpoint["state_dict"] = kept
        elif self._base is not None:
            told = {"model": str(self._base), "config": None, "random_weights": True}
            checkpoint["hyper_parameters"] = {**checkpoint["hyper_parameters"], **told}

    def on_train_end(self) -> None:
        """Write the adapters as PEFT does, for `PeftModel.from_pretrained`."""
        if self._lora is None or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        named = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).cpu() for n, p in named}
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir) / "adapter"
            self.model.save_pretrained(folder, state_dict=whole, save_embedding_layers=False)
            print(f"adapters written to {folder}")


# ---------------------------------------------------------------- which model


def tiny_config() -> PreTrainedConfig:
    """Return the config of a small Llama for the byte tokenizer."""
    return LlamaConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        architectures=["LlamaForCausalLM"],
    )


def read_config(model: str | None) -> PreTrainedConfig:
    """Read the config of a model: a folder, a name on the hub, or None for the small one."""
    if model is None:
        return tiny_config()
    folder = Path(model).expanduser()
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if (folder.exists() or looks_local) and not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"model={model!r} {what}. Give a folder that save_pretrained() wrote, or a name on the "
            "hub."
        )
    try:
        config = AutoConfig.from_pretrained(
            str(folder) if folder.exists() else model,
            local_files_only=folder.exists() or not reaches_hub(),
        )
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(
            f"model={model!r} could not be loaded, neither as a folder nor from the hub "
            f"({first_line(error)}). {unreachable()}Check the name, the connection and your access."
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"model={model!r} is a '{config.model_type}', of which transformers has no causal "
            "language model. Choose another."
        )
    return config  # type: ignore[no-any-return]


def change_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> None:
    """Set values of a config, or of the part for text where it has several.

    Example:
        >>> config = tiny_config()
        >>> change_config(config, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
        >>> config.rope_parameters["rope_theta"]
        500000.0
    """
    for name, value in changes.items():
        home = next((c for c in (config, config.get_text_config()) if hasattr(c, name)), None)
        if home is None:
            known = [n for n in config.get_text_config().to_dict() if not n.startswith("_")]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean `{near[0]}`?" if near else f"It has {', '.join(sorted(known))}."
            raise ValueError(
                f"model.config.{name}: the config of a '{config.model_type}' has no such value. "
                f"{hint}"
            )
        former = getattr(home, name)
        merged = isinstance(value, Mapping) and isinstance(former, Mapping)
        setattr(home, name, {**former, **value} if merged else value)


def _take_quantization(config: PreTrainedConfig, model: str) -> bool:
    """Say whether weights are to be unpacked when they are loaded; the model has plain ones."""
    told = getattr(config, "quantization_config", None)
    if told is None:
        return False
    named = told if isinstance(told, Mapping) else told.to_dict()
    method = str(named.get("quant_method"))
    if method != "mxfp4":
        raise ValueError(
            f"model={model!r} has weights that are quantised ({method}); what is trained here has "
            "plain ones. Give the model that it was made from."
        )
    del config.quantization_config
    return True


def _add_lora(model: PreTrainedModel, options: LoraOptions) -> Any:
    """Put adapters into a model on the meta device; they themselves are drawn at once."""
    try:
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        raise ImportError("model.lora needs PEFT: pip install peft.") from error
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=options.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(f"model.lora: {first_line(error)}.") from error
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for part in (layer.lora_A, layer.lora_B):
                part.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return adapted


def _freeze(model: nn.Module, patterns: list[str] | tuple[()]) -> None:
    for pattern in patterns:
        found = [p for name, p in model.named_parameters() if fnmatch(name, pattern)]
        if not found:
            some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise ValueError(
                f"model.freeze: no parameter is named like {pattern!r}. Names are {some}, ..."
            )
        for parameter in found:
            parameter.requires_grad_(False)


def _cast(model: nn.Module, dtype: WeightDtype, precision: str) -> None:
    """Give weights the precision that they are held in; buffers stay as they are."""
    for parameter in model.parameters():
        if dtype != "auto":
            parameter.data = parameter.data.to(getattr(torch, dtype))
        elif precision == "bf16-mixed" and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


# ---------------------------------------------------------------- pretrained weights


def load_pretrained(model: Any, folder: Path, *, dequantize: bool = False) -> None:
    """Load the weights of a Hugging Face folder into a model that ranks hold in parts. Collective.

    Where the folder has the names of the model, each rank reads its parts. Where transformers
    converts names or shapes (experts, the text part of image models, packed weights), rank 0 loads
    the model into its main memory and sends each rank its parts.

    Args:
        model: plain or with PEFT around it.
        folder: what ``save_pretrained`` wrote.
        dequantize: the weights are packed as MXFP4.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    plain = _plain_names(base)
    if not dequantize and _has_names(folder, base):
        load_weights(plain, folder, strict=False)
        rank_zero_info(f"weights of {folder}: each rank has read its part")
        return

    def load() -> dict[str, Any]:
        if dist.get_rank():
            return {}
        # By the folder's own config: it says how the weights are packed.
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if dequantize else {}
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True, **options
        )
        whole, found = loaded
        if found["missing_keys"]:
            raise ValueError(
                f"{folder} lacks weights of a {type(whole).__name__}: "
                f"{', '.join(sorted(found['missing_keys'])[:3])}, ... Give a folder that is whole."
            )
        return dict(whole.state_dict())

    state = together(load, f"{folder} was not loaded.", (OSError, ValueError, ImportError))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(plain, state, options=options)
    rank_zero_info(f"weights of {folder}: rank 0 has read them, and sent each rank its part")


def _plain_names(base: nn.Module) -> nn.Module:
    """Return a module that holds a model's weights under the names that they have without PEFT."""
    plain = nn.Module()
    for name, value in base.state_dict().items():
        if ".lora_" in name:
            continue
        *path, leaf = name.replace(".base_layer.", ".").split(".")
        home = plain
        for part in path:
            if part not in home._modules:
                home.add_module(part, nn.Module())
            home = home.get_submodule(part)
        home.register_buffer(leaf, value)
    return plain


def _has_names(folder: Path, base: PreTrainedModel) -> bool:
    """Say whether a folder holds all weights of a model as the model itself has them."""
    if get_model_conversion_mapping(base, add_legacy=False):
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        there = set(json.loads(index.read_text())["weight_map"])
    else:
        file = folder / "model.safetensors"
        if not file.is_file():
            return False
        with safe_open(file, framework="pt") as opened:
            there = set(opened.keys())
    tied: dict[int, set[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        if ".lora_" not in name:
            tied.setdefault(id(parameter), set()).add(name.replace(".base_layer.", "."))
    return all(names & there for names in tied.values())


# ---------------------------------------------------------------- groups and schedule


def decay_groups(
    model: nn.Module, weight_decay: float, *, embeddings: bool = True
) -> list[dict[str, Any]]:
    """Return what is trained as two groups: matrices, which decay, and the rest.

    Args:
        model: parameters that need no gradient are left out.
        weight_decay: of the first group.
        embeddings: whether tables of tokens are in it.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.ndim > 1 and not name.endswith("bias")
            groups[decays and (embeddings or id(parameter) not in tables)].append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0}
        for decays, params in groups.items()
        if params
    ]


def lr_factor(
    step: int,
    total_steps: float,
    *,
    warmup_steps: int | None = None,
    warmup_fraction: float | None = None,
    schedule: Schedule = "cosine",
    min_lr_fraction: float = 0.0,
) -> float:
    """Return the share of the highest learning rate at a step.

    It rises over the warm-up, is highest right after it, and falls to ``min_lr_fraction`` at the
    end. While ``total_steps`` is not known (infinite), it does not fall.

    Example:
        >>> [round(lr_factor(s, 5, warmup_steps=2, schedule="linear"), 3) for s in range(6)]
        [0.333, 0.667, 1.0, 0.667, 0.333, 0.0]
    """
    known = math.isfinite(total_steps)
    if warmup_fraction is not None:
        warmup_steps = math.ceil(warmup_fraction * total_steps) if known else 0
    warmup = warmup_steps or 0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant" or not known:
        return 1.0
    done = min(1.0, (step - warmup) / max(1.0, total_steps - warmup))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_lr_fraction + (1 - min_lr_fraction) * left


def _check_warmup(steps: int | None, fraction: float | None) -> None:
    if steps is not None and fraction is not None:
        raise ValueError(
            f"model.warmup_steps={steps} and model.warmup_fraction={fraction} say the same thing "
            "twice. Give one of them."
        )
    if (steps or 0) < 0 or not 0 <= (fraction or 0.0) < 1:
        raise ValueError(
            f"model.warmup_steps={steps}, model.warmup_fraction={fraction}: give a number of steps "
            "from 0, or a share from 0 to below 1."
        )


def _check_total(schedule: Schedule, total: float) -> None:
    if schedule != "constant" and not math.isfinite(total):
        raise ValueError(
            f"model.schedule={schedule} must know how long training is, but a stream has no "
            "length. Set trainer.max_steps, or model.schedule=constant."
        )
