"""What Lightning users do, on NCCL ranks that share one GPU: as on one process with the GPU.

The jobs are those of the CPU tests; here streams, NCCL and autograd threads take part.
"""

from dataclasses import replace

import pytest
import torch

from tests.lightning.model import test_averaging as averaging
from tests.lightning.model import test_weights as weights
from tests.lightning.steps import test_evaluation as evaluation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("sharding", ["full", "none"])
def test_weights_are_trained_as_on_one_device(nccl, sharding):
    names = list(weights.JOBS)
    exact = nccl(1).run(weights.run, names, None, timeout=200)[0]
    for found in nccl(2).run(weights.run, names, sharding, timeout=200):
        for name, (seen, values) in exact.items():
            assert found[name][0] == pytest.approx(seen, abs=1e-10), name
            for key, value in values.items():
                torch.testing.assert_close(found[name][1][key].cpu(), value, atol=1e-9, rtol=1e-7)


def test_parameters_that_would_not_get_their_gradient_are_refused(nccl):
    for said in nccl(2).run(weights.run_refused):
        assert "got a sharded parameter" in said["Mixed"]
        assert "used directly between two calls" in said["Between"]


@pytest.mark.parametrize("name", ["swa", "ema", "by hand"])
def test_averages_are_those_of_one_device(nccl, name):
    job = averaging.Run(name)
    exact = nccl(1).run(averaging.run, job, timeout=200)[0]
    for sharding in ("full", "none"):
        changed = replace(job, strategy={"parameter_sharding": sharding})
        for found in nccl(2).run(averaging.run, changed, timeout=200):
            averaging.same(found, exact, tolerance=1e-9)


def test_what_leaves_a_step_is_that_of_one_device_or_refused(nccl):
    right = [name for name in evaluation.RIGHT if name != "right_tokens"]  # arrays lie on the host
    exact = nccl(1).run(run_evaluation, right)[0]
    for found in nccl(2).run(run_evaluation, [*right, *evaluation.WRONG], timeout=300):
        for kind in right:
            assert evaluation.is_same(found[kind], exact[kind]), kind
        for kind in evaluation.WRONG:
            assert isinstance(found[kind], str), kind
            expected = evaluation.REFUSED.get(kind, "validation_step() returned output")
            assert expected in found[kind], (kind, found[kind])


def test_training_logs_are_global_or_refused(nccl):
    for said in nccl(2).run(evaluation.run_training, [*evaluation.TRAINED], timeout=300):
        for kind, expected in evaluation.TRAINED.items():
            assert expected in said[kind], (kind, said[kind])


def run_evaluation(kinds):
    """Run steps on the GPU; return what leaves them on the host."""
    return evaluation.on_host(evaluation.run_steps_on_ranks(kinds, {}))
