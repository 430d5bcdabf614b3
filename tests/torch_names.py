"""Private names of torch that tests need, each here once; those of the library are in its own.

Compilers are imported where they are called for, which takes seconds.
"""

from typing import Any

import torch

# No public name of torch walks through nested outputs.
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map


def counting_backend(backend: str) -> Any:
    """Return a backend of torch.compile that counts the graphs it gets: `frame_count`."""
    from torch._dynamo.testing import CompileCounterWithBackend  # of torch's own tests

    return CompileCounterWithBackend(backend)


def train_flex_on_cpu(patch: Any) -> None:
    """Let compiled FlexAttention have gradients on a CPU, where torch refuses them.

    Its CPU kernel has none; what runs here has. It is a check of its own, and not a setting.
    """
    from torch.nn.attention import flex_attention

    patch.setattr(flex_attention, "_validate_device", lambda *_: None)


def compiler_config() -> Any:
    """Return the settings of torch's code generator, which torch documents under this name."""
    from torch._inductor import config

    return config


def compile_anew() -> None:
    """Forget what was compiled, and how many graphs, and compile in this process from now on.

    A rank may not have children of its own.
    """
    compiler_config().compile_threads = 1
    torch.compiler.reset()
    graph_counts().clear()


def graph_counts() -> Any:
    """Return the compiler's counts, by kind and name: torch counts graphs nowhere else."""
    from torch._dynamo.utils import counters

    return counters


def num_graphs() -> int:
    """Return how many graphs were compiled since the counts were cleared."""
    return graph_counts()["stats"]["unique_graphs"]


def prototype() -> Any:
    """Return torch's context parallelism, whose options are in this module only."""
    from torch.distributed.tensor.experimental import _attention

    return _attention
