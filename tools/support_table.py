# SPDX-License-Identifier: Apache-2.0
"""The table of supported architectures for the docs, generated from `hf_patches/support.py`.

    python -m tools.support_table docs/support.md

replaces the text between the two marks.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from hf_patches.support import ARCHITECTURES, Architecture

BEGIN: Final = "<!-- support table: begin -->"
END: Final = "<!-- support table: end -->"


def count_models(architectures: Mapping[str, Architecture]) -> str:
    """Return the sentence with the number of model types.

    Example:
        >>> count_models({"llama": Architecture(), "mamba": Architecture(refusal="a state")})
        '1 model types are supported, 1 are refused.'
    """
    num_supported = sum(known.is_served for known in architectures.values())
    num_refused = len(architectures) - num_supported
    return f"{num_supported} model types are supported, {num_refused} are refused."


def support_table(architectures: Mapping[str, Architecture]) -> str:
    """Return a markdown table: one line per feature, then one per reason to refuse.

    Example:
        >>> known = {
        ...     "mistral": Architecture("sliding window"),
        ...     "llama": Architecture(),
        ...     "mamba": Architecture(refusal="it passes a state on"),
        ... }
        >>> print(support_table(known))
        | features | model types |
        |---|---|
        | full attention | llama |
        | sliding window | mistral |
        | **refused**: it passes a state on | mamba |
    """
    served = _group((features_of(known), name) for name, known in architectures.items())
    refused = _group(
        (f"**refused**: {known.refusal}", name)
        for name, known in architectures.items()
        if not known.is_served
    )
    rows = [f"| {title} | {', '.join(names)} |" for title, names in [*served, *refused]]
    return "\n".join(["| features | model types |", "|---|---|", *rows])


def features_of(known: Architecture) -> str:
    """Return the title of a supported model's line; empty for one that is refused."""
    if not known.is_served:
        return ""
    features = known.features or "full attention"
    return f"{features} ({known.caveat})" if known.caveat else features


def _group(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Group names by title, the largest group first; skip empty titles."""
    groups: dict[str, list[str]] = {}
    for title, name in pairs:
        if title:
            groups.setdefault(title, []).append(name)
    return sorted(
        ((title, sorted(names)) for title, names in groups.items()),
        key=lambda group: (-len(group[1]), group[0]),
    )


def rewrite(page: str, table: str) -> str:
    """Return a page with ``table`` between its marks.

    Example:
        >>> rewrite(f"before {BEGIN} old {END} after", "new").splitlines()
        ['before <!-- support table: begin -->', 'new', '<!-- support table: end --> after']
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no marks for the table: write {BEGIN} and {END} into it.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Rewrite the table in a page."""
    parser = argparse.ArgumentParser(prog="python -m tools.support_table")
    parser.add_argument("page", type=Path, help="a markdown file that has both marks")
    page: Path = parser.parse_args(arguments).page
    text = rewrite(page.read_text(), support_table(ARCHITECTURES))
    counts = r"\d+ model types are supported, \d+ are refused\."
    page.write_text(re.sub(counts, count_models(ARCHITECTURES), text))


if __name__ == "__main__":
    main(sys.argv[1:])
