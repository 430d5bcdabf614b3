"""Loss and every gradient of a step on gloo ranks, against one process that saw the whole batch."""

import pytest
import torch

from lightning_cp import Mask, active_step
from tests.oracle import errors
from tests.parity.batches import BATCHES
from tests.parity.steps import Job, build_cp, rank_steps, whole_step

pytestmark = pytest.mark.ranks

CHOICES = [
    ("gather", "zigzag"),
    ("ring", "contiguous"),
    ("ulysses", "zigzag"),
    ("ring", "zigzag"),
    ("ring", "balanced"),
    ("ulysses", "balanced"),
]


def check(found, exact, name):
    assert set(found) == set(exact), name
    worst = errors(found, exact)
    assert max(worst.values()) < 1e-10, (name, worst)


def expected(rows):
    exact = whole_step([rows])
    embeds = rows.batch.get("inputs_embeds")
    if embeds is not None:
        exact["inputs_embeds"], embeds.grad = embeds.grad, None
    return exact


@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4))]
)
def test_every_kind_of_batch(ranks, cp_size):
    rows = {name: build(3) for name, build in BATCHES.items()}
    exact = {name: expected(rows[name]) for name in rows}
    for algorithm, layout in CHOICES:
        options = {"algorithm": algorithm, "layout": layout}
        jobs = [Job([rows[name]], options) for name in rows]
        for rank, results in enumerate(ranks(cp_size).run(rank_steps, jobs)):
            for name, found in zip(rows, results, strict=True):
                check(found, exact[name], (name, algorithm, layout, rank))


@pytest.mark.parametrize("algorithm", [pytest.param("gather", marks=pytest.mark.slow), "ring"])
def test_neighbours_swap_heads_and_keys_travel_between_them(ranks, algorithm):
    rows = {name: build(3) for name, build in BATCHES.items()}
    jobs = [Job([part], {"algorithm": algorithm, "ulysses_size": 2}) for part in rows.values()]
    for rank, results in enumerate(ranks(4).run(rank_steps, jobs)):
        for name, found in zip(rows, results, strict=True):
            check(found, expected(rows[name]), (name, rank))


def test_no_valid_label_gives_loss_zero_and_no_gradient():
    exact = expected(BATCHES["no_label"](3))
    assert all(not x.any() for x in exact.values())


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize(
    "how",
    [
        {"backward_outside": True},
        {"checkpointing": "reentrant"},
        {"checkpointing": "non-reentrant"},
        {"checkpointing": "non-reentrant", "backward_outside": True},
        {"checkpointing": "reentrant", "backward_outside": True, "bound_mask": True},
    ],
    ids=str,
)
def test_backward_outside_and_activation_checkpointing(ranks, cp_size, how):
    names = ["document_ids", "left_padded"]
    rows = [BATCHES[name](4) for name in names]
    for algorithm, layout in CHOICES[:3]:
        jobs = [Job([r], {"algorithm": algorithm, "layout": layout}, **how) for r in rows]
        results = ranks(cp_size).run(rank_steps, jobs)
        for r, *found in zip(rows, *results, strict=True):
            for part in found:
                check(part, whole_step([r]), how)


@pytest.mark.parametrize("algorithm", ["gather", "ring", "ulysses"])
def test_data_parallel_beside_it_with_uneven_labels(ranks, algorithm):
    rows = [BATCHES["document_ids"](5), BATCHES["right_padded"](6)]
    exact = whole_step(rows)
    assert exact["loss"] > 0
    for found in ranks(4).run(rank_steps, [Job(rows, {"algorithm": algorithm})]):
        check(found[0], exact, algorithm)


def test_all_ranks_report_the_same_loss(ranks):
    results = ranks(3).run(rank_steps, [Job([BATCHES["plain"](7)])])
    losses = torch.stack([found[0]["loss"] for found in results])
    assert (losses == losses[0]).all()


def laid_out(names, **options):
    """Return the layout of batches on this rank."""
    cp, _ = build_cp("cpu", 1, **options)
    found = []
    for name in names:
        with cp.step(BATCHES[name](3).batch):
            found.append(active_step.current().layout)
    return found


@pytest.mark.parametrize("cp_size", [2, 3])
def test_all_ranks_lay_a_batch_out_alike_by_its_documents_and_padding(ranks, cp_size):
    names = ["plain", "own_positions", "document_ids", "cu_seq_lens", "left_padded"]
    mine, *others = ranks(cp_size).run(laid_out, names)
    assert all(found == mine for found in others)
    assert [layout.name for layout in mine] == ["zigzag"] * 2 + ["balanced"] * 3


def narrow(names):
    return laid_out(names, balance=Mask(causal=True, window=2))


def deaf(names):
    return laid_out(names, balance=Mask(causal=True, documents=False, padding=False))


def test_work_is_balanced_under_the_mask_that_is_asked_for(ranks):
    names = ["document_ids", "left_padded"]
    usual, small, same = (ranks(2).run(build, names)[0] for build in (laid_out, narrow, deaf))
    assert usual[0].owned != small[0].owned
    assert usual[0] != usual[1]
    assert same[0] == same[1], "rows without documents and padding are alike"
