# SPDX-License-Identifier: Apache-2.0
"""A multimodal model under context parallelism, and the stock model on full sequences, compared."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_patches import enable
from tests.parity import hf, media_zoo
from tests.parity.hf import Found, averaged, build_cp, errors, gradients, precision

KINDS = ("plain", "packed", "left", "right", "text")
# What a served model refuses: by name and kind of batch, a part of the message.
REFUSED_BATCHES = {
    ("minimax_m3_vl", "left"): "padding before tokens",
    ("mllama", "packed"): "its images belong to samples",
}


@dataclass(frozen=True)
class MediaJob:
    """One comparison; arguments as in `tests.parity.hf.Job`, and the device of the ranks."""

    name: str
    kind: str = "plain"
    dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()
    enabling: tuple[tuple[str, Any], ...] = ()
    checkpointing: bool | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        return " ".join([self.name, self.kind, *(str(v) for _, v in self.options)])


@lru_cache(maxsize=4)
def _exact(name: str, kind: str, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    model = media_zoo.build_model(name, dtype=dtype)
    _, stock = media_zoo.build_batches(name, kind, dtype=dtype)
    with precision(dtype):
        loss = model(**stock).loss
    loss.backward()
    return loss.item(), gradients(model)


def run(job: MediaJob) -> dict[str, Tensor]:
    """Return the loss of a job and the average over ranks of each gradient."""
    cp = build_cp(**dict(job.options))
    model = media_zoo.build_model(job.name, dtype=job.dtype).to(job.device)
    batch, _ = media_zoo.build_batches(job.name, job.kind, dtype=job.dtype)
    batch = {key: x.to(job.device) if isinstance(x, Tensor) else x for key, x in batch.items()}
    enable(model, **dict(job.enabling))
    if job.checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": job.checkpointing})
    with cp.step(batch) as local, precision(job.dtype):
        loss = model(**local).loss
    loss.backward()
    return averaged(loss, model)


def compare(job: MediaJob) -> Found | None:
    """Run a job on this rank; the first rank compares."""
    found = run(job)
    loss = found.pop("loss")
    if dist.get_rank() > 0:
        return None
    exact_loss, exact = _exact(job.name, job.kind, job.dtype)
    return Found(loss.item(), exact_loss, errors({k: x.cpu() for k, x in found.items()}, exact))


def compare_all(jobs: list[MediaJob]) -> list[Found | str | None]:
    """Run jobs one after another, as `tests.parity.hf.compare_all`."""
    return hf.compare_all(jobs, compare)
