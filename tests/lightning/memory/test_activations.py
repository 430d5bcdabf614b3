"""The strategy's options about activations are applied in order, and undone."""

import pytest

from lightning_cp.config import Memory
from lightning_cp.lightning.memory.activations import prepare_layers, still_to_do
from tests.tiny import TinyLM


def overrides(model):
    return sorted(n for n, module in model.named_modules() if "forward" in module.__dict__)


@pytest.mark.parametrize(
    ("options", "in_training", "in_evaluation"),
    [
        ({}, 0, 0),
        ({"activation_checkpointing": True}, 2, 0),
        ({"tile": 4}, 2, 0),
        ({"tile": True, "activation_checkpointing": True}, 4, 0),
        ({"tile": "auto", "activation_checkpointing": "auto"}, 0, 0),
    ],
)
def test_layers_are_prepared_and_restored(options, in_training, in_evaluation):
    model = TinyLM(num_layers=2)
    for training, count in ((True, in_training), (False, in_evaluation)):
        undos = prepare_layers(model, Memory(**options), None, training=training)
        assert len(overrides(model)) >= count
        assert bool(overrides(model)) == bool(count)
        for undo in reversed(undos):
            undo()
        assert overrides(model) == []


def test_what_is_decided_later_is_added_to_what_was_done():
    undecided = Memory("auto", tile=4, compile="layers")
    assert still_to_do(Memory(True, tile=4, compile="layers"), undecided) == Memory(True)
    assert still_to_do(Memory(True, tile=True), Memory(True, tile="auto")) == Memory(tile=True)
