"""`checkpoint_layers`: layers of any model are recomputed, with the same gradients."""

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from lightning_cp import ContextParallel, token_mean
from lightning_cp.memory import checkpoint_layers
from tests.attn.test_kept import make_batch
from tests.parity import zoo
from tests.tiny import TinyLM


@pytest.fixture
def regions(monkeypatch):
    """Count calls of torch's checkpoint."""
    calls = []
    original = torch_checkpoint._checkpoint_without_reentrant_generator

    def counted(*args, **kwargs):
        calls.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch_checkpoint, "_checkpoint_without_reentrant_generator", counted)
    return calls


def gradients(model):
    model.zero_grad()
    cp, batch = ContextParallel(None), make_batch()
    with cp.step(batch) as local:
        token_mean(model(local["input_ids"], cp.position_ids()), local["labels"]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_blocks_of_any_model_are_recomputed(regions):
    model = TinyLM(num_layers=3).double().train()
    names = list(model.state_dict())
    exact = gradients(model)
    assert not regions
    handle = checkpoint_layers(model)
    assert list(model.state_dict()) == names
    found = gradients(model)
    assert handle.num_blocks == len(regions) == 3
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    model.eval()
    gradients(model)
    assert len(regions) == 3  # not in evaluation
    handle.remove()
    gradients(model.train())
    assert len(regions) == 3
    assert all("forward" not in block.__dict__ for block in model.blocks)


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def test_models_of_transformers_checkpoint_their_own_layers(regions):
    model = zoo.build_model("llama").train()
    handle = checkpoint_layers(Holder(model))
    assert model.is_gradient_checkpointing
    assert handle.num_blocks == 0
    ids = torch.arange(9)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(regions) == model.config.num_hidden_layers
    handle.remove()
    assert not model.is_gradient_checkpointing


def test_a_model_that_checkpoints_already_stays_as_it_is():
    model = zoo.build_model("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpoint_layers(model).remove()
    assert model.is_gradient_checkpointing


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="no layers were found in Linear"):
        checkpoint_layers(nn.Linear(2, 2))
