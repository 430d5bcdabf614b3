"""Hybrids, state-space models, indexers and written-out attention on NCCL ranks, in float32."""

import pytest
import torch
import torch.distributed as dist

from hf_patches import enable
from tests.parity import zoo
from tests.parity.hf import Job, build_batch, build_cp, errors, exact_gradients, padding_of

pytestmark = pytest.mark.gpu

NAMES = (
    *("lfm2", "qwen3_next", "kimi_linear", "bamba", "minimax"),
    *("bloom", "gptj", "falcon", "deepseek_v32", "mamba", "zaya"),
)


def run(job):
    """Return the average over ranks of each gradient, computed on the GPU."""
    cp = build_cp()
    model = zoo.build_model(job.name, dtype=job.dtype).cuda()
    batch = build_batch(job, zoo.VOCAB_SIZE, padding_of(model))
    enable(model)
    if job.checkpointing is not None:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": job.checkpointing})
    with cp.step({key: x.cuda() for key, x in batch.items()}) as local:
        model(**local).loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        gradients[name] = (gradient / cp.cp_size).cpu()
    return gradients


def compare(jobs):
    """Return the worst gradient of each job, on the first rank."""
    found = []
    for job in jobs:
        gradients = run(job)
        if dist.get_rank() == 0:
            _, exact = exact_gradients(job.name, job.kind, job.head, job.dtype)
            found.append((job, max(errors(gradients, exact).values())))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process(nccl, name):
    if name not in zoo.causal_names():
        pytest.skip("not in this version of transformers")
    jobs = [Job(name, "packed"), Job(name, "right", checkpointing=False)]
    for job, worst in nccl(2).run(compare, jobs)[0]:
        assert worst < 2e-3, job
