# SPDX-License-Identifier: Apache-2.0
"""The files that a command line names: configs, data, tokenizers, models and checkpoints.

Imports nothing that takes time, so that a missing file is reported at once: the imports that a run
needs take seconds. The same checks are made again where files are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from lightning_cp.renamed import explain_removed

CONFIGS: Final = Path(__file__).parent / "configs"
BUILDERS: Final = {
    ".jsonl": "json",
    ".json": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
"""Builders of `datasets`, by the suffix of the files that they read."""
FORMATS: Final = " / ".join(BUILDERS)
_OWN_DATA: Final = {"TextData", "ChatData", "MediaChatData"}
"""Data modules of ours with a source; options of others may have other meanings."""
_NAMED: Final = {"best", "last", "hpc"}
_PRINTING: Final = {"-h", "--help", "--print_config"}


def find_files(args: Sequence[str]) -> list[str]:
    """Return arguments with the paths of packaged configs; raise for a missing or broken file.

    Data modules that are gone are refused, too: the options of other classes would be unknown.

    Names of configs that this package holds are replaced where there is no such file:
    ``laptop.yaml`` and ``recipes/configs/laptop.yaml`` then work outside of a checkout.

    Args:
        args: as on a command line, the command first.
    """
    packaged: dict[str, str] = {}
    for name in configs(args):
        file = CONFIGS / Path(name).name
        if Path(name).exists():
            continue
        if Path(name).parent not in (Path(), Path("recipes/configs")) or not file.is_file():
            raise FileNotFoundError(
                f"--config {name}: there is no such file (in {Path.cwd()}). Packaged configs are "
                f"{', '.join(sorted(path.name for path in CONFIGS.glob('*.yaml')))}."
            )
        packaged |= {name: str(file), f"--config={name}": f"--config={file}"}
    args = [packaged.get(arg, arg) for arg in args]
    for name in filter(None, configs(args)):
        read_config(name)
    if gone := explain_removed(str(read_options(args).get("data"))):
        raise ValueError(f"data: {gone}")
    if not any(arg.partition("=")[0] in _PRINTING for arg in args):
        _check_options(read_options(args))
    return args


def configs(args: Sequence[str]) -> Iterator[str]:
    """Yield the config files among arguments."""
    for flag, value in pairwise([*args, ""]):
        if flag in ("-c", "--config"):
            yield value
        elif flag.startswith("--config="):
            yield flag.removeprefix("--config=")


def read_config(name: str) -> Mapping[str, Any]:
    """Return the options that a config holds; raise for a file that holds none."""
    try:
        content = yaml.safe_load(Path(name).read_text("utf-8"))
    except OSError as error:
        raise OSError(f"--config {name}: {error.strerror}. Give a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {name} is not text in UTF-8: {error}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--config {name} is not valid YAML: {error}") from error
    if not isinstance(content, Mapping):
        state = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise ValueError(
            f"--config {name} {state}. A config names options, such as `trainer: {{max_steps: 9}}`."
        )
    return content


def data_class(args: Sequence[str]) -> str:
    """Return the name of the data module's class, without its path; empty if there is none."""
    return str(read_options(args).get("data") or "").rpartition(".")[2]


def read_options(args: Sequence[str]) -> dict[str, Any]:
    """Return the options of configs and flags by their names; the last one counts.

    The data module's class is ``data``, and its options ``data.source`` and so on. Only what is
    plain to see is found, and nothing is refused: the parser reports errors.
    """
    option_values: dict[str, Any] = {}
    for file in configs(args):
        try:
            content = read_config(file)
        except (OSError, ValueError):
            continue
        for key, value in _flatten(content):
            _set(option_values, key, value)
    for flag, following in pairwise([*args, ""]):
        name, has_value, value = flag.partition("=")
        if name.startswith("--"):
            _set(option_values, name.removeprefix("--"), value if has_value else following)
    return option_values


def _flatten(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by their names, a class before its options."""
    items = content.items() if isinstance(content, Mapping) else ()
    for key, value in sorted(items, key=lambda item: item[0] != "class_path"):
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(option_values: dict[str, Any], key: str, value: Any) -> None:
    key = "data" if key == "data.class_path" else key.replace("data.init_args.", "data.", 1)
    if key == "data":  # options of another class do not count
        for name in [name for name in option_values if name.startswith("data.")]:
            del option_values[name]
    option_values[key] = None if value in ("null", "") else value


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise for the first file that is missing, in the order in which a run would read them."""
    own_data = str(options.get("data") or "TextData").rpartition(".")[2] in _OWN_DATA
    for key, check in (
        ("model.model", lambda name: check_model(name) if looks_local(name) else None),
        ("data.tokenizer", lambda name: check_folder("tokenizer", name, "the byte tokenizer")),
        ("data.processor", lambda name: check_folder("processor", name, "the embedded processor")),
        ("data.source", check_source),
        ("data.val_source", check_source),
        ("ckpt_path", check_checkpoint),
    ):
        name = options.get(key)
        if isinstance(name, str) and (own_data or not key.startswith("data.")):
            check(name)


# ---------------------------------------------------------------- one file


def looks_local(name: str) -> bool:
    """Return whether a name is a path, not a name on the hub.

    Example:
        >>> looks_local("./model"), looks_local("Qwen/Qwen3-8B")
        (True, False)
    """
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def suffix_of(path: Path) -> str:
    """Return the suffix of a file, with that before ``.gz``."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def check_source(name: str) -> None:
    """Raise for a file or folder of records that does not exist; others may be on the hub."""
    path = Path(name).expanduser()
    if not path.exists() and (suffix_of(path) in BUILDERS or looks_local(name)):
        raise FileNotFoundError(
            f"source={name!r}: there is no such file or folder (in {Path.cwd()}). Give a "
            f"{FORMATS} file, a folder of them, a name on the hub, or None for the embedded "
            "corpus."
        )


def check_folder(what: str, name_or_path: str, embedded: str) -> None:
    """Raise for a path that does not exist.

    Args:
        what: the name of the option.
        name_or_path: its value.
        embedded: what None stands for.
    """
    if looks_local(name_or_path) and not Path(name_or_path).expanduser().exists():
        raise FileNotFoundError(
            f"{what}={name_or_path!r}: there is no such folder. Give a folder that "
            f"save_pretrained() wrote, a name on the hub, or None for {embedded}."
        )


def check_model(name: str) -> None:
    """Raise for a folder without a model's config."""
    folder = Path(name).expanduser()
    if (folder.exists() or looks_local(name)) and not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(
            f"model={name!r} {what}. Give a folder that save_pretrained() wrote, or a name on the "
            "hub."
        )


def check_checkpoint(name: str) -> None:
    """Raise for a checkpoint that does not exist, unless Lightning looks for it by another name."""
    path = Path(name)
    if name in _NAMED or name.startswith("registry") or "://" in name or path.exists():
        return
    from lightning_cp.checkpoint.folder import find_folder

    if not find_folder(path).exists():
        raise FileNotFoundError(
            f"ckpt_path={name!r}: there is no such checkpoint (in {Path.cwd()}). Give a folder "
            "or a file, or 'last'."
        )
