# SPDX-License-Identifier: Apache-2.0
"""Conversations as packed rows in which only what the assistant says is learned."""

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from lightning_cp.step import IGNORED_LABEL
from recipes.data.module import PackedData
from recipes.data.packing import Document, LongDocuments, document

Message = dict[str, Any]


class ChatData(PackedData):
    """Conversations, rendered by the tokenizer's chat template; labels on assistant tokens only.

    Sources, packing, caching and resuming are those of `TextData`. Conversations stay whole unless
    ``long_documents`` is ``split``: half of one would be an answer without its question.

    Args:
        source: as in `TextData`; there is no embedded one.
        seq_len: tokens per row.
        batch_size: rows per data rank.
        messages_column: the column that holds the list of messages, each with ``role`` and
            ``content``, or of the ShareGPT kind, with ``from`` and ``value``. Where there is no
            ``messages``, ``conversations`` is read.
        tokenizer: a folder or a name on the hub, with a chat template; None: bytes.
        chat_template: a Jinja file to use instead of the tokenizer's own template. ``chatml`` is
            one that is here: Qwen's format, without its thinking, and with answers marked.
        long_documents: what to do with a conversation that is longer than a row.
        val_fraction: share of the conversations that is set aside for validation.
        val_source: validate with these conversations instead.
        max_documents: read no more than so many.
        streaming: as in `TextData`.
        config_name: the configuration of a hub source.
        split: the split of a hub source.
        num_workers: processes that read ahead; when streaming, at most one.
        seed: of the order of rows and of the conversations set aside.
        cache_dir: where packed rows are kept.

    Example:
        >>> data = ChatData("conversations.jsonl", seq_len=4096)
    """

    column_option = "messages_column"

    def column_of(self, known: Collection[str]) -> str:
        """Return the column to read: that of the ShareGPT kind where the usual one is missing."""
        usual = self.column == "messages" and "messages" not in known
        return "conversations" if usual and "conversations" in known else self.column

    def __init__(
        self,
        source: str,
        *,
        seq_len: int = 2048,
        batch_size: int = 1,
        messages_column: str = "messages",
        tokenizer: str | None = None,
        chat_template: str | None = None,
        long_documents: LongDocuments = "refuse",
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
            column=messages_column,
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
        self.chat_template = chat_template

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the template that was asked for."""
        tokenizer = super().tokenizer
        if self.chat_template is not None:
            tokenizer.chat_template = _read_template(self.chat_template)
        return tokenizer

    def prepare_data(self) -> None:
        """Tokenise and pack what is not on disk yet."""
        check_chat_template(self.tokenizer)
        super().prepare_data()

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Render and tokenise conversations."""
        for value, number in zip(values, numbers, strict=True):
            ids, mask = render(self.tokenizer, _messages(value, number), number)
            pairs = zip(ids, mask, strict=True)
            labels = [i if learned else IGNORED_LABEL for i, learned in pairs]
            yield document(ids, labels, number=number)


def _read_template(name: str) -> str:
    file = Path(__file__).parent / "chatml.jinja" if name == "chatml" else Path(name).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"chat_template={name!r}: there is no such file. Give a Jinja file, or 'chatml'."
        )
    return file.read_text()


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot render conversations, or not tell who said what."""
    name = tokenizer.name_or_path or "byte tokenizer"
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer {name!r} has no chat template, so conversations cannot be rendered. "
            "Use the tokenizer of a chat model, or set data.init_args.chat_template to a Jinja "
            "file, or to 'chatml'."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer {name!r} cannot say which characters a token came from, so assistant "
            "tokens cannot be found. Use a fast tokenizer (one with a tokenizer.json)."
        )


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], number: int
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and for each whether the assistant says it.

    A template with ``{% generation %}`` marks says so itself. For others the conversation is
    rendered up to each answer, and again with it: what is added is the answer, its end of turn
    included. That is true only if a template writes each turn without looking at later ones, which
    is checked.
    """
    if re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.get_chat_template())):
        marked: Any = tokenizer.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        ids, mask = list(marked["input_ids"]), [bool(x) for x in marked["assistant_masks"]]
    else:
        text, spans = _answers(tokenizer, messages, number)
        found = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids = list(found["input_ids"])
        places: list[tuple[int, int]] = found["offset_mapping"]
        mask = [any(a <= start and stop <= b for a, b in spans) for start, stop in places]
    if not any(mask) and any(m["role"] == "assistant" and m["content"] for m in messages):
        raise ValueError(
            f"The chat template marks no token of conversation {number} as the assistant's, though "
            "it has an answer. Check the {% generation %} marks of the template."
        )
    return ids, mask


def _answers(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], number: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text, and where each answer starts and stops in it."""

    def text_of(part: list[Message], *, asks: bool = False) -> str:
        return str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=asks))

    whole = text_of(messages)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = text_of(messages[:turn], asks=True) if turn else ""
        after = text_of(messages[: turn + 1])
        if not whole.startswith(after) or not after.startswith(before):
            raise ValueError(
                f"The chat template renders turn {turn} of conversation {number} differently "
                "depending on what follows, so its tokens cannot be told from the others'. Set "
                "data.init_args.chat_template to a Jinja file that marks them, {% generation %} "
                "... {% endgeneration %}, or to 'chatml'."
            )
        spans.append((len(before), len(after)))
    return whole, spans


_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
"""Who speaks in conversations of the ShareGPT kind, and how templates call them."""


def _renamed(message: Any, number: int) -> Any:
    """Return a message of the ShareGPT kind (``from``, ``value``) with role and content."""
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    role = _ROLES.get(str(message["from"]).lower())
    if role is None:
        raise ValueError(
            f"Conversation {number} has a message from {message['from']!r}. Known are "
            f"{', '.join(_ROLES)}: rename it, or give messages with `role` and `content`."
        )
    return {"role": role, "content": message.get("value")}


def _messages(value: Any, number: int) -> list[Message]:
    if isinstance(value, list):
        value = [_renamed(message, number) for message in value]
    good = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not good or not value:
        raise ValueError(
            f"Conversation {number} is not a list of messages with `role` and `content` (or "
            f"`from` and `value`), but {str(value)[:80]!r}. Name the column that holds one: "
            "messages_column=..."
        )
    messages: list[Message] = value
    return messages
