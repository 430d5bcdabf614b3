"""Whoever starts the processes, they find each other and train as one process would."""

import re

import pytest
import torch

from tests.lightning.jobs import Fit, run_alone, worst
from tests.lightning.scripts import cli, train
from tests.lightning.scripts.start import Job

pytestmark = pytest.mark.ranks

FIT = Fit(
    num_microbatches=train.NUM_MICROBATCHES,
    epochs=train.EPOCHS,
    clip=train.CLIP,
    dtype=torch.float64,
)
TWO = {0: (0, 0), 1: (0, 1)}
FOUR = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
"""Global rank -> data rank, context rank: context ranks are neighbours."""
SPREAD = "context ranks run on several hosts"


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path) as job:
        yield job


@pytest.fixture(scope="module")
def exact():
    return run_alone(FIT)


def check(job, exact, places):
    """Every rank has ended well, lies where it should, and holds the weights of one process."""
    outcome = job.wait()
    assert set(outcome.codes) == {0}, outcome.text
    found = job.found(len(places))
    for rank, one in enumerate(found):
        assert one["global_rank"] == rank
        assert (one["data_rank"], one["context_rank"]) == places[rank]
        assert one["context_ranks"] == [r for r in places if places[r][0] == places[rank][0]]
        assert one["data_ranks"] == [r for r in places if places[r][1] == places[rank][1]]
        difference = worst(one, exact)
        assert max(difference.values()) < 1e-12, difference
    return outcome, found


@pytest.mark.slow
def test_a_plain_script_starts_its_own_processes(job, exact):
    # A name, though Lightning was imported before us.
    job.start_script("train.py", "--strategy", "context_parallel_2", "--first", "lightning")
    _, found = check(job, exact, TWO)
    assert {one["environment"] for one in found} == {"LightningEnvironment"}


@pytest.mark.slow
def test_torchrun_starts_the_processes(job, exact):
    job.start_torchrun("train.py", "--strategy", "context_parallel_2", "--first", "lightning_cp")
    outcome, found = check(job, exact, TWO)
    assert {one["environment"] for one in found} == {"TorchElasticEnvironment"}
    assert SPREAD not in outcome.text


@pytest.mark.slow
def test_ranks_that_slurm_deals_out_in_turn_are_right_but_warned_of(job, exact):
    job.start_slurm("train.py", "--num-nodes", 2, cyclic=True)
    outcome, found = check(job, exact, FOUR)
    assert [one["node"] for one in found] == [0, 1, 0, 1]
    assert {one["environment"] for one in found} == {"SLURMEnvironment"}
    assert outcome.text.count(SPREAD) == 1
    assert "(node 0)" in outcome.text
    assert "(node 1)" in outcome.text
    assert "--distribution=block" in outcome.text


@pytest.mark.slow
def test_ranks_that_slurm_numbers_in_blocks_share_rows_inside_a_node(job, exact):
    job.start_slurm("train.py", "--num-nodes", 2)
    outcome, found = check(job, exact, FOUR)
    assert [one["node"] for one in found] == [0, 0, 1, 1]
    assert SPREAD not in outcome.text


@pytest.mark.slow
def test_torchrun_on_two_nodes_shares_rows_inside_a_node(job, exact):
    job.start_torchrun("train.py", "--num-nodes", 2, num_nodes=2)
    outcome, found = check(job, exact, FOUR)
    assert [one["node"] for one in found] == [0, 0, 1, 1]
    assert SPREAD not in outcome.text


@pytest.mark.slow
def test_the_command_line_finds_the_strategy_by_its_class_path(job):
    pytest.importorskip("jsonargparse")
    job.start_script(
        "cli.py",
        "fit",
        "--trainer.strategy=lightning_cp.ContextParallelStrategy",
        "--trainer.strategy.context_parallel_size=2",
        "--trainer.strategy.loss=local_mean",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.use_distributed_sampler=false",
        "--trainer.max_epochs=1",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    )
    outcome = job.wait()
    assert set(outcome.codes) == {0}, outcome.text
    model = cli.Model()
    optimizer = model.configure_optimizers()
    losses = []
    for batch in model.train_dataloader():
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    for rank, one in enumerate(job.found(2)):
        assert one["clean"], "the script has imported lightning_cp"
        assert one["context_ranks"] == [0, 1]
        assert one["context_rank"] == rank
        assert one["losses"] == pytest.approx(losses, abs=1e-12)
        for name, weight in model.named_parameters():
            torch.testing.assert_close(one["weights"][name], weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_more_processes_than_devices_are_refused(job):
    job.start_torchrun("train.py", "--devices", 1)
    outcome = job.wait()
    assert outcome.codes == [1], outcome.text
    # torchrun ends the other rank as soon as one has failed; either may be the first.
    _, _, cause = outcome.text.partition("Root Cause")
    words = r"ValueError: (The launcher started 2 processes|Process 1 of this node has no device)"
    assert len(re.findall(words, cause)) == 1, outcome.text
    assert "IndexError" not in outcome.text


@pytest.mark.slow
def test_a_size_that_does_not_divide_is_refused(job):
    job.start_script("train.py", "--cp-size", 3)
    outcome = job.wait()
    assert outcome.codes == [1], outcome.text
    message = "ValueError: context_parallel_size=3 does not divide the 2 processes of this job"
    assert outcome.text.count(message) == 1, outcome.text
