"""ORPO of a Llama on gloo ranks, by the functions of the example, against the stock model.

The prompt of each pair is computed once, and several pairs are in a sample. The stock model runs on
each prompt with each completion alone.
"""

import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_patches import enable
from tests import doors
from tests.oracle import errors
from tests.parity.hf import Double
from tests.parity.steps import average_, build_cp, gradients

pytestmark = pytest.mark.ranks

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "orpo.py"))
VOCAB, BETA, PAIRS = 61, 0.4, 3


@dataclass(frozen=True)
class Job:
    """How the model is shared and its loss computed."""

    layout: str = "auto"
    wrap: str = "nothing"
    chunked: str = "always"


JOBS = [
    Job(),
    Job(wrap="fsdp"),
    Job("zigzag", chunked="never"),
    Job("contiguous"),
]


def build_model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).double()


@cache
def draw_pairs():
    """Draw prompts of 1 to 14 tokens, each with two completions, for two samples."""
    generator = torch.Generator().manual_seed(0)

    def tokens(most):
        size = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(0, VOCAB, (size,), generator=generator)

    pairs = [(tokens(14), tokens(8), tokens(8)) for _ in range(2 * PAIRS)]
    pairs[0] = (pairs[0][0][:1], *pairs[0][1:])
    return pairs


def build_batch():
    """Return two samples of three pairs; the shorter one is padded."""
    samples = []
    for start in (0, PAIRS):
        parts = [EXAMPLE["lay_out"](*pair) for pair in draw_pairs()[start : start + PAIRS]]
        for number, part in enumerate(parts):
            part["document_ids"] += number
            part["branch_ids"][part["branch_ids"] >= 0] += 2 * number
        samples.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return EXAMPLE["collate"](samples)


def run_job(job, cp=None):
    """Return the loss and the averaged gradients of a step."""
    alone = cp is not None
    cp = cp or build_cp("cpu", 1, layout=job.layout)[0]
    model = build_model()
    enable(model, chunked_loss=job.chunked)
    if job.wrap == "fsdp":
        mesh = init_device_mesh("cpu", (cp.cp_size,), mesh_dim_names=("dp_cp",))
        for layer in [x for x in model.modules() if isinstance(x, LlamaDecoderLayer)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    with Double():
        with cp.step(build_batch()) as local:
            means = EXAMPLE["score"](model, local).unflatten(1, (PAIRS, 2))
            loss = EXAMPLE["orpo_losses"](means.flatten(0, 1), BETA).mean()
        loss.backward()
    if job.wrap == "nothing" and not alone:
        average_(model)
    found = {
        name: x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in gradients(model).items()
    }
    return {"loss": loss.detach(), **found}


def run_jobs(jobs):
    return [run_job(job) for job in jobs]


@cache
def expected():
    """Run the stock model on each prompt with each completion, and add up by hand."""
    model, losses = build_model(), []
    with Double():
        for prompt, *completions in draw_pairs():
            p = []
            for completion in completions:
                ids = torch.cat([prompt, completion])[None]
                logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
                places = range(len(prompt), ids.shape[1])
                p.append(sum(logp[t - 1, ids[0, t]] for t in places).div(len(completion)).exp())
            odds = [x / (1 - x) for x in p]
            losses.append(-p[0].log() + BETA * (1 + odds[1] / odds[0]).log())
        loss = sum(losses) / len(losses)
        loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def check(found, job):
    worst = errors(found, expected())
    assert max(worst.values()) < 1e-11, (job, max(worst.items(), key=lambda item: item[1]))


def test_one_rank_walks_the_same_code():
    check(run_job(Job(), doors.parallel(None)), Job())


@pytest.mark.parametrize(
    ("cp_size", "jobs"),
    [(3, JOBS[1:3]), *(pytest.param(n, JOBS, marks=pytest.mark.slow) for n in (2, 3))],
    ids=lambda value: value if isinstance(value, int) else len(value),
)
def test_loss_and_gradients_are_those_of_the_stock_model(ranks, cp_size, jobs):
    for found in ranks(cp_size).run(run_jobs, jobs):
        for one, job in zip(found, jobs, strict=True):
            check(one, job)
