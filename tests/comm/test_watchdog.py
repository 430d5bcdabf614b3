"""A rank that fails ends the others with its words; a run that ends well leaves nothing behind."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from lightning_cp.comm import watchdog as module
from lightning_cp.comm.rendezvous import agree_on_attempt
from lightning_cp.comm.watchdog import Watchdog

SECOND = timedelta(seconds=1)


class Recording(Watchdog):
    """Does not end the process, but stops its thread; and what happens to a process, to a thread.

    All that these tests know of a watchdog's insides is in this class.
    """

    ended: str | None = None

    @property
    def cause(self):
        return self._cause or ""

    def vanish(self):
        """End the thread, as if the process were killed."""
        self._closing.set()

    def poll(self, now, *, was_stopped=False):
        """Look into the store once."""
        if not was_stopped:
            self._polled = now - 0.05
        self._poll(now)

    def end_process(self):
        super().end()

    def end(self):
        self.ended = self._cause
        self._store.add("ended", 1)
        self._closing.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"POLL": 0.02, "GRACE": 0.2, "FAILING_GRACE": 0.4, "SILENCE": 0.2}.items():
        monkeypatch.setattr(module, name, value)
    yield
    wait_until(no_thread_is_left)


def no_thread_is_left():
    return not [thread for thread in threading.enumerate() if "watchdog" in thread.name]


def start(size, limit=60.0, store=None):
    store = HashStore() if store is None else store
    dogs = [Recording(store, rank, size, timedelta(seconds=limit)) for rank in range(size)]
    for dog in dogs:
        dog.start()
    return dogs


def close(*dogs):
    """Close them as ranks do, at the same time."""
    threads = [threading.Thread(target=dog.close, daemon=True) for dog in dogs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def check_ended(*dogs):
    wait_until(lambda: all(dog.ended for dog in dogs))


def failure(text):
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_others_end_with_the_words_of_the_rank_that_failed():
    dogs = start(3)
    dogs[1].report(failure("the disk is full"))
    close(dogs[1])
    check_ended(dogs[0], dogs[2])
    for dog in (dogs[0], dogs[2]):
        assert dog.ended.startswith("rank 1 on ")
        assert "failed: ValueError: the disk is full (at " in dog.ended
        assert "test_watchdog.py" in dog.ended
    assert dogs[1].ended is None


def test_ranks_that_fail_together_end_by_themselves_at_once(monkeypatch):
    monkeypatch.setattr(module, "GRACE", 20.0)
    dogs = start(3)
    for dog in dogs:
        dog.report(failure("not the same batch"))
    begin = time.monotonic()
    close(*dogs)
    assert time.monotonic() - begin < 10
    assert [dog.ended for dog in dogs] == [None] * 3


def test_a_run_that_ends_well_waits_for_the_last_rank():
    dogs = start(2)
    first = threading.Thread(target=dogs[0].close, daemon=True)
    first.start()
    time.sleep(0.1)
    assert first.is_alive()
    close(dogs[1])
    first.join(10)
    assert not first.is_alive()


def test_a_silent_rank_is_named():
    dogs = start(3, limit=0.3)
    dogs[1].vanish()
    check_ended(dogs[0], dogs[2])
    assert "rank 1 on " in dogs[2].ended
    assert "has had no heartbeat for" in dogs[0].ended


def test_who_was_stopped_itself_does_not_take_others_for_dead():
    store = HashStore()
    dog = Recording(store, 0, 2, timedelta(seconds=60))
    store.set("host 1", "there")
    now = time.monotonic()
    dog.poll(now)
    dog.poll(now + 1000, was_stopped=True)
    assert not dog.cause
    for seconds in range(1001, 1062):
        dog.poll(now + seconds)
    assert "rank 1 on there has had no heartbeat for 61 s" in dog.cause


def test_after_a_lost_connection_the_rank_that_was_killed_is_the_cause(caplog):
    dogs = start(3)
    dogs[2].vanish()
    time.sleep(0.1)
    dogs[0].report(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
    check_ended(dogs[1])
    assert "rank 2 on " in dogs[1].ended
    assert "has ended without an error" in dogs[1].ended
    assert "Rank 0 has lost a connection: RuntimeError: Connection closed by peer" in caplog.text
    close(dogs[0])


def test_a_lost_connection_is_not_the_cause_if_another_rank_has_reported():
    dogs = start(2)
    dogs[1].report(failure("first"))
    dogs[0].report(RuntimeError("Connection reset by peer"))
    assert "rank 1 on" in dogs[0].cause
    assert "first" in dogs[0].cause
    close(*dogs)


def test_a_rank_that_fails_but_does_not_end_is_ended():
    dogs = start(2)
    dogs[1].report(failure("and then waits"))  # and never closes
    check_ended(*dogs)


class Gone:
    """A store whose process has ended."""

    def __init__(self):
        self.store, self.is_gone = HashStore(), False

    def __getattr__(self, name):
        if self.is_gone:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)


def test_the_end_of_the_store_ends_all():
    store = Gone()
    dogs = start(2, store=store)
    store.is_gone = True
    wait_until(lambda: all("store of the job is gone" in dog.cause for dog in dogs))
    store.is_gone = False  # for the mark of `Recording`
    check_ended(*dogs)


class CutOff:
    """A store behind a link that may be cut: calls then do not return."""

    def __init__(self):
        self._store, self._works = HashStore(), threading.Event()
        self._works.set()
        self.cut, self.mend = self._works.clear, self._works.set

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def wait(*args):
            self._works.wait()
            return call(*args)

        return wait


class Cut(Recording):
    def end(self):
        self.ended = self._cause
        self._closing.set()


def test_a_store_that_does_not_answer_ends_the_rank():
    store = CutOff()
    dogs = [Cut(store, rank, 2, timedelta(seconds=0.5)) for rank in range(2)]
    for dog in dogs:
        dog.start()
    wait_until(lambda: store.add("beat 1", 0) > 2)
    store.cut()
    begin = time.monotonic()
    dogs[0].report(failure("no link"))  # the main thread goes on
    assert time.monotonic() - begin < 5
    wait_until(lambda: all(dog.ended for dog in dogs))
    store.mend()
    check_ended(*dogs)
    assert all("has not answered for" in dog.ended for dog in dogs)
    wait_until(no_thread_is_left)


def test_the_place_where_a_rank_ends_is_that_of_the_thread_that_trains(
    monkeypatch, caplog, tmp_path
):
    # Python documents it under this name.
    monkeypatch.setattr(module.os, "_exit", lambda code: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    made, trained = [], []

    def training_loop():
        made.append(Recording(HashStore(), 0, 2, SECOND))
        while not trained:
            time.sleep(0.01)

    thread = threading.Thread(target=training_loop, daemon=True)
    thread.start()
    wait_until(lambda: made)
    made[0].end_process()
    trained.append(True)
    thread.join(10)
    assert "in training_loop. Cause" in caplog.text
    assert "in training_loop. Cause" in (tmp_path / "error.json").read_text()  # torchrun quotes it


def test_a_request_to_stop_reaches_all():
    dogs = start(3)
    dogs[2].ask_to_stop()
    wait_until(lambda: all(dog.is_asked_to_stop for dog in dogs))
    close(*dogs)


def test_one_process_has_no_watchdog():
    assert Watchdog.of_job(0, 1, SECOND) is None


def agree(store, size):
    names = [None] * size

    def run(rank):
        names[rank] = agree_on_attempt(store, rank, size, 10 * SECOND)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(size)]
    for thread in reversed(threads):
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join(10)
    return names


def test_each_attempt_has_a_name_of_its_own():
    store = HashStore()
    first, second = agree(store, 3), agree(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_ranks_that_do_not_connect_are_named():
    store = HashStore()
    agree(store, 3)
    message = (
        "2 of 3 ranks have not connected within 1 s.*rank 1.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )
    with pytest.raises(RuntimeError, match=message):
        agree_on_attempt(store, 0, 3, SECOND)
