"""Data through the strategy: equal batches on context ranks, different ones on data ranks."""

import multiprocessing
import os
import random
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_cp.comm.mesh import DATA_AXIS
from lightning_cp.lightning.processes.loaders import Loaders
from tests import doors
from tests.lightning.jobs import LENGTH, Module, PackedRows, build_trainer, elastic_environment

pytestmark = pytest.mark.ranks


class Numbered(Dataset):
    """Samples that hold their index; optionally with a random number."""

    def __init__(self, length=8, noise=False):
        self.length, self.noise = length, noise

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        tokens = torch.full((LENGTH,), index)
        if self.noise:
            tokens[0] = random.randrange(50)
            tokens[1] = torch.randint(0, 50, ())
        return {"input_ids": tokens, "labels": tokens}


class Stream(IterableDataset):
    """An iterable dataset, split by a rank of choice."""

    def __init__(self, split):
        self.split = split

    def __iter__(self):
        rank, size = self.split()
        for index in range(rank, 8, size):
            tokens = torch.full((LENGTH,), index)
            yield {"input_ids": tokens, "labels": tokens}


class Watching(Module):
    """Records the full batches that callbacks and hooks see."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch["input_ids"][:, :3].tolist())


def fit(rows, *, strategy=None, workers=0, seed=None, batch_size=1, stage="fit", **options):
    """Fit and return the samples that were seen, or the error."""
    with elastic_environment():
        os.environ.pop("PL_SEED_WORKERS", None)
        multiprocessing.current_process().daemon = False  # loaders may have workers
        if seed is not None:
            import lightning.pytorch as pl

            pl.seed_everything(seed, workers=True, verbose=False)
        else:  # as in processes that nobody has seeded, whatever ran here before
            random.seed(dist.get_rank())
            torch.manual_seed(dist.get_rank())
        module = Watching()
        trainer = build_trainer(
            strategy=doors.strategy(verify_steps=False, **(strategy or {})),
            max_epochs=1,
            **{"use_distributed_sampler": True, **options},
        )
        if isinstance(rows, str):
            names = {"data": lambda s: (s.data_parallel_rank, s.data_parallel_size)}
            names["global"] = lambda s: (s.global_rank, s.world_size)
            rows = Stream(lambda kind=rows: names[kind](trainer.strategy))
        data = DataLoader(rows, batch_size=batch_size, num_workers=workers)
        try:
            if stage == "predict":
                trainer.predict(module, data)
            else:
                trainer.fit(module, data)
        except ValueError as error:
            return str(error)
        finally:
            os.environ.pop("PL_SEED_WORKERS", None)
            os.environ.pop("PL_GLOBAL_SEED", None)
        return module.seen


def test_workers_are_seeded_by_the_data_rank():
    """What they draw then: test_ranks_that_share_rows_draw_the_same_and_others_others."""
    axis = SimpleNamespace(get_local_rank=lambda: 1, size=lambda: 1)
    ranks = SimpleNamespace(get_local_rank=lambda: 3, size=lambda: 1)
    meshes = SimpleNamespace(axes={DATA_AXIS: axis}, ranks=ranks)
    data = DataLoader(Numbered(), num_workers=1)
    assert Loaders(None).prepare(data, meshes, sharded=True, training=True) == []
    assert data.worker_init_fn.keywords == {"rank": 1}


def run_seen(*cases):
    return [fit(rows, **options) for rows, options in cases]


@pytest.mark.slow
def test_ranks_that_share_rows_draw_the_same_and_others_others(ranks):
    dp2 = {"strategy": {"data_parallel_size": 2}}
    cases = [
        (Numbered(), dp2),
        (Numbered(), {**dp2, "seed": 1, "workers": 1}),
        (Numbered(noise=True), {**dp2, "seed": 1, "workers": 1}),
        ("data", dp2),
    ]
    found = ranks(4).run(run_seen, *cases)
    for case in range(len(cases)):
        a, b, c, d = (rank[case] for rank in found)
        assert a == b, case
        assert c == d, case
        assert a != c, case
        assert len(a) == 4


@pytest.mark.parametrize("rows", ["global", Numbered(noise=True)], ids=["split by rank", "noise"])
def test_different_batches_are_refused_with_the_usual_causes(ranks, rows):
    for said in ranks(2).run(fit, rows):
        assert "must hold the same batch" in said[-1] if isinstance(said, list) else said
        assert "data-parallel rank" in said


def test_the_first_rank_can_send_its_batch_to_the_others(ranks):
    found = ranks(2).run(run_seen, ("global", {"strategy": {"broadcast_batch": True}}))
    assert found[0] == found[1]
    assert [batch[0][0] for batch in found[0][0]] == [0, 2, 4, 6]


def test_loaders_of_different_lengths_are_refused(ranks):
    options = {"strategy": {"data_parallel_size": 2}, "stage": "predict"}
    for (said,) in ranks(2).run(run_seen, (Numbered(3), options)):
        assert "loaders of different lengths ([1, 2] batches)" in said
        assert "data_parallel_size * batch_size = 2 * 1" in said


def test_replicated_parameters_allow_loaders_of_different_lengths(ranks):
    strategy = {"data_parallel_size": 2, "parameter_sharding": "none"}
    options = {"strategy": strategy, "stage": "predict"}
    assert ranks(2).run(run_seen, (Numbered(3), options)) == [[[]], [[]]]


def test_packed_rows_are_cut_only_for_the_step(ranks):
    found = ranks(2).run(run_seen, (PackedRows(2), {"batch_size": 2}))
    assert found[0] == found[1]
    assert len(found[0][0][0]) == 2


class Uneven(IterableDataset):
    """A stream without a length, as long as this data rank is told; it may fail at its end."""

    def __init__(self, lengths, fails=False):
        self.lengths, self.fails = lengths, fails
        self.rank = None

    def __iter__(self):
        for index in range(self.lengths[self.rank]):
            tokens = torch.full((LENGTH,), index)
            yield {"input_ids": tokens, "labels": tokens}
        if self.fails and self.rank == 0:
            raise OSError("no such file")


def run_uneven(lengths, stage="fit", fails=False, sharding="full"):
    """Return the number of steps, or the error; and whether the loader is as it was."""
    with elastic_environment(), warnings.catch_warnings(record=True) as records:
        warnings.resetwarnings()
        module, data = Watching(), Uneven(lengths, fails)
        strategy = doors.strategy(data_parallel_size=2, parameter_sharding=sharding)
        trainer = build_trainer(strategy=strategy, max_epochs=2)
        data.rank = dist.get_rank()
        loader = DataLoader(data, batch_size=1)
        try:
            getattr(trainer, stage)(module, loader)
            result = len(module.seen)
        except (ValueError, RuntimeError, OSError) as error:
            result = f"{type(error).__name__}: {error}"
    warned = [str(x.message) for x in records if "ranks have a batch" in str(x.message)]
    return result, type(loader) is DataLoader, warned


def run_all_uneven():
    return [
        run_uneven((3, 2)),
        run_uneven((2, 2)),
        run_uneven((3, 2), "predict"),
        run_uneven((2, 2), fails=True),
        run_uneven((3, 2), "predict", sharding="none"),
    ]


def test_iterable_datasets_of_different_lengths_end_or_fail_on_all_ranks(ranks):
    found = ranks(2).run(run_all_uneven)
    for rank, (uneven, even, predicted, failed, replicated) in enumerate(found):
        assert uneven[0] == even[0] == 4  # two steps in each of two epochs
        assert len(uneven[2]) == (rank == 0)
        if rank == 0:
            assert "Only 1 of 2 ranks have a batch 2" in uneven[2][0]
        assert even[2] == []
        assert predicted[0].startswith("ValueError: Only 1 of 2 ranks have a batch 2: data ranks")
        assert "use data_parallel_size=1" in predicted[0]
        said = "OSError: no such" if rank == 0 else "RuntimeError: Batch 2 could not be loaded on 1"
        assert failed[0].startswith(said)
        assert replicated[0] == 0
        assert all(case[1] for case in found[rank])
