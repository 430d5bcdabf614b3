# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel`: opens steps, unshards tensors, pauses. Every entry point uses it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp import adapters, routing
from lightning_cp.attn.flex.kernel import MaskMod
from lightning_cp.attn.flex.mods import SequenceMask, SequenceMaskCache
from lightning_cp.attn.keep_attention import kept_limit, region_contexts, saving_inputs
from lightning_cp.attn.triton_ops import can_start
from lightning_cp.comm.mesh import Groups, build_groups, lone_groups
from lightning_cp.config import (
    AlgorithmName,
    Attention,
    Config,
    LayoutName,
    Memory,
    SequenceDims,
    Verify,
    check_choice,
    refuse_fields,
)
from lightning_cp.data import outputs
from lightning_cp.data.consistency import BatchChecks, find_differing
from lightning_cp.data.shard import (
    check_local,
    full_tokens,
    own_tokens,
    token_dim,
    unshard,
    unshard_value,
)
from lightning_cp.data.step_builder import check_not_sharded, open_step
from lightning_cp.geometry.layout import build_layout
from lightning_cp.geometry.mask import Mask
from lightning_cp.loss.means import local_targets
from lightning_cp.memory.budget import resolve_budget
from lightning_cp.memory.offload import Store, attach, store_of
from lightning_cp.patch import Patch
from lightning_cp.private.autograd import Nested, checkpoint_contexts
from lightning_cp.renamed import missing, refuse_arguments
from lightning_cp.routing import Exempt
from lightning_cp.step import active_step, guards
from lightning_cp.step.leaves import Flat, flatten
from lightning_cp.step.step import BatchOfParts, Opened, Step, StepMask, StepReference


class reenter(active_step.activate):
    """A step that is active again, with its routing: for backward, and for recomputation."""

    def __enter__(self) -> None:
        super().__enter__()
        routing.enabled().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        routing.enabled().__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)


class _reenter_regions(reenter):
    """The same for a step that keeps or offloads: regions inside the region know of it."""

    def __init__(self, step: Step, *, num_exempt: int) -> None:
        super().__init__(step, num_exempt=num_exempt)
        self._contexts: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        super().__enter__()
        self._contexts.append(checkpoint_contexts(_recompute, saving_inputs))
        self._contexts[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        self._contexts.pop().__exit__(None, None, None)
        super().__exit__(*error)


def _recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of activation checkpointing: forward, and recomputation in this step.

    ``checkpoint(layer, x, use_reentrant=False)`` inside a step uses it automatically; this is for
    other functions that take a ``context_fn``. A plain function: the compiler supports no other.
    """
    step = active_step.opened()
    if step is None and active_step.is_paused():
        return nullcontext(), active_step.activate(active_step.PAUSED)
    if step is None:
        raise RuntimeError(
            "cp.recompute() was called outside a step. Call it inside `with cp.step(batch):`."
        )
    num_exempt = active_step.num_exempt()
    if not isinstance(step, Step) or (kept_limit(step) == 0 and store_of(step) is None):
        return nullcontext(), reenter(step, num_exempt=num_exempt)
    forward, recompute = region_contexts(step)
    return forward, Nested(_reenter_regions(step, num_exempt=num_exempt), recompute)


@contextmanager
def run_step(step: Opened) -> Iterator[None]:
    """Make a step the active one, with routing, adapters and checkpointing."""
    guards.forget_backward()
    with (
        adapters.guarded(),
        active_step.activate(step),
        routing.enabled(),
        checkpoint_contexts(_recompute, saving_inputs),
    ):
        yield


def _pooling_weights(step: Step, how: str) -> Tensor:
    """Return the weight of each of this rank's tokens in the vector of its sample, [B, L]."""
    layout = step.layout
    real = np.ones((step.batch_size, layout.seq_len), np.bool_)
    if step.padding is not None:
        real &= ~step.padding
    position = np.arange(layout.seq_len)
    if how == "mean":
        weights = real / np.maximum(real.sum(1, keepdims=True), 1)
    else:
        order = np.where(real, position, layout.seq_len if how == "first" else -1)
        chosen = order.min(1) if how == "first" else order.max(1)
        weights = (position == chosen[:, None]).astype(np.float64)
    return own_tokens(torch.from_numpy(weights), step)


_LOOPS_MEMORY: Final = {
    "activation_checkpointing": "Call lightning_cp.memory.checkpoint_layers(model), or use "
    "checkpoint(layer, x, use_reentrant=False) in the model.",
    "tile": "Call lightning_cp.memory.tile_modules(model).",
    "compile": "Compile layers with torch.compile(layer).",
    "check": "Loops have no plan; `lightning-cp plan` computes one.",
}
"""Fields of `Memory` that the strategy carries out, and what a loop does itself."""

_LOOPS_VERIFY: Final = {
    "steps": "Call lightning_cp.verify(model, batch, cp=cp) before the first step, or not.",
    "max_len": "Give it to lightning_cp.verify(model, batch, cp=cp, max_len=...).",
    "broadcast_batch": "Call cp.groups.first(batch) before cp.step(batch).",
}
"""Fields of `Verify` that the strategy carries out, and what a loop does itself."""


def groups_of(
    config: Config,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    data: DeviceMesh | dist.ProcessGroup | None,
    *,
    tensor: DeviceMesh | dist.ProcessGroup | None,
    timeout: timedelta | None,
) -> Groups:
    """Return the groups of the ranks that a configuration is for, as `ContextParallel` has them."""
    return build_groups(
        mesh,
        data=data,
        tensor=tensor,
        ulysses_size="all" if config.algorithm == "ulysses" else config.attention.ulysses_size,
        timeout=timeout,
        compiles=can_start,
    )


class ContextParallel:
    """Shards every sequence of a batch over the ranks of a group.

    Every rank of the group must create it, at the same time. Objects over the same ranks share
    their communicators. One process without a group works too (``ContextParallel(None)``) and runs
    the same code.

    Args:
        mesh: the ranks that share each sequence: a 1-D mesh, a process group, or None for this
            process. The second axis of a 2-D mesh (between nodes, inside a node) is the Ulysses
            group. `Groups` are used unchanged.
        data: the ranks that hold other samples, if any; the loss is a mean over both.
        tensor: the ranks that hold the same tokens and share the weights of each layer, if any;
            they must have the same batch.
        layout: which rank owns which tokens. ``auto`` is ``contiguous`` where ranks then have equal
            work (windows, short documents), else ``zigzag``, or ``balanced`` where documents and
            padding would give some ranks more work than others.
        algorithm: how keys and values reach the queries. ``auto`` is ``gather``, or ``ring`` where
            that needs too much GPU memory; ``ulysses`` exchanges tokens for heads among all ranks.
        attention: the kernel, its memory, and Ulysses groups.
        sequence_dims: the sequence dims of tensors of the batch whose names are not known: name or
            path (``text.pixels``, ``0`` for the first of a tuple, ``batch`` for a batch that is a
            tensor) to dim, or None to keep a tensor, or a container, full. Takes precedence over
            the defaults for Hugging Face batches.
        memory: ``keep_attention``, ``offload`` and ``offload_after``, of which ``auto`` keeps and
            moves nothing here. A loop sets the others itself.
        verify: ``check_batches``, for how many batches the ranks compare contents. A loop calls
            `lightning_cp.verify` itself.
        timeout: of the groups that attention uses; torch's default when None.
        renamed: raise, and say what former arguments are now.

    Example:
        >>> cp = ContextParallel(None)
        >>> with cp.step({"input_ids": torch.arange(6).view(1, 6)}) as local:
        ...     cp.unshard(local["input_ids"], dim=1)
        tensor([[0, 1, 2, 3, 4, 5]])
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup | Groups | None,
        data: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        tensor: DeviceMesh | dist.ProcessGroup | None = None,
        layout: LayoutName = "auto",
        algorithm: AlgorithmName = "auto",
        attention: Attention = Attention(),
        sequence_dims: SequenceDims | None = None,
        memory: Memory = Memory(),
        verify: Verify = Verify(),
        timeout: timedelta | None = None,
        **renamed: Any,
    ) -> None:
        refuse_arguments("ContextParallel()", renamed)
        config = Config(
            layout=layout,
            algorithm=algorithm,
            sequence_dims=sequence_dims or {},
            attention=attention,
            memory=memory,
            verify=verify,
        )
        refuse_fields(Memory, memory, _LOOPS_MEMORY)
        refuse_fields(Verify, verify, _LOOPS_VERIFY)
        groups = mesh
        if not isinstance(groups, Groups):
            groups = groups_of(config, groups, data, tensor=tensor, timeout=timeout)
        self._hold(groups, config)

    @classmethod
    def of(cls, groups: Groups, config: Config) -> "ContextParallel":
        """Return context parallelism of groups that were built, with a configuration as it is."""
        cp = cls.__new__(cls)
        cp._hold(groups, config)
        return cp

    def _hold(self, groups: Groups, config: Config) -> None:
        self._groups, self._config = groups, config
        window = config.attention.balance_window
        self._balance = None if window is None else Mask(True, window)
        self._alone = lone_groups()
        self._position_edges: tuple[int, ...] = ()
        self._checked_paths: set[str] = set()
        self._sequence_masks = SequenceMaskCache()
        self.checks = BatchChecks(groups, config.verify.check_batches)
        budget = resolve_budget(config.memory, groups)
        self._store = None if budget is None else Store(budget)

    @property
    def config(self) -> Config:
        """Return what was set."""
        return self._config

    @property
    def groups(self) -> Groups:
        """Return the ranks that this rank works with."""
        return self._groups

    @property
    def cp_size(self) -> int:
        """Return the number of context ranks."""
        return self._groups.context.size

    @property
    def cp_rank(self) -> int:
        """Return this rank's index among them."""
        return self._groups.context.rank

    @property
    def offloaded(self) -> Store | None:
        """Return where tensors are that were offloaded, and how many bytes; None for nowhere."""
        return self._store

    def offload_to(self, store: Store | None) -> None:
        """Let later steps save into a store, or nowhere: for who decides ``offload="auto"``."""
        self._store = store

    def close(self) -> None:
        """Return the host memory of offloading to the system; a later step takes it again."""
        if self._store is not None:
            self._store.close()

    def record_positions(self, edges: Sequence[int]) -> Patch:
        """Let `token_mean` add up losses by position in later steps, as ``LossMark.by_position``.

        Args:
            edges: where buckets of global positions begin; the same on all ranks.

        Returns:
            A handle, whose ``remove()`` ends it.
        """
        return Patch(self, "_position_edges", tuple(edges))

    @contextmanager
    def step(
        self,
        batch: Any,
        *,
        training: bool | None = None,
        sequence_dims: SequenceDims | None = None,
    ) -> Iterator[Any]:
        """Work on this rank's shard of a batch.

        Inside, attention(), F.scaled_dot_product_attention and token_mean() see the full sequences.
        Backward may run inside or after.

        Args:
            batch: the full batch, the same on every rank of the group: a dict, tuple, list or data
                class of tensors, or any of them inside another.
            training: whether the loss is averaged over the data axis too; by default, whether
                gradients are enabled.
            sequence_dims: the sequence dims of this batch, instead of those of
                ``ContextParallel(sequence_dims=...)``.

        Yields:
            The same structure, each tensor sharded to the positions that this rank owns. Labels are
            sharded, not shifted. If ``sequence_dims`` keeps every tensor full, the batch itself:
            then open a step for each part of it.
        """
        active = active_step.opened()
        outer = active if isinstance(active, BatchOfParts) else None
        if training is None:
            training = torch.is_grad_enabled() if outer is None else outer.training
        opened, local = self._open(batch, training, outer, sequence_dims)
        with run_step(opened):
            yield local
        for losses in opened.uncompared:
            self.checks.released.add(
                "a loss given to sample_mean()", losses, self._groups.context.device
            )

    @contextmanager
    def reference(
        self,
        batch: Any,
        *,
        training: bool | None = None,
        stock: bool = False,
        routed: bool = False,
        sequence_dims: SequenceDims | None = None,
    ) -> Iterator[Any]:
        """Work on the full batch, on this rank only: the reference that `step` is compared with.

        SDPA calls are torch's own; attention(), flex_attention() and token_mean() see full
        sequences, with the documents and padding of the batch, in plain torch. No other rank takes
        part.

        Args:
            batch: the full batch.
            training: as in `step`.
            stock: run models of other libraries unchanged. Some of them ignore documents: each
                document becomes a sample of its own.
            routed: route SDPA calls as in `step`, so that they see documents and padding.
            sequence_dims: as in `step`.

        Yields:
            The batch's keys and tensors, not sharded.
        """
        training = torch.is_grad_enabled() if training is None else training
        attention = replace(self._config.attention, kernel="reference")
        terms = Opened(
            groups=self._alone,
            config=replace(self._config, attention=attention),
            training=training,
            is_stock=stock,
            position_edges=self._position_edges,
        )
        opened, full = self._build(flatten(batch), terms, sequence_dims)
        if routed:
            with run_step(opened):
                yield full
            return
        guards.forget_backward()
        with adapters.guarded(), active_step.activate(opened), routing.flex_detour:
            yield full

    def _open(
        self,
        batch: Any,
        training: bool,
        outer: BatchOfParts | None,
        sequence_dims: SequenceDims | None,
    ) -> tuple[Opened, Any]:
        """Build the step of a batch; an error of one rank is raised on all of them."""
        of = self if outer is None else outer
        values = self.checks.count_batch(training) if outer is None else outer.is_checked
        terms = Opened(
            groups=of.groups,
            config=of.config,
            training=training,
            is_checked=values,
            position_edges=self._position_edges,
            is_stock=outer is not None and outer.is_stock,
            outer=outer,
        )

        def build(flat: Flat) -> tuple[Opened, Any]:
            check_not_sharded(flat, active_step.opened())
            return self._build(flat, terms, sequence_dims)

        if of.groups is self._alone:  # on this rank only, as `reference`
            return build(flatten(batch))
        return self.checks.checked(batch, build, training=training, values=values)

    def _build(
        self, flat: Flat, terms: Opened, sequence_dims: SequenceDims | None
    ) -> tuple[Opened, Any]:
        """Build the step of a batch; no rank waits for another."""
        is_usual = terms.outer is None and sequence_dims is None
        opened, local = open_step(
            flat,
            terms,
            balance=self._balance,
            sequence_dims=sequence_dims,
            checked_paths=self._checked_paths if is_usual else None,
        )
        if isinstance(opened, Step):
            attach(self._store, opened)
        return opened, local

    def position_ids(self) -> Tensor:
        """Return the position ids of this rank's tokens, [B, L].

        Those of the batch if it has some, else counted from the start of each document. For models
        that would otherwise count positions themselves.
        """
        return self._active("position_ids()").position_ids

    def mask(
        self,
        *,
        causal: bool = False,
        window: int | tuple[int, int] | None = None,
        chunk: int | None = None,
        spans: Tensor | None = None,
    ) -> StepMask:
        """Return a mask that holds the active step, with its documents and padding.

        attention() with such a mask works after the step has ended, as in reentrant activation
        checkpointing with backward outside.
        """
        step = self._active("mask()")
        return StepMask(
            causal=causal, window=window, chunk=chunk, spans=spans, reference=StepReference(step)
        )

    def block_mask(
        self,
        mask_mod: MaskMod,
        B: int | None = None,
        H: int | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
    ) -> SequenceMask:
        """Return the ``block_mask`` argument of ``flex_attention`` for the active step.

        The arguments are those of torch's ``create_block_mask``, without lengths: only this rank's
        blocks are computed, when a fused kernel needs them. Layers and steps share them as long as
        nothing that the function captured has changed.

        Args:
            mask_mod: (batch, head, query, key) to whether the query sees the key, in global
                positions. Tensors that it captures are full.
            B: samples of the mask: 1 if all are equal. By default, whether the function uses it.
            H: heads of the mask, likewise.
            BLOCK_SIZE: queries and keys of a block.
        """
        self._active("block_mask()")
        size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        return self._sequence_masks.find(mask_mod, batch=B, heads=H, block_size=size)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Return full sequences in their original order, without padding, on every rank.

        Differentiable: if every rank computes the same loss from the result, gradients averaged
        over ranks are exact.

        Args:
            x: this rank's shard along ``dim``.
            dim: the sequence dim.
        """
        step = self._active("unshard()")
        check_local(x, dim, step)
        return full_tokens(x, step, dim)

    def unshard_all(self, output: Any) -> Any:
        """Return the output of a model, with every tensor of tokens as full sequences.

        Dicts, lists, tuples and dataclasses keep their types. Known to hold tokens are: tensors of
        the batch, keys of ``sequence_dims``, and what a model of a known library returns per token
        (logits, hidden states). Any other value must be the same on all ranks.
        """
        if isinstance(active_step.opened(), BatchOfParts):
            return output  # its parts were unsharded in their own steps
        step = self._active("unshard_all()")
        changed, others = {}, []
        for leaf in outputs.leaves(output, adapters.output_dims):
            dim = token_dim(leaf, step)
            if dim is None:
                others.append(leaf)
            else:
                changed[leaf.path] = unshard_value(leaf.value, dim, step)
        differing = find_differing([leaf.value for leaf in others], self._groups.context)
        if differing:
            leaf = others[differing[0]]
            raise ValueError(
                f"unshard_all() got {outputs.describe(leaf.value)} at output{leaf.path}, which is "
                "not known to hold one value per token and differs between ranks. Use "
                "cp.unshard(x, dim), or return a dict and name the sequence dim of its key: "
                "sequence_dims={'key': 1}."
            )
        return outputs.rebuild(output, changed)

    def shift_labels(self, labels: Tensor) -> Tensor:
        """Return, for each of this rank's tokens, the label of the next one of its document.

        For metrics of the next token: compare the logits of all tokens with it, without slicing
        either. -100 where there is no next token; the next one may be on another rank.

        Args:
            labels: [B, L], this rank's shard.

        Example:
            >>> cp = ContextParallel(None)
            >>> with cp.step({"labels": torch.tensor([[5, 6, 7]])}) as local:
            ...     cp.shift_labels(local["labels"])
            tensor([[   6,    7, -100]])
        """
        return local_targets(labels, self._active("shift_labels()"))

    def token_mask(self) -> Tensor:
        """Return which of this rank's tokens are not padding, bool [B, L]: for metrics over tokens.

        Padding is that of the batch, and the tokens that we append where a sequence cannot be
        divided evenly.
        """
        step = self._active("token_mask()")
        real = step.layout.is_real(step.cp_rank).expand(step.batch_size, -1)
        if step.padding is not None:
            padding = torch.from_numpy(step.padding)
            real = real & ~own_tokens(padding, step, fill=True)
        return real.to(step.position_ids.device)

    def pool(self, x: Tensor, how: Literal["first", "last", "mean"]) -> Tensor:
        """Return one vector per sample, the same on every rank: for classifiers and embeddings.

        Padding is ignored. Differentiable: if every rank computes the same loss from the result,
        gradients averaged over ranks are exact.

        Args:
            x: [B, L, ...], this rank's shard.
            how: the ``first`` token that is not padding, the ``last`` one, or the ``mean``.

        Example:
            >>> cp = ContextParallel(None)
            >>> batch = {"input_ids": torch.tensor([[5, 6, 0]])}
            >>> batch["attention_mask"] = torch.tensor([[1, 1, 0]])
            >>> with cp.step(batch) as local:
            ...     cp.pool(local["input_ids"].unsqueeze(-1).float(), "last")
            tensor([[6.]])
        """
        step = self._active("pool()")
        check_choice("pool(how=...)", how, ("first", "last", "mean"))
        check_local(x, 1, step)
        if step.documents is not None and (step.documents > 0).any():
            raise ValueError(
                "pool() returns one vector per sample, but the batch holds samples of several "
                "documents. Put each document into a sample of its own, or use cp.unshard(x, 1)."
            )
        weights = _pooling_weights(step, how).to(x.device, x.dtype)
        part = (x * weights.view(*weights.shape, *[1] * (x.dim() - 2))).sum(1, keepdim=True)
        ranks = build_layout("contiguous", seq_len=step.cp_size, cp_size=step.cp_size)
        parts = unshard(part, 1, layout=ranks, transport=step.groups.context, uid=step.uid)
        return parts.sum(1)

    def paused(self) -> AbstractContextManager[None]:
        """Switch context parallelism off inside a step: full sequences, on this rank only.

        For ``generate()``, for a second model, for anything that does not use this rank's shard.
        """
        return active_step.paused()

    def exempt(self, *modules: nn.Module) -> Exempt:
        """Leave attention calls unchanged: their keys are replicated, or are not the sequence.

        ``with cp.exempt():`` for the calls inside it; ``cp.exempt(module)`` for all calls of
        a module, until ``remove()`` of the returned object. For cross-attention to keys that every
        rank holds, and for modules that attend over something other than the sequence.
        """
        return Exempt(modules)

    recompute = staticmethod(_recompute)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise missing(type(self).__name__, name)

    def _active(self, what: str) -> Step:
        step = active_step.current()
        if step is None:
            raise RuntimeError(
                f"cp.{what} was called outside a step. Call it inside `with cp.step(batch):`."
            )
        if step.groups not in (self._groups, self._alone):
            raise RuntimeError(
                f"cp.{what} was called inside a step of another ContextParallel. Use the one whose "
                "step is active."
            )
        return step
