# SPDX-License-Identifier: Apache-2.0
"""`lightning-cp plan`: memory, time and limits of a run, without a GPU and without weights."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, get_args

from lightning_cp.comm.error_report import Parser, Removed, report_error
from lightning_cp.config import Attention, Sharding
from lightning_cp.planner.format_plan import format_plan, parse_tokens
from lightning_cp.planner.plan_run import plan_run
from lightning_cp.planner.setup import Checkpointing, Offload, Precision
from lightning_cp.planner.shapes import KNOWN, ModelShape

CLUSTERS: Final = (
    "this command plans one run. `python -m benchmarks.cluster_plan --model PATH --length 128k "
    "--gpus 32`, in a checkout of the repository, compares all meshes of these GPUs and draws them"
)
"""What to use instead of options about meshes and drawings."""
SPEED: Final = (
    "seconds are those of an H200, the only GPU that was measured; --gpu-memory is of any GPU"
)
"""What to use instead of ``--chip``."""


def build_parser(prog: str = "lightning-cp") -> Parser:
    """Build the parser of ``lightning-cp plan``."""
    parser = Parser(
        prog=prog,
        description="Plan a training run.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "plan",
        help="compute memory and time of a run",
        description=(
            "Compute memory by part and seconds per step of a training run, the longest "
            "sequence and the fewest recomputed layers that fit. Needs no GPU, no "
            "weights and no network."
        ),
    )
    command.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help=f"a config.json, a folder with one, or a known model: {', '.join(KNOWN)}",
    )
    command.add_argument("--length", required=True, help="tokens of a sequence: 131072, 128k, 1M")
    command.add_argument("--gpus", type=int, default=8, help="of all nodes (8)")
    command.add_argument("--gpu-memory", type=float, default=141.0, help="GB of a GPU (141)")
    command.add_argument("--host-memory", type=float, default=2000.0, help="GB of a node (2000)")
    command.add_argument(
        "--context-parallel-size", type=int, default=0, help="ranks that share a sequence (all)"
    )
    command.add_argument("--ulysses-size", type=int, default=1, help="of them, in a group (1)")
    command.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="ranks that share each layer (1)"
    )
    command.add_argument("--batch-size", type=int, default=1, help="samples per data rank (1)")
    command.add_argument("--precision", choices=get_args(Precision), default="bf16-mixed")
    command.add_argument("--sharding", choices=get_args(Sharding), default="full")
    command.add_argument("--shard-size", type=int, default=0, help="of hybrid (those of a node)")
    command.add_argument("--parameter-offload", action="store_true", help="to host memory")
    command.add_argument("--checkpointing", choices=get_args(Checkpointing), default="full")
    command.add_argument(
        "--checkpointed-layers", type=int, default=0, help="the first ones; 0 for all (0)"
    )
    command.add_argument("--offload", choices=get_args(Offload), default="none")
    command.add_argument("--tiles", type=int, default=0, help="of MLPs and norms (0)")
    command.add_argument("--compile", action="store_true", help="layers are compiled")
    command.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights (0)")
    command.add_argument(
        "--document-lengths",
        default="",
        metavar="LENGTHS",
        help="of packed documents, repeated until the sequence is full: 4k,16k,1k",
    )
    command.add_argument("--attention-memory", type=float, help="GiB, as the strategy's option")
    command.add_argument("--gradient-wire", choices=("float32", "model"), default="float32")
    command.add_argument("--chip", action=Removed, const=SPEED, help=argparse.SUPPRESS)
    for name in ("--mesh", "--sequences", "--plot"):
        command.add_argument(name, action=Removed, const=CLUSTERS, help=argparse.SUPPRESS)
    return parser


def read_model(model: str) -> ModelShape:
    """Return a known shape, or that of a local config."""
    if model in KNOWN:
        return KNOWN[model]
    if not Path(model).expanduser().exists():
        raise ValueError(
            f"--model {model!r} is neither a file or folder nor a known model. Give a config.json, "
            f"a folder with one, or one of {', '.join(KNOWN)}; nothing is downloaded."
        )
    import transformers

    from hf_patches import model_shape

    transformers.logging.set_verbosity_error()
    return model_shape(Path(model).expanduser(), name=model)


def main(argv: Sequence[str] | None = None, *, prog: str = "lightning-cp") -> int:
    """Run ``plan`` and return the exit status: 1 if the run does not fit, 2 for a user error.

    Args:
        argv: as on a command line, with the command; that of this process when None.
        prog: what help texts call the program.
    """
    args = build_parser(prog).parse_args(argv)
    try:
        documents = tuple(map(parse_tokens, filter(None, args.document_lengths.split(","))))
        model = read_model(args.model)
        plan = plan_run(
            model,
            seq_len=parse_tokens(args.length),
            num_gpus=args.gpus,
            gpu_memory=args.gpu_memory,
            host_memory=args.host_memory,
            cp_size=args.context_parallel_size,
            ulysses_size=args.ulysses_size,
            tp_size=args.tensor_parallel_size,
            batch_size=args.batch_size,
            precision=args.precision,
            sharding=args.sharding,
            shard_size=args.shard_size,
            parameter_offload=args.parameter_offload,
            checkpointing=args.checkpointing,
            checkpointed_layers=args.checkpointed_layers,
            offload=args.offload,
            tiles=args.tiles,
            compiled=args.compile,
            lora_rank=args.lora_rank,
            documents=documents,
            attention=Attention(memory=args.attention_memory, gradient_wire=args.gradient_wire),
        )
        sys.stdout.write(format_plan(plan))
    except (OSError, ValueError, ImportError) as error:
        return report_error(error)
    return 0 if plan.fits else 1
