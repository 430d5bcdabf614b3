"""Each fault under each launcher: all processes end, the cause is named, a checkpoint loads."""

import os

import pytest

from tests.faults.matrix import FAULTS, LAUNCHERS, Fault, run

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_all_ranks_and_is_named(fault: Fault, launcher: str) -> None:
    if fault.fault == "full" and os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    cell = run(fault, launcher)
    assert not cell.problem, cell.problem
