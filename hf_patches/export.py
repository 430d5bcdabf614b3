# SPDX-License-Identifier: Apache-2.0
"""`export(checkpoint, out)`: a Lightning checkpoint becomes a Hugging Face folder.

Reads the weights alone, by `lightning_cp.checkpoint`, and finds by their names and shapes under
which attribute of the LightningModule the model was. Needs no GPU and no process group.
"""

import os
import pickle
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from lightning_cp.adapters import NOTES
from lightning_cp.checkpoint import find_folder, is_checkpoint_folder
from lightning_cp.checkpoint.folder import read_metadata, remove
from lightning_cp.checkpoint.source import Source, blank, load_pickle, open_folder, open_values
from lightning_cp.checkpoint.state import plain_name

# What belongs to a model beside its weights and config; copied as it is.
_BESIDE: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)

_AUTO: Final = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSequenceClassification,
    transformers.AutoModelForTokenClassification,
    transformers.AutoModelForQuestionAnswering,
    transformers.AutoModel,
)

Shape = tuple[int, ...]


def export(
    checkpoint: Path,
    out: Path,
    *,
    base: Path | None = None,
    prefix: str | None = None,
    max_shard_size: str = "5GB",
    merge: bool = False,
    adapter_config: Path | None = None,
) -> Any:
    """Write the Hugging Face model of a Lightning checkpoint as ``save_pretrained`` would.

    Of a checkpoint with PEFT adapters these alone are written, for ``PeftModel.from_pretrained``.

    Args:
        checkpoint: a folder of shards or a single file, that you trust: it holds pickles.
        out: the folder to write; must not exist, or be empty.
        base: a folder with the model's config.json; tokenizer files in it are copied. By default
            the folder that the checkpoint's hyperparameters name.
        prefix: what stands before the model's own names in the checkpoint, such as ``model.``;
            found by the names and shapes when None.
        max_shard_size: weights are split into files of at most this size.
        merge: add PEFT adapters to the weights that they change, and write a model without them.
            If the checkpoint holds adapters alone, the model is read from ``base``.
        adapter_config: an adapter_config.json, or a folder with one, for adapters of a checkpoint
            that does not say how they were made; those of the strategy do.

    Returns:
        The model, with the weights that were written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists already. Remove it, or give another name.")
    source = _open(checkpoint)
    forms = {
        plain_name(str(keys[1])): (keys, tuple(form[0]))
        for keys, form in source.forms.items()
        if keys[0] == "state_dict" and len(keys) == 2 and form is not None
    }
    base = base or _named_base(source.rest or {}, checkpoint)
    config = read_config(base)
    if adapted := next((name for name in forms if _is_adapted(name)), None):
        configs = _adapter_configs(source.rest or {}, adapter_config, adapted, checkpoint)
        return _export_adapted(
            source, forms, config, configs, checkpoint, out, base, prefix, max_shard_size, merge
        )
    if merge or adapter_config is not None:
        raise ValueError(f"{checkpoint} holds no PEFT adapter: leave --merge and --adapter-config.")
    shapes = {name: shape for name, (_, shape) in forms.items()}
    model, prefix = _find(config, shapes, prefix, checkpoint)
    wanted = {name: keys for name, (keys, _) in forms.items() if name.startswith(prefix)}
    read = source.read({keys: blank(source.forms[keys]) for keys in wanted.values()})
    _fill(model, {name.removeprefix(prefix): read[keys] for name, keys in wanted.items()})
    _write(model, base, out, max_shard_size=max_shard_size)
    return model


def read_config(path: Path) -> PreTrainedConfig:
    """Read the config of a model from a folder, or from a config.json."""
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path}. Give a folder with a config.json; models are read from the disk, "
            "not from the hub."
        )
    if not file.is_file():
        more = " It holds a PEFT adapter: give the folder of the model that it is for."
        adapter = more if (path / "adapter_config.json").is_file() else ""
        raise FileNotFoundError(f"There is no config.json in {path}.{adapter}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(file)
    except StrictDataclassError as error:
        raise ValueError(f"{file} is refused by transformers: {error}") from error
    return config


def _open(path: Path) -> Source:
    """Open a checkpoint of either kind, with what it holds beside weights."""
    path = find_folder(path)
    try:
        if is_checkpoint_folder(path):
            return open_folder(path, weights_only=False)
        if path.is_dir():
            read_metadata(path)  # says what is missing
        loaded = load_pickle(path, weights_only=False)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is no checkpoint that torch.load reads.") from error
    if "state_dict" not in loaded:
        raise ValueError(f"{path} is no Lightning checkpoint: it has no `state_dict`.")
    return open_values(path, loaded, ())


def _named_base(rest: Mapping[str, Any], checkpoint: Path) -> Path:
    """Return the folder with a config.json that the hyperparameters name."""
    named = rest.get("hyper_parameters")
    values = dict(named).values() if isinstance(named, Mapping) else ()
    folders = {
        Path(value)
        for value in values
        if isinstance(value, str | Path) and (Path(value) / "config.json").is_file()
    }
    if len(folders) == 1:
        return folders.pop()
    found = ", ".join(sorted(map(str, folders))) or "no folder with a config.json"
    raise ValueError(
        f"Which model {checkpoint} holds is not known: its hyperparameters name {found}. Give the "
        "folder with the config.json that it was trained with: --base PATH."
    )


# ---------------------------------------------------------------- adapters


def _is_adapted(name: str) -> bool:
    return any(part in name for part in (".lora_", ".base_layer.", ".modules_to_save."))


def _adapter_configs(
    rest: Mapping[str, Any], given: Path | None, name: str, checkpoint: Path
) -> dict[str, Any]:
    """Return how the adapters were made, by their names."""
    from peft import PeftConfig

    if given is not None:
        folder = given if given.is_dir() else given.parent
        if not (folder / "adapter_config.json").is_file():
            raise FileNotFoundError(f"There is no adapter_config.json in {folder}.")
        return {"default": PeftConfig.from_pretrained(str(folder))}
    told = [
        model["peft_config"] for model in rest.get(NOTES, {}).values() if "peft_config" in model
    ]
    if not told:
        raise ValueError(
            f"{checkpoint} holds a PEFT adapter (`{name}`), and does not say how it was made "
            "(lora_alpha, for one). Give the adapter_config.json of that run, or one with the same "
            "values: --adapter-config PATH. LoraConfig(...).save_pretrained(PATH) writes it."
        )
    if len(told) > 1:
        raise ValueError(
            f"{checkpoint} holds {len(told)} models with PEFT adapters. Say how the one was made "
            "that shall be written: --adapter-config PATH, and where it is: --prefix."
        )
    build: Any = PeftConfig.from_peft_type
    return {name: build(**values) for name, values in told[0].items()}


def _wrap(model: PreTrainedModel, configs: Mapping[str, Any]) -> Any:
    """Put adapters into a model."""
    from peft import get_peft_model

    (first, config), *others = configs.items()
    model.name_or_path = config.base_model_name_or_path  # PEFT takes it from there
    wrapped = get_peft_model(model, config, adapter_name=first, low_cpu_mem_usage=True)
    for name, other in others:
        wrapped.add_adapter(name, other, low_cpu_mem_usage=True)
    return wrapped


def _export_adapted(
    source: Source,
    forms: Mapping[str, tuple[Any, Shape]],
    config: PreTrainedConfig,
    configs: Mapping[str, Any],
    checkpoint: Path,
    out: Path,
    base: Path,
    prefix: str | None,
    max_shard_size: str,
    merge: bool,
) -> Any:
    """Write adapters, or the model that they are merged into."""
    for adapter in configs.values():
        adapter.base_model_name_or_path = adapter.base_model_name_or_path or str(base)
    shapes = {name: shape for name, (_, shape) in forms.items()}
    # With base_layer: the adapters' checkpoint holds the model too.
    alone = not any(".base_layer." in name for name in shapes)
    model, prefix = _find(config, shapes, prefix, checkpoint, configs, alone)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        wanted = {name: forms[prefix + name][0] for name in names if prefix + name in forms}
        found = source.read({keys: blank(source.forms[keys]) for keys in wanted.values()})
        return {name: found[keys] for name, keys in wanted.items()}

    if not merge:
        weights = read(_adapter_names(model))
        _write(model, base, out, state_dict=weights, save_embedding_layers=False)
        return model
    if alone:
        kind = type(model.get_base_model())
        try:
            whole = kind.from_pretrained(base, dtype="auto")
        except OSError as error:
            raise ValueError(
                f"{checkpoint} holds adapters alone, and {base} no weights to merge them into. "
                "Give the folder of the model that was adapted: --base PATH."
            ) from error
        model = _wrap(whole, configs)
    _fill(model, read(model.state_dict()))
    merged: PreTrainedModel = model.merge_and_unload()
    _write(merged, base, out, max_shard_size=max_shard_size)
    return merged


def _adapter_names(model: nn.Module) -> list[str]:
    """Return the names of what adapters have added to a model."""
    from peft.utils import AuxiliaryTrainingWrapper

    added: set[int] = set()
    for part in model.modules():
        kept: Any = None
        if isinstance(part, AuxiliaryTrainingWrapper):
            kept = part.original_module
        elif hasattr(part, "get_base_layer"):  # a layer of a tuner
            kept = part.get_base_layer()  # type: ignore[operator]
        if isinstance(kept, nn.Module):
            added |= {id(x) for x in part.parameters()} - {id(x) for x in kept.parameters()}
    return [name for name, x in model.named_parameters() if id(x) in added]


# ---------------------------------------------------------------- which model, and where


@dataclass(frozen=True)
class _Fit:
    """How a model's names and shapes compare with those that follow a prefix in a checkpoint."""

    model: nn.Module
    prefix: str
    num_right: int
    problems: list[str]


def _find(
    config: PreTrainedConfig,
    shapes: Mapping[str, Shape],
    prefix: str | None,
    checkpoint: Path,
    adapters: Mapping[str, Any] | None = None,
    alone: bool = False,
) -> tuple[Any, str]:
    """Return a model on the meta device, and what stands before its names in the checkpoint.

    With adapters, if there are any; ``alone`` if the checkpoint holds nothing else.
    """
    tried: list[_Fit] = []
    for candidate in _candidates(config):
        model = _wrap(candidate, adapters) if adapters else candidate
        own = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        if alone:
            own = {name: own[name] for name in _adapter_names(model)}
        fits = [
            _compare(model, own, shapes, given) for given in _prefixes(own, shapes, prefix) or [""]
        ]
        good = [fit for fit in fits if not fit.problems]
        if len(good) == 1:
            return model, good[0].prefix
        if good:
            places = ", ".join(f"'{fit.prefix}'" for fit in good)
            raise ValueError(
                f"{checkpoint} holds several models that are a {type(model).__name__}: under "
                f"{places}. Say which: --prefix {good[0].prefix}"
            )
        tried += fits
    best = max(tried, key=lambda fit: fit.num_right)
    more = len(best.problems) - 3
    problems = "; ".join(best.problems[:3] + ([f"and {more} more"] if more > 0 else []))
    raise ValueError(
        f"{checkpoint} holds no model of this config. Closest is {type(best.model).__name__} under "
        f"'{best.prefix}', but {problems}. Give the config.json that the model was trained with: "
        "--base PATH."
    )


def _candidates(config: PreTrainedConfig) -> Iterator[PreTrainedModel]:
    """Build the models that a config may stand for, the one that it names first."""
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    builders: list[Any] = [cls for cls in named if cls is not None]
    builders += [auto.from_config for auto in _AUTO if type(config) in auto._model_mapping]
    for build in builders:
        with torch.device("meta"):
            yield build(config)


def _prefixes(
    own: Mapping[str, Shape], shapes: Mapping[str, Shape], given: str | None
) -> list[str]:
    """Return what may stand before a model's names, the likeliest first."""
    if given is not None:
        return [given if given.endswith(".") or not given else f"{given}."]
    found: Counter[str] = Counter()
    for name in shapes:
        starts = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
        found.update(name[:start] for start in starts if name[start:] in own)
    return [prefix for prefix, _ in found.most_common(8)]


def _compare(
    model: nn.Module, own: Mapping[str, Shape], shapes: Mapping[str, Shape], prefix: str
) -> _Fit:
    under = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
    twins = _twins(model)
    there = {twin for name, twin in twins.items() if name in under}
    problems, num_right = [], 0
    for name, shape in own.items():
        if name in under and under[name] != shape:
            problems.append(f"`{name}` is {under[name]} instead of {shape}")
        elif name in under:
            num_right += 1
        elif twins.get(name, name) not in there:
            problems.append(f"`{name}` is missing")
    problems += [f"`{name}` is not the model's" for name in under if name not in own]
    return _Fit(model, prefix, num_right, problems)


def _twins(model: nn.Module) -> dict[str, str]:
    """Return, by name, the first name of the same tensor: tied weights have several."""
    first: dict[int, str] = {}
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(x), name) for name, x in named}


def _fill(model: Any, weights: dict[str, Tensor]) -> None:
    """Give a model on the meta device its weights, in the precision that they have."""
    twins = _twins(model)
    by_twin = {twins.get(name, name): x for name, x in weights.items()}
    whole = {name: weights.get(name, by_twin.get(twins.get(name, name))) for name in twins}
    state = {name: x for name, x in whole.items() if x is not None}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()  # PEFT's hands it on


def _write(model: Any, base: Path, out: Path, **options: Any) -> None:
    """Write beside ``out``, and give it its name when it is whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.saving-{uuid.uuid4().hex[:8]}")
    try:
        model.save_pretrained(temporary, **options)
        folder = base if base.is_dir() else base.parent
        for file in {file for pattern in _BESIDE for file in folder.glob(pattern)}:
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        os.replace(temporary, out)
    finally:
        remove(temporary)
