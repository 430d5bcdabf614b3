# ruff: noqa: T201
"""`python -m tools.import_graph [PACKAGE]`: folders and modules as nodes, imports as edges.

A folder or a module of PACKAGE is one node, `lightning_cp` unless another is named; `hf_patches`,
`recipes` and `benchmarks` are one node each. Imports inside of functions count, and those of types.
"""

import argparse

import grimp

ROOTS = ("lightning_cp", "hf_patches", "recipes", "benchmarks")


def edges(package: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the nodes, and the pairs of them of which the first imports the second."""
    graph = grimp.build_graph(*ROOTS)

    def node(module: str) -> str:
        below = module.removeprefix(f"{package}.")
        return below.split(".")[0]

    inside = package != ROOTS[0]
    modules = {name for name in graph.modules if not inside or name.startswith(f"{package}.")}
    pairs = {
        (node(module), node(imported))
        for module in modules
        for imported in graph.find_modules_directly_imported_by(module)
        if imported in modules and imported != package
    }
    return {node(name) for name in modules}, {(a, b) for a, b in pairs if a != b}


def main() -> None:
    """Print each node with what it imports, and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="?", default="lightning_cp")
    package = parser.parse_args().package
    nodes, pairs = edges(package)
    for name in sorted(nodes):
        print(f"{name:20} -> {', '.join(sorted(b for a, b in pairs if a == name))}")
    circles = sorted({tuple(sorted(pair)) for pair in pairs if pair[::-1] in pairs})
    print(f"{len(nodes)} nodes, {len(pairs)} edges; both ways: {circles or 'none'}")


if __name__ == "__main__":
    main()
