# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: one for bytes that needs no download, and others from a folder or the hub."""

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from recipes.files import check_folder

ROLES: Final = ("system", "user", "assistant")

IMAGE_TOKEN: Final = "<image>"
OFFLINE: Final = "Without a connection only files in the cache are used: HF_HUB_OFFLINE=1."
"""What messages about the hub say."""
# The end of a turn is the end-of-text token, so every answer teaches where generation stops.
CHAT_TEMPLATE: Final = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('The byte tokenizer knows the roles system, user and assistant, not ' "
    "+ message['role'] + '.') -}}"
    "{%- endif -%}"
    "{%- set text -%}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}"
    f"{{{{- '{IMAGE_TOKEN}' if part['type'] == 'image' else part['text'] -}}}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endset -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- text + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}"
    "{{- text + eos_token -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""For contents that are texts, and for those in parts, which may be images."""


def byte_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose first 256 ids are the bytes of UTF-8; decoding is exact.

    After them come ``<pad>``, ``<bos>``, ``<eos>`` and a marker for each role of a chat. It has a
    chat template with ``{% generation %}`` marks, and is saved and loaded like any other.

    Args:
        more: other special tokens, after these.

    Example:
        >>> tokenizer = byte_tokenizer()
        >>> tokenizer("héllo")["input_ids"]
        [104, 195, 169, 108, 108, 111]
        >>> len(tokenizer)
        262
    """
    specials = ["<pad>", "<bos>", "<eos>", *(f"<|{role}|>" for role in ROLES), *more]
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
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
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name_or_path: str | None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by its hub name; None is the byte tokenizer."""
    if name_or_path is None:
        return byte_tokenizer()
    check_folder("tokenizer", name_or_path, "the byte tokenizer")
    loaded: PreTrainedTokenizerBase = from_folder_or_hub(
        AutoTokenizer,
        "tokenizer",
        name_or_path,
        cure="Check the name and the connection, or use None for the byte tokenizer.",
    )
    return loaded


def from_folder_or_hub(
    auto_class: Any,
    what: str,
    name_or_path: str,
    *,
    cure: str,
    errors: tuple[type[Exception], ...] = (OSError, ValueError, KeyError),
) -> Any:
    """Load what a class of transformers finds in a folder or on the hub.

    Args:
        auto_class: the class.
        what: the name of the option, for the message.
        name_or_path: its value.
        cure: what to do if it cannot be loaded.
        errors: those that mean so.
    """
    folder = Path(name_or_path).expanduser()
    try:
        return auto_class.from_pretrained(
            str(folder) if folder.exists() else name_or_path,
            local_files_only=folder.exists(),
        )
    except errors as error:
        raise ValueError(
            f"{what}={name_or_path!r} could not be loaded, neither as a folder nor from the hub "
            f"({first_line(error)}). {OFFLINE} {cure}"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__
