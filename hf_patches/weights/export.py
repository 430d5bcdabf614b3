# SPDX-License-Identifier: Apache-2.0
"""`export(checkpoint, out)`: turns a Lightning checkpoint into a Hugging Face folder.

Reads only the weights, with `lightning_cp.checkpoint`, and infers from their names and shapes which
attribute of the LightningModule held the model. Needs no GPU and no process group; the weights are
read layer by layer (`weight_files`).
"""

import os
import pickle
import shutil
import textwrap
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_patches.private import is_built_by
from hf_patches.weights.saving import adapter_state
from hf_patches.weights.weight_files import write_weights
from lightning_cp.adapters import NOTES
from lightning_cp.checkpoint import find_folder, is_checkpoint_folder
from lightning_cp.checkpoint.folder import read_metadata, remove
from lightning_cp.checkpoint.source import (
    OpenedCheckpoint,
    blank,
    load_pickle,
    open_folder,
    open_values,
)
from lightning_cp.checkpoint.state import plain_name

# Files of a model besides its weights and config; copied unchanged.
_OTHER_FILES: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

_AUTO: Final = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForImageTextToText,
    transformers.AutoModelForMultimodalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForTokenClassification,
    transformers.AutoModelForQuestionAnswering,
    transformers.AutoModel,
)

T = TypeVar("T")


def export(
    checkpoint: Path,
    out: Path,
    *,
    base: Path | None = None,
    prefix: str | None = None,
    max_shard_size: str = "5GB",
    adapter_config: Path | None = None,
) -> Any:
    """Write the Hugging Face model of a Lightning checkpoint as ``save_pretrained`` would.

    For a checkpoint with PEFT adapters only these are written, for ``PeftModel.from_pretrained``.

    Args:
        checkpoint: a folder of shards or a single file. It holds pickles: trust it.
        out: the folder to write; must not exist, or be empty.
        base: a folder with the model's config.json; files of a tokenizer and of a processor in it
            are copied. By default the folder that the checkpoint's hyperparameters name.
        prefix: prefix of the model's parameter names in the checkpoint, such as ``model.``;
            inferred from names and shapes when None.
        max_shard_size: weights are split into files of at most this size.
        adapter_config: an adapter_config.json, or a folder with one, if the checkpoint does not
            hold the config of its adapters; checkpoints of the strategy do.

    Returns:
        The model that was written. Its weights are on the meta device.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists. Remove it, or give another name.")
    source = _open(checkpoint)
    saved = {
        plain_name(str(keys[1])): keys
        for keys, form in source.forms.items()
        if keys[0] == "state_dict" and len(keys) == 2 and form is not None
    }
    base = base or _named_base(source.rest or {}, checkpoint)
    config = read_config(base)
    configs: dict[str, Any] = {}
    if adapter := next((name for name in saved if _is_of_adapter(name)), None):
        configs = _adapter_configs(source.rest or {}, adapter_config, adapter, checkpoint)
        for each in configs.values():
            each.base_model_name_or_path = each.base_model_name_or_path or str(base)
    elif adapter_config is not None:
        raise ValueError(f"{checkpoint} holds no PEFT adapter. Leave out --adapter-config.")
    forms = {name: source.forms[keys] for name, keys in saved.items()}
    blanks = {name: x for name, form in forms.items() if (x := blank(form, "meta")) is not None}
    model, prefix = _find(config, configs, blanks, prefix, checkpoint)
    _assign(model, _resolve(model, _under(prefix, blanks)))
    keys_of = _resolve(model, _under(prefix, saved))

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        tensors = source.read({keys_of[n]: blank(source.forms[keys_of[n]]) for n in names})
        return {name: tensors[keys_of[name]] for name in names}

    def save(folder: Path) -> None:
        if configs:
            weights = read(_of_adapters(model))
            model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        else:
            model.save_pretrained(folder, state_dict={})  # configs alone
            write_weights(model, read, folder, max_shard_size)

    _write(save, base, out)
    return model


def read_config(path: Path) -> PreTrainedConfig:
    """Read the config of a local model from a folder or a config.json."""
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path}. Give a folder with a config.json; models are read from disk, not "
            "from the hub."
        )
    if not file.is_file():
        more = " It holds a PEFT adapter: give the folder of its base model."
        adapter = more if (path / "adapter_config.json").is_file() else ""
        raise FileNotFoundError(f"There is no config.json in {path}.{adapter}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file)
    except StrictDataclassError as error:
        raise ValueError(f"{file} is refused by transformers: {error}") from error
    return config


def _open(path: Path) -> OpenedCheckpoint:
    """Open a checkpoint folder or file, with all that it holds besides weights."""
    path = find_folder(path)
    try:
        if is_checkpoint_folder(path):
            return open_folder(path, weights_only=False)
        if path.is_dir():
            read_metadata(path)  # names the missing file
        loaded = load_pickle(path, weights_only=False)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is not a checkpoint that torch.load can read.") from error
    if "state_dict" not in loaded:
        raise ValueError(f"{path} is not a Lightning checkpoint: it has no `state_dict`.")
    return open_values(path, loaded, ())


def _named_base(rest: Mapping[str, Any], checkpoint: Path) -> Path:
    """Return the folder with a config.json that the hyperparameters name."""
    hparams = rest.get("hyper_parameters")
    values = dict(hparams).values() if isinstance(hparams, Mapping) else ()
    folders = {
        Path(value)
        for value in values
        if isinstance(value, str | Path) and (Path(value) / "config.json").is_file()
    }
    if len(folders) == 1:
        return folders.pop()
    names = ", ".join(sorted(map(str, folders))) or "no folder with a config.json"
    raise ValueError(
        f"The config of the model in {checkpoint} is unknown: its hyperparameters name {names}. "
        "Give the folder with the config.json of the training run: --base PATH."
    )


# ---------------------------------------------------------------- adapters


def _is_of_adapter(name: str) -> bool:
    return any(part in name for part in (".lora_", ".base_layer.", ".modules_to_save."))


def _adapter_configs(
    rest: Mapping[str, Any], path: Path | None, name: str, checkpoint: Path
) -> dict[str, Any]:
    """Return the PEFT configs of the adapters, by their names."""
    from peft import PeftConfig

    if path is not None:
        folder = path if path.is_dir() else path.parent
        if not (folder / "adapter_config.json").is_file():
            raise FileNotFoundError(f"There is no adapter_config.json in {folder}.")
        return {"default": PeftConfig.from_pretrained(str(folder))}
    saved = [
        model["peft_config"] for model in rest.get(NOTES, {}).values() if "peft_config" in model
    ]
    if not saved:
        raise ValueError(
            f"{checkpoint} holds a PEFT adapter (`{name}`), but not its config (lora_alpha, for "
            "example). Give the adapter_config.json of that run, or one with the same values: "
            "--adapter-config PATH. LoraConfig(...).save_pretrained(PATH) writes it."
        )
    if len(saved) > 1:
        raise ValueError(
            f"{checkpoint} holds {len(saved)} models with PEFT adapters. Choose one: "
            "--adapter-config PATH for its config, and --prefix for its parameters."
        )
    build: Any = PeftConfig.from_peft_type
    return {name: build(**values) for name, values in saved[0].items()}


def _wrap(model: PreTrainedModel, configs: Mapping[str, Any]) -> Any:
    """Add adapters to a model."""
    from peft import get_peft_model

    (first, config), *others = configs.items()
    model.name_or_path = config.base_model_name_or_path  # PEFT reads it from the model
    wrapped = get_peft_model(model, config, adapter_name=first, low_cpu_mem_usage=True)
    for name, other in others:
        wrapped.add_adapter(name, other, low_cpu_mem_usage=True)
    return wrapped


def _of_adapters(model: nn.Module) -> Mapping[str, Tensor]:
    """Return the part of a model's state that PEFT saves with its adapters."""
    return adapter_state(model, model.state_dict(), {"save_embedding_layers": False})


# ---------------------------------------------------------------- model class and prefix


def _find(
    config: PreTrainedConfig,
    adapters: Mapping[str, Any],
    blanks: Mapping[str, Any],
    prefix: str | None,
    checkpoint: Path,
) -> tuple[Any, str]:
    """Return a model on the meta device, and the prefix of its names in the checkpoint.

    Args:
        config: of the model.
        adapters: the configs of its adapters; if there are any, only their weights must be saved.
        blanks: what is saved, on the meta device.
        prefix: the given one.
        checkpoint: for messages.
    """
    tried: list[tuple[int, str]] = []
    for candidate in _candidates(config):
        model: Any = _wrap(candidate, adapters) if adapters else candidate
        optional = dict(model.state_dict()) if adapters else {}
        for name in _of_adapters(model) if adapters else ():
            del optional[name]
        good = []
        for start in _prefixes(model.state_dict(), blanks, prefix):
            values = _under(start, blanks)
            problem = _problem(model, values, optional)
            if not problem:
                good.append(start)
            same = len(values.keys() & model.state_dict().keys())
            tried.append((same, f"{type(model).__name__} with the prefix '{start}': {problem}"))
        if len(good) > 1:
            matches = ", ".join(f"'{start}'" for start in good)
            raise ValueError(
                f"{checkpoint} holds several {type(model).__name__} models, with the prefixes "
                f"{matches}. Choose one: --prefix {good[0]}"
            )
        if good:
            return model, good[0]
    if not tried:
        raise ValueError(
            f"The config for {checkpoint} is a {type(config).__name__} (model type "
            f"{config.model_type!r}), which belongs to no class of models that can be exported. "
            'Name the class in its config.json: "architectures": ["..."].'
        )
    _, closest = max(tried, key=lambda attempt: attempt[0])
    raise ValueError(
        f"{checkpoint} holds no model of this config. The closest is {closest}. Give the "
        "config.json of the training run: --base PATH."
    )


def _under(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values under a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}


def _problem(model: nn.Module, values: Mapping[str, Any], optional: Mapping[str, Any]) -> str:
    """Return how saved names and shapes differ from a model's; an empty text if they do not.

    Args:
        model: on the meta device, as all values: torch compares them, and copies nothing.
        values: what is saved; of tied weights one is enough.
        optional: the model's own values of names that need not be saved.
    """
    try:
        model.load_state_dict({**optional, **values, **_resolve(model, values)})
    except RuntimeError as error:
        return textwrap.shorten(str(error), 400)
    return ""


def _candidates(config: PreTrainedConfig) -> Iterator[PreTrainedModel]:
    """Build the models that a config may belong to, first the one that it names."""
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    builders: list[Any] = [cls for cls in named if cls is not None]
    builders += [auto.from_config for auto in _AUTO if is_built_by(auto, config)]
    for build in builders:
        with torch.device("meta"):
            model = build(config)
        yield model.to("meta")  # XLNet and DiffLlama make some weights on the CPU all the same


def _prefixes(expected: Mapping[str, Any], saved: Iterable[str], prefix: str | None) -> list[str]:
    """Return possible prefixes of a model's names, the most likely first."""
    if prefix is not None:
        return [prefix if prefix.endswith(".") or not prefix else f"{prefix}."]
    counts: Counter[str] = Counter()
    for name in saved:
        starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
        counts.update(name[:start] for start in starts if name[start:] in expected)
    return [candidate for candidate, _ in counts.most_common(8)] or [""]


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the tensor of each name: tied weights have several names."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(x), name) for name, x in named}


def _resolve(model: nn.Module, values: Mapping[str, T]) -> dict[str, T]:
    """Return the value of each name of a model; tied weights have that of another name."""
    first_names = _first_names(model)
    tied = {first_names.get(name, name): value for name, value in values.items()}
    full = {name: values.get(name, tied.get(first)) for name, first in first_names.items()}
    return {name: value for name, value in full.items() if value is not None}


def _assign(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Give a model on the meta device weights there, with the precision that they have."""
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()  # a PEFT model delegates it


def _write(save: Callable[[Path], Any], base: Path, out: Path) -> None:
    """Write to a temporary folder next to ``out``, and rename it when it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        save(temporary)
        folder = base if base.is_dir() else base.parent
        for file in {file for pattern in _OTHER_FILES for file in folder.glob(pattern)}:
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        os.replace(temporary, out)
    finally:
        remove(temporary)
