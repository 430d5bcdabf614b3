# SPDX-License-Identifier: Apache-2.0
"""The command `lightning-cp consolidate DIR OUT`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.comm.error_report import Parser, report_error


def build_parser(prog: str = "lightning-cp") -> Parser:
    """Build the parser; each command sets ``run``, which is called with the arguments."""
    parser = Parser(prog=prog, description="Tools for context-parallel training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    consolidate = commands.add_parser(
        "consolidate",
        help="turn a checkpoint folder into one file",
        description=(
            "Turn a checkpoint folder into the single file of a plain Trainer, to resume on one "
            "device or to call load_from_checkpoint. Needs no GPU and no process "
            "group; the full checkpoint must fit into memory. A checkpoint contains pickles, which "
            "can run any code: convert only checkpoints that you trust."
        ),
    )
    consolidate.add_argument("folder", metavar="DIR", type=Path, help="the checkpoint folder")
    consolidate.add_argument("out", metavar="OUT", type=Path, help="the file to write")
    consolidate.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    consolidate.set_defaults(run=_consolidate)
    return parser


def _consolidate(args: argparse.Namespace) -> None:
    """Run the command."""
    # Imported here: torch takes seconds to import, which --help should not wait for.
    from lightning_cp.checkpoint import consolidate

    consolidate(args.folder, args.out, overwrite=args.overwrite)


def main(argv: Sequence[str] | None = None, *, prog: str = "lightning-cp") -> int:
    """Run a command and return the exit status: 2 for a user error."""
    args = build_parser(prog).parse_args(argv)
    try:
        args.run(args)
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0
