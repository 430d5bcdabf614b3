# SPDX-License-Identifier: Apache-2.0
"""What runs between backward and the update of the weights: hooks that read gradients, clipping.

They see scalars of sharded gradients as one device would. The update itself runs as torch wrote it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from lightning.pytorch.plugins import Precision
from torch import optim
from torch.optim import Optimizer

from lightning_cp.fsdp.scalars import unsharded_scalars
from lightning_cp.lightning.private import around_hooks
from lightning_cp.private.modules import has_step_hooks

# They update each element from its own gradient and state, and compute no scalar of a tensor.
_ELEMENTWISE: Final = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


@contextmanager
def hooks_read_scalars(plugin: Precision, optimizer: Optimizer) -> Iterator[None]:
    """Unshard scalars that hooks and clipping compute; in some optimizers, also in their update.

    In those that may compute scalars, too, and in those of sharded and replicated parameters, whose
    multi-tensor functions the mode calls separately.

    A mode costs microseconds for each of the update's functions.

    Args:
        plugin: the Trainer's precision plugin.
        optimizer: the optimizer that steps.
    """
    with ExitStack() as stack:

        def call(hooks: Callable[[], None]) -> None:
            kinds = {type(p) for group in optimizer.param_groups for p in group["params"]}
            is_plain = type(optimizer) in _ELEMENTWISE and len(kinds) == 1
            if is_plain and not has_step_hooks(optimizer):
                with unsharded_scalars():
                    return hooks()
            stack.enter_context(unsharded_scalars())
            return hooks()

        with around_hooks(plugin, call):
            yield
