"""Settings of the process while another thread writes a checkpoint."""

import gc
import os
import sys

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cp.checkpoint.writer_thread import SWITCH_INTERVAL, HostWriter, yielding


@pytest.fixture(autouse=True)
def restored():
    interval, is_enabled = sys.getswitchinterval(), gc.isenabled()
    is_frozen = gc.get_freeze_count() > 0
    gc.enable()
    gc.unfreeze()
    sys.setswitchinterval(0.004)
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    if not is_enabled:
        gc.disable()


def settings():
    return round(sys.getswitchinterval(), 4), gc.isenabled(), gc.get_freeze_count() > 0


BEFORE = (0.004, True, False)
PLANNING = (SWITCH_INTERVAL, False, False)
WRITING = (SWITCH_INTERVAL, True, True)


def fail_to_write():
    with yielding() as begin_writing:
        assert settings() == PLANNING
        begin_writing()
        assert settings() == WRITING
        raise OSError("full")


def test_settings_are_those_of_before_also_after_an_error():
    with pytest.raises(OSError, match="full"):
        fail_to_write()
    assert settings() == BEFORE


def test_the_last_of_several_threads_restores_them():
    one, other = yielding(), yielding()
    one.__enter__()()
    assert settings() == WRITING
    other.__enter__()()
    one.__exit__(None, None, None)
    assert settings() == WRITING
    other.__exit__(None, None, None)
    assert settings() == BEFORE


@pytest.mark.parametrize("setting", ["disabled", "frozen"])
def test_settings_of_the_user_stay(setting):
    sys.setswitchinterval(1e-4)  # shorter than ours
    if setting == "disabled":
        gc.disable()
    else:
        gc.freeze()
    before = settings()
    with yielding() as begin_writing:
        begin_writing()
        assert settings() == (1e-4, False, setting == "frozen")
    assert settings() == before


@pytest.mark.parametrize("is_writing", [False, True])
def test_a_forked_process_has_the_settings_of_before(is_writing):
    with yielding() as begin_writing:
        if is_writing:
            begin_writing()
        child = os.fork()
        if child == 0:
            is_right = settings() == BEFORE
            with yielding():
                is_right &= settings() == PLANNING
            os._exit(0 if is_right and settings() == BEFORE else 1)
        assert settings() == (WRITING if is_writing else PLANNING)
    assert os.waitpid(child, 0)[1] == 0


def test_the_garbage_collector_runs_while_files_are_written(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *_: calls.append(settings()))
    with yielding() as begin_writing:
        HostWriter(tmp_path, begin_writing).write_data(None, None)
    assert calls == [WRITING]
