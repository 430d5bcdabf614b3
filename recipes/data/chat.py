# SPDX-License-Identifier: Apache-2.0
"""Conversations as packed samples in which only assistant tokens are learned."""

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from recipes.data.packed_data import PackedData, PackingOptions
from recipes.data.packing import IGNORED_LABEL, Document, LongDocuments, document

Message = dict[str, Any]


class ChatData(PackedData):
    """Conversations, rendered with the tokenizer's chat template; labels on assistant tokens only.

    Sources, packing, caching and resuming are those of `TextData`. Conversations are not split
    unless ``long_documents`` is ``split``: half of one could be an answer without its question.

    Args:
        source: as in `TextData`; required.
        messages_column: the column that holds the list of messages, each with ``role`` and
            ``content``, or in ShareGPT format, with ``from`` and ``value``. If there is no
            ``messages``, ``conversations`` is read.
        chat_template: a Jinja file to use in place of the tokenizer's template. ``chatml`` is
            included: Qwen's format, without thinking, and with answers marked.
        long_documents: what to do with a conversation that is longer than a sample.
        options: as in `PackingOptions`.

    Example:
        >>> data = ChatData("conversations.jsonl", seq_len=4096)
    """

    column_option = "messages_column"

    def column_of(self, known: Collection[str]) -> str:
        """Return the column to read: that of ShareGPT if the default one is missing."""
        is_missing = self.column == "messages" and "messages" not in known
        return "conversations" if is_missing and "conversations" in known else self.column

    def __init__(
        self,
        source: str,
        *,
        messages_column: str = "messages",
        chat_template: str | None = None,
        long_documents: LongDocuments = "refuse",
        **options: Any,
    ) -> None:
        packing = PackingOptions(long_documents=long_documents, **options)
        super().__init__(source, column=messages_column, options=packing)
        self.chat_template = chat_template

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with ``chat_template``."""
        tokenizer = super().tokenizer
        if self.chat_template is not None:
            tokenizer.chat_template = read_template(self.chat_template)
        return tokenizer

    def prepare_data(self) -> None:
        """Tokenize and pack what is not on disk yet."""
        name = f"tokenizer {self.tokenizer.name_or_path or 'byte tokenizer'!r}"
        check_chat_template(name, self.tokenizer.chat_template, self.tokenizer)
        super().prepare_data()

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Render and tokenize conversations."""
        for value, number in zip(values, numbers, strict=True):
            messages = read_messages(value, number, content=str)
            ids, mask = render(self.tokenizer, messages, number)
            pairs = zip(ids, mask, strict=True)
            labels = [i if is_learned else IGNORED_LABEL for i, is_learned in pairs]
            yield document(ids, labels, number=number)


def read_template(name: str) -> str:
    """Return the text of a template: a file, or ``chatml``."""
    file = Path(__file__).parent / "chatml.jinja" if name == "chatml" else Path(name).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"chat_template={name!r}: there is no such file. Give a Jinja file, or 'chatml'."
        )
    return file.read_text()


def check_chat_template(name: str, template: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise for what cannot render conversations, or not locate answers.

    Args:
        name: of the tokenizer or the processor, for messages.
        template: its chat template.
        tokenizer: that runs on what the template renders.
    """
    if not template:
        raise ValueError(
            f"The {name} has no chat template, so conversations cannot be rendered. Use that of a "
            "chat model, or set data.init_args.chat_template to a Jinja file (for text also to "
            "'chatml'; for media it takes content in parts)."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"The {name} does not map tokens to characters, so assistant tokens cannot be located. "
            "Use one with a fast tokenizer (a tokenizer.json)."
        )


def marks_answers(template: str) -> bool:
    """Return whether a template says which part of it is the assistant's."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], number: int
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and for each whether it is the assistant's.

    A template with ``{% generation %}`` marks states it. For others the conversation is rendered up
    to each answer, and again with it: the difference is the answer, with its end of turn. This
    needs a template that renders each turn independently of later ones, which is checked.
    """
    if marks_answers(str(tokenizer.get_chat_template())):
        marked: Any = tokenizer.apply_chat_template(
            messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        ids, mask = list(marked["input_ids"]), [bool(x) for x in marked["assistant_masks"]]
    else:
        text, spans = answer_spans(tokenizer, messages, number)
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids = list(encoded["input_ids"])
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]
        mask = [any(a <= start and stop <= b for a, b in spans) for start, stop in offsets]
    check_learned(mask, [m["content"] for m in messages if m["role"] == "assistant"], number)
    return ids, mask


def check_learned(mask: Iterable[bool], answers: Iterable[Any], number: int) -> None:
    """Raise for a conversation with answers of which no token is learned."""
    if not any(mask) and any(answers):
        raise ValueError(
            f"The chat template marks no token of conversation {number} as the assistant's, though "
            "it has an answer. Check the {% generation %} marks of the template."
        )


def answer_spans(
    renderer: Any, messages: list[Message], number: int
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text, and the start and stop of each answer in it.

    Args:
        renderer: a tokenizer or a processor.
        messages: of the conversation.
        number: of the conversation, for messages.
    """

    def text_of(part: list[Message], *, prompt: bool = False) -> str:
        return str(renderer.apply_chat_template(part, tokenize=False, add_generation_prompt=prompt))

    full = text_of(messages)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = text_of(messages[:turn], prompt=True) if turn else ""
        after = text_of(messages[: turn + 1])
        if not full.startswith(after) or not after.startswith(before):
            raise ValueError(
                f"The chat template renders turn {turn} of conversation {number} differently "
                "depending on later turns, so its tokens cannot be located. Set "
                "data.init_args.chat_template to a Jinja file that marks them, {% generation %} "
                "... {% endgeneration %}, or to 'chatml'."
            )
        spans.append((len(before), len(after)))
    return full, spans


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
"""Roles of chat templates, by the senders of ShareGPT conversations."""


def read_messages(value: Any, number: int, *, content: Any = object) -> list[Message]:
    """Return the messages of a conversation, with the roles of chat templates.

    Args:
        value: the messages; those in ShareGPT format have ``from`` and ``value``.
        number: of the conversation, for messages.
        content: the type that contents have.
    """
    messages = value if isinstance(value, list) else []
    messages = [_with_role(message, number) for message in messages]
    is_valid = all(
        isinstance(m, dict)
        and isinstance(m.get("role"), str)
        and isinstance(m.get("content"), content)
        for m in messages
    )
    if not is_valid or not messages:
        raise ValueError(
            f"Conversation {number} is not a list of messages with `role` and `content` (or "
            f"`from` and `value`), but {str(value)[:80]!r}. Name the column that holds one: "
            "messages_column=..."
        )
    return messages


def _with_role(message: Any, number: int) -> Any:
    if not isinstance(message, dict) or "role" in message or "from" not in message:
        return message
    role = _ROLES.get(str(message["from"]).lower())
    if role is None:
        raise ValueError(
            f"Conversation {number} has a message from {message['from']!r}. Supported are "
            f"{', '.join(_ROLES)}: rename it, or give messages with `role` and `content`."
        )
    return {"role": role, "content": message.get("value")}
