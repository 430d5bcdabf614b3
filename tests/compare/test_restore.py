"""What a run changes, wherever the code of a user keeps it, is as it was after the run."""

import argparse
import array
import collections
import contextvars
import dataclasses
import functools
import importlib
import io
import itertools
import os
import queue
import random
import sqlite3
import sys
import threading
import types
import weakref
from contextlib import nullcontext

import lightning.pytorch
import numpy as np
import pytest
import torch
import torchmetrics
import transformers
from torch import nn
from torchmetrics import classification

from lightning_cp.compare.replay import NotComparableError
from lightning_cp.compare.restore import NotRestoredError, restored_state


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


def measured(with_trial):
    """Return what metrics of a model give in four steps, two of them after a trial run."""
    model, generator = nn.Module(), torch.Generator().manual_seed(0)
    kinds = (classification.MulticlassAccuracy, classification.MulticlassRecall)
    model.metrics = torchmetrics.MetricCollection([kind(3) for kind in kinds])
    model.values, model.sums = torchmetrics.CatMetric(), torchmetrics.RunningSum(window=2)
    metrics, found = [model.metrics, model.values, model.sums], []

    def step(generator):
        scores = torch.rand(8, 3, generator=generator)
        targets = torch.randint(3, (8,), generator=generator)
        return [model.metrics(scores, targets), model.values(scores[0]), model.sums(scores[0, 0])]

    for number in range(4):
        with restored_state(model) if with_trial and number % 2 == 0 else nullcontext() as trial:
            if trial is not None:
                for metric in metrics:
                    metric.reset()
                step(torch.Generator().manual_seed(1))
                [metric.compute() for metric in metrics]
        found.append(step(generator))
    return repr([found, [metric.compute() for metric in metrics]])


def test_metrics_of_a_model_are_restored():
    assert measured(True) == measured(False)


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
    with pytest.raises(NotComparableError, match="calls step"), restored_state(nn.Linear(1, 1)):
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
    large = types.SimpleNamespace(queue=torch.zeros(1 << 26 | 1, dtype=torch.uint8))
    with restored_state(nn.Linear(1, 1), large):
        pass
    with (
        pytest.raises(
            NotRestoredError,
            match=r"queue could not be restored: it is too large for a copy. verify",
        ),
        restored_state(nn.Linear(1, 1), large),
    ):
        large.queue.add_(1)


def test_too_many_objects_are_said(caplog, monkeypatch):
    # As many as the library visits take seconds.
    monkeypatch.setattr("lightning_cp.compare.restore._MAX_OBJECTS", 2_000)
    many = types.SimpleNamespace(parts=[[[object()] for _ in range(999)] for _ in range(3)])
    with restored_state(nn.Linear(1, 1), many):
        pass
    assert "more than 2000 objects" in caplog.text


# ---------------------------------------------------------------- what an attack has found


def keep(*objects, change, read, runs=3):
    """Check that what a change does is undone in runs, and done once after them."""
    model = objects[0] if isinstance(objects[0], nn.Module) else nn.Linear(1, 1)
    before = read()
    for _ in range(runs):
        with restored_state(model, *objects):
            change()
            assert read() != before
        assert read() == before
    change()
    assert read() != before


def draw(number=itertools.count()):  # noqa: B008  what users write
    return next(number)


def numbers_sent():
    total = 0
    while True:
        sent = yield total
        total += 1 if sent is None else sent


@functools.lru_cache
def build_single():
    return {"number": 0}


def count_in_modules():
    import tests_of_a_user.counts

    tests_of_a_user.counts.number += 1


def count_in_globals():
    globals()["counted"] = globals().get("counted", 0) + 1


class Private:
    __slots__ = ("__number",)

    def __init__(self):
        self.__number = 0

    def add(self):
        self.__number += 1
        return self.__number

    def number(self):
        return self.__number


CONTEXT = contextvars.ContextVar("number", default=0)
KEPT = Meter()


def build_places():
    """Return values, how a step changes them, and what is read of them."""
    x = types.SimpleNamespace
    count, ring = itertools.count(), itertools.cycle([1, 2])
    user = collections.UserDict(n=0)
    slow = threading.local()
    slow.n = 0
    weak = weakref.WeakKeyDictionary({KEPT: 0})
    sent = numbers_sent()
    next(sent)
    counts = types.ModuleType("tests_of_a_user.counts")
    counts.number = 0
    sys.modules["tests_of_a_user"] = types.ModuleType("tests_of_a_user")
    sys.modules["tests_of_a_user"].counts = sys.modules["tests_of_a_user.counts"] = counts
    config, trainer = (
        transformers.PretrainedConfig(number=0),
        lightning.pytorch.Trainer(logger=False),
    )
    trainer.number = 0
    loader = torch.utils.data.DataLoader(
        torch.arange(1000), shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)

    def decay():
        optimizer.param_groups[0]["lr"] *= 0.5

    t, resized = torch.zeros(3), torch.zeros(2)
    frozen, array_, long = torch.zeros(2, requires_grad=True), np.zeros(2), [0.0] * 150_000
    data = {"tensor": t}

    def assign():
        data["tensor"].data = data["tensor"].data + 1

    objects = np.array([Meter(), Meter()], dtype=object)
    many = {key: Meter() for key in range(2000)}
    tensors = [torch.zeros(1) for _ in range(2000)]
    typed, text, queued = array.array("d", [0.0]), io.StringIO(), queue.Queue()
    bits, seeds, private = np.random.PCG64(3), np.random.SeedSequence(3), Private()
    push = [].append
    build_single.cache_clear()
    build_single()

    def number_of(c):
        return int(repr(c)[6:-1])

    def set_environment():
        os.environ["TESTS_OF_A_USER"] += "1"

    return {
        "namespace": (a := argparse.Namespace(n=0), lambda: add(vars(a), "n"), lambda: a.n),
        "user dict": (user, lambda: add(user, "n"), lambda: user["n"]),
        "chain": (c := collections.ChainMap({"n": 0}), lambda: add(c, "n"), lambda: c["n"]),
        "thread": (slow, lambda: add(vars(slow), "n"), lambda: slow.n),
        "weak keys": (weak, lambda: add(weak, KEPT), lambda: weak[KEPT]),
        "queue": (queued, lambda: queued.put(1), lambda: (queued.qsize(), queued.unfinished_tasks)),
        "array": (typed, lambda: add(typed, 0), lambda: typed[0]),
        "text": (text, lambda: text.write("x"), text.getvalue),
        "config": (config, lambda: add(vars(config), "number"), lambda: config.number),
        "trainer": (trainer, lambda: add(vars(trainer), "number"), lambda: trainer.number),
        "loader": (loader, lambda: [*iter(loader)][:1], lambda: state_of(loader.generator)),
        "optimizer": (optimizer, decay, lambda: optimizer.param_groups[0]["lr"]),
        "data": (data, assign, lambda: data["tensor"].tolist()),
        "size": (resized, lambda: resized.resize_(resized.numel() + 1), lambda: resized.shape),
        "frozen": (
            frozen,
            lambda: frozen.requires_grad_(not frozen.requires_grad),
            lambda: frozen.requires_grad,
        ),
        "array size": (
            array_,
            lambda: array_.resize(array_.size + 1, refcheck=False),
            lambda: array_.tolist(),
        ),
        "objects": (objects, lambda: objects[0].add(1), lambda: objects[0].number),
        "long": (long, lambda: long.append(1.0), lambda: len(long)),
        "many": (many, lambda: many[1500].add(1), lambda: many[1500].number),
        "tensors": (tensors, lambda: tensors[1500].add_(1), lambda: float(tensors[1500])),
        "defaults": (draw, draw, lambda: number_of(draw.__defaults__[0])),
        "tuple": (t := x(it=(count,)), lambda: next(t.it[0]), lambda: number_of(t.it[0])),
        "partial": (
            p := x(f=functools.partial(next, itertools.count())),
            lambda: p.f(),
            lambda: number_of(p.f.args[0]),
        ),
        "method": (
            m := x(f=itertools.count().__next__),
            lambda: m.f(),
            lambda: number_of(m.f.__self__),
        ),
        "cycle": (r := x(it=ring), lambda: next(r.it), lambda: str(r.it.__reduce__()[2])),
        "builtin": (push, lambda: push(1), lambda: len(push.__self__)),
        "cached": (
            build_single,
            lambda: add(build_single(), "number"),
            lambda: build_single()["number"],
        ),
        "modules": (count_in_modules, count_in_modules, lambda: counts.number),
        "globals": (count_in_globals, count_in_globals, lambda: globals().get("counted")),
        "context": (CONTEXT, lambda: CONTEXT.set(CONTEXT.get() + 1), CONTEXT.get),
        "reference": (weakref.ref(KEPT), lambda: KEPT.add(1), lambda: KEPT.number),
        "private": (private, private.add, private.number),
        "bits": (bits, bits.random_raw, lambda: bits.state["state"]["state"]),
        "seeds": (seeds, lambda: seeds.spawn(1), lambda: seeds.n_children_spawned),
        "environment": (None, set_environment, lambda: os.environ["TESTS_OF_A_USER"]),
    }


def add(items, key):
    items[key] += 1


def state_of(generator):
    return generator.get_state().tolist()


PLACES = build_places()


@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_changes_is_restored_wherever_it_is(place, monkeypatch):
    monkeypatch.setenv("TESTS_OF_A_USER", "0")
    value, change, read = PLACES[place]
    keep(types.SimpleNamespace(value=value), change=change, read=read)


class Growing(nn.Module):
    """Makes modules, parameters and hooks when it is first called, and freezes its weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.parts = nn.Linear(2, 2), nn.ModuleList([nn.Identity()])
        self.scale, self.seen = nn.Parameter(torch.ones(1), requires_grad=False), []

    def grow(self):
        self.average = nn.Linear(2, 2)
        self.bias = nn.Parameter(torch.zeros(2))
        self.parts.append(nn.Identity())
        self.scale = nn.Parameter(self.scale * 0.5, requires_grad=False)
        self.inner.register_forward_hook(lambda *_: None, with_kwargs=True)
        self.inner.weight.register_hook(lambda gradient: None)
        self.inner.weight.requires_grad_(False)
        next(iter(self.inner._forward_pre_hooks.values()), None)

    def state(self):
        hooks = [len(self.inner._forward_hooks), len(self.inner._forward_hooks_with_kwargs)]
        names = [name for name, _ in self.named_modules()]
        weights = [(name, id(x), x.requires_grad) for name, x in self.named_parameters()]
        return names, weights, hooks, len(self.inner.weight._backward_hooks or ())


def test_modules_parameters_and_hooks_that_a_step_makes_are_dropped():
    model = Growing()
    keep(model, change=model.grow, read=model.state)


def test_a_hook_that_removes_itself_is_there_again():
    model, calls = nn.Linear(2, 2), []

    def once(*_, **__):
        calls.append(1)
        handle.remove()

    handle = model.register_forward_hook(once, with_kwargs=True)
    for _ in range(2):
        with restored_state(model):
            model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(calls) == 1  # what runs have added is undone


class Drawing:
    """Holds iterators of all kinds, in several places."""

    def __init__(self):
        self.ahead, self.same = itertools.count(), itertools.cycle([1, 2, 3])
        self.alias, self.squares = self.same, map(abs, iter([-1, -2, -3]))
        self.values = (float(torch.rand(())) for _ in range(9))
        self.batches = iter(torch.utils.data.DataLoader([4, 5, 6], batch_size=1))
        self.inside, self.sent = enumerate(self.values), numbers_sent()
        next(self.sent)

    def step(self):
        assert self.same is self.alias
        return [next(self.ahead), next(self.same), next(self.alias), next(self.squares)]


def test_iterators_of_python_are_as_if_there_had_been_no_run():
    model, tried = nn.Linear(1, 1), Drawing()
    expected = [Drawing().step(), [1, 3, 1, 2]]
    sources = {**vars(tried)}
    for _ in range(2):
        with restored_state(model, tried):
            assert [tried.step(), tried.step()] == expected
        assert all(value is sources[name] for name, value in vars(tried).items())
    assert [tried.step(), tried.step()] == expected


@pytest.mark.parametrize("name", ["values", "batches", "inside"])
def test_a_run_that_draws_from_an_iterator_without_a_copy_raises(name):
    model, tried = nn.Linear(1, 1), Drawing()
    state, it = torch.get_rng_state(), getattr(tried, name)
    with restored_state(model, tried):
        draw = getattr(tried, name).__next__
        with pytest.raises(NotComparableError, match="cannot be set back.*its batch hold.*verify="):
            draw()
    assert getattr(tried, name) is it
    assert torch.equal(torch.get_rng_state(), state)
    assert next(it) is not None


def test_a_run_that_sends_to_a_generator_raises():
    tried = Drawing()
    with restored_state(nn.Linear(1, 1), tried):
        assert isinstance(tried.sent, types.GeneratorType)
        with pytest.raises(NotComparableError, match="draws from `numbers_sent`"):
            tried.sent.send(2)
    assert tried.sent.send(2) == 2


class LazyList(list):
    def __iter__(self):
        raise RuntimeError("reads a disk")


class LazyDict(dict):
    def items(self):
        return [(key, [value]) for key, value in dict.items(self)]


def build_knot():
    knot, shared = {"x": 0.5}, [0.5]
    knot["me"] = knot
    for _ in range(40):
        shared = [shared, shared]
    return [knot, shared]


UNTOUCHED = {
    "generator of the system": random.SystemRandom,
    "knot": build_knot,
    "half complex": lambda: torch.zeros(3, dtype=torch.complex32),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "expanded": lambda: torch.tensor(float("nan")).expand(5),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "lazy": lambda: [nn.LazyLinear(3)],
    "list": lambda: LazyList([1, 2]),
    "dict": lambda: LazyDict(a=1.0),
    "closed": lambda: closed(io.StringIO()),
    "dates": lambda: np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
}


def closed(file):
    file.close()
    return file


@pytest.mark.parametrize("kind", UNTOUCHED)
def test_what_has_not_changed_is_no_reason_to_refuse(kind):
    value = UNTOUCHED[kind]()
    with restored_state(nn.Linear(1, 1), types.SimpleNamespace(value=value)) as reached:
        reached.numbers()
    if kind == "dict":
        assert dict.__getitem__(value, "a") == 1.0


def test_a_cursor_is_left_alone():
    """It is an iterator that ``execute`` starts anew."""
    cursor = sqlite3.connect(":memory:").cursor()
    cursor.execute("select 1 union select 2")
    holder = types.SimpleNamespace(cursor=cursor)
    with restored_state(nn.Linear(1, 1), holder):
        assert [*holder.cursor.execute("select 3")] == [(3,)]
    assert holder.cursor is cursor
    assert [*holder.cursor.execute("select 4")] == [(4,)]


def test_a_large_array_that_changes_is_noticed():
    holder = types.SimpleNamespace(table=np.zeros(1 << 24, np.float32)[:-1].copy(), more=None)
    holder.more = np.zeros((1 << 24) + 2, np.float32)
    with (
        pytest.raises(NotRestoredError, match="more could not be restored"),
        restored_state(nn.Linear(1, 1), holder),
    ):
        holder.more[5] = holder.table[5] = 1.0
    assert holder.table[5] == 0.0


def test_projects_of_users_may_be_installed(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    for name in ("own_project", "other_library"):
        (folder / name).mkdir(parents=True)
        text = "number = 0\ndef count():\n    global number\n    number += 1\n"
        (folder / name / "__init__.py").write_text(text)
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text(name)
    source = '{"url": "file:///home/me/project", "dir_info": {}}'
    (folder / "own_project-1.0.dist-info" / "direct_url.json").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    own, other = map(importlib.import_module, ("own_project", "other_library"))
    holder = types.SimpleNamespace(own=own.count, other=other.count)
    with restored_state(nn.Linear(1, 1), holder):
        holder.own()
        holder.other()
    assert (own.number, other.number) == (0, 1)


def test_frames_are_restored():
    pandas = pytest.importorskip("pandas")
    holder = types.SimpleNamespace(rows=pandas.DataFrame({"loss": [1.0]}), cell=pandas.Series([1]))
    rows, cell = holder.rows, holder.cell
    with restored_state(nn.Linear(1, 1), holder):
        holder.rows.loc[len(holder.rows)] = [2.0]
        holder.cell[0] += 1
        assert (len(holder.rows), holder.cell[0]) == (2, 2)
    assert (holder.rows is rows, holder.cell is cell) == (True, True)
    assert (len(rows), cell[0]) == (1, 1)
