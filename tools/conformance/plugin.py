"""A pytest plugin that replaces `ModelParallelStrategy` in Lightning's tests by our strategy.

`pytest -p tools.conformance.plugin --strategy ours` runs them with ours, `--strategy stock` with
Lightning's; both on CPUs. The models of the tests are adapted here, as a user would: batches are
dicts with a sequence, the loss is global_mean(), parameters are sharded over data x context. The
tests and their assertions are not changed.
"""

from types import ModuleType
from typing import Any
from unittest import mock
from unittest.mock import MagicMock, Mock

import lightning.pytorch.strategies as lightning_strategies
import lightning.pytorch.strategies.model_parallel as stock
import lightning.pytorch.utilities.testing as lightning_testing
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.comm.mesh import Meshes
from lightning_cp.fsdp.sharding import is_sharded
from lightning_cp.lightning.strategy import ContextParallelStrategy
from lightning_cp.loss.means import global_mean

_SEQ_LEN = 4


class ModelParallelStrategy(ContextParallelStrategy):
    """Our strategy with the arguments of Lightning's, whose name the tests expect in errors.

    Ranks with the same samples are a tensor-parallel group there and a context-parallel one here.
    """

    def __init__(
        self,
        data_parallel_size: Any = "auto",
        tensor_parallel_size: Any = "auto",
        **options: Any,
    ) -> None:
        super().__init__(tensor_parallel_size, data_parallel_size, **options)

    def setup_environment(self) -> None:
        if not isinstance(stock._setup_device_mesh, Mock):
            return super().setup_environment()
        # The test has mocked what builds their mesh, because there are no processes; its module is
        # a Mock, too.
        mesh = MagicMock()
        with (
            mock.patch("lightning_cp.lightning.model.averaging.allow_copies"),
            mock.patch.multiple(
                "lightning_cp.lightning.processes.processes",
                build_mesh=Mock(return_value=Meshes(mesh, mesh, mesh)),
                build_hybrid_mesh=Mock(return_value=(mesh, mesh)),
                warn_if_spread=Mock(),
                groups_of=Mock(),
                ContextParallel=Mock(),
            ),
        ):
            return super().setup_environment()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--strategy", choices=("stock", "ours"), default="ours")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the class, and let tests run without GPUs, before any test module is imported."""
    reasons_of = lightning_testing._runif_reasons

    def without_gpus(*, min_cuda_gpus: int = 0, bf16_cuda: bool = False, **needs: Any) -> Any:
        return reasons_of(**needs)

    lightning_testing._runif_reasons = without_gpus
    if config.getoption("strategy") == "ours":
        lightning_strategies.ModelParallelStrategy = ModelParallelStrategy


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if config.getoption("strategy") == "ours":
        for module in {item.module for item in items}:
            _adapt(module)


def _adapt(module: ModuleType) -> None:
    """Adapt the models of a test module, as users adapt theirs."""
    if not hasattr(module, "TemplateModel"):
        return
    template = module.TemplateModel
    load, shard = template.train_dataloader, module._parallelize_feed_forward_fsdp2

    def train_dataloader(self: Any) -> DataLoader:
        with torch.random.fork_rng():  # context ranks must draw the same samples
            torch.manual_seed(0)
            loader = load(self)
        return DataLoader(loader.dataset, loader.batch_size, collate_fn=_collate)

    def training_step(self: Any, batch: dict[str, Tensor]) -> Tensor:
        output = self.model(batch["inputs_embeds"])
        return global_mean(output.sum(), torch.tensor(output.shape[:2].numel()))

    def shard_over_all(model: Any, device_mesh: Any) -> Any:
        if is_sharded(model):  # a test may call both functions that are replaced by this one
            return model
        return shard(model, {"data_parallel": device_mesh["dp_cp"]})

    template.train_dataloader = train_dataloader
    template.training_step = training_step
    module._parallelize_feed_forward_fsdp2 = shard_over_all
    # For tests that call it without asserting its effect: test_modules_without_parameters.
    module._parallelize_feed_forward_tp = shard_over_all


def _collate(samples: list[Tensor]) -> dict[str, Tensor]:
    """Build sequences of several tokens from samples of one vector each."""
    return {"inputs_embeds": torch.stack(samples).unsqueeze(1).repeat(1, _SEQ_LEN, 1)}
