# SPDX-License-Identifier: Apache-2.0
"""Token-wise modules computed in tiles of tokens, so that recomputing a layer takes less memory.

`tile_modules(model)` finds them by a probe (`probe.py`): MLPs, norms, shared experts. A tiled
module saves its input for backward and nothing else. Backward computes one tile after another,
forward and gradients, and sums the gradients of the weights in float32 or wider.
"""

import math
from collections.abc import Callable, Iterator, Sequence
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
from lightning_cp.memory.probe import Verdict, has_hooks_inside, has_units_inside
from lightning_cp.memory.replace import Handle, Replacement, is_replaced, replace_modules
from lightning_cp.precision import autocast_off
from lightning_cp.torch_private import outside_graphs, without_tensor_hooks

TileTokens = int | Literal["auto"]

MIN_TOKENS: Final = 2048
"""Tokens of a tile, at least, under ``auto``: with fewer, matrix products become slower."""

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
        tile_tokens: tokens of a tile, over all samples of the batch, at most. ``auto`` divides so
            that what autograd saves for one tile takes about as much as the module's input, into
            tiles of at least 2048 tokens. It depends on local shapes only: all ranks that hold
            equally many tokens use equal tiles.
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


@dataclass(eq=False)
class _Tiled(Replacement):
    """A module that is computed in tiles.

    Args:
        tile_tokens: tokens of a tile.
    """

    state = "tiled"
    # Projections of attention save little, and would run a third time.
    leaves_projections = True

    tile_tokens: TileTokens = "auto"
    verdicts: dict[Any, Verdict] = field(default_factory=dict)

    @outside_graphs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call a module in tiles, where its arguments and its state allow it."""
        if not self.is_active:  # somebody had wrapped the forward before it was restored
            return self.call(*args, **kwargs)
        values = [*args, *kwargs.values()]
        x = values[0] if len(values) == 1 else None
        is_plain = isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dim() > 1
        if not isinstance(x, Tensor) or not is_plain or not x.is_floating_point():
            self.decide(Verdict("it is called with something else than one tensor"))
            return self.call(*args, **kwargs)
        call = self.call if args else partial(_call_by_name, self.call, next(iter(kwargs)))
        num = self.num_tiles(x, call)
        if num == 1:
            return call(x)
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        job = _Job(self.module, call, num, _tile_dim(x), tuple(parameters), x.requires_grad)
        if not torch.is_grad_enabled() or not (parameters or x.requires_grad):
            return job.forward(x, grad=False)
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # saved by `_Input` only if it requires a gradient
        box: list[Any] = []
        saved = _Input.apply(x, box)  # type: ignore[no-untyped-call]
        return _InTiles.apply(saved, job, box, *parameters.values())  # type: ignore[no-untyped-call]

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
            num = min(max(2, round(verdict.saved)), num_tokens // least)
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


@dataclass(frozen=True)
class _Job:
    """One call of a tiled module.

    Args:
        module: the module.
        call: its forward, without tiles and hooks.
        num: number of tiles.
        dim: dim of the input that is divided.
        names: of the parameters that require gradients.
        needs_input_grad: whether the input requires a gradient.
    """

    module: nn.Module
    call: Callable[[Tensor], Tensor]
    num: int
    dim: int
    names: tuple[str, ...]
    needs_input_grad: bool

    def forward(self, x: Tensor, *, grad: bool) -> Tensor:
        """Return the output, computed in tiles, without a graph.

        Args:
            x: the input.
            grad: whether the caller has gradients enabled.
        """
        out: Tensor | None = None
        start = 0
        for tile in x.tensor_split(self.num, self.dim):
            with _private_graph(x, grad=grad):
                y = self.call(tile.detach().contiguous()).detach()
            if out is None:
                out = y.new_empty((*x.shape[:-1], y.shape[-1]))
            length = tile.shape[self.dim]
            out.narrow(self.dim, start, length).copy_(y)
            start += length
        if out is None:
            raise AssertionError("an input without tiles")
        return out

    def backward(self, x: Tensor, dout: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradients of the input and of the parameters."""
        # By name: FSDP2 may have gathered into other objects since forward.
        own = dict(self.module.named_parameters())
        parameters = [own[name] for name in self.names]
        dx = torch.empty_like(x) if self.needs_input_grad else None
        sums: list[Tensor | None] = [None for _ in parameters]
        tiles = x.tensor_split(self.num, self.dim)
        douts = dout.tensor_split(self.num, self.dim)
        start = 0
        # Hooks of a parameter are for its gradient, which autograd passes to them after backward.
        with without_tensor_hooks(parameters):
            for tile, grad in zip(tiles, douts, strict=True):
                piece = tile.detach().contiguous().requires_grad_(self.needs_input_grad)
                with torch.enable_grad():
                    y = self.call(piece)
                inputs = [piece, *parameters] if self.needs_input_grad else parameters
                # As in a separate backward: operations run in the dtype that forward chose.
                with autocast_off(x.device.type):
                    found = list(torch.autograd.grad(y, inputs, grad, allow_unused=True))
                if dx is not None:
                    piece_grad = found.pop(0)
                    part = dx.narrow(self.dim, start, tile.shape[self.dim])
                    part.zero_() if piece_grad is None else part.copy_(piece_grad)
                start += tile.shape[self.dim]
                add_gradients(sums, found)
        cast = zip(sums, parameters, strict=True)
        return dx, [None if total is None else total.to(p.dtype) for total, p in cast]


@contextmanager
def _private_graph(x: Tensor, *, grad: bool) -> Iterator[None]:
    """Compute without a graph; under autocast with one, if the caller has gradients enabled.

    No saved-tensor hook of the caller sees it. Autocast may cache weights that it casts under
    no_grad, without gradients, and use them where gradients are needed (pytorch/pytorch#112583).
    """
    with ExitStack() as stack:
        if grad and torch.is_autocast_enabled(x.device.type):
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
    def forward(ctx: Any, x: Tensor, box: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        box.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, None]:
        return dx, None


class _InTiles(torch.autograd.Function):
    """A module in tiles. The weights are inputs, so that their gradients are returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, job: _Job, box: list[Any], *_: Tensor) -> Tensor:
        ctx.job, ctx.box = job, box
        device = x.device.type
        ctx.autocast = None
        if torch.is_autocast_enabled(device):
            ctx.autocast = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
        return job.forward(x, grad=True)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # once_differentiable raises only where the result depends on `dout`; it depends on inputs.
        twice = torch.is_grad_enabled() and not dout.requires_grad
        return _InTiles._gradients(ctx, dout.detach().requires_grad_() if twice else dout)

    @staticmethod
    @once_differentiable
    def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.box[0].saved_tensors
        with _autocast(x.device.type, ctx.autocast):
            dx, gradients = ctx.job.backward(x, dout)
        return dx, None, None, *gradients


def _autocast(
    device_type: str, state: tuple[torch.dtype, bool] | None
) -> AbstractContextManager[Any]:
    """Return the autocast of a forward: backward runs without it, on another thread on GPUs."""
    if state is None:
        return autocast_off(device_type)
    dtype, cache = state
    return torch.autocast(device_type, dtype=dtype, cache_enabled=cache)
