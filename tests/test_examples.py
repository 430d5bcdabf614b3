"""Code in the README and the docs runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page, language):
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


# Page, which of its examples, how many losses it prints.
EXAMPLES = {
    "a Lightning script": ("README.md", 0, 1),
    "attention in a loop": ("README.md", 1, 5),
    "a loop with FSDP2": ("docs/loops.md", 0, 5),
    "a Fabric loop": ("docs/loops.md", 1, 3),
    "a script for torch's prototype": ("docs/from-torch.md", 0, 5),
    "FlexAttention": ("docs/flex.md", 0, 5),
    "evaluation and predictions": ("docs/evaluation.md", 0, 1),
    "a Hugging Face model in Lightning": ("docs/hugging-face.md", 0, 1),
    "a Hugging Face model in a loop": ("docs/hugging-face.md", 1, 5),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        name if name == "a Lightning script" else pytest.param(name, marks=pytest.mark.slow)
        for name in EXAMPLES
    ],
)
def test_an_example_trains_on_two_ranks_as_on_one(name, tmp_path):
    page, number, num_losses = EXAMPLES[name]
    code = blocks(page, "python")[number]
    printed = []
    for ranks in ("1", "2"):
        script = tmp_path / f"train_{ranks}.py"
        script.write_text(code.replace("DEVICES = 2", f"DEVICES = {ranks}"))
        launch = [sys.executable, str(script)]
        if "DEVICES" not in code:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            launch = [sys.executable, *torchrun, str(script)]
        done = subprocess.run(
            launch,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        # Scripts that start their own processes print on each rank.
        losses = [float(x) for x in re.findall(r"loss ([\d.]+)$", done.stdout, re.MULTILINE)]
        printed.append(losses[:num_losses])
    assert len(printed[0]) == num_losses
    assert printed[1] == pytest.approx(printed[0], abs=2e-5)
    if num_losses > 1:
        assert printed[0][-1] < printed[0][0]


def test_no_example_is_left_out():
    pages = ["README.md", *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))]
    found = {(page, i) for page in pages for i, _ in enumerate(blocks(page, "python"))}
    assert found == {(page, number) for page, number, _ in EXAMPLES.values()}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.slow)])
def test_flex_attention_over_documents_is_that_of_one_device(ranks):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    done = subprocess.run(
        [sys.executable, *launch, "examples/flex_documents.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.findall(r"^(\S+) +\d\.\de[-+]\d\d$", done.stdout, re.MULTILINE) == [
        "loss",
        "slopes",
        "tokens.weight",
        "qkv.weight",
        "qkv.bias",
        "head.weight",
        "head.bias",
    ]
    assert "Same results" in done.stdout


def test_files_named_in_the_docs_exist():
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        *(p.relative_to(ROOT) for p in ROOT.glob("docs/*.md")),
    ):
        text = (ROOT / page).read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith("http"):
                assert (ROOT / page).parent.joinpath(link).exists(), (page, link)
