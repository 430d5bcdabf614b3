# SPDX-License-Identifier: Apache-2.0
"""Replicated parameters: every rank holds all of them, and gradients are averaged as by DDP.

All of a model, or those that FSDP2 cannot hold, beside its shards. At the end of each backward
pass, whoever calls it, gradients are summed over data x context in buckets; half-precision ones in
float32, as FSDP2 does here. Nothing is gathered in forward.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cp.private.autograd import after_backward, backward_id
from lightning_cp.private.modes import plain_functions
from lightning_cp.step.precision import accumulation_dtype

BUCKET_BYTES: Final = 1 << 27
"""Bytes that are summed together. A larger gradient has a bucket of its own."""


def average_gradients(owner: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Average gradients over the ranks in each backward from now on; return what ends it.

    Args:
        owner: the module whose parameters, except DTensors, are replicated, with equal values on
            all ranks.
        mesh: data x context; several axes with hybrid sharding.
    """
    replicas = _Replicas(owner, mesh)
    _replicas[owner] = replicas

    def stop() -> None:
        replicas.stop()
        _replicas.pop(owner, None)

    return stop


def average_new(owner: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Average gradients of parameters that were made since, too. Collective if there are any.

    They get the values of rank 0. Called often: looks only where optimizers train more parameters.
    """
    if owner in _replicas:
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        _replicas[owner].add_trained(owner, groups)


def is_replicated(owner: nn.Module) -> bool:
    """Return whether every rank holds all parameters of a module, and averages their gradients."""
    return owner in _replicas and not _replicas[owner].has_shards


def set_averaging(owner: nn.Module, *, enabled: bool) -> None:
    """Set whether backward averages gradients, or accumulates those of this rank."""
    if owner in _replicas:
        _replicas[owner].enabled = enabled


def of_rank_0(x: Tensor, device: torch.device) -> Tensor:
    """Return the values that a tensor has on rank 0. Collective over all ranks."""
    staged = x.detach().to(device).clone(memory_format=torch.contiguous_format)
    # As bytes: not every backend supports every dtype.
    dist.broadcast(staged.view(-1).view(torch.uint8), 0)
    return staged


class _Replicas:
    """The parameters of a module that every rank holds."""

    def __init__(self, owner: nn.Module, mesh: DeviceMesh) -> None:
        self.enabled = True
        self._num_trained = 0
        self._groups, self._size = [mesh.get_group(x) for x in range(mesh.ndim)], mesh.size()
        named = dict(owner.named_parameters())
        self._parameters = {n: p for n, p in named.items() if not isinstance(p, DTensor)}
        self.has_shards = len(self._parameters) < len(named)
        self._backward = -1
        self._is_alone = self._size == 1 and not self.has_shards
        self._handles: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        # Frozen ones too: a callback may unfreeze them later. And shards: all ranks reduce theirs,
        # while a replicated parameter may have a gradient on some ranks only.
        self._hook(named.values() if self._parameters else ())

    def add_trained(self, owner: nn.Module, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Add parameters of optimizers that are new; raise for those that are not the module's."""
        num_trained = sum(len(group) for group in groups)
        if self._is_alone or num_trained == self._num_trained:
            return
        self._num_trained = num_trained
        names = {p: name for name, p in owner.named_parameters()}
        known = set(self._parameters.values())
        for parameter in (p for group in groups for p in group if not isinstance(p, DTensor)):
            if parameter not in names:
                raise ValueError(
                    f"An optimizer trains a parameter of shape {tuple(parameter.shape)} that is no "
                    "parameter of the module: it is not saved, and its gradients are not averaged "
                    "over the ranks. Assign it to the module (self.x = nn.Parameter(...), "
                    "nn.ParameterList), and make optimizers in configure_optimizers(), where the "
                    "parameters are sharded."
                )
            if parameter not in known:
                self._parameters[names[parameter]] = parameter
                with torch.no_grad():
                    parameter.copy_(of_rank_0(parameter, parameter.device))
        self._hook(names if self._parameters else ())

    def _hook(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the gradients of parameters that are not noted yet."""
        for parameter in parameters:
            if self._is_alone or parameter in self._handles or not parameter.is_floating_point():
                continue
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)
            note: Any = parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            self._handles[parameter] = note
            parameter.requires_grad_(is_trained)

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()

    def _note(self, parameter: Tensor) -> None:
        """Average at the end of this backward pass; called with the first gradient, and others."""
        if isinstance(parameter.grad, DTensor) and not isinstance(parameter, DTensor):
            # Of a number that was multiplied into a DTensor of tensor ranks.
            parameter.grad = parameter.grad.full_tensor()
        backward = backward_id()
        # Another number, not "none yet": the pass before may have raised.
        if self.enabled and self._size > 1 and backward != self._backward:
            self._backward = backward
            # Ranks come here at different times, before or after FSDP2 has queued the call in which
            # it reduces its last gradients: behind that, on all ranks.
            after_backward(partial(after_backward, self._average))

    def _average(self) -> None:
        with torch.no_grad(), plain_functions():
            for bucket in self._buckets():
                self._average_bucket(bucket)

    def _buckets(self) -> Iterator[list[nn.Parameter]]:
        """Yield trained parameters of one dtype and device, the same ones on all ranks."""
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise TypeError(
                        f"`{name}` has a sparse gradient, which cannot be averaged over the ranks. "
                        "Use nn.Embedding(sparse=False)."
                    )
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for (dtype, _), parameters in kinds.items():
            itemsize = accumulation_dtype(dtype).itemsize
            bucket: list[nn.Parameter] = []
            num_bytes = 0
            for parameter in parameters:
                if bucket and num_bytes + parameter.numel() * itemsize > BUCKET_BYTES:
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append(parameter)
                num_bytes += parameter.numel() * itemsize
            yield bucket

    def _average_bucket(self, bucket: Sequence[nn.Parameter]) -> None:
        dtype = accumulation_dtype(bucket[0].dtype)
        device = bucket[0].device
        # Which parameters this rank has used: routed experts differ between ranks.
        used = torch.tensor([float(p.grad is not None) for p in bucket], dtype=dtype)
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        parts = [zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in bucket]
        flat = torch.cat([*(x.to(dtype) for x in parts), used.to(device, non_blocking=True)])
        for group in self._groups:
            dist.all_reduce(flat, group=group)
        flat.div_(self._size)
        *means, used = torch.split(flat, [*(p.numel() for p in bucket), len(bucket)])
        for index, (parameter, mean) in enumerate(zip(bucket, means, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif used[index] > 0:
                parameter.grad = mean.view_as(parameter).to(parameter.dtype, copy=True)


_replicas: Final[WeakKeyDictionary[nn.Module, _Replicas]] = WeakKeyDictionary()
"""Those of each module; not an attribute of it: process groups cannot be copied or pickled."""
