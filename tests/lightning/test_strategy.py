"""Setup through the strategy: sizes, names, precisions, and the errors of wrong ones."""

import subprocess
import sys
import time
import warnings
from datetime import timedelta
from functools import partial
from importlib.metadata import EntryPoint

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_cp.adapters
from lightning_cp.comm.mesh import Sizes, resolve_sizes
from lightning_cp.lightning.processes import launch
from lightning_cp.private import groups as process_groups
from tests import doors
from tests.lightning.jobs import Module, PackedRows, build_trainer, elastic_environment, loader

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("context", "data", "world", "per_node", "sizes"),
    [
        ("auto", "auto", 8, 8, Sizes(1, 8)),
        ("auto", "auto", 16, 8, Sizes(2, 8)),
        (4, "auto", 16, 8, Sizes(4, 4)),
        (16, "auto", 16, 8, Sizes(1, 16)),
        ("auto", 2, 8, 8, Sizes(2, 4)),
        (3, 2, 6, 6, Sizes(2, 3)),
        (1, "auto", 1, 1, Sizes(1, 1)),
    ],
)
def test_sizes_use_every_process(context, data, world, per_node, sizes):
    assert resolve_sizes(context, data, world_size=world, ranks_per_node=per_node) == sizes


@pytest.mark.parametrize(
    ("context", "data", "message"),
    [
        (
            3,
            "auto",
            r"context_parallel_size=3 does not divide the 8 .* one of \[1, 2, 4, 8\], or s",
        ),
        ("auto", 5, r"data_parallel_size=5 does not divide the 8 .* or start 10 processes"),
        (4, 4, "data_parallel_size=4 times context_parallel_size=4 is 16, but .* has 8 processes"),
        (0, "auto", "context_parallel_size=0: give a whole number of at least 1"),
        ((2, 0), "auto", r"context_parallel_size=\(2, 0\): give two whole numbers of at least 1"),
        ((2, 2, 2), "auto", r"number of ranks that share a sequence inside a node.*: \(8, 4\)"),
        ((3, 2), "auto", r"context_parallel_size=6 does not divide the 8 processes"),
        ("auto", "all", "data_parallel_size='all': give a whole number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(context, data, message):
    with pytest.raises(ValueError, match=message):
        resolve_sizes(context, data, world_size=8, ranks_per_node=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "sum"}, "loss='sum' is unknown. Use one of 'auto', 'local_mean'"),
        ({"layout": "round"}, "layout='round' is unknown"),
        ({"balance_window": 0}, r"balance_window=0\): a window holds at least 1 key"),
        ({"attention_memory": 0}, r"Attention\(memory=0\): give the GiB .* above 0, or None"),
        ({"gradient_wire": "bf16"}, "gradient_wire='bf16'.* one of 'float32', 'model'"),
        ({"algorithm": "star"}, "algorithm='star' is unknown"),
        ({"kernel": "fast"}, r"Attention\(kernel='fast'\) is unknown"),
        (
            {"kernel": "flex", "algorithm": "ring"},
            "kernel='flex'\\) computes full sequences",
        ),
        ({"parameter_sharding": "half"}, r"Parameters\(sharding='half'\) is unknown"),
        ({"compile": "all"}, r"Memory\(compile='all'\) is unknown. Use one of 'layers'"),
        ({"tile": -3}, r"tile=-3\): give the tokens of a tile, 1 or more, or True .* or 'auto'"),
        ({"tile": "many"}, r"tile='many'\): give the tokens of a tile"),
        ({"tile": 0}, r"tile=0\): give the tokens of a tile"),
        (
            {"activation_checkpointing": "keep"},
            r"checkpointing='keep'\): use True, False, 'auto', or .*: keep_attention and",
        ),
        ({"offload": "some"}, r"offload='some'\) is unknown"),
        ({"offload_after": 2}, r"offload_after=2\) without offload: nothing is moved"),
        ({"verify_max_len": 1}, r"Verify\(max_len=1\): .* Use 2 or more, or verify=False"),
    ],
)
def test_options_that_do_not_exist_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        doors.strategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: give a whole number of at least 1"),
        (
            {"tensor_parallel_size": 2, "parameter_sharding": "none"},
            r"tensor_parallel_size=2 needs FSDP2, .* Parameters\(sharding='hybrid', shard_size=1\)",
        ),
    ],
)
def test_tensor_ranks_that_cannot_be_are_refused(options, message):
    doors.strategy(tensor_parallel_size="auto")
    with pytest.raises(ValueError, match=message):
        doors.strategy(**options)


def test_properties_that_need_processes_say_when_they_are_available():
    strategy = doors.strategy()
    with pytest.raises(RuntimeError, match="strategy.context_parallel is available once"):
        _ = strategy.context_parallel
    with pytest.raises(RuntimeError, match="strategy.shard_mesh is available once"):
        _ = strategy.shard_mesh


@pytest.mark.slow
@pytest.mark.parametrize("first", ["lightning_cp", "lightning.pytorch"])
def test_names_are_registered_whichever_is_imported_first(first):
    second = {"lightning_cp": "lightning.pytorch", "lightning.pytorch": "lightning_cp"}[first]
    code = (
        f"import {first}, {second}; from lightning.pytorch.strategies import StrategyRegistry as r;"
        "import sys; assert 'lightning_cp.lightning.strategy' not in sys.modules;"
        "from lightning.pytorch import Trainer;"
        "strategy = Trainer(strategy='context_parallel', accelerator='cpu', logger=False).strategy;"
        "print(type(strategy).__name__, *(n for n in r if n.startswith('context_parallel')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "ContextParallelStrategy"
    assert {"context_parallel", "context_parallel_4"} <= set(done.stdout.split())


def test_an_interactive_session_is_refused(monkeypatch):
    """By Lightning, which looks for one when it is imported."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match="Run your code as a script"):
        pl.Trainer(strategy=doors.strategy(), accelerator="cpu", devices=2, logger=False)


class Iterating(Module):
    def training_step(self, dataloader_iter):
        return None


class HookedWeight(Module):
    """Changes the gradient of a weight, as FSDP2 would not."""

    def __init__(self):
        super().__init__()
        next(self.model.parameters()).register_hook(lambda gradient: 0 * gradient)


class HookedGradient(Module):
    """Counts the gradients that it gets after accumulation, or updates weights there."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.calls = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)
        self.rate = rate

    def update(self, parameter):
        self.calls.append(parameter.shape)
        if self.rate:
            with torch.no_grad():
                parameter -= self.rate * parameter.grad


def count_accumulated(**options):
    """Return how often each weight got a gradient in one step."""
    module = HookedGradient()
    message = fit_message(module, doors.strategy(verify_steps=False, **options))
    return message, len(module.calls) / len([*module.parameters()])


class Sharding(Module):
    """Shards by hand: everything, all but the head, or over too few ranks."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def configure_model(self):
        if self.kind == "too few ranks":
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
        elif self.kind == "not all":
            for block in self.model.blocks:
                fully_shard(block, mesh=self.trainer.strategy.shard_mesh)
        else:
            fully_shard(self.model, mesh=self.trainer.strategy.shard_mesh)


class Chooser(nn.Linear):
    """Looks like a Hugging Face model."""

    def set_attn_implementation(self, name):
        pass


class Choosing(Module):
    def __init__(self):
        super().__init__()
        self.inner = Chooser(2, 2)


class Named:
    """An adapter that matches Chooser."""

    undone = 0

    @staticmethod
    def matches(module):
        return isinstance(module, Chooser)

    @classmethod
    def enable(cls, module):
        module.enabled = True
        return cls

    @classmethod
    def remove(cls):
        cls.undone += 1


def fit_message(module, strategy, **options):
    """Fit, and return the error, or "trained"."""
    with elastic_environment():
        try:
            trainer = build_trainer(strategy=strategy, max_steps=1, **options)
            trainer.fit(module, loader(PackedRows(4), 1))
        except (ValueError, TypeError, RuntimeError) as error:
            return str(error)
        return "trained"


def run_setups():
    """Return the error of each setup."""
    new = partial(doors.strategy, verify_steps=False)
    messages = {
        "iterator": fit_message(Iterating(), new()),
        "hook": fit_message(HookedWeight(), new()),
        "hook, replicated": fit_message(HookedWeight(), new(parameter_sharding="none")),
        "counted": [count_accumulated(parameter_sharding=x) for x in ("full", "none")],
        "updated": fit_message(HookedGradient(0.1), doors.strategy(parameter_sharding="none")),
        "own sharding": fit_message(Sharding("all"), new()),
        "sharded in part": fit_message(Sharding("not all"), new()),
        "sharded over too few": fit_message(Sharding("too few ranks"), new()),
        "no such block": fit_message(Module(), new(shard_modules=["Blocks"])),
        "no adapter": fit_message(Choosing(), new()),
        "64-true by name": fit_message(Module(), "context_parallel_2", precision="64-true"),
        "3 by name": fit_message(Module(), "context_parallel_3"),
        "cp 3 of 2": fit_message(Module(), new(context_parallel_size=3)),
        "devices": fit_message(Module(), new(), devices=1),
        "devices, nodes": fit_message(Module(), new(), num_nodes=2),
    }
    point = EntryPoint("torch", f"{__name__}:Named", lightning_cp.adapters.ADAPTERS)
    original = lightning_cp.adapters.entry_points
    lightning_cp.adapters.entry_points = lambda group: [point]
    try:
        module = Choosing()
        messages["adapter"] = fit_message(module, new()), module.inner.enabled, Named.undone
    finally:
        lightning_cp.adapters.entry_points = original
    return messages


EXPECTED = {
    "iterator": "training_step(dataloader_iter) fetches its own batches",
    "hook": "has a hook (register_hook), which FSDP2 never calls",
    "hook, replicated": "trained",
    "updated": "A step changed weights while it was compared with one device",
    "own sharding": "trained",
    "sharded in part": "trained",
    "sharded over too few": "does not cover all 2 ranks of data x context",
    "no such block": "Parameters(shard_modules=['Blocks']) matches no module",
    "no adapter": "no installed adapter supports it",
    "64-true by name": "Use one of 32-true, bf16-mixed, bf16-true, 16-true",
    "3 by name": "context_parallel_size=3 does not divide the 2 processes",
    "cp 3 of 2": "context_parallel_size=3 does not divide the 2 processes",
    "devices, nodes": "The launcher started 2 processes, but Trainer(devices=2, num_nodes=2)",
}


def test_what_would_go_wrong_is_refused_at_set_up_by_all_ranks(ranks):
    for rank, messages in enumerate(ranks(2).run(run_setups)):
        for name, message in EXPECTED.items():
            assert message in messages[name], (name, messages[name])
        assert messages["adapter"] == ("trained", True, 1)
        assert messages["counted"] == [("trained", 1.0)] * 2
        has_device = "The launcher started 2 processes, but Trainer(devices=1, num_nodes=1)"
        assert (has_device if rank == 0 else "Process 1 of this node has no device") in messages[
            "devices"
        ]


def run_groups():
    """Return the timeouts of all groups, how many groups a fit makes, and the rank's places."""
    with elastic_environment():
        before = process_groups.num_process_groups()
        strategy = doors.strategy(
            context_parallel_size=2, timeout=timedelta(seconds=77), parameter_sharding="full"
        )
        trainer = build_trainer(strategy=strategy, max_steps=1)
        trainer.fit(Module(), loader(PackedRows(4), 2))
        groups = [
            strategy.device_mesh[name].get_group() for name in ("data_parallel", "context_parallel")
        ]
        groups.append(strategy.shard_mesh.get_group())
        groups.append(strategy.context_parallel.groups.attend.group)
        # torch has no other way to ask a group for its timeout.
        timeouts = [g._get_backend(torch.device("cpu")).options._timeout for g in groups]
        made = process_groups.num_process_groups() - before
        return timeouts, made, (strategy.data_parallel_rank, strategy.context_parallel_rank)


@pytest.mark.slow
def test_timeouts_reach_all_groups_and_groups_are_few(ranks):
    results = ranks(4).run(run_groups)
    assert [places for *_, places in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for timeouts, made, _ in results:
        assert set(timeouts[:2] + timeouts[3:]) == {timedelta(seconds=77)}
        assert made <= 5, made


class Watching(Module):
    """Fails in its second run; sees whether evaluation is in inference mode."""

    def validation_step(self, batch, batch_idx):
        self.inference = torch.is_inference_mode_enabled()
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        raise RuntimeError("on purpose")


def run_inference_mode():
    """Return whether evaluation ran in inference mode, and the settings of the Trainer's loops."""
    with elastic_environment():
        module = Watching()
        trainer = build_trainer(strategy=doors.strategy())
        loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
        trainer.predict_loop.inference_mode = False
        trainer.validate(module, loader(PackedRows(2), 1), verbose=False)
        after = [[loop.inference_mode for loop in loops]]
        with pytest.raises(RuntimeError, match="on purpose"):
            trainer.test(module, loader(PackedRows(2), 1))
        after.append([loop.inference_mode for loop in loops])
        return module.inference, after


def test_the_trainers_inference_mode_is_restored(ranks):
    for inference, after in ranks(2).run(run_inference_mode):
        assert not inference
        assert after == [[True, True, False]] * 2


def run_exits(num_fits):
    """Return the functions that fits register for interpreter exit."""
    left = []
    with pytest.MonkeyPatch.context() as patch, elastic_environment():
        patch.setattr(process_groups.atexit, "register", lambda *call: left.append(call))
        process_groups.delay_exit_for_gloo.cache_clear()
        for _ in range(num_fits):
            trainer = build_trainer(strategy=doors.strategy(verify_steps=False), max_steps=1)
            trainer.fit(Module(), loader(PackedRows(4), 1))
    process_groups.delay_exit_for_gloo.cache_clear()
    return left


def test_gloo_has_time_to_release_its_tensors_before_the_process_ends(ranks):
    assert ranks(2).run(run_exits, 2) == [[(time.sleep, 0.1)]] * 2


SPREAD = [
    ([0, 1, 0, 1], 2, 2, ["In 2 of 2 groups", "(node 0), ", "(node 1)", "distribution=block"]),
    ([0, 0, 0, 1], 3, 2, ["In 1 of 2 groups", "(node 1)", "divides the 3 devices of a node"]),
    ([0, 0, 1, 1], 2, 2, []),
    ([0, 0, 1, 1], 2, 4, []),  # no node could hold them
    ([0, 0, 1, 1], 2, (2, 2), []),  # heads are swapped inside nodes
    ([0, 1, 0, 1], 2, (2, 2), ["In 2 of 2 groups", "distribution=block"]),
]


def run_spread():
    """Return the warnings for ranks on these nodes, case by case."""
    found, mesh = [], init_device_mesh("cpu", (4,))
    with pytest.MonkeyPatch.context() as patch:
        for nodes, per_node, cp_size, _ in SPREAD:
            messages = []
            patch.setattr(launch, "rank_zero_warn", messages.append)
            launch.warn_if_spread(
                resolve_sizes(cp_size, "auto", world_size=4, ranks_per_node=per_node),
                mesh,
                node_rank=nodes[dist.get_rank()],
                ranks_per_node=per_node,
            )
            found.append(messages)
    return found


def test_rows_shared_between_nodes_are_warned_of_with_hosts(ranks):
    for found in ranks(4).run(run_spread):
        for (*_, parts), messages in zip(SPREAD, found, strict=True):
            assert len(messages) == bool(parts)
            assert all(part in messages[0] for part in parts)


def test_a_precision_that_is_not_served_is_refused_before_processes_start():
    message = "not support .*precision='16-mixed'.*. Choose a different precision among: 32-true"
    with pytest.raises(ValueError, match=message):
        pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=doors.strategy(),
            precision="16-mixed",
            logger=False,
        )


class Logging(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("whole_epoch", loss, on_step=False, on_epoch=True)
        self.log("seen_here_only", float(batch_idx), on_step=False, on_epoch=True)
        return loss


def run_and_listen():
    with elastic_environment(), warnings.catch_warnings(record=True) as records:
        warnings.resetwarnings()
        trainer = build_trainer(strategy=doors.strategy(), max_epochs=1)
        trainer.fit(Logging(), loader(PackedRows(2), 1))
    return [str(warning.message) for warning in records]


def test_nothing_is_advised_that_is_done_already(ranks):
    messages = "\n".join(ranks(2).run(run_and_listen)[0])
    assert "LeafSpec" not in messages
    assert "self.log('whole_epoch', ..., sync_dist=True)" not in messages
    assert (
        "self.log('seen_here_only', ..., sync_dist=True)" in messages
    )  # what is not global still is
