# SPDX-License-Identifier: Apache-2.0
"""The run that is planned: sizes and options, checked. Plain values."""

from dataclasses import dataclass
from math import gcd
from typing import Final, Literal, get_args

from lightning_cp.config import Attention, Sharding, check_choice

Precision = Literal["bf16-mixed", "bf16-true", "bf16-policy"]
"""``bf16-mixed``: autocast. ``bf16-policy``: the same with ``mixed_precision="fsdp"``."""

Checkpointing = Literal["none", "full", "keep"]
"""``full``: one hidden state per layer, as Hugging Face does; ``keep``: and attention."""

Offload = Literal["none", "all"]
"""What is moved to host memory; ``all``: checkpoints and, if it is kept, attention."""

MAX_GPUS: Final = 1024

GPUS_PER_HOST: Final = 8


@dataclass(frozen=True)
class Setup:
    """One training run.

    Args:
        seq_len: tokens of a sequence.
        num_gpus: all ranks.
        cp_size: context ranks; 0 for all that tensor ranks leave.
        ulysses_size: of them, those of a Ulysses group.
        tp_size: tensor ranks, which share the weights and heads of each layer. They are neighbours;
            then come context ranks, then those that share the parameters, then copies of these.
        batch_size: samples per data rank.
        precision: of the Trainer.
        sharding: of the parameters, as `Parameters` has it.
        shard_size: with ``hybrid``, the ranks that share a copy of the parameters, beside tensor
            ranks; 0 for those of a node of `GPUS_PER_HOST`.
        parameter_offload: whether weights, gradients and moments are in host memory.
        checkpointing: what is recomputed in backward.
        checkpointed_layers: of how many layers, the first ones; 0 for all.
        offload: what is moved to the host.
        tiles: tiles of the token-wise parts of a layer; 0 for none.
        compiled: whether these parts are compiled.
        lora_rank: 0 trains all weights.
        documents: lengths of packed documents, repeated until the sequence is full.
        attention: as the strategy's argument: the memory of a call, and in which precision
            gradients of keys are summed.
        chunk_logits: logits of a chunk of the loss.
        accumulates: whether gradients of earlier microbatches are in memory.

    Example:
        >>> Setup(seq_len=1 << 20, num_gpus=8).local_len
        131072
    """

    seq_len: int
    num_gpus: int
    cp_size: int = 0
    ulysses_size: int = 1
    tp_size: int = 1
    batch_size: int = 1
    precision: Precision = "bf16-mixed"
    sharding: Sharding = "full"
    shard_size: int = 0
    parameter_offload: bool = False
    checkpointing: Checkpointing = "full"
    checkpointed_layers: int = 0
    offload: Offload = "none"
    tiles: int = 0
    compiled: bool = False
    lora_rank: int = 0
    documents: tuple[int, ...] = ()
    attention: Attention = Attention()
    chunk_logits: int = 2**28
    accumulates: bool = True

    def __post_init__(self) -> None:
        for name, kinds in (
            ("precision", Precision),
            ("sharding", Sharding),
            ("checkpointing", Checkpointing),
            ("offload", Offload),
        ):
            check_choice(name, getattr(self, name), get_args(kinds))
        for name in ("seq_len", "num_gpus", "batch_size", "ulysses_size", "tp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give an integer of at least 1.")
        for name in ("tiles", "lora_rank", "cp_size", "shard_size", "checkpointed_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: give 0 or more.")
        if self.num_gpus > MAX_GPUS:
            raise ValueError(
                f"num_gpus={self.num_gpus}: plans go up to {MAX_GPUS} GPUs. Give fewer."
            )
        self._check_mesh()
        if self.context_size % self.ulysses_size:
            raise ValueError(
                f"ulysses_size={self.ulysses_size} does not divide the {self.context_size} context "
                "ranks. Give a divisor."
            )
        if self.seq_len < self.context_size:
            raise ValueError(
                f"seq_len={self.seq_len} is less than the {self.context_size} ranks that share a "
                "sequence. Give a longer one, or a smaller cp_size."
            )
        if self.parameter_offload and not self.is_sharded:
            raise ValueError(
                "parameter_offload moves shards of parameters, and sharding='none' has none. Give "
                "sharding='full' or 'hybrid'."
            )
        if any(length < 1 for length in self.documents):
            raise ValueError(
                f"documents={self.documents}: lengths of documents are integers of at least 1."
            )
        if self.checkpointed_layers and self.checkpointing == "none":
            raise ValueError(
                f"checkpointed_layers={self.checkpointed_layers} with checkpointing='none'. Give "
                "checkpointing='full' or 'keep'."
            )
        if self.offload != "none" and self.checkpointing == "none":
            raise ValueError(
                f"offload={self.offload!r} moves checkpoints, and there are none. Give "
                "checkpointing='full' or 'keep'."
            )

    def num_checkpointed(self, num_layers: int) -> int:
        """Return how many layers of a model are recomputed: the first ones."""
        if self.checkpointed_layers > num_layers:
            raise ValueError(
                f"checkpointed_layers={self.checkpointed_layers}: the model has {num_layers} "
                "layers. Give at most as many, or 0 for all."
            )
        if self.checkpointing == "none":
            return 0
        return self.checkpointed_layers or num_layers

    def _check_mesh(self) -> None:
        left, per_tensor = self.num_gpus, ""
        for name, size in (
            ("tp_size", self.tp_size),
            ("cp_size", self.context_size),
            ("shard_size", self.num_shards),
        ):
            if left % size:
                raise ValueError(
                    f"{name}={size} does not divide num_gpus={self.num_gpus}{per_tensor}. Give a "
                    f"divisor, such as {gcd(left, size)}."
                )
            if name == "tp_size" and size > 1:
                left, per_tensor = left // size, f" / tp_size={size}"
        if self.tp_size > 1 and (not self.is_sharded or self.lora_rank):
            wrong = f"lora_rank={self.lora_rank}" if self.lora_rank else "sharding='none'"
            raise ValueError(
                f"tp_size={self.tp_size} with {wrong}: the strategy divides weights over tensor "
                "ranks if all of them are trained and sharded. Give tp_size=1, or lora_rank=0 and "
                "sharding='full' or 'hybrid'."
            )

    @property
    def context_size(self) -> int:
        """Return the ranks that share a sequence."""
        return self.cp_size or max(1, self.num_gpus // self.tp_size)

    @property
    def data_size(self) -> int:
        """Return the groups of ranks that have different samples."""
        return self.num_gpus // self.tp_size // self.context_size

    @property
    def local_len(self) -> int:
        """Return the tokens of a rank, all samples."""
        return self.batch_size * -(-self.seq_len // self.context_size)

    @property
    def is_sharded(self) -> bool:
        """Return whether parameters are sharded, over all ranks or some."""
        return self.sharding != "none"

    @property
    def num_shards(self) -> int:
        """Return the ranks over which parameters, or the parts of tensor ranks, are sharded."""
        ranks = max(1, self.num_gpus // self.tp_size)
        if self.sharding == "hybrid":
            return min(self.shard_size or max(1, GPUS_PER_HOST // self.tp_size), ranks)
        return ranks if self.is_sharded else 1

    @property
    def num_copies(self) -> int:
        """Return the number of copies of the parameters, sharded or not."""
        return self.num_gpus // self.tp_size // self.num_shards
