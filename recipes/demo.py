# SPDX-License-Identifier: Apache-2.0
"""`make demo`: two CPU ranks share rows of a small transformer; one process does the same alone.

Prints loss and gradient differences for plain, packed and padded rows, in float64, and exits with 1
if one is larger than rounding can explain. No download: the text is Python's own json decoder.
"""

import json.decoder
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from lightning_cp import ContextParallel, Mask, token_mean
from lightning_cp.engine.plan import AlgorithmName
from recipes.tiny import Attend, TinyLM

RANKS = 2
LENGTH = 301  # odd on purpose
TOLERANCE = 1e-10
ALGORITHMS: tuple[AlgorithmName, ...] = ("gather", "ring")
Step = dict[str, Tensor]


def build_model() -> TinyLM:
    """Build the same model in every process."""
    torch.manual_seed(0)
    return TinyLM(vocab_size=256, dim=64, num_layers=4, window=40).double()


def build_batches() -> dict[str, dict[str, Tensor]]:
    """Cut the text into two rows: plain, as packed documents, and padded on the left."""
    text = Path(json.decoder.__file__).read_bytes()[: 2 * LENGTH]
    tokens = torch.tensor(list(text)).view(2, LENGTH)
    newline = tokens == ord("\n")
    documents = (newline.cumsum(1) - newline.long()) // 3  # three lines are a document
    padding = torch.arange(LENGTH) < torch.tensor([[60], [170]])
    return {
        "plain": {"input_ids": tokens, "labels": tokens},
        "packed": {"input_ids": tokens, "labels": tokens, "document_ids": documents},
        "padded": {
            "input_ids": tokens,
            "labels": tokens.masked_fill(padding, -100),
            "attention_mask": (~padding).long(),
        },
    }


def attend_dense(batch: dict[str, Tensor]) -> Attend:
    """Return plain attention with a dense mask, as one would write it for one process."""
    length = batch["input_ids"].shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0)[None]
    if "document_ids" in batch:
        seen = seen & (batch["document_ids"][:, :, None] == batch["document_ids"][:, None])
    if "attention_mask" in batch:
        seen = seen & (batch["attention_mask"][:, None] == 1)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor) -> Tensor:
        window = mask.window if isinstance(mask.window, int) else length
        visible = (seen & (distance < window)).unsqueeze(1)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
        sink = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ v

    return attend


def positions(batch: dict[str, Tensor]) -> Tensor:
    """Count positions from the start of each document."""
    length = batch["input_ids"].shape[1]
    place = torch.arange(length).expand_as(batch["input_ids"])
    if "document_ids" not in batch:
        return place
    new = torch.nn.functional.pad(batch["document_ids"].diff(dim=1) != 0, (1, 0))
    return place - (place * new).cummax(1).values


def step_alone(batch: dict[str, Tensor]) -> Step:
    """Return loss and gradients of one process that holds whole rows."""
    model = build_model()
    labels = batch["labels"].clone()
    if "document_ids" in batch:  # the first token of a document follows nothing
        labels[:, 1:][batch["document_ids"].diff(dim=1) != 0] = -100
    logits = model(batch["input_ids"], positions(batch), attend=attend_dense(batch))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return collect(model, loss)


def step_shared(batch: dict[str, Tensor], cp: ContextParallel) -> Step:
    """Return loss and averaged gradients of ranks that share the rows."""
    model = build_model()
    with cp.step(batch) as local:
        logits = model(local["input_ids"], cp.position_ids())
        loss = token_mean(logits, local["labels"])
    loss.backward()
    for parameter in model.parameters():  # what DDP and FSDP2 do
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(cp.cp_size)
    return collect(model, loss)


def collect(model: TinyLM, loss: Tensor) -> Step:
    """Return loss and gradients by name."""
    named = model.named_parameters()
    return {"loss": loss.detach(), **{n: p.grad for n, p in named if p.grad is not None}}


def worst_gradient(found: Step, exact: Step) -> tuple[float, str]:
    """Return the largest relative error of a gradient, and whose it is."""
    names = [name for name in exact if name != "loss"]
    errors = {n: float((found[n] - exact[n]).norm() / exact[n].norm()) for n in names}
    name = max(names, key=errors.__getitem__)
    return errors[name], name


def run_rank(rank: int, rendezvous: str) -> None:
    """Compare, on one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    say: Callable[..., None] = partial(print, flush=True) if rank == 0 else _say_nothing
    say(
        f"{'rows':8}{'algorithm':11}{'loss, alone':>14}{'loss, shared':>14}{'difference':>12}",
        end="",
    )
    say(f"{'worst gradient':>16}  of")
    passed = True
    for name, batch in build_batches().items():
        exact = step_alone(batch)
        for algorithm in ALGORITHMS:
            cp = ContextParallel(dist.group.WORLD, algorithm=algorithm)
            found = step_shared(batch, cp)
            difference = float((found["loss"] - exact["loss"]).abs())
            error, parameter = worst_gradient(found, exact)
            passed = passed and max(difference, error) < TOLERANCE
            say(f"{name:8}{algorithm:11}{exact['loss']:14.9f}{found['loss']:14.9f}", end="")
            say(f"{difference:12.1e}{error:16.1e}  {parameter}")
    dist.destroy_process_group()
    if not passed:
        sys.exit(1)


def _say_nothing(*_: object, **__: object) -> None:
    """Leave the talking to rank 0."""


def main() -> None:
    """Start the ranks and wait for them."""
    start = time.monotonic()
    print(
        f"A 4-layer transformer on rows of {LENGTH} tokens: one process, and {RANKS} CPU ranks that"
    )
    print(
        "hold half of each row. Grouped heads, windows, sinks; float64; every gradient compared.\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"file://{folder}/rendezvous",)
        start_processes(run_rank, arguments, nprocs=RANKS)
    print(f"\nSame numbers, within {TOLERANCE}, in {time.monotonic() - start:.0f} s.")


if __name__ == "__main__":
    main()
