# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.lengths_gpu [--only NAME ...] [--out DIR]`: lengths that change by batch.

A Llama with the shapes of 8B and fewer layers, as one rank of 8 on one GPU (`emulate.py`), trained
on batches of random lengths, and on as many batches of one length: seconds per token of both, and
what a length costs that was never seen before. ``--exact`` compiles for every length, without
padding, for comparison; ``--length`` sets the fixed one.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig
from transformers.models.llama import LlamaForCausalLM
from transformers.models.mistral import MistralForCausalLM

from benchmarks.emulate import emulated_parallel
from benchmarks.measure import Records, describe, synchronize
from hf_patches import enable
from lightning_cp.attn.flex import from_mask


@dataclass(frozen=True)
class Sizes:
    """Shapes of the model, and lengths of the sequences.

    Args:
        hidden: width.
        heads: query heads.
        kv_heads: key/value heads.
        inner: width of the MLP.
        layers: decoder layers.
        vocab: entries of the vocabulary.
        dtype: of the weights.
        shortest: tokens of the shortest sequence.
        longest: tokens of the longest one.
        window: keys that a token sees in the windowed model.
    """

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    layers: int = 2
    vocab: int = 32000
    dtype: torch.dtype = torch.bfloat16
    shortest: int = 16384
    longest: int = 65536
    window: int = 4096

    def build(self, kind: str, device: torch.device) -> nn.Module:
        """Build the model, with its weights initialised on the device."""
        shapes: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": 1 << 20,
            "use_cache": False,
        }
        torch.manual_seed(0)
        model: nn.Module
        with torch.device(device):
            if kind == "windowed":
                model = MistralForCausalLM(MistralConfig(**shapes, sliding_window=self.window))
            else:
                model = LlamaForCausalLM(LlamaConfig(**shapes))
        for parameter in model.parameters():  # buffers, such as rotary frequencies, stay in float32
            parameter.data = parameter.data.to(self.dtype)
        model.train()
        return model


KINDS = ("packed", "padded", "windowed", "causal")
"""Masks: the first three are computed by FlexAttention on a GPU, the last one by cuDNN."""


def build_batch(
    kind: str, seq_len: int, sizes: Sizes, rng: random.Random, device: torch.device
) -> dict[str, Tensor]:
    """Return a batch of one length; ``padded`` has two samples, one of them shorter."""
    num_samples = 2 if kind == "padded" else 1
    ids = torch.randint(sizes.vocab, (num_samples, seq_len), device=device)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        starts = torch.zeros(seq_len, dtype=torch.long)
        at = 0
        while at < seq_len:
            starts[at] = 1
            at += max(1, int(seq_len * rng.uniform(0.02, 0.4)))
        batch["document_ids"] = starts.cumsum(0)[None].to(device)
    if kind == "padded":
        is_real = torch.ones(2, seq_len, dtype=torch.long)
        is_real[1, int(seq_len * rng.uniform(0.5, 0.95)) :] = 0
        batch["attention_mask"] = is_real.to(device)
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


@dataclass(frozen=True)
class Step:
    """One training step: tokens of a sequence, whether the length was new, and seconds."""

    seq_len: int
    is_new: bool
    seconds: float


def train(
    model: nn.Module,
    parallel: Any,
    lengths: Sequence[int],
    build: Callable[[int], dict[str, Tensor]],
    device: torch.device,
) -> list[Step]:
    """Run forward and backward of one batch of each length, and time every step."""
    seen: set[int] = set()
    steps = []
    for seq_len in lengths:
        batch = build(seq_len)
        synchronize(device)
        begun = time.perf_counter()
        with parallel.step(batch) as local:
            model(**local).loss.backward()
        synchronize(device)
        steps.append(Step(seq_len, seq_len not in seen, time.perf_counter() - begun))
        seen.add(seq_len)
        for parameter in model.parameters():
            parameter.grad = None
    return steps


@dataclass(frozen=True)
class Summary:
    """What a training took.

    Args:
        us_per_token: median over the steps of the second half, microseconds per token of the
            sequence.
        seconds: of all steps.
        num_slow: steps that took more than 100 ms longer than their number of tokens explains.
        last_slow: index of the last of them; -1 if there is none.
        worst_new_ms: of the new lengths in the second half, the largest excess in milliseconds.
    """

    us_per_token: float
    seconds: float
    num_slow: int
    last_slow: int
    worst_new_ms: float


def summarize(steps: Sequence[Step]) -> Summary:
    """Compare each step with steps of similar length.

    Attention makes time per token grow with the length: expected is the median time per token of
    the steps that are at most 10% shorter or longer.
    """
    half = len(steps) // 2
    excess = []
    for step in steps:
        near = [s for s in steps if 0.9 < s.seq_len / step.seq_len < 1.1]
        usual = median(s.seconds / s.seq_len for s in near) * step.seq_len
        excess.append(1e3 * (step.seconds - usual))
    slow = [at for at, ms in enumerate(excess) if ms > 100]
    new = [ms for step, ms in zip(steps[half:], excess[half:], strict=True) if step.is_new]
    return Summary(
        us_per_token=1e6 * median(s.seconds / s.seq_len for s in steps[half:]),
        seconds=sum(s.seconds for s in steps),
        num_slow=len(slow),
        last_slow=slow[-1] if slow else -1,
        worst_new_ms=max(new, default=0.0),
    )


@contextmanager
def compiled_for(*, every_length: bool) -> Iterator[None]:
    """Compile kernels for every length inside, instead of a few that others are padded to."""
    if not every_length:
        yield
        return
    with mock.patch.object(from_mask, "round_up", lambda length: length):
        yield


HEADER = (
    "| mask | lengths | us per token | all steps, s | slow steps | last slow step "
    "| worst new length of the second half, ms |\n" + "|---" * 7 + "|"
)


def run_one(
    kind: str,
    sizes: Sizes,
    device: torch.device,
    records: Records,
    *,
    num_batches: int,
    fixed_len: int,
    every_length: bool,
    options: dict[str, Any],
) -> None:
    """Train on random lengths and on a fixed one, and print both."""
    cp_size, rank = 8, 4
    rng = random.Random(0)
    model = sizes.build(kind, device)
    parallel = emulated_parallel(rank, cp_size, **options)
    handle = enable(model)

    def build(seq_len: int) -> dict[str, Tensor]:
        return build_batch(kind, seq_len, sizes, rng, device)

    drawn = [rng.randint(sizes.shortest, sizes.longest) for _ in range(num_batches)]
    with compiled_for(every_length=every_length):
        for how, lengths in (("random", drawn), (str(fixed_len), [fixed_len] * num_batches)):
            steps = train(model, parallel, lengths, build, device)
            found = summarize(steps)
            print(
                f"| {kind} | {how} | {found.us_per_token:.3f} | {found.seconds:.1f} "
                f"| {found.num_slow} | {found.last_slow} | {found.worst_new_ms:.0f} |",
                flush=True,
            )
            records.add(
                what="lengths",
                mask=kind,
                how=how,
                every_length=every_length,
                shortest=sizes.shortest,
                longest=sizes.longest,
                layers=sizes.layers,
                num_batches=num_batches,
                us_per_token=found.us_per_token,
                seconds=found.seconds,
                num_slow=found.num_slow,
                last_slow=found.last_slow,
                worst_new_ms=found.worst_new_ms,
                steps=[(step.seq_len, round(1e3 * step.seconds, 2)) for step in steps],
                options=options,
            )
    handle.undo()


def run(
    kinds: Sequence[str],
    sizes: Sizes,
    device: torch.device,
    out: Path | None,
    *,
    num_batches: int,
    fixed_len: int,
    every_length: bool = False,
    options: dict[str, Any],
) -> None:
    """Print the table, line by line."""
    where = describe(device)
    records = Records(out, "lengths_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    print(f"{sizes}; {options}; {'every length compiled' if every_length else 'rounded up'}.\n")
    print(HEADER, flush=True)
    for kind in kinds:
        try:
            run_one(
                kind,
                sizes,
                device,
                records,
                num_batches=num_batches,
                fixed_len=fixed_len,
                every_length=every_length,
                options=options,
            )
        except Exception as error:  # noqa: BLE001  continue with the next mask
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"| {kind} | failed: {reason} ||||||", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS, metavar="NAME")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shortest", type=int, default=16384)
    parser.add_argument("--longest", type=int, default=65536)
    parser.add_argument("--length", type=int, default=40_000, help="of the fixed-length training")
    parser.add_argument("--exact", action="store_true", help="compile for every length")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    args = parser.parse_args(arguments)
    common: dict[str, Any] = {"every_length": args.exact, "options": {"kernel": args.kernel}}
    if args.tiny:
        torch.set_num_threads(1)
        small = Sizes(32, 4, 2, 64, 2, 64, torch.float32, 64, 256, 32)
        device = torch.device("cpu")
        run(args.only, small, device, args.out, num_batches=6, fixed_len=150, **common)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    sizes = Sizes(layers=args.layers, shortest=args.shortest, longest=args.longest)
    common |= {"num_batches": args.batches, "fixed_len": args.length}
    run(args.only, sizes, device, args.out, **common)


if __name__ == "__main__":
    main()
