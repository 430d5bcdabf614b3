import pytest

from tests.sequence.cases import Threads


@pytest.fixture(scope="module")
def threads():
    """Return what gives threads of `run_threads` their steps."""
    with pytest.MonkeyPatch.context() as patch:
        yield Threads(patch)
