# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a group hold the same batch, and what all of them raise if not.

A batch is described by a few integers, which ranks gather; whatever is wrong on one rank is raised
on all, so that nobody waits.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_cp.comm.transport import Transport
from lightning_cp.data.outputs import checksum
from lightning_cp.data.structure import flatten

_MESSAGE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What ranks compare to know that they hold the same batch.

    Args:
        text: names, shapes and dtypes in words.
        shapes: a digest of those.
        contents: a checksum of the values; 0 where they are not compared.
    """

    text: str = ""
    shapes: int = 0
    contents: int = 0


class Released:
    """Values that have left steps, and that the ranks of a group have not compared yet.

    They are compared together with the next batch: nothing waits for them before.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._digest: Tensor | None = None

    def add(self, name: str, value: Any, device: torch.device) -> None:
        """Add a value; ranks must add the same ones, in the same order."""
        number = checksum(value, device)
        self._digest = number if self._digest is None else self._digest * 31 + number
        self.names.append(name)

    def take(self, device: torch.device) -> tuple[Tensor, list[str]]:
        """Return what stands for the values, int64 [1], and their names; start anew."""
        digest, names = self._digest, self.names
        self._digest, self.names = None, []
        none = torch.zeros(1, dtype=torch.int64, device=device)
        return (none if digest is None else digest.reshape(1) + len(names)), names


def build_fingerprint(batch: Any, *, values: bool) -> Fingerprint:
    """Describe a batch in two integers."""
    text = _describe(batch)
    return Fingerprint(text, _digest(text), _checksum(batch) if values else 0)


def agree(
    mine: Fingerprint,
    problem: Exception | None,
    context: Transport,
    released: Released | None = None,
) -> Exception | None:
    """Return what all ranks of the group must raise: one refuses its batch, or they differ.

    Args:
        mine: this rank's batch.
        problem: why this rank refuses it, if it does.
        context: the ranks that must hold the same batch.
        released: what has left former steps.
    """
    digest, names = (released or Released()).take(context.device)
    state = torch.tensor(
        [int(problem is not None), mine.shapes, mine.contents], device=context.device
    )
    state = torch.cat([state, digest])
    states = state.new_empty(context.size, 4)
    context.all_gather(states, state)()
    every = states.tolist()
    table = [row[:3] for row in every]
    if any(row[3] != every[0][3] for row in every):
        return differing(names)
    refused = next((rank for rank, (bad, *_) in enumerate(table) if bad), None)
    if refused is not None:
        text = share_texts(str(problem or ""), context)[refused]
        return problem or ValueError(
            f"Rank {refused} of the context-parallel group refused its batch: {text}"
        )
    odd = next((rank for rank, state in enumerate(table) if state != table[0]), None)
    if odd is None:
        return None
    what = "shapes" if table[odd][1] != table[0][1] else "values"
    return ValueError(
        f"All ranks of a context-parallel group must hold the same batch, but rank {odd} and rank "
        f"0 differ in their {what}; this is rank {context.rank}, with {mine.text}. Usual causes: a "
        "sampler or an iterable data set that is split by the global rank instead of the "
        "data-parallel rank, shuffling or augmentation without a common seed, worker seeds that "
        "follow the global rank."
    )


def differing(names: Sequence[str]) -> ValueError:
    """Return the error for values that left former steps and differ between ranks."""
    listed = ", ".join(dict.fromkeys(names)) or "nothing on this rank"
    return ValueError(
        "The ranks of a context-parallel group logged different values since the last comparison; "
        f"one of: {listed}. A value that is computed from the tokens of one rank is not what one "
        f"device would log. {CURE}"
    )


CURE: Final = (
    "Compute it from whole sequences, which are the same on every rank:\n"
    "    cp = self.trainer.strategy.context_parallel\n"
    "    x = cp.unshard(x, 1)  # [batch, tokens, ...]; one token or the mean: cp.pool(x, 'last')\n"
    "or over the tokens of all ranks: token_mean(logits, labels) or global_mean(total, count) from "
    "lightning_cp. For a metric, update it with this rank's tokens and log the object with "
    "on_step=False, on_epoch=True (or build it with dist_sync_on_step=True); targets of the next "
    "token are cp.shift_labels(labels), with the logits as they are. A measurement of one "
    "process (time, memory) is logged with rank_zero_only=True."
)
"""How a value becomes one that may leave a step."""


def agree_beside(problem: Exception | None, data: Transport) -> Exception | None:
    """Return what to raise if a group that holds other rows has refused its batch.

    It would not take part in the loss, and the others would wait for it.
    """
    failed = torch.tensor([int(problem is not None)], device=data.device)
    data.all_reduce(failed)
    if problem is None and int(failed):
        return ValueError(
            "Another context-parallel group of this job (other rows of the data axis) refused its "
            "batch; its ranks say why."
        )
    return problem


def _describe(batch: Any) -> str:
    return ", ".join(
        f"{path} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        for path, x in _tensors(batch)
    )


def _tensors(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a batch with their paths, in an order that keys do not change."""
    leaves = flatten(batch)
    return [(at, leaves[at].value) for at in sorted(leaves) if isinstance(leaves[at].value, Tensor)]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _checksum(batch: Any) -> int:
    """Return an integer that tells contents apart: exact sums over bits, position by position."""
    total = 0
    for _, x in _tensors(batch):
        total = (total * 31 + int(checksum(x, x.device))) % (1 << 56)
    return total


def share_texts(text: str, context: Transport) -> list[str]:
    """Return the texts of all ranks, on every rank."""
    data = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    mine = torch.tensor(list(data), dtype=torch.uint8, device=context.device)
    all_ = mine.new_empty(context.size, _MESSAGE_BYTES)
    context.all_gather(all_, mine)()
    return [bytes(x).rstrip(b"\0").decode(errors="replace") for x in all_.tolist()]
