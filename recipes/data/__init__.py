# SPDX-License-Identifier: Apache-2.0
"""Data modules: text, chat, chat with media and pass keys, as packed samples."""

from recipes.data.chat import ChatData
from recipes.data.media_chat import MediaChatData
from recipes.data.passkey import PasskeyData, RetrievalGrid, heat_map, retrieval_accuracy
from recipes.data.text import TextData

__all__ = [
    "ChatData",
    "MediaChatData",
    "PasskeyData",
    "RetrievalGrid",
    "TextData",
    "heat_map",
    "retrieval_accuracy",
]
