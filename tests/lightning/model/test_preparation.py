"""The parts that a strategy prepares a model with: what is undone, and in which order."""

import pytest

from lightning_cp.lightning.model import preparation
from lightning_cp.lightning.model.preparation import Preparation
from tests import doors


def build(**options):
    return Preparation(doors.config(**options))


class Loops:
    """A Trainer whose loops have an inference mode."""

    def __init__(self):
        self.inference_mode = True
        self.validate_loop = self.test_loop = self.predict_loop = self


def test_models_are_restored_first_and_then_what_was_changed_last(monkeypatch):
    undone = []

    class Handle:
        def remove(self):
            undone.append("model")

    monkeypatch.setattr(preparation, "enable_models", lambda module: [Handle()])
    prepared, loops = build(), Loops()
    prepared.undos.append(lambda: undone.append("first"))
    prepared.enable(loops, None, training=True)
    prepared.undos.append(lambda: undone.append("last"))
    assert prepared.has_enabled
    assert not loops.inference_mode
    prepared.undo()
    assert undone == ["model", "last", "first"]
    assert loops.inference_mode
    assert not prepared.has_enabled
    prepared.undo()  # nothing is undone twice
    assert undone == ["model", "last", "first"]


@pytest.mark.parametrize("chosen", ["hybrid", "full"])
def test_auto_is_chosen_for_a_run_and_chosen_again_for_the_next(monkeypatch, chosen):
    monkeypatch.setattr(preparation, "device_bytes", lambda device: None)
    monkeypatch.setattr(preparation, "choose_sharding", lambda *args, **options: chosen)
    prepared = build(parameter_sharding="auto")
    assert prepared.sharding == "full"
    shard_size = prepared.choose_sharding(None, None, 8, device=None)
    assert (prepared.sharding, shard_size) == (chosen, "auto" if chosen == "hybrid" else None)
    assert prepared.is_auto


def test_the_gradient_window_is_there_before_a_run():
    strategy = doors.strategy()
    assert strategy.gradient_window is strategy.gradient_window
