"""Private names of other libraries stand in one module for each, and on a page."""

import ast

import pytest

from tools.private_names import (
    EXCEPTIONS,
    FENCES,
    ROOT,
    foreign_names,
    own_names,
    sources,
    uses,
    write_page,
)

SOURCE = """
import torch, torch.distributed as dist
import torch._dynamo
from torch._ops import HigherOrderOperator
from torch.distributed.utils import _apply_to_tensors
from lightning_cp.replay import _ours
torch._C._swap_tensor_impl(a, b)
dist.distributed_c10d._world.pg_map
x._base, getattr(x, "_version", 0), x.__create_chunk_list__()
self._base, y._replace(z=1), torch.ops.aten.add, x._own
"""


def test_private_names_are_recognised():
    assert set(foreign_names(ast.parse(SOURCE), frozenset({"_own"}))) == {
        "_C", "_apply_to_tensors", "_base", "_dynamo", "_ops", "_swap_tensor_impl", "_version",
        "_world", "__create_chunk_list__",
    }  # fmt: skip


def test_private_names_stand_in_their_fences():
    own = own_names()
    known = {name for path in FENCES for use in uses(path, own) for name in use.names}
    for path in sources():
        if path in FENCES:
            continue
        tree = ast.parse((ROOT / path).read_text())
        names = {name.removesuffix("_backward") for name in foreign_names(tree, own)}
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        # Strings may be anything, such as suffixes: those that a fence knows are names.
        names = {name for name in names if name not in strings or name in known}
        assert names <= set(EXCEPTIONS.get(path, ())), path


@pytest.mark.parametrize("path", FENCES)
def test_each_private_name_has_a_reason(path):
    assert all(use.purpose for use in uses(path, own_names()))


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/private-names.md").read_text() == write_page()
