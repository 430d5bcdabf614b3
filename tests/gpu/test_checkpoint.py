"""Checkpoints that are copied from a GPU while it goes on."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint.host_copies import HostCopies, Room
from tests.lightning.mesh_runs import check, run_alone, run_fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("room", ["all", "some", "none"])
def test_tensors_may_be_changed_while_they_are_copied(monkeypatch, room):
    size = 2**28  # a GiB takes 20 ms
    state = {"a": [torch.full((size,), 1.0, device="cuda") for _ in range(4)], "b": torch.ones(3)}
    state["tied"] = state["a"][0]
    limit = {"all": sys.maxsize, "some": 2 * 2**30 + 1, "none": 0}[room]
    monkeypatch.setattr(Room, "take", lambda _, num_bytes: min(num_bytes, limit))
    copies = HostCopies()
    for value in (1.0, 2.0):
        finish = copies.copy(state)
        for x in (*state["a"], state["b"]):
            x.data.add_(1)
        copy = finish()
        assert all(bool((x == value).all()) for x in (*copy["a"], copy["b"]))
        assert copy["a"][0].is_pinned()
        assert copy["tied"].data_ptr() == copy["a"][0].data_ptr()


def test_clones_leave_the_memory_of_the_largest_step():
    """A step as large as one before finds its memory while the clones exist, save after save."""
    state = {"a": [torch.ones(2**26, device="cuda") for _ in range(16)]}  # 4 GiB
    used, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((used + 17 * 2**30) / total)
    try:
        torch.cuda.reset_peak_memory_stats()
        copies = HostCopies()
        for value in (1.0, 2.0, 3.0):
            take_memory(12)
            finish = copies.copy(state)
            cloned = torch.cuda.memory_allocated() - used
            take_memory(12)
            for x in state["a"]:
                x.add_(1)
            assert all(bool((x == value).all()) for x in finish()["a"])
            assert 2**30 <= cloned <= 3 * 2**30  # a half of 5 GiB at first
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def take_memory(num_gib):
    memory = [torch.ones(2**28, device="cuda") for _ in range(num_gib)]
    del memory


def test_other_copies_to_the_host_do_not_wait_for_those_of_a_state(monkeypatch):
    monkeypatch.setattr(Room, "take", lambda _, num_bytes: num_bytes)
    state = {"a": [torch.ones(2**28, device="cuda") for _ in range(8)]}  # 8 GiB: 160 ms
    copies, x = HostCopies(), torch.ones(1, device="cuda")
    copies.copy(state)()  # pins memory
    with ThreadPoolExecutor(1) as thread:
        saved = thread.submit(copies.copy(state))
        num_items = 0
        while not saved.done():
            x.item()
            num_items += 1
    assert num_items > 20


def test_a_model_may_be_changed_while_it_is_saved(nccl, tmp_path):
    """A run that saves in the background, and another one that resumes from there."""
    exact = run_alone("llama", 4, epochs=2, device="cuda")
    path, arguments = str(tmp_path / "a"), ("llama", 4, 2, {"async_checkpoint": True})
    pool = nccl(2)
    pool.run(partial(run_fit, save=path), *arguments, timeout=300)
    resume = partial(run_fit, resume=path, epochs=2)
    for found in pool.run(resume, *arguments, timeout=300):
        check(found, exact)


def test_parameters_are_copied_as_tensors():
    model = nn.Linear(3, 3, device="cuda")
    copy = HostCopies().copy(dict(model.named_parameters()))()
    assert not copy["weight"].requires_grad
    assert torch.equal(copy["weight"], model.weight.detach().cpu())
