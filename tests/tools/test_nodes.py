"""Two nodes as network namespaces train as one process; more of it: `python -m tools.nodes`."""

import os
import subprocess
from pathlib import Path

import pytest

from tools import nodes


@pytest.fixture
def two():
    """Two nodes with limited links; nothing of them may be left."""
    if reason := nodes.missing():
        pytest.skip(reason)
    with nodes.Nodes(2, rate="1gbit") as two:
        yield two
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert f"lcp{os.getpid()}" not in listed.stdout
    assert not list(Path("/etc/netns").glob(f"lcp{os.getpid()}*"))


@pytest.mark.slow
def test_nodes_share_sequences_over_a_network(two, tmp_path):
    exact = nodes.one_process(tmp_path, steps=3, batch_size=4)
    config = nodes.write_config(
        tmp_path / "run", batch_size=4, steps=3, context_parallel_size=2, parameter_sharding="full"
    )
    with nodes.running(two, 1, tmp_path, config) as job:
        outcome = nodes.check(job.wait())
    assert nodes.differ(outcome.losses, exact) < 1e-5
    assert [rows[0]["node"] for rows in outcome.rows] == [0, 1]
    assert outcome.sent(first=1) > 1  # megabytes: the link was used


@pytest.mark.slow
def test_a_node_that_is_killed_ends_the_others(two, tmp_path):
    config = nodes.write_config(
        tmp_path / "run", batch_size=4, steps=100_000, context_parallel_size=2
    )
    with nodes.running(two, 1, tmp_path, config) as job:
        job.wait_for_step(2)
        job.kill(1)
        outcome = job.watch([0], limit=60)
        ((ranks, torchrun),) = outcome.gone
        assert ranks is not None, outcome.texts[0]
        assert torchrun is not None, outcome.texts[0]
    assert "by peer" in nodes.first_error(outcome.texts[0]), outcome.texts[0]


@pytest.mark.slow
def test_a_node_of_another_name_takes_the_place_of_a_lost_one(tmp_path):
    if reason := nodes.missing():
        pytest.skip(reason)
    config = nodes.write_config(
        tmp_path / "run", batch_size=4, steps=100_000, save_every=2, data_parallel_size=1
    )
    restarts = {"PET_MAX_RESTARTS": "1"}
    with (
        # Its name is the first in order, so that it becomes rank 0.
        nodes.Nodes(3, names=["node0", "node1", "another"]) as three,
        nodes.running(
            three,
            1,
            tmp_path,
            config,
            first=(0, 1),
            number="2",
            environment=lambda _: restarts,
        ) as job,
    ):
        job.wait_for_step(4)
        job.kill(1)
        job.join(2)
        job.wait_for_size(2)
        job.terminate(0)
        outcome = job.watch([2])
    assert outcome.rows[0][-1]["host"] == "another"
    first = next(row["step"] for row in outcome.rows[0] if row["host"] == "another")
    assert first > 2  # after a checkpoint
    losses: dict[int, float] = {}
    for row in outcome.rows[0]:  # some steps twice
        assert losses.setdefault(row["step"], row["loss"]) == pytest.approx(row["loss"], rel=1e-5)
