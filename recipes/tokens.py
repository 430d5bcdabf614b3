# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: one for bytes that needs no download, and any other by folder or hub name."""

import socket
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import is_offline_mode
from huggingface_hub.constants import ENDPOINT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

ROLES: Final = ("system", "user", "assistant")

# The end of a turn is the end of text: what generation stops at is learned from every answer.
_CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('The byte tokenizer knows the roles system, user and assistant, not ' "
    "+ message['role'] + '.') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- message['content'] + eos_token -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose first 256 ids are the bytes of UTF-8; any text comes back exactly.

    After them: ``<pad>``, ``<bos>``, ``<eos>`` and a marker for each role of a chat. It has a chat
    template with ``{% generation %}`` marks, and is saved and loaded as any other tokenizer.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("héllo")["input_ids"]
        [104, 195, 169, 108, 108, 111]
        >>> len(tokenizer)
        262
    """
    specials = ["<pad>", "<bos>", "<eos>", *(f"<|{role}|>" for role in ROLES)]
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    vocab |= {token: len(vocab) + i for i, token in enumerate(specials)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=specials[3:],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_chars() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers.

    Bytes that print stand for themselves; the others, in their order, for what follows U+00FF.
    """
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]


def load_tokenizer(name_or_path: str | None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by its hub name; None is the byte tokenizer."""
    if name_or_path is None:
        return byte_tokenizer()
    looks_local = name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1
    folder = Path(name_or_path).expanduser()
    if looks_local and not folder.exists():
        raise FileNotFoundError(
            f"tokenizer={name_or_path!r}: there is no such folder. Give a folder that "
            "save_pretrained() wrote, a name on the hub, or None for the byte tokenizer."
        )
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder) if folder.exists() else name_or_path,
            local_files_only=folder.exists() or not reaches_hub(),
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer={name_or_path!r} could not be loaded, neither as a folder nor from the hub "
            f"({first_line(error)}). {unreachable()}Check the name and the connection, or use None "
            "for the byte tokenizer."
        ) from error
    return loaded


@cache
def reaches_hub() -> bool:
    """Say whether the hub answers, before a library asks it again and again for half a minute."""
    if is_offline_mode():
        return False
    address = urlsplit(ENDPOINT)
    if getproxies().get(address.scheme):  # it may be reached by this, and not directly
        return True
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((str(address.hostname), port), timeout=5).close()
    except OSError:
        return False
    return True


def unreachable() -> str:
    """Say that the hub was not asked, if that is so; for the middle of a message."""
    if reaches_hub():
        return ""
    return f"{ENDPOINT} is out of reach, so only what was fetched before can be used. "


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, for a message of one line."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
