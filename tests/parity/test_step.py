"""Loss and every gradient of a step on gloo ranks, against one process that saw the whole batch."""

import itertools

import pytest
import torch

from lightning_cp.step import active_step
from tests.oracle import errors
from tests.parity.batches import BATCHES
from tests.parity.steps import Job, build_cp, rank_steps, whole_step

pytestmark = pytest.mark.ranks

# Two that follow each other differ in both.
CHOICES = [
    ("gather", "zigzag"),
    ("ring", "contiguous"),
    ("ulysses", "balanced"),
    ("gather", "contiguous"),
    ("ring", "balanced"),
    ("ulysses", "zigzag"),
    ("gather", "balanced"),
    ("ring", "zigzag"),
    ("ulysses", "contiguous"),
]
OTHER_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 4)]


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


def check_jobs(pool, jobs):
    """Run jobs of one batch each on all ranks, and compare each with one process."""
    exact = {}
    for rank, results in enumerate(pool.run(rank_steps, jobs)):
        for job, found in zip(jobs, results, strict=True):
            (rows,) = job.rows
            if id(rows) not in exact:
                exact[id(rows)] = expected(rows)
            check(found, exact[id(rows)], (list(rows.batch), job.options, rank))


@pytest.mark.parametrize(
    ("cp_size", "num_choices"),
    [(3, 1), *(pytest.param(size, 2, marks=pytest.mark.slow) for size in (1, 2, 3, 4))],
)
def test_every_kind_of_batch(ranks, cp_size, num_choices):
    """With one or two algorithms and layouts each, that take turns."""
    turns = itertools.cycle(CHOICES)
    jobs = [
        Job([rows], {"algorithm": algorithm, "layout": layout})
        for rows in (build(3) for build in BATCHES.values())
        for algorithm, layout in itertools.islice(turns, num_choices)
    ]
    check_jobs(ranks(cp_size), jobs)


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_every_kind_of_batch_in_every_algorithm_and_layout(ranks, cp_size):
    rows = [build(3) for build in BATCHES.values()]
    for algorithm, layout in CHOICES:
        options = {"algorithm": algorithm, "layout": layout}
        check_jobs(ranks(cp_size), [Job([part], options) for part in rows])


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [
        ("ring", ("document_ids", "left_padded", "short")),
        pytest.param("ring", tuple(BATCHES), marks=pytest.mark.slow),
        pytest.param("gather", tuple(BATCHES), marks=pytest.mark.slow),
    ],
)
def test_neighbours_swap_heads_and_keys_travel_between_them(ranks, algorithm, names):
    options = {"algorithm": algorithm, "ulysses_size": 2}
    check_jobs(ranks(4), [Job([BATCHES[name](3)], options) for name in names])


def test_no_valid_label_gives_loss_zero_and_no_gradient():
    exact = expected(BATCHES["no_label"](3))
    assert all(not x.any() for x in exact.values())


@pytest.mark.parametrize("cp_size", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how",
    [
        {"backward_outside": True},
        pytest.param({"checkpointing": "reentrant"}, marks=pytest.mark.slow),
        pytest.param({"checkpointing": "non-reentrant"}, marks=pytest.mark.slow),
        {"checkpointing": "non-reentrant", "backward_outside": True},
        {"checkpointing": "reentrant", "backward_outside": True, "bound_mask": True},
    ],
    ids=str,
)
def test_backward_outside_and_activation_checkpointing(ranks, cp_size, how):
    rows = [BATCHES[name](4) for name in ("document_ids", "left_padded")]
    jobs = [
        Job([part], {"algorithm": algorithm, "layout": layout}, **how)
        for part, (algorithm, layout) in zip(itertools.cycle(rows), CHOICES[:3], strict=False)
    ]
    check_jobs(ranks(cp_size), jobs)


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


@pytest.mark.parametrize("cp_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_all_ranks_lay_a_batch_out_alike_by_its_documents_and_padding(ranks, cp_size):
    names = ["plain", "own_positions", "document_ids", "cu_seq_lens", "left_padded"]
    mine, *others = ranks(cp_size).run(laid_out, names)
    assert all(found == mine for found in others)
    assert [layout.name for layout in mine] == ["zigzag"] * 2 + ["balanced"] * 3


def narrow(names):
    return laid_out(names, balance_window=2)


def test_work_is_balanced_under_the_window_that_is_asked_for(ranks):
    names = ["document_ids", "left_padded"]
    usual, small = (ranks(2).run(build, names)[0] for build in (laid_out, narrow))
    assert usual[0].owned != small[0].owned
    assert usual[0] != usual[1]
