"""Where a mutant is in the source, and the source with it."""

import ast
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path

from tools.mutants.table import MUTANTS, RETIRED, Mutant

ROOT = Path(__file__).parents[2]

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class MisplacedError(Exception):
    """A mutant does not fit the source."""


def file_of(mutant: Mutant) -> str:
    """Return the file that holds a mutant, relative to the root."""
    return f"{mutant.where.partition(':')[0].replace('.', '/')}.py"


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """Return the text of the file with the mutant; raise if its snippet is not there once."""
    file = root / file_of(mutant)
    if not file.is_file():
        raise MisplacedError(f"there is no {file_of(mutant)}")
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    start, stop = _find(_parse(text), mutant.where.partition(":")[2])
    source = "".join(lines[start:stop])
    if source.count(mutant.old) != 1:
        raise MisplacedError(
            f"its snippet occurs {source.count(mutant.old)} times in {mutant.where}"
        )
    changed = source.replace(mutant.old, mutant.new)
    if _dump(changed) == _dump(source):
        raise MisplacedError("it changes nothing")
    return "".join([*lines[:start], changed, *lines[stop:]])


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _dump(definition: str) -> str:
    """Return the tree of a definition, indented or not."""
    is_indented = definition[:1].isspace()
    return ast.dump(ast.parse(f"if True:\n{definition}" if is_indented else definition))


def _find(tree: ast.AST, name: str) -> tuple[int, int]:
    """Return the lines of a definition: of a function, a class or a variable."""
    node = tree
    for part in name.split("."):
        found = [inner for inner in _definitions(node) if part in _names(inner)]
        if len(found) != 1:
            raise MisplacedError(f"there are {len(found)} definitions of {name}")
        (node,) = found
    decorators = getattr(node, "decorator_list", [])
    return min(x.lineno for x in (node, *decorators)) - 1, node.end_lineno


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, _SCOPES):
            yield from _definitions(inner)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, _SCOPES):
        return [node.name]
    if isinstance(node, ast.AnnAssign | ast.Assign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def problems(mutants: Iterable[Mutant] = MUTANTS, root: Path = ROOT) -> list[str]:
    """Return what is wrong with the table: mutants that do not fit, tests that do not exist."""
    mutants = tuple(mutants)
    found = [
        f"{name}: there are {n}" for name, n in Counter(m.name for m in mutants).items() if n > 1
    ]
    found += [f"{m.name}: it is retired" for m in mutants if m.name in RETIRED]
    for mutant in mutants:
        try:
            mutated(mutant, root)
        except (MisplacedError, SyntaxError) as error:
            found.append(f"{mutant.name}: {error}")
        for test in mutant.tests:
            if not _exists(test, root):
                found.append(f"{mutant.name}: there is no {test}")
    return found


def missed(mutants: Iterable[Mutant], quick: Container[str]) -> list[str]:
    """Return mutants of which no test is quick; files, functions and cases count as such."""
    return [
        f"{mutant.name}: each test that it names is slow"
        for mutant in mutants
        if not any(test in quick for test in mutant.tests)
    ]


def _exists(test: str, root: Path) -> bool:
    path, _, name = test.partition("::")
    file, function = root / path, name.partition("[")[0]
    return file.is_file() and (not name or f"\ndef {function}(" in file.read_text())
