"""Code in the README and the docs runs."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.lightning.jobs import elastic_environment

ROOT = Path(__file__).parents[1]


def blocks(page, language):
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def torchrun(ranks):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]


def run_script(arguments, folder):
    """Run Python in a folder, and return what it printed."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


def run_here(script, folder):
    """Run a script in this process, as torchrun would, and return what it printed."""
    printed = io.StringIO()
    with elastic_environment(), contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


# Page, which of its examples, how many losses it prints.
EXAMPLES = {
    "a Lightning script": ("README.md", 0, 1),
    "a model of your own in Lightning": ("docs/lightning.md", 0, 1),
    "attention in a loop": ("docs/loops.md", 0, 5),
    "a loop with FSDP2": ("docs/loops.md", 1, 5),
    "a Fabric loop": ("docs/loops.md", 2, 3),
    "a script for torch's prototype": ("docs/from-torch.md", 0, 5),
    "FlexAttention": ("docs/flex.md", 0, 5),
    "evaluation and predictions": ("docs/evaluation.md", 0, 1),
    "a Hugging Face model in Lightning": ("docs/hugging-face.md", 0, 1),
    "a Hugging Face model in a loop": ("docs/hugging-face.md", 1, 5),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "is_launched"),
    [
        ("a Lightning script", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in EXAMPLES),
    ],
)
def test_an_example_trains_on_two_ranks_as_on_one(ranks, name, is_launched, tmp_path):
    """Started as a user would, or on processes that have imported everything."""
    page, number, num_losses = EXAMPLES[name]
    code = blocks(page, "python")[number]
    if not is_launched:
        code = code.replace("max_epochs=5", "max_epochs=1")
    printed = []
    for size in ("1", "2"):
        script = tmp_path / f"train_{size}.py"
        script.write_text(code.replace("DEVICES = 2", f"DEVICES = {size}"))
        if "DEVICES" not in code:
            text = run_script([*torchrun(size), str(script)], tmp_path)
        elif size == "1" or not is_launched:
            text = ranks(int(size)).run(run_here, str(script), str(tmp_path))[0]
        else:
            text = run_script([str(script)], tmp_path)
        # Scripts that start their own processes print on each rank.
        losses = [float(x) for x in re.findall(r"loss ([\d.]+)$", text, re.MULTILINE)]
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
@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["2", "3"])
def test_flex_attention_over_documents_is_that_of_one_device(ranks):
    printed = run_script([*torchrun(ranks), "examples/flex_documents.py"], ROOT)
    assert re.findall(r"^(\S+) +\d\.\de[-+]\d\d$", printed, re.MULTILINE) == [
        "loss",
        "slopes",
        "tokens.weight",
        "qkv.weight",
        "qkv.bias",
        "head.weight",
        "head.bias",
    ]
    assert "Same results" in printed


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_sft", "trl_dpo"])
def test_an_example_of_trl_has_the_losses_of_one_process(ranks, name):
    from tests.hf_patches.trainers.trainer_jobs import run_example

    path = str(ROOT / "examples" / f"{name}.py")
    printed = [ranks(size).run(run_example, path)[0] for size in (1, 2)]
    losses = [[float(x) for x in re.findall(r"^loss ([\d.]+)$", text, re.M)] for text in printed]
    assert len(losses[0]) >= 8
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.ranks
@pytest.mark.slow
def test_an_example_of_trl_runs_by_torchrun():
    printed = run_script([*torchrun("2"), "examples/trl_sft.py"], ROOT)
    assert len(re.findall(r"^loss ", printed, re.M)) == 12


def call_main(script):
    """Call an example's main function on the processes of the tests, and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(script)["main"]()
    return printed.getvalue()


@pytest.mark.ranks
@pytest.mark.slow
def test_the_example_of_orpo_has_the_losses_of_one_process(ranks):
    script = str(ROOT / "examples" / "orpo.py")
    printed = [ranks(size).run(call_main, script)[0] for size in (1, 2)]
    losses = [[float(x) for x in re.findall(r"^loss ([\d.]+)$", text, re.M)] for text in printed]
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.ranks
@pytest.mark.slow
def test_the_example_of_orpo_runs_by_torchrun():
    printed = run_script([*torchrun("2"), "examples/orpo.py"], ROOT)
    assert len(re.findall(r"^loss ", printed, re.M)) == 10


def test_odds_of_the_example_stay_finite_for_certain_and_for_impossible_completions():
    losses_of = runpy.run_path(str(ROOT / "examples" / "orpo.py"))["orpo_losses"]
    means = torch.tensor([0.0, -1e-30, -1e-8, -40.0, -500.0], requires_grad=True)
    losses = losses_of(torch.stack([means, means.flip(0)], 1))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert means.grad.isfinite().all()


@pytest.mark.slow  # importing TRL takes half a minute
def test_the_odds_ratio_of_the_example_is_that_of_trl():
    from trl.experimental.orpo import ORPOTrainer

    losses_of = runpy.run_path(str(ROOT / "examples" / "orpo.py"))["orpo_losses"]
    generator = torch.Generator().manual_seed(5)
    means = -4 * torch.rand(6, 2, generator=generator)
    trainer = SimpleNamespace(beta=0.25, accelerator=SimpleNamespace(device="cpu"))
    minus_ratio, *_ = ORPOTrainer.odds_ratio_loss(trainer, *means.unbind(1))
    torch.testing.assert_close(losses_of(means, 0.25) + means[:, 0], -minus_ratio)


def headings(page):
    """Return the anchors of a page, as GitHub makes them from its headings."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_in_the_docs_lead_to_files_and_headings():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    pages += [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")]
    for page in pages:
        for link, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if link.startswith("http"):
                continue
            target = page.parent / link if link else page
            assert target.exists(), (page, link)
            assert not heading or heading in headings(target), (page, link, heading)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_stated_numbers_of_models_are_those_of_the_code():
    """Compare each count in README, CHANGELOG and docs with the table and with the parity run."""
    from tools.support_table import ARCHITECTURES, count_models

    support = (ROOT / "docs" / "support.md").read_text()
    assert count_models(ARCHITECTURES) in support
    num_types = count_models(ARCHITECTURES).split()[0]
    parity = re.search(r"Causal language models: (\d+) compared.*; (worst loss .*) \(", support)
    num_causal, worst = parity.groups()
    stated = {
        num_types: re.compile(r"(\d+)\s+(?:Hugging\s+Face\s+)?model\s+types"),
        num_causal: re.compile(r"(\d+)\s+causal\s+language\s+models"),
    }
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md")]:
        for count, pattern in stated.items():
            assert set(pattern.findall(page.read_text())) <= {count}, page
    readme = (ROOT / "README.md").read_text()
    assert all(pattern.search(readme) for pattern in stated.values())
    assert worst in readme
