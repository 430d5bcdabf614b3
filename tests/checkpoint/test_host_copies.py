"""Copies of a state in host memory."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint.folder import write_shards
from lightning_cp.checkpoint.host_copies import HostCopies
from lightning_cp.memory import arena


def test_a_copy_has_the_structure_and_types_of_the_state_and_does_not_change_with_it():
    weight = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    state = {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "nested": [torch.tensor(3, dtype=torch.int32), (torch.empty(0, 4), torch.tensor([True]))],
        "half": torch.ones(5, dtype=torch.bfloat16),
        "complex": [x := torch.tensor([1 + 2j]), x.conj()],
        "groups": [{"lr": 0.1, "seen": {1, 2}}],
    }
    copies = HostCopies()
    finish = copies.copy(state)
    weight += 1
    state["groups"][0]["lr"] = 0.2
    state["groups"][0]["seen"].add(3)
    copy = finish()
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
    assert copy["groups"] == [{"lr": 0.1, "seen": {1, 2}}]
    assert copy["half"].untyped_storage().nbytes() == 10  # torch's writer clones other views


def test_memory_is_used_again_and_grows_with_the_state():
    copies = HostCopies()
    pointers = [copies.copy({"a": torch.ones(n)})()["a"].data_ptr() for n in (10, 10, 3)]
    assert len(set(pointers)) == 1
    larger = copies.copy({"a": torch.ones(10), "b": torch.full((2**27,), 2.0)})()
    assert larger["a"].sum() == 10
    assert larger["b"][-1] == 2


def test_memory_that_cannot_be_pinned_is_an_error_that_says_what_to_do(monkeypatch):
    def refuse(_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arena, "_map_memory", refuse)
    with pytest.raises(MemoryError, match=r"copies 1.00 GiB of each rank .* checkpoint_staging_di"):
        HostCopies()._take(2**30, pinned=True)


def copy_shards(folder):
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(5 * 10_000.0).view(5, -1)
    shard = distribute_tensor(full, mesh, [Shard(0)])
    finish = HostCopies().copy({"shard": shard, "other": torch.ones(10_000)})
    shard.to_local().zero_()
    copy = finish()
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
