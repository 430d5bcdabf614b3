# SPDX-License-Identifier: Apache-2.0
"""The options of context parallelism: their names, their defaults, and their checks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

LayoutName = Literal["auto", "balanced", "contiguous", "zigzag"]
AlgorithmName = Literal["auto", "gather", "ring", "ulysses"]
KernelName = Literal["auto", "cpu", "cudnn", "flash", "flex", "reference"]
GradientWire = Literal["float32", "model"]
"""The precision in which gradients travel that are summed on the way: at least the model's."""

KeepAttention = float | Literal["all", "auto", "none"]
"""GiB of attention results that a step keeps under activation checkpointing, or all, or none."""

Offload = float | Literal["all", "auto", "none"]
"""GiB of host memory per rank for tensors that activation checkpointing saves, or all, or none."""

MixedPrecision = Literal["autocast", "fsdp"]
"""How a Trainer's bf16-mixed is carried out: by autocast, or by FSDP2 when it gathers weights."""

SequenceDims = Mapping[str, int | None]
"""Name or path of a tensor of the batch to its sequence dim; None keeps it full."""

TENSOR_AXIS: Final = "tensor_parallel"
"""Mesh axis along which ranks share the weights of each layer and hold the same tokens."""


@dataclass(frozen=True)
class Options:
    """How sequences are sharded and attention is computed. Checked once, here.

    The arguments of the same names of `ContextParallel` describe them.

    Args:
        layout: which rank owns which tokens.
        algorithm: how keys and values reach the queries.
        kernel: what computes attention.
        attention_memory: GiB that an attention call may allocate on a GPU; None for a default.
        gradient_wire: precision of gradients of keys and values that collectives sum.
        keep_attention: attention results that activation checkpointing keeps.
        offload: host memory for checkpoints and kept attention.
        offload_after: GiB of them that stay on the device before others are moved.
        ulysses_size: the number of neighbouring ranks that exchange tokens for heads.
        sequence_dims: the sequence dims of tensors whose names are not known.
        check_batches: for how many batches the ranks compare contents.
        position_edges: where buckets of global positions begin, for losses by position.

    Example:
        >>> Options(gradient_wire="bf16")
        Traceback (most recent call last):
        ...
        ValueError: gradient_wire='bf16' is unknown. Use one of 'float32', 'model'.
    """

    layout: LayoutName = "auto"
    algorithm: AlgorithmName = "auto"
    kernel: KernelName = "auto"
    attention_memory: float | None = None
    gradient_wire: GradientWire = "float32"
    keep_attention: KeepAttention = "none"
    offload: Offload = "none"
    offload_after: float = 0.0
    ulysses_size: int | None = None
    sequence_dims: SequenceDims = field(default_factory=dict)
    check_batches: int = 8
    position_edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("layout", self.layout, get_args(LayoutName))
        check_choice("algorithm", self.algorithm, get_args(AlgorithmName))
        check_choice("kernel", self.kernel, get_args(KernelName))
        check_choice("gradient_wire", self.gradient_wire, get_args(GradientWire))
        if self.kernel == "flex" and self.algorithm == "ring":
            raise ValueError(
                "kernel='flex' computes full sequences in one call, and algorithm='ring' delivers "
                "keys block by block. Use algorithm='gather' or 'ulysses' with it, or another "
                "kernel."
            )
        if self.attention_memory is not None and not self.attention_memory > 0:
            raise ValueError(
                f"attention_memory={self.attention_memory}: give the GiB that an attention call "
                "may allocate, above 0, or None for the default."
            )
        if isinstance(self.keep_attention, str):
            choices = ("all", "auto", "none", "a number of GiB")
            check_choice("keep_attention", self.keep_attention, choices)
        elif not self.keep_attention >= 0:
            raise ValueError(
                f"keep_attention={self.keep_attention}: give the GiB of attention results that a "
                "step keeps under activation checkpointing, 0 or more, or 'all' or 'none'."
            )
        if isinstance(self.offload, str):
            check_choice("offload", self.offload, ("all", "auto", "none", "a number of GiB"))
        elif not self.offload >= 0:
            raise ValueError(
                f"offload={self.offload}: give the GiB of host memory that a rank may take for "
                "checkpoints and kept attention, 0 or more, or 'all' or 'none'."
            )
        if not self.offload_after >= 0:
            raise ValueError(
                f"offload_after={self.offload_after}: give the GiB of checkpoints and kept "
                "attention that stay on the device before others are moved, 0 or more."
            )
        if self.algorithm == "ulysses" and self.ulysses_size is not None:
            raise ValueError(
                f"algorithm='ulysses' exchanges tokens for heads among all ranks, but ulysses_size="
                f"{self.ulysses_size} limits it to some. Leave it out; or choose the algorithm "
                "between Ulysses groups: algorithm='gather' or 'ring'."
            )

    @property
    def kept_bytes(self) -> int | None:
        """Return the bytes of attention results that a step may keep; None for no limit.

        ``auto`` keeps none, until the strategy has planned the step.
        """
        if isinstance(self.keep_attention, str):
            return None if self.keep_attention == "all" else 0
        return int(self.keep_attention * 2**30)

    @property
    def offload_bytes(self) -> int | None:
        """Return the host memory that offloading may take, in bytes; None for no limit.

        ``auto`` takes none, until the strategy has planned the first step.
        """
        if isinstance(self.offload, str):
            return None if self.offload == "all" else 0
        return int(self.offload * 2**30)


def check_choice(option: str, value: object, choices: Iterable[str]) -> None:
    """Raise if an option does not have this value; name the values that it has.

    Example:
        >>> check_choice("kernel", "fast", ["auto", "cpu"])
        Traceback (most recent call last):
        ...
        ValueError: kernel='fast' is unknown. Use one of 'auto', 'cpu'.
    """
    choices = tuple(choices)
    if value not in choices:
        names = ", ".join(repr(name) for name in choices)
        raise ValueError(f"{option}={value!r} is unknown. Use one of {names}.")
