# SPDX-License-Identifier: Apache-2.0
"""`PairData`: prompts with a chosen and a rejected completion, as packed samples."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, Literal

import numpy as np

from lightning_cp.options import check_choice
from recipes.data.module import PackedData, PackingOptions, Split
from recipes.data.packing import Sample
from recipes.preference.pairs import PAIR_COLUMNS, REFERENCE, Pair, pack_pairs

LongPairs = Literal["refuse", "skip"]
STORED: Final = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns of stored log-probabilities; `lightning-cp reference` writes them."""


class PairData(PackedData):
    """Pairs of completions; both of a pair are in one sample, and their prompt is computed once.

    Sources, caching and resuming are those of `TextData`. Each record has a prompt and two
    completions, as text; the end-of-text token is added to completions.

    Args:
        source: as in `TextData`. None: pairs made of Python's standard library, to try things
            out: what follows a piece of code, and the tokens of another one in random order.
        prompt_column: the column of prompts.
        chosen_column: the column of preferred completions.
        rejected_column: the column of other completions.
        share_prompts: compute the prompt of a pair once, for both completions (``branch_ids``); for
            models whose layers have no windows. False: once for each.
        mismatched: add the chosen completion of another pair to each prompt, for KTO's estimate of
            the divergence.
        stored_reference: read log-probabilities of the reference from the columns
            ``ref_chosen_logps`` and ``ref_rejected_logps``.
        long_pairs: what to do with a pair that is longer than a sample.
        pairs_per_document: without a source, pairs of a module.
        options: as in `PackingOptions`.

    Example:
        >>> data = PairData("pairs.jsonl", seq_len=4096)
    """

    column_option = "prompt_column"

    def __init__(
        self,
        source: str | None = None,
        *,
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        share_prompts: bool = True,
        mismatched: bool = False,
        stored_reference: bool = False,
        long_pairs: LongPairs = "refuse",
        pairs_per_document: int = 8,
        **options: Any,
    ) -> None:
        check_choice("long_pairs", long_pairs, ("refuse", "skip"))
        if mismatched and stored_reference:
            raise ValueError(
                "mismatched=True adds completions whose log-probabilities are not stored. Use "
                "stored_reference=False, and a reference model or LoRA."
            )
        packing = PackingOptions(long_documents="refuse", **options)
        super().__init__(source, column=prompt_column, options=packing)
        self.chosen_column, self.rejected_column = chosen_column, rejected_column
        self.share_prompts, self.mismatched = share_prompts, mismatched
        self.stored_reference, self.long_pairs = stored_reference, long_pairs
        self.pairs_per_document = pairs_per_document
        self.columns = (*PAIR_COLUMNS, REFERENCE) if stored_reference else PAIR_COLUMNS

    @property
    def num_completions(self) -> int:
        """Return the number of completions of a prompt."""
        return 3 if self.mismatched else 2

    def fingerprint_options(self) -> dict[str, Any]:
        """Return other options that the samples depend on."""
        return {
            "pairs": [self.chosen_column, self.rejected_column, self.long_pairs],
            "share_prompts": self.share_prompts,
            "mismatched": self.mismatched,
            "stored": self.stored_reference,
            "made": None if self.source else [self.pairs_per_document, self.seed],
        }

    def column_of(self, known: Collection[str]) -> str:
        """Return the column of prompts; of modules, that of the text."""
        return "text" if self.source is None else self.column

    def value_of(self, record: Any, column: str) -> Any:
        """Return what a pair is made of."""
        if self.source is None:
            return record[column]
        names = (column, self.chosen_column, self.rejected_column)
        stored = STORED if self.stored_reference else ()
        for name in (*names, *stored):
            if name not in record:
                raise ValueError(
                    f"source={self.source!r} has no column {name!r}; it has {', '.join(record)}. "
                    "Name the columns: prompt_column=..., chosen_column=..., rejected_column=..."
                )
        return tuple(record[name] for name in (*names, *stored))

    def pairs_with_records(self) -> Iterator[tuple[dict[str, Any], Pair]]:
        """Yield each record of the source, and its pair."""
        records = self._sources["train"].read(cache_dir=self.options.cache_dir)
        for number, value in self._records("train"):
            yield records[number], self._read(value, number)

    def _pack(self, split: Split) -> Iterator[Sample]:
        pad_id = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
        pairs = self._fitting(self._documents(split))
        return pack_pairs(pairs, self.seq_len, share_prompt=self.share_prompts, pad_id=pad_id)

    def _fitting(self, pairs: Iterable[Any]) -> Iterator[Pair]:
        """Leave pairs out that do not fit into a sample, if that is allowed."""
        for pair in pairs:
            sizes = [len(x) for x in pair.completions]
            shared = len(pair.prompt) - 1 + sum(sizes) + len(sizes)
            size = shared if self.share_prompts else len(pair.prompt) * len(sizes) + sum(sizes)
            if size <= self.seq_len or self.long_pairs == "refuse":
                yield pair

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Any]:
        """Tokenize pairs; with ``mismatched``, give each a completion of the one before it."""
        if self.source is None:
            pairs = [
                pair
                for value, number in zip(values, numbers, strict=True)
                for pair in self._made(value, number)
            ]
        else:
            items = zip(values, numbers, strict=True)
            pairs = [self._read(value, number) for value, number in items]
        if not self.mismatched:
            return pairs
        if len(pairs) < 2:
            raise ValueError(
                "mismatched=True gives each prompt the completion of another pair, but there is "
                f"only {len(pairs)} pair to choose from. Give more pairs."
            )
        others = [pairs[-1], *pairs[:-1]]
        return [
            pair._replace(completions=(*pair.completions, other.completions[0]))
            for pair, other in zip(pairs, others, strict=True)
        ]

    def _read(self, value: tuple[Any, ...], number: int) -> Pair:
        texts, stored = value[:3], value[3:]
        if not all(isinstance(text, str) for text in texts) or not texts[0]:
            kinds = ", ".join(type(text).__name__ for text in texts)
            raise ValueError(
                f"Pair {number} holds {kinds}, but prompt, chosen and rejected are strings, and "
                "the prompt is not empty. Render conversations with a chat template first."
            )
        prompt, *answers = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        reference = tuple(float(x) for x in stored)
        completions = tuple(np.array([*ids, *self._end()], np.int32) for ids in answers)
        if not all(map(len, completions)):
            raise ValueError(
                f"Pair {number} has an empty completion, and the tokenizer no end-of-text token "
                "that could be scored. Leave such pairs out."
            )
        return Pair(np.array([*self._begin(), *prompt], np.int32), completions, reference, number)

    def _begin(self) -> list[int]:
        bos = self.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def _end(self) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return [] if eos is None else [eos]

    def _made(self, text: str, number: int) -> Iterator[Pair]:
        """Make pairs of a module's text, a function of the seed and its number."""
        encoded = self.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"]
        ids = np.array(encoded, np.int32)
        generator = np.random.default_rng([self.seed, number])
        longest = min(len(ids), self.seq_len // 2)
        for _ in range(self.pairs_per_document):
            size = int(generator.integers(16, max(17, longest // 2)))
            answers = [int(x) for x in generator.integers(4, max(5, longest // 8), 2)]
            if size + max(answers) >= len(ids):
                continue
            start = int(generator.integers(0, len(ids) - size - max(answers)))
            other = int(generator.integers(0, len(ids) - max(answers)))
            right = ids[start + size : start + size + answers[0]]
            wrong = generator.permutation(ids[other : other + answers[1]])
            yield Pair(ids[start : start + size], (right, wrong), (), number)
