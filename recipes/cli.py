# SPDX-License-Identifier: Apache-2.0
"""`python -m recipes` and `lightning-cp fit`: LightningCLI with `CausalLMModule` and data modules.

Builds objects from options, and prints user errors in one line. Training is in `module.py`, `data/`
and the library.
"""

import functools
import inspect
import logging
import operator
import re
import signal
import sys
import sysconfig
import traceback
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, get_args

try:  # before the imports that take seconds
    import jsonargparse
except ModuleNotFoundError as missing:
    raise ImportError(
        f"The recipes need a package that is not installed ({missing}): "
        "pip install 'lightning-cp[recipes]', or -e '.[recipes]' in a checkout."
    ) from missing

import torch
import transformers
import yaml  # type: ignore[import-untyped]
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_cp import ContextParallelCallback
from lightning_cp.checkpoint import aside_of
from lightning_cp.comm.error_report import report_error
from lightning_cp.renamed import (
    ARGUMENTS,
    RENAMED,
    SHORT,
    explain_argument,
    explain_removed,
    update_options,
)
from recipes.data.packed_data import SampleData
from recipes.files import data_class
from recipes.module import CausalLMModule

HELP: Final = """\
Train language models on long sequences that are sharded over several devices.

  {prog} fit --config recipes/configs/laptop.yaml     a small model, on this machine
  {prog} fit --config FILE                            another config
  {prog} fit --config FILE --model.lr 1e-5            with other values
  {prog} fit --config FILE --print_config             print all values, do not train
  {prog} validate|test|predict --config FILE --ckpt_path CKPT

  {prog} fit --help       all options; --data.help PasskeyData those of a data module
  --debug                            full tracebacks
  recipes/launch/                    torchrun, SLURM, Ray, Kubernetes
"""

_OUR_FOLDERS: Final = tuple(
    str(Path(__file__).parents[1] / name) for name in ("recipes", "lightning_cp", "hf_patches")
)
_LIBRARIES: Final = (
    *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(torch.__file__).parents[1]),
    "<frozen",
)
"""Where code lies that is neither ours nor a user's."""
_SAYS_NOTHING: Final = ("Does not validate", "Subtypes:", "Errors:", "Given value")
"""Lines of jsonargparse's errors about an option that may be of several types."""
_load_yaml: Final = jsonargparse.get_loader("yaml")


class RecipesCLI(LightningCLI):
    """The command line, with our strategy and callback as defaults."""

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options, those that change most often first; set defaults."""
        parser.add_lightning_class_args(self._model_class, "model")
        # No default class: jsonargparse would keep its values when another class is given.
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
        parser.add_lightning_class_args(ContextParallelCallback, "monitor")
        parser.add_lightning_class_args(Trainer, "trainer")
        parser.set_defaults(
            {
                "trainer.strategy": {"class_path": "lightning_cp.ContextParallelStrategy"},
                "trainer.max_epochs": 1,
                "trainer.default_root_dir": "runs",
            }
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, without LightningCLI's warning about arguments from a program."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Keep the options: LightningCLI would replace them by those of a checkpoint."""

    def before_instantiate_classes(self) -> None:
        """Raise on a machine without GPUs: a model may be downloaded before the Trainer raises."""
        accelerator = self._get(self.config, "trainer").accelerator
        if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"trainer: accelerator={accelerator}, but this machine has no GPU. Use "
                "--trainer.accelerator cpu, or a machine with GPUs; the comment at the top of a "
                "config names its hardware."
            )
        options = self._get(self.config, "trainer").strategy
        for name, value in vars(getattr(options, "init_args", None) or object).items():
            if value is None and name in {path.partition(".")[0] for path in ARGUMENTS.values()}:
                raise ValueError(
                    f"trainer.strategy.{name}=null: give fields, --trainer.strategy.{name}.FIELD "
                    "VALUE, or leave it out."
                )

    def instantiate_classes(self) -> None:
        """Build model, data and Trainer; of jsonargparse's errors keep the message of the class."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            message = re.search(r"^\s*- (\w+=.*)$", str(error), re.MULTILINE)
            if message is None or "Union subtypes" not in str(error):
                raise
            is_strategy = "ContextParallelStrategy" in str(error)
            where = "trainer.strategy: " if is_strategy else "data.init_args."
            raise ValueError(f"{where}{message[1]}") from error

    def instantiate_trainer(self, **options: Any) -> Trainer:
        """Build the Trainer; its errors are about its options."""
        try:
            return super().instantiate_trainer(**options)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise ValueError(f"trainer: {error}") from error

    def after_instantiate_classes(self) -> None:
        """Test and predict with the validation data if there is no other."""
        for name in ("test_dataloader", "predict_dataloader"):
            if not is_overridden(name, self.datamodule, LightningDataModule):
                setattr(self.datamodule, name, self.datamodule.val_dataloader)
        for saver in self.trainer.checkpoint_callbacks:
            restore_last(getattr(saver, "dirpath", None))
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment):
            # Lightning's handler would save at once, and ranks may be in different steps.
            signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
        is_first = _launcher(self.trainer) is not None and self.trainer.num_nodes == 1
        if is_first and isinstance(self.datamodule, SampleData):
            # Not only in `fit`: bad data is found before other processes are started.
            self.datamodule.prepare_data()

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a command; a user error also ends the processes that this one has started."""
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            launcher = _launcher(self.trainer)
            if launcher and _is_for_user(error):
                launcher.kill(signal.SIGKILL)
                launcher.procs.clear()  # else Lightning would kill this one, too
            raise

    def predict(self, **options: Any) -> None:
        """Predict, and write a file per data rank."""
        predictions = self.trainer.predict(**options)
        strategy: Any = self.trainer.strategy
        if strategy.context_parallel_rank == 0:
            file = Path(self.trainer.default_root_dir) / "predictions"
            file.mkdir(parents=True, exist_ok=True)
            file /= f"{strategy.data_parallel_rank}.pt"
            torch.save(predictions, file)
            print(f"predictions written to {file}")


def restore_last(folder: str | None) -> None:
    """Restore the name of the last checkpoint, if a run was killed while replacing it."""
    last = Path(folder or ".") / "last.ckpt"
    if not last.exists():
        with suppress(OSError):  # there is none, or another rank was faster
            aside_of(last).rename(last)


def _launcher(trainer: Trainer) -> Any:
    """Return what starts the other processes of this node; None if they are started already."""
    return trainer.strategy.launcher


def main(argv: Sequence[str] | None = None, *, prog: str = "lightning-cp") -> int:
    """Run a command and return the exit status: 0, or 2 for a user error.

    Args:
        argv: as on a command line; that of this process when None.
        prog: what help texts call the program.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(HELP.format(prog=prog), end="")
        return 0
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    args = [_in_group(arg, after) for arg, after in zip(args, [*args[1:], ""], strict=True)]
    if not data_class(args):
        args.insert(1, "--data=recipes.data.TextData")
    try:
        with _shown_logs():
            _run(args, prog)
    except ArgumentError as error:
        if debug:
            raise
        return report_error(explain(str(error)))
    except Exception as error:
        if debug or not _is_for_user(error):
            raise
        return report_error(error)
    return 0


def parse_int_before_float(fn: Any) -> None:
    """Parse options of type int or float as int first.

    ``limit_val_batches: 1`` is one batch, 1.0 is all. Python caches ``Optional[Union[...]]`` and
    returns the first one made in the process for either order; with torch 2.11 and transformers
    5.17 that one has float first.
    """
    hints = inspect.unwrap(fn).__annotations__
    for name, hint in hints.items():
        parts = get_args(hint)
        if int in parts and float in parts:
            others = (part for part in parts if part not in (int, float))
            hints[name] = functools.reduce(operator.or_, others, int | float)


def _in_group(arg: str, after: str) -> str:
    """Return an option of the strategy with the field for which its value stands, if it is a word.

    Args:
        arg: of a command line.
        after: the next one.

    Example:
        >>> _in_group("--trainer.strategy.parameters=none", "")
        '--trainer.strategy.parameters.sharding=none'
        >>> _in_group("parameters", "none")  # a value of another option
        'parameters'
    """
    name, equals, value = arg.partition("=")
    prefix, _, group = name.rpartition(".")
    field = SHORT.get(group) if prefix == "--trainer.strategy" else None
    is_word = field and (value if equals else after)[:1] != "{"
    return f"{name}.{field}{equals}{value}" if is_word else arg


def _run(args: Sequence[str], prog: str) -> None:
    parse_int_before_float(Trainer.__init__)
    jsonargparse.set_loader("yaml", lambda x: update_options(_load_yaml(x)), (yaml.YAMLError,))
    RecipesCLI(
        CausalLMModule,
        LightningDataModule,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        parser_kwargs={
            "exit_on_error": False,
            **{
                name: {
                    "exit_on_error": False,
                    "usage": f"{prog} {name} [--config FILE] [options]",
                }
                for name in LightningCLI.subcommands()
            },
        },
        args=list(args),
    )


@contextmanager
def _shown_logs() -> Iterator[None]:
    """Print the library's log lines on rank 0; silence those of transformers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    handler = logging.StreamHandler()
    loggers = [logging.getLogger(name) for name in ("lightning_cp", "hf_patches")]
    former = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING if _rank() else logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, level in zip(loggers, former, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)


def _rank() -> int:
    return int(getattr(rank_zero_only, "rank", 0) or 0)


def _is_for_user(error: Exception) -> bool:
    """Return whether an error is a user error, which is printed without a traceback."""
    if isinstance(error, MisconfigurationException):
        return True
    *_, last = frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, FileNotFoundError):  # of an option, unless a user's own code looks for it
        return all(frame.filename.startswith((*_OUR_FOLDERS, *_LIBRARIES)) for frame in frames)
    if not last.filename.startswith(_OUR_FOLDERS):
        return False
    if isinstance(error, OSError | ImportError):
        return True
    # Not one that a collective raises which our code calls: a network failure has no other trace.
    is_raised = (last.line or "").startswith("raise")
    return is_raised and isinstance(error, ValueError | TypeError | RuntimeError)


def explain(message: str) -> str:
    """Return a parser error in one line; of names that are former or gone, what to write instead.

    Args:
        message: of jsonargparse.

    Example:
        >>> explain("Subcommand 'fit' does not accept option 'data.streaming'")[:36]
        'streaming is gone. Samples are packe'
    """
    for former, new in RENAMED.items():
        if f"class_path '{former}'" in message:
            return f"{former} is now called {new}. Write {new}."
    unknown = re.search(r"(?:accept option|arguments:|Option) '?-*([\w.]+)", message)
    path = "" if unknown is None else unknown[1]
    name = path.rpartition(".")[2]
    is_option = re.fullmatch(r"(trainer\.strategy\.|strategy\.)?(init_args\.)?\w+", path)
    is_strategy = "trainer.strategy" in message and "Group '" not in message
    if is_option and is_strategy and (now := explain_argument(name)):
        field = ARGUMENTS.get(name, "attention.balance_window")
        return f"trainer.strategy: {now}: --trainer.strategy.{field}."
    if name and (gone := explain_removed(name)):
        return gone
    lines = (line.strip() for line in message.splitlines())
    return " ".join(line for line in lines if not line.startswith(_SAYS_NOTHING))
