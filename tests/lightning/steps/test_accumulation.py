"""Windows of accumulated batches in Lightning; what they add up to: test_training.py."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import Precision

from lightning_cp.lightning.model.optimizers import hooks_read_scalars
from lightning_cp.lightning.steps import accumulation
from lightning_cp.lightning.steps.accumulation import Accumulation


def build_module(*, automatic=True):
    trainer = SimpleNamespace(accumulate_grad_batches=3)
    return SimpleNamespace(trainer=trainer, automatic_optimization=automatic)


def starts(module):
    """Return at which of eight batches a window starts."""
    accumulated = Accumulation(reduce_each=True)
    found = []
    for batch_idx in range(8):
        before = accumulated.window
        accumulated.start_batch(module, batch_idx)
        found += [] if accumulated.window is before else [batch_idx]
    return found


def test_windows_start_where_lightning_sets_gradients_to_zero():
    assert starts(build_module()) == [0, 3, 6]


def test_windows_of_manual_optimization_are_the_users():
    assert starts(build_module(automatic=False)) == []


@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("replicated", [True, False])
def test_gradients_are_reduced_for_each_batch_only_if_sharded(monkeypatch, reduce_each, replicated):
    calls = []
    monkeypatch.setattr(accumulation, "is_replicated", lambda module: replicated)
    monkeypatch.setattr(
        accumulation, "set_gradient_reduction", lambda module, enabled: calls.append(enabled)
    )
    with pytest.raises(KeyError), Accumulation(reduce_each=reduce_each).before_last(None):
        raise KeyError  # an error in backward leaves it enabled, too
    assert calls == ([] if reduce_each and not replicated else [False, True])


def test_the_precision_plugin_is_as_before_after_each_step():
    plugin, optimizer = Precision(), torch.optim.SGD([torch.zeros(1)])
    before = dict(vars(plugin))
    with hooks_read_scalars(plugin, optimizer):
        assert vars(plugin) != before
    with pytest.raises(KeyError), hooks_read_scalars(plugin, optimizer):
        raise KeyError  # an error of the update
    assert vars(plugin) == before
