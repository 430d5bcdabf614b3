"""Checkpoints that are copied from a GPU while it goes on."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint import host_copies
from lightning_cp.checkpoint.host_copies import HostCopies
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
    if room != "all":
        free = 2 * (2 * 2**30 + 1) if room == "some" else 0  # a half is used
        monkeypatch.setattr(host_copies, "free_bytes", lambda: free)
    copies = HostCopies()
    for value in (1.0, 2.0):
        finish = copies.copy(state)
        for x in (*state["a"], state["b"]):
            x.data.add_(1)
        copy = finish()
        assert all(bool((x == value).all()) for x in (*copy["a"], copy["b"]))
        assert copy["a"][0].is_pinned()
        assert copy["tied"].data_ptr() == copy["a"][0].data_ptr()


def test_the_clones_are_returned_when_memory_runs_out():
    """An allocation that needs the memory of the clones waits for the copies."""
    free = host_copies.free_bytes()
    state = {"a": [torch.ones(2**28, device="cuda") for _ in range(4)]}
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, (torch.cuda.memory_allocated() + 5 * 2**30) / torch.cuda.mem_get_info()[1])
    )
    try:
        assert free > 10 * 2**30
        copies = HostCopies()
        finish = copies.copy(state)
        x = torch.ones(2**29, device="cuda")  # 2 GiB, of which there is one
        finish()
        assert float(x.sum()) == 2**29
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


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
