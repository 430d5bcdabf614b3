"""Batches that are not one flat dict: the numbers of a plain Trainer, or a refusal."""

import re
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import (
    ContextParallelCallback,
    token_mean,
)
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.parity.steps import build_model

pytestmark = pytest.mark.ranks

LONG, SHORT = 23, 17


class Pair(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor


def rows(length, seed, shape="dict"):
    """Return four samples whose labels start at different positions, as a loader returns them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (4, length), generator=generator)
    labels = tokens.clone()
    for row in range(4):
        labels[row, : 3 * row + seed] = -100
    forms = {
        "dict": lambda i: {"input_ids": tokens[i], "labels": labels[i]},
        "tuple": lambda i: (tokens[i], labels[i], torch.tensor(i)),
        "named tuple": lambda i: Pair(tokens[i], labels[i]),
        "nested": lambda i: {
            "text": {"input_ids": tokens[i], "labels": labels[i]},
            "about": {"row": torch.tensor(i), "size": torch.ones(3)},
        },
        "documents": lambda i: {
            "input_ids": tokens[i],
            "labels": labels[i],
            "document_ids": (torch.arange(length) > 5 + i).long(),
        },
    }
    return DataLoader([forms[shape](i) for i in range(4)], batch_size=2)


class Module(pl.LightningModule):
    """Trains on batches of different structures, selected by ``kind``."""

    def __init__(self, kind, checkpointing=False):
        super().__init__()
        self.model, self.kind = build_model(torch.float64), kind
        self.checkpoint = partial(checkpoint, use_reentrant=False) if checkpointing else None
        self.seen, self.shapes = [], []

    @property
    def cp(self):
        return getattr(self.trainer.strategy, "context_parallel", None)

    def loss_of(self, tokens, labels):
        places = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        positions = self.cp.position_ids() if self.cp else places
        self.shapes.append(tuple(tokens.shape))
        return token_mean(self.model(tokens, positions, checkpoint=self.checkpoint), labels)

    def loss(self, batch):
        if self.kind == "tuple":
            assert isinstance(batch, list | tuple)
            assert batch[2].shape == (2,)
            return self.loss_of(batch[0], batch[1])
        if self.kind == "named tuple":
            assert isinstance(batch, Pair)
            return self.loss_of(batch.tokens, batch.targets)
        if self.kind == "nested":
            assert batch["about"]["size"].shape == (2, 3)
            return self.loss_of(batch["text"]["input_ids"], batch["text"]["labels"])
        losses = []
        for part in batch.values() if isinstance(batch, dict) else batch:
            if part is None:  # of a loader that has ended
                continue
            apart = self.kind in ("apart", "manual") and self.cp
            with self.cp.step(part) if apart else nullcontext(part) as own:
                named = isinstance(own, dict)
                pair = (own["input_ids"], own["labels"]) if named else (own[0], own[1])
                losses.append(self.loss_of(*pair))
        return losses[0] + 0.3 * losses[-1]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.seen.append(float(loss.detach()))
        if self.kind != "manual":
            return loss
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()
        return None

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(float(self.loss(batch)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


KEPT = {"a": None, "b": None}
CASES = {
    "tuple": ("tuple", {}),
    "named tuple": ("named tuple", {"tokens": 1, "targets": 1}),
    "nested": ("nested", {}),
    "together": ("together", {}),
    "together, tuples": ("together", {}),
    "listed": ("together", {}),
    "longest": ("together", {}),
    "apart": ("apart", KEPT),
    "apart, checkpointed": ("apart", KEPT),
    "apart, listed": ("apart", {"0": None, "1": None}),
    "manual": ("manual", KEPT),
}


def loaders(name):
    if name in ("tuple", "named tuple", "nested"):
        return rows(LONG, 1, name)
    if name == "longest":
        short = DataLoader(rows(LONG, 2).dataset[:2], batch_size=2)
        return CombinedLoader({"a": rows(LONG, 1), "b": short}, "max_size")
    shape = "tuple" if name == "together, tuples" else "dict"
    second = rows(SHORT if name.startswith(("apart", "manual")) else LONG, 2, shape)
    if name.endswith("listed"):
        return CombinedLoader([rows(LONG, 1), second], "min_size")
    return CombinedLoader({"a": rows(LONG, 1, shape), "b": second}, "min_size")


def run(name, plain=False):
    kind, sequence_dims = CASES[name]
    module = Module(kind, checkpointing="checkpointed" in name)
    module.automatic_optimization = kind != "manual"
    options = {"max_epochs": 1, "num_sanity_val_steps": 0}
    val = [loaders(name), loaders(name)] if name == "tuple" else loaders(name)  # one after another
    if plain:
        trainer = build_trainer(**options, devices=1, strategy="auto")
        with doors.parallel(None).paused():  # other jobs of this process had steps
            trainer.fit(module, loaders(name), val)
    else:
        with elastic_environment():
            strategy = doors.strategy(sequence_dims=sequence_dims)
            # The others are compared with one device by trial runs.
            callbacks = [ContextParallelCallback(verify_first_batch=kind == "apart")]
            trainer = build_trainer(**options, strategy=strategy, callbacks=callbacks)
            trainer.fit(module, loaders(name), val)
    weights = {name: full(p.detach()) for name, p in module.model.named_parameters()}
    return weights, module.seen, module.shapes


def run_many(names, plain=False):
    return {name: run(name, plain) for name in names}


def check(ranks, size, names):
    exact = ranks(1).run(run_many, names, True)[0]
    for found in ranks(size).run(run_many, names):
        for name, (weights, seen, shapes) in found.items():
            their_weights, their_seen, _ = exact[name]
            assert seen[-len(their_seen) :] == pytest.approx(their_seen, abs=1e-12), name
            for key, weight in their_weights.items():
                assert torch.allclose(weights[key], weight, rtol=0, atol=1e-11), (name, key)
            assert all(length < LONG for _, length in shapes[-2:]), name


def test_parts_of_a_batch_train_as_on_one_device(ranks):
    check(ranks, 2, ["apart"])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_any_batch_trains_as_on_one_device(ranks, size):
    check(ranks, size, list(CASES))


class Hf(pl.LightningModule):
    """A Hugging Face model with two loaders, one of them packed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        cp = self.trainer.strategy.context_parallel
        with cp.step(batch["a"]) as a:
            first = self.model(**a).loss
        with cp.step(batch["b"]) as b:
            second = self.model(**b).loss
        return first + 0.3 * second

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def run_hf():
    with elastic_environment():
        module, strategy = Hf(), doors.strategy(sequence_dims=KEPT)
        loader = CombinedLoader({"a": rows(LONG, 1), "b": rows(SHORT, 2)}, "min_size")
        callbacks = [ContextParallelCallback(verify_first_batch=True)]
        trainer = build_trainer(strategy=strategy, max_epochs=1, callbacks=callbacks)
        trainer.fit(module, loader)
        return {name: full(p.detach()) for name, p in module.named_parameters()}


@pytest.mark.slow
def test_a_model_of_hugging_face_takes_parts_one_after_the_other(ranks):
    exact = ranks(1).run(run_hf)[0]
    for found in ranks(2).run(run_hf):
        for key, weight in exact.items():
            assert torch.allclose(found[key], weight, rtol=0, atol=1e-6), key


def refusal(name, sequence_dims, accumulate=1):
    """Return the errors of runs on parts with different lengths."""
    with elastic_environment():
        module, strategy = Module("apart"), doors.strategy(sequence_dims=sequence_dims)
        if name == "outside":
            module.kind = "together"
        trainer = build_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate)
        try:
            trainer.fit(module, loaders("together" if name == "same length" else "apart"))
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "accepted"


def refusals(cases):
    return [refusal(*case) for case in cases]


@pytest.mark.parametrize(
    "some", [slice(0, 2), pytest.param(slice(2, None), marks=pytest.mark.slow)], ids=str
)
def test_parts_are_refused_with_what_helps(ranks, some):
    kept = (("a", None), ("b", None))
    cases = {
        ("two lengths", None): r"`a.input_ids` has 23 tokens, `b.input_ids` .* 17. .*sequence_dims="
        r"\{'a': None, 'b': None\}, and open a step for each: `with cp.step\(batch\['a'\]",
        ("outside", kept): "was not sharded.*Open a step for each part",
        ("same length", None): "`input_ids`, which is already this rank's shard",
        ("accumulated", kept, 2): "two means over different numbers of tokens",
    }
    asked = [(name, dict(dims or {}), *more) for name, dims, *more in cases][some]
    for found in ranks(2).run(refusals, asked):
        for message, pattern in zip(found, [*cases.values()][some], strict=True):
            assert re.search(pattern, message), message


def run_one_long():
    """Train and validate on two data ranks; the batches of one are too long for a trial run."""
    with elastic_environment():
        strategy = doors.strategy(sequence_dims=KEPT, data_parallel_size=2, verify_max_len=32)
        length = LONG if torch.distributed.get_rank() < 2 else 40
        batches = [{"a": a, "b": b} for a, b in zip(rows(length, 1), rows(SHORT, 2), strict=True)]
        loader = DataLoader(batches, batch_size=None)
        module = Module("apart")
        trainer = build_trainer(strategy=strategy, max_epochs=1)
        trainer.fit(module, loader, loader)
        return module.seen


@pytest.mark.slow
def test_data_ranks_have_as_many_trial_runs_where_one_batch_is_too_long(ranks):
    for seen in ranks(4).run(run_one_long):
        assert all(x == x for x in seen)
        assert len(seen) >= 4
