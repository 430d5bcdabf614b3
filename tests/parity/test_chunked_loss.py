"""The chunked loss on gloo ranks, against one process that scored each token by itself."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_cp import token_mean
from lightning_cp.loss.means import chunked_token_mean
from lightning_cp.step import active_step
from tests.oracle import errors
from tests.parity.batches import BATCHES, VOCAB, few_labels
from tests.parity.steps import Rows, average_, build_cp, gradients, whole_loss

pytestmark = pytest.mark.ranks

EDGES = (4, 15)


class Scorer(nn.Module):
    """Scores each token from itself and its position: all that a loss needs.

    Called with labels, it returns the loss; without, logits.
    """

    def __init__(self, tied):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, 8), nn.Embedding(64, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, VOCAB)
        if tied:
            self.out.weight = self.tokens.weight

    def head(self, x):
        return 5 * torch.tanh(self.out(x) / 5)

    def forward(self, tokens, positions, labels=None, *, loss=None, **_):
        hidden = torch.tanh(self.mix(self.tokens(tokens) + self.positions(positions)))
        return self.head(hidden) if labels is None else loss(self, hidden, labels)


def build(tied=False):
    torch.manual_seed(1)
    return Scorer(tied).double()


def plain(model, hidden, labels):
    return token_mean(model.head(hidden), labels)


def chunked(model, hidden, labels, chunk_len=5):
    # Inside the forward of FSDP2 the head's are whole; those of `mix` are not, and not needed.
    weights = list(model.parameters())
    assert not isinstance(model.out.weight, DTensor)
    return chunked_token_mean(model.head, hidden, labels, parameters=weights, chunk_len=chunk_len)


def recomputed(model, hidden, labels):
    return checkpoint(partial(chunked, model), hidden, labels, use_reentrant=False)


LOSSES = {"plain": plain, "chunked": chunked, "recomputed": recomputed}


@dataclass
class Job:
    """A step on ranks, and how the model is shared."""

    rows: Rows
    loss: str
    options: dict[str, str] = field(default_factory=dict)
    tied: bool = False
    wrap: str = "nothing"


def run_job(job):
    """Return loss and averaged gradients of a step, and what it says by position."""
    cp, _ = build_cp("cpu", 1, **job.options)
    cp.record_positions(EDGES)
    model = called = build(job.tied)
    if job.wrap == "fsdp":
        mesh = init_device_mesh("cpu", (cp.cp_size,), mesh_dim_names=("dp_cp",))
        fully_shard(model.mix, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    elif job.wrap == "ddp":
        called = DistributedDataParallel(model)
    with cp.step(job.rows.batch) as local:
        tokens, labels = local["input_ids"], local["labels"]
        loss = called(tokens, cp.position_ids(), labels, loss=LOSSES[job.loss])
        (mark,) = active_step.current().losses
    loss.backward()
    if job.wrap == "nothing":
        average_(model)
    found = {name: whole(x) for name, x in gradients(model).items()}
    return {"loss": loss.detach(), **found}, mark.by_position


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def run_jobs(jobs):
    return [run_job(job) for job in jobs]


def expected(rows, tied=False):
    model = build(tied)
    total, count = whole_loss(model, rows)
    loss = total / count.clamp(min=1)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


ROWS = {
    "few_labels": few_labels,
    **{
        name: BATCHES[name]
        for name in ("plain", "document_ids", "cu_seq_lens", "padded_and_packed", "no_label")
    },
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_loss_gradients_and_positions_are_those_of_token_mean(ranks, cp_size, layout):
    rows = {name: build_rows(3) for name, build_rows in ROWS.items()}
    options = {"layout": layout}
    jobs = [Job(r, loss, options) for r in rows.values() for loss in ("chunked", "plain")]
    results = ranks(cp_size).run(run_jobs, jobs)
    for number, (name, r) in enumerate(rows.items()):
        exact = expected(r)
        for rank, found in enumerate(results):
            (pieces, by_position), (_, as_whole) = found[2 * number : 2 * number + 2]
            worst = errors(pieces, exact)
            assert max(worst.values()) < 1e-12, (name, rank, worst)
            torch.testing.assert_close(by_position, as_whole, atol=1e-12, rtol=1e-12)
    # What few_labels promises.
    assert results[0][0][1][1].sum() == 0
    assert results[1][0][1][1].sum() > 0


SHARED = [(False, "nothing"), (True, "fsdp"), (False, "ddp")]
OTHERS = [(True, "nothing"), (False, "fsdp"), (True, "ddp")]


@pytest.mark.parametrize(
    ("tied", "wrap"),
    [*SHARED, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_inside_a_model_whose_parameters_are_shared(ranks, tied, wrap):
    rows = {name: ROWS[name](4) for name in ("document_ids", "few_labels")}
    kinds = ["chunked", "recomputed"]
    jobs = [Job(r, loss, tied=tied, wrap=wrap) for r in rows.values() for loss in kinds]
    exact = {name: expected(r, tied) for name, r in rows.items()}
    for found in ranks(2).run(run_jobs, jobs):
        for job, (result, _) in zip(jobs, found, strict=True):
            name = next(n for n, r in rows.items() if r is job.rows)
            worst = errors(result, exact[name])
            assert max(worst.values()) < 1e-12, (name, job.loss, worst)


def head_apart():
    """Shard the head as a unit of its own; return what is said about it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_cp",))
    head = fully_shard(nn.Linear(4, VOCAB), mesh=mesh)
    hidden, labels = torch.randn(1, 6, 4, requires_grad=True), torch.arange(6)[None]
    try:
        chunked_token_mean(head, hidden, labels, parameters=list(head.parameters()))
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_head_that_is_gathered_by_itself_is_refused(ranks):
    for message in ranks(2).run(head_apart):
        assert "is not in `parameters`: its gradient would be lost" in message
        assert "With FSDP2, call chunked_token_mean() in the forward()" in message


def head_of_dtensors(chunk_len):
    """Cut the rows of the head's weight over the ranks; return how far gradients are off."""
    torch.manual_seed(5)
    whole, head = nn.Linear(4, VOCAB).double(), nn.Linear(4, VOCAB).double()
    head.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    hidden, labels = torch.randn(1, 6, 4).double(), torch.arange(6)[None]
    token_mean(whole(hidden), labels).backward()
    weights = list(head.parameters())
    chunked_token_mean(head, hidden, labels, parameters=weights, chunk_len=chunk_len).backward()
    found = {name: x.grad.full_tensor() for name, x in head.named_parameters()}
    return max(errors(found, {name: x.grad for name, x in whole.named_parameters()}).values())


@pytest.mark.parametrize("chunk_len", [2, 6, None])
def test_a_head_whose_weights_are_dtensors(ranks, chunk_len):
    assert max(ranks(2).run(head_of_dtensors, chunk_len)) < 1e-12


def evaluate(batch):
    """Evaluate both losses; return them and what they say by position."""
    cp, _ = build_cp("cpu", 1)
    cp.record_positions(EDGES)
    model = build()
    with torch.no_grad(), cp.step(batch) as local:
        for loss in (plain, chunked):
            model(local["input_ids"], cp.position_ids(), local["labels"], loss=loss)
        return [
            (mark.value, mark.num_tokens, mark.by_position) for mark in active_step.current().losses
        ]


def test_evaluation_says_the_same(ranks):
    for as_whole, pieces in ranks(2).run(evaluate, BATCHES["document_ids"](5).batch):
        torch.testing.assert_close(pieces, as_whole, atol=1e-12, rtol=1e-12)
