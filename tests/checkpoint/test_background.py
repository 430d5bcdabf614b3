"""Checkpoints that are written in the background: as they were, one at a time, killed or failed."""

import errno
import os
import re
import threading
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cp import checkpoint
from lightning_cp.checkpoint import background
from lightning_cp.checkpoint.background import BackgroundSaver
from lightning_cp.memory import arena
from tests import doors
from tests.checkpoint.test_checkpoint import (
    assert_same,
    build,
    die,
    full_state,
    plain,
    resume_here,
    state_for_folder,
    train,
)
from tests.lightning.jobs import Module, PackedRows, build_trainer, elastic_environment, loader
from tests.ranks import RankError

pytestmark = pytest.mark.ranks


class Held:
    """Holds the writing of shards until it is released, and notes the thread that writes."""

    def __init__(self, patch, then=None):
        self.released, self.threads = threading.Event(), []
        write = FileSystemWriter.write_data

        def held(*args):
            self.threads.append(threading.current_thread().name)
            assert self.released.wait(60)
            return write(*args) if then is None else then()

        patch.setattr(FileSystemWriter, "write_data", held)


def full_disk():
    raise OSError(28, "No space left on device")


def run_unchanged(folder):
    """Train on while two checkpoints are written; return when what was written."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        held, saver = Held(patch), BackgroundSaver()
        model, optimizer = build("adam", seed=1, mesh="sharded")
        train(model, optimizer, 2)
        meta = {"steps": [2]}
        saver.save(state_for_folder(model, optimizer), meta, folder / "a")
        meta["steps"].append("changed")
        saver.after_save(lambda: seen.append((folder / "a").exists()))
        train(model, optimizer, 1)
        seen.append((folder / "a").exists())
        held.released.set()
        saver.save(state_for_folder(model, optimizer), {"steps": [3]}, folder / "b")
        seen.append((folder / "a").exists())  # the second save has waited for the first one
        saver.close()
        saver.after_save(lambda: seen.append("now"))
    return seen, set(held.threads)


def test_a_checkpoint_is_as_it_was_when_it_was_saved(ranks, tmp_path):
    for seen, threads in ranks(2).run(run_unchanged, tmp_path):
        assert seen == [False, True, True, "now"]
        assert all(name.startswith("AsyncCheckpointExecutor") for name in threads)
    for name, steps in (("a", 2), ("b", 3)):
        model, optimizer = build("adam", seed=2)
        meta = checkpoint.load_folder(
            model, [optimizer], tmp_path / name, strict=True, weights_only=None
        )
        assert meta == {"steps": [steps]}
        model.note = f"{steps} steps"
        assert_same(list(plain("adam", steps)), list(full_state(model, [optimizer])))


def interrupt(_):
    raise KeyboardInterrupt


def state_of(value):
    return {"state_dict": {"weight": torch.full((3,), value)}}


def test_a_save_after_an_interrupted_wait_does_not_change_the_one_that_is_written(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        held, saver = Held(patch), BackgroundSaver()
        saver.save(state_of(1.0), {}, tmp_path / "a")
        with pytest.MonkeyPatch.context() as during:
            during.setattr(background, "wait_for", interrupt)
            with pytest.raises(KeyboardInterrupt):
                saver.save(state_of(2.0), {}, tmp_path / "b")
        threading.Timer(0.3, held.released.set).start()
        saver.save(state_of(3.0), {}, tmp_path / "c")
        saver.close()
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]
    for name, value in (("a", 1.0), ("c", 3.0)):
        found = state_of(0.0)
        state_dict_loader.load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert found["state_dict"]["weight"].tolist() == [value] * 3


def save_twice(folder, then, rank=1):
    """Save a checkpoint, and a second one that one rank fails to write; return what is raised."""
    with pytest.MonkeyPatch.context() as patch:
        saver = BackgroundSaver()
        model, optimizer = build("adam", seed=1, mesh="sharded")
        train(model, optimizer, 2)
        saver.save(state_for_folder(model, optimizer), {"steps": 2}, folder)
        saver.wait()
        if dist.get_rank() == rank:
            Held(patch, then).released.set()
        train(model, optimizer, 1)
        saver.save(state_for_folder(model, optimizer), {"steps": 3}, folder)
        removed = []
        saver.after_save(lambda: removed.append(True))
        try:
            saver.wait()
        except RuntimeError as error:
            return str(error), removed
        finally:
            saver.close()


def test_a_failure_is_raised_on_all_ranks_and_nothing_is_removed(ranks, tmp_path):
    folder = tmp_path / "a"
    for text, removed in ranks(2).run(save_twice, folder, full_disk):
        assert text.startswith("Rank 1 failed: OSError: [Errno 28] No space left on device.")
        assert removed == []
    assert os.listdir(tmp_path) == ["a"]
    assert resume_here(folder, "adam")[0] == {"steps": 2}


def no_memory(*_, **__):
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def save_without_memory(folder):
    """Save while one rank has no memory for the copy, and again."""
    saver = BackgroundSaver()
    model, optimizer = build("adam", seed=1, mesh="sharded")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(arena, "_map_memory", no_memory)
        with pytest.raises(RuntimeError) as error:
            saver.save(state_for_folder(model, optimizer), {}, folder)
        dist.barrier()
        left = os.listdir(folder.parent)
    saver.save(state_for_folder(model, optimizer), {}, folder)
    saver.close()
    return str(error.value), left


def test_a_copy_that_fails_is_raised_on_all_ranks_before_anything_is_written(ranks, tmp_path):
    for text, left in ranks(2).run(save_without_memory, tmp_path / "a"):
        assert re.match(r"Rank 1 failed: MemoryError: checkpoints=.* Leave it out\.", text)
        assert left == []
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_in_the_background_leaves_the_former_checkpoint(ranks, tmp_path, rank):
    with pytest.raises(RankError):
        ranks(2).run(save_twice, tmp_path / "a", die, rank)
    is_left = any(name.startswith(".a.saving") for name in os.listdir(tmp_path))
    assert is_left == (rank == 0)  # otherwise rank 0 has removed it
    assert resume_here(tmp_path / "a", "adam")[0] == {"steps": 2}


class AdamModule(Module):
    """Its state must be in the checkpoint, too."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def run_lightning(folder, *, kill=False, resume=None, by_plugin=False, background=True):
    """Save after each step and keep the newest; killed while the third one is written."""
    writes = []
    write = FileSystemWriter.write_data

    def counted(*args):
        writes.append(threading.current_thread().name)
        if kill and len(writes) == 3:
            die()
        return write(*args)

    with elastic_environment(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", counted)
        keep = ModelCheckpoint(folder, filename="{epoch}", save_on_train_epoch_end=True)
        module = AdamModule()
        trainer = build_trainer(
            strategy=doors.strategy(async_checkpoint=background and not by_plugin),
            plugins=[pl.plugins.AsyncCheckpointIO()] if by_plugin else None,
            max_epochs=5,
            callbacks=[keep] if background else None,
            enable_checkpointing=background,
        )
        trainer.fit(module, loader(PackedRows(2), 1), ckpt_path=resume)
        return module.losses, sorted(os.listdir(folder)), set(writes)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_resumes_from_the_former_checkpoint(ranks, tmp_path):
    (tmp_path / "none").mkdir()
    losses = ranks(2).run(partial(run_lightning, str(tmp_path / "none"), background=False))[0][0]
    folder = tmp_path / "kept"
    with pytest.raises(RankError):
        ranks(2).run(partial(run_lightning, str(folder), kill=True))
    kept = [name for name in os.listdir(folder) if not name.startswith(".")]
    assert kept == ["epoch=1.ckpt"]
    found = ranks(2).run(partial(run_lightning, str(folder), resume=str(folder / kept[0])))
    for resumed, left, threads in found:
        assert resumed == pytest.approx(losses[2:], abs=1e-6)
        assert "epoch=4.ckpt" in left
        assert all(name.startswith("AsyncCheckpointExecutor") for name in threads)


@pytest.mark.slow
def test_lightnings_plugin_saves_folders_in_the_background(ranks, tmp_path):
    found = ranks(2).run(partial(run_lightning, str(tmp_path), by_plugin=True))
    assert found[0][1] == ["epoch=4.ckpt"]  # rank 0 removes
    for _, _, threads in found:
        assert all(name.startswith("AsyncCheckpointExecutor") for name in threads)


class SavesAtTheEnd(pl.Callback):
    """Saves after the strategy is torn down, and notes whether the folder exists then."""

    def __init__(self, folder):
        self.folder, self.found = folder, []

    def save(self, trainer, name):
        trainer.save_checkpoint(self.folder / name)
        self.found.append((self.folder / name).is_dir())

    def on_fit_end(self, trainer, _):
        self.save(trainer, "end")

    def teardown(self, trainer, *_, **__):
        self.save(trainer, "teardown")


def run_end(folder):
    with elastic_environment():
        saves = SavesAtTheEnd(folder)
        trainer = build_trainer(
            strategy=doors.strategy(async_checkpoint=True), callbacks=[saves], max_steps=1
        )
        trainer.fit(Module(), loader(PackedRows(2), 1))
        saves.save(trainer, "after")
    return saves.found


def test_a_save_that_nothing_would_wait_for_is_complete_when_it_returns(ranks, tmp_path):
    assert ranks(2).run(run_end, tmp_path) == [[True] * 3] * 2
    assert sorted(os.listdir(tmp_path)) == ["after", "end", "teardown"]


def run_link(folder, **options):
    with elastic_environment():
        trainer = build_trainer(
            strategy=doors.strategy(async_checkpoint=True),
            callbacks=[ModelCheckpoint(folder, **options)],
            enable_checkpointing=True,
            max_steps=1,
        )
        try:
            trainer.fit(Module(), loader(PackedRows(2), 1))
        except ValueError as error:
            return str(error)


def test_what_would_lose_a_checkpoint_is_refused(ranks, tmp_path):
    with pytest.raises(ValueError, match="distributed=False saves one file. Leave"):
        doors.strategy(async_checkpoint=True, save_distributed_checkpoint=False)
    for message in ranks(2).run(partial(run_link, str(tmp_path), save_last="link")):
        assert "ModelCheckpoint(save_last='link') replaces its link before" in message
    steps = {"every_n_train_steps": 1}
    for name, more in (("best", {}), ("{epoch}", steps), ("{loss:.1f}", {})):
        more |= {"monitor": "train_loss"}
        named = partial(run_link, str(tmp_path), filename=name, save_top_k=-1, **more)
        for message in ranks(2).run(named):
            assert f"ModelCheckpoint(filename={name!r}, save_top_k=-1) gives" in message


@pytest.mark.slow
def test_names_that_may_not_repeat_or_replace_each_other_are_saved(ranks, tmp_path):
    monitor = {"monitor": "train_loss"}
    steps = {"every_n_train_steps": 1, **monitor}
    for name, more in (("{epoch}", monitor), ("{step:03d}", steps), ("best", {})):
        named = partial(run_link, str(tmp_path), filename=name, save_top_k=-1, **more)
        assert ranks(2).run(named) == [None, None]
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "epoch=0.ckpt", "step=001.ckpt"]
