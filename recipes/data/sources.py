# SPDX-License-Identifier: Apache-2.0
"""Where documents come from: files, folders, the hub, or the sources of Python itself.

Gives records by number or one after the other; knows nothing of tokens.
"""

import json
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes.tokens import first_line, reaches_hub, unreachable

_BUILDERS: Final = {
    ".jsonl": "json",
    ".json": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
}
_SAVED: Final = ("dataset_dict.json", "dataset_info.json")
"""What `datasets.save_to_disk()` writes beside its Arrow files: of several splits, or of one."""
_NOT_CORPUS: Final = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
_CORPUS_BYTES: Final = 16_384
"""Smaller files of the standard library are left out: the corpus is for long documents."""


@dataclass(frozen=True)
class Source:
    """Where records are, before any of them is read.

    Args:
        name: as the user wrote it.
        builder: what reads the files; ``hub`` has none, ``saved`` is what save_to_disk() wrote.
        files: in their order.
        config_name: the hub's configuration.
        split: the hub's split.
    """

    name: str
    builder: str
    files: tuple[Path, ...] = ()
    config_name: str | None = None
    split: str = "train"

    def fingerprint(self) -> str:
        """Return what tells this source from another, and a changed file from its former self.

        A hub data set is told by its names alone: it stays as it was when it was first packed.
        """
        stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]
        has_split = self.builder in ("hub", "saved")
        named = [self.builder, self.config_name, self.split] if has_split else []
        return json.dumps([self.name, *named, stats])

    def read(self, *, streaming: bool = False, cache_dir: str | None = None) -> Any:
        """Return the records: by number, or when streaming one after the other."""
        if self.builder == "text":
            return TextFiles(self.files)
        import datasets  # type: ignore[import-untyped]

        if self.builder == "saved":
            return self._read_saved(streaming=streaming)
        files = [str(file) for file in self.files]
        try:
            if self.builder == "hub":
                with _patient(datasets.config):
                    return datasets.load_dataset(
                        self.name,
                        self.config_name,
                        split=self.split,
                        streaming=streaming,
                        cache_dir=cache_dir,
                    )
            return datasets.load_dataset(
                self.builder,
                data_files=files,
                split="train",
                streaming=streaming,
                cache_dir=cache_dir,
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            if self.builder == "hub":
                raise ValueError(
                    f"source={self.name!r} is no file or folder here, and the hub does not give it "
                    f"({first_line(error)}). {unreachable()}Check the path or the name, "
                    f"config_name={self.config_name!r} and split={self.split!r}; None is the "
                    "embedded corpus."
                ) from error
            cause = first_line(error.__cause__ or error)
            raise ValueError(
                f"source={self.name!r} cannot be read as {self.builder} ({cause}). Each record "
                "must be an object with the same columns; .jsonl has one to a line."
            ) from error

    def _read_saved(self, *, streaming: bool) -> Any:
        import datasets

        found = datasets.load_from_disk(str(Path(self.name).expanduser()))
        if isinstance(found, datasets.DatasetDict):
            if self.split not in found:
                raise ValueError(
                    f"source={self.name!r} has the splits {', '.join(found)}, but not "
                    f"split={self.split!r}. Name one of them: split=..."
                )
            found = found[self.split]
        return found.to_iterable_dataset() if streaming else found


@contextmanager
def _patient(config: Any) -> Iterator[None]:
    """Use what was fetched before where the hub is out of reach, instead of asking again."""
    former, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, not reaches_hub()
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = former


class TextFiles(Sequence[dict[str, Any]]):
    """Files as records: each one is a document, read when it is asked for."""

    column_names: Final = ["text"]

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        return {"text": self._files[index].read_text("utf-8", errors="replace")}


def find_source(
    name: str | None, *, config_name: str | None = None, split: str = "train"
) -> Source:
    """Find a source: None, a file, a folder of files of one kind, or a name on the hub."""
    if name is None:
        return Source("Python's standard library", "text", _corpus_files())
    path = Path(name).expanduser()
    if path.is_file():
        return _checked(Source(name, _builder(path), (path.resolve(),)))
    if path.is_dir() and any((path / file).is_file() for file in _SAVED):
        files = sorted(f.resolve() for f in path.rglob("*") if f.suffix in (".arrow", ".json"))
        return Source(name, "saved", tuple(files), None, split)
    if path.is_dir():
        return _checked(_find_folder(name, path))
    if _kind(path) in _BUILDERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"source={name!r}: there is no such file or folder (seen from {Path.cwd()}). Give a "
            f"{_kinds()} file, a folder of them, a name on the hub, or None for the embedded "
            "corpus."
        )
    return Source(name, "hub", (), config_name, split)


def _builder(path: Path) -> str:
    if _kind(path) not in _BUILDERS:
        raise ValueError(
            f"source={str(path)!r}: files of kind {path.suffix or 'no suffix'!r} are not read. "
            f"Give a {_kinds()} file."
        )
    return _BUILDERS[_kind(path)]


def _kind(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def _checked(source: Source) -> Source:
    """Refuse files with nothing in them."""
    if source.builder in ("json", "csv") and all(map(_is_blank, source.files)):
        raise ValueError(
            f"source={source.name!r} is empty: there is no record in it. Was it written to the end?"
        )
    return source


def _is_blank(file: Path) -> bool:
    if file.suffix == ".gz" or file.stat().st_size > 4096:
        return file.stat().st_size == 0
    return not file.read_bytes().strip()


def _kinds() -> str:
    return " / ".join(_BUILDERS)


def _find_folder(name: str, path: Path) -> Source:
    files = sorted(f.resolve() for f in path.rglob("*") if f.is_file() and _kind(f) in _BUILDERS)
    builders = sorted({_BUILDERS[_kind(f)] for f in files})
    if not files:
        raise FileNotFoundError(f"source={name!r}: the folder holds no {_kinds()} file.")
    if len(builders) > 1:
        raise ValueError(
            f"source={name!r}: the folder holds files of several kinds ({', '.join(builders)}). "
            "Keep one kind in it, or name the file."
        )
    return Source(name, builders[0], tuple(files))


def _corpus_files() -> tuple[Path, ...]:
    """Find the long modules of the standard library, which is on every machine."""
    root = sysconfig.get_paths()["stdlib"]
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_CORPUS)
        # Generated tables of numbers and settings are no text.
        names = [name for name in names if not name.startswith("_sysconfigdata")]
        paths = [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        found += [path for path in paths if path.stat().st_size >= _CORPUS_BYTES]
    if not found:
        raise FileNotFoundError(
            f"source=None is the sources of Python's standard library, but {root} holds none. Give "
            "a file or folder of your own: source=..."
        )
    return tuple(found)


def check_column(known: Collection[str], column: str, *, source: str, option: str) -> None:
    """Refuse records that do not have a column."""
    if column not in known:
        raise ValueError(
            f"source={source!r} has no column {column!r}, but {', '.join(known)}. Name the one to "
            f"read: {option}=..."
        )
