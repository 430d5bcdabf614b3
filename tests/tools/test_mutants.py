"""Mutants fit the source: code that was moved takes its mutants along."""

from dataclasses import replace

import pytest

from tools.mutants.source import MisplacedError, mutated, problems
from tools.mutants.table import MUTANTS


def test_each_mutant_fits_the_source_and_names_its_tests():
    assert problems() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"where": "lightning_cp.gone:runs"}, "there is no lightning_cp/gone.py"),
        ({"where": "lightning_cp.geometry.mask:gone"}, "there are 0 definitions of gone"),
        ({"old": "gone"}, "its snippet occurs 0 times in lightning_cp.geometry.mask:runs"),
        ({"old": "change"}, "its snippet occurs 3 times"),
        ({"new": "start[:, 1:] = np.where(change, positions[1:],  0)"}, "it changes nothing"),
    ],
)
def test_mutants_that_do_not_fit_are_noticed(change, message):
    (mutant,) = (m for m in MUTANTS if m.name == "document-one-early")
    assert "positions[:-1]" in mutated(mutant)
    with pytest.raises(MisplacedError, match=message):
        mutated(replace(mutant, **change))


def test_mutants_without_tests_and_names_that_come_twice_are_noticed():
    mutant = replace(
        MUTANTS[0], tests=("tests/geometry/test_mask.py::test_gone[1]", "tests/gone.py")
    )
    assert problems([MUTANTS[0], mutant]) == [
        f"{mutant.name}: there are 2",
        f"{mutant.name}: there is no tests/geometry/test_mask.py::test_gone[1]",
        f"{mutant.name}: there is no tests/gone.py",
    ]
