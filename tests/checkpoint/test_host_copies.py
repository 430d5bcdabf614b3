"""Copies of a state in host memory."""

import errno
import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_cp.checkpoint import host_copies
from lightning_cp.checkpoint.folder import write_shards
from lightning_cp.checkpoint.host_copies import HostCopies, Room
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


@pytest.mark.slow
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


class FakeStream:
    """The stream of a GPU that computes at once."""

    device = torch.device("cpu")
    synchronize = wait_stream = record = lambda *_: None


@pytest.mark.parametrize("room", [0, 60, 10**9])
def test_tensors_are_cloned_while_there_is_room_and_copied_later(monkeypatch, room):
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeStream())
    monkeypatch.setattr(host_copies, "_PIECE_BYTES", 24)
    monkeypatch.setattr(Room, "take", lambda _, num_bytes: min(num_bytes, room))
    given = []
    monkeypatch.setattr(Room, "give", lambda _: given.append(True))
    copies = HostCopies()
    copies._stream = FakeStream()
    tensors = [torch.arange(20.0), torch.arange(6).view(2, 3).t(), torch.empty(0), torch.tensor(2)]
    tensors += [torch.ones(5, dtype=torch.bfloat16), torch.tensor([1 + 2j]).conj()]
    exact = [x.clone() for x in tensors]
    found = [torch.full_like(x, 7, memory_format=torch.contiguous_format) for x in tensors]
    finish = copies._copy_all(list(zip(tensors, found, strict=True)), is_cuda=True)
    for x in tensors:
        x.zero_()
    if room == 10**9:
        assert found[0].eq(7).all()  # in the background
    finish()
    assert given
    for x, y in zip(exact, found, strict=True):
        assert torch.equal(x, y)


GIB = 2**30


def rooms(monkeypatch, *states, size=15):
    """Return what may be cloned; states are (in use, held by torch, peak, free), in GiB."""
    room, results = Room(), []
    for used, reserved, peak, free in states:
        numbers = (used * GIB, reserved * GIB, peak * GIB)
        monkeypatch.setattr(host_copies, "allocated_bytes", lambda numbers=numbers: numbers)
        monkeypatch.setattr(host_copies, "free_bytes", lambda free=free: free * GIB)
        results.append(room.take(size * GIB) / GIB)
        # Steps use the same memory while the clones exist.
        with_clones = (numbers[0], numbers[1], numbers[2] + int(results[-1] * GIB))
        monkeypatch.setattr(host_copies, "allocated_bytes", lambda numbers=with_clones: numbers)
        room.give()
    return results


def test_clones_take_half_of_what_steps_have_never_used(monkeypatch):
    # Save after save: the peak with clones is not one of steps, nor do steps need their memory.
    assert (
        rooms(monkeypatch, (15, 108, 107, 30), (15, 123, 122, 15), (15, 123, 122, 15)) == [15] * 3
    )
    assert rooms(monkeypatch, (15, 129, 128, 10)) == [5]
    # A longer batch between the saves, without clones.
    assert rooms(monkeypatch, (15, 61, 60, 78), (15, 131, 130, 8)) == [15, 4.5]


def test_nothing_is_cloned_where_the_memory_of_steps_is_not_known(monkeypatch):
    """No step has run, or a callback resets the statistics; or the cache was emptied."""
    assert rooms(monkeypatch, (15, 16, 15, 123)) == [0]
    assert rooms(monkeypatch, (15, 129, 128, 10), (15, 129, 15, 10)) == [5, 5.5]
    assert rooms(monkeypatch, (15, 16, 128, 122)) == [5]


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
