"""The table of architectures: complete, without repeats, and as in the docs."""

import ast
import inspect
from collections import Counter
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_patches import support
from hf_patches.mixers import INSTALLERS
from hf_patches.support import ARCHITECTURES, Architecture
from tests.parity import zoo
from tools.support_table import BEGIN, END, main, rewrite, support_table

ROOT = Path(__file__).parents[2]


def written_names():
    """Return the names in the order of the source: in the mapping a repeat would not show."""
    (assignment,) = (
        node
        for node in ast.parse(inspect.getsource(support)).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ARCHITECTURES"
    )
    for entry in assignment.value.args[0].elts:
        call = isinstance(entry, ast.Starred)
        names = ast.literal_eval(entry.value.args[-1] if call else entry.elts[0])
        yield from names.split()


def test_the_docs_hold_the_table():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    (page,) = (page for page in pages if BEGIN in page.read_text())
    text, command = page.read_text(), f"python -m tools.support_table {page.relative_to(ROOT)}"
    assert rewrite(text, support_table(ARCHITECTURES)) == text, f"Run `{command}`."


def test_no_architecture_is_in_the_table_twice():
    names = Counter(written_names())
    assert [name for name, count in names.items() if count > 1] == []
    assert names.keys() == ARCHITECTURES.keys()


def test_every_causal_model_is_in_the_table_or_cannot_be_built():
    missing = [
        name
        for name in zoo.causal_names()
        if name not in ARCHITECTURES and name not in zoo.UNBUILDABLE
    ]
    assert missing == [] or zoo.is_newer_than_the_table()


def test_each_architecture_has_one_row():
    table = support_table(ARCHITECTURES)
    named = [name for row in table.splitlines()[2:] for name in row.split("|")[2].split(",")]
    assert sorted(name.strip() for name in named) == sorted(ARCHITECTURES)


def test_rows_say_what_to_know_and_why_not():
    known = {
        "b": Architecture("windows", caveat="text only"),
        "c": Architecture(refusal="it mixes tokens"),
        "d": Architecture(refusal="it mixes tokens"),
        "a": Architecture("windows", caveat="text only"),
    }
    assert support_table(known).splitlines()[2:] == [
        "| windows (text only) | a, b |",
        "| **refused**: it mixes tokens | c, d |",
    ]


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="no marks for the table: write <!-- support table: begin"):
        rewrite(f"{END} {BEGIN}", "new")


def test_the_command_rewrites_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    main([str(page)])
    text = page.read_text()
    assert text == f"before\n{BEGIN}\n{support_table(ARCHITECTURES)}\n{END}\nafter\n"


def test_every_mixer_of_the_table_can_be_installed():
    used = {mixer for known in ARCHITECTURES.values() for mixer in known.mixers.split()}
    assert used == INSTALLERS.keys()


def test_an_architecture_has_mixers_or_a_reason_not_to_run():
    for name, known in ARCHITECTURES.items():
        assert not (known.mixers and known.refusal), name
        assert not (known.mixers and not known.features), name


@pytest.mark.parametrize("mixer", sorted(INSTALLERS))
def test_installers_find_something_to_replace(mixer):
    users = [name for name, known in ARCHITECTURES.items() if mixer in known.mixers.split()]
    name = next(name for name in users if name in CONFIG_MAPPING_NAMES)  # of this transformers
    assert list(INSTALLERS[mixer](zoo.build_model(name)))
