# SPDX-License-Identifier: Apache-2.0
"""The table of model types in docs/support.md, made from `support.py`.

    python -m hf_patches.table docs/support.md

rewrites the text between the two marks. `python -m tests.parity` writes the rest of that page.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from hf_patches.support import ARCHITECTURES, Architecture

BEGIN: Final = "<!-- support table: begin -->"
END: Final = "<!-- support table: end -->"


def support_section(architectures: Mapping[str, Architecture]) -> str:
    """Return the number of supported and refused model types, and the table of them.

    Example:
        >>> print(support_section({"llama": Architecture()}).splitlines()[0])
        1 model types are supported, 0 are refused.
    """
    num_supported = sum(known.is_served for known in architectures.values())
    num_refused = len(architectures) - num_supported
    counts = f"{num_supported} model types are supported, {num_refused} are refused."
    return f"{counts}\n\n{support_table(architectures)}"


def support_table(architectures: Mapping[str, Architecture]) -> str:
    """Return a markdown table: a row per feature, then a row per reason to refuse.

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
    served = _group((_features(known), name) for name, known in architectures.items())
    refused = _group(
        (f"**refused**: {known.refusal}", name)
        for name, known in architectures.items()
        if not known.is_served
    )
    rows = [f"| {title} | {', '.join(names)} |" for title, names in [*served, *refused]]
    return "\n".join(["| features | model types |", "|---|---|", *rows])


def _features(known: Architecture) -> str:
    """Return what a served model's row is called; empty for one that is refused."""
    if not known.is_served:
        return ""
    features = known.features or "full attention"
    return f"{features} ({known.caveat})" if known.caveat else features


def _group(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Gather names under their titles, the largest group first; an empty title is left out."""
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
        raise ValueError(f"The page has no place for the table: write {BEGIN} and {END} into it.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Rewrite the table in a page."""
    parser = argparse.ArgumentParser(prog="python -m hf_patches.table")
    parser.add_argument("page", type=Path, help="a markdown file that has both marks")
    page: Path = parser.parse_args(arguments).page
    page.write_text(rewrite(page.read_text(), support_section(ARCHITECTURES)))


if __name__ == "__main__":
    main(sys.argv[1:])
