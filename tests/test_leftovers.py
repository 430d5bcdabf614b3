"""Nothing in other libraries outlives a run, but for a few registrations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "lightning.pytorch.core.saving.pl_load": "load_from_checkpoint() reads folders",
    "torch.optim.sgd.SGD.step": "torch's own: an optimizer that is built has its steps profiled",
    "len(lightning.pytorch.strategies.StrategyRegistry)": "strategies by name",
    "len(lightning.pytorch.trainer.connectors.accelerator_connector.StrategyRegistry)": "the same",
}
# Tables of torch and of transformers that grow with every operator, group and class of outputs.
CACHES = ("len(torch.", "len(transformers.", "len(lightning.pytorch.utilities._pytree.")


@pytest.mark.slow  # each is a process that imports all libraries
@pytest.mark.parametrize("outcome", ["ends", "fails"])
@pytest.mark.parametrize("kind", ["fit", "train"])
def test_a_run_leaves_other_libraries_as_they_were(kind, outcome, tmp_path):
    command = [sys.executable, "-m", "tests.leftovers", kind, outcome, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("changed ")]
    assert lines, run.stderr[-2000:]
    changed = json.loads(lines[0].removeprefix("changed "))
    left = {k: x for k, x in changed.items() if k not in ALLOWED and not k.startswith(CACHES)}
    assert left == {}
    assert "lightning.pytorch.core.saving.pl_load" in changed  # it looks
