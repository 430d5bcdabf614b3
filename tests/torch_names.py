"""Private names of torch that tests need, each here once; those of the library are in its own.

Compilers are imported where they are called for, which takes seconds.
"""

from typing import Any

import torch
from torch.utils import _pytree

# Walks through nested outputs: torch has no public ones.
tree_iter, tree_map = _pytree.tree_iter, _pytree.tree_map


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


def code_generator() -> Any:
    """Return the module that generates code for torch.compile, and its settings: `config`."""
    from torch._inductor import compile_fx

    return compile_fx


def compile_here() -> None:
    """Compile in this process from now on: a rank may not have children of its own."""
    code_generator().config.compile_threads = 1


def compile_anew() -> None:
    """Forget what was compiled, and how many graphs, and compile in this process."""
    compile_here()
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


def compilations_at_most(number: int) -> Any:
    """Return a context in which torch.compile gives up on code after so many compilations."""
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=number)


def functorch_options(**options: Any) -> Any:
    """Return a context with other options of the compiler's autograd."""
    from torch._functorch import config

    return config.patch(**options)
