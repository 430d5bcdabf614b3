"""When a rank fails, all ranks end soon with the reason, and the last checkpoint is usable."""

import json
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests import doors
from tests.lightning import jobs
from tests.lightning.scripts import fault
from tests.lightning.scripts.start import FAULT, Job
from tests.ranks import RankError

pytestmark = pytest.mark.ranks

LAST_SAVED = fault.FAULT_STEP // fault.SAVE_EVERY * fault.SAVE_EVERY


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


def check_saved(out):
    """Return the last checkpoint: a finished one."""
    saved = (out / "checkpoints").glob("step=*.ckpt")
    last = max(saved, key=lambda path: int(path.stem.removeprefix("step=")))
    assert last.stem == f"step={LAST_SAVED}"
    assert torch.load(last / "meta.pt", weights_only=True)["global_step"] == LAST_SAVED
    return last


def check_resumes(out, ranks):
    last = check_saved(out)
    fit = jobs.Fit(num_microbatches=fault.NUM_MICROBATCHES, epochs=fault.EPOCHS, clip=None)
    exact = jobs.run_alone(fit)["losses"]
    for losses in ranks(2).run(resume, str(last)):
        assert losses == pytest.approx([exact[LAST_SAVED]], abs=1e-5)


def resume(path):
    """Load a checkpoint on the ranks of the pool, and train one step more."""
    with jobs.elastic_environment():
        module = jobs.Module()
        strategy = doors.strategy(verify_steps=False)
        trainer = jobs.build_trainer(strategy=strategy, max_steps=LAST_SAVED + 1)
        rows = jobs.loader(jobs.PackedRows(2 * fault.NUM_MICROBATCHES), dp_size=1)
        callbacks = list(trainer.callbacks)
        trainer.fit(module, rows, ckpt_path=path)
        check_nothing_is_left()
        assert trainer.callbacks == callbacks
        return module.losses


def differ(out):
    """Return the error of a run on the ranks of the pool, of which one gets another batch."""
    with jobs.elastic_environment(), pytest.raises(ValueError, match="Usual causes") as error:
        fault.train(out, "differ", 1)
    check_nothing_is_left()
    return str(error.value)


def check_nothing_is_left():
    assert not [thread for thread in threading.enumerate() if "lightning_cp" in thread.name]


@pytest.mark.slow
def test_different_batches_end_all_and_the_usual_causes_are_named(tmp_path, ranks):
    for rank, text in enumerate(ranks(2).run(differ, tmp_path)):
        assert f"rank 1 and rank 0 differ in their values; this is rank {rank}, with" in text
        assert text.count("Usual causes: a sampler or an iterable data set") == 1, text
    check_resumes(tmp_path, ranks)


def stop(out):
    """Return the exit code of a run on the ranks of the pool, of which one gets a SIGTERM."""
    with jobs.elastic_environment(), pytest.raises(SIGTERMException) as error:
        fault.train(out, "term", 1)
    check_nothing_is_left()
    return error.value.code


@pytest.mark.slow
def test_a_sigterm_of_one_rank_saves_a_checkpoint_and_ends_all(tmp_path, ranks):
    assert ranks(2).run(stop, tmp_path) == [143, 143]
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt" / "meta.pt", weights_only=True)
    assert last["global_step"] > fault.FAULT_STEP
    assert last["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["completed"] == (
        last["global_step"] % fault.NUM_MICROBATCHES
    )


class RayLightningEnvironment(TorchElasticEnvironment):
    """Of that name, as the one of Ray Train."""


def stop_in_thread(out):
    """The same, where the Trainer runs in a thread, as in a worker of Ray."""
    codes = []

    def of_ray(*_):
        raise RuntimeError("ended by Ray's handler")

    def run():
        try:
            fault.train(out, "term", 1, plugins=[RayLightningEnvironment()])
        except SIGTERMException as error:
            codes.append(error.code)

    before = signal.signal(signal.SIGTERM, of_ray)
    try:
        with jobs.elastic_environment():
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join()
        check_nothing_is_left()
        with pytest.raises(RuntimeError, match="ended by Ray's handler"):  # it is back
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    return codes


@pytest.mark.slow
def test_a_sigterm_of_a_worker_of_ray_saves_a_checkpoint_and_ends_all(tmp_path, ranks):
    assert ranks(2).run(stop_in_thread, tmp_path) == [[143], [143]]
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt" / "meta.pt", weights_only=True)
    assert last["global_step"] > fault.FAULT_STEP


def live_on(out):
    """Fail on one rank, whose process lives on: no connection is closed."""
    with jobs.elastic_environment():
        try:
            fault.train(out, "forward", 1)
        except RuntimeError:
            time.sleep(60)


@pytest.mark.slow
def test_an_exception_of_one_rank_ends_the_others_in_their_collective(tmp_path, ranks):
    cause = rf"Rank 0 ends at .*Cause: rank 1 on \S+ failed: RuntimeError: {fault.WORDS}"
    begin = time.monotonic()
    with pytest.raises(RankError, match=cause):
        ranks(2).run(live_on, tmp_path)
    assert time.monotonic() - begin < 55
    check_saved(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_torchrun_restarts_all_ranks_and_they_resume(job, num_nodes):
    nodes = {"num_nodes": num_nodes, "per_node": 2 // num_nodes, "restarts": 1}
    job.start_torchrun("fault.py", "kill", "--resume", "--num-nodes", num_nodes, **nodes)
    outcome = job.wait()
    assert set(outcome.codes) == {0}, outcome.text
    check_done(job, after=LAST_SAVED)


@pytest.mark.slow
def test_a_job_of_two_nodes_goes_on_with_one(job):
    args = ("fault.py", "kill", "--resume")
    job.start_torchrun(*args, "--num-nodes", 2, num_nodes=2, per_node=1)
    assert 0 not in job.wait().codes
    job.start_torchrun(*args)
    outcome = job.wait()
    assert outcome.codes[-1] == 0, outcome.text
    check_done(job, after=LAST_SAVED)


def check_done(job, *, after):
    """The ranks have trained to the end, from the step on, with the losses of one process."""
    fit = jobs.Fit(num_microbatches=fault.NUM_MICROBATCHES, epochs=fault.EPOCHS, clip=None)
    exact = jobs.run_alone(fit)["losses"]
    for rank in range(2):
        step, _, losses = (job.out / f"done{rank}").read_text().partition(" ")
        assert int(step) == len(exact)
        assert json.loads(losses) == pytest.approx(exact[after:], abs=1e-5)


@pytest.mark.slow
def test_a_rank_that_sleeps_past_the_timeout_is_found_where_it_sleeps(job, ranks):
    # Nobody watches over the two. A plain script starts its second rank seconds after the first,
    # which the timeout would not allow.
    job.start_apart("fault.py", "sleep", "--rank", 1, "--timeout", 20, "--seconds", 100)
    place = r"fault.py:\d+ in on_before_batch_transfer"
    cause = r"Cause: rank 0 on \S+ failed: RuntimeError: .*Timed out waiting 20000ms"
    outcome = check(job, ranks, rf"Rank 1 ends at \S+{place}. {cause}")
    assert 20 < outcome.seconds < 60


def test_a_short_heartbeat_timeout_is_refused():
    with pytest.raises(ValueError, match="heartbeat_timeout=0:00:02 is too short"):
        doors.strategy(heartbeat_timeout=timedelta(seconds=2))
