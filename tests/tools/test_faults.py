"""Each fault under each launcher: all processes end, the cause is named, a checkpoint loads."""

import importlib.util
import os

import pytest

from tools.faults.matrix import FAULTS, LAUNCHERS, RAY_TRAIN, Fault, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_all_ranks_and_is_named(fault: Fault, launcher: str) -> None:
    if fault.fault == "full" and os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    if launcher == RAY_TRAIN and importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray: pip install 'ray[train]'")
    cell = run(fault, launcher)
    assert not cell.problem, cell.problem
