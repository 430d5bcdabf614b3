# SPDX-License-Identifier: Apache-2.0
"""`lightning-cp reference`: stores log-probabilities of a reference model for each pair.

For `reference: stored` of `PreferenceModule`, which then needs no second model. Tokens are those of
`PairData`, and each pair is sharded over all processes.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches import enable
from hf_patches.__main__ import join_ranks
from lightning_cp import ContextParallel, sequence_logp
from lightning_cp.error_report import Parser, report_error
from recipes.preference.data import STORED, PairData
from recipes.preference.pairs import Pair, lay_out
from recipes.weights import find_weights, load_config, load_full, pop_quantization

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LONGEST: Final = 2**31 - 1
"""Pairs are not packed here: the limit of a sample does not matter."""


def build_parser(prog: str = "lightning-cp") -> Parser:
    """Build the parser of ``lightning-cp reference``."""
    parser = Parser(prog=prog, description="Store a reference.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "reference",
        help="store log-probabilities of a reference model",
        description=(
            "Write the records of a source with two more columns, ref_chosen_logps and "
            "ref_rejected_logps: the log-probability of each completion, given its prompt, under a "
            "reference model. Each pair is sharded over all processes; the weights must fit on one "
            "device. Example: torchrun --nproc-per-node 2 --no-python lightning-cp reference "
            "--model PATH --source pairs.jsonl --out stored.jsonl"
        ),
    )
    command.add_argument("--model", required=True, help="a folder, or a name on the hub")
    command.add_argument("--source", required=True, help="of pairs, as data.init_args.source")
    command.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    command.add_argument(
        "--tokenizer", help="by default the model's; bytes: for the byte tokenizer"
    )
    command.add_argument("--prompt-column", default="prompt", help="(prompt)")
    command.add_argument("--chosen-column", default="chosen", help="(chosen)")
    command.add_argument("--rejected-column", default="rejected", help="(rejected)")
    command.add_argument("--config-name", help="the configuration of a hub source")
    command.add_argument("--split", default="train", help="of a hub source (train)")
    command.add_argument("--dtype", choices=tuple(_DTYPES), default="float32", help="(float32)")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--separate-prompts",
        action="store_true",
        help="compute the prompt once per completion: for models with windows or recurrences",
    )
    command.set_defaults(run=_store)
    return parser


def store_reference(
    model: PreTrainedModel,
    data: PairData,
    *,
    cp: ContextParallel,
) -> Iterator[dict[str, Any]]:
    """Yield each record of a source with the log-probabilities of its completions. Collective.

    Args:
        model: an enabled causal language model, with its weights.
        data: where the records are, and how they become tokens.
        cp: the ranks that share each pair.
    """
    device = next(model.parameters()).device
    for record, pair in data.pairs_with_records():
        if any(name in record for name in STORED):
            raise ValueError(
                f"source={data.source!r} has a column {STORED[0]} or {STORED[1]} already. Give the "
                "source without it."
            )
        sums = _sums(model, _batch(pair, data.share_prompts, device), cp)
        yield {**record, **dict(zip(STORED, sums, strict=True))}


def _batch(pair: Pair, share_prompt: bool, device: torch.device) -> dict[str, Tensor]:
    sample = lay_out(pair, share_prompt=share_prompt)
    return {name: torch.from_numpy(x).long()[None].to(device) for name, x in sample.items()}


@torch.no_grad()
def _sums(model: PreTrainedModel, batch: dict[str, Tensor], cp: ContextParallel) -> list[float]:
    with cp.step(batch) as local:
        logp = model(**local, token_logp=True).token_logp
        found = sequence_logp(logp, local["labels"], per=local["branch_ids"])
    return [float(x) for x in found.sums[0]]


def _store(args: argparse.Namespace) -> int:
    if args.out.suffix != ".jsonl":
        raise ValueError(f"--out {args.out}: give a file that ends with .jsonl.")
    if args.out.exists():
        raise ValueError(f"--out {args.out} exists. Give another name, or remove it.")
    tokenizer = args.tokenizer or args.model
    data = PairData(
        args.source,
        prompt_column=args.prompt_column,
        chosen_column=args.chosen_column,
        rejected_column=args.rejected_column,
        share_prompts=not args.separate_prompts,
        tokenizer=None if tokenizer == "bytes" else tokenizer,
        seq_len=_LONGEST,
        val_fraction=0.0,
        config_name=args.config_name,
        split=args.split,
    )
    with join_ranks(args.device) as device:
        model = _load(args.model, _DTYPES[args.dtype]).to(device)  # type: ignore[arg-type]
        cp = ContextParallel(dist.group.WORLD if dist.is_initialized() else None)
        start, number = time.monotonic(), 0
        unfinished = args.out.with_name(f"{args.out.name}.unfinished")
        is_first = cp.cp_rank == 0
        with open(unfinished if is_first else "/dev/null", "w", encoding="utf-8") as file:
            for record in store_reference(model, data, cp=cp):
                file.write(_line(record) + "\n")
                number += 1
        if is_first:
            unfinished.replace(args.out)
            seconds = time.monotonic() - start
            sys.stdout.write(f"stored: pairs={number}, seconds={seconds:.1f}, file={args.out}\n")
    return 0


def _line(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"A record of the source cannot be written as JSON: {error}.") from error


def _load(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model for scoring, with attention as `enable` finds it."""
    is_packed = pop_quantization(load_config(name), name)
    model = load_full(find_weights(name, fetch=True), dequantize=is_packed, dtype=dtype)
    enable(model)
    model.eval()
    return model


def main(argv: Sequence[str] | None = None, *, prog: str = "lightning-cp") -> int:
    """Run the command and return the exit status: 2 for a user error.

    Args:
        argv: as on a command line; that of this process when None.
        prog: what help texts call the program.
    """
    args = build_parser(prog).parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        status: int = args.run(args)
    except (OSError, ValueError, ImportError) as error:
        return report_error(error)
    return status
