"""Code in the README and the docs runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page, language):
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.ranks
def test_the_readme_example_trains_on_two_ranks_as_on_one(tmp_path):
    (code,) = blocks("README.md", "python")
    script = tmp_path / "train.py"
    script.write_text(code)
    printed = []
    for ranks in ("1", "2"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*launch, "--nproc-per-node", ranks, str(script)],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
        )
        printed.append([float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)])
    assert len(printed[0]) == 5
    assert printed[0][-1] < printed[0][0]
    assert printed[1] == pytest.approx(printed[0], abs=2e-5)


@pytest.mark.ranks
def test_the_demo_finds_the_same_numbers():
    done = subprocess.run(
        [sys.executable, "-m", "recipes.demo"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    rows = re.findall(r"^(plain|packed|padded) +(gather|ring)", done.stdout, re.MULTILINE)
    assert len(rows) == 6
    assert "Same numbers" in done.stdout


def test_files_named_in_the_docs_exist():
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        *(p.relative_to(ROOT) for p in ROOT.glob("docs/*")),
    ):
        text = (ROOT / page).read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith("http"):
                assert (ROOT / page).parent.joinpath(link).exists(), (page, link)
