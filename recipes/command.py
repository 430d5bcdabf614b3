# SPDX-License-Identifier: Apache-2.0
"""`lightning-cp`: one command for training, checking and converting.

Only names the subcommands; each is implemented, and its libraries are imported, in its own package.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from lightning_cp.comm.error_report import end_process, quote_uncaught_errors, report_error
from lightning_cp.renamed import explain_removed

PROG: Final = "lightning-cp"


def run_recipes(args: Sequence[str], prog: str) -> int:
    """Run a command of `recipes.cli`; first look for the files that the arguments name.

    Without the packages that it needs, name the extra.

    Args:
        args: as on a command line, the command first.
        prog: what help texts call the program.

    Returns:
        The exit status.
    """
    quote_uncaught_errors()
    try:
        from recipes.files import find_files

        try:
            args = find_files(args)
        except (OSError, ValueError) as error:
            return report_error(error)
        from recipes.cli import main  # takes seconds
    except ImportError as error:
        fix = "" if "pip install" in str(error) else ": pip install 'lightning-cp[recipes]'"
        return report_error(f"{error}{fix}")
    return main(args, prog=prog)


def _run_hf_patches(args: Sequence[str], prog: str) -> int:
    from hf_patches.command import main

    return main(args, prog=prog)


def _run_lightning_cp(args: Sequence[str], prog: str) -> int:
    from lightning_cp.checkpoint.command import main

    return main(args, prog=prog)


def _run_plan(args: Sequence[str], prog: str) -> int:
    from recipes.plan_command import main

    return main(args, prog=prog)


class Command(NamedTuple):
    """A subcommand: what it does, and the function that runs it."""

    summary: str
    run: Callable[[Sequence[str], str], int]


COMMANDS: Final[Mapping[str, Command]] = {
    "fit": Command("train a language model from a config", run_recipes),
    "validate": Command("compute the validation loss of a checkpoint", run_recipes),
    "test": Command("compute the test loss of a checkpoint", run_recipes),
    "predict": Command("write the most likely next token of each token", run_recipes),
    "plan": Command("compute memory and time of a run, and what fits", _run_plan),
    "verify": Command("compare loss and gradients with the stock model", _run_hf_patches),
    "export": Command("turn a checkpoint into a Hugging Face folder", _run_hf_patches),
    "consolidate": Command("turn a checkpoint folder into a single file", _run_lightning_cp),
}


def build_help() -> str:
    """Return the text of ``lightning-cp --help``."""
    lines = [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {PROG} COMMAND [options]",
            "",
            "Context parallelism for PyTorch Lightning and Hugging Face models.",
            "",
            *lines,
            "",
            f"  {PROG} COMMAND --help                                   options of a command",
            f"  {PROG} fit --config laptop.yaml                         a small model, on CPU",
            f"  torchrun --nproc-per-node 2 --no-python {PROG} verify --model PATH",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit status; 2 for an unknown one.

    Args:
        argv: as on a command line; that of this process when None.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(build_help())
        return 0
    command = COMMANDS.get(args[0])
    if command is None:
        return report_error(
            explain_removed(f"{PROG} {args[0]}")
            or f"there is no command {args[0]!r}. Choose one of {', '.join(COMMANDS)}; "
            f"{PROG} --help describes them."
        )
    return command.run(args, PROG)


def run() -> None:
    """Run the command of this process, as `lightning-cp`."""
    end_process(main())
