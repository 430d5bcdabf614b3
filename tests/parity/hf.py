"""A Hugging Face model under context parallelism, and the stock model on whole rows, compared.

The reference knows nothing of our code: documents are cut out of the rows by hand, each becomes a
row of its own, and the stock model runs on them with its own eager attention, masks and loss.
"""

import copy
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hf_patches import enable
from lightning_cp import ContextParallel, Parameters
from lightning_cp.lightning.model.model_setup import place_model
from tests import doors
from tests.parity import zoo
from tests.parity.trainer_step import trainer_step
from tests.ranks import average_over_ranks

IGNORED = -100
KINDS = ("plain", "packed", "left", "right")
_LENGTH = 61  # divides by nothing

# Padding at the start of a row gets into states of the stock model, makes gradients NaN (Qwen 4) or
# decides between equal scores: the reference has it at the end.
_PADDING_LEAKS = (
    *("deepseek_v4", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm"),
)

# The stock model takes rows of certain lengths only: those of the reference end with padding.
_MULTIPLES = {"xlstm": 16}

# Rows with different documents, one of a single token, one longer than every window.
_PACKED = ([17, 1, 26, 3, 14], [5, 33, 2, 21])


@dataclass(frozen=True)
class Job:
    """One comparison.

    Args:
        name: of the model in the zoo.
        kind: how the rows are filled.
        head: what the model does with its hidden states.
        dtype: of the weights.
        options: of the ContextParallel.
        enabling: of enable().
        checkpointing: activation checkpointing: None, or its use_reentrant.
        trained_by: ``step``: full batches are sharded around the model; ``trainer``: a step of
            transformers' Trainer, whose model shards them.
        tensor: number of ranks that share the weights of each layer, by the strategy's functions.
    """

    name: str
    kind: str = "plain"
    head: str = "causal"
    dtype: torch.dtype = torch.float32
    options: tuple[tuple[str, Any], ...] = ()
    enabling: tuple[tuple[str, Any], ...] = ()
    checkpointing: bool | None = None
    trained_by: str = "step"
    tensor: int = 1
    given: tuple[str, ...] = field(default=("input_ids", "attention_mask", "labels"))

    def __str__(self) -> str:
        said = [self.name, self.kind, self.head, *(str(v) for _, v in self.options)]
        return " ".join(said)


@dataclass(frozen=True)
class Found:
    """What a comparison found: both losses, and the error of each gradient."""

    loss: float
    exact_loss: float
    errors: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: item[1] if item[1] == item[1] else 1e30)


class Double(TorchFunctionMode):
    """Lets models compute in float64 where they ask for float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def precision(dtype):
    """Return the context in which a model of this dtype computes in it throughout."""
    return Double() if dtype == torch.float64 else nullcontext()


def build_batch(job: Job, vocab_size: int, pad: int) -> dict[str, Tensor]:
    """Build the whole batch, as a user's loader would."""
    generator = torch.Generator().manual_seed(sum(map(ord, job.kind)))
    ids = torch.randint(5, vocab_size, (2, _LENGTH), generator=generator)
    ids = torch.where(ids == pad, ids - 1, ids)
    batch = {"input_ids": ids}
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.2] = IGNORED
    if job.kind == "packed":
        rows = [torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in _PACKED]
        batch["document_ids"] = torch.stack(rows)
    elif job.kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, :19] = 0
        mask[1, :4] = 0
        mask = mask if job.kind == "left" else mask.flip(1)
        batch["input_ids"] = torch.where(mask == 1, ids, pad)
        batch["attention_mask"] = mask
        labels[mask == 0] = IGNORED
        # What the last padding token predicts depends on the stock implementation: it sees nothing.
        labels[:, 1:][mask.diff(dim=1) == 1] = IGNORED
    if job.head in ("sequence",):
        batch["labels"] = torch.tensor([0, 2])
    elif job.head == "question":
        batch["start_positions"] = torch.tensor([23, 7])
        batch["end_positions"] = torch.tensor([25, 39])
    elif job.head == "token":
        batch["labels"] = torch.where(labels == IGNORED, IGNORED, labels % 3)
    else:
        batch["labels"] = labels
    return batch


def unpack(
    batch: dict[str, Tensor], pad: int, *, unpad: bool = False, multiple: int = 1
) -> dict[str, Tensor]:
    """Cut every document out of its row, and lay them out as rows of a batch.

    Args:
        batch: as `build_batch` returns it.
        pad: the padding token.
        unpad: whether rows that start with padding are cut too.
        multiple: of the length of the rows.
    """
    documents = batch.get("document_ids")
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if documents is None:
        if multiple == 1 and not (unpad and (mask[:, 0] == 0).any()):
            return batch
        documents = mask - 1
    rows: list[dict[str, Tensor]] = []
    for row in range(len(documents)):
        for document in documents[row].unique():
            inside = (documents[row] == document) & (mask[row] == 1)
            if inside.any():
                rows.append({k: batch[k][row][inside] for k in ("input_ids", "labels")})
    longest = max(len(row["labels"]) for row in rows)
    if "document_ids" not in batch:
        longest = documents.shape[1]
    longest = -(-longest // multiple) * multiple
    fill = {"input_ids": pad, "labels": IGNORED}
    laid = {
        key: torch.stack(
            [
                torch.cat([r[key], r[key].new_full((longest - len(r[key]),), fill[key])])
                for r in rows
            ]
        )
        for key in fill
    }
    lengths = torch.tensor([len(row["labels"]) for row in rows])
    laid["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return laid


def padding_of(model: torch.nn.Module) -> int:
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    return 1 if pad is None else int(pad)


# Jobs of one model follow each other, and copying it takes a fraction of building it.
_build_once = lru_cache(maxsize=4)(zoo.build_model)


def build_model(name: str, **options: Any) -> torch.nn.Module:
    """Return a model of the zoo of its own, which may be changed."""
    return copy.deepcopy(_build_once(name, **options))


@cache
def exact_gradients(
    name: str, kind: str, head: str, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    job = Job(name, kind, head, dtype)
    # Answers are sought among padding too, which sees nothing: SDPA gives 0 there, as we do.
    attention = "sdpa" if head == "question" else "eager"
    model = build_model(name, head=head, dtype=dtype, attention=attention)
    batch = build_batch(job, zoo.VOCAB_SIZE, padding_of(model))
    base = name.partition(":")[0]
    unpad, multiple = base in _PADDING_LEAKS, _MULTIPLES.get(base, 1)
    given = unpack(batch, padding_of(model), unpad=unpad, multiple=multiple)
    if base in ("rwkv", "xlstm"):
        given["use_cache"] = False  # states are written in place, which backward does not survive
    # Without a mask some models' eager attention is not causal (moshi, transformers 5.17).
    given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
    with precision(dtype):
        loss = model.eval()(**given).loss
    loss.backward()
    return loss.item(), gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: _full(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@cache
def build_cp(**options: Any) -> ContextParallel:
    return doors.parallel(dist.group.WORLD, check_batches=0, **options)


def run(job: Job) -> dict[str, Tensor]:
    """Return the loss of a job and the average over ranks of each gradient."""
    if job.tensor > 1:
        return _run_parallelized(job)
    cp = build_cp(**dict(job.options))
    model = build_model(job.name, head=job.head, dtype=job.dtype, attention="eager").eval()
    batch = build_batch(job, zoo.VOCAB_SIZE, padding_of(model))
    if job.trained_by == "trainer":
        loss = trainer_step(model, batch, dict(job.options))
        return averaged(loss, model)
    enable(model, **dict(job.enabling))
    if job.checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": job.checkpointing})
        if job.checkpointing:
            model.enable_input_require_grads()
    with cp.step(batch) as local, precision(job.dtype):
        loss = model(**local).loss
    loss.backward()
    return averaged(loss, model)


@cache
def build_meshes(tensor: int) -> DeviceMesh:
    sizes = (dist.group.WORLD.size() // tensor, tensor)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("context_parallel", "tensor_parallel"))


@cache
def build_tensor_cp(tensor: int, **options: Any) -> ContextParallel:
    mesh = build_meshes(tensor)
    return doors.parallel(
        mesh["context_parallel"], tensor=mesh["tensor_parallel"], check_batches=0, **options
    )


def _run_parallelized(job: Job) -> dict[str, Tensor]:
    """Return the same of a model whose weights ranks share."""
    return run_placed(
        job, build_model(job.name, head=job.head, dtype=job.dtype, attention="eager").eval()
    )


def run_placed(
    job: Job,
    model: torch.nn.Module,
    cp: ContextParallel | None = None,
    rows: tuple[int, int] = (0, 1),
) -> dict[str, Tensor]:
    """Return the loss and gradients of a model that is placed as by the strategy.

    Args:
        job: the batch and the options.
        model: on this rank.
        cp: by default without data ranks.
        rows: which part of the batch's rows this rank has, and of how many.
    """
    mesh = build_meshes(job.tensor)
    cp = cp or build_tensor_cp(job.tensor, **dict(job.options))
    batch = build_batch(job, zoo.VOCAB_SIZE, padding_of(model))
    batch = {key: x.chunk(rows[1])[rows[0]] for key, x in batch.items()}
    enable(model, **dict(job.enabling))
    place_model(
        torch.nn.ModuleDict({"model": model}),
        mesh["context_parallel"],
        Parameters(),
        sharding="full",
        tensor=mesh["tensor_parallel"],
        device=torch.device("cpu"),
        to_device=lambda: None,
    )
    with cp.step(batch) as local, precision(job.dtype):
        loss = model(**local).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def averaged(loss: Tensor, model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a loss, and the average over ranks of each gradient."""
    found = gradients(model)
    average_over_ranks(list(found.values()))
    return {"loss": loss.detach(), **found}


def compare(job: Job) -> Found | None:
    """Run a job on this rank; the first rank compares."""
    return check_found(job, run(job))


def check_found(job: Job, found: dict[str, Tensor]) -> Found | None:
    """Compare what a job has computed with one process, on the first rank."""
    loss = found.pop("loss")
    if dist.get_rank() > 0:
        return None
    exact_loss, exact = exact_gradients(job.name, job.kind, job.head, job.dtype)
    return Found(loss.item(), exact_loss, errors(found, exact))


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return each gradient's error over its norm.

    Some gradients are zero in theory (of key biases), and all noise: none counts for less than a
    small part of the typical norm.
    """
    norms = {name: float(x.double().norm()) for name, x in exact.items()}
    floor = 1e-3 * (sum(n * n for n in norms.values()) / max(len(norms), 1)) ** 0.5
    return {
        name: float((found[name] - exact[name]).double().norm()) / max(norms[name], floor, 1e-300)
        for name in exact
    }


def compare_all(jobs: list[Any], compare: Any = compare) -> list[Found | str | None]:
    """Run jobs one after another; an error that all ranks raise is returned as text."""
    results: list[Found | str | None] = []
    for job in jobs:
        try:
            results.append(compare(job))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results
