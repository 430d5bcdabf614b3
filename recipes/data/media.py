# SPDX-License-Identifier: Apache-2.0
"""Conversations with images and videos: their parts, and how files and bytes are decoded.

Knows records and files, not tokens; `media_chat.py` runs a model's processor on them.
"""

import base64
import binascii
import io
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import PIL.Image
from transformers.image_utils import load_image as upright
from transformers.utils.import_utils import is_av_available, is_torchcodec_available
from transformers.video_utils import VideoMetadata, load_video

from recipes.data.chat import Message, read_messages

KINDS: Final = {"image": 1, "video": 2}
"""Kinds of media, as powers of two."""

_SOURCES: Final = ("url", "path", "base64", "bytes")
_MARKERS: Final = re.compile("<(image|video)>")


@dataclass(frozen=True)
class Conversation:
    """Messages in parts, and the sources of their media.

    Args:
        messages: with a list of parts as content; parts of media hold nothing but their type.
        sources: of each kind of media, in the order of the parts.
        number: the index of the record, for messages.
        folder: that paths are relative to.
    """

    messages: list[Message]
    sources: dict[str, list[Any]]
    number: int
    folder: Path

    @property
    def kinds(self) -> int:
        """The sum of the kinds of media that it holds."""
        return sum(number for kind, number in KINDS.items() if self.sources[kind])

    def load(self, processor: Any) -> dict[str, Any]:
        """Decode its media; return them as arguments of a processor."""
        images = [self._image(source) for source in self.sources["image"]]
        videos = [self._video(source, processor) for source in self.sources["video"]]
        return {"images": images, "videos": videos}

    def _image(self, source: Any) -> PIL.Image.Image:
        content = self._content(source, "image")
        if isinstance(content, PIL.Image.Image):
            return upright(content)
        try:
            opened = PIL.Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
            return upright(opened)
        except (OSError, SyntaxError) as error:
            what = content if isinstance(content, Path) else f"of {len(content)} bytes"
            raise ValueError(
                f"Conversation {self.number}: the image {what} cannot be decoded ({error}). Give "
                "a complete file in a format that Pillow reads."
            ) from error

    def _video(self, source: Any, processor: Any) -> tuple[Any, VideoMetadata]:
        """Return the frames that a processor samples of a video, and which they are."""
        fps = source.get("fps") if isinstance(source, dict) else None
        content_item = source["video"] if isinstance(source, dict) and "video" in source else source
        if isinstance(content_item, list):
            frames = [np.asarray(self._image(frame)) for frame in content_item]
            if not frames or len({frame.shape for frame in frames}) > 1:
                sizes = sorted({frame.shape[:2] for frame in frames})
                raise ValueError(
                    f"Conversation {self.number}: a video of {len(frames)} frames of the sizes "
                    f"{sizes}. Give at least one frame, and all of the same size."
                )
            indices = list(range(len(frames)))
            return np.stack(frames), VideoMetadata(len(frames), fps=fps, frames_indices=indices)
        content = self._content(content_item, "video")
        if isinstance(content, Path):
            return _decode_video(content, processor, self.number)
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            file.write(content)
            file.flush()
            return _decode_video(Path(file.name), processor, self.number)

    def _content(self, source: Any, kind: str) -> Any:
        """Return the bytes of a medium, its file, or a picture that is decoded already."""
        if isinstance(source, dict):
            known = (source.get(name) for name in ("bytes", *_SOURCES, "image"))
            source = next((value for value in known if value is not None), None)
        if isinstance(source, bytes | PIL.Image.Image):
            return source
        where = f"Conversation {self.number}: its {kind}"
        if not isinstance(source, str):
            raise TypeError(
                f"{where} is a {type(source).__name__}. Give a path, bytes, or base64 as "
                f"'data:{kind}/...;base64,...'."
            )
        if source.startswith("data:"):
            try:
                return base64.b64decode(source.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise ValueError(f"{where} is not base64 ({error}).") from error
        if re.match(r"https?://", source):
            raise ValueError(
                f"{where} is the address {source}. Download media first, and give their paths: "
                "ranks would fetch each of them at every epoch."
            )
        file = self.folder / Path(source.removeprefix("file://")).expanduser()
        if not file.is_file():
            raise FileNotFoundError(
                f"{where} {source!r} is missing: there is no file {file}. Paths are relative to "
                f"{self.folder}."
            )
        return file


def _decode_video(file: Path, processor: Any, number: int) -> tuple[Any, VideoMetadata]:
    """Decode the frames of a file that the processor samples."""
    sampler = processor.video_processor
    if not is_torchcodec_available() and not is_av_available():
        raise ImportError(
            f"Conversation {number} has the video {file}, which needs a decoder: pip install "
            "torchcodec, or av. Or give a video as a list of pictures."
        )
    options = {name: getattr(sampler, name, None) for name in sampler.valid_kwargs.__annotations__}
    for name in ("input_data_format", "do_convert_rgb", "device", "video_metadata"):
        options.pop(name, None)
    samples = options.pop("do_sample_frames", None)
    decode: Any = load_video  # its annotation lacks files
    frames, metadata = decode(
        str(file),
        backend="torchcodec" if is_torchcodec_available() else "pyav",
        sample_indices_fn=partial(sampler.sample_frames, **options) if samples else None,
    )
    return frames, metadata


def read_conversation(value: Any, number: int) -> Conversation:
    """Read the messages of a record.

    A part of type ``image`` or ``video`` holds its source (``image``, ``path``, ``url``,
    ``base64`` or ``bytes``), or takes the next one of the record's list. In a text, ``<image>`` and
    ``<video>`` mark the places of media if the record has such a list.

    Args:
        value: with ``messages``, with ``images`` and ``videos``, which may be None, and with the
            ``folder`` that paths are relative to.
        number: the index of the record.
    """
    messages = read_messages(value["messages"], number)
    lists = {kind: _as_list(value[f"{kind}s"]) for kind in KINDS}
    sources: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    rest = {kind: iter(listed or []) for kind, listed in lists.items()}
    read = []
    for message in messages:
        parts = []
        for part in _parts(message.get("content"), lists, number):
            kind = part["type"]
            if kind in KINDS:
                sources[kind].append(_source(part, rest[kind], number))
                part = {"type": kind}
            parts.append(part)
        read.append({**message, "content": parts})
    for kind, listed in lists.items():
        left = len(list(rest[kind]))
        if left:
            raise ValueError(
                f"Conversation {number} has {len(listed or [])} {kind}s in its list, but its "
                f"messages have places for {len(listed or []) - left}. Give each a part "
                f'{{"type": "{kind}"}}, or <{kind}> in a text.'
            )
    return Conversation(read, sources, number, value["folder"])


def _as_list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) or value is None else [value]


def _parts(
    content: Any, lists: dict[str, list[Any] | None], number: int
) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message's content."""
    if isinstance(content, str):
        pieces = _MARKERS.split(content) if any(lists.values()) else [content]
        for index, piece in enumerate(pieces):
            if index % 2:
                yield {"type": piece}
            elif piece or len(pieces) == 1:
                yield {"type": "text", "text": piece}
        return
    if not isinstance(content, list):
        raise ValueError(
            f"Conversation {number} has a message whose content is a {type(content).__name__}. "
            "Give a text, or a list of parts with `type`."
        )
    for part in content:
        known = part if isinstance(part, dict) else {}
        content_item = {name: value for name, value in known.items() if value is not None}
        kind = content_item.get("type")
        if kind == "image_url":  # as in OpenAI's messages
            url = content_item["image_url"]
            content_item = {"type": "image", "url": url["url"] if isinstance(url, dict) else url}
        elif kind not in ("text", *KINDS) or (kind == "text" and not _has_text(content_item)):
            raise ValueError(
                f"Conversation {number} has the part {str(part)[:80]!r}. Parts are "
                '{"type": "text", "text": ...}, {"type": "image", ...} or {"type": "video", ...}.'
            )
        yield content_item


def _has_text(part: dict[str, Any]) -> bool:
    return isinstance(part.get("text"), str)


def _source(part: dict[str, Any], rest: Iterator[Any], number: int) -> Any:
    """Return the source of a medium: of its part, or the next of the record's list."""
    kind = part["type"]
    if "base64" in part and not str(part["base64"]).startswith("data:"):
        return f"data:{kind}/unknown;base64,{part['base64']}"
    name = next((name for name in (kind, *_SOURCES) if name in part), None)
    source = next(rest, None) if name is None else part[name]
    if source is None:
        raise ValueError(
            f'Conversation {number} has a part {{"type": "{kind}"}} without a source. Give it '
            f"`path`, `base64` or `bytes`, or give the record a list of {kind}s with one for each "
            "such part."
        )
    if kind == "video" and isinstance(source, list):
        return {"video": source, "fps": part.get("fps")}
    return source
