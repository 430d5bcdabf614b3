"""Copies of a state in host memory, from which a thread writes."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint.folder import write_shards
from lightning_cp.checkpoint.staging import HostStager
from lightning_cp.memory import arena


def test_a_copy_has_the_structure_and_types_of_the_state_and_does_not_change_with_it():
    weight = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    state = {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "nested": [torch.tensor(3, dtype=torch.int32), (torch.empty(0, 4), torch.tensor([True]))],
        "half": torch.ones(5, dtype=torch.bfloat16),
        "eight": torch.ones(4).to(torch.float8_e4m3fn),
        "four": torch.tensor([1, 2], dtype=torch.uint8).view(torch.uint4),
        "complex": [x := torch.tensor([1 + 2j]), x.conj()],
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "part": torch.arange(10_000.0)[3:5],
        "groups": [{"lr": 0.1, "seen": {1, 2}}],
    }
    copy = HostStager().stage(state)
    weight += 1
    for tensor in (x, state["nested"][0], *state["nested"][1], state["half"], state["part"]):
        tensor.zero_()
    state["eight"].view(torch.uint8).zero_()
    state["four"].view(torch.uint8).zero_()
    state["groups"][0]["lr"] = 0.2
    state["groups"][0]["seen"].add(3)
    exact = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    assert torch.equal(copy["weight"], exact)
    assert copy["tied"].data_ptr() == copy["weight"].data_ptr()
    assert torch.equal(copy["transposed"], exact.t())
    assert copy["nested"][0] == 3
    assert copy["nested"][0].dtype == torch.int32
    assert copy["nested"][1][0].shape == (0, 4)
    assert copy["nested"][1][1].dtype == torch.bool
    assert copy["half"].sum() == 5
    assert copy["complex"] == [torch.tensor([1 + 2j]), torch.tensor([1 - 2j])]
    assert copy["eight"].float().tolist() == [1] * 4
    assert (copy["four"].dtype, copy["four"].view(torch.uint8).tolist()) == (torch.uint4, [1, 2])
    assert copy["negative"].tolist() == [-2]
    assert copy["part"].tolist() == [3, 4]
    assert copy["groups"] == [{"lr": 0.1, "seen": {1, 2}}]
    assert copy["half"].untyped_storage().nbytes() == 10  # torch's writer clones other views


@pytest.mark.slow
def test_memory_is_used_again_and_grows_with_the_state():
    stager = HostStager()
    pointers = [stager.stage({"a": torch.ones(n)})["a"].data_ptr() for n in (10, 10, 3)]
    assert len(set(pointers)) == 1
    larger = stager.stage({"a": torch.ones(10), "b": torch.full((2**27,), 2.0)})
    assert larger["a"].sum() == 10
    assert larger["b"][-1] == 2


def test_memory_that_is_not_there_is_an_error_that_says_what_to_do(monkeypatch):
    def refuse(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arena, "_map_memory", refuse)
    state = {"a": torch.empty(2**28)}
    with pytest.raises(MemoryError, match=r"copies 1.00 GiB of each rank .* Leave it out"):
        HostStager().stage(state)


def copy_shards(folder):
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(5 * 10_000.0).view(5, -1)
    shard = distribute_tensor(full, mesh, [Shard(0)])
    copy = HostStager().stage({"shard": shard, "other": torch.ones(10_000)})
    shard.to_local().zero_()
    write_shards(copy, folder)
    size = sum(os.path.getsize(folder / name) for name in os.listdir(folder))
    dist.barrier()
    return copy["shard"].placements, torch.equal(copy["shard"].full_tensor(), full), size


@pytest.mark.ranks
def test_shards_stay_shards_of_which_only_their_own_bytes_are_written(ranks, tmp_path):
    for placements, is_same, size in ranks(2).run(copy_shards, tmp_path):
        assert placements == (Shard(0),)
        assert is_same
        assert size < 4 * 65_000
