# SPDX-License-Identifier: Apache-2.0
"""What the data modules have in common: loaders that resume, and packed rows on disk.

`RowsData` knows rows and Lightning; `PackedData` also sources and tokens. What a record means is
for `text.py` and `chat.py` to say.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from transformers import PreTrainedTokenizerBase

from recipes.data.loader import (
    Batch,
    ResumableLoader,
    RowLoader,
    Rows,
    StreamLoader,
    as_tensors,
    count_pending,
    find_data_rank,
    plan_evaluation,
    plan_training,
)
from recipes.data.packing import COLUMNS, Document, LongDocuments, Row, pack
from recipes.data.sources import Source, check_column, find_source
from recipes.tokens import load_tokenizer

Split = Literal["train", "val"]

_FORMAT: Final = 1
"""Raise it when the same source and options give other rows: files on disk are then made anew."""

_CHUNK_TOKENS: Final = 2**20
_CHUNK_RECORDS: Final = 64


class RowsData(LightningDataModule):
    """Rows to train on and rows to validate with, read by data rank.

    In training rows are shuffled by seed and epoch, and an epoch leaves out what does not fill a
    global batch; in validation every row counts once. A checkpoint says which batch comes next.

    Args:
        seq_len: tokens per row.
        batch_size: rows per data rank.
        num_workers: processes that read ahead.
        seed: of the order of rows.
    """

    def __init__(self, *, seq_len: int, batch_size: int, num_workers: int, seed: int) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_len", seq_len, 2),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: give a number of at least {least}.")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self._train_loader: ResumableLoader | None = None
        self._position: dict[str, int] | None = None

    def __str__(self) -> str:
        # Lightning's own would make loaders, and knows only torch's.
        return f"{type(self).__name__}(seq_len={self.seq_len}, batch_size={self.batch_size})"

    def train_rows(self) -> Rows:
        """Return the rows to train on."""
        raise NotImplementedError

    def val_rows(self) -> Rows | None:
        """Return the rows to validate with; None: there are none."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Forget the former run."""
        self._train_loader = self._position = None

    def train_dataloader(self) -> ResumableLoader:
        """Return the loader of this data rank: the same one, however often Lightning asks."""
        if self._train_loader is None:
            self._train_loader = self._build_train_loader()
            if self._position is not None:
                self._train_loader.load_state_dict(self._position)
        return self._train_loader

    def _build_train_loader(self) -> ResumableLoader:
        rows = self.train_rows()
        rank, size = find_data_rank(self.trainer)
        global_batch_size = size * self.batch_size
        num_batches = len(rows) // global_batch_size
        if not num_batches:
            raise ValueError(
                f"There are {len(rows)} rows of {self.seq_len} tokens to train on, but a global "
                f"batch takes {global_batch_size}: {size} data ranks x batch_size="
                f"{self.batch_size}. Use a smaller batch_size or seq_len, or more data."
            )
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        seed = None if overfit else self.seed
        return RowLoader(
            rows,
            lambda epoch: plan_training(
                len(rows), self.batch_size, rank=rank, size=size, seed=seed, epoch=epoch
            ),
            identity=self._identity(global_batch_size, num_rows=len(rows)),
            epoch_len=limit if isinstance(limit, int) else int(num_batches * limit),
            num_pending=partial(count_pending, self.trainer),
            num_workers=self.num_workers,
        )

    def _identity(self, global_batch_size: int, **more: int) -> dict[str, int]:
        same = {"seed": self.seed, "seq_len": self.seq_len}
        return {**same, "global_batch_size": global_batch_size, **more}

    def val_dataloader(self) -> RowLoader | list[Any]:
        """Return the loader of this data rank, or an empty list, which Lightning skips."""
        rows = self.val_rows()
        if rows is None:
            return []
        rank, size = find_data_rank(self.trainer)
        plan = plan_evaluation(len(rows), self.batch_size, rank=rank, size=size)
        return RowLoader(rows, lambda _: plan, num_workers=self.num_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return where training is. The fit loop saves it too, but forgets it between epochs."""
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next train loader go on from there."""
        self._position = state_dict["train"]


class PackedRows:
    """Rows in an Arrow file, memory-mapped."""

    def __init__(self, file: Path) -> None:
        import datasets  # type: ignore[import-untyped]  # it takes seconds, and pass keys need none

        self._table = datasets.Dataset.from_file(str(file)).with_format("numpy")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Batch:
        return as_tensors(self._table[index])


class PackedData(RowsData):
    """Records of a source, tokenised and packed into rows once, and memory-mapped from then on.

    `prepare_data` does the work, in one process per node; a file whose name depends on all that the
    rows depend on is the cache. See `TextData` for the arguments.
    """

    column_option: str
    """The name of the option that names the column, for messages."""

    def __init__(
        self,
        source: str | None,
        *,
        column: str,
        seq_len: int,
        batch_size: int,
        tokenizer: str | None,
        long_documents: LongDocuments,
        val_fraction: float,
        val_source: str | None,
        max_documents: int | None,
        streaming: bool,
        config_name: str | None,
        split: str,
        num_workers: int,
        seed: int,
        cache_dir: str | None,
    ) -> None:
        super().__init__(seq_len=seq_len, batch_size=batch_size, num_workers=num_workers, seed=seed)
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction}: give a share from 0 to below 1.")
        if max_documents is not None and max_documents < 1:
            raise ValueError(f"max_documents={max_documents}: give at least 1, or None for all.")
        if streaming and val_fraction and val_source is None:
            raise ValueError(
                f"streaming=True cannot set val_fraction={val_fraction} of the documents aside: "
                "nobody knows how many there are. Give val_source=..., or val_fraction=0."
            )
        pack([], seq_len, long_documents=long_documents)  # a wrong word is refused here already
        self.source, self.val_source = source, val_source
        self.config_name, self.split = config_name, split
        self.column = column
        self.long_documents = long_documents
        self.val_fraction = 0.0 if val_source is not None else val_fraction
        self.max_documents = max_documents
        self.streaming = streaming
        self.cache_dir = cache_dir
        self._tokenizer_name = tokenizer
        self._tables: dict[Split, PackedRows] = {}

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Return the documents that values of the column mean.

        Args:
            values: as they are in the source.
            numbers: of their records, for messages.
        """
        raise NotImplementedError

    def column_of(self, known: Collection[str]) -> str:
        """Return the column to read, of those that there are."""
        return self.column

    def options(self) -> dict[str, Any]:
        """Return what else the rows depend on."""
        return {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded when it is first used."""
        return load_tokenizer(self._tokenizer_name)

    @cached_property
    def _sources(self) -> dict[Split, Source]:
        # Not in __init__(): jsonargparse would bury the message of a missing file in its own.
        mine = find_source(self.source, config_name=self.config_name, split=self.split)
        return {
            "train": mine,
            "val": mine if self.val_source is None else find_source(self.val_source),
        }

    # ---------------------------------------------------------------- rows on disk

    def prepare_data(self) -> None:
        """Tokenise and pack what is not on disk yet."""
        for split, file in self._files().items():
            if not file.exists():
                self._pack_to(file, split)

    def setup(self, stage: str) -> None:
        """Map the rows into memory."""
        super().setup(stage)
        for split, file in self._files().items():
            if not file.exists():
                raise RuntimeError(
                    f"{type(self).__name__} has not packed its rows yet. Call prepare_data() "
                    "before setup(); a Trainer does so, on each node."
                )
            self._tables[split] = PackedRows(file)

    def train_rows(self) -> Rows:
        """Return the packed rows to train on."""
        return self._tables["train"]

    def val_rows(self) -> Rows | None:
        """Return the packed rows to validate with."""
        return self._tables.get("val")

    def _build_train_loader(self) -> ResumableLoader:
        if not self.streaming:
            return super()._build_train_loader()
        rank, size = find_data_rank(self.trainer)
        limit = None if self.trainer is None else self.trainer.limit_train_batches
        return StreamLoader(
            partial(self._pack, "train"),
            self.batch_size,
            rank=rank,
            size=size,
            identity=self._identity(size * self.batch_size),
            epoch_len=limit if isinstance(limit, int) else None,
            num_pending=partial(count_pending, self.trainer),
            num_workers=self.num_workers,
        )

    def _files(self) -> dict[Split, Path]:
        splits: list[Split] = [] if self.streaming else ["train"]
        if self.val_fraction or self.val_source is not None:
            splits.append("val")
        import datasets

        root = Path(self.cache_dir or datasets.config.HF_DATASETS_CACHE).expanduser() / "packed"
        return {split: root / f"{split}-{self._fingerprint(split)}.arrow" for split in splits}

    def _fingerprint(self, split: Split) -> str:
        """Return a name for all that the rows depend on, the same in every process."""
        told = {
            "format": _FORMAT,
            "kind": type(self).__name__,
            "source": self._sources[split].fingerprint(),
            "column": self.column,
            "tokenizer": self._tokenizer_text,
            "seq_len": self.seq_len,
            "long_documents": self.long_documents,
            "documents": self.max_documents if self._takes_from_source(split) else None,
            "aside": [self.val_fraction, self.seed] if self.val_fraction else None,
            **self.options(),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _tokenizer_text(self) -> str:
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocab = tokenizer.get_vocab() if backend is None else backend.to_str()
        special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
        return json.dumps([vocab, special, tokenizer.chat_template], sort_keys=True)

    def _takes_from_source(self, split: Split) -> bool:
        return split == "train" or self.val_source is None

    def _pack_to(self, file: Path, split: Split) -> None:
        start = time.monotonic()
        num_rows, num_tokens = write_rows(file, self._pack(split), self.seq_len)
        name = self._sources[split].name
        if not num_rows:
            file.unlink()
            raise ValueError(f"source={name!r} gave no token for {split}. Is the column empty?")
        print(
            f"{split}: {num_tokens:,} tokens of {name} in {num_rows:,} rows of {self.seq_len:,}, "
            f"packed in {time.monotonic() - start:.1f} s: {file}"
        )

    def _pack(self, split: Split) -> Iterator[Row]:
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:  # padding is not seen by anything; any token will do
            pad_id = self.tokenizer.eos_token_id or 0
        documents = self._documents(split)
        return pack(documents, self.seq_len, long_documents=self.long_documents, pad_id=pad_id)

    def _documents(self, split: Split) -> Iterator[Document]:
        for chunk in _chunks(self._records(split), _CHUNK_RECORDS):
            numbers, values = zip(*chunk, strict=True)
            yield from self.encode(list(values), list(numbers))

    def _records(self, split: Split) -> Iterator[tuple[int, Any]]:
        """Give the values of the column, each with the number of its record."""
        source = self._sources[split]
        streaming = self.streaming and split == "train"
        records = source.read(streaming=streaming, cache_dir=self.cache_dir)
        check = partial(check_column, source=source.name, option=self.column_option)
        limit = self.max_documents if self._takes_from_source(split) else None
        if streaming:  # a stream may not know its columns before it has begun
            for number, record in enumerate(islice(records, limit)):
                column = self.column_of(record)
                check(record, column)
                yield number, record[column]
            return
        column = self.column_of(records.column_names)
        check(records.column_names, column)
        for number in self._chosen(split, min(len(records), limit or len(records)), source.name):
            yield number, records[number][column]

    def _chosen(self, split: Split, num_documents: int, name: str) -> list[int]:
        """Return which documents are of this split: whole ones, or rows would leak."""
        if not self.val_fraction or not self._takes_from_source(split):
            return list(range(num_documents))
        if num_documents < 2:
            raise ValueError(
                f"source={name!r} has {num_documents} document, of which val_fraction="
                f"{self.val_fraction} cannot be set aside. Give val_source=..., or val_fraction=0."
            )
        num_val = min(max(1, round(num_documents * self.val_fraction)), num_documents - 1)
        aside = np.random.default_rng(self.seed).permutation(num_documents)[:num_val].tolist()
        kept = aside if split == "val" else set(range(num_documents)).difference(aside)
        return sorted(kept)


def write_rows(file: Path, rows: Iterable[Row], seq_len: int) -> tuple[int, int]:
    """Write rows to an Arrow file, which takes its name at the end; count rows and tokens.

    Fixed-size lists of int32 are read back without a copy, and a killed run leaves no half file.
    """
    import pyarrow as pa  # type: ignore[import-untyped]

    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{uuid.uuid4().hex}.tmp")  # other nodes may pack it, too
    schema = pa.schema([(name, pa.list_(pa.int32(), seq_len)) for name in COLUMNS])
    num_rows = num_tokens = 0
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for chunk in _chunks(rows, max(1, _CHUNK_TOKENS // seq_len)):
                flat = [np.concatenate([row[name] for row in chunk]) for name in COLUMNS]
                lists = [pa.FixedSizeListArray.from_arrays(pa.array(x), seq_len) for x in flat]
                writer.write_batch(pa.record_batch(lists, schema=schema))
                num_rows += len(chunk)
                num_tokens += sum(int((row["document_ids"] >= 0).sum()) for row in chunk)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_rows, num_tokens


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
