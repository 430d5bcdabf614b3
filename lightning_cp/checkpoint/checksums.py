# SPDX-License-Identifier: Apache-2.0
"""Checksums: loading a damaged checkpoint raises before any weight is changed.

A folder has `checksums.json`, with a CRC-32 for each block of each of its files. A file of
torch.save is a zip archive with a CRC-32 for each record; torch writes but never verifies them.
Ranks share the work, and each uses several threads: zlib releases the GIL.
"""

import json
import logging
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from lightning_cp.comm.collective_errors import rank, size

CHECKSUMS: Final = "checksums.json"
"""The file with the checksums of a folder."""

BLOCK_BYTES: Final = 64 * 2**20
"""Bytes of a file with a checksum of their own."""

BUFFER_BYTES: Final = 2**20
"""Bytes of a block that are read at once."""

_VERSION: Final = 1
_THREADS: Final = 8
_FIX: Final = "Use another checkpoint."
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")

_logger = logging.getLogger("lightning_cp")


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the checks that a rank does."""

    rank: int = 0
    size: int = 1


ALL: Final = Share()
"""All checks, for a single process."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Bytes with a known checksum."""

    file: Path
    start: int
    length: int
    checksum: int


def own_share() -> Share:
    """Return this rank's part of a check that all ranks share."""
    return Share(rank(), size())


def sum_files(files: Iterable[Path]) -> dict[str, Any]:
    """Return the entries of `checksums.json` for files that have just been written."""
    entries = {}
    for file in files:
        length = file.stat().st_size
        starts = range(0, length, BLOCK_BYTES)
        blocks = [_Block(file, start, min(BLOCK_BYTES, length - start), 0) for start in starts]
        entries[file.name] = {"size": length, "blocks": [f"{x:08x}" for x in _sum_blocks(blocks)]}
    return entries


def write_checksums(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write `checksums.json`, and flush it to disk."""
    content = {
        "version": _VERSION,
        "algorithm": "crc32",
        "block_size": BLOCK_BYTES,
        "files": entries,
    }
    with (folder / CHECKSUMS).open("w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def check_folder(folder: Path, share: Share, always: Sequence[str]) -> None:
    """Raise if the bytes of a folder differ from those that were saved.

    Args:
        folder: a checkpoint; one without checksums is not checked.
        share: which part of the shards this rank checks.
        always: names of files that every rank reads, and checks, in full.
    """
    if not (folder / CHECKSUMS).is_file():
        if all((folder / name).is_file() for name in always):  # otherwise it is not a checkpoint
            _warn_unchecked(f"{folder} has no {CHECKSUMS}")
            for name in always:
                if zipfile.is_zipfile(folder / name):
                    check_file(folder / name)
        return
    blocks = _read_checksums(folder)
    common = [block for block in blocks if block.file.name in always]
    shared = [block for block in blocks if block.file.name not in always]
    _check_blocks(folder, common + _part_of(shared, share))


def _read_checksums(folder: Path) -> list[_Block]:
    """Read `checksums.json`, and check the sizes of all files."""
    blocks: list[_Block] = []
    try:
        content = json.loads((folder / CHECKSUMS).read_text())
        if content["version"] == _VERSION:
            block_size = content["block_size"]
            for name, entry in content["files"].items():
                starts = range(0, entry["size"], block_size)
                blocks += [
                    _Block(folder / name, start, min(block_size, entry["size"] - start), int(x, 16))
                    for start, x in zip(starts, entry["blocks"], strict=True)
                ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is damaged: `{CHECKSUMS}` is not readable. {_FIX}") from error
    if content["version"] != _VERSION:
        raise ValueError(
            f"{folder / CHECKSUMS} has version {content['version']}; this lightning_cp supports "
            f"version {_VERSION}. Update lightning_cp, or remove that file to load unchecked."
        )
    for name, entry in content["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size < entry["size"]:
            raise ValueError(f"{folder} is incomplete: `{name}` is missing or truncated. {_FIX}")
    return blocks


def check_file(file: Path, share: Share = ALL) -> None:
    """Raise if the bytes of a file of torch.save differ from those that were saved.

    Args:
        file: in the format of torch 1.6 or later; an older one has no checksums.
        share: which part of the tensors this rank checks.
    """
    with file.open("rb") as stream:
        if stream.read(2) != b"PK":
            _warn_unchecked(f"{file} is in a format without checksums")
            return
        try:
            archive = zipfile.ZipFile(stream)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{file} is damaged or truncated: {error}. {_FIX}") from error
        records = [info for info in archive.infolist() if info.file_size]
        if not any(info.CRC for info in records):
            _warn_unchecked(f"{file} was saved with torch.serialization.set_crc32_options(False)")
            return
        common: list[_Block] = []
        shared: list[_Block] = []
        for info in records:
            if info.compress_type != zipfile.ZIP_STORED:  # not written by torch
                continue
            stream.seek(info.header_offset)
            header = stream.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or not header.startswith(b"PK\3\4"):
                raise ValueError(f"{file} is damaged at byte {info.header_offset}. {_FIX}")
            _, name_len, extra_len = _LOCAL_HEADER.unpack(header)
            start = info.header_offset + _LOCAL_HEADER.size + name_len + extra_len
            block = _Block(file, start, info.file_size, info.CRC)
            (shared if "/data/" in info.filename else common).append(block)
    _check_blocks(file, common + _part_of(shared, share))


def _part_of(blocks: Sequence[_Block], share: Share) -> list[_Block]:
    """Return the blocks that a rank checks: adjacent ones, which it is likely to read next."""
    total, before, part = sum(block.length for block in blocks), 0, []
    for block in blocks:
        if before * share.size // total == share.rank:
            part.append(block)
        before += block.length
    return part


def _check_blocks(path: Path, blocks: Sequence[_Block]) -> None:
    for block, checksum in zip(blocks, _sum_blocks(blocks), strict=True):
        if checksum != block.checksum:
            what = "it" if block.file == path else f"`{block.file.name}`"
            raise ValueError(
                f"{path} is damaged: {what} does not have the checksum with which it was saved, "
                f"in bytes {block.start} to {block.start + block.length}. {_FIX}"
            )


def _sum_blocks(blocks: Sequence[_Block]) -> list[int]:
    """Return the checksum of each block."""
    threads = min(_THREADS, os.cpu_count() or 1, len(blocks))
    if threads < 2:
        return [_sum_block(block) for block in blocks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(_sum_block, blocks))


def _sum_block(block: _Block) -> int:
    checksum, left = 0, block.length
    buffer = memoryview(bytearray(min(BUFFER_BYTES, left)))
    with block.file.open("rb", buffering=0) as stream:
        stream.seek(block.start)
        while left and (count := stream.readinto(buffer[: min(len(buffer), left)])):
            checksum = zlib.crc32(buffer[:count], checksum)
            left -= count
    return checksum


def _warn_unchecked(reason: str) -> None:
    if rank() == 0:
        _warn_once(reason)


@cache
def _warn_once(reason: str) -> None:
    _logger.warning("%s: damaged bytes would not be detected.", reason)
