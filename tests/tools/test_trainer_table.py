"""The table of what Hugging Face's own context parallelism does: its text, and one case."""

import re
from pathlib import Path

import pytest

from tools import trainer_table
from tools.trainer_table import BEGIN, CASES, END, Failure, build_row, rewrite

PAGE = (Path(__file__).parents[2] / "docs" / "from-trainer.md").read_text()


def test_the_page_has_every_case_and_ours_are_exact():
    table = PAGE.partition(BEGIN)[2].partition(END)[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if "|" in line][2:]
    assert [row[0].strip() for row in rows] == [case.title for case in CASES]
    assert all(row[3].strip().startswith("exact") for row in rows)
    assert re.search(
        r"\d+ \w+ \d{4}, torch \S+, transformers \S+, accelerate \S+, trl \S+\.", table
    )


def test_a_table_is_written_between_the_marks():
    assert rewrite(f"a {BEGIN} old {END} b", "new") == f"a {BEGIN}\nnew\n{END} b"
    with pytest.raises(ValueError, match="no marks for the table: write"):
        rewrite("a", "new")


def test_a_failure_is_one_line():
    failure = Failure("ValueError", "What came. What to do.\nMore.", "trainer/x.py:3")
    assert str(failure) == "ValueError: What came (`trainer/x.py:3`)"


def test_what_is_not_exact_is_wrong_in_the_table():
    exact = trainer_table.Run([{"loss": 1.0}], {"w": trainer_table.torch.zeros(2)})
    found = trainer_table.Run([{"loss": 1.5}], {"w": trainer_table.torch.zeros(2)})
    assert trainer_table.compared(found, exact, "weights") == "wrong: loss by 5e-01"
    assert trainer_table.compared(exact, exact, "weights") == "exact: weights within 0e+00"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_case_is_run_there_and_here():
    case = next(case for case in CASES if "eager" in case.title)
    title, there, _, here = build_row(case)
    assert title == "eager attention"
    assert there.startswith("ValueError: Context parallelism is supported only with SDPA")
    assert here.startswith("exact: weights within")
