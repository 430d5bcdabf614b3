"""Checkpoints: any number of ranks, any door, killed at any moment."""

import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_cp import checkpoint
from lightning_cp.checkpoint import checksums
from lightning_cp.checkpoint import folder as folders
from lightning_cp.checkpoint.command import main
from tests.ranks import RankError

KINDS = ["adam", "momentum", "sgd"]


class Net(nn.Module):
    """Sizes that ranks do not divide, a tied weight, a buffer, an extra state."""

    def __init__(self, adapter=False):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = "fresh"
        if adapter:
            self.adapter = nn.Linear(6, 6)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        if hasattr(self, "adapter"):
            x = x + self.adapter(x)
        self.seen += 1
        return self.head(self.norm(x))


def build_optimizer(model, kind):
    """Groups in another order than the model's, with rates of their own."""
    late = [p for name, p in model.named_parameters() if name.startswith(("norm", "blocks.1"))]
    others = [p for p in model.parameters() if all(p is not q for q in late)]
    groups = [{"params": late, "lr": 0.05}, {"params": others}]
    if kind == "adam":
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9 if kind == "momentum" else 0)


def build(kind, *, seed, mesh=None, adapter=False):
    torch.manual_seed(seed)
    model = Net(adapter)
    if mesh == "tensor":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for block in model.blocks:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(block, grid["tensor"], plan)
            fully_shard(block, mesh=grid["data"])
        fully_shard(model, mesh=grid["data"])
    elif mesh is not None:
        world = dist.group.WORLD.size()
        shape = {"sharded": (world,), "replicated": (world, 1), "hybrid": (world // 2, 2)}[mesh]
        grid = init_device_mesh("cpu", shape, mesh_dim_names=("rep", "shard")[-len(shape) :])
        for block in model.blocks:
            fully_shard(block, mesh=grid)
        fully_shard(model, mesh=grid)
    return model, build_optimizer(model, kind)


def train(model, optimizer, steps):
    """Same rows on all ranks: the mean over 2 or 4 ranks is exact."""
    ids = torch.arange(21).view(3, 7) % 7
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.note = f"{steps} steps"


def plain(kind, steps):
    """Return what a plain checkpoint of one device holds."""
    model, optimizer = build(kind, seed=1)
    train(model, optimizer, steps)
    return model.state_dict(), [optimizer.state_dict()]


def assert_same(a, b, where="", tolerance=0.0):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}", tolerance)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}.{index}", tolerance)
    elif isinstance(a, torch.Tensor):
        assert type(b) is torch.Tensor, where
        assert a.dtype == b.dtype, where
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda m: f"{where}: {m}")
    else:
        assert a == b, where


def full_state(model, optimizers, *, full=True):
    """Return ``state_dict`` and ``optimizer_states`` of a single-device checkpoint, or shards."""
    states = [checkpoint.optimizer_state(model, x, full=full) for x in optimizers]
    return checkpoint.model_state(model, full=full), states


def sharded_state(model, optimizers):
    return full_state(model, optimizers, full=False)


def state_for_folder(model, *optimizers):
    weights, states = sharded_state(model, optimizers)
    return {"state_dict": weights} | {f"optimizer_{i}": s for i, s in enumerate(states)}


def save_on_ranks(folder, kind, steps, meta=None, mesh="sharded"):
    model, optimizer = build(kind, seed=1, mesh=mesh)
    train(model, optimizer, steps)
    checkpoint.save_folder(state_for_folder(model, optimizer), meta or {"steps": steps}, folder)
    return full_state(model, [optimizer])


def resume_on_ranks(path, kind, mesh, steps=0):
    """Load into a fresh model, train on, and return everything, whole."""
    model, optimizer = build(kind, seed=2, mesh=mesh)
    load = checkpoint.load_folder if path.is_dir() else checkpoint.load_file
    meta = load(model, [optimizer], path, strict=True, weights_only=None)
    assert model.head.weight is model.embed.weight
    note = model.note
    train(model, optimizer, steps)
    model.note = note
    return meta, full_state(model, [optimizer])


def resume_here(path, kind, steps=0):
    return resume_on_ranks(path, kind, None, steps)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Folders of two steps on two ranks, by kind of optimizer."""
    root = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        ranks(2).run(save_on_ranks, root / kind, kind, 2)
    return root


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_full_state_has_the_form_of_one_device(ranks, tmp_path, kind):
    whole, empty = ranks(2).run(save_on_ranks, tmp_path / "a.ckpt", kind, 2)
    assert empty == ({}, [{}])
    assert_same(list(plain(kind, 2)), list(whole))
    assert whole[0]["head.weight"].data_ptr() == whole[0]["embed.weight"].data_ptr()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    files = {".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "meta.pt"}
    assert set(os.listdir(tmp_path / "a.ckpt")) == files


def resumes():
    """Return combinations, of which a few of each optimizer are quick."""
    worlds = [(1, "sharded"), (2, "sharded"), (2, "replicated"), (4, "sharded"), (4, "replicated")]
    quick = {"adam": worlds[:1] + worlds[3:4], "momentum": worlds[1:2], "sgd": worlds[2:3]}
    for kind, world in itertools.product(KINDS, worlds):
        is_quick = world in quick[kind]
        yield pytest.param(kind, *world, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "world", "mesh"), list(resumes()))
def test_folder_resumes_on_any_number_of_ranks(ranks, saved, kind, world, mesh):
    meta, whole = ranks(world).run(resume_on_ranks, saved / kind, kind, mesh, 0)[0]
    assert meta == {"steps": 2}
    assert_same(list(plain(kind, 2)), list(whole))
    assert whole[0]["_extra_state"] == {"note": "2 steps"}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("mesh", ["hybrid", "tensor"])
def test_meshes_of_two_axes_save_and_load(ranks, saved, tmp_path, mesh):
    whole = ranks(4).run(save_on_ranks, tmp_path / "a", "adam", 2, None, mesh)[0]
    assert_same(list(plain("adam", 2)), list(whole), tolerance=1e-5)
    again = ranks(4).run(resume_on_ranks, tmp_path / "a", "adam", mesh)[0][1]
    assert_same(list(whole), list(again))
    assert_same(list(whole), list(resume_here(tmp_path / "a", "adam")[1]))
    checkpoint.consolidate(saved / "adam", tmp_path / "b.ckpt")
    from_file = ranks(4).run(resume_on_ranks, tmp_path / "b.ckpt", "adam", mesh)[0][1]
    assert_same(list(plain("adam", 2)), list(from_file))


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_without_a_group_loads_and_trains_on(saved, kind):
    meta, whole = resume_here(saved / kind, kind, steps=1)
    assert meta == {"steps": 2}
    weights, states = plain(kind, 3)
    weights["_extra_state"] = {"note": "2 steps"}
    assert_same([weights, states], list(whole))


@pytest.mark.ranks
def test_ranks_train_on_as_if_nothing_had_happened(ranks, saved):
    whole = ranks(2).run(resume_on_ranks, saved / "adam", "adam", "sharded", 1)[0][1]
    weights, states = plain("adam", 3)
    weights["_extra_state"] = {"note": "2 steps"}
    assert_same([weights, states], list(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_optimizer_is_saved_fresh(tmp_path, kind):
    model, optimizer = build(kind, seed=1)
    checkpoint.save_folder(state_for_folder(model, optimizer), {}, tmp_path / "a")
    assert not optimizer.state
    whole = resume_here(tmp_path / "a", kind)[1]
    assert whole[1][0]["state"] == {}
    checkpoint.consolidate(tmp_path / "a", tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt")["optimizer_states"] == [optimizer.state_dict()]


def save_as_lightning_does(folder, kind, steps):
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as dcp_state

    model, optimizer = build(kind, seed=1, mesh="sharded")
    train(model, optimizer, steps)
    options = dcp_state.StateDictOptions(full_state_dict=False, cpu_offload=True)
    state = {
        "state_dict": dcp_state.get_model_state_dict(model, options=options),
        "optimizer_0": dcp_state.get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save({"steps": steps}, folder / "meta.pt")


@pytest.mark.ranks
def test_a_folder_of_lightning_loads(ranks, tmp_path):
    ranks(2).run(save_as_lightning_does, tmp_path / "a", "adam", 2)
    assert checkpoint.is_checkpoint_folder(tmp_path / "a")
    meta, whole = ranks(4).run(resume_on_ranks, tmp_path / "a", "adam", "sharded")[0]
    assert meta == {"steps": 2}
    assert_same(list(plain("adam", 2)), list(whole))


# Strictness


def load_with_adapter(path, mesh):
    """Return what the adapter and its optimizer state were and are, and the rest, whole."""
    model, optimizer = build("adam", seed=2, mesh=mesh, adapter=True)
    load = checkpoint.load_folder if path.is_dir() else checkpoint.load_file
    with pytest.raises(ValueError, match=r"4 missing \(adapter.weight.*strict_loading=False"):
        load(model, [optimizer], path, strict=True, weights_only=None)
    train(model, optimizer, 1)
    before = full_state(model, [optimizer])
    before = pickle.loads(pickle.dumps(before))
    load(model, [optimizer], path, strict=False, weights_only=None)
    return before, full_state(model, [optimizer])


@pytest.mark.ranks
def test_without_strict_an_added_adapter_keeps_its_values(ranks, saved):
    before, after = ranks(2).run(load_with_adapter, saved / "adam", "sharded")[0]
    weights, (state,) = plain("adam", 2)
    names = ["adapter.weight", "adapter.bias"]
    assert_same({n: before[0][n] for n in names}, {n: after[0].pop(n) for n in names})
    assert_same(dict(weights), after[0])
    adapter = after[1][0]["param_groups"][1]["params"][-2:]
    assert_same(
        {i: before[1][0]["state"][i] for i in adapter},
        {i: after[1][0]["state"].pop(i) for i in adapter},
    )
    assert_same(state["state"], after[1][0]["state"])


@pytest.mark.ranks
def test_keys_of_the_checkpoint_that_the_model_lacks(ranks, tmp_path):
    model, optimizer = build("adam", seed=1, adapter=True)
    train(model, optimizer, 2)
    checkpoint.save_folder(state_for_folder(model, optimizer), {}, tmp_path / "a")
    model, optimizer = build("adam", seed=2)
    with pytest.raises(ValueError, match=r"4 unexpected \(adapter.weight, adapter.bias, optim"):
        checkpoint.load_folder(model, [optimizer], tmp_path / "a", strict=True, weights_only=None)
    checkpoint.load_folder(model, [optimizer], tmp_path / "a", strict=False, weights_only=None)
    assert optimizer.state[model.embed.weight]["step"] == 2
    with pytest.raises(ValueError, match=r"2 unexpected"):
        checkpoint.load_weights(model, tmp_path / "a")


def test_another_shape_is_refused(saved):
    model, _ = build("sgd", seed=1)
    model.norm = nn.LayerNorm(5)
    with pytest.raises(ValueError, match=r"`norm.weight` has shape \(6,\) in .* and \(5,\) in the"):
        checkpoint.load_folder(model, [], saved / "sgd", strict=False, weights_only=None)


def test_more_than_five_keys_are_counted(saved):
    model = nn.ModuleDict({"other": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"2 missing .* and 14 unexpected \(([^,]*, ){5}\.\.\.\)"):
        checkpoint.load_weights(model, saved / "sgd")


def test_weights_without_optimizer_states_do_not_resume(tmp_path):
    model, optimizer = build("adam", seed=1)
    checkpoint.save_folder(state_for_folder(model), {}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"11 missing \(optimizer 0: blocks"):
        checkpoint.load_folder(model, [optimizer], tmp_path / "a", strict=True, weights_only=None)
    checkpoint.load_folder(model, [], tmp_path / "a", strict=True, weights_only=None)


def test_a_parameter_outside_the_model_has_no_name():
    model, _ = build("adam", seed=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match=r"a parameter of shape \(2,\) that is not in the model"):
        sharded_state(model, [optimizer])


def test_the_meta_device_is_refused(saved):
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match=r"is on the meta device, which has no values"):
        checkpoint.load_weights(model, saved / "sgd")


def keep_a_local_state():
    model, optimizer = build("adam", seed=1, mesh="sharded")
    optimizer.state[model.norm.weight]["block"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"`norm.weight` is a plain tensor of shape \(3,\)"):
        sharded_state(model, [optimizer])


@pytest.mark.ranks
def test_state_that_is_local_to_a_rank_is_refused(ranks):
    ranks(2).run(keep_a_local_state)


def test_names_of_compiled_and_checkpointed_modules_are_plain(saved, tmp_path):
    model, optimizer = build("adam", seed=2)
    model.blocks[0] = torch.compile(model.blocks[0])
    checkpoint.load_folder(model, [optimizer], saved / "adam", strict=True, weights_only=None)
    assert_same(list(plain("adam", 2)), list(full_state(model, [optimizer])))
    torch.save({"state_dict": model.state_dict(), "optimizer_states": []}, tmp_path / "c.ckpt")
    other, _ = build("adam", seed=3)
    checkpoint.load_file(other, [], tmp_path / "c.ckpt", strict=True, weights_only=None)
    assert_same(dict(other.state_dict()), checkpoint.model_state(model, full=True))


# What meta.pt may hold


def test_weights_only_is_honoured(tmp_path):
    model, _ = build("sgd", seed=1)
    meta = {"hyper_parameters": {"root": Path("data")}, "state_dict": model.state_dict()}
    checkpoint.save_folder(state_for_folder(model), meta, tmp_path / "a")
    torch.save(meta, tmp_path / "a.ckpt")
    for load, path in ((checkpoint.load_folder, "a"), (checkpoint.load_file, "a.ckpt")):
        for weights_only in (None, True):
            with pytest.raises(
                pickle.UnpicklingError, match="pass `weights_only=False` to `trainer.fit`"
            ):
                load(model, [], tmp_path / path, strict=True, weights_only=weights_only)
        loaded = load(model, [], tmp_path / path, strict=True, weights_only=False)
        assert loaded["hyper_parameters"] == meta["hyper_parameters"]


# Killed saves


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(folder, moment, rank):
    rename, remove = os.rename, folders.remove

    def second_rename(source, target):
        die() if target == folder else rename(source, target)

    def last_remove(path):
        die() if path.name.endswith(".replaced") and path.exists() else remove(path)

    if dist.get_rank() == rank:
        if moment == "shards":
            FileSystemWriter.write_data = die
        elif moment == "rename":
            os.rename = second_rename
        else:
            setattr(folders, moment, last_remove if moment == "remove" else die)
    save_on_ranks(folder, "adam", 3)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("moment", "rank", "steps", "left"),
    [
        pytest.param("write_shards", 0, 2, ".a.saving", marks=pytest.mark.slow),
        ("shards", 1, 2, None),
        pytest.param("_write_meta", 0, 2, ".a.saving", marks=pytest.mark.slow),
        pytest.param("_put_in_place", 0, 2, ".a.saving", marks=pytest.mark.slow),
        pytest.param("rename", 0, 2, ".a.replaced", marks=pytest.mark.slow),
        pytest.param("remove", 0, 3, ".a.replaced", marks=pytest.mark.slow),
    ],
)
def test_a_killed_save_leaves_a_checkpoint(ranks, tmp_path, moment, rank, steps, left):
    folder = tmp_path / "a"
    ranks(2).run(save_on_ranks, folder, "adam", 2)
    with pytest.raises(RankError):
        ranks(2).run(save_and_die, folder, moment, rank)
    if left:
        assert any(name.startswith(left) for name in os.listdir(tmp_path)), "killed too early"
    assert checkpoint.is_checkpoint_folder(folder)
    model, optimizer = build("adam", seed=2)
    meta = checkpoint.load_folder(model, [optimizer], folder, strict=True, weights_only=None)
    assert meta == {"steps": steps}
    assert_same(list(plain("adam", steps)), list(full_state(model, [optimizer])))
    ranks(2).run(save_on_ranks, folder, "adam", 1)
    assert os.listdir(tmp_path) == ["a"]
    assert resume_here(folder, "adam")[0] == {"steps": 1}


def fail_to_save(folder, what):
    write, rename, aside = FileSystemWriter.write_data, os.rename, folder.with_name(".a.replaced")

    def full(*args):
        raise OSError(28, "No space left on device")

    meta = {"steps": 3}
    if what == "shards" and dist.get_rank() == 1:
        FileSystemWriter.write_data = full
    elif what == "meta":
        meta["bad"] = lambda: None
    elif what == "rename":
        os.rename = lambda a, b: full() if b == folder and a != aside else rename(a, b)
    try:
        save_on_ranks(folder, "adam", 3, meta)
    except RuntimeError as error:
        return str(error)
    finally:
        FileSystemWriter.write_data, os.rename = write, rename


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shards", "Rank 1 failed: OSError: [Errno 28] No space left on device."),
        ("meta", "Rank 0 failed: "),
        ("rename", "Rank 0 failed: OSError: [Errno 28] No space left on device."),
    ],
)
def test_the_failure_of_one_rank_is_raised_on_all(ranks, tmp_path, what, message):
    folder = tmp_path / "a"
    ranks(2).run(save_on_ranks, folder, "adam", 2)
    for text in ranks(2).run(fail_to_save, folder, what):
        assert text.startswith(message)
        assert text.endswith(f"{folder} was not saved; an existing checkpoint is unchanged.")
    assert os.listdir(tmp_path) == ["a"]
    assert resume_here(folder, "adam")[0] == {"steps": 2}


@pytest.mark.ranks
def test_the_only_checkpoint_outlives_a_kill_and_a_failure(ranks, tmp_path):
    folder = tmp_path / "a"
    ranks(2).run(save_on_ranks, folder, "adam", 2)
    with pytest.raises(RankError):
        ranks(2).run(save_and_die, folder, "rename", 0)
    ranks(2).run(fail_to_save, folder, "shards")
    assert os.listdir(tmp_path) == ["a"]
    assert resume_here(folder, "adam")[0] == {"steps": 2}


def test_a_file_of_the_same_name_is_replaced(tmp_path):
    (tmp_path / "a.ckpt").write_text("a single file")
    model, _ = build("sgd", seed=1)
    checkpoint.save_folder(state_for_folder(model), {}, tmp_path / "a.ckpt")
    assert checkpoint.is_checkpoint_folder(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def load_where_rank_1_sees_nothing(folder):
    path = folder if dist.get_rank() == 0 else folder / "elsewhere"
    model, _ = build("sgd", seed=1, mesh="sharded")
    try:
        checkpoint.load_folder(model, [], path, strict=True, weights_only=None)
    except (RuntimeError, FileNotFoundError) as error:
        return str(error)


@pytest.mark.ranks
def test_a_checkpoint_that_one_rank_cannot_read_fails_on_all(ranks, saved):
    first, second = ranks(2).run(load_where_rank_1_sees_nothing, saved / "sgd")
    assert first.startswith("Rank 1 failed: FileNotFoundError: There is no checkpoint f")
    assert second.startswith("There is no checkpoint f")


# Files, weights


def test_a_file_loads_by_names_too(tmp_path):
    model, optimizer = build("adam", seed=1)
    train(model, optimizer, 2)
    (state,) = sharded_state(model, [optimizer])[1]
    file = {"state_dict": model.state_dict(), "optimizer_states": [state], "epoch": 3}
    torch.save(file, tmp_path / "a.ckpt")
    meta, whole = resume_here(tmp_path / "a.ckpt", "adam")
    assert meta == {"epoch": 3}
    assert_same(list(plain("adam", 2)), list(whole))


def test_a_file_without_names_needs_the_same_groups(tmp_path):
    weights, states = plain("adam", 2)
    torch.save({"state_dict": weights, "optimizer_states": states}, tmp_path / "a.ckpt")
    model, optimizer = build("adam", seed=1, adapter=True)
    with pytest.raises(
        ValueError, match=r"groups of \[6, 5\] parameters, .* this one has \[6, 7\]"
    ):
        checkpoint.load_file(
            model, [optimizer], tmp_path / "a.ckpt", strict=False, weights_only=None
        )
    torch.save({"epoch": 1}, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="is not a Lightning checkpoint: it has no `state_dict`"):
        checkpoint.load_file(model, [], tmp_path / "b.ckpt", strict=True, weights_only=None)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint file"):
        checkpoint.load_file(model, [], tmp_path / "c.ckpt", strict=True, weights_only=None)
    with pytest.raises(ValueError, match="is not a checkpoint: `.metadata` is missing. Use"):
        checkpoint.load_file(model, [], tmp_path, strict=True, weights_only=None)


def test_what_a_file_gave_survives_its_overwriting(tmp_path):
    weights, _ = plain("sgd", 1)
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": weights, "score": torch.arange(9000.0)}, file)
    model, _ = build("sgd", seed=1)
    rest = checkpoint.load_file(model, [], file, strict=True, weights_only=None)
    file.write_bytes(b"")
    assert rest["score"].sum() == torch.arange(9000.0).sum()
    assert_same(dict(weights), dict(model.state_dict()))


def load_weights_on_ranks(sources, mesh):
    results = []
    for source, prefix, strict in sources:
        model, _ = build("sgd", seed=2, mesh=mesh)
        if not strict:  # no extra state in there
            with pytest.raises(ValueError, match=r"1 missing \(_extra_state\)"):
                checkpoint.load_weights(model, source, prefix=prefix)
        checkpoint.load_weights(model, source, prefix=prefix, strict=strict)
        results.append(checkpoint.model_state(model, full=True))
    return results


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "mesh"),
    [(1, None), (2, "sharded"), pytest.param(4, "tensor", marks=pytest.mark.slow)],
)
def test_weights_load_from_every_kind_of_source(ranks, saved, tmp_path, world, mesh):
    weights, _ = plain("adam", 2)
    weights = dict(weights)
    extra = weights.pop("_extra_state")
    hugging, single = tmp_path / "hugging", tmp_path / "single"
    hugging.mkdir()
    single.mkdir()
    # As Hugging Face does: the tied weight once, here in another precision.
    half = {n: v.bfloat16() for n, v in weights.items() if n != "head.weight"}
    parts = {"one.safetensors": list(half)[:4], "two.safetensors": list(half)[4:]}
    for file, names in parts.items():
        save_file({name: half[name] for name in names}, hugging / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (hugging / "model.safetensors.index.json").write_text(json.dumps(index))
    half["head.weight"] = half.pop("embed.weight")
    save_file(half, single / "model.safetensors")
    torch.save({**weights, "_extra_state": extra}, tmp_path / "bare.pt")
    lit = {f"net.{name}": value for name, value in weights.items()} | {"other": torch.zeros(1)}
    torch.save({"state_dict": lit}, tmp_path / "lit.ckpt")
    model = nn.ModuleDict({"net": build("sgd", seed=1)[0]})
    model["net"].load_state_dict({**weights, "_extra_state": extra})
    checkpoint.save_folder(state_for_folder(model), {"root": Path()}, tmp_path / "folder")
    in_half = [hugging, single, single / "model.safetensors"]
    sources = [(path, "", False) for path in in_half]
    sources += [(tmp_path / "bare.pt", "", True), (saved / "adam", "", True)]
    sources += [(tmp_path / "lit.ckpt", "net.", False), (tmp_path / "folder", "net.", True)]
    run = ranks(world).run(load_weights_on_ranks, sources, mesh)[0]
    rounded = {name: value.bfloat16().float() for name, value in weights.items()}
    for (source, *_), found in zip(sources, run, strict=True):
        found.pop("_extra_state")
        assert_same(rounded if source in in_half else weights, found, str(source))


def test_weights_from_nowhere(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no weights. Pass a checkpoint folder"):
        checkpoint.load_weights(Net(), tmp_path)


# Consolidated files


def lit_module():
    from lightning.pytorch import LightningModule

    class Lit(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch):
            logits = self.net(batch)
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(1, 1).flatten())

        def configure_optimizers(self):
            optimizer = build_optimizer(self.net, "adam")
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def train_dataloader(self):
            return torch.utils.data.DataLoader(torch.arange(28).view(4, 7) % 7, batch_size=2)

    return Lit


def fit(epochs, path=None):
    import warnings

    from lightning.pytorch import Trainer

    torch.manual_seed(1)
    module = lit_module()()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, ckpt_path=path)
    return trainer


def through_ranks(source, folder, file):
    """Load a plain file into shards, and save it as a folder and as a file."""
    model = nn.ModuleDict({"net": build("adam", seed=2, mesh="sharded")[0]})
    optimizer = build_optimizer(model["net"], "adam")
    rest = checkpoint.load_file(model, [optimizer], source, strict=True, weights_only=None)
    checkpoint.save_folder(state_for_folder(model, optimizer), rest, folder)
    weights, states = full_state(model, [optimizer])
    if dist.get_rank() == 0:
        torch.save({**rest, "state_dict": weights, "optimizer_states": states}, file)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plain_trainer_resumes_from_what_ranks_saved(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it at import
    source, folder, full, out = (tmp_path / n for n in ("plain.ckpt", "a", "full.ckpt", "out.ckpt"))
    fit(2).save_checkpoint(source)
    want = fit(3, source)
    ranks(2).run(through_ranks, source, folder, full)
    assert main(["consolidate", str(folder), str(out)]) == 0
    for path in (full, out):
        assert_same(torch.load(source), torch.load(path))
        got = fit(3, path)
        assert_same(dict(want.model.state_dict()), dict(got.model.state_dict()))
        assert_same(want.optimizers[0].state_dict(), got.optimizers[0].state_dict())
        loaded = lit_module().load_from_checkpoint(path)
        assert torch.equal(
            loaded.net.embed.weight, torch.load(path)["state_dict"]["net.embed.weight"]
        )


def test_the_command_line_says_what_is_wrong(saved, tmp_path, capsys):
    out = tmp_path / "out.ckpt"

    def error(*args):
        assert main(["consolidate", *map(str, args)]) == 2
        return capsys.readouterr().err

    assert "There is no checkpoint folder" in error(tmp_path / "none", out)
    assert "is not a checkpoint: `.metadata` is missing" in error(tmp_path, out)
    broken = tmp_path / "broken"
    broken.mkdir()
    names = (".metadata", "__0_0.distcp", "__1_0.distcp")
    for name in names:
        (broken / name).write_bytes((saved / "adam" / name).read_bytes())
    assert "is incomplete: `meta.pt` is missing" in error(broken, out)
    torch.save({}, broken / "meta.pt")
    (broken / "__1_0.distcp").write_bytes(b"short")
    assert "is incomplete: `__1_0.distcp` is missing or truncated" in error(broken, out)
    (broken / ".metadata").unlink()
    assert "is incomplete: `.metadata` is missing" in error(broken, out)
    assert "already exists. Pass the name of a file" in error(saved / "adam", broken)
    out.write_text("mine")
    assert "already exists. Remove it, or allow overwriting" in error(saved / "adam", out)
    assert out.read_text() == "mine"
    assert main(["consolidate", str(saved / "adam"), str(out), "--overwrite"]) == 0
    assert torch.load(out)["steps"] == 2
    assert sorted(os.listdir(tmp_path)) == ["broken", "out.ckpt"]


def test_help_is_there():
    command = [sys.executable, "-m", "lightning_cp", "consolidate", "--help"]
    assert "--overwrite" in subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.parametrize("distributed", [True, False])
def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path, distributed):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("years of work")
    save = save_in_folder if distributed else save_in_file
    with pytest.raises((IsADirectoryError, RuntimeError), match="exists and is a directory"):
        save(tmp_path / "results")
    assert (tmp_path / "results" / "thesis.txt").read_text() == "years of work"


def save_in_folder(path):
    checkpoint.save_folder({"state_dict": {}}, {}, path)


def save_in_file(path):
    with checkpoint.replacing(path):
        pass


# ---------------------------------------------------------------- checksums


def flip(path, at=None):
    """Change one byte, in the middle if not said where, and leave the size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 0x10
    path.write_bytes(content)


def zip_record(path, ending):
    """Return where the bytes of a record lie."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith(ending))
        archive.fp.seek(info.header_offset + 26)
        lengths = archive.fp.read(4)
    name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
    return info.header_offset + 30 + name + extra


def try_to_load(paths):
    """Load each; return what was said, and whether the model has kept its values."""
    said = []
    for path in paths:
        model, optimizer = build("adam", seed=2, mesh="sharded" if dist.is_initialized() else None)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        load = checkpoint.load_folder if Path(path).is_dir() else checkpoint.load_file
        try:
            load(model, [optimizer], Path(path), strict=True, weights_only=True)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("loaded")
        same = all(torch.equal(full(p), full(before[n])) for n, p in model.named_parameters())
        assert same == (said[-1] != "loaded")
    return said


def full(x):
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


@pytest.mark.ranks
def test_changed_bytes_are_refused_on_all_ranks(ranks, saved, tmp_path):
    folder = saved / "adam"
    files = sorted(file.name for file in folder.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "meta.pt"]
    files.remove("checksums.json")
    for name in files:
        shutil.copytree(folder, tmp_path / name)
        flip(tmp_path / name / name)
    model, optimizer = build("adam", seed=1)
    train(model, optimizer, 2)
    file = tmp_path / "file.ckpt"
    torch.save(
        {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, file
    )
    last = max(n for n in zipfile.ZipFile(file).namelist() if "/data/" in n)
    for name, record in (("first", "/data/0"), ("last", last), ("pickle", "data.pkl")):
        shutil.copy(file, tmp_path / f"{name}.ckpt")
        flip(tmp_path / f"{name}.ckpt", zip_record(file, record) + 9)
    whole = [folder, file]
    broken = [tmp_path / name for name in files]
    broken += [tmp_path / f"{name}.ckpt" for name in ("first", "last", "pickle")]
    for said in [try_to_load(whole + broken), *ranks(2).run(try_to_load, whole + broken)]:
        assert said[:2] == ["loaded", "loaded"]
        for path, message in zip(broken, said[2:], strict=True):
            name = "it" if path.suffix == ".ckpt" else f"`{path.name}`"
            assert f"{path} is damaged: {name} does not have the checksum" in message
            assert "Use another checkpoint" in message


def test_each_byte_of_a_checkpoint_is_checked_by_one_rank(saved, tmp_path):
    folder = shutil.copytree(saved / "adam", tmp_path / "adam")
    files = [file for file in folder.iterdir() if file.name != checksums.CHECKSUMS]
    assert len(files) == 4
    for file, size in itertools.product(files, (1, 2, 3, 7)):
        for place in (0, file.stat().st_size // 3, file.stat().st_size - 1):
            flip(file, place)
            assert num_refusing(folder, size) == 1, (file.name, size, place)
            flip(file, place)
    assert num_refusing(folder, 7) == 0


def num_refusing(folder, size):
    """Return how many of so many ranks find that a folder is damaged."""
    refusals = 0
    for rank in range(size):
        try:
            checksums.check_folder(folder, checksums.Share(rank, size), [])
        except ValueError:
            refusals += 1
    return refusals


@pytest.mark.parametrize(("place", "block"), [(5119, "5000 to 5120"), (1010, "1000 to 2000")])
def test_long_files_have_many_blocks(tmp_path, monkeypatch, place, block):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 1000)  # of 64 MiB
    monkeypatch.setattr(checksums, "BUFFER_BYTES", 300)  # blocks are read in parts
    (tmp_path / "a").write_bytes(bytes(range(256)) * 20)
    checksums.write_checksums(tmp_path, checksums.sum_files([tmp_path / "a"]))
    checksums.check_folder(tmp_path, checksums.ALL, [])
    flip(tmp_path / "a", place)
    with pytest.raises(ValueError, match=f"`a` does not have the checksum .* bytes {block}"):
        checksums.check_folder(tmp_path, checksums.ALL, [])


def test_checkpoints_without_checksums_load_and_it_is_said_once(saved, tmp_path, caplog):
    folder = shutil.copytree(saved / "adam", tmp_path / "old")
    (folder / checksums.CHECKSUMS).unlink()
    legacy = {"_use_new_zipfile_serialization": False}
    torch.save({"state_dict": Net().state_dict()}, tmp_path / "legacy.pt", **legacy)
    torch.serialization.set_crc32_options(False)
    torch.save({"state_dict": Net().state_dict()}, tmp_path / "none.pt")
    torch.serialization.set_crc32_options(True)
    with caplog.at_level("WARNING", "lightning_cp"):
        assert try_to_load([folder, folder]) == ["loaded", "loaded"]
        for name in ("legacy.pt", "none.pt"):
            checkpoint.load_weights(Net(), tmp_path / name)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert said[0] == f"{folder} has no checksums.json: damaged bytes would not be detected."
    assert "format without checksums" in said[1]
    assert "set_crc32_options(False)" in said[2]
    flip(folder / "meta.pt", zip_record(folder / "meta.pt", "data.pkl"))
    assert "meta.pt is damaged" in try_to_load([folder])[0]  # it is a zip file, with its own


def test_broken_checksums_are_named(saved, tmp_path):
    folder = shutil.copytree(saved / "adam", tmp_path / "copy")
    file = folder / checksums.CHECKSUMS
    content = json.loads(file.read_text())
    assert (content["version"], content["algorithm"]) == (1, "crc32")
    for wrong, match in (
        ("{", "`checksums.json` is not readable. Use another checkpoint"),
        (json.dumps({**content, "files": {"meta.pt": {"size": 9, "blocks": []}}}), "not readable"),
        (
            json.dumps({**content, "version": 2}),
            "supports version 1. Update lightning_cp, or",
        ),
    ):
        file.write_text(wrong)
        assert match in try_to_load([folder])[0]
    file.write_text(json.dumps(content))
    (folder / "__1_0.distcp").write_bytes(b"")
    assert "`__1_0.distcp` is missing or truncated" in try_to_load([folder])[0]


def test_a_file_that_was_cut_short_is_named(tmp_path):
    file = tmp_path / "cut.ckpt"
    torch.save({"state_dict": Net().state_dict()}, file)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match="cut.ckpt is damaged or truncated"):
        checkpoint.load_weights(Net(), file)


def test_the_command_line_refuses_changed_bytes(saved, tmp_path, capsys):
    folder = shutil.copytree(saved / "adam", tmp_path / "copy")
    flip(folder / "__1_0.distcp")
    assert main(["consolidate", str(folder), str(tmp_path / "out")]) == 2
    assert "`__1_0.distcp` does not have the checksum" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
