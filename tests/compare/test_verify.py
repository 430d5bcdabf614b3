"""`verify` lets exact models pass and stops those that mix tokens behind our back."""

import random

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import pad

from lightning_cp import token_mean, verify
from lightning_cp.compare.verify import Report, truncate_batch
from lightning_cp.private.groups import flatten
from tests import doors
from tests.parity.batches import BATCHES
from tests.parity.steps import build_model

pytestmark = pytest.mark.ranks


class Broken(nn.Module):
    """A model with something that a step does not see."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.inner = build_model(torch.float32)

    def forward(self, input_ids, position_ids):
        x = self.inner.tokens(input_ids)
        if self.kind == "shifted tokens":
            x = x + pad(x, (0, 0, 1, 0))[:, :-1]
        elif self.kind == "hand-written attention":
            x = x + torch.softmax(x @ x.mT, -1).tril() @ x
        elif self.kind == "own positions":
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.inner(None, position_ids, inputs_embeds=x)


def run_verify(kind, batch, sharded, dp_size=1, max_len=None):
    """Return the report, or what was said."""
    mesh = init_device_mesh(
        "cpu",
        (dp_size, dist.get_world_size() // dp_size),  # noqa: TID251
        mesh_dim_names=("data_parallel", "context_parallel"),
    )
    cp = doors.parallel(mesh["context_parallel"], mesh["data_parallel"])
    model = Broken(kind).train()
    if sharded:
        fully_shard(model, mesh=flatten(mesh["data_parallel", "context_parallel"], "dp_cp"))

    def loss_fn(given):
        logits = model(given["input_ids"], cp.position_ids())
        loss = token_mean(logits, given["labels"])
        if kind == "scaled loss" and cp.cp_size > 1 and given["labels"] is not batch["labels"]:
            return loss * 1.5 if given["labels"].shape[1] < batch["labels"].shape[1] else loss
        if kind == "one rank's loss" and given["labels"].shape[1] < batch["labels"].shape[1]:
            return loss + float(cp.cp_rank)
        return loss

    try:
        report = verify(model, batch, cp=cp, loss_fn=loss_fn, max_len=max_len)
    except RuntimeError as error:
        return str(error)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    return report


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("document_ids", False),
        ("left_padded", True),
        pytest.param("document_ids", True, marks=pytest.mark.slow),
        pytest.param("left_padded", False, marks=pytest.mark.slow),
        pytest.param("cu_seq_lens", False, marks=pytest.mark.slow),
        pytest.param("cu_seq_lens", True, marks=pytest.mark.slow),
    ],
)
def test_an_exact_model_passes(ranks, sharded, name):
    batch = BATCHES[name](13).batch
    for report in ranks(2).run(run_verify, "exact", batch, sharded):
        assert report.passed
        assert max(report.errors.values()) < 1e-4
        assert report.num_tokens == batch["input_ids"].shape[1]


def test_data_ranks_verify_the_same_rows(ranks):
    batch = BATCHES["document_ids"](13).batch
    reports = ranks(4).run(run_verify, "exact", batch, True, 2)
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize(
    "kind", ["shifted tokens", "hand-written attention", "own positions", "scaled loss"]
)
def test_what_mixes_tokens_unseen_is_stopped_with_the_worst_parameters(ranks, kind):
    batch = BATCHES["plain"](16).batch
    for said in ranks(2).run(run_verify, kind, batch, False):
        assert "Context parallelism changes the results of this model" in said
        assert "Worst gradients: " in said
        assert "inner." in said


def test_what_one_rank_finds_is_raised_on_all(ranks):
    first, second = ranks(2).run(run_verify, "one rank's loss", BATCHES["plain"](16).batch, False)
    assert "changes the results of this model: another rank has found it" in first
    assert "changes the results of this model: loss=" in second


class Counting(nn.Module):
    """Counts its calls, and measures what it sees."""

    def __init__(self):
        super().__init__()
        self.inner, self.mean, self.calls = nn.Linear(2, 8), torchmetrics.MeanMetric(), 0
        self.register_buffer("last", torch.zeros(()))

    def forward(self, labels, inputs_embeds):
        self.calls += 1
        self.mean.update(inputs_embeds)
        self.last = inputs_embeds.mean()
        random.random()
        return token_mean(self.inner(inputs_embeds), labels)


def test_a_comparison_leaves_no_trace():
    cp, model = doors.parallel(None), Counting()
    model.inner.weight.grad = torch.ones(8, 2)
    batch = {"labels": torch.ones(1, 4, dtype=torch.long), "inputs_embeds": torch.ones(1, 4, 2)}
    before, generator = random.getstate(), torch.Generator()
    drawn = generator.get_state()

    def loss_fn(local):
        return model(**local) * torch.rand((), generator=generator)

    report = verify(model, batch, cp=cp, loss_fn=loss_fn, check=False)
    assert not report.passed  # another draw
    assert torch.equal(generator.get_state(), drawn)
    assert verify(model, batch, cp=cp, loss_fn=lambda local: model(**local)).passed
    assert random.getstate() == before
    assert (model.calls, model.mean.update_count, float(model.last)) == (0, 0, 0.0)
    assert float(model.mean.mean_value) == 0.0
    assert bool((model.inner.weight.grad == 1).all())


def test_what_has_no_gradient_is_not_compared():
    cp, model = doors.parallel(None), Counting()
    batch = {"labels": torch.full((1, 4), -100), "inputs_embeds": torch.ones(1, 4, 2)}
    with pytest.raises(ValueError, match="No token .* has a label, or .* every gradient is 0"):
        verify(model, batch, cp=cp, loss_fn=lambda local: model(**local))
    with pytest.raises(ValueError, match="max_len=0: give the tokens of a sequence, 1 or more"):
        verify(model, batch, cp=cp, max_len=0)


def test_rows_are_cut_around_their_first_label():
    cp = doors.parallel(None)
    batch = {"input_ids": torch.arange(100)[None], "labels": torch.full((1, 100), -100)}
    batch["labels"][:, 70:] = 1
    cut = truncate_batch(batch, cp=cp, max_len=20)
    assert cut["input_ids"][0].tolist() == list(range(60, 80))
    assert truncate_batch(batch, cp=cp, max_len=100)["input_ids"].shape == (1, 100)


def test_packed_lengths_become_document_ids_when_rows_are_cut():
    cp = doors.parallel(None)
    batch = {"input_ids": torch.arange(12)[None], "cu_seq_lens_q": torch.tensor([0, 5, 12])}
    cut = truncate_batch(batch, cp=cp, max_len=7)
    assert cut["document_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1]]
    assert "cu_seq_lens_q" not in cut


def test_nan_is_the_worst_gradient_and_does_not_pass():
    report = Report(1.0, 1.0, {"a": 0.5, "b": float("nan"), "c": 0.0}, 1.0, 8)
    assert not report.passed
    assert [name for name, _ in report.worst(2)] == ["b", "a"]
