"""Checkpoints that are copied from a GPU, and written while it goes on."""

import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cp.checkpoint import BackgroundSaver
from lightning_cp.checkpoint.staging import HostStager
from tests.lightning.mesh_runs import check, run_alone, run_fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def sleep_and_write(x, value):
    """Launch a kernel that takes some 0.5 s, and after it one that writes."""
    torch.cuda._sleep(10**9)
    x.fill_(value)


def test_a_copy_has_what_the_gpu_still_had_to_write_and_nothing_later():
    x = torch.zeros(2**28, device="cuda")  # a GiB
    stager = HostStager()
    for value in (1.0, 2.0):  # the second time, memory is pinned
        sleep_and_write(x, value)
        copy = stager.stage({"x": x, "tied": x})
        x.fill_(-1)
        assert bool((copy["x"] == value).all())
        assert copy["x"].is_pinned()
        assert copy["tied"].data_ptr() == copy["x"].data_ptr()


def test_a_copy_comes_after_the_stream_of_the_caller():
    side, x = torch.cuda.Stream(), torch.zeros(2**20, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sleep_and_write(x, 1)
        copy = HostStager().stage([x])
    assert bool((copy[0] == 1).all())


def test_odd_tensors_of_a_gpu_are_copied():
    large = torch.arange(2.0**24, device="cuda").view(2**10, -1)
    state = {
        "transposed": large.t(),
        "every other": large[:, ::2],
        "conjugate": torch.tensor([1 + 2j], device="cuda").conj(),
        "negative": torch.tensor([1 + 2j], device="cuda").conj().imag,
        "eight": torch.ones(4, device="cuda").to(torch.float8_e4m3fn),
        "four": torch.tensor([1, 2], dtype=torch.uint8, device="cuda").view(torch.uint4),
        "number": torch.tensor(3, device="cuda"),
        "empty": torch.empty(0, 4, device="cuda"),
        "host": torch.ones(3),
    }
    exact = {name: x.cpu() for name, x in state.items() if name != "four"}
    copy = HostStager().stage(state)
    others = torch.zeros(2**25, device="cuda")  # would take the memory of a contiguous copy
    for name, x in exact.items():
        assert copy[name].dtype == x.dtype
        found = copy[name].float() if name == "eight" else copy[name]
        assert torch.equal(found, x.float() if name == "eight" else x), name
    assert copy["four"].view(torch.uint8).tolist() == [1, 2]
    assert not others.any()


def saved_value(folder):
    found = {"state_dict": {"x": torch.zeros(2**24)}}
    state_dict_loader.load(found, checkpoint_id=folder, no_dist=True)
    assert len(found["state_dict"]["x"].unique()) == 1
    return found["state_dict"]["x"][0].item()


def test_weights_may_be_written_as_soon_as_a_save_returns(monkeypatch, tmp_path):
    """Each save has its own values, also one that is started while the former is written."""
    x, saver = torch.zeros(2**24, device="cuda"), BackgroundSaver()
    write = FileSystemWriter.write_data

    def write_slowly(*args):
        time.sleep(1)
        return write(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_slowly)
    for value in (1.0, 2.0, 3.0):
        sleep_and_write(x, value)
        saver.save({"state_dict": {"x": x}}, {}, tmp_path / str(value))
        x.fill_(-1)
        assert not (tmp_path / str(value)).exists()
    saver.close()
    assert [saved_value(tmp_path / str(value)) for value in (1.0, 2.0, 3.0)] == [1, 2, 3]


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
    copy = HostStager().stage(dict(model.named_parameters()))
    assert not copy["weight"].requires_grad
    assert torch.equal(copy["weight"], model.weight.detach().cpu())
