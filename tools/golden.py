# ruff: noqa: T201
"""A record of exact results, for changes that must not change a number.

    python -m tools.golden write FILE      run all cases, write what they gave
    python -m tools.golden compare FILE    run them again; exit status 1 if a bit differs

Each case is a step, a model or a training run on CPU ranks; recorded are its loss as a hexadecimal
float and a digest of the loss, every gradient and whatever else it returns, on all ranks. Results
depend on the processor and on the versions of the libraries, so that a record is good for one
machine: write it before a change, compare after.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.attn import cases
from tests.attn.flex.cases import make_flex_case
from tests.lightning.jobs import (
    Fit,
    Module,
    PackedRows,
    build_strategy,
    build_trainer,
    elastic_environment,
    full,
    loader,
    run_fit,
)
from tests.parity import hf, sdpa_models, steps, test_chunked_loss, test_flex
from tests.parity.batches import BATCHES
from tests.ranks import RankPool, same_bits

Case = tuple[str, int, Callable[..., Any], tuple[Any, ...]]
"""A name, the number of ranks, and what each rank calls."""

LAYOUTS, ALGORITHMS = ("zigzag", "contiguous", "balanced"), ("gather", "ring", "ulysses")


def all_cases() -> Iterator[Case]:
    """Yield every case."""
    yield from _steps()
    yield from _chunked()
    yield from _sdpa()
    yield from _flex()
    yield from _hugging_face()
    yield from _lightning()


def _steps() -> Iterator[Case]:
    turns = itertools.cycle(itertools.product(ALGORITHMS, LAYOUTS))
    for size, (name, build) in itertools.product((2, 3, 4), BATCHES.items()):
        for _ in range(2):
            algorithm, layout = next(turns)
            options = {"algorithm": algorithm, "layout": layout}
            job = steps.Job([build(3)], options)
            yield f"step {name} {algorithm} {layout} on {size}", size, steps.rank_step, (job,)
    for name in ("plain", "document_ids", "left_padded"):
        job = steps.Job([BATCHES[name](3)])
        yield f"step {name} auto on 3", 3, steps.rank_step, (job,)
        for algorithm in ("gather", "ring"):
            job = steps.Job([BATCHES[name](3)], {"algorithm": algorithm, "ulysses_size": 2})
            yield f"step {name} {algorithm} ulysses_size 2 on 4", 4, steps.rank_step, (job,)
        for how in ("reentrant", "non-reentrant"):
            bound = how == "reentrant"
            job = steps.Job(
                [BATCHES[name](4)], checkpointing=how, backward_outside=True, bound_mask=bound
            )
            yield f"step {name} recomputed {how} on 2", 2, steps.rank_step, (job,)
    for algorithm in ALGORITHMS:
        rows = [BATCHES["document_ids"](5), BATCHES["right_padded"](6)]
        job = steps.Job(rows, {"algorithm": algorithm})
        yield f"step data parallel {algorithm} on 4", 4, steps.rank_step, (job,)


def _chunked() -> Iterator[Case]:
    for name, build in test_chunked_loss.ROWS.items():
        job = test_chunked_loss.Job(build(3), "chunked", tied=name == "plain")
        yield f"chunked loss {name} on 3", 3, test_chunked_loss.run_job, (job,)


def _sdpa() -> Iterator[Case]:
    choices = itertools.product(sdpa_models.MODELS, ALGORITHMS, ["zigzag", "contiguous"])
    for size, (kind, algorithm, layout) in zip(itertools.cycle([2, 3]), choices, strict=False):
        job = sdpa_models.SdpaJob(kind, algorithm, layout, checkpointing=layout == "zigzag")
        yield f"sdpa {kind} {algorithm} {layout} on {size}", size, sdpa_models.shared, (job,)


def _flex() -> Iterator[Case]:
    choices = itertools.product(["causal", "document", "by head"], ["zigzag", "contiguous"])
    for mask, layout in choices:
        case = make_flex_case(mask, layout=layout, length=131, heads="mha", dims=(4, 4))
        yield f"flex {mask} {layout} on 3", 3, _flex_call, ({"case": case},)
    slopes = torch.tensor([0.0, 0.3, 0.1, 0.7], dtype=torch.float64)
    for (mask, algorithm), bias in itertools.product(
        itertools.product(cases.MASKS, ["gather", "ulysses"]), [None, slopes]
    ):
        case = cases.make_case(mask, softcap=2.0 if bias is None else None, bias=bias)
        job = {"case": case, "options": {"algorithm": algorithm}}
        name = f"flex kernel {mask} {algorithm}{' alibi' if bias is not None else ''} on 2"
        yield name, 2, _flex_kernel, (job,)


def _flex_call(job: dict[str, Any]) -> Any:
    return test_flex.run_shared(**job)


def _flex_kernel(job: dict[str, Any]) -> Any:
    return test_flex.run_kernel(**job)


def _hugging_face() -> Iterator[Case]:
    names = [
        "llama",
        "llama:dynamic",
        "gpt2",
        "opt",
        "roberta",
        "mistral",
        "gpt_oss",
        "gemma2",
        "gemma3_text:bidirectional",
        "gemma3n_text",
        "llama4_text",
        "deepseek_v3",
        "diffllama",
        "mixtral:aux",
    ]
    turns = itertools.cycle(itertools.product(LAYOUTS, ALGORITHMS))
    for turn, (name, kind) in zip(turns, itertools.product(names, hf.KINDS), strict=False):
        options = tuple(zip(("layout", "algorithm"), turn, strict=True))
        job = hf.Job(name, kind, options=options, dtype=torch.float64)
        yield f"hf {job} on 2", 2, _hf_step, (job,)
    for name, enabling in (("llama:tied", "always"), ("gemma2", "always"), ("bert", "always")):
        job = hf.Job(name, "packed", enabling=(("chunked_loss", enabling),))
        yield f"hf chunked loss {job} on 3", 3, _hf_step, (job,)
    for reentrant in (False, True):
        job = hf.Job("gpt_oss", "packed", checkpointing=reentrant)
        yield f"hf recomputed {reentrant} {job} on 3", 3, _hf_step, (job,)


def _hf_step(job: hf.Job) -> Any:
    return hf.run(job)


def _lightning() -> Iterator[Case]:
    double = {"dtype": torch.float64}  # Lightning leaves the dtype of the weights as it is
    fits = {
        "plain on 2": (2, Fit(**double)),
        "plain on 3": (3, Fit(**double)),
        "accumulated on 2": (2, Fit(accumulate=2, **double)),
        "manual on 2": (2, Fit(manual=True, accumulate=2, **double)),
        "replicated on 2": (2, Fit(strategy={"parameter_sharding": "none"}, **double)),
        "data parallel on 4": (4, Fit(dp_size=2, accumulate=2, **double)),
        "float32 on 2": (2, Fit()),
        "bf16-mixed on 2": (2, Fit(precision="bf16-mixed")),
        "ring on 3": (3, Fit(strategy={"algorithm": "ring"}, **double)),
    }
    for name, (size, fit) in fits.items():
        yield f"fit {name}", size, run_fit, (fit,)
    for size in (2, 3):
        yield f"checkpoint on {size}", size, _resume, ()
        yield f"evaluate on {size}", size, _evaluate, ()


def _resume() -> Any:
    """Train, save, and go on from the checkpoint in another run."""
    path = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(path, 0)
    folder, rows, weights = Path(str(path[0])) / "checkpoint", PackedRows(6), []
    with elastic_environment():
        for epochs, start in ((1, None), (2, folder)):
            module = Module(dtype=torch.float64)
            trainer = build_trainer(strategy=build_strategy(), max_epochs=epochs)
            trainer.fit(module, loader(rows, 1), ckpt_path=start)
            trainer.save_checkpoint(folder)
            weights.append({n: full(p.detach()) for n, p in module.named_parameters()})
    return weights


def _evaluate() -> Any:
    with elastic_environment():
        module, rows = Module(dtype=torch.float64), PackedRows(6)
        trainer = build_trainer(strategy=build_strategy())
        metrics = trainer.validate(module, loader(rows, 1), verbose=False)
        return {"metrics": metrics, "predictions": trainer.predict(module, loader(rows, 1))}


# ---------------------------------------------------------------- recording


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield every value of a result as bytes, with its path."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _parts(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _parts(part, f"{path}.{index}")
    elif isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield path, bits.numpy().tobytes()
    elif isinstance(value, float | np.floating):
        yield path, float(value).hex().encode()
    elif hasattr(value, "__dataclass_fields__"):
        yield from _parts({f: getattr(value, f) for f in value.__dataclass_fields__}, path)
    else:
        yield path, repr(value).encode()


def _loss_of(value: Any) -> str:
    if isinstance(value, Mapping):
        for key in ("loss", "losses"):
            if key in value:
                return _loss_of(value[key])
    if isinstance(value, list | tuple) and value:
        return _loss_of(value[-1])
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value).hex()
    return float(value).hex() if isinstance(value, float) else ""


def run_cases(jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[tuple[str, str]]:
    """Return loss and digest of each case on this rank."""
    found = []
    for fn, args in jobs:
        torch.manual_seed(0)
        with same_bits():
            result = fn(*args)
        digest = hashlib.sha256()
        for path, data in _parts(result):
            digest.update(path.encode() + b"\0" + data)
        found.append((_loss_of(result), digest.hexdigest()[:16]))
    return found


def record(pattern: str = "") -> dict[str, str]:
    """Return what all cases give: the loss of the first rank, and a digest of all ranks'."""
    chosen = [case for case in all_cases() if pattern in case[0]]
    assert len({name for name, *_ in chosen}) == len(chosen), "two cases of one name"
    results: dict[str, str] = {}
    for size in sorted({size for _, size, *_ in chosen}):
        mine = [case for case in chosen if case[1] == size]
        pool = RankPool(size)
        for start in range(0, len(mine), 12):
            some = mine[start : start + 12]
            jobs = [(fn, args) for _, _, fn, args in some]
            ranks = pool.run(run_cases, jobs, timeout=600)
            for (name, *_), *parts in zip(some, *ranks, strict=True):
                digests = "".join(digest for _, digest in parts)
                digest = hashlib.sha256(digests.encode()).hexdigest()[:16]
                results[name] = f"{parts[0][0]} {digest}".strip()
        pool.stop()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.golden", description=__doc__)
    parser.add_argument("command", choices=["write", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--cases", default="", help="only cases with this text in their name")
    args = parser.parse_args()
    start = time.monotonic()
    now = record(args.cases)
    seconds = time.monotonic() - start
    if args.command == "write":
        args.file.write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now)} cases written in {seconds:.0f} s")
        return 0
    before = {k: v for k, v in json.loads(args.file.read_text()).items() if args.cases in k}
    differ = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    for name in sorted(differ):
        print(f"{name}: was {before.get(name)}, is {now.get(name)}")
    print(f"{len(now) - len(differ)} of {len(now)} cases identical in {seconds:.0f} s")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
