# SPDX-License-Identifier: Apache-2.0
"""Plain text as packed rows."""

from collections.abc import Iterable
from typing import Any

from recipes.data.module import PackedData
from recipes.data.packing import Document, LongDocuments, document


class TextData(PackedData):
    """Documents of plain text; every token but a document's first is learned.

    Rows are tokenised and packed once, by one process per node, into an Arrow file that all
    processes map into memory; a second run finds it there.

    Args:
        source: a .jsonl / .json (or .gz of them) / .parquet / .csv / .txt file (a .txt is one
            document), a folder of such or one that ``datasets.save_to_disk()`` wrote, or a name on
            the hub. None: the long modules of Python's own standard library.
        seq_len: tokens per row.
        batch_size: rows per data rank.
        text_column: the column of a .jsonl, .json, .parquet or hub source that holds the text.
        tokenizer: a folder or a name on the hub; None: bytes.
        add_eos: end each document with the tokenizer's end of text.
        long_documents: ``split`` fills every row and cuts documents at its end; ``refuse`` and
            ``truncate`` keep documents whole, and pad.
        val_fraction: share of the documents that is set aside for validation.
        val_source: validate with these documents instead.
        max_documents: read no more than so many.
        streaming: tokenise while training, in the source's order, without a copy on disk.
        config_name: the configuration of a hub source.
        split: the split of a hub source, or of a saved folder with several.
        num_workers: processes that read ahead; when streaming, at most one.
        seed: of the order of rows and of the documents set aside.
        cache_dir: where packed rows are kept; by default beside those of `datasets`.

    Example:
        >>> data = TextData(seq_len=4096, batch_size=2)
    """

    column_option = "text_column"

    def __init__(
        self,
        source: str | None = None,
        *,
        seq_len: int = 2048,
        batch_size: int = 1,
        text_column: str = "text",
        tokenizer: str | None = None,
        add_eos: bool = True,
        long_documents: LongDocuments = "split",
        val_fraction: float = 0.05,
        val_source: str | None = None,
        max_documents: int | None = None,
        streaming: bool = False,
        config_name: str | None = None,
        split: str = "train",
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            source,
            column=text_column,
            seq_len=seq_len,
            batch_size=batch_size,
            tokenizer=tokenizer,
            long_documents=long_documents,
            val_fraction=val_fraction,
            val_source=val_source,
            max_documents=max_documents,
            streaming=streaming,
            config_name=config_name,
            split=split,
            num_workers=num_workers,
            seed=seed,
            cache_dir=cache_dir,
        )
        self.add_eos = add_eos

    def options(self) -> dict[str, Any]:
        """Return what else the rows depend on."""
        return {"add_eos": self.add_eos}

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Tokenise texts; one that is missing or empty gives no document."""
        for value, number in zip(values, numbers, strict=True):
            if not isinstance(value, str | None):
                raise TypeError(
                    f"Record {number} holds a {type(value).__name__} in "
                    f"{self.column!r}, but plain text is a string. Name another column: "
                    "text_column=..., or use ChatData for lists of messages."
                )
        named = {number: value for number, value in zip(numbers, values, strict=True) if value}
        if not named:
            return
        eos = self.tokenizer.eos_token_id
        if self.add_eos and eos is None:
            raise ValueError(
                "add_eos=True, but the tokenizer has no end-of-text token. Use add_eos=False."
            )
        texts = list(named.values())
        encoded = self.tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        for number, ids in zip(named, encoded, strict=True):
            ends = self.add_eos and ids[-1:] != [eos]  # some tokenizers add it themselves
            yield document([*ids, eos] if ends else ids, number=number)
