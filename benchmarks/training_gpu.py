# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.training_gpu [--only NAME ...] [--out DIR]`: training steps.

A Llama with the shapes of 8B and fewer layers, as one rank of 8 on one GPU (`emulate.py`): forward,
loss and backward, with and without activation checkpointing. Compared with the same model on a
separate sequence of as many tokens as the rank holds: everything but attention should take as long.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.emulate import emulated_parallel
from benchmarks.measure import (
    Records,
    describe,
    kernel_times,
    peak_memory,
    print_profile,
    timed,
)
from hf_patches import enable
from hf_patches.model.forward import ChunkedLoss
from lightning_cp.config import Memory
from lightning_cp.lightning.memory.activations import prepare_layers
from lightning_cp.memory import checkpoint_layers, tile_modules

PEAK_TFLOPS = 989.0
"""Dense bf16 rate of an H200 and an H100, per their data sheets."""


@dataclass(frozen=True)
class Shape:
    """Shapes of the model."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    layers: int = 2
    vocab: int = 128256
    dtype: torch.dtype = torch.bfloat16

    def build(self, device: torch.device) -> LlamaForCausalLM:
        """Build the model, with its weights initialised on the device."""
        config = LlamaConfig(
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            vocab_size=self.vocab,
            max_position_embeddings=1 << 20,
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(config)
        model.set_attn_implementation("sdpa")
        for parameter in model.parameters():  # buffers, such as rotary frequencies, stay in float32
            parameter.data = parameter.data.to(self.dtype)
        model.train()
        return model

    def flops(self, model: nn.Module, num_tokens: int, pairs: float) -> float:
        """Return the FLOPs of one step, forward and backward, without recomputation."""
        weights = sum(p.numel() for p in model.parameters()) - self.vocab * self.hidden
        scores = 12 * pairs * self.hidden * self.layers
        return 6 * weights * num_tokens + scores


class Stopwatch:
    """Total time of attention, forward, recomputed and backward, by GPU events."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._marks: list[tuple[bool, Any]] = []

    def mark(self, *, start: bool) -> None:
        """Record that attention starts or ends at this point of the stream."""
        if self._on:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((start, event))

    def clear(self) -> None:
        """Discard all marks."""
        self._marks.clear()

    def total(self) -> float:
        """Return milliseconds between starts and ends; backward ends with dq, dk and dv."""
        spent, begun = 0.0, None
        for start, event in self._marks:
            if start:
                begun = event
            elif begun is not None:
                spent, begun = spent + begun.elapsed_time(event), None
        return spent


class _Mark(torch.autograd.Function):
    """The identity, which marks the stopwatch when gradients pass."""

    @staticmethod
    def forward(ctx: Any, watch: Stopwatch, start: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.watch, ctx.start = watch, start
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.watch.mark(start=ctx.start)
        return (None, None, *gradients)


@contextmanager
def watched(model: nn.Module, watch: Stopwatch) -> Iterator[None]:
    """Time the attention function that a model uses."""
    name = model.config._attn_implementation  # type: ignore[union-attr]
    inner: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]

    def timed_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        query, key, value = _Mark.apply(watch, False, query, key, value)
        watch.mark(start=True)
        out, weights = inner(module, query, key, value, *args, **kwargs)
        watch.mark(start=False)
        (out,) = _Mark.apply(watch, True, out)
        return out, weights

    # A local override of this interface object: the registered function stays.
    override = ALL_ATTENTION_FUNCTIONS._local_mapping.get(name)
    ALL_ATTENTION_FUNCTIONS[name] = timed_attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if override is not None:
            ALL_ATTENTION_FUNCTIONS[name] = override


@dataclass(frozen=True)
class Run:
    """One line of the table.

    Args:
        name: for ``--only``.
        seq_len: tokens of the full sequence.
        checkpointing: whether activations are recomputed in backward.
    """

    name: str
    seq_len: int
    checkpointing: bool


RUNS = (
    Run("32k", 1 << 15, False),
    Run("32k-checkpointing", 1 << 15, True),
    Run("128k", 1 << 17, False),
    Run("128k-checkpointing", 1 << 17, True),
    Run("256k-checkpointing", 1 << 18, True),
    Run("1M-checkpointing", 1 << 20, True),
)


@dataclass(frozen=True)
class Spent:
    """Milliseconds of a step, of its attention and of each kernel, peak bytes, and the loss."""

    ms: float
    attention_ms: float
    peak: int
    loss: float
    kernels: dict[str, tuple[float, int]]

    @property
    def other_ms(self) -> float:
        """Return the time of everything but attention."""
        return self.ms - self.attention_ms

    @property
    def busy_ms(self) -> float:
        """Return the time of all kernels, without gaps."""
        return sum(ms for ms, _ in self.kernels.values())


def train(
    model: LlamaForCausalLM, batch: dict[str, Tensor], step: Callable[[], Any], *, watches: bool
) -> Spent:
    """Time steps of a model; ``step()`` is a context that yields this rank's batch.

    The stopwatch would break the graphs of compiled layers: without it, attention takes 0 ms.
    """
    device = batch["input_ids"].device
    watch = Stopwatch(device)
    losses: list[Tensor] = []

    def call() -> None:
        watch.clear()
        losses.clear()
        with step() as local:
            loss = model(**local).loss
            loss.backward()
        losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.grad = None

    with watched(model, watch) if watches else nullcontext():
        spent = timed(call, device, repeats=7)
        inside = watch.total()  # of the last step, which the GPU has finished
        peak = peak_memory(call, device)
        kernels = kernel_times(call, device)
    return Spent(spent, inside, peak, float(losses[0]), kernels)


def run_one(
    one: Run,
    shape: Shape,
    device: torch.device,
    records: Records,
    *,
    options: dict[str, Any],
    chunked_loss: ChunkedLoss,
    tile: bool,
    alone: bool,
    compiled: bool = False,
    num_layers: int | None = None,
    profile: bool = False,
) -> None:
    """Time a run and its reference, and print both."""
    cp_size, rank = 8, 4
    model = shape.build(device)
    if compiled:
        torch.compiler.reset()
        prepare_layers(model, Memory(compile="layers"), None, training=True)
    if one.checkpointing:
        checkpoint_layers(model, num_layers=num_layers)
    local_len = one.seq_len // cp_size
    ids = torch.randint(shape.vocab, (1, one.seq_len), device=device)
    own = {"input_ids": ids[:, :local_len], "labels": ids[:, :local_len]}
    ideal = None
    if alone:
        ideal = train(model, own, lambda: nullcontext(own), watches=not compiled)
    full = {"input_ids": ids, "labels": ids}
    # Without the comparison of the first batches between ranks, which other steps do not have.
    cp = emulated_parallel(rank, cp_size, **options)
    handle = enable(model, chunked_loss=chunked_loss)
    if tile:
        tile_modules(model)
    emulated = train(model, full, lambda: cp.step(full), watches=not compiled)
    handle.undo()
    lines = [(f"rank {rank} of {cp_size}", emulated, one.seq_len**2 / 2 / cp_size)]
    if ideal is not None:
        lines.append((f"alone, {local_len} tokens", ideal, local_len**2 / 2))
    for how, spent, pairs in lines:
        rate = local_len / spent.ms * 1e3
        peak = shape.flops(model, local_len, pairs) / spent.ms / 1e9 / PEAK_TFLOPS
        share = "" if ideal is None else f"{ideal.other_ms / spent.other_ms:.2f}"
        print(
            f"| {one.name} | {how} | {spent.ms:.1f} | {spent.busy_ms:.1f} | {rate:,.0f} "
            f"| {peak:.3f} | {spent.attention_ms:.1f} | {spent.other_ms:.1f} "
            f"| {share} | {spent.peak / 2**30:.1f} "
            f"| {spent.loss:.3f} |",
            flush=True,
        )
        records.add(
            what="training",
            run=one.name,
            how=how,
            seq_len=one.seq_len,
            cp_size=cp_size,
            layers=shape.layers,
            vocab=shape.vocab,
            checkpointing=one.checkpointing,
            ms=spent.ms,
            busy_ms=spent.busy_ms,
            attention_ms=spent.attention_ms,
            other_ms=spent.other_ms,
            tokens_per_second=rate,
            share_of_peak=peak,
            peak_bytes=spent.peak,
            loss=spent.loss,
            options=options,
            chunked_loss=chunked_loss,
            tile=tile,
            compiled=compiled,
            checkpointed_layers=num_layers,
        )
    if profile:
        print_profile(emulated.kernels)


HEADER = (
    "| run | how | step, ms | kernels, ms | tokens/s of the rank | share of peak | attention, ms "
    "| other, ms | other alone / other | peak memory of the step, GiB | loss |\n"
    + "|---" * 11
    + "|"
)


def run(
    runs: Sequence[Run],
    shape: Shape,
    device: torch.device,
    out: Path | None,
    *,
    options: dict[str, Any],
    chunked_loss: ChunkedLoss = "auto",
    tile: bool = False,
    alone: bool = True,
    compiled: bool = False,
    num_layers: int | None = None,
    profile: bool = False,
) -> None:
    """Print the table, line by line."""
    where = describe(device)
    records = Records(out, "training_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ";")
    flags = f"{tile=} {compiled=} checkpointed_layers={num_layers}"
    print(f"{shape}; {options}; {flags}; peak {PEAK_TFLOPS:.0f} TFLOP/s.\n")
    print(HEADER, flush=True)
    for one in runs:
        try:
            run_one(
                one,
                shape,
                device,
                records,
                options=options,
                chunked_loss=chunked_loss,
                tile=tile,
                alone=alone,
                compiled=compiled,
                num_layers=num_layers,
                profile=profile,
            )
        except Exception as error:  # noqa: BLE001  continue with the next run
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"| {one.name} | failed: {reason} |||||||||", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _amount(value: str) -> float | str:
    """Return GiB, or a word."""
    return value if value in ("none", "all") else float(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [one.name for one in RUNS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--algorithm", default="auto")
    parser.add_argument("--kernel", default="auto")
    choices = get_args(ChunkedLoss)
    parser.add_argument("--chunked-loss", default="auto", choices=choices)
    parser.add_argument("--compile", action="store_true", help="the layers")
    parser.add_argument("--checkpointed-layers", type=int, help="the first ones (all)")
    parser.add_argument("--link-gbs", type=float, default=None)
    parser.add_argument("--keep-attention", default="none", help="none, all, or GiB")
    parser.add_argument("--offload", default="none", help="none, all, or GiB")
    parser.add_argument("--tile", action="store_true", help="token-wise modules in tiles")
    parser.add_argument("--no-alone", dest="alone", action="store_false", help="no reference")
    parser.add_argument("--profile", action="store_true", help="kernels by kind, after each run")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    args = parser.parse_args(arguments)
    options = {
        "algorithm": args.algorithm,
        "kernel": args.kernel,
        "link_gbs": args.link_gbs,
        "keep_attention": _amount(args.keep_attention),
        "offload": _amount(args.offload),
    }
    runs = [one for one in RUNS if one.name in args.only]
    common = {
        "options": options,
        "chunked_loss": args.chunked_loss,
        "tile": args.tile,
        "compiled": args.compile,
        "num_layers": args.checkpointed_layers,
        "alone": args.alone,
        "profile": args.profile,
    }
    if args.tiny:
        torch.set_num_threads(1)
        small = Shape(32, 4, 2, 64, 2, 64, torch.float32)
        runs = [Run(one.name, 256, one.checkpointing) for one in runs]
        run(runs, small, torch.device("cpu"), args.out, **common)
        return
    device = torch.device("cuda", torch.cuda.current_device())
    run(runs, Shape(layers=args.layers, vocab=args.vocab), device, args.out, **common)


if __name__ == "__main__":
    main()
