# SPDX-License-Identifier: Apache-2.0
"""Conversations with images and videos as packed samples; media are decoded with each batch."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lightning_cp.config import check_choice
from recipes.data.chat import (
    ChatData,
    answer_spans,
    check_chat_template,
    check_learned,
    marks_answers,
    read_template,
)
from recipes.data.loader import Batch, SampleLoader, find_data_rank
from recipes.data.media import KINDS, Conversation, read_conversation
from recipes.data.packed_data import Split
from recipes.data.packing import COLUMNS, IGNORED_LABEL, Document
from recipes.data.sources import PICTURES, DataSource, find_source
from recipes.processors import load_processor

LongConversations = Literal["refuse", "skip"]

_TYPES: Final = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_NOT_MEDIA: Final = (*_TYPES, "input_ids", "attention_mask", "offset_mapping", "video_metadata")


class MediaChatData(ChatData):
    """Conversations with images and videos, by a model's processor; labels on assistant tokens.

    Records are processed once to learn their tokens, placeholders of media included; the tokens are
    packed and cached as in `ChatData`. Pixels are not cached: the media of a batch are decoded when
    it is built, by the workers, and follow each other in the order of the documents. Conversations
    without media may be among them.

    A message's content is a text, or a list of parts: ``{"type": "text", "text": ...}``, ``{"type":
    "image", ...}`` and ``{"type": "video", ...}`` with a ``path`` relative to the source, with
    ``base64`` or with ``bytes``. Parts without them take the next entry of the columns ``images``
    and ``videos`` (or ``image`` and ``video``): paths, bytes, or the features of `datasets`. A
    video may be a list of pictures, with ``fps``.

    Args:
        source: as in `TextData`. None: generated pictures of coloured squares, and questions that
            cannot be answered without them.
        processor: a folder or a name on the hub, usually that of the model. None: the processor of
            the embedded model ``tiny-image``.
        messages_column: as in `ChatData`.
        chat_template: a Jinja file to use in place of the processor's template.
        long_documents: whether a conversation that is longer than a sample is an error, or is left
            out; media are never cut.
        options: as in `PackingOptions`, without ``tokenizer``.

    Example:
        >>> data = MediaChatData("conversations.jsonl", processor="PATH", seq_len=4096)
    """

    lists = ("media", "media_kinds")

    def __init__(
        self,
        source: str | None = None,
        *,
        processor: str | None = None,
        messages_column: str = "messages",
        chat_template: str | None = None,
        long_documents: LongConversations = "refuse",
        **options: Any,
    ) -> None:
        check_choice("long_documents", long_documents, ("refuse", "skip"))
        if options.get("tokenizer"):
            raise ValueError(
                f"tokenizer={options['tokenizer']!r} is not for conversations with media: the "
                "processor has one: processor=..."
            )
        super().__init__(
            source,  # type: ignore[arg-type]
            messages_column=messages_column,
            chat_template=chat_template,
            **options,
        )
        self.long_conversations = long_documents
        self._processor_name = processor
        self._opened: dict[Split, Any] = {}

    # ---------------------------------------------------------------- processor

    @cached_property
    def processor(self) -> Any:
        """The processor, loaded when it is first used, with ``chat_template``."""
        processor = load_processor(self._processor_name)
        if self.chat_template is not None:
            processor.chat_template = read_template(self.chat_template)
        return processor

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the processor."""
        tokenizer: PreTrainedTokenizerBase = self.processor.tokenizer
        return tokenizer

    @cached_property
    def _template(self) -> str:
        template = self.processor.chat_template
        return str(template.get("default", "") if isinstance(template, Mapping) else template or "")

    @property
    def _type_names(self) -> list[str]:
        """Names of the token types that the processor returns."""
        return [name for name in _TYPES if name in self.processor.model_input_names]

    def fingerprint_options(self) -> dict[str, Any]:
        """Return other options that the samples depend on."""
        return {
            "processor": self.processor.to_json_string(),
            "template": self._template,
            "long_conversations": self.long_conversations,
        }

    @cached_property
    def _sources(self) -> dict[Split, DataSource]:
        if self.source is not None:
            return super()._sources
        generated, val = DataSource("generated pictures", PICTURES), self.options.val_source
        return {"train": generated, "val": generated if val is None else find_source(val)}

    # ---------------------------------------------------------------- tokens

    def prepare_data(self) -> None:
        """Process and pack what is not on disk yet."""
        check_chat_template(f"processor {self._processor_name!r}", self._template, self.tokenizer)
        self.columns = (*COLUMNS, *self._type_names)
        super(ChatData, self).prepare_data()

    def value_of(self, record: Any, column: str) -> Any:
        """Return the messages of a record, and its lists of media."""
        lists = {f"{kind}s": record.get(f"{kind}s", record.get(kind)) for kind in KINDS}
        return {"messages": record[column], **lists}

    def encode(self, values: list[Any], numbers: list[int]) -> Iterable[Document]:
        """Process conversations: their tokens, and which of them are learned."""
        for value, number in zip(values, numbers, strict=True):
            yield self._encode(read_conversation(value, number))

    def _records(self, split: Split) -> Iterator[tuple[int, Any]]:
        for number, value in super()._records(split):
            yield number, {**value, "folder": self._sources[split].folder}

    def _encode(self, conversation: Conversation) -> Document:
        text, spans = self._render(conversation)
        loaded = conversation.load(self.processor)
        processed = self._process(
            text,
            images=[loaded["images"]] if loaded["images"] else [],
            videos=loaded["videos"],
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        if "text_replacement_offsets" not in processed:
            raise ValueError(
                f"{type(self.processor).__name__} does not say where it puts placeholders of media "
                "(text_replacement_offsets), so assistant tokens cannot be located. Use another "
                "model."
            )
        ids = np.array(processed["input_ids"][0], np.int32)
        replaced = processed["text_replacement_offsets"]
        learned = self._learned(spans, processed["offset_mapping"][0], replaced and replaced[0])
        parts = [p for m in conversation.messages if m["role"] == "assistant" for p in m["content"]]
        check_learned(learned, [part["text"] for part in parts], conversation.number)
        types = {name: np.array(processed[name][0], np.int32) for name in self._type_names}
        labels = np.where(learned, ids, np.int32(IGNORED_LABEL))
        return Document(ids, labels, conversation.number, types, conversation.kinds)

    def _render(self, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the start and stop of each answer in it."""
        messages, number = conversation.messages, conversation.number
        if any(
            part["type"] in KINDS
            for message in messages
            if message["role"] == "assistant"
            for part in message["content"]
        ):
            raise ValueError(
                f"Conversation {number} has media in an answer, but tokens of media cannot be "
                "learned. Put them into the messages of the user."
            )
        if marks_answers(self._template):
            render: Any = render_jinja_template
            rendered = render(
                [messages],
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
            text, spans = rendered[0][0], rendered[1][0]
        else:
            text, spans = answer_spans(self.processor, messages, number)
        self._check_placeholders(text, conversation)
        return text, spans

    def _check_placeholders(self, text: str, conversation: Conversation) -> None:
        for kind, sources in conversation.sources.items():
            token = getattr(self.processor, f"{kind}_token", None)
            if token is None and sources:
                raise ValueError(
                    f"Conversation {conversation.number} has a {kind}, but a "
                    f"{type(self.processor).__name__} takes none."
                )
            count = 0 if token is None else text.count(token)
            if count != len(sources):
                raise ValueError(
                    f"Conversation {conversation.number} has {len(sources)} {kind}s, but its text "
                    f"has {count} placeholders {token!r}. Check that the chat template renders "
                    "them, and that no message contains that text."
                )

    def _process(self, text: str, *, images: Any, videos: Any, **options: Any) -> Any:
        """Run the processor on a text and its media; images are lists, one per conversation."""
        bos = self.tokenizer.bos_token
        processor_arguments: dict[str, Any] = {"text": [text], **options}
        if bos is not None and text.startswith(bos):
            processor_arguments["add_special_tokens"] = False
        if images:
            # Such a processor divides an image into tiles only if it is the only one of its text.
            names = getattr(self.processor.image_processor, "model_input_names", [])
            counts = "batch_num_images" in names
            processor_arguments["images"] = (
                images if counts else [[x for each in images for x in each]]
            )
        if videos:
            frames, metadata = zip(*videos, strict=True)
            processor_arguments["videos"], processor_arguments["video_metadata"] = (
                [list(frames)],
                [list(metadata)],
            )
            processor_arguments["do_sample_frames"] = False
        return self.processor(**processor_arguments)

    def _learned(self, spans: Any, offsets: Any, replaced: Any) -> Any:
        """Return for each token whether it is the assistant's.

        Args:
            spans: of answers, in the text before placeholders were expanded.
            offsets: start and stop of each token in the expanded text.
            replaced: the expansions.
        """
        ends = [entry["span"][1] for entry in replaced]
        gained = [0, *(entry["new_span"][1] - entry["span"][1] for entry in replaced)]
        starts, stops = np.array(offsets).reshape(-1, 2).T
        learned = np.zeros(len(starts), bool)
        marked = marks_answers(self._template)
        for span in spans:
            first, last = (char + gained[bisect_right(ends, char)] for char in span)
            if marked:  # as transformers does
                learned |= (starts < last) & (stops > first)
            else:
                learned |= (starts >= first) & (stops <= last) & (stops > starts)
        return learned

    def _documents(self, split: Split) -> Iterator[Document]:
        """Yield documents that fit into a sample."""
        num_skipped = 0
        for part in super()._documents(split):
            if len(part.ids) <= self.seq_len:
                yield part
                continue
            if self.long_conversations == "refuse":
                raise ValueError(
                    f"Conversation {part.number} has {len(part.ids)} tokens with its media, but "
                    f"samples hold seq_len={self.seq_len}, and media cannot be cut. Use a larger "
                    "seq_len, smaller media (the size, fps or max_frames of the processor), or "
                    "long_documents='skip'."
                )
            num_skipped += 1
        if num_skipped:
            print(f"skipped {num_skipped} conversations of more than seq_len={self.seq_len} tokens")

    # ---------------------------------------------------------------- batches

    def setup(self, stage: str) -> None:
        """Map the samples into memory, and open the records of their media."""
        super().setup(stage)
        self._opened = {
            split: self._sources[split].read(self.options.cache_dir) for split in self._tables
        }

    def train_dataloader(self) -> SampleLoader:
        """Return the loader of this data rank."""
        self._check_kinds("train")
        return super().train_dataloader()

    def val_dataloader(self) -> SampleLoader | list[Any]:
        """Return the loader of this data rank."""
        self._check_kinds("val")
        return super().val_dataloader()

    def _check_kinds(self, split: Split) -> None:
        """Raise if data ranks would call towers different numbers of times: they would deadlock."""
        if split not in self._tables or find_data_rank(self.trainer)[1] == 1:
            return
        column = self._tables[split]["media_kinds"]
        kinds = {int(np.bitwise_or.reduce(x.numpy(), initial=0)) for x in column}
        if len(kinds) > 1:
            found = ", ".join(_name_kinds(number) for number in sorted(kinds))
            raise ValueError(
                f"Samples of {split} differ in their media ({found}), and several data ranks would "
                "run the towers a different number of times. Let all ranks share a sequence "
                "(context_parallel_size), or use a larger seq_len or other data, so that each "
                "sample holds the same kinds."
            )

    def collate(self, split: Split, samples: list[Batch]) -> Batch:
        """Build a batch: tokens, and the media of its documents in their order."""
        tokens = [
            {name: x for name, x in sample.items() if name not in self.lists} for sample in samples
        ]
        media = [self._media(split, sample) for sample in samples if len(sample["media"])]
        names = list(dict.fromkeys(name for found in media for name in found))
        return {**default_collate(tokens), **{name: _join(name, media) for name in names}}

    def _media(self, split: Split, sample: Batch) -> Batch:
        """Decode and process the media of a sample, as if its documents were one text."""
        records = self._opened[split]
        column = self.column_of(records.column_names)
        texts, videos = [], []
        images: list[list[Any]] = []  # of each conversation
        for number in sample["media"].tolist():
            value = self.value_of(records[number], column)
            folder = self._sources[split].folder
            conversation = read_conversation({**value, "folder": folder}, number)
            texts.append(self._render(conversation)[0])
            loaded = conversation.load(self.processor)
            images += [loaded["images"]] if loaded["images"] else []
            videos += loaded["videos"]
        processed = self._process("".join(texts), images=images, videos=videos, return_tensors="pt")
        self._check_unchanged(processed["input_ids"], sample)
        return {
            name: torch.as_tensor(value)
            for name, value in processed.items()
            if name not in _NOT_MEDIA
        }

    def _check_unchanged(self, ids: torch.Tensor, sample: Batch) -> None:
        for kind in KINDS:
            known = getattr(self.processor, f"{kind}_token_ids", [])
            tokens = torch.tensor([token for token in known if token is not None])
            now, packed = (int(torch.isin(x, tokens).sum()) for x in (ids, sample["input_ids"]))
            if now != packed:
                numbers = ", ".join(str(number) for number in sample["media"].tolist())
                raise ValueError(
                    f"The {kind}s of the conversations {numbers} take {now} tokens, but {packed} "
                    "when they were packed. If files have changed since, remove the packed "
                    "samples, or give another cache_dir. If not, this processor treats media of "
                    "several conversations in another way than those of one, and is not supported."
                )


def _name_kinds(number: int) -> str:
    return " and ".join(f"{kind}s" for kind, value in KINDS.items() if number & value) or "none"


def _join(name: str, media: list[Batch]) -> torch.Tensor:
    """Concatenate the media of several samples."""
    parts = [found[name] for found in media if name in found]
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise ValueError(
            f"The samples of a batch have `{name}` of the shapes {shapes}, which cannot be "
            "concatenated. Use data.init_args.batch_size=1."
        )
    return torch.cat(parts)
