# SPDX-License-Identifier: Apache-2.0
"""Generated pictures of coloured squares, and questions for their colours.

Each record is a function of its index. The colours are independent of the text, so that an answer
can only be right if the picture was read.
"""

import io
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import PIL.Image

COLOURS: Final = {
    "r": (220, 40, 40),
    "g": (40, 180, 60),
    "b": (50, 70, 220),
    "y": (240, 220, 40),
    "c": (40, 210, 220),
    "m": (210, 50, 200),
    "w": (245, 245, 245),
    "k": (15, 15, 15),
}
"""The letter of each colour in answers."""
NUM_SQUARES: Final = 4
SIDE: Final = 16
"""Pixels of a square's side."""
BLIND_LOSS: Final = NUM_SQUARES * math.log(len(COLOURS)) / (NUM_SQUARES + 1)
"""The lowest mean loss of an answer without its picture, with a token that ends it: 1.66."""
_QUESTION: Final = "Colours?"


class Pictures(Sequence[dict[str, Any]]):
    """Records with a picture, a question and an answer; every eighth is a text without a picture.

    Args:
        num_records: how many there are.
    """

    column_names: Final = ["messages", "images"]

    def __init__(self, num_records: int = 65_536) -> None:
        self._num_records = num_records

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: Any) -> Any:
        colours = np.random.default_rng(index).choice(list(COLOURS), NUM_SQUARES)
        letters = "".join(colours.tolist())
        if index % 8 == 7:
            question = {"type": "text", "text": f"Repeat {letters}."}
            return _record([question], letters, [])
        parts = [{"type": "image"}, {"type": "text", "text": _QUESTION}]
        return _record(parts, letters, [_picture(letters)])


def _record(parts: list[dict[str, Any]], answer: str, images: list[bytes]) -> dict[str, Any]:
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": images}


def _picture(letters: str) -> bytes:
    """Return a PNG with two squares in a row."""
    squares = np.array([COLOURS[letter] for letter in letters], np.uint8).reshape(2, -1, 3)
    pixels = squares.repeat(SIDE, 0).repeat(SIDE, 1)
    out = io.BytesIO()
    PIL.Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
