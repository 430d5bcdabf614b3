"""One training step of a small model: on ranks under `cp.step`, and plainly on one device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallel, Mask, attention, token_mean
from tests import doors
from tests.oracle import visible
from tests.ranks import average_over_ranks
from tests.tiny import TinyLM, attend_shared

IGNORED = -100


def build_model(dtype: torch.dtype = torch.float64) -> TinyLM:
    """Build the same model on every rank."""
    torch.manual_seed(5)
    return TinyLM().to(dtype)


@dataclass
class Rows:
    """A batch, and the same thing said plainly for the reference.

    Args:
        batch: what the user's loader yields.
        documents: [B, S] ids, -1 for none; None where each row is one document.
        padding: [B, S], true where a token is padding.
        positions: [B, S].
    """

    batch: dict[str, Any]
    documents: Tensor | None = None
    padding: Tensor | None = None
    positions: Tensor | None = None


def whole_loss(model: TinyLM, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the summed loss over all valid tokens of a batch on one device, and their number."""
    batch = rows.batch
    anchor = batch.get("input_ids", batch.get("inputs_embeds"))
    num_samples, length = anchor.shape[:2]
    documents = (
        torch.zeros(num_samples, length).long() if rows.documents is None else rows.documents
    )
    padding = torch.zeros(num_samples, length).bool() if rows.padding is None else rows.padding
    positions = torch.arange(length).expand(num_samples, -1)
    positions = positions if rows.positions is None else rows.positions

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
        full = Mask(mask.causal, mask.window, documents=documents, padding=padding)
        seen = visible(full, num_samples, length)[:, None]
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        return torch.softmax(scores, -1)[..., :-1] @ v

    logits = model(
        batch.get("input_ids"), positions, inputs_embeds=batch.get("inputs_embeds"), attend=attend
    )
    total, count = logits.sum() * 0, 0
    for row in range(num_samples):
        for token in range(length - 1):
            label = batch["labels"][row, token + 1]
            same = documents[row, token] == documents[row, token + 1] != -1
            if same and label != IGNORED:
                total = total + cross_entropy(logits[row, token], label)
                count += 1
    return total, torch.tensor(count)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def whole_step(all_rows: list[Rows], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return loss and every gradient of one process that saw all rows."""
    model = build_model(dtype)
    parts = [whole_loss(model, rows) for rows in all_rows]
    count = sum(count for _, count in parts)
    loss = sum(total for total, _ in parts) / count.clamp(min=1)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def average_(model: torch.nn.Module) -> None:
    """Average gradients over all ranks, as DDP and FSDP2 do."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_over_ranks([parameter.grad for parameter in model.parameters()])


def recomputed(kind: str | None, cp: ContextParallel) -> Callable[..., Any] | None:
    """Return what calls a block so that it is recomputed in backward."""
    if kind is None:
        return None
    if kind == "reentrant":
        return partial(checkpoint, use_reentrant=True)
    return partial(checkpoint, use_reentrant=False, context_fn=cp.recompute)


@dataclass
class Job:
    """A step on ranks: which rows each data rank has, and how it is run."""

    rows: list[Rows]
    options: dict[str, Any] = field(default_factory=dict)
    checkpointing: str | None = None
    backward_outside: bool = False
    bound_mask: bool = False
    device: str = "cpu"


@cache  # making groups takes longer than most jobs
def build_cp(device: str, dp_size: int, **options: Any) -> tuple[ContextParallel, int]:
    """Return context parallelism over all processes, and this one's place on the data axis."""
    mesh = init_device_mesh(
        device,
        (dp_size, dist.get_world_size() // dp_size),  # noqa: TID251
        mesh_dim_names=("data_parallel", "context_parallel"),
    )
    data = mesh["data_parallel"] if dp_size > 1 else None
    cp = doors.parallel(mesh["context_parallel"], data, **options)
    return cp, mesh["data_parallel"].get_local_rank()


def rank_step(job: Job) -> dict[str, Tensor]:
    """Return loss and every averaged gradient, as this rank has them."""
    cp, data_rank = build_cp(job.device, len(job.rows), **job.options)
    rows = job.rows[data_rank]
    batch = {
        key: value.to(job.device) if isinstance(value, Tensor) else value
        for key, value in rows.batch.items()
    }
    model = build_model().to(job.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
        return attention(q, k, v, mask=bound[mask], sinks=sinks)

    embeds = rows.batch.get("inputs_embeds")
    with cp.step(batch) as local:
        bound = {b.mask: cp.mask(causal=True, window=b.mask.window) for b in model.blocks}
        logits = model(
            local.get("input_ids"),
            cp.position_ids(),
            inputs_embeds=local.get("inputs_embeds"),
            attend=attend if job.bound_mask else attend_shared,
            checkpoint=recomputed(job.checkpointing, cp),
        )
        loss = token_mean(logits, local["labels"])
        if not job.backward_outside:
            loss.backward()
    if job.backward_outside:
        loss.backward()
    average_(model)
    found = {"loss": loss.detach(), **gradients(model)}
    if embeds is not None and embeds.requires_grad:
        gradient, embeds.grad = embeds.grad.to(job.device), None
        dist.all_reduce(gradient)
        found["inputs_embeds"] = gradient / dist.get_world_size()  # noqa: TID251
    return {name: x.cpu() for name, x in found.items()}


def rank_steps(jobs: list[Job]) -> list[dict[str, Tensor]]:
    """Run several jobs, one after the other, on the same processes."""
    return [rank_step(job) for job in jobs]
