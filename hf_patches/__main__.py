# SPDX-License-Identifier: Apache-2.0
"""The command line: `torchrun ... -m hf_patches verify` and `python -m hf_patches export`.

Exit status: 0 if all is well, 1 if `verify` found other numbers, 2 for what the user can mend
(torchrun itself then ends with 1).
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_patches.enable import enable
from hf_patches.export import export, read_config
from hf_patches.positions import position_rule
from hf_patches.verify import verify
from lightning_cp.attn.plan import AlgorithmName
from lightning_cp.geometry.layout import LayoutName
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.parallel import ContextParallel
from lightning_cp.step import IGNORED_LABEL

_HEADS: Final[dict[str, Any]] = {
    "causal": transformers.AutoModelForCausalLM,
    "masked": transformers.AutoModelForMaskedLM,
    "sequence": transformers.AutoModelForSequenceClassification,
    "token": transformers.AutoModelForTokenClassification,
    "question": transformers.AutoModelForQuestionAnswering,
}
_ENDINGS: Final = {
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "sequence",
    "ForTokenClassification": "token",
    "ForQuestionAnswering": "question",
}
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def build_parser(prog: str = "python -m hf_patches") -> argparse.ArgumentParser:
    """Build the parser; each command sets ``run``, which returns the exit status."""
    parser = argparse.ArgumentParser(
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
            "model, on a random batch. Start it on the ranks that shall share a row: torchrun "
            "--nproc-per-node 2 -m hf_patches verify --model PATH. Exit status 1 if they differ, 2 "
            "if the model or the arguments are refused."
        ),
    )
    command.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="a folder with a model, or with a config.json only, or a config.json: random weights",
    )
    command.add_argument("--length", type=_positive, default=512, help="tokens per row (512)")
    command.add_argument("--batch-size", type=_positive, default=2, help="rows (2)")
    command.add_argument("--packed", action="store_true", help="several documents in each row")
    command.add_argument("--padded", choices=("left", "right"), help="rows of uneven lengths")
    command.add_argument("--layout", choices=get_args(LayoutName), default="auto")
    command.add_argument("--algorithm", choices=get_args(AlgorithmName), default="auto")
    command.add_argument("--dtype", choices=tuple(_DTYPES), default="float32", help="(float32)")
    command.add_argument(
        "--head",
        choices=("auto", *_HEADS),
        default="auto",
        help="what the model is for; by default what its config names, else causal",
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
            "from_pretrained. Needs no GPU; the weights must fit into memory. A checkpoint holds "
            "pickles, which can run any code: export only those that you trust."
        ),
    )
    command.add_argument("checkpoint", metavar="CKPT", type=Path, help="a folder, or a file")
    command.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    command.add_argument(
        "--base",
        type=Path,
        metavar="PATH",
        help="a folder with the model's config.json, and perhaps its tokenizer; by default the one "
        "that the checkpoint's hyperparameters name",
    )
    command.add_argument(
        "--prefix", help="what stands before the model's own names in CKPT; found when left out"
    )
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="(5GB)")
    command.add_argument(
        "--merge",
        action="store_true",
        help="of a checkpoint with PEFT adapters, write a model that they are merged into; by "
        "default the adapters alone",
    )
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
        raise argparse.ArgumentTypeError(f"'{text}': give a whole number of at least 1")
    return number


def _export(args: argparse.Namespace) -> int:
    model = export(
        args.checkpoint,
        args.out,
        base=args.base,
        prefix=args.prefix,
        max_shard_size=args.max_shard_size,
        merge=args.merge,
        adapter_config=args.adapter_config,
    )
    sys.stdout.write(f"{type(model).__name__} written to {args.out}\n")
    return 0


# ---------------------------------------------------------------- verify


def _verify(args: argparse.Namespace) -> int:
    config = read_config(args.model)
    head = _resolve_head(args.head, config)
    _check_rows(args, head)
    with _ranks(args.device) as device:
        world = dist.group.WORLD if dist.is_initialized() else None
        cp = ContextParallel(world, layout=args.layout, algorithm=args.algorithm)
        dtype = _DTYPES[args.dtype]
        model, made = build_model(args.model, config, head, dtype=dtype, seed=args.seed)
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
        report = verify(model, {key: x.to(device) for key, x in batch.items()}, cp=cp)
        if cp.cp_rank == 0:
            what = ["packed"] * args.packed + [f"{args.padded} padded"] * bool(args.padded)
            sys.stdout.write(
                f"{type(model).__name__}, {made} weights, {args.batch_size} "
                f"{' and '.join(what) or 'plain'} rows\n{report}\n"
            )
            if cp.cp_size == 1:
                sys.stdout.write(
                    "This was one process, which compares little: nothing was shared. Use "
                    "torchrun --nproc-per-node 2 -m hf_patches verify ...\n"
                )
            sys.stdout.flush()
        if world is not None:
            dist.barrier()  # torchrun ends all when one has failed: the first has spoken by now
    return 0 if report.passed else 1


@contextmanager
def _ranks(name: str) -> Iterator[torch.device]:
    """Join the processes that torchrun has started, if it has, and return this one's device."""
    launched = dist.is_torchelastic_launched()
    local_rank = dist.get_node_local_rank(fallback_rank=0) if launched else 0
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cpu")
    if kind == "cuda":
        found = torch.cuda.device_count()
        if local_rank >= found:
            raise ValueError(
                f"Process {local_rank} of this machine has no GPU of its own: there are {found}. "
                "Start fewer processes, or give --device cpu."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not launched:
        yield device
        return
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _resolve_head(head: str, config: PreTrainedConfig) -> str:
    """Return what the model is for, and refuse what its type has not."""
    if head == "auto":
        names = config.architectures or ("",)
        endings = (kind for end, kind in _ENDINGS.items() if names[0].endswith(end))
        head = next(endings, "causal")
    if type(config) not in _HEADS[head]._model_mapping:
        has = [name for name, auto in _HEADS.items() if type(config) in auto._model_mapping]
        raise ValueError(
            f"transformers has no model of type '{config.model_type}' with the head '{head}'. "
            f"Choose --head from: {', '.join(has) or 'none that is known here'}."
        )
    return head


def _check_rows(args: argparse.Namespace, head: str) -> None:
    if args.packed and head in ("sequence", "question"):
        raise ValueError(
            f"--packed puts several documents into a row, but the head '{head}' scores rows. Leave "
            "it out."
        )


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


def build_model(
    path: Path, config: PreTrainedConfig, head: str, *, dtype: torch.dtype, seed: int
) -> tuple[PreTrainedModel, str]:
    """Load a model, or draw one where there is a config only; and say which."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name, value in vars(part).items() if part is not None else ():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)  # it is off while comparing; on attention it is refused
    text = config.get_text_config()
    if text.pad_token_id is None and head == "sequence":
        text.pad_token_id = config.pad_token_id = 0  # such heads look for the last token before it
    auto: Any = _HEADS[head]
    torch.manual_seed(seed)
    if path.is_dir() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))):
        loaded = auto.from_pretrained(path, config=config, dtype=dtype)
        return loaded, "loaded"
    model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    redraw(model, seed=seed)
    return model, "random"


@torch.no_grad()
def redraw(model: PreTrainedModel, *, seed: int) -> None:
    """Draw weights anew, larger than models begin with.

    A fresh model attends to all tokens almost alike, and adds next to nothing to its residual
    stream: it would hardly notice a wrong mask. Here the scores of a query differ by about two, and
    norms and biases differ from number to number.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # Logits of a table that is the head too must not become so large that softmax saturates.
    is_tied = head is not None and id(getattr(head, "weight", None)) in tables
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(0.3 * noise)
        elif id(parameter) in tables:
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if is_tied else noise)
        else:
            parameter.copy_(1.4 * noise / (parameter.shape[-1] * parameter.shape[-2]) ** 0.25)


def build_batch(
    config: PreTrainedConfig,
    head: str,
    *,
    shape: tuple[int, int],
    packed: bool,
    padded: str | None,
    seed: int,
) -> dict[str, Tensor]:
    """Draw a batch as a loader would give it: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = shape
    text = config.get_text_config()
    words = torch.tensor(sorted({*range(text.vocab_size)} - _special(config, text)))
    ids = words[torch.randint(len(words), shape, generator=generator)]
    labels = torch.where(torch.rand(shape, generator=generator) < 0.2, IGNORED_LABEL, ids)
    batch = {"input_ids": ids}
    real = torch.ones(shape, dtype=torch.bool)
    if padded:
        gone = torch.randint(length // 8, length // 2 + 1, (rows, 1), generator=generator)
        real = torch.arange(length) >= gone
        real = real if padded == "left" else real.flip(1)
        batch["attention_mask"] = real.long()
        batch["input_ids"] = torch.where(real, ids, text.pad_token_id or 0)
        labels = torch.where(real, labels, IGNORED_LABEL)
    if packed:
        documents = _documents(real, generator)
        batch["document_ids"] = torch.where(real, documents, NO_DOCUMENT)
    num_labels = config.num_labels or 2
    if head == "sequence":
        batch["labels"] = torch.randint(num_labels, (rows,), generator=generator)
    elif head == "question":
        places = torch.arange(length).expand(shape)
        first = torch.where(real, places, length).amin(1)
        last = torch.where(real, places, 0).amax(1)
        batch["start_positions"] = first + (last - first) // 3
        batch["end_positions"] = last - (last - first) // 3
    elif head == "token":
        kinds = labels % num_labels
        batch["labels"] = torch.where(labels == IGNORED_LABEL, IGNORED_LABEL, kinds)
    else:
        batch["labels"] = labels
    return batch


def _special(*configs: PreTrainedConfig) -> set[int]:
    """Return the tokens that mean padding, an image and the like to a model."""
    found: set[int] = set()
    for config in configs:
        for name, value in config.to_dict().items():
            if name.endswith(("token_id", "token_index")):
                found |= {
                    x for x in (value if isinstance(value, list) else [value]) if x is not None
                }
    return found


def _documents(real: Tensor, generator: torch.Generator) -> Tensor:
    """Return ids of up to six documents per row, of uneven lengths, one of a single token."""
    starts = torch.zeros(real.shape, dtype=torch.int64)
    for row, mask in zip(starts, real, strict=True):
        places = mask.nonzero().flatten()
        cuts = places[torch.randperm(len(places), generator=generator)[:4]]
        row[cuts] = 1
        row[(cuts[:1] + 1) % len(row)] = 1
    return starts.cumsum(1)


def _rank() -> int:
    return dist.get_node_local_rank(fallback_rank=0) if dist.is_torchelastic_launched() else 0


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m hf_patches") -> int:
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
        rank = _rank()
        if rank > 0:
            # torchrun ends all processes when one has failed. Mostly the first says the same.
            time.sleep(2)
        where = f" (process {rank})" if rank > 0 else ""
        sys.stderr.write(f"error{where}: {' '.join(str(error).split())}\n")
        return 2
    return status


if __name__ == "__main__":
    raise SystemExit(main())
