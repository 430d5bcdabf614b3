"""Parts of the net cover what they import, and are due after a change of what they cover."""

import ast
import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.test_examples import EXAMPLES
from tools import net
from tools.net_parts import BY_NAME, PARTS, Part

CHECKED = ("tests", "tools", "benchmarks", "recipes")


@cache
def files_of(name):
    """Return the files that are imported by a name: a module, and the packages around it."""
    parts = name.split(".")
    paths = [Path(*parts[:end]) for end in range(1, len(parts) + 1)]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py"))]
    return [str(file) for file in files if (net.ROOT / file).is_file()]


@cache
def names_in(file):
    """Return the names that a file imports."""
    if file == "lightning_cp/__init__.py":  # its names are imported when they are used
        return []
    names = []
    for node in ast.walk(ast.parse((net.ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported(modules):
    """Return the files of this repository that modules import, also through others."""
    found, rest = set(), [file for name in modules for file in files_of(name)]
    while rest:
        file = rest.pop()
        if file not in found:
            found.add(file)
            rest += [other for name in names_in(file) for other in files_of(name)]
    return found


def covered(part):
    return set(net.git("ls-files", "--", *part.covers.split()))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_covers_what_its_command_imports(part):
    modules = re.findall(r"-m (tools\.\w+)", part.command)
    modules += [f"{name}.__main__" for name in modules]
    modules += ["tests.gpu.__main__"] if part.name == "gpu" else []
    modules += [
        file.removesuffix(".py").replace("/", ".")
        for file in covered(part)
        if part.name in ("gpu", "faults") and file.startswith(("tests/gpu/", "tests/lightning/scr"))
    ]
    files = {file for file in imported(modules) if file.startswith(CHECKED)}
    missing = {file for file in files - covered(part) if (net.ROOT / file).stat().st_size}
    assert missing <= {"benchmarks/__init__.py", "tools/__init__.py"}  # docstrings


def test_all_files_are_covered_and_all_pathspecs_have_files():
    record = str(net.RECORD.relative_to(net.ROOT))
    assert set(net.git("ls-files")) - covered(BY_NAME["test"]) <= {record}
    for part in PARTS:
        for spec in part.covers.split():
            assert net.git("ls-files", "--", spec.removeprefix(":!")) or spec == f":!{record}", spec


def test_slow_examples_are_covered():
    assert {page for page, *_ in EXAMPLES.values()} <= covered(BY_NAME["test-all"])


GOLDEN = """
import sys
from pathlib import Path
command, file = sys.argv[1:]
if command == "write":
    Path(file).write_text(Path("lib/a.py").read_text())
same = Path(file).read_text() == Path("lib/a.py").read_text()
print("identical" if same else "differs")
sys.exit(not same)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with two parts; returns a function that writes files, and commits them."""
    monkeypatch.setattr(net, "ROOT", tmp_path)
    monkeypatch.setattr(net, "RECORD", tmp_path / "net.jsonl")
    passes = Part("passes", "{python} -c 'print(\"2 passed\")'", "lib :!lib/other", 7)
    parts = (passes, Part("golden", "{python} -m tools.golden compare {results}", "lib", 3))
    monkeypatch.setattr(net, "PARTS", parts)
    monkeypatch.setattr(net, "BY_NAME", {part.name: part for part in parts})

    def commit(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        net.git("add", "-A")
        net.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "Change")
        return net.resolve("HEAD")

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("build\nnet.jsonl\n")
    commit(lib__a="1", lib__other__b="1", tools__golden=GOLDEN)
    return commit


def call(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["net", *arguments])
    return net.main()


def test_a_part_is_due_until_it_runs_and_after_a_change_of_what_it_covers(
    repository, monkeypatch, capsys
):
    assert call(monkeypatch) == 1
    assert "passes       due      7 min  never recorded" in capsys.readouterr().out
    assert call(monkeypatch, "run", "passes") == 0
    (run,) = map(json.loads, net.RECORD.read_text().splitlines())
    assert (run["part"], run["commit"], run["summary"]) == (
        "passes",
        net.resolve("HEAD"),
        "2 passed",
    )
    repository(lib__other__b="2")
    part = net.PARTS[0]
    assert net.describe(part, None)[0] is False
    (net.ROOT / "lib/new.py").write_text("")
    assert net.describe(part, None)[0] is True  # not committed
    assert call(monkeypatch, "run", "passes") == 1
    assert "passes covers files that differ from" in capsys.readouterr().out
    repository(lib__a="2")
    is_due, lines = net.describe(part, None)
    assert is_due
    assert "green at" in lines[0]
    assert lines[1] == "    changed: lib/a.py, lib/new.py"
    assert net.describe(part, "HEAD~1")[0]
    assert not net.describe(part, "HEAD")[0]


def test_runs_elsewhere_are_recorded_and_unknown_commits_count_as_due(repository, monkeypatch):
    first = net.resolve("HEAD")
    more = ("--summary", "9 passed", "--minutes", "4", "--machine", "an H200")
    assert call(monkeypatch, "record", "passes", "--commit", "HEAD", *more) == 0
    assert json.loads(net.RECORD.read_text())["machine"] == "an H200"
    assert net.last_green(net.PARTS[0])[0]["commit"] == first
    net.record("passes", "0123456789", "9 passed", 4)
    assert net.last_green(net.PARTS[0])[0]["commit"] == first
    net.RECORD.write_text(net.RECORD.read_text().splitlines()[1] + "\n")
    assert net.last_green(net.PARTS[0]) == (None, "0123456789 is no ancestor of HEAD")
    with pytest.raises(SystemExit, match="gone is no commit of this repository"):
        call(monkeypatch, "record", "passes", "--commit", "gone", *more)


def test_a_failing_part_is_not_recorded(repository, monkeypatch):
    monkeypatch.setitem(net.BY_NAME, "passes", Part("passes", "{python} -c exit(3)", "lib", 7))
    assert call(monkeypatch, "run", "passes") == 1
    assert not net.RECORD.exists()


def test_golden_is_compared_with_its_parent_on_this_machine(repository, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="golden is never recorded: use --parent COMMIT"):
        call(monkeypatch, "run", "golden")
    parent = net.resolve("HEAD")
    repository(lib__c="1")
    assert call(monkeypatch, "run", "golden", "--parent", "HEAD~1") == 0
    assert json.loads(net.RECORD.read_text())["parent"] == parent
    repository(lib__a="2")
    assert call(monkeypatch, "run", "golden") == 1  # the last green one is the parent
    assert "differs" in capsys.readouterr().out
    assert len(net.git("worktree", "list")) == 1


def test_results_are_kept_for_the_same_covered_files(repository):
    before = net.results_of(net.PARTS[0])
    repository(lib__other__b="2")
    assert net.results_of(net.PARTS[0]) == before
    repository(lib__a="2")
    assert net.results_of(net.PARTS[0]) != before
