"""The page of features: every row is a run, and every feature that Lightning exports has a row."""

import importlib.util
import inspect
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks, loggers, plugins, profilers
from lightning.pytorch.plugins import environments
from lightning.pytorch.tuner import Tuner

from tests.lightning import more_habits  # noqa: F401  # registers its cases
from tests.lightning.features import CASES, run

VERDICTS = ("works", "differs", "refused", "not tried")
PAGE = Path(__file__).parents[3] / "docs" / "lightning-features.md"


def compare(found, exact, rel, at=""):
    """Raise if the result of a rank differs from that of one device."""
    if isinstance(exact, dict):
        assert found.keys() == exact.keys(), at
        for key in exact:
            compare(found[key], exact[key], rel, f"{at}.{key}")
    elif isinstance(exact, list | tuple):
        assert len(found) == len(exact), (at, found, exact)
        for index, (x, y) in enumerate(zip(found, exact, strict=True)):
            compare(x, y, rel, f"{at}[{index}]")
    elif isinstance(exact, torch.Tensor):
        torch.testing.assert_close(found, exact, rtol=rel, atol=rel, msg=lambda m: f"{at}: {m}")
    elif isinstance(exact, float):
        assert found == pytest.approx(exact, rel=rel, abs=rel, nan_ok=True), at
    else:
        assert found == exact, at


def known_to(rank, exact):
    """Remove the results that only rank 0 has."""
    if isinstance(exact, dict):
        return {k: known_to(rank, v) for k, v in exact.items() if rank == 0 or k != "rank 0"}
    if isinstance(exact, list | tuple):
        return type(exact)(known_to(rank, value) for value in exact)
    return exact


def parameters():
    for name, case in CASES.items():
        for size in case.sizes:
            marks = [] if case.quick and size == 2 else [pytest.mark.slow]
            yield pytest.param(name, size, marks=marks, id=f"{name}-{size}")


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "size"), list(parameters()))
def test_a_feature_does_what_the_page_says(ranks, name, size, tmp_path):
    case = CASES[name]
    for package in case.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    every = ranks(size).run(run, name, tmp_path / "ranks")
    if case.verdict == "refused":
        for found in every:
            assert isinstance(found, str), "it was not refused"
            assert case.says in found
        return
    exact = run(name, tmp_path / "alone")
    assert not isinstance(exact, str), exact
    for rank, found in enumerate(every):
        assert not isinstance(found, str), found
        if case.check is None:
            compare(found, known_to(rank, exact), case.rel)
        else:
            case.check(found, exact, size)


def rows():
    """Return the rows of the page: section, feature, verdict, cases."""
    section, found = "", []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[1] in VERDICTS:
            names = [name.strip() for name in re.findall(r"`([^`]+)`", cells[3])]
            found.append((section, cells[0].strip("`"), cells[1], names))
    return found


def exported():
    """Return the features that Lightning has, by the section of the page."""
    flags = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    tuner = {f"Tuner.{name}" for name in dir(Tuner) if not name.startswith("_")}
    return {
        "Callbacks": set(callbacks.__all__),
        "Loggers": set(loggers.__all__),
        "Plugins": set(plugins.__all__),
        "Environments": {name for name in dir(environments) if name.endswith("Environment")},
        "Profilers": set(profilers.__all__),
        "Trainer flags": flags,
        "Tuner": tuner,
    }


@pytest.mark.parametrize("section", list(exported()))
def test_every_feature_of_lightning_has_a_row(section):
    named = {feature for of, feature, *_ in rows() if of == section}
    # A row may name an argument as well: `TensorBoardLogger(log_graph=True)`.
    named |= {re.split(r"[(=,]", feature)[0] for feature in named}
    assert exported()[section] <= named, sorted(exported()[section] - named)


def test_every_row_is_a_case_and_every_case_has_a_row():
    shown = [name for _, _, _, names in rows() for name in names]
    assert sorted(shown) == sorted(CASES)
    for _, feature, verdict, names in rows():
        assert bool(names) == (verdict != "not tried"), feature
        if names:
            assert {CASES[name].verdict for name in names} == {verdict}, feature
