"""`python -m tools.private_names [--write PAGE]`: private names of other libraries, as a page.

They are used in one module for each library, a fence, and nowhere else. The page lists each name
and what needs it, from the docstrings of the fences.
"""

import argparse
import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("lightning_cp", "hf_patches", "recipes")

FENCES = {
    "lightning_cp/private/autograd.py": "torch: autograd",
    "lightning_cp/private/compiler.py": "torch: the compiler",
    "lightning_cp/private/fsdp2.py": "torch: FSDP2",
    "lightning_cp/private/functions.py": "torch: functions",
    "lightning_cp/private/groups.py": "torch: process groups",
    "lightning_cp/private/modes.py": "torch: modes",
    "lightning_cp/private/modules.py": "torch: modules and tensors",
    "lightning_cp/lightning/private.py": "Lightning and torchmetrics",
    "hf_patches/private.py": "transformers",
    "hf_patches/trainers/private.py": "transformers' Trainer, accelerate, TRL",
}

KERNELS = "its public wrapper returns no log-sum-exp, by which partial results are combined"
CONVENTION = "models describe themselves so, also those of users; others go the general way"
METRIC = "a metric that sums over fewer ranks, for the trial run"
EXCEPTIONS = {
    "lightning_cp/attn/blockwise/kernels/cpu.py": {
        "_scaled_dot_product_flash_attention_for_cpu": KERNELS,
    },
    "lightning_cp/attn/blockwise/kernels/cudnn.py": {
        "_scaled_dot_product_cudnn_attention": KERNELS,
    },
    "lightning_cp/attn/blockwise/kernels/flash.py": {
        "_scaled_dot_product_flash_attention": KERNELS,
    },
    "lightning_cp/checkpoint/blocks.py": {
        "__create_chunk_list__": "a method that torch's checkpoints call on tensors in blocks",
    },
    "lightning_cp/comm/error_report.py": {
        "_run_exitfuncs": "Python: what a process does at its end, before `os._exit`",
    },
    "lightning_cp/fsdp/sharding.py": {
        "_init_weights": CONVENTION,
        "_no_split_modules": CONVENTION,
    },
    "lightning_cp/lightning/registry.py": {
        "_load_from_checkpoint": "shows that Lightning's module is imported whole",
    },
    "lightning_cp/lightning/steps/trial_run.py": {"_computed": METRIC, "_to_sync": METRIC},
    "lightning_cp/memory/activation_checkpointing.py": {
        "_gradient_checkpointing_func": CONVENTION,
        "_require_grads_hooks": CONVENTION,
    },
    "lightning_cp/compare/replay.py": {
        "_dataset_fetcher": "a DataLoader's dataset, whose attributes a trial run restores",
    },
    "lightning_cp/compare/restore.py": {
        "_mgr": "the content of a data frame of pandas, put back in place after a trial run",
    },
    "lightning_cp/routing.py": {
        "_encoder_layer_fwd": "a part of the name of torch's fused encoder layer, which is refused",
    },
}
"""Names that stand elsewhere, by file, and why."""

SAFE = {"_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace", "_asdict"}
"""Names of Python that are documented in spite of their underscore."""


class Use(NamedTuple):
    """A private name, and what needs it.

    Args:
        names: the names.
        purpose: in a sentence.
    """

    names: tuple[str, ...]
    purpose: str


def is_private(name: str) -> bool:
    """Return whether a name is private: it begins with one underscore."""
    return bool(re.match(r"_[A-Za-z]", name)) or name == "__create_chunk_list__"


def sources() -> list[str]:
    """Return the files of our packages."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def is_self(node: ast.expr) -> bool:
    """Return whether an expression is the instance, or the class, of a method."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def own_names() -> frozenset[str]:
    """Return the names that our packages define themselves."""
    found = set[str]()
    for path in sources():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if is_self(node.value) else set()
    return frozenset(found - {"__create_chunk_list__"})


def imported_names(tree: ast.AST) -> dict[str, list[str]]:
    """Return the private names that imports go through, by the names that they give."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name
                found[name] = [*filter(is_private, alias.name.split("."))]
        elif isinstance(node, ast.ImportFrom):
            path = str(node.module).split(".")
            for alias in node.names if path[0] not in PACKAGES else ():
                parts = [*path, alias.name]
                found[alias.asname or alias.name] = [*filter(is_private, parts)]
    return found


def foreign_names(tree: ast.AST, own: frozenset[str]) -> Iterator[str]:
    """Yield private names that are imported, read from other objects, or written as strings."""
    for names in imported_names(tree).values():
        yield from names
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_self(node.value) and node.attr not in own | SAFE:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = node.value.isidentifier() and is_private(node.value)
            if is_name and node.value not in own | SAFE:
                yield node.value


def uses(path: str, own: frozenset[str]) -> Iterator[Use]:
    """Yield what a fence says of its names: by function, class, or constant.

    What has no docstring belongs to what stands before it.
    """
    tree = ast.parse((ROOT / path).read_text())
    imported = imported_names(tree)
    names, purpose = list[str](), ""
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Expr):
            continue
        text = _docstring(node, tree.body[at + 1 : at + 2])
        if text:
            if names:
                yield Use(tuple(dict.fromkeys(names)), purpose)
            names, purpose = [], text
        names += foreign_names(node, own)
        used = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        names += [name for part in used for name in imported.get(part, ())]
    if names:
        yield Use(tuple(dict.fromkeys(names)), purpose)


def _docstring(node: ast.stmt, following: list[ast.stmt]) -> str:
    """Return the first paragraph of a definition's docstring, in one line."""
    text = ""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        text = ast.get_docstring(node) or ""
    elif following and isinstance(following[0], ast.Expr):
        value = following[0].value
        text = str(value.value) if isinstance(value, ast.Constant) else ""
    return " ".join(text.partition("\n\n")[0].split())


def overridden() -> list[str]:
    """Return the private methods of Lightning's strategy that ours overrides."""
    trees = (ast.parse((ROOT / path).read_text()) for path in sources())
    nodes = (node for tree in trees for node in ast.walk(tree))
    methods = (x for x in nodes if isinstance(x, ast.FunctionDef) and is_private(x.name))
    return [x.name for x in methods if "override" in map(ast.unparse, x.decorator_list)]


def write_page() -> str:
    """Return the page."""
    own, lines, seen = own_names(), list[str](), set[tuple[str, str]]()
    for path, library in FENCES.items():
        lines += [f"## {library}", "", f"`{path}`", "", "| names | what needs them |", "|---|---|"]
        for use in uses(path, own):
            seen |= {(library.partition(":")[0], name) for name in use.names}
            lines.append(f"| {_code(use.names)} | {_cell(use.purpose)} |")
        lines.append("")
    lines += ["## Elsewhere", "", "| module | names | why |", "|---|---|---|"]
    for path, names in EXCEPTIONS.items():
        for reason, some in _by_reason(names).items():
            seen |= {(path, name) for name in some}
            lines.append(f"| `{path}` | {_code(some)} | {_cell(reason)} |")
    methods = overridden()
    head = [
        "# Private names of other libraries",
        "",
        f"Written by `python -m tools.private_names --write docs/private-names.md`: {len(seen)} "
        f"names, and {len(methods)} methods of Lightning's strategy that ours overrides: "
        f"{_code(methods)}.",
        "",
        "Each stands in one module for its library. What relies on a name is found here when a new "
        "version of a library has changed it.",
        "",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _by_reason(names: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in names.items():
        found.setdefault(reason, []).append(name)
    return found


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    text = write_page()
    if options.write is None:
        print(text)  # noqa: T201
    else:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
