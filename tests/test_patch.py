"""The contract of patches: what is replaced comes back, whoever touches the object in between."""

import copy
import inspect
import pickle
import types
from functools import wraps
from itertools import permutations
from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn

from lightning_cp.patch import Patch, patches_of, replace_method


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, *, shift=0):
        return x * self.factor + shift


def add_one(owner, stock, *args, **kwargs):
    return stock(*args, **kwargs) + 1


def times_ten(owner, stock, *args, **kwargs):
    return stock(*args, **kwargs) * 10


def add_hundred(owner, stock, *args, **kwargs):
    return stock(*args, **kwargs) + 100


def is_plain(module):
    return not {"forward", "_lightning_cp_patches"} & module.__dict__.keys()


@pytest.mark.parametrize("before", [{}, {"size": 3}, {"size": None}])
def test_an_attribute_comes_back(before):
    owner = types.SimpleNamespace(**before)
    patch = Patch(owner, "size", 5)
    assert owner.size == 5
    patch.remove()
    patch.remove()
    assert vars(owner) == before


def test_attributes_of_classes_and_modules_come_back():
    class Base:
        size = 1

    class Owner(Base):
        pass

    module = types.ModuleType("module")
    module.size = 1
    for owner in (Owner, module):
        with Patch(owner, "size", 2):
            assert owner.size == 2
        assert owner.size == 1
    assert "size" not in vars(Owner)


def test_a_value_that_somebody_has_changed_comes_back_too():
    owner = types.SimpleNamespace(size=1)
    patch = Patch(owner, "size", 2)
    owner.size = 3
    patch.remove()
    assert vars(owner) == {"size": 1}


def test_an_exception_inside_puts_back():
    owner = types.SimpleNamespace(size=1)
    with pytest.raises(KeyError), Patch(owner, "size", 2):
        raise KeyError
    assert vars(owner) == {"size": 1}


def test_a_method_has_the_signature_and_the_arguments_of_the_class():
    module = Scale()
    replace_method(module, "forward", add_one)
    assert inspect.signature(module.forward) == inspect.signature(Scale().forward)
    assert module(torch.tensor(3.0), shift=4) == 11


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_patches_on_one_attribute_are_removed_in_any_order(order):
    module, x = Scale(), torch.tensor(3.0)
    functions = [add_one, times_ten, add_hundred]
    patches = [replace_method(module, "forward", function) for function in functions]
    left = [0, 1, 2]
    for i in order:
        expected = x * 2
        for k in left:
            expected = functions[k](None, lambda y: y, expected)
        assert module(x) == expected
        patches[i].remove()
        left.remove(i)
    assert module(x) == 6
    assert is_plain(module)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_values_on_one_attribute_are_removed_in_any_order(order):
    owner = types.SimpleNamespace(size=1)
    patches = [Patch(owner, "size", value) for value in ("a", "b", "c")]
    left = [0, 1, 2]
    for i in order:
        patches[i].remove()
        left.remove(i)
        assert owner.size == ("abc"[max(left)] if left else 1)
    assert vars(owner) == {"size": 1}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_values_that_are_the_same_object_are_told_apart(order):
    owner = types.SimpleNamespace(flag=True)
    patches = [Patch(owner, "flag", value) for value in (False, True, False)]
    left = [0, 1, 2]
    for i in order:
        patches[i].remove()
        left.remove(i)
        assert owner.flag is ([False, True, False][max(left)] if left else True)
    assert vars(owner) == {"flag": True}


def test_two_owners_have_patches_of_their_own():
    first, second = Scale(), Scale()
    patch = replace_method(first, "forward", add_one)
    replace_method(second, "forward", times_ten)
    patch.remove()
    assert is_plain(first)
    assert second(torch.tensor(1.0)) == 20


def test_a_wrapper_of_the_user_stays_over_what_was_there_before():
    module = Scale()
    patch = replace_method(module, "forward", add_one)
    wrapped = module.forward
    module.forward = lambda x: wrapped(x) * 10
    assert module(torch.tensor(1.0)) == 30
    patch.remove()
    assert module(torch.tensor(1.0)) == 20
    del module.forward
    assert is_plain(module)


def test_a_forward_of_the_user_below_is_called_and_comes_back():
    module = Scale()
    own = module.forward = lambda x: x + 5
    patch = replace_method(module, "forward", times_ten)
    assert module(torch.tensor(1.0)) == 60
    patch.remove()
    assert module.forward is own


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_patched_by_itself(copied):
    module = Scale()
    patch = replace_method(module, "forward", add_one)
    twin = copied(module)
    with torch.no_grad():
        twin.factor.fill_(7)
    assert (module(torch.tensor(1.0)), twin(torch.tensor(1.0))) == (3, 8)
    patch.remove()
    assert (module(torch.tensor(1.0)), twin(torch.tensor(1.0))) == (2, 8)
    patches_of(twin, "forward")[-1].remove()
    assert twin(torch.tensor(1.0)) == 7
    assert is_plain(twin)


def test_a_class_may_be_swapped_in_between():
    """As `fully_shard` does."""

    class Sharded(Scale):
        def forward(self, x):
            return super().forward(x) - 1

    module = Scale()
    patch = replace_method(module, "forward", times_ten)
    module.__class__ = Sharded
    assert module(torch.tensor(1.0)) == 10
    patch.remove()
    assert module(torch.tensor(1.0)) == 1
    assert is_plain(module)


def test_accelerate_wraps_and_unwraps(monkeypatch):
    module = Scale()
    patch = replace_method(module, "forward", add_one)
    module._original_forward = module.forward

    def wrap(function):
        @wraps(function)
        def wrapper(*args):
            return function(*args) * 10

        return wrapper

    module.forward = MethodType(wrap(module.forward.__func__), module)
    assert module(torch.tensor(1.0)) == 30
    unwrapped = extract_model_from_parallel(module, keep_fp32_wrapper=False)
    assert unwrapped is module
    assert module(torch.tensor(1.0)) == 3
    patch.remove()
    assert is_plain(module)


def test_accelerate_prepares_under_autocast():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    module = Scale()
    patch = replace_method(module, "forward", add_one)
    prepared = accelerator.prepare_model(module)
    assert prepared(torch.tensor(1.0)) == 3
    patch.remove()
    assert prepared(torch.tensor(1.0)) == 2
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)(torch.tensor(1.0)) == 2


def test_a_compiled_module_runs_the_patch():
    module = Scale()
    patch = replace_method(module, "forward", add_one)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert compiled(torch.tensor(1.0)) == 3
    patch.remove()
    torch._dynamo.reset()
    assert torch.compile(module, backend="eager")(torch.tensor(1.0)) == 2


def test_a_copy_of_a_method_that_was_bound_again_computes_with_its_own_weights():
    model = Scale()
    patch = replace_method(model, "forward", add_one)
    inner = model.forward.__func__
    model.forward = MethodType(lambda self, x: inner(self, x) * 10, model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.factor.fill_(5.0)
    x = torch.tensor(1.0)
    assert (model(x).item(), copied(x).item()) == (30, 60)
    patch.remove()
    assert (model(x).item(), copied(x).item()) == (20, 60)
    patches_of(copied, "forward")[0].remove()
    assert copied(x).item() == 50


def test_nothing_of_ours_is_pickled_once_a_patch_below_a_wrapper_is_removed():
    model = Scale()
    patch = replace_method(model, "forward", add_one)
    kept = model.forward
    model.forward = lambda x: kept(x)
    patch.remove()
    model.forward = kept  # whose wrapper is taken off
    content = pickle.dumps(model)
    assert b"lightning_cp" not in content
    assert pickle.loads(content)(torch.tensor(1.0)).item() == 2
    model.forward = MethodType(kept.__func__, model)
    assert pickle.loads(pickle.dumps(model))(torch.tensor(1.0)).item() == 2
