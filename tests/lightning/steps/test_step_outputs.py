"""Evidence of trial runs: when a value needs another one, and when it is accepted."""

import pytest

from lightning_cp.compare.trials import Finding
from lightning_cp.lightning.steps.step_outputs import MAX_TRIALS, Evidence


def test_a_value_that_varies_is_settled_at_once_and_for_good():
    evidence = Evidence()
    assert not evidence.is_settled
    for is_uniform in (False, True):
        evidence.add(Finding("same", is_uniform))
        assert evidence.is_settled


@pytest.mark.parametrize("kind", [0, 1, "same"])
def test_a_uniform_value_stays_open_until_it_varies_or_trials_end(kind):
    evidence = Evidence()
    evidence.add(Finding(kind, is_uniform=True))
    for _ in range(MAX_TRIALS - 1):
        evidence.count_trial()
        evidence.add(Finding(kind, is_uniform=True))
        assert not evidence.is_settled
    evidence.count_trial()
    assert evidence.is_settled
    assert evidence.kind == kind


def test_a_value_that_no_trial_run_produces_is_accepted_as_equal_on_all_ranks():
    evidence = Evidence()
    for _ in range(MAX_TRIALS):
        assert evidence.kind is None
        evidence.count_trial()
    assert evidence.kind == "same"
    assert evidence.is_settled


def test_the_first_trial_run_that_produces_a_value_starts_the_count_again():
    evidence = Evidence(num_trials=MAX_TRIALS - 1)
    evidence.add(Finding(1, is_uniform=True))
    evidence.count_trial()
    assert not evidence.is_settled
