# SPDX-License-Identifier: Apache-2.0
"""Token-wise modules computed in tiles of tokens, so that recomputing a layer takes less memory.

`tile_modules(model)` finds them by a probe (`probe.py`): MLPs, norms, shared experts. A tiled
module saves its input for backward and nothing else. Backward computes one tile after another,
forward and gradients, and sums the gradients of the weights in float32 or wider.

What follows a tiled norm, an MLP or projections, does not save the norm's output: backward computes
it again from the norm's input.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from lightning_cp.gradients import add_gradients
from lightning_cp.memory.probe import Verdict, has_hooks_inside, has_matrices, has_units_inside
from lightning_cp.memory.replace import Handle, Replacement, is_replaced, replace_modules
from lightning_cp.precision import autocast_off
from lightning_cp.private.autograd import backward_id, saved_tensor_hooks
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.private.modules import tensor_version, without_tensor_hooks

TileTokens = int | Literal["auto"]

MIN_TOKENS: Final = 2048
"""Tokens of a tile, at least, under ``auto``: with fewer, matrix products become slower."""

_NORM_TILES: Final = 16
"""Tiles of a module without matrices under ``auto``: in backward it takes several times what it
saves, in float32, and tiles cost it little."""

_MIN_SAVED: Final = 1.0
"""Bytes saved besides the input, over those of the input, from which on tiles are worth it."""


def tile_modules(
    model: nn.Module,
    *,
    tile_tokens: TileTokens = "auto",
    shard_modules: Sequence[str] | None = None,
) -> Handle:
    """Compute the token-wise modules of a model in tiles of tokens.

    A module is tiled if a probe shows that it computes each token by itself; the loss and all
    gradients are those of the plain model, but for the rounding of sums. Looked at are the parts of
    the blocks (decoder layers), and norms anywhere. Under activation checkpointing
    (``use_reentrant=False``), the recompute of a layer that ends with a tiled module stops at the
    module's input, so that the module runs as often as without tiles.

    Call it before or after `fully_shard`, PEFT and `enable`. The decision about a module with
    sharded or meta parameters is made when it is called.

    Args:
        model: a model, a LightningModule that holds some, or a single block.
        tile_tokens: tokens of a tile, over all samples of the batch, at most. ``auto`` divides an
            MLP so that what autograd saves for one tile takes about as much as its input, and a
            norm by 16, into tiles of at least 2048 tokens. It depends on local shapes only: all
            ranks that hold equally many tokens use equal tiles.
        shard_modules: class names or name patterns of the blocks, as in `shard_parameters`.

    Returns:
        A handle: ``report()`` lists what is tiled and what is not; ``remove()`` restores the model.

    Example:
        >>> layer = nn.Sequential()
        >>> layer.mlp = nn.Sequential(nn.Linear(4, 9), nn.SiLU(), nn.Linear(9, 4))
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
        >>> handle = tile_modules(model, tile_tokens=2)
        >>> print(handle)
        layers.*.mlp (1): tiled
        >>> layer.mlp(torch.ones(1, 5, 4)).shape
        torch.Size([1, 5, 4])
        >>> handle.remove()
    """
    if tile_tokens != "auto" and (isinstance(tile_tokens, bool) or not _is_count(tile_tokens)):
        raise ValueError(
            f"tile_tokens={tile_tokens!r}: give the number of tokens of a tile, 1 or more, or "
            "'auto'."
        )
    return replace_modules(model, _Tiled, shard_modules=shard_modules, tile_tokens=tile_tokens)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


class _Projection(Replacement):
    """A single matrix: it saves no output of a tiled norm.

    It is not computed in tiles: it saves little else, and would run a third time.
    """

    state = "a projection"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and let backward compute the norm before it again."""
        if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
            return self.call(*args, **kwargs)
        return _project(self.call, args[0], self)


def _project(call: Callable[[Any], Any], x: Any, reader: Replacement) -> Any:
    source = _source_of(x, reader)
    if source is None:
        return call(x)
    with _recomputing(x, source):
        return call(x)


@dataclass(eq=False)
class _Tiled(Replacement):
    """A module that is computed in tiles.

    Args:
        tile_tokens: tokens of a tile.
    """

    state = "tiled"
    projection = _Projection

    tile_tokens: TileTokens = "auto"
    verdicts: dict[Any, Verdict] = field(default_factory=dict)

    @outside_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call a module in tiles, where its arguments and its state allow it."""
        values = [*args, *kwargs.values()]
        x = values[0] if len(values) == 1 else None
        is_plain = isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dim() > 1
        if not isinstance(x, Tensor) or not is_plain or not x.is_floating_point():
            self.decide(Verdict("it is called with something else than one tensor"))
            return self.call(*args, **kwargs)
        call = self.call if args else partial(_call_by_name, self.call, next(iter(kwargs)))
        num = self.num_tiles(x, call)
        if num == 1:
            return _project(call, x, self)
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        needs_grad = torch.is_grad_enabled() and bool(parameters or x.requires_grad)
        source = _source_of(x, self) if needs_grad else None
        job = _Job(self, call, num, tuple(parameters), x, _Saved(source))
        if not needs_grad:
            return job.forward(x, grad=False)
        if source is None:
            if not x.requires_grad:
                x = x.detach().requires_grad_()  # saved by `_Input` only if it requires a gradient
            x = _Input.apply(x, job.saved)  # type: ignore[no-untyped-call]
        y: Tensor = _InTiles.apply(x, job, *parameters.values())  # type: ignore[no-untyped-call]
        job.version = tensor_version(y)
        return y

    def first_verdict(self) -> Verdict | None:
        """Probe the module, unless tiles would be wrong or slow whatever it computes."""
        obstacle = self.obstacle_inside()
        return Verdict(obstacle) if obstacle else super().first_verdict()

    def check(self, x: Tensor, call: Callable[[Tensor], Any]) -> Verdict:
        """Probe the module, and whether tiles save memory."""
        verdict = super().check(x, call)
        if not verdict.obstacle and verdict.saved < _MIN_SAVED:
            return Verdict("autograd saves little more than its input: nothing to gain")
        return verdict

    def verdict(self, x: Tensor, call: Callable[[Tensor], Any]) -> Verdict:
        """Return the verdict for inputs like this one; probe the module if there is none yet."""
        parameters = list(self.module.parameters())
        key = (
            (x.dim(), x.shape[-1], x.dtype, x.device),
            tuple((id(part), getattr(part, "p", None)) for part in self.module.modules()),
            tuple((p.dtype, p.requires_grad) for p in parameters),
        )
        if key not in self.verdicts:
            self.verdicts[key] = self.verdict_like(x, call)
        return self.verdicts[key]

    def obstacle_inside(self) -> str:
        """Return why tiles would be wrong or slow now, whatever the module computes."""
        if has_units_inside(self.module):
            return "an FSDP2 unit inside it would be gathered for every tile"
        if has_hooks_inside(self.module):
            return "hooks on modules inside it would see tiles instead of whole tensors"
        return ""

    def num_tiles(self, x: Tensor, call: Callable[[Tensor], Any]) -> int:
        """Return the number of tiles for an input; 1 where the module is to be called plainly."""
        dim = _tile_dim(x)
        num_tokens = math.prod({0: x.shape[0], dim: x.shape[dim]}.values())
        least = MIN_TOKENS if self.tile_tokens == "auto" else self.tile_tokens
        if num_tokens <= least:
            return 1
        self.obstacle = self.obstacle_inside()
        if not self.obstacle and any(isinstance(p, DTensor) for p in self.module.parameters()):
            self.obstacle = "its parameters are sharded while it is called"
        if self.obstacle:  # of this call; hooks may go again
            return 1
        verdict = self.verdict(x, call)
        self.decide(verdict)
        if verdict.obstacle:
            return 1
        num = -(-num_tokens // least)
        if self.tile_tokens == "auto":
            wanted = max(2, round(verdict.saved)) if has_matrices(self.module) else _NORM_TILES
            num = min(wanted, num_tokens // least)
        return min(num, x.shape[dim])


def is_tiled(module: nn.Module) -> bool:
    """Return whether a module is computed in tiles, or may be."""
    return is_replaced(module, _Tiled)


def _tile_dim(x: Tensor) -> int:
    """Return the dim that is divided: the tokens; of several dims, as of heads, the longest."""
    dims = range(1 if x.dim() > 2 else 0, x.dim() - 1)
    return max(dims, key=lambda dim: x.shape[dim])


def _call_by_name(call: Callable[..., Any], name: str, x: Tensor) -> Any:
    return call(**{name: x})


class _Saved:
    """The input of a tiled module, for backward.

    Args:
        source: the tiled norm whose output it is: it is not saved, but computed again, tile by
            tile, from what the norm has saved. None for an input that autograd saves.
    """

    def __init__(self, source: "_Job | None") -> None:
        self.source = source
        self.ctx: Any = None  # of `_Input`, which saves it
        self._x: Tensor | None = None
        self._backward = -1

    def tiles(self, num: int, dim: int) -> Iterator[Tensor]:
        """Yield the input in tiles."""
        if self.source is not None:
            yield from self.source.output_tiles(num, dim)
            return
        # Activation checkpointing returns a saved tensor only once in a backward.
        if self._x is None or self._backward != backward_id():
            (self._x,), self._backward = self.ctx.saved_tensors, backward_id()
        yield from self._x.tensor_split(num, dim)

    def free(self) -> None:
        """Forget the input: the module's own backward is the last to need it."""
        self._x = None


class _Region:
    """The hooks for saved tensors, of activation checkpointing, inside which it was created.

    Weak references: those hooks hold the checkpoint of their layer, which would stay in memory as
    long as the graph of the step.
    """

    def __init__(self) -> None:
        self._hooks = [_weak(hook) for hook in saved_tensor_hooks() or ()]

    def is_current(self) -> bool:
        """Return whether its hooks are the innermost ones now."""
        return [ref() for ref in self._hooks] == list(saved_tensor_hooks() or ())


def _weak(hook: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    return weakref.WeakMethod(hook) if inspect.ismethod(hook) else weakref.ref(hook)


class _Job:
    """One call of a tiled module.

    Args:
        tiled: the module.
        call: its forward, without tiles and hooks.
        num: number of tiles.
        names: of the parameters that require gradients.
        x: the input.
        saved: what backward has of it.
    """

    def __init__(
        self,
        tiled: _Tiled,
        call: Callable[[Tensor], Tensor],
        num: int,
        names: tuple[str, ...],
        x: Tensor,
        saved: _Saved,
    ) -> None:
        self.module, self.name, self.call = tiled.module, tiled.name, call
        self.num, self.names, self.saved = num, names, saved
        self.dim = _tile_dim(x)
        self.shape, self.dtype, self.device_type = x.shape, x.dtype, x.device.type
        self.needs_input_grad = x.requires_grad
        self.region = _Region()
        self.version: int | None = None  # of the output
        self._output: Tensor | None = None
        self._backward = -1
        self._autocast: tuple[torch.dtype, bool] | None = None
        if torch.is_autocast_enabled(self.device_type):
            dtype = torch.get_autocast_dtype(self.device_type)
            self._autocast = dtype, torch.is_autocast_cache_enabled()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast of forward: backward runs without it, on another thread on GPUs."""
        if self._autocast is None:
            return autocast_off(self.device_type)
        dtype, cache = self._autocast
        return torch.autocast(self.device_type, dtype=dtype, cache_enabled=cache)

    def forward(self, x: Tensor, *, grad: bool) -> Tensor:
        """Return the output, computed in tiles, without a graph.

        Args:
            x: the input.
            grad: whether the caller has gradients enabled.
        """
        tiles = x.tensor_split(self.num, self.dim)
        return self._join(self._tile(tile, grad=grad) for tile in tiles)

    def output(self) -> Tensor:
        """Return the output once more, in backward; once for all projections."""
        if self._output is None or self._backward != backward_id():
            self._output = self._join(self.output_tiles(self.num, self.dim))
            self._backward = backward_id()
        return self._output

    def output_tiles(self, num: int, dim: int) -> Iterator[Tensor]:
        """Yield the output once more, in backward, in tiles."""
        for tile in self.saved.tiles(num, dim):
            with self.autocast():
                y = self._tile(tile, grad=True)
            yield y

    def _tile(self, tile: Tensor, *, grad: bool) -> Tensor:
        with _private_graph(self.device_type, grad=grad):
            return self.call(tile.detach().contiguous()).detach()

    def _join(self, tiles: Iterable[Tensor]) -> Tensor:
        out: Tensor | None = None
        start = 0
        for y in tiles:
            if out is None:
                out = y.new_empty((*self.shape[:-1], y.shape[-1]))
            length = y.shape[self.dim]
            out.narrow(self.dim, start, length).copy_(y)
            start += length
        if out is None:
            raise AssertionError("an input without tiles")
        return out

    def backward(self, dout: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input and of the parameters."""
        # By name: FSDP2 may have gathered into other objects since forward.
        own = dict(self.module.named_parameters())
        parameters = [own[name] for name in self.names]
        dx: Tensor | None = None
        sums: list[Tensor | None] = [None for _ in parameters]
        tiles = self.saved.tiles(self.num, self.dim)
        douts = dout.tensor_split(self.num, self.dim)
        start = 0
        # Hooks of a parameter are for its gradient, which autograd passes to them after backward.
        with without_tensor_hooks(parameters):
            for tile, grad in zip(tiles, douts, strict=True):
                piece = tile.detach().contiguous().requires_grad_(self.needs_input_grad)
                with torch.enable_grad(), self.autocast():
                    y = self.call(piece)
                inputs = [piece, *parameters] if self.needs_input_grad else parameters
                # As in a separate backward: operations run in the dtype that forward chose.
                with autocast_off(self.device_type):
                    found = list(torch.autograd.grad(y, inputs, grad, allow_unused=True))
                if self.needs_input_grad:
                    # Only now: the first tile may have recomputed the layer.
                    dx = dout.new_empty(self.shape, dtype=self.dtype) if dx is None else dx
                    piece_grad = found.pop(0)
                    part = dx.narrow(self.dim, start, tile.shape[self.dim])
                    part.zero_() if piece_grad is None else part.copy_(piece_grad)
                start += tile.shape[self.dim]
                add_gradients(sums, found)
        self.saved.free()
        self._output = None
        cast = zip(sums, parameters, strict=True)
        return dx, [None if total is None else total.to(p.dtype) for total, p in cast]


def _source_of(x: object, reader: Replacement) -> _Job | None:
    """Return the call of a tiled norm whose output a tensor is, if backward can compute it again.

    It can in the region of activation checkpointing in which the norm was called, and while the
    FSDP2 unit of the norm is gathered. Both are the same when the region is recomputed.

    Args:
        x: the input of a module.
        reader: the module.
    """
    job = getattr(x.grad_fn, "job", None) if isinstance(x, Tensor) else None
    if not isinstance(x, Tensor) or not isinstance(job, _Job) or has_matrices(job.module):
        return None
    is_unchanged = tensor_version(x) == job.version and job.region.is_current()
    return job if is_unchanged and reader.finder.share_units(job.name, reader.name) else None


@contextmanager
def _recomputing(x: Tensor, source: _Job) -> Iterator[None]:
    """Let autograd not save the output of a norm, but compute it again in backward."""
    pack_other, unpack_other = saved_tensor_hooks() or (_identity, _identity)
    # Not the tensor itself: autograd holds its hooks as long as what they have packed.
    whole = x.data_ptr(), x.numel(), x.dtype

    def pack(tensor: Tensor) -> Any:
        if tensor.is_contiguous() and (tensor.data_ptr(), tensor.numel(), tensor.dtype) == whole:
            return source, tensor.shape
        return None, pack_other(tensor)

    with saved_tensors_hooks(pack, partial(_unpack, unpack_other)):
        yield


def _unpack(unpack_other: Callable[[Any], Tensor], packed: tuple[_Job | None, Any]) -> Tensor:
    source, value = packed
    return unpack_other(value) if source is None else source.output().view(value)


@contextmanager
def _private_graph(device_type: str, *, grad: bool) -> Iterator[None]:
    """Compute without a graph; under autocast with one, if the caller has gradients enabled.

    No saved-tensor hook of the caller sees it. Autocast may cache weights that it casts under
    no_grad, without gradients, and use them where gradients are needed (pytorch/pytorch#112583).
    """
    with ExitStack() as stack:
        if grad and torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(_detached, _identity))
        else:
            stack.enter_context(torch.no_grad())
        yield


def _detached(x: Tensor) -> Tensor:
    return x.detach()


def _identity(x: Tensor) -> Tensor:
    return x


class _Input(torch.autograd.Function):
    """Saves the input of a tiled module, before the module is computed.

    A recompute under activation checkpointing ends with the last tensor that is needed: here, if
    nothing behind the module saves anything.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: _Saved) -> Tensor:
        ctx.save_for_backward(x)
        saved.ctx = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None]:
        return dx, None


class _InTiles(torch.autograd.Function):
    """A module in tiles. The weights are inputs, so that their gradients are returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, job: _Job, *_: Tensor) -> Tensor:
        ctx.job = job
        return job.forward(x, grad=True)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable raises only where the result depends on `dout`; it depends on inputs.
        twice = torch.is_grad_enabled() and not dout.requires_grad
        return _InTiles._gradients(ctx, dout.detach().requires_grad_() if twice else dout)

    @staticmethod
    @once_differentiable
    def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dx, gradients = ctx.job.backward(dout)
        return dx, None, *gradients
