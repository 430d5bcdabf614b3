"""Examples in the docstrings of tools run: pytest collects those of packages and tests alone."""

import doctest

import pytest

from tools import support_table, trainer_table


@pytest.mark.parametrize("module", [support_table, trainer_table])
def test_examples_of_a_tool_run(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
