# SPDX-License-Identifier: Apache-2.0
"""Sources of documents: files, folders, the hub, or Python's standard library.

Returns records by index; does not know tokens.
"""

import json
import os
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, Final

from recipes.data.pictures import Pictures
from recipes.files import BUILDERS, FORMATS, check_source, suffix_of
from recipes.tokens import OFFLINE, first_line

_SAVED: Final = ("dataset_dict.json", "dataset_info.json")
"""Files of `datasets.save_to_disk()` besides Arrow files, for several splits and for one."""
PICTURES: Final = "pictures"
"""The builder of generated pictures."""
_NOT_CORPUS: Final = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
_CORPUS_BYTES: Final = 16_384
"""Smaller files of the standard library are skipped: the corpus is for long documents."""


@dataclass(frozen=True)
class DataSource:
    """The location of records; nothing is read yet.

    Args:
        name: as the user wrote it.
        builder: of `datasets`; or ``hub``, ``saved`` for a folder of save_to_disk(), or
            ``pictures`` for generated ones.
        files: in order.
        config_name: the hub's configuration.
        split: the hub's split.
    """

    name: str
    builder: str
    files: tuple[Path, ...] = ()
    config_name: str | None = None
    split: str = "train"

    @property
    def folder(self) -> Path:
        """The folder that paths in its records are relative to."""
        path = Path(self.name).expanduser()
        return path.parent.absolute() if path.is_file() else path.absolute()

    def fingerprint(self) -> str:
        """Return a text that changes with the source and with each of its files.

        A hub data set is identified by its names only: it is not packed again when it changes.
        """
        stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in self.files]
        has_split = self.builder in ("hub", "saved")
        names = [self.builder, self.config_name, self.split] if has_split else []
        return json.dumps([self.name, *names, stats])

    def read(self, cache_dir: str | None = None) -> Any:
        """Return the records by index. Images and videos are not decoded."""
        if self.builder == PICTURES:
            return Pictures()
        if self.builder == "saved":
            return _keep_encoded(self._read_saved())
        import datasets  # type: ignore[import-untyped]

        try:
            return _keep_encoded(self._load(cache_dir))
        except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
            raise ValueError(self._explain(error)) from error

    def _explain(self, error: Exception) -> str:
        """Return a message for an error of `datasets`."""
        if self.builder == "hub":
            return (
                f"source={self.name!r} is neither a file nor a folder, and could not be loaded "
                f"from the hub ({first_line(error)}). {OFFLINE} Check the path or the name, "
                f"config_name={self.config_name!r} and split={self.split!r}; None is the embedded "
                "corpus."
            )
        is_empty = isinstance(error, StopIteration) or "no data" in str(error)
        cause = "it holds no record" if is_empty else first_line(error.__cause__ or error)
        return (
            f"source={self.name!r} cannot be read as {self.builder} ({cause}). Each record must be "
            "an object with the same columns; .jsonl has one per line."
        )

    def _load(self, cache_dir: str | None) -> Any:
        import datasets

        options: dict[str, Any] = {"cache_dir": cache_dir}
        if self.builder == "hub":
            return datasets.load_dataset(self.name, self.config_name, split=self.split, **options)
        if self.builder == "text":  # a file is a document
            options |= {"sample_by": "document", "encoding_errors": "replace"}
        files = [escape(str(file)) for file in self.files]
        return datasets.load_dataset(self.builder, data_files=files, split="train", **options)

    def _read_saved(self) -> Any:
        import datasets

        records = datasets.load_from_disk(str(Path(self.name).expanduser()))
        if isinstance(records, datasets.DatasetDict):
            if self.split not in records:
                raise ValueError(
                    f"source={self.name!r} has the splits {', '.join(records)}, but not "
                    f"split={self.split!r}. Name one of them: split=..."
                )
            records = records[self.split]
        return records


def _keep_encoded(records: Any) -> Any:
    """Let records hold the bytes or paths of images and videos."""
    import datasets

    media = (datasets.Image, datasets.Video)
    for name, feature in (records.features or {}).items():
        inner = getattr(feature, "feature", None)  # of a list
        if isinstance(feature, media):
            records = records.cast_column(name, type(feature)(decode=False))
        elif isinstance(inner, media):
            records = records.cast_column(name, datasets.List(type(inner)(decode=False)))
    return records


def find_source(
    name: str | None, *, config_name: str | None = None, split: str = "train"
) -> DataSource:
    """Return a source: None, a file, a folder of files of one format, or a name on the hub."""
    if name is None:
        return DataSource("Python's standard library", "text", _corpus_files())
    path = Path(name).expanduser()
    if path.is_file():
        return DataSource(name, _builder(path), (path.resolve(),))
    if path.is_dir() and any((path / file).is_file() for file in _SAVED):
        files = sorted(f.resolve() for f in path.rglob("*") if f.suffix in (".arrow", ".json"))
        return DataSource(name, "saved", tuple(files), None, split)
    if path.is_dir():
        return _find_folder(name, path)
    check_source(name)
    return DataSource(name, "hub", (), config_name, split)


def _builder(path: Path) -> str:
    if suffix_of(path) not in BUILDERS:
        raise ValueError(
            f"source={str(path)!r}: the format {path.suffix or 'without suffix'!r} is not "
            f"supported. Give a {FORMATS} file."
        )
    return BUILDERS[suffix_of(path)]


def _find_folder(name: str, path: Path) -> DataSource:
    files = sorted(f.resolve() for f in path.rglob("*") if f.is_file() and suffix_of(f) in BUILDERS)
    builders = sorted({BUILDERS[suffix_of(f)] for f in files})
    if not files:
        raise FileNotFoundError(f"source={name!r}: the folder holds no {FORMATS} file.")
    if len(builders) > 1:
        raise ValueError(
            f"source={name!r}: the folder holds files of several formats ({', '.join(builders)}). "
            "Keep one format in it, or name the file."
        )
    return DataSource(name, builders[0], tuple(files))


def _corpus_files() -> tuple[Path, ...]:
    """Return the long modules of the standard library, which every machine has."""
    root = sysconfig.get_paths()["stdlib"]
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _NOT_CORPUS)
        # Generated settings are not text.
        names = [name for name in names if not name.startswith("_sysconfigdata")]
        paths = [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
        files += [path for path in paths if path.stat().st_size >= _CORPUS_BYTES]
    if not files:
        raise FileNotFoundError(
            f"source=None reads the sources of Python's standard library, but {root} holds none. "
            "Give a file or folder: source=..."
        )
    return tuple(files)


def check_column(known: Collection[str], column: str, *, source: str, option: str) -> None:
    """Raise for records without a column."""
    if column not in known:
        raise ValueError(
            f"source={source!r} has no column {column!r}; it has {', '.join(known)}. Choose one: "
            f"{option}=..."
        )
