"""What importing the package costs and gives."""

import subprocess
import sys

import pytest

import lightning_cp
from lightning_cp import adapters


def test_public_names_are_there():
    for name in lightning_cp.__all__:
        assert callable(getattr(lightning_cp, name))
        assert name in dir(lightning_cp)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_cp.nothing  # noqa: B018


def test_the_package_its_engine_and_its_adapters_load_neither_lightning_nor_transformers():
    code = (
        "import sys, torch, lightning_cp.adapters\n"
        "lightning_cp.ContextParallel\n"
        "lightning_cp.adapters.enable_models(torch.nn.Linear(2, 2))\n"
        "print([m for m in ('lightning', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def test_adapters_of_a_checkout_need_no_installation(monkeypatch):
    monkeypatch.setattr(adapters.metadata, "entry_points", lambda group: [])
    points = adapters.entry_points.__wrapped__(adapters.ADAPTERS)
    assert [(point.name, point.value) for point in points] == [
        ("transformers", "hf_patches.adapter:adapter")
    ]
