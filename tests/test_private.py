"""What `lightning_cp.private` changes of torch is undone."""

import torch
from torch.overrides import TorchFunctionMode

from lightning_cp.private import modes, modules


def test_hooks_of_leaves_are_put_back():
    leaf = torch.ones(2, requires_grad=True)
    calls = []
    leaf.register_hook(calls.append)
    with modules.without_tensor_hooks([leaf]):
        torch.autograd.grad((leaf * 2).sum(), leaf)
    assert calls == []
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert len(calls) == 1


def test_modes_entered_inside_without_modes_work_where_functions_are_plain():
    """FlexAttention traces mask functions with a mode: inside our own code, too."""

    class Seen(TorchFunctionMode):
        num = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    outer, inner, x = Seen(), Seen(), torch.ones(2)
    with outer, modes.plain_functions():
        with modes.without_modes(), inner:
            x + 1
        with inner:
            x + 1
    assert (outer.num, inner.num) == (0, 1)
