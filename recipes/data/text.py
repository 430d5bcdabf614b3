# SPDX-License-Identifier: Apache-2.0
"""Plain text as packed samples."""

from collections.abc import Iterable
from typing import Any

from recipes.data.packed_data import PackedData, PackingOptions
from recipes.data.packing import Document, document


class TextData(PackedData):
    """Documents of plain text; every token of a document but its first is learned.

    Documents are tokenized and packed once, by one process per node, into an Arrow file that all
    processes map into memory; a second run reuses it.

    Args:
        source: a .jsonl / .json (or .gz of them) / .parquet / .csv / .txt file (a .txt is one
            document), a folder of such files or one that ``datasets.save_to_disk()`` wrote, or a
            name on the hub. None: the long modules of Python's standard library.
        text_column: the column of a .jsonl, .json, .parquet or hub source that holds the text.
        add_eos: end each document with the tokenizer's end-of-text token.
        options: as in `PackingOptions`.

    Example:
        >>> data = TextData(seq_len=4096, batch_size=2)
    """

    column_option = "text_column"

    def __init__(
        self,
        source: str | None = None,
        *,
        text_column: str = "text",
        add_eos: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(source, column=text_column, options=PackingOptions(**options))
        self.add_eos = add_eos

    def fingerprint_options(self) -> dict[str, Any]:
        """Return other options that the samples depend on."""
        return {"add_eos": self.add_eos}

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Tokenize texts; skip missing and empty ones."""
        for value, number in zip(values, numbers, strict=True):
            if not isinstance(value, str | None):
                raise TypeError(
                    f"Record {number} holds a {type(value).__name__} in "
                    f"{self.column!r}, but plain text is a string. Name another column: "
                    "text_column=..., or use ChatData for lists of messages."
                )
        by_number = {number: value for number, value in zip(numbers, values, strict=True) if value}
        if not by_number:
            return
        eos = self.tokenizer.eos_token_id
        if self.add_eos and eos is None:
            raise ValueError(
                "add_eos=True, but the tokenizer has no end-of-text token. Use add_eos=False."
            )
        texts = list(by_number.values())
        encoded = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        for number, ids in zip(by_number, encoded, strict=True):
            ends = self.add_eos and ids[-1:] != [eos]  # some tokenizers add it
            yield document([*ids, eos] if ends else ids, number=number)
