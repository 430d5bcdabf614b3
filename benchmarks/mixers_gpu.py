# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.mixers_gpu [--only NAME ...] [--out DIR]`: layers of hybrid models.

A gated delta net (Qwen3.5) and a Mamba-2 layer (Bamba), forward and backward, and training steps of
a hybrid with three linear layers for one with attention: as rank 4 of 8 on one GPU (`emulate.py`),
and on the full sequence without context parallelism, divided by 8. Bytes are those that the rank
receives from others in a layer.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.emulate import EmulatedTransport, emulated_parallel
from benchmarks.measure import Records, describe, peak_memory, timed
from hf_patches import enable
from lightning_cp import ContextParallel

RANK, CP_SIZE = 4, 8
K = 1024

_DELTA_NET = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_TINY_DELTA_NET = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA2 = {
    # 8 of 128 heads: they do not depend on each other, and torch code for all of them takes 64 GiB
    # for one tensor of 32k tokens.
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_chunk_size": 256,
}
_TINY_MAMBA2 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}


@dataclass(frozen=True)
class Run:
    """One line of the table.

    Args:
        name: for ``--only``.
        model_type: of the config.
        sizes: of the config.
        tiny: the same for a CPU.
        seq_len: tokens of the full sequence.
        mixer: attribute of the first layer that is timed; None for a whole step.
        num_layers: of the model.
    """

    name: str
    model_type: str
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    seq_len: int
    mixer: str | None = None
    num_layers: int = 1

    def build(self, device: torch.device, *, tiny: bool) -> PreTrainedModel:
        """Build the model with the weights on the device."""
        sizes: dict[str, Any] = {
            "num_hidden_layers": self.num_layers,
            "vocab_size": 64 if tiny else 32 * K,
        }
        if self.model_type == "bamba":
            sizes["attn_layer_indices"] = []
        config = AutoConfig.for_model(
            self.model_type, **(self.tiny if tiny else self.sizes), **sizes, use_cache=False
        )
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if not tiny:
            for name, parameter in model.named_parameters():
                if not name.endswith("A_log"):
                    parameter.data = parameter.data.to(torch.bfloat16)
        model.train()
        built: PreTrainedModel = model
        return built


RUNS = (
    *(
        Run(
            f"gated delta net {n}k",
            "qwen3_5_text",
            _DELTA_NET,
            _TINY_DELTA_NET,
            n * K,
            "linear_attn",
        )
        for n in (32, 128)
    ),
    *(Run(f"mamba-2 {n}k", "bamba", _MAMBA2, _TINY_MAMBA2, n * K, "mamba") for n in (32, 128)),
    *(
        Run(f"hybrid 3:1 {n}k", "qwen3_5_text", _DELTA_NET, _TINY_DELTA_NET, n * K, None, 4)
        for n in (32, 64, 128)
    ),
)


@dataclass(frozen=True)
class Spent:
    """Milliseconds and peak bytes."""

    ms: float
    peak: int


Context = Callable[[], AbstractContextManager[Any]]


def time_layer(mixer: nn.Module, hidden: Tensor, step: Context) -> Spent:
    """Time forward and backward of a layer, in a step."""
    hidden.requires_grad_()
    gradient = torch.randn_like(hidden)

    def call() -> None:
        with step():
            out = mixer(hidden)
            out = out[0] if isinstance(out, tuple) else out
            out.backward(gradient)
        hidden.grad = None
        for parameter in mixer.parameters():
            parameter.grad = None

    return Spent(timed(call, hidden.device, repeats=3), peak_memory(call, hidden.device))


def time_step(model: PreTrainedModel, batch: dict[str, Tensor], step: Context) -> Spent:
    """Time forward, loss and backward of a model."""
    device = batch["input_ids"].device

    def call() -> None:
        with step() as local:
            model(**local).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return Spent(timed(call, device, repeats=3), peak_memory(call, device))


def _received(cp: ContextParallel) -> int:
    groups = (cp.groups.context, cp.groups.attend, cp.groups.inside)
    return sum(x.num_bytes for x in groups if isinstance(x, EmulatedTransport))


def count_bytes(mixer: nn.Module, hidden: Tensor, cp: ContextParallel, batch: Any) -> int:
    """Return the bytes that a rank receives in forward and backward of a layer."""
    with cp.step(batch):
        before = _received(cp)
        out = mixer(hidden)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        return _received(cp) - before


def measure(run: Run, device: torch.device, *, tiny: bool) -> tuple[Spent, Spent | str, int]:
    """Return what a rank of 8 takes, what the full sequence takes, and bytes in a layer."""
    model = run.build(device, tiny=tiny)
    seq_len = run.seq_len // (256 if tiny else 1)
    ids = torch.randint(model.config.vocab_size, (1, seq_len), device=device)
    batch = {"input_ids": ids, "labels": ids}
    cp = emulated_parallel(RANK, CP_SIZE, keep_attention="all")
    handle = enable(model)
    full: Spent | str
    num_bytes = 0
    if run.mixer is not None:
        mixer = getattr(model.get_decoder().layers[0], run.mixer)
        dtype = next(p.dtype for p in mixer.parameters() if p.dim() > 1)
        local_len = seq_len // CP_SIZE
        hidden = torch.randn(1, seq_len, model.config.hidden_size, dtype=dtype, device=device)
        own = hidden[:, :local_len].clone()
        shard = time_layer(mixer, own, lambda: cp.step(batch))
        num_bytes = count_bytes(mixer, own, cp, batch)
        handle.undo()
        full = _or_reason(lambda: time_layer(mixer, hidden, nullcontext))
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        shard = time_step(model, batch, lambda: cp.step(batch))
        handle.undo()
        full = _or_reason(lambda: time_step(model, batch, lambda: nullcontext(batch)))
    return shard, full, num_bytes


def _or_reason(call: Callable[[], Spent]) -> Spent | str:
    """Return the result, or why there is none: a full sequence may not fit."""
    try:
        return call()
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0][:80]


HEADER = (
    "| run | rank 4 of 8, ms | full / 8, ms | (full / 8) / rank | received in a layer, MB "
    "| peak of the rank, GB | peak of the full sequence, GB |\n" + "|---" * 7 + "|"
)


def run_all(
    runs: Sequence[Run], device: torch.device, out: Path | None, *, tiny: bool = False
) -> None:
    """Print the table, line by line."""
    where = describe(device)
    records = Records(out, "mixers_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ".\n")
    print(HEADER, flush=True)
    for run in runs:
        try:
            shard, full, num_bytes = measure(run, device, tiny=tiny)
        except Exception as error:  # noqa: BLE001  continue with the next run
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            print(f"| {run.name} | failed: {reason} |||||", flush=True)
            continue
        ideal = full.ms / CP_SIZE if isinstance(full, Spent) else None
        parts = f"{full} |" if ideal is None else f"{ideal:.2f} | {ideal / shard.ms:.2f}"
        print(
            f"| {run.name} | {shard.ms:.2f} | {parts} "
            f"| {num_bytes / 1e6:.2f} | {shard.peak / 1e9:.2f} "
            f"| {full.peak / 1e9 if isinstance(full, Spent) else 0:.2f} |",
            flush=True,
        )
        records.add(
            what="mixers",
            run=run.name,
            seq_len=run.seq_len,
            cp_size=CP_SIZE,
            ms=shard.ms,
            ideal_ms=ideal,
            bytes_received=num_bytes,
            peak_bytes=shard.peak,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [run.name for run in RUNS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="small models, on a CPU")
    args = parser.parse_args(arguments)
    runs = [run for run in RUNS if run.name in args.only]
    if args.tiny:
        torch.set_num_threads(1)
        run_all(runs, torch.device("cpu"), args.out, tiny=True)
        return
    run_all(runs, torch.device("cuda", torch.cuda.current_device()), args.out)


if __name__ == "__main__":
    main()
