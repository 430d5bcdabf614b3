"""What importing the package costs and gives."""

import subprocess
import sys

import pytest

import lightning_cp


def test_public_names_are_there():
    for name in lightning_cp.__all__:
        assert callable(getattr(lightning_cp, name))
        assert name in dir(lightning_cp)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_cp.nothing  # noqa: B018


def test_importing_the_package_and_its_engine_loads_neither_lightning_nor_transformers():
    code = (
        "import sys, lightning_cp, hf_patches\n"
        "lightning_cp.ContextParallel\n"
        "print([m for m in ('lightning', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
