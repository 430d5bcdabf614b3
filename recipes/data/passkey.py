# SPDX-License-Identifier: Apache-2.0
"""Find a number in a long text: rows made from a seed, an exact score, a map length x depth.

Every row is a function of its number, so nothing is stored, any length will do, and workers need no
seed. Whether a row was answered is the same on all ranks that share it.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from transformers import PreTrainedTokenizerBase

from lightning_cp import active_step
from lightning_cp.data.sharding import unshard
from lightning_cp.step import IGNORED_LABEL
from recipes.data.loader import NO_ROW, Batch, as_tensors
from recipes.data.module import RowsData
from recipes.data.packing import Document, document, pack
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


class PasskeyData(RowsData):
    """Texts of filler with a key hidden in it, and at the end the question for it.

    The digits of the answer are the only labels. A training row is packed with as many texts as
    fit, each a document with its own key, depth and length: little is padding, and the short texts
    teach what the long ones need. A validation row holds one text and lies on the grid lengths x
    depths, with a key that training never shows; it is padded. Batches carry ``cell`` [batch], the
    row's place on the grid, row by row of it; -1 in training, and for rows that do not count.

    Args:
        seq_len: tokens per row.
        batch_size: rows per data rank.
        lengths: of the texts, each at most ``seq_len``; by default a quarter, a half and all of it.
        train_lengths: of the texts in training, drawn from those that fit into what is left of a
            row; one that is listed twice is drawn twice as often. By default ``lengths``.
        depths: where the key is hidden, from 0 (start) to 1 (just before the question).
        key_len: digits of a key.
        num_train_rows: rows of an epoch.
        val_rows_per_cell: how often each cell of the grid is tried.
        tokenizer: a folder or a name on the hub; None: bytes.
        num_workers: processes that make rows ahead.
        seed: of fillers, keys and depths, and of the order of rows.

    Example:
        >>> data = PasskeyData(seq_len=256, lengths=[128, 256], depths=[0.0, 0.5, 1.0])
        >>> data.setup("fit")
        >>> row = data.val_rows()[1]
        >>> data.tokenizer.decode(row["input_ids"][row["labels"] != -100])
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
        for name, given in self._all_lengths():
            if max(given) > seq_len:
                raise ValueError(
                    f"{name}={given}: a text of {max(given)} tokens does not fit into "
                    f"seq_len={seq_len}. Use shorter lengths or a larger seq_len."
                )
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={self.depths}: give shares from 0 (start) to 1 (end).")
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
        """Check that the shortest text holds key and question."""
        super().setup(stage)
        needed = self.train_rows().min_len
        for name, given in self._all_lengths():
            if min(given) < needed:
                raise ValueError(
                    f"{name}={given}: key and question alone take {needed} tokens of this "
                    f"tokenizer. Use lengths (or a seq_len) of at least {needed}."
                )

    def _all_lengths(self) -> Iterator[tuple[str, list[int]]]:
        yield "lengths", self.lengths
        yield "train_lengths", self.train_lengths

    def train_rows(self) -> "PasskeyRows":
        """Return the packed rows to train on."""
        return PasskeyRows(self, held_out=False)

    def val_rows(self) -> "PasskeyRows":
        """Return the rows on the grid."""
        return PasskeyRows(self, held_out=True)

    def build_metric(self) -> "RetrievalGrid":
        """Build what gathers the score of each cell."""
        return RetrievalGrid(len(self.lengths), len(self.depths))


class PasskeyRows:
    """Rows by their number.

    Args:
        data: the options.
        held_out: validation rows: one text each, on the grid, with keys that training never shows.
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
        """How many tokens a text takes without filler, at most."""
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
            cell, texts = NO_ROW, self._texts(generator)
        pad_id = data.tokenizer.pad_token_id or 0
        (row,) = pack(texts, data.seq_len, long_documents="refuse", pad_id=pad_id)
        return as_tensors({**row, "cell": cell})

    def _texts(self, generator: np.random.Generator) -> Iterator[Document]:
        """Give texts until none fits into what is left of a row."""
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
        room = length - len(self._start) - len(needle) - len(self._question) - len(key)
        words = generator.integers(len(self._words), size=room)  # a word has a token or more
        filler = [token for word in words for token in self._words[word]][:room]
        at = round(depth * room)
        asked = [*self._start, *filler[:at], *needle, *filler[at:], *self._question]
        return document([*asked, *key], [IGNORED_LABEL] * len(asked) + key)


def is_held_out(key: int) -> bool:
    """Say whether a key is for validation only: one in eight, whatever the seed."""
    return key * 2654435761 % 2**32 >> 29 == 0


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def retrieval_accuracy(logits: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return for each row whether all its labels were predicted exactly, bool [batch].

    Inside a step, logits and labels are this rank's, and a label's predecessor may be another's:
    the predicted tokens are put together first, and all ranks that share the row get the same.
    Teacher-forced: each token is predicted from the true ones before it. A row without labels was
    not answered.

    Args:
        logits: [batch, tokens, vocabulary].
        batch: what the step gave, with ``labels`` [batch, tokens].

    Example:
        >>> logits = torch.eye(4)[torch.tensor([[1, 2, 3, 0]])]
        >>> retrieval_accuracy(logits, {"labels": torch.tensor([[-100, -100, 2, 3]])}).tolist()
        [True]
    """
    predicted, labels = logits.argmax(-1), batch["labels"]
    step = active_step.current()
    if step is not None:
        predicted, labels = (
            unshard(x, 1, layout=step.layout, transport=step.groups.context)
            for x in (predicted, labels)
        )
    asked = labels[:, 1:] != IGNORED_LABEL
    right = predicted[:, :-1] == labels[:, 1:]
    answered: Tensor = (right | ~asked).all(1) & asked.any(1)
    return answered


class RetrievalGrid(Metric):
    """The share of rows answered, for each cell of a grid lengths x depths.

    Ranks that share rows count them alike, which changes no share.

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
        """Count rows; those of no cell are left out."""
        counts = cell >= 0
        cells, values = cell[counts], answered[counts].to(self.right)
        self.right.view(-1).index_add_(0, cells, values)
        self.total.view(-1).index_add_(0, cells, torch.ones_like(values))

    def compute(self) -> Tensor:
        """Return [lengths, depths]; NaN where no row was tried."""
        return self.right / self.total

    def mean(self) -> Tensor:
        """Return the mean over the cells that were tried."""
        return self.compute().nanmean()


def heat_map(
    accuracy: Tensor, lengths: list[int], depths: list[float], path: str | Path | None = None
) -> str:
    r"""Return the map length x depth as a table; draw it as a PNG too, if a path is given.

    Args:
        accuracy: [lengths, depths], from 0 to 1.
        lengths: names of the rows.
        depths: names of the columns.
        path: of the picture; without matplotlib the table says that there is none.

    Example:
        >>> print(heat_map(torch.tensor([[1.0, 0.5]]), [128], [0.0, 1.0]))
        length \ depth     0%   100%
                   128   1.00   0.50
    """
    lines = ["length \\ depth" + "".join(f"{depth:>7.0%}" for depth in depths)]
    for length, values in zip(lengths, accuracy.tolist(), strict=True):
        lines.append(f"{length:>14,}" + "".join(f"{value:>7.2f}" for value in values))
    if path is not None:
        lines.append(_draw(accuracy, lengths, depths, Path(path)))
    return "\n".join(lines)


def _draw(accuracy: Tensor, lengths: list[int], depths: list[float], path: Path) -> str:
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return f"{path} was not drawn: pip install matplotlib."
    figure = Figure(figsize=(1.5 + len(depths), 1.5 + 0.6 * len(lengths)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(accuracy.numpy(), vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_xlabel("depth of the key")
    axes.set_ylabel("tokens")
    figure.colorbar(image, label="keys found")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return f"drawn: {path}"
