# SPDX-License-Identifier: Apache-2.0
"""The base classes of the data modules: loaders that resume, and packed samples on disk.

`SampleData` knows samples and Lightning; `PackedData` also sources and tokens. `text.py` and
`chat.py` turn records into documents.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, Final, Literal

import numpy as np
from lightning.pytorch import LightningDataModule
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerBase

from recipes.data.loader import (
    Batch,
    SampleLoader,
    Samples,
    count_pending,
    find_data_rank,
    plan_evaluation,
    plan_training,
)
from recipes.data.packing import COLUMNS, Document, LongDocuments, Sample, pack
from recipes.data.sources import DataSource, check_column, find_source
from recipes.tokens import load_tokenizer

Split = Literal["train", "val"]

_FORMAT: Final = 1
"""Increment it when the same source and options give other samples: caches are then rebuilt."""

_CHUNK_TOKENS: Final = 2**20
_CHUNK_RECORDS: Final = 64


class SampleData(LightningDataModule):
    """Samples for training and validation, read by data rank.

    In training samples are shuffled by seed and epoch, and an epoch drops samples that do not fill
    a global batch; in validation every sample counts once. A checkpoint holds the next batch.

    Args:
        seq_len: tokens per sample.
        batch_size: samples per data rank.
        num_workers: processes that read ahead.
        seed: of the order of samples.
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
        self._train_loader: SampleLoader | None = None
        self._position: dict[str, int] | None = None

    def __str__(self) -> str:
        # Lightning's __str__ would build loaders, and knows only torch's.
        return f"{type(self).__name__}(seq_len={self.seq_len}, batch_size={self.batch_size})"

    def train_samples(self) -> Samples:
        """Return the samples to train on."""
        raise NotImplementedError

    def collate(self, split: Split, samples: list[Batch]) -> Batch:
        """Build a batch of samples; called where samples are read, by the workers if there are any.

        Args:
            split: that the samples belong to.
            samples: of a batch.
        """
        return dict(default_collate(samples))

    def val_samples(self) -> Samples | None:
        """Return the samples to validate with, or None."""
        raise NotImplementedError

    def setup(self, stage: str) -> None:
        """Reset the state of a former run."""
        self._train_loader = self._position = None

    def train_dataloader(self) -> SampleLoader:
        """Return the loader of this data rank, the same one for every call."""
        if self._train_loader is None:
            self._train_loader = self._build_train_loader()
            if self._position is not None:
                self._train_loader.load_state_dict(self._position)
        return self._train_loader

    def _count_batches(self) -> int:
        """Return the number of batches of an epoch; raise if there is none."""
        samples = self.train_samples()
        _, size = find_data_rank(self.trainer)
        num_batches = len(samples) // (size * self.batch_size)
        if not num_batches:
            raise ValueError(
                f"There are {len(samples)} samples of {self.seq_len} tokens to train on, but a "
                f"global batch takes {size * self.batch_size}: {size} data ranks x batch_size="
                f"{self.batch_size}. Use a smaller batch_size or seq_len, or more data."
            )
        return num_batches

    def _build_train_loader(self) -> SampleLoader:
        samples, num_batches = self.train_samples(), self._count_batches()
        rank, size = find_data_rank(self.trainer)
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        seed = None if overfit else self.seed
        return SampleLoader(
            samples,
            lambda epoch: plan_training(
                len(samples), self.batch_size, rank=rank, size=size, seed=seed, epoch=epoch
            ),
            identity=self._identity(size * self.batch_size, num_rows=len(samples)),
            epoch_len=limit if isinstance(limit, int) else int(num_batches * limit),
            num_pending=partial(count_pending, self.trainer),
            num_workers=self.num_workers,
            collate=partial(self.collate, "train"),
        )

    def _identity(self, global_batch_size: int, **more: int) -> dict[str, int]:
        common = {"seed": self.seed, "seq_len": self.seq_len}
        return {**common, "global_batch_size": global_batch_size, **more}

    def val_dataloader(self) -> SampleLoader | list[Any]:
        """Return the loader of this data rank, or an empty list, which Lightning skips."""
        samples = self.val_samples()
        if samples is None:
            return []
        rank, size = find_data_rank(self.trainer)
        plan = plan_evaluation(len(samples), self.batch_size, rank=rank, size=size)
        return SampleLoader(
            samples,
            lambda _: plan,
            num_workers=self.num_workers,
            collate=partial(self.collate, "val"),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the next batch. The fit loop saves it too, but loses it between epochs."""
        return {} if self._train_loader is None else {"train": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next train loader continue from a saved batch."""
        self._position = state_dict["train"]


@dataclass(frozen=True)
class PackingOptions:
    """Options of data modules that pack documents.

    Args:
        seq_len: tokens per sample.
        batch_size: samples per data rank.
        tokenizer: a folder or a name on the hub; None: bytes.
        long_documents: ``split`` fills every sample and splits documents at its end; ``refuse`` and
            ``truncate`` do not split documents, and pad.
        val_fraction: fraction of the documents that is set aside for validation.
        val_source: validate with these documents instead.
        max_documents: read at most this number of documents.
        config_name: the configuration of a hub source.
        split: the split of a hub source, or of a saved folder with several.
        num_workers: processes that read ahead.
        seed: of the order of samples and of the documents set aside.
        cache_dir: folder of packed samples; by default the cache of `datasets`.
    """

    seq_len: int = 2048
    batch_size: int = 1
    tokenizer: str | None = None
    long_documents: LongDocuments = "split"
    val_fraction: float = 0.05
    val_source: str | None = None
    max_documents: int | None = None
    config_name: str | None = None
    split: str = "train"
    num_workers: int = 0
    seed: int = 0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(
                f"val_fraction={self.val_fraction}: give a fraction from 0 to below 1."
            )
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(
                f"max_documents={self.max_documents}: give at least 1, or None for all."
            )
        pack([], 1, long_documents=self.long_documents)  # raises for a wrong value


class PackedData(SampleData):
    """Records of a source, tokenized and packed into samples once, then memory-mapped.

    `prepare_data` does the work, in one process per node. The samples are kept in the cache of
    `datasets`, under a hash of everything that they depend on.

    Args:
        source: as in `TextData`.
        column: the column to read.
        options: of packing.
    """

    column_option: str
    """The name of the option for the column, for messages."""

    columns: tuple[str, ...] = COLUMNS
    """The keys of a sample, each with a value per token."""

    lists: tuple[str, ...] = ()
    """Keys with any number of values."""

    def __init__(self, source: str | None, *, column: str, options: PackingOptions) -> None:
        super().__init__(
            seq_len=options.seq_len,
            batch_size=options.batch_size,
            num_workers=options.num_workers,
            seed=options.seed,
        )
        self.source, self.column, self.options = source, column, options
        self.val_fraction = 0.0 if options.val_source is not None else options.val_fraction
        self._tables: dict[Split, Any] = {}

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Return the documents of some values of the column.

        Args:
            values: as in the source.
            numbers: the indices of their records, for messages.
        """
        raise NotImplementedError

    def column_of(self, known: Collection[str]) -> str:
        """Return the column to read, given the columns of the source."""
        return self.column

    def value_of(self, record: Any, column: str) -> Any:
        """Return what `encode` gets of a record."""
        return record[column]

    def fingerprint_options(self) -> dict[str, Any]:
        """Return other options that the samples depend on."""
        return {}

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded when it is first used."""
        return load_tokenizer(self.options.tokenizer)

    @cached_property
    def _sources(self) -> dict[Split, DataSource]:
        # Not in __init__(): jsonargparse would hide the message of a missing file in its own.
        train = find_source(
            self.source, config_name=self.options.config_name, split=self.options.split
        )
        return {
            "train": train,
            "val": train
            if self.options.val_source is None
            else find_source(self.options.val_source),
        }

    # ---------------------------------------------------------------- samples on disk

    def prepare_data(self) -> None:
        """Tokenize and pack what is not on disk yet."""
        for split in self._splits():
            self._open(split)

    def setup(self, stage: str) -> None:
        """Map the samples into memory."""
        super().setup(stage)
        self._tables = {split: self._open(split).with_format("torch") for split in self._splits()}
        if stage == "fit":
            self._count_batches()  # now: afterwards the model is built

    def _splits(self) -> list[Split]:
        has_val = self.val_fraction or self.options.val_source is not None
        return ["train", "val"] if has_val else ["train"]

    def _open(self, split: Split) -> Any:
        """Return the samples of a split from the cache of `datasets`; pack them if need be."""
        import datasets  # type: ignore[import-untyped]  # slow to import, and not needed for pass keys

        lengths = dict.fromkeys(self.columns, self.seq_len) | dict.fromkeys(self.lists, -1)
        ints = datasets.Value("int32")
        features = {name: datasets.List(ints, length=length) for name, length in lengths.items()}
        try:
            return datasets.Dataset.from_generator(
                self._pack,
                gen_kwargs={"split": split},
                features=datasets.Features(features),
                fingerprint=self._fingerprint(split),
                cache_dir=self.options.cache_dir,
                writer_batch_size=max(1, _CHUNK_TOKENS // self.seq_len),
            )
        except datasets.exceptions.DatasetGenerationError as error:
            raise error.__cause__ or error from None  # it says which record is wrong

    def train_samples(self) -> Samples:
        """Return the packed samples to train on."""
        samples: Samples = self._tables["train"]
        return samples

    def val_samples(self) -> Samples | None:
        """Return the packed samples to validate with."""
        return self._tables.get("val")

    def _fingerprint(self, split: Split) -> str:
        """Return a hash of everything that the samples depend on."""
        content = {
            "format": _FORMAT,
            "kind": type(self).__name__,
            "split": split,
            "source": self._sources[split].fingerprint(),
            "column": self.column,
            "tokenizer": self._tokenizer_text,
            "seq_len": self.seq_len,
            "long_documents": self.options.long_documents,
            "documents": self.options.max_documents if self._takes_from_source(split) else None,
            "aside": [self.val_fraction, self.seed] if self.val_fraction else None,
            **self.fingerprint_options(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _tokenizer_text(self) -> str:
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocab = tokenizer.get_vocab() if backend is None else backend.to_str()
        special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
        return json.dumps([vocab, special, tokenizer.chat_template], sort_keys=True)

    def _takes_from_source(self, split: Split) -> bool:
        return split == "train" or self.options.val_source is None

    def _pack(self, split: Split) -> Iterator[Sample]:
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:  # nothing sees padding; any token will do
            pad_id = self.tokenizer.eos_token_id or 0
        documents, long_documents = self._documents(split), self.options.long_documents
        is_empty = True
        for sample in pack(documents, self.seq_len, long_documents=long_documents, pad_id=pad_id):
            is_empty = False
            yield sample
        if is_empty:
            raise ValueError(
                f"source={self._sources[split].name!r} has no tokens for {split}. Check that the "
                "column is not empty."
            )

    def _documents(self, split: Split) -> Iterator[Document]:
        records = self._records(split)
        while chunk := list(islice(records, _CHUNK_RECORDS)):
            numbers, values = zip(*chunk, strict=True)
            yield from self.encode(list(values), list(numbers))

    def _records(self, split: Split) -> Iterator[tuple[int, Any]]:
        """Yield the values of the column, each with the index of its record."""
        source = self._sources[split]
        records = source.read(self.options.cache_dir)
        limit = self.options.max_documents if self._takes_from_source(split) else None
        num_documents = min(len(records), limit or len(records))
        for number in self._chosen(split, num_documents, source.name):
            record = records[number]
            column = self.column_of(record)
            check_column(record, column, source=source.name, option=self.column_option)
            yield number, self.value_of(record, column)

    def _chosen(self, split: Split, num_documents: int, name: str) -> list[int]:
        """Return the documents of a split; splits are by document, so that no text is in both."""
        if not self.val_fraction or not self._takes_from_source(split):
            return list(range(num_documents))
        if num_documents < 2:
            raise ValueError(
                f"source={name!r} has {num_documents} document, so val_fraction="
                f"{self.val_fraction} cannot be set aside. Give val_source=..., or val_fraction=0."
            )
        num_val = min(max(1, round(num_documents * self.val_fraction)), num_documents - 1)
        held_out = np.random.default_rng(self.seed).permutation(num_documents)[:num_val].tolist()
        chosen = held_out if split == "val" else set(range(num_documents)).difference(held_out)
        return sorted(chosen)
