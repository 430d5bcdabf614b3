"""Private names of torch are used in one module, and its patches are undone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from lightning_cp import torch_private

ROOT = Path(__file__).parents[1]
PACKAGES = ("lightning_cp", "hf_patches", "recipes")

PRIVATE_ATTRIBUTES = {
    # of tensors
    "__create_chunk_list__", "_backward_hooks", "_base", "_version", "hooks_dict_ref",
    # of modules
    "_apply", "_backward_pre_hooks", "_buffers", "_forward_hooks", "_forward_pre_hooks",
    "_get_fsdp_state", "_modules", "_orig_mod", "_parameters",
    # of meshes and functions
    "_dynamo_marked_constant", "_flatten",
}  # fmt: skip
"""Private attributes of torch objects, which no import shows."""

ALLOWED = {
    # The kernels below F.scaled_dot_product_attention: see the docstring of torch_private.
    "lightning_cp/attn/blockwise/kernels/cpu.py": {"_scaled_dot_product_flash_attention_for_cpu"},
    "lightning_cp/attn/blockwise/kernels/cudnn.py": {"_scaled_dot_product_cudnn_attention"},
    "lightning_cp/attn/blockwise/kernels/flash.py": {"_scaled_dot_product_flash_attention"},
    # The dicts of nn.Module, which every torch has had: a module or tensor is replaced in place.
    "lightning_cp/lightning/averaging.py": {"_buffers", "_parameters"},
    "hf_patches/forward.py": {"_modules"},
    "recipes/weights.py": {"_modules"},
    # The number of hooks of a module: no public way to list them.
    "lightning_cp/lightning/features.py": {
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks",
    },
    # The module inside a compiled one.
    "hf_patches/adapter.py": {"_orig_mod"},
    "hf_patches/enable.py": {"_orig_mod"},
}


def private_names(source: str) -> Iterator[str]:
    """Yield the private torch names that a module uses."""
    tree = ast.parse(source)
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name.split(".")
                if path[0] == "torch":
                    yield from filter(is_private, path)
                    torch_names.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield from filter(is_private, [*str(node.module).split("."), alias.name])
                torch_names.add(alias.asname or alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = is_private(node.attr) and root_name(node) in torch_names
            if of_torch or (node.attr in PRIVATE_ATTRIBUTES and not is_own(node.value)):
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES:
            yield node.value  # getattr(x, "_base")


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_private_names_are_recognised():
    source = """
import torch, torch.distributed as dist
from torch._ops import HigherOrderOperator
from torch.distributed.utils import _apply_to_tensors
torch._C._swap_tensor_impl(a, b)
dist.distributed_c10d._world.pg_map
x._base, getattr(x, "_version", 0), x.__create_chunk_list__()
self._base, y._replace(z=1), torch.ops.aten.add
"""
    assert set(private_names(source)) == {
        "_C", "_apply_to_tensors", "_base", "_ops", "_swap_tensor_impl", "_version", "_world",
        "__create_chunk_list__",
    }  # fmt: skip


def test_private_names_of_torch_are_used_in_torch_private_only():
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            names = {name.removesuffix("_backward") for name in private_names(file.read_text())}
            if path != "lightning_cp/torch_private.py":
                assert names <= ALLOWED.get(path, set()), path


def test_hooks_of_leaves_are_put_back():
    leaf = torch.ones(2, requires_grad=True)
    calls = []
    leaf.register_hook(calls.append)
    with torch_private.without_tensor_hooks([leaf]):
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert calls == []
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert len(calls) == 1


def test_modes_entered_inside_without_modes_work_where_functions_are_plain():
    """FlexAttention traces mask functions with a mode: inside our own code, too."""

    class Seen(TorchFunctionMode):
        num = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    outer, inner, x = Seen(), Seen(), torch.ones(2)
    with outer, torch_private.plain_functions():
        with torch_private.without_modes(), inner:
            x + 1
        with inner:
            x + 1
    assert (outer.num, inner.num) == (0, 1)
