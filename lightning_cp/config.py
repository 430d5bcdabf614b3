# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run in typed groups: names, defaults, and the checks of their values.

A `Config` is built once, where a user gives it, and is passed on whole. What depends on ranks, on
the model or on a batch is checked where that is known.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin, get_type_hints

LayoutName = Literal["auto", "balanced", "contiguous", "zigzag"]
AlgorithmName = Literal["auto", "gather", "ring", "ulysses"]
KernelName = Literal["auto", "cpu", "cudnn", "flash", "flex", "reference"]
LossName = Literal["auto", "local_mean"]
CompileName = Literal["layers"]

GradientWire = Literal["float32", "model"]
"""The precision in which gradients travel that are summed on the way: at least the model's."""

KeepAttention = float | Literal["all", "auto", "none"]
"""GiB of attention results that a step keeps under activation checkpointing, or all, or none."""

Offload = float | Literal["all", "auto", "none"]
"""GiB of host memory per rank for tensors that activation checkpointing saves, or all, or none."""

Sharding = Literal["full", "hybrid", "none"]
"""``hybrid``: parameters are sharded over some ranks, and each other group of ranks has a copy."""

ParameterSharding = Literal["auto", "full", "hybrid", "none"]
"""``auto``: ``full`` or ``hybrid``, decided when the model is placed."""

MixedPrecision = Literal["autocast", "fsdp"]
"""How a Trainer's bf16-mixed is carried out: by autocast, or by FSDP2 when it gathers weights."""

SequenceDims = Mapping[str, int | None]
"""Name or path of a tensor of the batch to its sequence dim; None keeps it full."""

TENSOR_AXIS: Final = "tensor_parallel"
"""Mesh axis along which ranks share the weights of each layer and hold the same tokens."""


@dataclass(frozen=True)
class Attention:
    """How attention is computed. None of it changes results beyond rounding.

    Args:
        kernel: what computes attention. ``auto`` takes the fastest that supports the call.
        memory: GiB that an attention call may allocate on a GPU: with less, keys travel in more
            head groups, or by ring. By default six times the local queries, at least 0.78, and up
            to 4 (2 before Hopper) where that saves time.
        gradient_wire: the precision of gradients of keys and values that collectives sum
            (``gather``): ``float32``, or ``model``, that of the keys. With bf16 this is half of the
            bytes, for slow networks, and rounds the sum at each rank. The same on all ranks.
        balance_window: sliding window for which ranks get equal work, for models in which most
            layers have one. By default none: that of causal attention. Documents and padding come
            from each batch. Used by the layouts ``balanced`` and ``auto``.
        ulysses_size: of `ContextParallel`, the size of a Ulysses group: neighbouring ranks (the
            devices of a node, say) that exchange tokens for heads; keys travel by the algorithm
            between groups only. The strategy has ``context_parallel_size=(8, 4)`` for it.

    Example:
        >>> Attention(gradient_wire="bf16")
        Traceback (most recent call last):
        ...
        ValueError: attention=Attention(gradient_wire='bf16') is unknown. Use one of 'float32', \
'model'.
    """

    kernel: KernelName = "auto"
    memory: float | None = None
    gradient_wire: GradientWire = "float32"
    balance_window: int | None = None
    ulysses_size: int | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.memory is not None and not self.memory > 0:
            raise ValueError(
                f"attention=Attention(memory={self.memory}): give the GiB that an attention call "
                "may allocate, above 0, or None for the default."
            )
        if self.balance_window is not None and self.balance_window < 1:
            raise ValueError(
                f"attention=Attention(balance_window={self.balance_window}): a window holds at "
                "least 1 key. Give a larger number, or None for layers without a window."
            )
        if self.ulysses_size is not None:
            check_size("attention=Attention(ulysses_size", self.ulysses_size, or_auto=False)


@dataclass(frozen=True)
class Memory:
    """What takes less memory on the device. docs/memory.md. Results are the same bits.

    ``auto`` of ``activation_checkpointing``, ``offload`` and ``tile``: the fastest combination
    whose plan fits, which the strategy decides at the first training step.

    Args:
        activation_checkpointing: recompute layers in backward, of any model; a number: so many, the
            first ones. Models that checkpoint by themselves need no flag.
        keep_attention: with activation checkpointing, keep output and lse of attention calls
            instead of computing them, and sending keys and values, a second time: ``all``,
            ``none``, GiB per step and rank, or ``auto``: what the plan of the step leaves free, on
            the host with ``offload``; without a plan nothing. It takes as much memory as the
            checkpoints of models with H * Dv = hidden size. The same on all ranks.
        offload: move what activation checkpointing saves, hidden states and kept attention, to
            pinned host memory until backward needs it: ``all``, ``none``, ``auto`` or the GiB of
            host memory that each rank may take; what exceeds them stays on the GPU. The inputs of
            the last two checkpointed regions stay there anyway. The same on all ranks.
        offload_after: the GiB that stay on the GPU before anything is moved. The same on all ranks.
        tile: compute MLPs and norms in tiles of tokens: True, ``auto``, or the tokens of a tile.
        compile: ``layers`` compiles the forward of each layer.
        check: raise if the first training step cannot fit into memory, by plan.
    """

    activation_checkpointing: bool | int | Literal["auto"] = False
    keep_attention: KeepAttention = "auto"
    offload: Offload = "none"
    offload_after: float = 0.0
    tile: bool | int | Literal["auto"] = False
    compile: CompileName | None = None
    check: bool = True

    def __post_init__(self) -> None:
        if not _is_switch(self.activation_checkpointing):
            raise ValueError(
                f"memory=Memory(activation_checkpointing={self.activation_checkpointing!r}): use "
                "True, False, 'auto', or a number of layers, 1 or more. What is kept of attention "
                "and what goes to the host: keep_attention and offload."
            )
        if not _is_switch(self.tile):
            raise ValueError(
                f"memory=Memory(tile={self.tile!r}): give the tokens of a tile, 1 or more, or True "
                "for a default, or 'auto'."
            )
        _check_fields(self)
        self._check_budgets()

    def _check_budgets(self) -> None:
        if not isinstance(self.keep_attention, str) and self.keep_attention < 0:
            raise ValueError(
                f"memory=Memory(keep_attention={self.keep_attention}): give the GiB of attention "
                "results that a step keeps under activation checkpointing, 0 or more, or 'all' or "
                "'none'."
            )
        if not isinstance(self.offload, str) and self.offload < 0:
            raise ValueError(
                f"memory=Memory(offload={self.offload}): give the GiB of host memory that a rank "
                "may take for checkpoints and kept attention, 0 or more, or 'all' or 'none'."
            )
        if self.offload_after < 0:
            raise ValueError(
                f"memory=Memory(offload_after={self.offload_after}): give the GiB of checkpoints "
                "and kept attention that stay on the device before others are moved, 0 or more."
            )
        if self.offload_after and self.offload in ("none", 0):
            raise ValueError(
                f"memory=Memory(offload_after={self.offload_after}) without offload: nothing is "
                "moved. Set offload='all' or a number of GiB, or leave it out."
            )

    @property
    def is_checkpointing(self) -> bool:
        """Return whether layers are recomputed, all or some; not with ``auto``."""
        return self.activation_checkpointing not in (False, "auto")

    @property
    def num_layers(self) -> int | None:
        """Return how many layers are recomputed, if that is a number."""
        value = self.activation_checkpointing
        return None if isinstance(value, bool | str) else value

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


@dataclass(frozen=True)
class Parameters:
    """Where the strategy keeps parameters, gradients and optimizer states, and in which precision.

    Args:
        sharding: ``full`` shards parameters over data x context, ``none`` replicates them.
            ``hybrid`` shards them over ``shard_size`` ranks, and each other group of so many ranks
            holds a copy. ``auto``: ``hybrid`` on several nodes, if a node can hold them well,
            otherwise ``full``. A model that ``configure_model()`` has sharded stays as it is.
        shard_size: with ``hybrid``, the number of ranks that share a copy of the parameters.
            ``auto`` is the number of devices of a node.
        shard_modules: class names or name patterns of the blocks that FSDP2 gathers together. By
            default, those of Hugging Face models and of ModuleLists.
        offload: keep the shards of parameters, gradients and optimizer states in host memory. The
            optimizer then runs on the CPU: docs/memory.md.
        mixed_precision: how ``Trainer(precision="bf16-mixed")`` is carried out: ``autocast``, or
            ``fsdp``: bfloat16 activations, half of the memory of checkpoints; docs/memory.md.
        reduce_every_microbatch: if False, gradients of accumulated batches are reduced once, which
            takes memory for unsharded gradients; with ``hybrid``, reduced once between copies.
    """

    sharding: ParameterSharding = "full"
    shard_size: int | Literal["auto"] = "auto"
    shard_modules: list[str] | None = None
    offload: bool = False
    mixed_precision: MixedPrecision = "autocast"
    reduce_every_microbatch: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.shard_size != "auto":
            check_size("parameters=Parameters(shard_size", self.shard_size)
            if self.sharding != "hybrid":
                raise ValueError(
                    f"parameters=Parameters(shard_size={self.shard_size}) is the number of ranks "
                    "that share a copy of the parameters with sharding='hybrid', but it is "
                    f"{self.sharding!r}. Set 'hybrid', or leave shard_size out."
                )
        if self.sharding != "none":
            return
        if self.offload:
            raise ValueError(
                "parameters=Parameters(offload=True) keeps the shards of parameters in host "
                "memory, but sharding='none' replicates them. Use sharding='full' or 'hybrid'."
            )
        if self.mixed_precision == "fsdp":
            raise ValueError(
                "parameters=Parameters(mixed_precision='fsdp') casts weights when FSDP2 gathers "
                "them, but sharding='none' replicates them. Use mixed_precision='autocast', or "
                "sharding='full' or 'hybrid'."
            )

    @classmethod
    def of(cls, value: "Parameters | ParameterSharding") -> "Parameters":
        """Return the group that a name of a sharding stands for."""
        if not isinstance(value, str):
            return value
        check_choice("parameters", value, (*get_args(ParameterSharding), "Parameters(...)"))
        return cls(value)


@dataclass(frozen=True)
class Verify:
    """What is compared, so that a step equals that of one device.

    Args:
        steps: before the first batch of each stage, run the step sharded and on full sequences, and
            raise if a value differs that it returns, logs or adds to a metric.
        max_len: the length to which sequences are truncated for it.
        check_batches: number of batches whose contents ranks compare; shapes are always compared.
        broadcast_batch: send the batch of the first context rank to the others.
    """

    steps: bool = True
    max_len: int = 512
    check_batches: int = 8
    broadcast_batch: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.max_len < 2:
            raise ValueError(
                f"verify=Verify(max_len={self.max_len}): the sequences on which steps are verified "
                "have at least 2 tokens. Use 2 or more, or verify=False."
            )

    @classmethod
    def of(cls, value: "Verify | bool") -> "Verify":
        """Return the group that True or False stands for: whether steps are verified."""
        return cls(value) if isinstance(value, bool) else value


@dataclass(frozen=True)
class Checkpoints:
    """How the strategy saves checkpoints.

    Args:
        distributed: save a folder into which every rank writes; else one file.
        asynchronous: write folders in the background, while training goes on.
    """

    distributed: bool = True
    asynchronous: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.asynchronous and not self.distributed:
            raise ValueError(
                "checkpoints=Checkpoints(asynchronous=True) saves folders, but distributed=False "
                "saves one file. Leave the latter out, or write files in the background with "
                "Trainer(plugins=[AsyncCheckpointIO()])."
            )


if TYPE_CHECKING:
    ParametersArgument = Parameters | ParameterSharding
    VerifyArgument = Verify | bool
else:
    # What jsonargparse reads. Of a union, a flag for one field would drop the word before it:
    # `parameters: none` with `--parameters.offload true` would be sharding="full".
    ParametersArgument, VerifyArgument = Parameters, Verify


@dataclass(frozen=True)
class Config:
    """Everything that a user has set about a run, besides its ranks.

    Args:
        layout: which rank owns which tokens.
        algorithm: how keys and values reach the queries.
        sequence_dims: the sequence dims of tensors whose names are not known.
        loss: what a loss is that no function of ours has computed.
        attention: how attention is computed.
        memory: what takes less memory on the device.
        parameters: where they are.
        verify: what is compared.
        checkpoints: how they are saved.

    Example:
        >>> Config(algorithm="star")
        Traceback (most recent call last):
        ...
        ValueError: algorithm='star' is unknown. Use one of 'auto', 'gather', 'ring', 'ulysses'.
    """

    layout: LayoutName = "auto"
    algorithm: AlgorithmName = "auto"
    sequence_dims: SequenceDims = field(default_factory=dict)
    loss: LossName = "auto"
    attention: Attention = field(default_factory=Attention)
    memory: Memory = field(default_factory=Memory)
    parameters: Parameters = field(default_factory=Parameters)
    verify: Verify = field(default_factory=Verify)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def __post_init__(self) -> None:
        for kind in (Attention, Memory, Parameters, Verify, Checkpoints):
            _check_group(kind, getattr(self, kind.__name__.lower()))
        check_choice("layout", self.layout, get_args(LayoutName))
        check_choice("algorithm", self.algorithm, get_args(AlgorithmName))
        check_choice("loss", self.loss, get_args(LossName))
        if not isinstance(self.sequence_dims, Mapping):
            raise TypeError(
                f"sequence_dims={self.sequence_dims!r}: give a dict from the name or path of a "
                "tensor to its sequence dim, or to None to keep it full."
            )
        object.__setattr__(self, "sequence_dims", dict(self.sequence_dims))  # theirs may change
        if self.attention.kernel == "flex" and self.algorithm == "ring":
            raise ValueError(
                "attention=Attention(kernel='flex') computes full sequences in one call, and "
                "algorithm='ring' delivers keys block by block. Use algorithm='gather' or "
                "'ulysses' with it, or another kernel."
            )
        if self.algorithm == "ulysses" and self.attention.ulysses_size is not None:
            raise ValueError(
                "algorithm='ulysses' exchanges tokens for heads among all ranks, but attention="
                f"Attention(ulysses_size={self.attention.ulysses_size}) limits it to some. Leave "
                "it out; or choose the algorithm between Ulysses groups: algorithm='gather' or "
                "'ring'."
            )


def _check_group(kind: type, value: object) -> None:
    """Raise if an argument is no group."""
    if not isinstance(value, kind):
        name = kind.__name__
        raise TypeError(
            f"{name.lower()}={value!r}: give {name.lower()}={name}(...), which has the fields "
            f"{', '.join(one.name for one in fields(kind))}."
        )


def _check_fields(group: Any) -> None:
    """Raise if a field of a group is of another type, or is none of the words that it may be."""
    name, kinds_of = type(group).__name__, _kinds_of(type(group))
    for one in fields(group):
        kinds = kinds_of[one.name]
        value = getattr(group, one.name)
        if not any(_is_of(value, kind) for kind in kinds):
            words = [repr(word) for kind in kinds for word in get_args(kind) if word is not str]
            words += [_KINDS[kind] for kind in kinds if kind in _KINDS]
            option = _assign(f"{name.lower()}={name}({one.name}", value)
            raise ValueError(f"{option} is unknown. Use one of {', '.join(words)}.")


_KINDS: Final[Mapping[Any, str]] = {
    bool: "True, False",
    int: "a whole number",
    float: "a number",
    list[str]: "a list of names",
    NoneType: "None",
}


def _kinds_of(group: type) -> Mapping[str, tuple[Any, ...]]:
    """Return the types of each field of a group."""
    hints = get_type_hints(group)
    return {
        name: (hint,) if get_origin(hint) in (None, Literal, list) else get_args(hint)
        for name, hint in hints.items()
    }


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if kind == list[str]:
        return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return type(value) is kind


def refuse_fields(kind: type, group: object, others: Mapping[str, str]) -> None:
    """Raise if a field of a group was set that an entry point does not carry out.

    Args:
        kind: of group, such as `Memory`.
        group: of a `Config`.
        others: the names of such fields, and what to do instead of setting each.

    Example:
        >>> refuse_fields(Memory, Memory(tile=True), {"tile": "Call tile_modules(model)."})
        Traceback (most recent call last):
        ...
        ValueError: memory=Memory(tile=True) has no effect here. Call tile_modules(model).
    """
    _check_group(kind, group)
    for one in fields(kind):
        value: Any = getattr(group, one.name)
        if one.name in others and value != one.default:
            name = kind.__name__
            raise ValueError(
                f"{name.lower()}={name}({one.name}={value!r}) has no effect here. "
                f"{others[one.name]}"
            )


def check_choice(option: str, value: object, choices: Iterable[str]) -> None:
    """Raise if an option does not have this value; name the values that it has.

    Example:
        >>> check_choice("layout", "round", ["auto", "zigzag"])
        Traceback (most recent call last):
        ...
        ValueError: layout='round' is unknown. Use one of 'auto', 'zigzag'.
    """
    choices = tuple(choices)
    if value not in choices:
        names = ", ".join(repr(name) for name in choices)
        raise ValueError(f"{_assign(option, value)} is unknown. Use one of {names}.")


def check_size(option: str, size: object, *, or_auto: bool = True) -> None:
    """Raise if a size is not a positive integer.

    Args:
        option: its name.
        size: its value, not ``auto``.
        or_auto: whether the option may be ``auto``, for the message.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        auto = ", or 'auto'" if or_auto else ""
        raise ValueError(f"{_assign(option, size)}: give a whole number of at least 1{auto}.")


def _is_switch(value: object) -> bool:
    """Return whether a value is on, off, ``auto`` or a number of at least 1."""
    is_named = isinstance(value, bool) or value == "auto"
    return is_named or (isinstance(value, int) and value >= 1)


def _assign(option: str, value: object) -> str:
    """Return an option with its value as the user has written it, in its group if it has one."""
    closed = ")" * (option.count("(") - option.count(")"))
    return f"{option}={value!r}{closed}"
