# SPDX-License-Identifier: Apache-2.0
"""Data modules: text, chat and pass keys, as packed samples."""

from recipes.data.chat import ChatData
from recipes.data.passkey import PasskeyData, RetrievalGrid, heat_map, retrieval_accuracy
from recipes.data.text import TextData

__all__ = [
    "ChatData",
    "PasskeyData",
    "RetrievalGrid",
    "TextData",
    "heat_map",
    "retrieval_accuracy",
]
