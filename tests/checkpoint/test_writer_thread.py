"""Settings of the process while another thread writes a checkpoint."""

import gc
import sys

import pytest

from lightning_cp.checkpoint.writer_thread import SWITCH_INTERVAL, HostWriter, yielding


@pytest.fixture(autouse=True)
def restored():
    interval, is_enabled, is_frozen = (
        sys.getswitchinterval(),
        gc.isenabled(),
        gc.get_freeze_count() > 0,
    )
    gc.enable()
    gc.unfreeze()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    if not is_enabled:
        gc.disable()


def fail_to_write():
    with yielding() as collecting:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL, rel=0.1)
        assert not gc.isenabled()
        with collecting():
            assert gc.isenabled()
            assert gc.get_freeze_count() > 0
            raise OSError("full")


def test_settings_are_those_of_before_also_after_an_error():
    sys.setswitchinterval(0.004)
    with pytest.raises(OSError, match="full"):
        fail_to_write()
    assert sys.getswitchinterval() == pytest.approx(0.004, rel=0.1)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("setting", ["disabled", "frozen"])
def test_settings_of_the_user_stay(setting):
    sys.setswitchinterval(1e-4)  # shorter than ours
    if setting == "disabled":
        gc.disable()
    else:
        gc.freeze()
    count = gc.get_freeze_count()
    with yielding() as collecting, collecting():
        assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.1)
        assert gc.get_freeze_count() == count
        assert not gc.isenabled()
    assert gc.isenabled() is (setting == "frozen")
    assert gc.get_freeze_count() == count


def test_files_are_written_inside_of_the_context(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        HostWriter.__mro__[1], "write_data", lambda *_: calls.append(gc.isenabled())
    )
    with yielding() as collecting:
        HostWriter(tmp_path, collecting).write_data(None, None)
    assert calls == [True]
