# SPDX-License-Identifier: Apache-2.0
"""`ContextParallel`: open a step, put rows back together, pause. Every door goes through it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_cp import active_step, adapters, guards, routing
from lightning_cp.attn.blockwise.kernels.select import KernelName, check_kernel, check_pair
from lightning_cp.attn.choose import name_algorithm
from lightning_cp.attn.flex.kernel import MaskMod
from lightning_cp.attn.flex.mods import SequenceMask, SequenceMaskCache
from lightning_cp.attn.plan import AlgorithmName, check_algorithm
from lightning_cp.attn.triton_ops import can_start
from lightning_cp.comm.mesh import Groups, build_groups, lone_groups
from lightning_cp.comm.transport import GradientWire, Transport, check_gradient_wire
from lightning_cp.data import batch as batches
from lightning_cp.data import consistency, outputs
from lightning_cp.data.batch import WholeBatch
from lightning_cp.data.sharding import shard, unshard
from lightning_cp.data.structure import flatten, rebuild
from lightning_cp.geometry.layout import Layout, LayoutName, build_layout, check_layout
from lightning_cp.geometry.mask import Bounds, Mask
from lightning_cp.loss import local_targets
from lightning_cp.options import check_choice
from lightning_cp.routing import Unsharded
from lightning_cp.step import Gpu, HandedOver, Step, StepMask, hand_over
from lightning_cp.torch_private import checkpoint_contexts

T = TypeVar("T")


class reenter(active_step.activate):
    """A step that is active again, with its dispatch: for backward, and while recomputing."""

    def __enter__(self) -> None:
        super().__enter__()
        routing.enabled().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        routing.enabled().__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)


def _recompute() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Give activation checkpointing the step in which to recompute.

    ``checkpoint(layer, x, use_reentrant=False)`` inside a step does so by itself; this is for other
    ways of checkpointing that take a ``context_fn``. A plain function, for the compiler takes no
    other.
    """
    step = active_step.opened()
    if step is None and active_step.is_paused():
        return nullcontext(), active_step.activate(active_step.PAUSED)
    if step is None:
        raise RuntimeError(
            "cp.recompute() was called outside a step. Call it inside `with cp.step(batch):`."
        )
    return nullcontext(), reenter(step, num_unsharded=active_step.num_unsharded())


def _check_balance(balance: Mask | None) -> None:
    if balance is not None and any(isinstance(x, Tensor) for x in balance.tensors()):
        raise ValueError(
            "ContextParallel(balance=...) holds for all batches, but got a mask with documents, "
            "spans or padding of one row. Give settings only, such as Mask(causal=True, "
            "window=4096): documents and padding are read from each batch."
        )


def _agree_on_gpu(ranks: Transport) -> Gpu | None:
    """Find out what the GPUs of all ranks can do: a rank that chose another way would hang."""
    device = ranks.device
    if ranks.size == 1 or device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    mine = torch.tensor([*found, int(can_start(device))], dtype=torch.int64, device=device)
    every = mine.new_empty(ranks.size, 3)
    ranks.all_gather(every, mine)()
    numbers = every.tolist()
    return Gpu(min((a, b) for a, b, _ in numbers), all(works for *_, works in numbers))


def _check_not_cut(batch: Any, active: Step | None) -> None:
    """Refuse to cut again what the active step has cut."""
    if active is None or active.cp_size == 1:
        return
    cut = {id(x) for values in active.yielded.values() for x in values if isinstance(x, Tensor)}
    for path, leaf in flatten(batch).items():
        if id(leaf.value) in cut:
            raise ValueError(
                f"cp.step() got `{path}`, which is this rank's part of a batch already: the active "
                "step has cut it. Use it as it is; or keep the batch whole, and open a step for "
                "each part: sequence_dims={'a': None, 'b': None}."
            )


def check_memory(attention_memory: float | None) -> None:
    """Refuse a budget that holds nothing."""
    if attention_memory is not None and not attention_memory > 0:
        raise ValueError(
            f"attention_memory={attention_memory}: give the GiB that an attention call may take, "
            "above 0, or None to leave it open."
        )


def check_held(x: Tensor, dim: int, step: Step) -> None:
    """Refuse a tensor that does not hold this rank's tokens along ``dim``."""
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != step.held_len:
        raise ValueError(
            f"unshard(x, dim={dim}) got x of shape {tuple(x.shape)}, but this rank holds "
            f"{step.held_len} tokens per row: give the dim that has that length."
        )


def pooling_weights(step: Step, how: str) -> Tensor:
    """Return how much each of this rank's tokens counts for the vector of its sample, [B, L]."""
    layout = step.layout
    real = np.ones((step.batch_size, layout.seq_len), np.bool_)
    if step.padding is not None:
        real &= ~step.padding
    place = np.arange(layout.seq_len)
    if how == "mean":
        weights = real / np.maximum(real.sum(1, keepdims=True), 1)
    else:
        order = np.where(real, place, layout.seq_len if how == "first" else -1)
        chosen = order.min(1) if how == "first" else order.max(1)
        weights = (place == chosen[:, None]).astype(np.float64)
    return shard(torch.from_numpy(weights), 1, layout=layout, rank=step.cp_rank)


class ContextParallel:
    """Share every row of a batch among the ranks of a group.

    Every rank of the group must create it, at the same time. One process without a group works
    too (``ContextParallel(None)``) and walks the same code.

    Args:
        mesh: the ranks that share a row: a 1-D mesh, a process group, or None for this process. A
            2-D mesh (between nodes, inside a node) stands for ``ulysses_size`` ranks inside.
            Groups that were built elsewhere are taken as they are.
        data: the ranks that hold other rows, if there are any; the loss is a mean over both.
        layout: who owns which tokens. ``auto`` is ``contiguous`` where ranks then have equal work
            (windows, short documents), else ``zigzag``, or ``balanced`` where documents and padding
            would give some ranks more work than others.
        algorithm: how keys travel. ``auto`` is ``gather``, or ``ring`` where that takes too much of
            a GPU's memory; ``ulysses`` swaps tokens for heads among all ranks.
        ulysses_size: how many neighbouring ranks swap tokens for heads first, so that keys travel
            by the algorithm only between such neighbourhoods: the devices of a node, say.
        kernel: what computes attention. ``auto`` takes the fastest that can.
        attention_memory: GiB that an attention call may take on a GPU beside what it is given:
            keys then travel in more groups of heads, or by ring. By default six times the local
            queries, at least 0.78, and up to 4 (2 before Hopper) where that saves time.
        gradient_wire: in which precision gradients of keys and values travel where they are added
            up on the way (``gather``): ``float32``, or ``model``, that of the keys. This is half
            of the bytes for bf16, for slow networks, and rounds the sum at each rank. The same on
            all ranks.
        sequence_dims: where the sequence lies in tensors of the batch that are not known: name or
            path (``text.pixels``, ``0`` for the first of a tuple, ``batch`` for one that is the
            batch) to dim, or None to keep one whole, or all of a container. Goes before the
            defaults for Hugging Face batches.
        balance: the mask under which ranks shall have equal work, by default ``Mask(causal=True)``;
            documents and padding come from each batch. For models of which most layers have a
            window: ``Mask(causal=True, window=4096)``. Changes speed, never results.
        check_batches: for how many batches the ranks compare contents; shapes always.
        timeout: of the group that attention uses; torch's default when None.

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
        layout: LayoutName = "auto",
        algorithm: AlgorithmName = "auto",
        kernel: KernelName = "auto",
        attention_memory: float | None = None,
        gradient_wire: GradientWire = "float32",
        ulysses_size: int | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
        balance: Mask | None = None,
        check_batches: int = 8,
        timeout: timedelta | None = None,
    ) -> None:
        check_layout(layout)
        _check_balance(balance)
        check_algorithm(algorithm)
        check_kernel(kernel)
        check_pair(kernel, algorithm)
        check_memory(attention_memory)
        check_gradient_wire(gradient_wire)
        if algorithm == "ulysses" and ulysses_size is not None:
            raise ValueError(
                f"algorithm='ulysses' swaps tokens for heads among all ranks, but ulysses_size="
                f"{ulysses_size} says among how many. Leave it out; or name what keys do between "
                "neighbourhoods: algorithm='gather' or 'ring'."
            )
        self.layout = layout
        self.algorithm = algorithm
        self.kernel = kernel
        self.attention_memory = attention_memory
        self.gradient_wire: GradientWire = gradient_wire
        self.sequence_dims = dict(sequence_dims or {})
        self.balance = balance
        self.check_batches = check_batches
        self.position_edges: tuple[int, ...] = ()
        self.gpu: Gpu | None = None
        if isinstance(mesh, Groups):
            self._groups = mesh
        else:
            self._groups = build_groups(
                mesh,
                data=data,
                ulysses_size="all" if algorithm == "ulysses" else ulysses_size,
                timeout=timeout,
            )
            self.gpu = _agree_on_gpu(self._groups.context)
        self._alone = lone_groups()
        self._decided: dict[str, int | None] = {}
        self.released = consistency.Released()
        self._num_batches = {True: 0, False: 0}  # in training, in evaluation
        self._adapters: list[adapters.Adapter] | None = None
        self._row_masks = SequenceMaskCache()

    @property
    def groups(self) -> Groups:
        """Return whom this rank works with."""
        return self._groups

    @property
    def cp_size(self) -> int:
        """Return how many ranks share a row."""
        return self._groups.context.size

    @property
    def cp_rank(self) -> int:
        """Return this rank's place among them."""
        return self._groups.context.rank

    def describe_algorithm(self) -> str:
        """Return how tokens meet: ``gather``, ``ulysses``, ``ulysses x ring`` ..."""
        return name_algorithm(self.algorithm, self._groups)

    @contextmanager
    def step(
        self,
        batch: Any,
        *,
        training: bool | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
    ) -> Iterator[Any]:
        """Work on this rank's part of a batch.

        Inside, attention(), F.scaled_dot_product_attention and token_mean() see the whole of it.
        Backward may run inside or after.

        Args:
            batch: the whole batch, the same on every rank of the group: a dict, tuple, list or data
                class of tensors, or any of them inside another.
            training: whether the loss is averaged over the data axis too; by default, whether
                gradients are enabled.
            sequence_dims: where the sequence lies in this batch, in place of what
                ``ContextParallel(sequence_dims=...)`` says of all.

        Yields:
            The same structure, each tensor cut to the positions that this rank holds. Labels are
            cut, not shifted. Where ``sequence_dims`` keeps every tensor whole, the batch itself:
            open a step for each part of it then.
        """
        outer = active_step.opened()
        if not isinstance(outer, HandedOver):
            outer = None
        if training is None:
            training = torch.is_grad_enabled() if outer is None else outer.training
        opened, local = self._open(batch, training, outer, sequence_dims)
        with self.entered(opened):
            yield local

    @contextmanager
    def entered(self, opened: Step) -> Iterator[None]:
        """Make a step that was built elsewhere the active one, with all that belongs to it."""
        if self._adapters is None:  # not earlier: models may be imported after this was built
            self._adapters = adapters.load_adapters()
        guards.forget_backward()
        with active_step.activate(opened), routing.enabled(), checkpoint_contexts(_recompute):
            yield

    @contextmanager
    def alone(
        self,
        batch: Any,
        *,
        training: bool | None = None,
        stock: bool = False,
        routed: bool = False,
    ) -> Iterator[Any]:
        """Work on the whole batch, on this rank only: what `step` is compared with.

        SDPA calls are torch's own; attention(), flex_attention() and token_mean() see whole rows,
        with the documents and padding of the batch, in plain torch. No other rank takes part.

        Args:
            batch: the whole batch.
            training: as in `step`.
            stock: models of other libraries are as they are without us. Some of them do not keep
                documents apart: each document is given to them as a row of its own.
            routed: SDPA calls are routed as in `step`, so that they see documents and padding.

        Yields:
            The batch's keys and tensors, uncut.
        """
        training = torch.is_grad_enabled() if training is None else training
        opened, whole = self._cut(batch, training, self._alone, stock=stock)
        if routed:
            with self.entered(opened):
                yield whole
            return
        guards.forget_backward()
        with active_step.activate(opened), routing.flex_detour:
            yield whole

    def _open(
        self,
        batch: Any,
        training: bool,
        outer: HandedOver | None,
        sequence_dims: Mapping[str, int | None] | None,
    ) -> tuple[Step, Any]:
        """Build the step of a batch; whatever is wrong is raised by all ranks together."""
        if outer is not None and outer.groups is self._alone:  # on this rank only, as `alone`
            return self._cut(
                batch, training, self._alone, outer, sequence_dims, stock=outer.is_stock
            )
        compare = self.count_batch(training) if outer is None else outer.is_checked
        problem = None
        try:
            _check_not_cut(batch, active_step.opened())
            opened, local = self._cut(
                batch, training, self._groups, outer, sequence_dims, checked=compare
            )
        except Exception as error:  # noqa: BLE001  raised below, when all ranks know
            problem = error
        self.agree(batch, problem, training=training, values=compare)
        return opened, local

    def count_batch(self, training: bool) -> bool:
        """Count a batch, and say whether the ranks compare what it holds."""
        self._num_batches[training] += 1
        return self._num_batches[training] <= self.check_batches

    def agree(
        self,
        batch: Any,
        problem: Exception | None,
        *,
        training: bool,
        values: bool,
    ) -> None:
        """Raise, on all ranks together, what is wrong with a batch on one, or between them.

        Args:
            batch: the whole batch.
            problem: why this rank refuses it, if it does.
            training: as in `step`.
            values: whether to compare contents too.
        """
        groups, fingerprint = self._groups, consistency.Fingerprint()
        try:
            if problem is None:
                fingerprint = consistency.build_fingerprint(batch, values=values)
        except Exception as error:  # noqa: BLE001  raised below, when all ranks know
            problem = error
        problem = consistency.agree(fingerprint, problem, groups.context, self.released)
        if training and groups.data.size > 1:
            problem = consistency.agree_beside(problem, groups.data)
        if problem is not None:
            raise problem

    def _cut(
        self,
        batch: Any,
        training: bool,
        groups: Groups,
        outer: HandedOver | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
        *,
        checked: bool = False,
        stock: bool = False,
    ) -> tuple[Step, Any]:
        """Work out a step and this rank's part of the batch; no rank waits for another."""
        words = self.sequence_dims if sequence_dims is None else sequence_dims
        decided = self._decided if outer is None and sequence_dims is None else {}
        whole = batches.read_batch(batch, sequence_dims=words, decided=decided)
        common: dict[str, Any] = {
            "groups": groups,
            "training": training,
            "algorithm": self.algorithm,
            "kernel": "reference" if groups is self._alone else self.kernel,
            "attention_memory": self.attention_memory,
            "gradient_wire": self.gradient_wire,
            "gpu": self.gpu,
            "is_checked": checked,
            "is_stock": stock,
            "position_edges": self.position_edges,
        }
        if whole.is_handed_over:
            if outer is not None:
                raise ValueError(
                    "cp.step() was given a part of a batch that was handed over whole, and "
                    f"sequence_dims={dict(words)} keeps all of the part whole too. Say where its "
                    "sequence lies: cp.step(part, sequence_dims={...}), {} for the names that are "
                    "known."
                )
            return hand_over(**common), batch
        if stock and whole.documents is not None:
            batch = batches.unpack_documents(batch, whole)
            whole = batches.read_batch(batch, sequence_dims=words, decided=decided)
        transport = groups.context
        layout = self._layout_of(whole, transport.size)
        local = batches.shard_batch(whole, layout=layout, rank=transport.rank)
        device = next(local[path].device for path in whole.dims)
        positions = batches.build_position_ids(whole, device)
        yielded: dict[str | None, list[Any]] = {}
        for path, x in local.items():
            yielded.setdefault(whole.names[path], []).append(x)
        opened = Step(
            layout=layout,
            batch_size=whole.batch_size,
            documents=whole.documents,
            padding=whole.padding,
            position_ids=shard(positions, -1, layout=layout, rank=transport.rank),
            has_position_ids=isinstance(whole.told.get("position_ids"), Tensor),
            yielded=yielded,
            cut=[(local[path], dim) for path, dim in whole.dims.items()],
            outer_losses=None if outer is None else outer.losses,
            **common,
        )
        if outer is not None:
            outer.parts.append(opened)
        return opened, rebuild(batch, local)

    def _layout_of(self, whole: WholeBatch, cp_size: int) -> Layout:
        """Lay a batch out: a pure function of it, so that all ranks come to the same."""
        mask = self.balance or Mask(causal=True)

        def bounds() -> Bounds:
            return mask.bounds(whole.seq_len, documents=whole.documents, padding=whole.padding)

        is_plain = self.balance is None and whole.documents is None and whole.padding is None
        return build_layout(
            self.layout,
            seq_len=whole.seq_len,
            cp_size=cp_size,
            bounds=None if is_plain else bounds,
            shows_padding=whole.shows_padding,
        )

    def position_ids(self) -> Tensor:
        """Return the position ids of this rank's tokens, [B, L], for models that make their own.

        The batch's own if it has some, else counted from the start of each document.
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
        """Return a mask with the documents and padding of the active step, which it carries along.

        attention() with such a mask works after the step has ended, as in reentrant activation
        checkpointing with backward outside.
        """
        step = self._active("mask()")
        return StepMask(causal=causal, window=window, chunk=chunk, spans=spans, step=step)

    def block_mask(
        self,
        mask_mod: MaskMod,
        B: int | None = None,
        H: int | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
    ) -> SequenceMask:
        """Return what ``flex_attention(block_mask=...)`` takes inside the active step.

        The arguments are those of torch's ``create_block_mask``, without lengths: no table of the
        whole row is made, but that of this rank's queries, when a fused kernel needs it. Layers
        share it, and so do steps, as long as nothing that the function captured has changed.

        Args:
            mask_mod: (batch, head, query, key) to whether the query sees the key, in positions of
                the whole row. What it captures is of whole rows.
            B: rows of the mask: 1 if all are alike. By default, we look whether the function asks.
            H: heads of the mask, likewise.
            BLOCK_SIZE: queries and keys of a block.
        """
        self._active("block_mask()")
        size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        return self._row_masks.find(mask_mod, batch=B, heads=H, block_size=size)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Return whole rows in their original order, without padding, on every rank.

        Differentiable: if every rank computes the same loss from the result, gradients averaged
        over ranks are exact.

        Args:
            x: this rank's part, cut along ``dim``.
            dim: the sequence dim.
        """
        step = self._active("unshard()")
        check_held(x, dim, step)
        groups, layout = step.groups, step.layout
        return unshard(x, dim, layout=layout, transport=groups.context, uid=step.uid)

    def unshard_all(self, output: Any) -> Any:
        """Return what a model returned, with every tensor of tokens as whole sequences.

        Dicts, lists, tuples and dataclasses keep their types. Known to be of tokens are: tensors of
        the batch, keys that ``sequence_dims`` names, and what a model of a known library returns
        per token (logits, hidden states). Any other value must be the same on all ranks.
        """
        if isinstance(active_step.opened(), HandedOver):  # its parts were unsharded in their steps
            return output
        step = self._active("unshard_all()")
        changed, others = {}, []
        for leaf in self.output_leaves(output):
            dim = self.token_dim(leaf, step)
            if dim is None:
                others.append(leaf)
            else:
                changed[leaf.path] = self.unshard_value(leaf.value, dim, step)
        differ = self.find_differing([leaf.value for leaf in others])
        if differ:
            leaf = others[differ[0]]
            raise ValueError(
                f"unshard_all() got {outputs.describe(leaf.value)} at output{leaf.path}, which is "
                "not known to hold one value per token and differs between ranks. Use "
                "cp.unshard(x, dim), or return a dict and name the sequence dim of its key: "
                "sequence_dims={'key': 1}."
            )
        return outputs.rebuild(output, changed)

    def output_leaves(self, output: Any) -> list[outputs.Leaf]:
        """Return the values of an output; those of models of known libraries with their dims."""

        def dims(container: Any) -> Mapping[str, int]:
            return adapters.output_dims(self._adapters or (), container)

        return list(outputs.leaves(output, dims))

    def token_dim(self, leaf: outputs.Leaf, step: Step) -> int | None:
        """Return the sequence dim of a value that is known to be of tokens; None for others."""
        x = leaf.value
        if not isinstance(x, Tensor | np.ndarray) or isinstance(step, HandedOver):
            return None
        known = next((dim for local, dim in step.cut if local is x), leaf.dim)
        dim = self.sequence_dims.get(leaf.key, known)
        if dim is None or not -x.ndim <= dim < x.ndim:
            return None
        # Whole already, by unshard(): then it is the same on all ranks.
        is_whole = x.shape[dim] == step.layout.seq_len != step.held_len
        return None if is_whole else dim

    def unshard_value(self, x: Any, dim: int, step: Step) -> Any:
        """Return a tensor or an array of this rank's tokens as whole sequences, where it lay."""
        local = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
        check_held(local, dim, step)
        transport = step.groups.context
        moved = local.to(transport.device) if transport.size > 1 else local
        whole = unshard(moved, dim, layout=step.layout, transport=transport, uid=step.uid)
        whole = whole.to(local.device)
        return whole.numpy() if isinstance(x, np.ndarray) else whole

    def find_differing(self, values: Sequence[Any]) -> list[int]:
        """Return which values the ranks that share sequences disagree about. Collective.

        Ranks may hold different numbers of values: then all of them differ.
        """
        return self.compare(values)[0]

    def compare(self, values: Sequence[Any], flag: bool = False) -> tuple[list[int], bool]:
        """Do what `find_differing` does, and say besides whether any rank has raised a flag."""
        transport = self._groups.context
        if transport.size == 1:
            return [], flag
        device = transport.device
        forms = outputs.digest("\n".join(outputs.form(outputs.Leaf("", x)) for x in values))
        sums = outputs.checksums(values, device)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for number in sums:
            total = total * 31 + number
        state = torch.stack([torch.tensor(x, device=device) for x in (forms, int(flag))] + [total])
        every = state.new_empty(transport.size, 3)
        transport.all_gather(every, state)()
        table = every.tolist()
        flagged = any(row[1] for row in table)
        if any(row[0] != table[0][0] for row in table):
            return list(range(len(values))), flagged
        if all(row[2] == table[0][2] for row in table):
            return [], flagged
        each = sums.new_empty(transport.size, len(values))
        transport.all_gather(each, sums)()
        differs = (each != each[0]).any(0).tolist()
        return [at for at, differ in enumerate(differs) if differ], flagged

    def check_released(self) -> None:
        """Compare what has left former steps; raise on all ranks if it differs. Collective."""
        transport = self._groups.context
        digest, names = self.released.take(transport.device)
        every = digest.new_empty(transport.size, 1)
        transport.all_gather(every, digest)()
        if bool((every != every[0]).any()):
            raise consistency.differing(names)

    def shift_labels(self, labels: Tensor) -> Tensor:
        """Return, for each of this rank's tokens, the label of the next one of its document.

        For metrics of the next token: score the logits of all tokens against it, without slicing
        either. -100 where there is no next token; the next one may be another rank's.

        Args:
            labels: [B, L], this rank's part.

        Example:
            >>> cp = ContextParallel(None)
            >>> with cp.step({"labels": torch.tensor([[5, 6, 7]])}) as local:
            ...     cp.shift_labels(local["labels"])
            tensor([[   6,    7, -100]])
        """
        return local_targets(labels, self._active("shift_labels()"))

    def token_mask(self) -> Tensor:
        """Return which of this rank's tokens are no padding, bool [B, L]: for metrics over tokens.

        Neither the batch's padding nor what fills up the part of a rank, where the tokens of a
        sequence cannot be shared evenly.
        """
        step = self._active("token_mask()")
        real = step.layout.is_real(step.cp_rank).expand(step.batch_size, -1)
        if step.padding is not None:
            hidden = torch.from_numpy(step.padding)
            real = real & ~shard(hidden, 1, layout=step.layout, rank=step.cp_rank, fill=True)
        return real.to(step.position_ids.device)

    def pool(self, x: Tensor, how: Literal["first", "last", "mean"]) -> Tensor:
        """Return one vector per sample, the same on every rank: for classifiers and embeddings.

        Padding is left out. Differentiable: if every rank computes the same loss from the result,
        gradients averaged over ranks are exact.

        Args:
            x: [B, L, ...], this rank's part.
            how: the ``first`` token that is no padding, the ``last`` one, or the ``mean`` over all.

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
        check_held(x, 1, step)
        if step.documents is not None and (step.documents > 0).any():
            raise ValueError(
                "pool() gives one vector per sample, but the batch holds samples of several "
                "documents. Give each document a sample of its own, or use cp.unshard(x, 1)."
            )
        weights = pooling_weights(step, how).to(x.device, x.dtype)
        part = (x * weights.view(*weights.shape, *[1] * (x.dim() - 2))).sum(1, keepdim=True)
        ranks = build_layout("contiguous", seq_len=step.cp_size, cp_size=step.cp_size)
        parts = unshard(part, 1, layout=ranks, transport=step.groups.context, uid=step.uid)
        return parts.sum(1)

    def check_same(self, loss: Tensor) -> None:
        """Refuse, while batches are still compared, a loss that ranks disagree about."""
        if self._num_batches[True] > self.check_batches:
            return
        seen = loss.detach().double().reshape(1).to(self._groups.context.device)
        for transport in (self._groups.context, self._groups.data):
            values = seen.new_empty(transport.size, *seen.shape)
            transport.all_gather(values, seen)()
            seen = torch.stack(values.nan_to_num().aminmax())
        lowest, highest = seen.tolist()
        if lowest != highest:
            raise ValueError(
                f"The loss is not the same on all ranks, but between {lowest} and {highest}: a "
                "part of it is computed from this rank's tokens alone. Use token_mean() for cross "
                "entropy, and global_mean(total, count) from lightning_cp.loss for other terms."
            )

    def same_rows(self, batch: T) -> T:
        """Return, on every data rank, the batch of the first."""
        return self._groups.data.first(batch)

    def first_batch(self, batch: T) -> T:
        """Return, on all ranks that share rows, the batch of the first."""
        return self._groups.context.first(batch)

    def averaged(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its mean over data x context, as DDP does with gradients."""
        return self.summed(x).div_(self._groups.context.size * self._groups.data.size)

    def summed(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its sum over data x context."""
        self._groups.context.all_reduce(x)
        self._groups.data.all_reduce(x)
        return x

    def paused(self) -> AbstractContextManager[None]:
        """Switch context parallelism off inside a step: whole rows, on this rank alone.

        For ``generate()``, for a second model that is not sharded, for anything that does not see
        this rank's part.
        """
        return active_step.paused()

    def unsharded(self, *modules: nn.Module) -> Unsharded:
        """Leave attention calls as they are: their keys are not cut, or are not the sequence.

        ``with cp.unsharded():`` for the calls inside it; ``cp.unsharded(module)`` for all calls of
        a module, until ``undo()`` of what is returned. For cross-attention to keys that every rank
        holds whole, and for modules that attend over something else than the sequence.
        """
        return Unsharded(modules)

    recompute = staticmethod(_recompute)

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
