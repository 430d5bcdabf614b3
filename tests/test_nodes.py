"""Two nodes as network namespaces train as one process; more of it: `python -m tests.nodes`."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import nodes


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
