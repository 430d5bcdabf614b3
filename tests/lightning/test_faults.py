"""When a rank fails, all ranks end soon with the reason, and the last checkpoint is usable."""

import re

import pytest

from lightning_cp import ContextParallelStrategy
from tests.lightning import jobs
from tests.lightning.scripts import fault
from tests.lightning.scripts.start import FAULT, Job

pytestmark = pytest.mark.ranks

LAST_SAVED = fault.FAULT_STEP // fault.SAVE_EVERY * fault.SAVE_EVERY
PEER_GONE = r"Connection (closed|reset) by|Broken pipe"


@pytest.fixture
def job(tmp_path):
    with Job(tmp_path) as job:
        yield job


def check(job, ranks, *messages):
    """All processes end in time, with an error and the messages, and training can go on."""
    outcome = job.wait()
    assert (job.out / FAULT).exists(), outcome.text
    assert 0 not in outcome.codes, outcome.text
    for message in messages:
        assert re.search(message, outcome.text), (message, outcome.text)
    check_resumes(job.out, ranks)
    return outcome


def check_resumes(out, ranks):
    saved = (out / "checkpoints").glob("step=*.ckpt")
    last = max(saved, key=lambda path: int(path.stem.removeprefix("step=")))
    assert last.stem == f"step={LAST_SAVED}"
    fit = jobs.Fit(num_microbatches=fault.NUM_MICROBATCHES, epochs=fault.EPOCHS, clip=None)
    exact = jobs.run_alone(fit)["losses"]
    for losses in ranks(2).run(resume, str(last)):
        assert losses == pytest.approx([exact[LAST_SAVED]], abs=1e-5)


def resume(path):
    """Load a checkpoint on the ranks of the pool, and train one step more."""
    with jobs.elastic_environment():
        module = jobs.Module()
        trainer = jobs.build_trainer(strategy=ContextParallelStrategy(), max_steps=LAST_SAVED + 1)
        rows = jobs.loader(jobs.PackedRows(2 * fault.NUM_MICROBATCHES), dp_size=1)
        trainer.fit(module, rows, ckpt_path=path)
        return module.losses


@pytest.mark.slow
def test_a_killed_rank_ends_a_plain_script(job, ranks):
    job.start_script("fault.py", "kill", "--rank", 1)
    check(job, ranks, PEER_GONE)


@pytest.mark.slow
def test_the_killed_first_rank_ends_a_plain_script(job, ranks):
    job.start_script("fault.py", "kill", "--rank", 0)
    check(job, ranks, PEER_GONE)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_ends_all_when_a_rank_is_killed(job, ranks, rank):
    job.start_torchrun("fault.py", "kill", "--rank", rank)
    check(job, ranks, rf"local_rank: {rank}", r"Signal 9 \(SIGKILL\)")


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all(job, ranks):
    job.start_script("fault.py", "raise", "--rank", 1)
    check(job, ranks, "RuntimeError: the disk of this rank is full", PEER_GONE)


def differ(out):
    """Return the error of a run on the ranks of the pool, of which one gets another batch."""
    with jobs.elastic_environment(), pytest.raises(ValueError, match="Usual causes") as error:
        fault.train(out, "differ", 1)
    return str(error.value)


def test_different_batches_end_all_and_the_usual_causes_are_named(tmp_path, ranks):
    for rank, text in enumerate(ranks(2).run(differ, tmp_path)):
        assert f"rank 1 and rank 0 differ in their values; this is rank {rank}, with" in text
        assert text.count("Usual causes: a sampler or an iterable data set") == 1, text
    check_resumes(tmp_path, ranks)


@pytest.mark.slow
def test_different_batches_end_a_script(job, ranks):
    job.start_apart("fault.py", "differ", "--rank", 1)
    text = check(job, ranks).text
    assert text.count("Usual causes: a sampler or an iterable data set") == 2, text


@pytest.mark.slow
def test_a_rank_that_sleeps_past_the_timeout_ends_all(job, ranks):
    # Nobody watches over the two. A plain script starts its second rank seconds after the first,
    # which the timeout would not allow; torchrun would end the sleeper, which must fail by itself.
    job.start_apart("fault.py", "sleep", "--rank", 1, "--timeout", 20, "--seconds", 25)
    outcome = check(job, ranks, "Timed out waiting 20000ms", PEER_GONE)
    assert outcome.seconds > 20
