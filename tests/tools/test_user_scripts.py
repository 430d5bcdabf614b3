"""The generator itself: scripts keep their numbers, and what is wrong is seen."""

import json
from pathlib import Path

import pytest
import torch

from tools.user_scripts.__main__ import compare
from tools.user_scripts.doors import Found, Script

RECORD = Path(__file__).parents[2] / "benchmarks/results/user_scripts_202611.jsonl"


def test_scripts_keep_their_numbers() -> None:
    entries = [json.loads(line) for line in RECORD.read_text().splitlines()]
    names = {entry["number"]: entry["script"] for entry in entries}
    assert names == {number: str(Script.draw(number)) for number in range(200)}


def found(
    loss: float = 2.0, weight: float = 0.9, error: str = "", *, is_ours: bool = True
) -> Found:
    weights = [] if error else [{"w": torch.tensor(weight)}]
    values = {} if error else {"loss": [loss]}
    return Found(values, {"w": torch.tensor(1.0)}, weights, error, is_ours)


@pytest.mark.parametrize(
    ("ranks", "result"),
    [
        ([found(), found()], "equal"),
        ([found(loss=2.001), found()], "different"),
        ([found(), found(weight=0.901)], "different"),
        ([found(loss=float("nan"))], "different"),
        ([found(weight=float("nan"))], "different"),
        ([found(error="no"), found(error="no")], "refused"),
        ([found(error="no"), found()], "broken"),
        ([found(error="no", is_ours=False), found(error="no", is_ours=False)], "broken"),
    ],
)
def test_what_is_wrong_is_seen(ranks: list[Found], result: str) -> None:
    assert compare(found(), ranks)["result"] == result


def test_an_update_that_was_wrong_is_no_refusal() -> None:
    late = found(weight=0.8)
    late.error, late.is_ours = "no", True
    assert compare(found(), [late, late])["result"] == "different"
