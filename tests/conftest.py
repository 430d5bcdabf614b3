"""Fixtures for all tests: ranks that start once, and a guard against leftovers.

What takes seconds to import is imported where it is used: the process that hands tests out to
workers imports this file before it starts them.
"""

import gc
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ranks import RankPool


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect no garbage while modules are imported, and leave them out of it afterwards."""
    gc.disable()
    try:
        if getattr(session.config.option, "dist", "no") == "no":  # else workers collect
            _set_up_libraries()
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _set_up_libraries() -> None:
    import torch

    torch.set_num_threads(1)
    try:
        from hypothesis import Phase, settings
    except ImportError:  # a GPU machine with torch and pytest only runs tests/gpu
        return
    # Shrinking a failure of a case with threads takes minutes; the drawn case is printed anyway.
    settings.register_profile(
        "seeded",
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
    settings.load_profile("seeded")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `pytest -m gpu` look at tests/gpu only: other modules may not even import there."""
    gpu = Path(__file__).parent / "gpu"
    if config.option.markexpr == "gpu" and collection_path.is_file():
        return gpu not in collection_path.parents or None
    return None


@cache
def _on_ranks(file: str) -> set[str]:
    """Return the functions of a file that take ranks or a fixture that does, or start a pool."""
    found, text = {"RankPool"}, (Path(__file__).parents[1] / file).read_text()
    functions = r"^def (\w+)(\([^)]*\))((?:.|\n(?=[\s)]))*)"
    words = {
        name: {*re.findall(r"\w+", re.sub(r"\branks\b", "RankPool", parameters) + body)}
        for name, parameters, body in re.findall(functions, text, re.MULTILINE)
    }
    # Until nothing is found any more: a function may stand behind those that call it.
    while more := {name for name, own in words.items() if own & found} - found:
        found |= more
    return found


def _is_on_ranks(nodeid: str) -> bool:
    file, _, test = nodeid.partition("::")
    return test.partition("[")[0] in _on_ranks(file)


@cache
def _give_way() -> None:
    os.nice(10)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Let the worker of the ranks go first: it takes longest, the others what it leaves."""
    if "PYTEST_XDIST_WORKER" in os.environ and not _is_on_ranks(nodeid):
        _give_way()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one worker run all tests on ranks: two would start everything twice, and wait."""
    from xdist.scheduler import LoadScopeScheduling

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if _is_on_ranks(nodeid) else nodeid.partition("::")[0]

    return RanksTogether(config, log)


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Callable[[int], RankPool]]":
    """Return a function that gives a pool of so many gloo processes, started at its first use."""
    from tests.ranks import RankPool

    pools: dict[int, RankPool] = {}
    yield lambda size: pools.setdefault(size, RankPool(size))
    for pool in pools.values():
        pool.stop()


# Set by pytest, by torch's compiler, and by Lightning when it is imported.
_NOT_OURS = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _NOT_OURS}


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    import torch.distributed as dist

    from lightning_cp.step import active_step

    before = _environment()
    yield
    assert _environment() == before, "an environment variable was left behind"
    left = active_step.opened() is not None or active_step.is_paused()
    assert not left, "a step was left active"
    assert not dist.is_initialized(), "a process group was left behind"
