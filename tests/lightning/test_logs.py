"""How calls of `log` are read."""

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_cp.lightning.logs import recorded_logs


class Base(LightningModule):
    def __init__(self):
        super().__init__()
        self.calls = []


class Full(Base):
    def log(self, name, value, *args, **kwargs):
        self.calls.append((name, value, args, kwargs))


class Named(Base):
    def log(self, name, value, **kwargs):
        self.calls.append((f"prefix/{name}", value, (), kwargs))


class Passed(Base):
    def log(self, *args, prefix="", **kwargs):
        name, value = args
        self.calls.append((prefix + name, value, (), kwargs))


@pytest.mark.parametrize("owner", [Full, Named, Passed])
def test_a_method_that_passes_its_arguments_on(owner):
    module, value = owner(), torch.tensor(2.0)
    with recorded_logs(module, None, training=True, sync="never") as records:
        for _ in range(2):
            module.log("a", value, on_epoch=True, batch_size=3)
    assert [(one.name, one.value) for one in records] == [("a", value)] * 2
    (name, found, args, kwargs), _ = module.calls
    assert name == ("prefix/a" if owner is Named else "a")
    assert found is value
    assert args == ()
    assert (kwargs["on_epoch"], kwargs["batch_size"]) == (True, 3)


def test_an_argument_of_the_method_alone():
    module = Passed()
    with recorded_logs(module, None, training=True, sync="never"):
        module.log("a", torch.tensor(2.0), prefix="train/")
    assert module.calls[0][0] == "train/a"


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
