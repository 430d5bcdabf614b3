# SPDX-License-Identifier: Apache-2.0
"""Commands of Hugging Face models: `lightning-cp verify` and `lightning-cp export`.

Exit status: 0 for success, 1 if `verify` found different numbers, 2 for a user error. Under
torchrun the message is in its report, and its own exit status is 1.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedModel

from hf_patches.enable import enable
from hf_patches.interface.positions import position_rule
from hf_patches.verify import verify
from hf_patches.verify_inputs import HEADS, build_batch, build_model, resolve_head
from hf_patches.weights.export import export, read_config
from lightning_cp.comm.error_report import (
    Parser,
    Removed,
    quote_uncaught_errors,
    report_error,
)
from lightning_cp.config import AlgorithmName, LayoutName
from lightning_cp.parallel import ContextParallel

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_MERGE: Final = (
    "PEFT merges what export writes: PeftModel.from_pretrained(base_model, OUT).merge_and_unload()"
    ".save_pretrained(MERGED)"
)
"""What to use instead of ``--merge``."""


def build_parser(prog: str = "lightning-cp") -> Parser:
    """Build the parser; each command sets ``run``, which returns the exit status."""
    parser = Parser(
        prog=prog,
        description="Tools for Hugging Face models under context parallelism.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_export(commands)
    return parser


def _add_verify(commands: Any) -> None:
    command = commands.add_parser(
        "verify",
        help="compare context parallelism with the stock model",
        description=(
            "Compare the loss and every gradient under context parallelism with those of the stock "
            "model, on a random batch. Start it on the context ranks: torchrun --nproc-per-node 2 "
            "-m lightning_cp verify --model PATH. Exit status 1 if they differ, 2 if the model or "
            "the arguments are refused."
        ),
    )
    command.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a folder with a model; or a config.json, or a folder with one: random weights",
    )
    command.add_argument("--length", type=_positive, default=512, help="sequence length (512)")
    command.add_argument("--batch-size", type=_positive, default=2, help="samples (2)")
    command.add_argument("--packed", action="store_true", help="several documents per sequence")
    command.add_argument("--padded", choices=("left", "right"), help="samples of uneven lengths")
    command.add_argument("--layout", choices=get_args(LayoutName), default="auto")
    command.add_argument("--algorithm", choices=get_args(AlgorithmName), default="auto")
    command.add_argument("--dtype", choices=tuple(_DTYPES), default="float32", help="(float32)")
    command.add_argument(
        "--head",
        choices=("auto", *HEADS),
        default="auto",
        help="by default the one that the config names, else causal",
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--allow-unknown", action="store_true", help="try an architecture that is not in the table"
    )
    command.add_argument("--seed", type=int, default=0, help="of the batch and of random weights")
    command.set_defaults(run=_verify)


def _add_export(commands: Any) -> None:
    command = commands.add_parser(
        "export",
        help="turn a Lightning checkpoint into a Hugging Face folder",
        description=(
            "Write the Hugging Face model inside a Lightning checkpoint as a folder for "
            "from_pretrained. Needs no GPU, and memory for one of the files that it writes. Of a "
            "checkpoint with PEFT adapters these alone are written. A checkpoint holds pickles, "
            "which can run any code: export only those that you trust."
        ),
    )
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help="a folder, or a file")
    command.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    command.add_argument(
        "--base",
        type=Path,
        metavar="PATH",
        help="a folder with the model's config.json and, optionally, its tokenizer; by default the "
        "one that the checkpoint's hyperparameters name",
    )
    command.add_argument(
        "--prefix", help="prefix of the model's parameter names in CKPT; inferred by default"
    )
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (5GB)")
    command.add_argument("--merge", action=Removed, const=_MERGE, help=argparse.SUPPRESS)
    command.add_argument(
        "--adapter-config",
        type=Path,
        metavar="PATH",
        help="the adapter_config.json of PEFT adapters, where the checkpoint does not hold it",
    )
    command.set_defaults(run=_export)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}': give an integer of at least 1")
    return number


def _export(args: argparse.Namespace) -> int:
    model = export(
        args.checkpoint,
        args.out,
        base=args.base,
        prefix=args.prefix,
        max_shard_size=args.max_shard_size,
        adapter_config=args.adapter_config,
    )
    sys.stdout.write(f"{type(model).__name__} written to {args.out}\n")
    return 0


def _verify(args: argparse.Namespace) -> int:
    config = read_config(args.model)
    head = resolve_head(args.head, config)
    if args.packed and head in ("sequence", "question"):
        raise ValueError(
            f"--packed puts several documents into a sequence, but the head '{head}' scores full "
            "sequences. Leave it out."
        )
    with join_ranks(args.device) as device:
        world = dist.group.WORLD if dist.is_initialized() else None
        cp = ContextParallel(world, layout=args.layout, algorithm=args.algorithm)
        dtype = _DTYPES[args.dtype]
        model, weights = build_model(args.model, config, head, dtype=dtype, seed=args.seed)
        _check_length(args.length, model)
        model.to(device)  # type: ignore[arg-type]
        enable(model, allow_unknown=args.allow_unknown)
        batch = build_batch(
            model.config,
            head,
            shape=(args.batch_size, args.length),
            packed=args.packed,
            padded=args.padded,
            seed=args.seed,
        )
        batch = {key: x.to(device) for key, x in batch.items()}
        report = verify(model, batch, cp=cp, check=False)
        if cp.cp_rank == 0:
            kinds = ["packed"] * args.packed + [f"{args.padded} padded"] * bool(args.padded)
            sys.stdout.write(
                f"{type(model).__name__}, {weights} weights, {args.batch_size} "
                f"{' and '.join(kinds) or 'plain'} sequences\n{report}\n"
            )
            if cp.cp_size == 1:
                sys.stdout.write(
                    "This was one process, so nothing was sharded and little was compared. Use "
                    "torchrun --nproc-per-node 2 -m lightning_cp verify ...\n"
                )
            sys.stdout.flush()
        if world is not None:
            dist.barrier()  # torchrun ends all processes when one fails: rank 0 has printed by now
    return 0 if report.passed else 1


@contextmanager
def join_ranks(name: str) -> Iterator[torch.device]:
    """Join the processes that torchrun has started, if any; yield the device of this one."""
    launched = dist.is_torchelastic_launched()
    local_rank = _local_rank()
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if kind == "cuda":
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(
                f"Process {local_rank} of this machine has no GPU of its own: there are "
                f"{num_gpus}. Start fewer processes, or give --device cpu."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not launched:
        yield device
        return
    quote_uncaught_errors()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _check_length(length: int, model: PreTrainedModel) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return
    rule, first = position_rule(model)
    limit -= first + 1 if rule == "ids" else 0
    if length > limit:
        raise ValueError(
            f"--length {length} is more than the {limit} positions that the model has. Give "
            f"--length {limit} or less."
        )


def _local_rank() -> int:
    return dist.get_node_local_rank(fallback_rank=0) if dist.is_torchelastic_launched() else 0


def main(argv: Sequence[str] | None = None, *, prog: str = "lightning-cp") -> int:
    """Run a command and return the exit status.

    Args:
        argv: as on a command line; that of this process when None.
        prog: what help texts call the program.
    """
    args = build_parser(prog).parse_args(argv)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        status: int = args.run(args)
    except (OSError, ValueError, ImportError) as error:
        return report_error(error)
    return status
