# SPDX-License-Identifier: Apache-2.0
"""A plan as text, and as the config to paste."""

from collections.abc import Iterable, Sequence

from lightning_cp.planner.memory import HOST_USABLE, USABLE
from lightning_cp.planner.plan import Plan
from lightning_cp.planner.setup import GPUS_PER_HOST, Setup
from lightning_cp.planner.shapes import KNOWN
from lightning_cp.planner.time import TENSOR


def parse_tokens(text: str) -> int:
    """Read a number of tokens: 131072, 128k or 1M, in powers of two.

    Example:
        >>> parse_tokens("128k"), parse_tokens("1.5M"), parse_tokens("131_072")
        (131072, 1572864, 131072)
    """
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    unit = units.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        number = float(digits) * unit
    except ValueError:
        number = 0.0
    if not 1 <= number < 2**60 or number != int(number):
        raise ValueError(
            f"{text!r} is not a number of tokens. Give an integer, or one with k or M: 131072, "
            "128k, 1M."
        )
    return int(number)


def format_tokens(number: int) -> str:
    """Write a number of tokens shortly.

    Example:
        >>> format_tokens(131072), format_tokens(1572864), format_tokens(1000), format_tokens(0)
        ('128k', '1.50M', '1,000', 'none')
    """
    if number == 0:
        return "none"
    if number % 2**20 == 0 and number >= 2**20:
        return f"{number // 2**20}M"
    if number >= 2**20:
        return f"{number / 2**20:.2f}M"
    if number >= 2**12:
        return f"{number / 2**10:.0f}k"
    return f"{number:,}"


def format_plan(plan: Plan) -> str:
    """Return the report of a plan, as plain text."""
    sections = (_head(plan), _memory(plan), _time(plan), _limits(plan), _ending(plan))
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _head(plan: Plan) -> list[str]:
    setup, model = plan.setup, plan.model
    groups = setup.data_size
    how = f"LoRA of rank {setup.lora_rank}" if setup.lora_rank else "all weights"
    ranks = f"{setup.num_gpus} GPUs" + (f", {groups} sequences at a time" if groups > 1 else "")
    ranks += f", {setup.tp_size} tensor ranks" if setup.tp_size > 1 else ""
    packed = " of packed documents" if setup.documents else ""
    some = f" of {setup.checkpointed_layers} layers" if setup.checkpointed_layers else ""
    return [
        f"{model.name}: {model.num_params / 1e9:.2f}B parameters, {len(model.layers)} layers, "
        f"{how}",
        f"{format_tokens(setup.seq_len)} tokens ({setup.seq_len:,}){packed} over {ranks}: "
        f"{setup.local_len:,} tokens per rank; {setup.precision}, "
        f"checkpointing {setup.checkpointing}{some}",
        "FITS" if plan.fits else "DOES NOT FIT",
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _memory(plan: Plan) -> list[str]:
    memory, capacity, tokens = plan.memory, plan.capacity, plan.setup.local_len
    rows = [("memory of a rank", "GB", "KiB per token")]
    by_token = {
        "checkpoints",
        "kept attention",
        "saved activations",
        "one layer",
        "attention buffers",
    }
    for name, value in memory.parts.items():
        per_token = f"{value / tokens / 1024:.1f}" if name in by_token and value else ""
        rows.append((f"  {name}", f"{value / 1e9:.1f}", per_token))
    rows.append((f"  peak ({memory.peak_moment})", f"{memory.peak / 1e9:.1f}", ""))
    usable = USABLE * capacity.gpu / 1e9
    rows.append((f"  usable of {capacity.gpu / 1e9:g} GB", f"{usable:.1f}", ""))
    lines = _table(rows)
    others = sorted(
        (name for name in memory.moments if name != memory.peak_moment),
        key=lambda name: -sum(memory.moments[name].values()),
    )
    told = (f"{name} {sum(memory.moments[name].values()) / 1e9:.1f}" for name in others)
    lines.append(f"  other moments: {', '.join(told)} GB")
    pinned = memory.host + memory.host_parameters
    host = f"  host memory: {pinned / 1e9:.0f} GB pinned per node of {GPUS_PER_HOST} GPUs"
    lines.append(f"{host}, of {HOST_USABLE * capacity.host / 1e9:.0f} usable")
    return lines


def _time(plan: Plan) -> list[str]:
    time, setup = plan.time, plan.setup
    rows = [("time of a step", "s", "share")]
    for name, value in time.seconds.items():
        if value:
            rows.append((f"  {name}", _seconds(value), f"{100 * value / time.step:.0f}%"))
    rows.append(("  step", _seconds(time.step), "100%"))
    lines = _table(rows)
    sequences = setup.data_size * setup.batch_size
    rate = setup.seq_len * sequences / time.step
    lines += [
        f"  {time.flops / 1e15:.3g} PFLOP per rank, {time.attention_flops / time.flops:.0%} of "
        f"them attention (visible pairs); {time.share_of_peak:.3f} of "
        f"{time.peak_flops / 1e12:.0f} TFLOP/s",
        f"  {rate:,.0f} tokens/s of all ranks; most expensive rank {time.balance:.2f} of the mean",
        f"  attention: {', '.join(f'{name} in {n} layers' for name, n in time.algorithms.items())}",
    ]
    received = {n: x for n, x in time.wire.items() if n != TENSOR or setup.tp_size > 1}
    wire = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in received.items())
    lines.append(f"  received by a rank per step, GB: {wire}")
    waits = {n: x for n, x in time.exposed.items() if n in received}
    told = ", ".join(f"{name} {_seconds(value)}" for name, value in waits.items())
    lines.append(f"  of the step, s waiting for other ranks: {told}")
    return lines


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _limits(plan: Plan) -> list[str]:
    num_layers = len(plan.model.layers)
    fewest = f"{plan.fewest} of" if plan.fewest is not None else "it does not fit with all"
    return [
        f"longest sequence on {plan.setup.num_gpus} GPUs: {format_tokens(plan.longest)} "
        f"({plan.longest:,} tokens)",
        f"fewest recomputed layers that fit: {fewest} {num_layers}",
    ]


def _ending(plan: Plan) -> list[str]:
    lines = [f"extrapolated: {note}" for note in plan.notes]
    return [*lines, "", "config to paste:", *(f"  {line}" for line in config_lines(plan))]


def config_lines(plan: Plan) -> list[str]:
    """Return the lines for a recipe."""
    setup = plan.setup
    nodes = -(-setup.num_gpus // GPUS_PER_HOST)
    devices = setup.num_gpus // nodes
    precision = "bf16-true" if setup.precision == "bf16-true" else "bf16-mixed"
    known = "  # its folder, or its name on the hub" if plan.model.name in KNOWN else ""
    lines = ["model:", f"  model: {plan.model.name}{known}"]
    if setup.lora_rank:
        lines += ["  lora:", f"    rank: {setup.lora_rank}", "    target_modules: all-linear"]
    is_checkpointed = setup.checkpointing != "none" and not setup.checkpointed_layers
    lines += [
        f"  gradient_checkpointing: {str(is_checkpointed).lower()}",
        "  chunked_loss: always",
        "data:",
        "  init_args:",
        f"    seq_len: {setup.seq_len}",
        f"    batch_size: {setup.batch_size}",
        "trainer:",
        "  accelerator: gpu",
        f"  devices: {devices}",
        f"  num_nodes: {nodes}",
        f"  precision: {precision}",
        "  strategy:",
        "    class_path: lightning_cp.ContextParallelStrategy",
        "    init_args:",
        *(f"      {line}" for line in _strategy(setup)),
    ]
    return lines


def _strategy(setup: Setup) -> Iterable[str]:
    size, inside = setup.context_size, setup.ulysses_size
    shared = f"{size}" if inside == 1 else f"[{inside}, {size // inside}]"
    yield f"context_parallel_size: {shared}"
    if setup.tp_size > 1:
        yield f"tensor_parallel_size: {setup.tp_size}"
    if setup.sharding != "full":
        yield f"parameter_sharding: {setup.sharding}"
    if setup.sharding == "hybrid" and setup.shard_size:
        yield f"shard_size: {setup.shard_size}"
    if setup.parameter_offload:
        yield "parameter_offload: true"
    if setup.attention_memory is not None:
        yield f"attention_memory: {setup.attention_memory:g}"
    if setup.gradient_wire != "float32":
        yield f"gradient_wire: {setup.gradient_wire}"
    if setup.checkpointed_layers:
        yield f"activation_checkpointing: {setup.checkpointed_layers}"
    if setup.checkpointing == "keep":
        yield "keep_attention: all"
    if setup.offload != "none":
        yield "offload: all"
    if setup.tiles:
        yield f"tile: {-(-setup.local_len // setup.tiles)}"
    if setup.compiled:
        yield "compile: layers"
    if setup.precision == "bf16-policy":
        yield "mixed_precision: fsdp"
