"""What importing the package costs and gives, and what an installed wheel holds."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import pytest

import lightning_cp
from lightning_cp import adapters

ROOT = Path(__file__).parents[1]


def test_public_names_are_there():
    for name in lightning_cp.__all__:
        assert callable(getattr(lightning_cp, name))
        assert name in dir(lightning_cp)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_cp.nothing  # noqa: B018


COMPLETE = ("lightning_cp", "hf_patches", "hf_patches.trainers", "lightning_cp.loss")
COMPLETE += ("lightning_cp.memory", "lightning_cp.sequence")


def test_the_page_of_the_api_names_what_is_public_once():
    page = (ROOT / "docs" / "api.md").read_text().partition("## Public names")[2]
    listed = {}
    for line in page.partition("\n## ")[0].splitlines():
        cells = line.split("|")
        if line.startswith("| `"):
            names = re.findall(r"`(\w+)", cells[1])
            listed.setdefault(cells[2].strip(" `"), []).extend(dict.fromkeys(names))
    for package, names in listed.items():
        module = import_module(package)
        assert all(hasattr(module, name) for name in names), (package, names)
        if package in COMPLETE:
            assert sorted(names) == sorted(module.__all__)
    assert set(COMPLETE) <= set(listed)


@pytest.mark.slow
def test_engine_adapters_and_planner_load_neither_lightning_nor_transformers():
    code = (
        "import sys, torch, lightning_cp.adapters, lightning_cp.planner\n"
        "lightning_cp.ContextParallel\n"
        "lightning_cp.adapters.enable_models(torch.nn.Linear(2, 2))\n"
        "lightning_cp.planner.plan_run('llama-8b', seq_len=8192, num_gpus=8)\n"
        "print([m for m in ('lightning', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600
    )
    assert out.stdout.strip() == "[]"


def test_adapters_of_a_checkout_need_no_installation(monkeypatch):
    monkeypatch.setattr(adapters.metadata, "entry_points", lambda group: [])
    points = adapters.entry_points.__wrapped__(adapters.ADAPTERS)
    assert [(point.name, point.value) for point in points] == [
        ("transformers", "hf_patches.adapter:adapter")
    ]


def run(*command, cwd):
    environment = {key: x for key, x in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install a wheel into a virtual environment that has nothing else of ours."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("lightning_cp", "hf_patches", "recipes"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # A path alone: an editable install there is not followed.
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


@pytest.mark.slow
def test_a_wheel_has_one_version_and_its_own_files(installed, tmp_path):
    code = (
        "import importlib.metadata, lightning_cp, hf_patches.interface.names, recipes\n"
        "print(lightning_cp.__version__, importlib.metadata.version('lightning-cp'))\n"
        "print(lightning_cp.__file__, recipes.__file__)"
    )
    versions, files = run(installed, "-c", code, cwd=tmp_path).splitlines()
    assert versions.split() == [lightning_cp.__version__] * 2
    assert str(ROOT) not in files


@pytest.mark.slow
def test_an_installed_wheel_trains(installed, tmp_path):
    command = installed.parent / "lightning-cp"
    assert "consolidate" in run(command, "--help", cwd=tmp_path)
    options = {
        "trainer.devices": 1,
        "trainer.strategy.context_parallel_size": 1,
        "trainer.max_steps": 3,
        "trainer.limit_val_batches": 0,
        "trainer.enable_progress_bar": "false",
        "monitor.verify_first_batch": "false",
        "data.seq_len": 128,
        "data.max_documents": 4,
        "data.cache_dir": tmp_path / "cache",
    }
    given = [text for name, value in options.items() for text in (f"--{name}", value)]
    run(command, "fit", "--config", "recipes/configs/laptop.yaml", *given, cwd=tmp_path)
    (metrics,) = tmp_path.glob("runs/laptop/**/metrics.csv")
    assert len(re.findall(r"^\d|,\d", metrics.read_text())) >= 3
