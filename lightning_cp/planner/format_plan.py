# SPDX-License-Identifier: Apache-2.0
"""A plan as text."""

from collections.abc import Sequence

from lightning_cp.planner.memory import HOST_USABLE, USABLE
from lightning_cp.planner.plan_run import RunPlan
from lightning_cp.planner.setup import GPUS_PER_HOST


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


def format_plan(plan: RunPlan) -> str:
    """Return the report of a plan, as plain text."""
    sections = (_head(plan), _memory(plan), _time(plan), _limits(plan))
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _head(plan: RunPlan) -> list[str]:
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


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    names, values = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{name:{names}}  {value:>{values}}" for name, value in rows]


def _memory(plan: RunPlan) -> list[str]:
    memory, capacity = plan.memory, plan.capacity
    rows = [("memory of a rank", "GB")]
    rows += [(f"  {name}", f"{value / 1e9:.1f}") for name, value in memory.parts.items()]
    rows.append((f"  peak ({memory.peak_moment})", f"{memory.peak / 1e9:.1f}"))
    usable = USABLE * capacity.gpu / 1e9
    rows.append((f"  usable of {capacity.gpu / 1e9:g} GB", f"{usable:.1f}"))
    pinned = memory.host + memory.host_parameters
    host = f"  host memory: {pinned / 1e9:.0f} GB pinned per node of {GPUS_PER_HOST} GPUs"
    return [*_table(rows), f"{host}, of {HOST_USABLE * capacity.host / 1e9:.0f} usable"]


def _time(plan: RunPlan) -> list[str]:
    time, setup = plan.time, plan.setup
    rows = [("time of a step on H200s", "s")]
    rows += [(f"  {name}", f"{value:.3f}") for name, value in time.seconds.items() if value]
    rows.append(("  step", f"{time.step:.3f}"))
    tokens = setup.seq_len * setup.data_size * setup.batch_size
    return [
        *_table(rows),
        f"  {tokens / time.step:,.0f} tokens/s of all ranks; {time.flops / 1e15:.3g} PFLOP per "
        f"rank, {time.share_of_peak:.3f} of {time.peak_flops / 1e12:.0f} TFLOP/s",
    ]


def _limits(plan: RunPlan) -> list[str]:
    num_layers = len(plan.model.layers)
    fewest = f"{plan.fewest} of" if plan.fewest is not None else "it does not fit with all"
    return [
        f"longest sequence on {plan.setup.num_gpus} GPUs: {format_tokens(plan.longest)} "
        f"({plan.longest:,} tokens)",
        f"fewest recomputed layers that fit: {fewest} {num_layers}",
        "docs/planning.md: how far plans were from measured steps, and what was not measured",
    ]
