"""What a run changes, wherever the code of a user keeps it, is as it was after the run."""

import collections
import dataclasses
import itertools
import random
import types

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_cp.restore import NotRestoredError, UpdatesWeightsError, restored_state


class Meter:
    def __init__(self):
        self.number, self.values = 0, []

    def add(self, x):
        self.number += 1
        self.values.append(x)


@dataclasses.dataclass(slots=True)
class Slot:
    number: int = 0


class Frozen(dict):
    def __setitem__(self, key, value):
        raise TypeError("frozen")


TRACKER, VALUES, AVERAGE, COUNT = Meter(), [], None, itertools.count()
GENERATOR = np.random.default_rng(0)


def helper(x, seen=[]):  # noqa: B006  what users write
    global AVERAGE
    TRACKER.add(x)
    VALUES.append(x)
    AVERAGE = x if AVERAGE is None else AVERAGE + x
    seen.append(x)
    helper.calls = getattr(helper, "calls", 0) + 1
    next(COUNT)
    GENERATOR.random()


def build_counter():
    number, seen = 0, Meter()

    def count():
        nonlocal number
        number += 1
        seen.add(number)
        return number, seen.number

    return count


class Trainer:
    """An object whose method changes everything that it reaches."""

    calls = 0

    def __init__(self):
        self.namespace, self.slot = types.SimpleNamespace(number=0), Slot()
        self.meters, self.pair = {"loss": Meter()}, (Meter(),)
        self.weight = nn.Parameter(torch.zeros(2))
        self.metric, self.modules = torchmetrics.MeanMetric(), [nn.Linear(2, 2)]
        self.frozen, self.fixed = Frozen(a=1), np.broadcast_to(np.zeros(1), (3,))
        self.counter, self.array = build_counter(), np.zeros(2)
        self.ordered, self.recent = collections.OrderedDict(a=[1]), collections.deque([1])
        self.names, self.text, self.bytes = {"a"}, b"1", bytearray(b"1")
        self.generator = torch.Generator().manual_seed(3)

    def work(self):
        helper(1.0)
        type(self).calls += 1
        self.namespace.number += 1
        self.slot.number += 1
        self.meters["loss"].add(1)
        self.pair[0].add(2)
        (self.weight * 3).sum().backward()
        self.metric.update(3.0)
        self.counter()
        self.probe = nn.Linear(1, 1)
        with torch.no_grad():
            self.modules[0].weight.mul_(2)
        self.array += 1
        self.ordered["b"] = 2
        self.ordered["a"].append(4)
        self.recent.append(2)
        self.names.add("b")
        self.text += b"x"
        self.bytes += b"x"
        torch.rand(1, generator=self.generator)
        random.random()
        torch.rand(1)

    def state(self):
        meters = [TRACKER, self.meters["loss"], self.pair[0]]
        return {
            "meters": [(x.number, [*x.values]) for x in meters],
            "globals": ([*VALUES], AVERAGE, GENERATOR.bit_generator.state["state"]["state"]),
            "function": ([*helper.__defaults__[0]], getattr(helper, "calls", 0)),
            "numbers": (
                Trainer.calls,
                self.namespace.number,
                self.slot.number,
                self.text,
                [*self.bytes],
            ),
            "closure": next(cell.cell_contents for cell in self.counter.__closure__),
            "gradient": None if self.weight.grad is None else self.weight.grad.tolist(),
            "metric": (float(self.metric.weight), self.metric.update_count),
            "modules": (self.modules[0].weight.tolist(), hasattr(self, "probe")),
            "containers": ([*self.ordered.items()], [*self.recent], {*self.names}),
            "array": self.array.tolist(),
            "random": (
                random.getstate(),
                torch.get_rng_state().tolist(),
                self.generator.get_state().tolist(),
            ),
        }


def test_a_run_leaves_no_trace_in_what_a_method_reaches():
    trainer, model = Trainer(), nn.Linear(2, 2)
    before = trainer.state()
    for _ in range(3):
        with restored_state(model, trainer) as reached:
            trainer.work()
            assert "Trainer.weight" in reached.trained
            assert reached.numbers()["Trainer.metric['mean_value']"] == 3.0
    after = trainer.state()
    assert {name for name in before if before[name] != after[name]} == set()
    trainer.work()
    assert {name for name in before if before[name] == trainer.state()[name]} == set()


class Loss:
    """A loss with a second source of data."""

    def __init__(self):
        self.steps, self.squares = itertools.cycle([1, 2, 3]), (n * n for n in range(1, 9))
        self.batches = iter(torch.utils.data.DataLoader([4, 5, 6], batch_size=1))

    def __call__(self):
        return next(self.steps), next(self.squares), int(next(self.batches))


def test_iterators_give_again_what_they_gave_in_a_run():
    loss, model = Loss(), nn.Linear(2, 2)
    for _ in range(2):
        with restored_state(model, loss):
            assert [loss(), loss()] == [(1, 1, 4), (2, 4, 5)]
    assert [loss(), loss(), loss()] == [(1, 1, 4), (2, 4, 5), (3, 9, 6)]
    with pytest.raises(StopIteration):
        next(loss.batches)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.inner, self.ready = nn.Linear(2, 2), False

    def forward(self, x):
        self.average = 0.9 * self.average + x.mean()  # another tensor
        self.ready, self.meter = True, Meter()
        return self.inner(x)


def test_buffers_that_are_replaced_and_attributes_of_modules_are_restored():
    model = Net()
    buffer = model.average

    def hook(module, inputs, output):
        module.calls = getattr(module, "calls", 0) + 1

    model.inner.register_forward_hook(hook)
    with restored_state(model):
        model(torch.ones(1, 2))
        assert model.inner.calls == 1
    assert model.average is buffer
    assert (model.ready, hasattr(model, "meter"), hasattr(model.inner, "calls")) == (False,) * 3


def test_a_step_that_updates_weights_says_so():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(UpdatesWeightsError, match="calls step"), restored_state(nn.Linear(1, 1)):
        optimizer.step()
    optimizer.step()


class Stubborn:
    """Refuses to be written to once it is closed."""

    def __init__(self):
        self.is_closed = False

    def __setattr__(self, name, value):
        if vars(self).get("is_closed"):
            raise AttributeError("closed")
        super().__setattr__(name, value)


class Guarded:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


def test_what_resists_writing_is_restored_all_the_same():
    stubborn, guarded = Stubborn(), Guarded()
    with restored_state(nn.Linear(1, 1), stubborn, guarded):
        stubborn.is_closed = True
        guarded.number = 5
    assert (stubborn.is_closed, guarded.number) == (False, 0)


def test_large_tensors_are_not_copied_but_a_change_is_noticed():
    large = types.SimpleNamespace(queue=torch.zeros(1 << 24 | 1, dtype=torch.uint8))
    with restored_state(nn.Linear(1, 1), large):
        pass
    with (
        pytest.raises(NotRestoredError, match="queue is too large"),
        restored_state(nn.Linear(1, 1), large),
    ):
        large.queue.add_(1)


def test_too_many_objects_are_said(caplog):
    many = types.SimpleNamespace(parts=[[[object()] for _ in range(999)] for _ in range(250)])
    with restored_state(nn.Linear(1, 1), many):
        pass
    assert "more than 200000 objects" in caplog.text
