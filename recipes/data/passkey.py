# SPDX-License-Identifier: Apache-2.0
"""The pass-key task: find a number in a long text. Samples, a metric and a table.

Every sample is a function of its index, so nothing is stored and workers need no seed. Context
ranks agree on whether a sample was answered.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from transformers import PreTrainedTokenizerBase

from lightning_cp import ContextParallel
from recipes.data.loader import NO_SAMPLE, Batch
from recipes.data.packed_data import SampleData
from recipes.data.packing import IGNORED_LABEL, Document, document, pack
from recipes.report import table
from recipes.tokens import load_tokenizer

NEEDLE: Final = " The pass key is "
NEEDLE_END: Final = ". Remember it."
QUESTION: Final = " What is the pass key? The pass key is "
_WORDS: Final = (
    "the a of to and in that it was for on as with his they at be this from have or by one had "
    "not but what all were when we there can an your which their said if do will each about how up "
    "out them then she many some so these would other into has more her two like him see time "
    "could no make than first been its who now people my made over did down only way find use may "
    "water long little very after words called just where most know"
)


class PasskeyData(SampleData):
    """Filler texts with a hidden key, and a question for it at the end.

    Only the digits of the answer are labels. A training sample is packed with texts, each a
    document with its own key, depth and length, so that there is little padding. A validation
    sample holds one text of a cell of the grid lengths x depths, with a key that training never
    shows, and is padded. Batches hold ``cell`` [batch], the row-major index of the cell; -1 in
    training, and for samples that do not count.

    Args:
        seq_len: tokens per sample.
        batch_size: samples per data rank.
        lengths: of the texts, each at most ``seq_len``; by default 1/4, 1/2 and all of it.
        train_lengths: of the texts in training, drawn from those that fit into the rest of a
            sample; one that is listed twice is drawn twice as often. By default ``lengths``.
        depths: position of the key, from 0 (start) to 1 (just before the question).
        key_len: digits of a key.
        num_train_rows: samples of an epoch.
        val_rows_per_cell: validation samples per cell of the grid.
        tokenizer: a folder or a name on the hub; None: bytes.
        num_workers: processes that build samples ahead.
        seed: of fillers, keys and depths, and of the order of samples.

    Example:
        >>> data = PasskeyData(seq_len=256, lengths=[128, 256], depths=[0.0, 0.5, 1.0])
        >>> data.setup("fit")
        >>> sample = data.val_samples()[1]
        >>> data.tokenizer.decode(sample["input_ids"][sample["labels"] != -100])
        '81761'
    """

    def __init__(
        self,
        *,
        seq_len: int = 1024,
        batch_size: int = 8,
        lengths: list[int] | None = None,
        train_lengths: list[int] | None = None,
        depths: list[float] | None = None,
        key_len: int = 5,
        num_train_rows: int = 4096,
        val_rows_per_cell: int = 4,
        tokenizer: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(seq_len=seq_len, batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.lengths = lengths or sorted({seq_len // 4, seq_len // 2, seq_len})
        self.train_lengths = train_lengths or self.lengths
        self.depths = depths or [0.0, 0.25, 0.5, 0.75, 1.0]
        for name, lengths in self._all_lengths():
            if max(lengths) > seq_len:
                raise ValueError(
                    f"{name}={lengths}: a text of {max(lengths)} tokens does not fit into "
                    f"seq_len={seq_len}. Use shorter lengths or a larger seq_len."
                )
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={self.depths}: give fractions from 0 (start) to 1 (end).")
        if not 2 <= key_len <= 18:
            raise ValueError(f"key_len={key_len}: give 2 to 18 digits.")
        self.key_len = key_len
        self.num_train_rows = num_train_rows
        self.val_rows_per_cell = val_rows_per_cell
        self._tokenizer_name = tokenizer

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, loaded when it is first used."""
        return load_tokenizer(self._tokenizer_name)

    def setup(self, stage: str) -> None:
        """Check that the shortest text holds key and question, and that there is a batch."""
        super().setup(stage)
        needed = self.train_samples().min_len
        for name, lengths in self._all_lengths():
            if min(lengths) < needed:
                raise ValueError(
                    f"{name}={lengths}: key and question alone take {needed} tokens of this "
                    f"tokenizer. Use lengths (or a seq_len) of at least {needed}."
                )
        if stage == "fit":
            self._count_batches()  # now: afterwards the model is built

    def _all_lengths(self) -> Iterator[tuple[str, list[int]]]:
        yield "lengths", self.lengths
        yield "train_lengths", self.train_lengths

    def train_samples(self) -> "PasskeySamples":
        """Return the packed samples to train on."""
        return PasskeySamples(self, held_out=False)

    def val_samples(self) -> "PasskeySamples":
        """Return the samples of the grid."""
        return PasskeySamples(self, held_out=True)

    def build_metric(self) -> "RetrievalGrid":
        """Build the metric that averages over each cell."""
        return RetrievalGrid(len(self.lengths), len(self.depths))


class PasskeySamples:
    """Samples by index.

    Args:
        data: the options.
        held_out: validation samples, with keys that training never shows.
    """

    def __init__(self, data: PasskeyData, *, held_out: bool) -> None:
        self._data = data
        self._held_out = held_out
        tokenizer = data.tokenizer
        self._start = _ids(tokenizer, "a", special=True)
        self._start = self._start[: self._start[:1] == [tokenizer.bos_token_id]]
        self._words = [_ids(tokenizer, f" {word}") for word in _WORDS.split()]
        self._needle, self._needle_end, self._question = (
            _ids(tokenizer, text) for text in (NEEDLE, NEEDLE_END, QUESTION)
        )

    @property
    def min_len(self) -> int:
        """The largest number of tokens of a text without filler."""
        fixed = (self._start, self._needle, self._needle_end, self._question)
        return sum(map(len, fixed)) + 2 * (self._data.key_len + 1)

    def __len__(self) -> int:
        data = self._data
        cells = len(data.lengths) * len(data.depths)
        return cells * data.val_rows_per_cell if self._held_out else data.num_train_rows

    def __getitem__(self, index: int) -> Batch:
        data = self._data
        generator = np.random.default_rng([data.seed, int(self._held_out), index])
        if self._held_out:
            cell = index % (len(data.lengths) * len(data.depths))
            length = data.lengths[cell // len(data.depths)]
            texts = iter([self._text(length, data.depths[cell % len(data.depths)], generator)])
        else:
            cell, texts = NO_SAMPLE, self._texts(generator)
        pad_id = data.tokenizer.pad_token_id or 0
        (sample,) = pack(texts, data.seq_len, long_documents="refuse", pad_id=pad_id)
        tensors = {name: torch.as_tensor(x, dtype=torch.int64) for name, x in sample.items()}
        return {**tensors, "cell": torch.tensor(cell)}

    def _texts(self, generator: np.random.Generator) -> Iterator[Document]:
        """Yield texts until none fits into the rest of a sample."""
        left = self._data.seq_len
        while fitting := [length for length in self._data.train_lengths if length <= left]:
            length = fitting[generator.integers(len(fitting))]
            yield self._text(length, generator.random(), generator)
            left -= length

    def _draw_key(self, generator: np.random.Generator) -> str:
        while True:
            key = int(generator.integers(10**self._data.key_len))
            if is_held_out(key) == self._held_out:
                return f"{key:0{self._data.key_len}d}"

    def _text(self, length: int, depth: float, generator: np.random.Generator) -> Document:
        key = _ids(self._data.tokenizer, self._draw_key(generator))
        needle = [*self._needle, *key, *self._needle_end]
        filler_len = length - len(self._start) - len(needle) - len(self._question) - len(key)
        words = generator.integers(len(self._words), size=filler_len)  # at least a token per word
        filler = [token for word in words for token in self._words[word]][:filler_len]
        at = round(depth * filler_len)
        prompt = [*self._start, *filler[:at], *needle, *filler[at:], *self._question]
        return document([*prompt, *key], [IGNORED_LABEL] * len(prompt) + key)


def is_held_out(key: int) -> bool:
    """Return whether a key is for validation only: one in eight, for any seed."""
    return key * 2654435761 % 2**32 >> 29 == 0


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def retrieval_accuracy(
    logits: Tensor, batch: dict[str, Any], *, cp: ContextParallel | None
) -> Tensor:
    """Return for each sample whether all labels were predicted exactly, bool [batch].

    Inside a step, logits and labels are those of this rank, and the token before a label may be on
    another rank: predicted tokens are unsharded first, and context ranks get the same result.
    Teacher-forced: each token is predicted from the true tokens before it. A sample without labels
    was not answered.

    Args:
        logits: [batch, tokens, vocabulary].
        batch: with ``labels`` [batch, tokens].
        cp: of the open step; None for full sequences outside of a step.

    Example:
        >>> logits = torch.eye(4)[torch.tensor([[1, 2, 3, 0]])]
        >>> batch = {"labels": torch.tensor([[-100, -100, 2, 3]])}
        >>> retrieval_accuracy(logits, batch, cp=None).tolist()
        [True]
    """
    predicted, labels = logits.argmax(-1), batch["labels"]
    if cp is not None:
        predicted, labels = cp.unshard(predicted, 1), cp.unshard(labels, 1)
    has_label = labels[:, 1:] != IGNORED_LABEL
    is_right = predicted[:, :-1] == labels[:, 1:]
    answered: Tensor = (is_right | ~has_label).all(1) & has_label.any(1)
    return answered


class RetrievalGrid(Metric):
    """The fraction of samples answered, for each cell of a grid lengths x depths.

    Every context rank counts each sample, which does not change fractions.

    Args:
        num_lengths: rows of the grid.
        num_depths: columns of the grid.

    Example:
        >>> grid = RetrievalGrid(1, 2)
        >>> grid.update(torch.tensor([True, True, False]), torch.tensor([0, 1, 1]))
        >>> grid.compute().tolist(), grid.mean().item()
        ([[1.0, 0.5]], 0.75)
    """

    right: Tensor
    total: Tensor

    def __init__(self, num_lengths: int, num_depths: int) -> None:
        super().__init__()
        zeros = torch.zeros(num_lengths, num_depths)
        self.add_state("right", zeros.clone(), dist_reduce_fx="sum")
        self.add_state("total", zeros.clone(), dist_reduce_fx="sum")

    def update(self, answered: Tensor, cell: Tensor) -> None:
        """Count samples; those without a cell are skipped."""
        counts = cell >= 0
        cells, values = cell[counts], answered[counts].to(self.right)
        self.right.view(-1).index_add_(0, cells, values)
        self.total.view(-1).index_add_(0, cells, torch.ones_like(values))

    def compute(self) -> Tensor:
        """Return [lengths, depths]; NaN for cells without samples."""
        return self.right / self.total

    def mean(self) -> Tensor:
        """Return the mean over the cells with samples."""
        return self.compute().nanmean()


def heat_map(accuracy: Tensor, lengths: list[int], depths: list[float]) -> str:
    r"""Return a table of length x depth.

    Args:
        accuracy: [lengths, depths], from 0 to 1.
        lengths: labels of the rows.
        depths: labels of the columns.

    Example:
        >>> print(heat_map(torch.tensor([[1.0, 0.5]]), [128], [0.0, 1.0]))
        | length \ depth | 0%   | 100% |
        | -------------- | ---- | ---- |
        | 128            | 1.00 | 0.50 |
    """
    rows = zip(lengths, accuracy.tolist(), strict=True)
    return table(
        ["length \\ depth", *(f"{depth:.0%}" for depth in depths)],
        ([f"{length:,}", *(f"{x:.2f}" for x in row)] for length, row in rows),
    )
