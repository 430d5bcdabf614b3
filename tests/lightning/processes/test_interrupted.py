"""A run that ends between the batches of an accumulation window leaves no gradient to the next."""

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full
from tests.lightning.mesh_runs import GLOBAL_BATCH, Module, Samples, check, hybrid, run_alone


class Stop(Callback):
    """Ends a run after its first batch, by an error."""

    def on_train_batch_end(self, trainer, *_):
        raise EndedError


class EndedError(Exception):
    pass


def run_twice(options):
    with elastic_environment():
        module, samples = Module("llama"), Samples(4)
        for callbacks in ([Stop()], []):
            trainer = build_trainer(
                strategy=doors.strategy(dist.group.WORLD.size(), verify_steps=False, **options),
                max_epochs=1,
                gradient_clip_val=0.5,
                accumulate_grad_batches=2,
                callbacks=callbacks,
            )
            module.losses.clear()
            try:
                trainer.fit(module, DataLoader(samples, GLOBAL_BATCH))
            except EndedError:
                continue
        weights = {n: full(p.detach()) for n, p in module.model.named_parameters()}
        return module.losses[-4:], weights


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        {"reduce_every_microbatch": False},
        pytest.param({"reduce_every_microbatch": True}, marks=pytest.mark.slow),
        pytest.param({"parameter_sharding": "none"}, marks=pytest.mark.slow),
        pytest.param(hybrid(1, reduce_every_microbatch=False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_of_an_interrupted_window_do_not_survive(ranks, options):
    exact = run_alone("llama", 4, accumulate=2)
    for found in ranks(2).run(run_twice, options):
        check(found, exact)
