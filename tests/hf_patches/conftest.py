"""Fixtures of tests of Hugging Face models."""

import pytest

from lightning_cp import ContextParallel
from tests import doors


@pytest.fixture
def cp() -> ContextParallel:
    """Return context parallelism over this process alone."""
    return doors.parallel(None)
