"""How calls of `log` are read; a method of a user gets what its caller gave."""

from typing import ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_cp.lightning.steps.logs import recorded_logs
from lightning_cp.loss.means import global_mean
from lightning_cp.step import active_step
from tests import doors

VALUE = torch.tensor(2.0)


class Base(LightningModule):
    """Notes what reaches a method; stands for Lightning's."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def note(self, *args, **kwargs):
        self.calls.append((args, kwargs))


class All(Base):
    def log(self, *args, **kwargs):
        self.note(*args, **kwargs)


class Prefix(Base):
    def log(self, name, value, **kwargs):
        self.note(f"prefix/{name}", value, **kwargs)


class Stage(Base):
    def log(self, name, value, stage="train", **kwargs):
        self.note(f"{stage}/{name}", value, **kwargs)


class OtherDefault(Base):
    def log(self, name, value, *args, on_epoch=True, **kwargs):
        kwargs.setdefault("sync_dist", True)
        self.note(name, value, *args, on_epoch=on_epoch, **kwargs)


class OtherNames(Base):
    def log(self, key, tensor, **kwargs):
        self.note(key, tensor, **kwargs)


class Static(Base):
    calls: ClassVar[list] = []

    def __init__(self):
        LightningModule.__init__(self)
        self.calls.clear()

    @staticmethod
    def log(name, value, **kwargs):
        Static.calls.append(((name, value), kwargs))


class Whole(Base):
    def log(
        self,
        name,
        value,
        prog_bar=False,
        logger=None,
        on_step=None,
        on_epoch=None,
        reduce_fx="mean",
        enable_graph=False,
        sync_dist=False,
        sync_dist_group=None,
        add_dataloader_idx=True,
        batch_size=None,
        metric_attribute=None,
        rank_zero_only=False,
        **others,
    ):
        self.note(name, value, on_epoch=on_epoch, batch_size=batch_size, **others)


CALLS = [
    (All, ("a", VALUE), {"on_epoch": True}, ("a", VALUE), {"on_epoch": True}),
    (All, ("a", VALUE, True), {}, ("a", VALUE, True), {}),
    (Prefix, ("a", VALUE), {"batch_size": 3}, ("prefix/a", VALUE), {"batch_size": 3}),
    (Stage, ("a", VALUE, "val"), {}, ("val/a", VALUE), {}),
    (Stage, ("a", VALUE), {"stage": "val"}, ("val/a", VALUE), {}),
    (OtherDefault, ("a", VALUE), {}, ("a", VALUE), {"on_epoch": True, "sync_dist": True}),
    (OtherNames, ("a", VALUE), {}, ("a", VALUE), {}),
    (Static, ("a", VALUE), {"on_step": True}, ("a", VALUE), {"on_step": True}),
    (Whole, ("a", VALUE), {}, ("a", VALUE), {"on_epoch": None, "batch_size": None}),
]


@pytest.mark.parametrize(("owner", "args", "kwargs", "expected", "expected_named"), CALLS)
def test_a_method_of_a_user_gets_what_its_caller_gave(
    owner, args, kwargs, expected, expected_named
):
    module = owner()
    with recorded_logs(module, None, training=True, sync="never") as records:
        for _ in range(2):
            module.log(*args, **kwargs)
    assert module.calls == [(expected, expected_named)] * 2
    assert [(one.name, one.value) for one in records] == [("a", VALUE)] * 2


def test_a_function_of_the_instance():
    module, calls = Base(), []
    module.log = lambda name, value, **kwargs: calls.append((name, value, kwargs))
    with recorded_logs(module, None, training=True, sync="never") as records:
        module.log("a", VALUE)
    assert calls == [("a", VALUE, {})]
    assert len(records) == 1


BATCH = {"input_ids": torch.ones(1, 4, dtype=torch.int64)}


def log_loss(module, sync):
    """Log the loss of a step, a mean over three tokens."""
    with doors.parallel(None).step(BATCH):
        step = active_step.current()
        loss = global_mean(torch.tensor(6.0), torch.tensor(3))
        with recorded_logs(module, step, training=True, sync=sync):
            module.log("loss", loss)


def test_a_loss_gets_the_weight_of_its_tokens():
    module = Prefix()
    log_loss(module, "always")
    ((_, kwargs),) = module.calls
    assert kwargs["batch_size"].item() == 3
    assert kwargs["sync_dist"] is True


class Few(Base):
    def log(self, name, value, prog_bar=False):
        self.note(name, value, prog_bar)


def test_a_method_that_cannot_pass_the_weight_on_raises():
    with pytest.raises(TypeError, match=r"Few.log\(\) does not take batch_size, .*\*\*kwargs"):
        log_loss(Few(), "never")


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("a",), {}, "missing a required argument: 'value'"),
        (("a", 1.0), {"name": "b"}, "multiple values for argument 'name'"),
        (("a", 1.0), {"on_stpe": True}, "unexpected keyword argument 'on_stpe'"),
    ],
)
def test_wrong_arguments_raise(args, kwargs, message):
    module = Base()
    with (
        recorded_logs(module, None, training=True, sync=None) as records,
        pytest.raises(TypeError, match=message),
    ):
        module.log(*args, **kwargs)
    assert records == []


def test_a_name_under_another_name_is_refused():
    module = OtherNames()
    with (
        recorded_logs(module, None, training=True, sync="never"),
        pytest.raises(TypeError, match="takes `name` and `value` first"),
    ):
        module.log(key="a", tensor=VALUE)
    assert module.calls == []
