"""Log-probabilities of full sequences on gloo ranks, against one process that scores each token."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_cp import sequence_logp, token_logp
from tests import doors
from tests.oracle import errors
from tests.parity.batches import BATCHES, VOCAB, few_labels
from tests.parity.steps import IGNORED, Rows, average_, build_cp, gradients

pytestmark = pytest.mark.ranks

CAP = 5.0


class Scorer(nn.Module):
    """Scores each token from itself and its position; called with labels, it returns the loss."""

    def __init__(self, tied):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, 8), nn.Embedding(256, 8)
        self.mix, self.out = nn.Linear(8, 8), nn.Linear(8, VOCAB)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, tokens, positions, loss=None):
        hidden = torch.tanh(self.mix(self.tokens(tokens) + self.positions(positions)))
        return hidden if loss is None else loss(self, hidden)


def build(tied=False):
    torch.manual_seed(1)
    return Scorer(tied).double()


def weights_of(shape):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def preference(logp, samples, documents):
    """Return a loss in which each token, sample and document has another gradient."""
    total = (logp * weights_of(logp.shape)).sum() / 7 + logsigmoid(samples[0] / 30).sum()
    sums, means = documents
    return total + logsigmoid(means.cumsum(1) * weights_of(sums.shape)).sum() + sums.exp().sum()


def score(kind, model, hidden, labels):
    weights = list(model.parameters())
    assert not isinstance(model.out.weight, DTensor)
    options = {"softcap": CAP}
    if kind == "logits":
        scores = model.out(hidden)
    else:
        scores = hidden, model.out
        options |= {"parameters": weights, "chunk_len": 5}
    logp = token_logp(scores, labels, **options)
    samples, documents = (sequence_logp(logp, labels, per=x) for x in ("sample", "document"))
    loss = preference(logp, samples, (documents.sums, documents.means))
    return loss, logp, samples.num_tokens, documents.num_tokens


def recomputed(kind, model, hidden, labels):
    return checkpoint(partial(score, kind, model), hidden, labels, use_reentrant=False)


@dataclass
class Job:
    """A step on ranks, and how the model is shared."""

    rows: Rows
    kind: str = "head"
    options: dict[str, str] = field(default_factory=dict)
    tied: bool = False
    wrap: str = "nothing"
    recompute: bool = False


def run_job(job, cp=None):
    """Return the loss, the log-probabilities, counts and averaged gradients of a step."""
    alone = cp is not None
    cp = cp or build_cp("cpu", 1, **job.options)[0]
    model = called = build(job.tied)
    if job.wrap == "fsdp":
        mesh = init_device_mesh("cpu", (cp.cp_size,), mesh_dim_names=("dp_cp",))
        fully_shard(model.mix, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    elif job.wrap == "ddp":
        called = DistributedDataParallel(model)
    run = recomputed if job.recompute else score
    with cp.step(job.rows.batch) as local:
        labels = local["labels"]
        outputs = called(
            local["input_ids"], cp.position_ids(), lambda m, x: run(job.kind, m, x, labels)
        )
    loss, logp, *counts = outputs
    loss.backward()
    if job.wrap == "nothing" and not alone:
        average_(model)
    found = {
        name: x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in gradients(model).items()
    }
    return {"loss": loss.detach(), "logp": logp.detach(), **found}, counts


def run_jobs(jobs):
    return [run_job(job) for job in jobs]


def expected(rows, tied=False):
    """Score each token by itself, and add up its sample and document in a loop."""
    model, batch = build(tied), rows.batch
    ids, labels = batch["input_ids"], batch["labels"]
    num_samples, length = ids.shape
    documents = torch.zeros_like(ids) if rows.documents is None else rows.documents
    positions = torch.arange(length).expand(num_samples, -1)
    positions = positions if rows.positions is None else rows.positions
    logits = CAP * torch.tanh(model.out(model(ids, positions)) / CAP)
    logp, places, counts = [], [], []
    for row in range(num_samples):
        numbers = {}
        for number in documents[row].tolist():
            if number != -1:
                numbers.setdefault(number, len(numbers))
        values, place = [], []
        for token in range(length - 1):
            number, label = int(documents[row, token + 1]), labels[row, token + 1]
            counts_here = documents[row, token] == number != -1 and label != IGNORED
            one = logits[row, token].log_softmax(-1)[label.clamp(min=0)]
            values.append(one if counts_here else one.detach() * 0)
            place.append(numbers[number] if counts_here else -1)
        logp.append(torch.stack(values))
        places.append(place)
        counts.append(len(numbers))
    logp, places = torch.stack(logp), torch.tensor(places)
    parts = [places == number for number in range(max(counts))]
    sums = torch.stack([(logp * part).sum(1) for part in parts], 1)
    tokens = torch.stack([part.sum(1) for part in parts], 1)
    samples = logp.sum(1, keepdim=True)
    loss = preference(logp, (samples,), (sums, sums / tokens.clamp(min=1)))
    loss.backward()
    exact = {"loss": loss.detach(), "logp": logp.detach(), **gradients(model)}
    return exact, [(places >= 0).sum(1, keepdim=True), tokens]


def check(found, exact):
    (result, counts), (expected_result, expected_counts) = found, exact
    worst = errors(result, expected_result)
    assert max(worst.values()) < 1e-12, worst
    assert all(torch.equal(a, b) for a, b in zip(counts, expected_counts, strict=True))


NAMES = ("plain", "document_ids", "cu_seq_lens", "left_padded", "padded_and_packed", "short")
ROWS = {"few_labels": few_labels, **{name: BATCHES[name] for name in NAMES}}
TWO = ("document_ids", "few_labels")


def all_jobs(is_quick):
    kinds = [
        Job(build_rows(3), kind) for build_rows in ROWS.values() for kind in ("head", "logits")
    ]
    layouts = [
        Job(ROWS[n](3), options={"layout": x}) for n in TWO for x in ("contiguous", "zigzag")
    ]
    wrapped = [
        Job(ROWS[name](4), tied=tied, wrap=wrap, recompute=recompute)
        for wrap, tied, recompute in (
            ("fsdp", True, False),
            ("fsdp", False, True),
            ("ddp", True, True),
            ("ddp", False, False),
        )
        for name in TWO
    ]
    return [*kinds, *layouts[::3], *wrapped[::2]] if is_quick else [*kinds, *layouts, *wrapped]


@pytest.mark.parametrize(
    ("cp_size", "is_quick"),
    [(3, True), *(pytest.param(size, False, marks=pytest.mark.slow) for size in (2, 3))],
)
def test_values_and_gradients_are_those_of_one_process(ranks, cp_size, is_quick):
    jobs = all_jobs(is_quick)
    exact = [expected(job.rows, job.tied) for job in jobs]
    results = ranks(cp_size).run(run_jobs, jobs)
    for found in results:
        for one, of_process in zip(found, exact, strict=True):
            check(one, of_process)
    for found in results[1:]:  # the same bits on every rank
        for (one, _), (first, _) in zip(found, results[0], strict=True):
            assert torch.equal(one["logp"], first["logp"])


def test_one_rank_walks_the_same_code():
    for build_rows in ROWS.values():
        for kind in ("head", "logits"):
            rows = build_rows(3)
            check(run_job(Job(rows, kind), doors.parallel(None)), expected(rows))


def data_axis(all_rows):
    """Weigh documents of two data ranks by the global mean; return the loss and gradients."""
    from lightning_cp.loss.means import global_mean

    cp, data_rank = build_cp("cpu", 2)
    model, rows = build(), all_rows[data_rank]
    with cp.step(rows.batch) as local:
        hidden = model(local["input_ids"], cp.position_ids())
        logp = token_logp((hidden, model.out), local["labels"], chunk_len=4)
        found = sequence_logp(logp, local["labels"], per="document")
        valid = found.num_tokens > 0
        losses = logsigmoid(found.means) * valid
        loss = global_mean(losses.sum(), valid.sum())
    loss.backward()
    average_(model)
    return {"loss": loss.detach(), **gradients(model)}


def test_global_mean_over_sequences_of_data_ranks(ranks):
    """Data ranks hold different numbers of documents."""
    all_rows = [BATCHES["document_ids"](6), BATCHES["cu_seq_lens"](7)]
    model, total, count = build(), 0.0, 0
    for rows in all_rows:
        with doors.parallel(None).step(rows.batch) as local:
            hidden = model(local["input_ids"], rows.positions)
            logp = token_logp(model.out(hidden), local["labels"])
            found = sequence_logp(logp, local["labels"], per="document")
        valid = found.num_tokens > 0
        total, count = total + (logsigmoid(found.means) * valid).sum(), count + valid.sum()
    (total / count).backward()
    exact = {"loss": (total / count).detach(), **gradients(model)}
    for result in ranks(4).run(data_axis, all_rows):
        worst = errors(result, exact)
        assert max(worst.values()) < 1e-12, worst
