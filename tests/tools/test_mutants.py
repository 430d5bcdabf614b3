"""Mutants fit the source: code that was moved takes its mutants along."""

from dataclasses import replace

import pytest

from tools.mutants.source import MisplacedError, missed, mutated, problems
from tools.mutants.table import MUTANTS


def test_each_mutant_fits_the_source_and_names_its_tests():
    assert problems() == []


def quick_tests(session):
    """Return the files, functions and cases of a run that are not slow."""
    slow = ("slow", "gpu")
    ids = [x.nodeid for x in session.items if not any(map(x.get_closest_marker, slow))]
    return {part for name in ids for part in (name, name.split("[")[0], name.split("::")[0])}


def test_each_mutant_names_a_test_that_is_quick(request):
    """In a run of all tests: others have not collected those that are named."""
    if request.config.option.file_or_dir or request.config.option.keyword:
        pytest.skip("Only some tests were collected.")
    assert missed(MUTANTS, quick_tests(request.session)) == []


def test_mutants_that_name_slow_tests_only_are_noticed():
    mutant = replace(MUTANTS[0], tests=("tests/test_a.py::test_one[2]", "tests/test_b.py"))
    for quick in mutant.tests:
        assert missed([mutant], {quick}) == []
    others = {"tests/test_a.py", "tests/test_a.py::test_one", "tests/test_a.py::test_one[1]"}
    assert missed([mutant], others) == [f"{mutant.name}: each test that it names is slow"]


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
