"""Preference losses of a Llama on gloo ranks, against the stock model on each completion alone."""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_patches import enable
from recipes.preference.losses import Completions, dpo_losses, kto_losses, orpo_losses
from recipes.preference.module import PreferenceModule
from recipes.preference.pairs import Pair, lay_out, pack_pairs
from recipes.weights import LoraOptions, add_lora
from tests import doors
from tests.oracle import errors
from tests.parity.hf import Double
from tests.parity.steps import average_, build_cp, gradients

pytestmark = pytest.mark.ranks

VOCAB, BETA = 61, 0.4
LOSSES = ("sigmoid", "ipo", "sigmoid_norm", "kto", "orpo")


class Wide(Double):
    """Double, except for bits that are read as float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.view:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def build_model(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        tie_word_embeddings=seed == 1,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).double()


def draw_pairs(number=7, seed=0):
    """Draw pairs with prompts of 1 to 14 tokens, and a third completion of another prompt."""
    generator = np.random.default_rng(seed)

    def tokens(low, high):
        return generator.integers(0, VOCAB, generator.integers(low, high)).astype(np.int32)

    prompts = [tokens(1, 15) for _ in range(number)]
    prompts[0] = prompts[0][:1]
    return [Pair(prompt, (tokens(1, 9), tokens(1, 9), tokens(1, 6))) for prompt in prompts]


def stored(number, at):
    """Return a log-probability that float32 holds exactly."""
    return -(3 * number + 5 * at + 1) / 8


def batches(pairs, *, share, seq_len, num_completions, is_stored):
    """Pack pairs into one batch."""
    some = [pair._replace(completions=pair.completions[:num_completions]) for pair in pairs]
    if is_stored:
        some = [
            pair._replace(reference=(stored(number, 0), stored(number, 1)))
            for number, pair in enumerate(some)
        ]
    samples = list(pack_pairs(some, seq_len, share_prompt=share, pad_id=3))
    assert len(samples) > 1
    return {
        name: torch.stack([torch.as_tensor(sample[name]).long() for sample in samples])
        for name in samples[0]
    }


def build_module(loss):
    module = PreferenceModule(loss=loss, beta=BETA, desirable_weight=1.4)
    module.model, module.reference = build_model(1), build_model(2).requires_grad_(False)
    for model in (module.model, module.reference):
        enable(model, chunked_loss="always")
    module._kind = "none" if loss == "orpo" else "model"
    module.logged = {}
    module.log = lambda name, value, **_: module.logged.update({name: value.detach()})
    return module


@dataclass(frozen=True)
class Job:
    """A training step on ranks."""

    loss: str
    share: bool
    seq_len: int = 97
    wrap: str = "nothing"
    layout: str = "auto"
    reference: str = "model"


def batch_of(job):
    number = 3 if job.loss == "kto" else 2
    return batches(
        draw_pairs(),
        share=job.share,
        seq_len=job.seq_len,
        num_completions=number,
        is_stored=job.reference == "stored",
    )


def run_job(job, cp=None):
    """Return the loss, metrics and averaged gradients of a step."""
    alone = cp is not None
    cp = cp or build_cp("cpu", 1, layout=job.layout)[0]
    module = build_adapted() if job.reference == "adapters" else build_module(job.loss)
    if job.reference == "stored":
        module._kind, module.reference = "stored", None
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(context_parallel=cp))
    if job.wrap == "fsdp":
        mesh = init_device_mesh("cpu", (cp.cp_size,), mesh_dim_names=("dp_cp",))
        for layer in [x for x in module.model.modules() if isinstance(x, LlamaDecoderLayer)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(module.model, mesh=mesh, reshard_after_forward=True)
    with Wide():
        dims = {"reference_logps": 1} if job.reference == "stored" else None
        with cp.step(batch_of(job), sequence_dims=dims) as local:
            loss = module.training_step(local, 0)
        loss.backward()
    if job.wrap == "nothing" and not alone:
        average_(module.model)
    found = {
        name: x.full_tensor() if isinstance(x, DTensor) else x
        for name, x in gradients(module.model).items()
    }
    return {**module.logged, **found}


def run_jobs(jobs):
    return [run_job(job) for job in jobs]


def adapt(model):
    """Return a model with LoRA whose adapters are not zero."""
    model = add_lora(model, LoraOptions(rank=3, alpha=5))
    generator = torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).double() / 3
    return model


def build_adapted():
    module = build_module("sigmoid")
    module.model, module.reference, module._kind = adapt(build_model(1)), None, "adapters"
    enable(module.model, chunked_loss="always")
    return module


@cache
def expected(loss, kind="model"):
    """Run the stock models on each prompt with each completion, and add up by hand."""
    models = build_model(1), build_model(1 if kind == "adapters" else 2).requires_grad_(False)
    if kind == "adapters":
        models = adapt(models[0]), models[1]
    sums = [[], []]
    sizes = []
    with Wide():
        for pair in draw_pairs():
            for at, model in enumerate(models):
                row = []
                for completion in pair.completions[: 3 if loss == "kto" else 2]:
                    ids = torch.as_tensor(np.concatenate([pair.prompt, completion])).long()[None]
                    logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
                    start = len(pair.prompt)
                    row.append(sum(logp[t - 1, ids[0, t]] for t in range(start, ids.shape[1])))
                sums[at].append(torch.stack(row))
            sizes.append([len(x) for x in pair.completions])
        policy, reference = (torch.stack(x) for x in sums)
        if kind == "stored":
            rows = [[stored(number, at) for at in (0, 1)] for number in range(len(reference))]
            reference = torch.tensor(rows).double()
        sizes = torch.tensor(sizes)
        chosen, rejected = (Completions(policy[:, at], sizes[:, at]) for at in (0, 1))
        refs = reference[:, 0], reference[:, 1]
        if loss == "orpo":
            losses = orpo_losses(chosen, rejected, beta=BETA)
        elif loss == "kto":
            z = (policy - reference)[:, 2].mean()
            losses = kto_losses(chosen, rejected, *refs, z, beta=BETA, desirable_weight=1.4)
        else:
            losses = dpo_losses(chosen, rejected, *refs, beta=BETA, kind=loss)
        mean = losses.values.mean()
        mean.backward()
    metrics = {name: x.mean() for name, x in losses.metrics.items()}
    return {"train_loss": mean.detach(), **metrics, **gradients(models[0])}


def check(found, job):
    exact = expected(job.loss, job.reference)
    assert set(found) == set(exact), job
    worst = errors(found, exact)
    assert max(worst.values()) < 1e-9, (job, max(worst.items(), key=lambda item: item[1]))
    return max(worst.values())


def test_one_rank_and_shared_prompts_are_the_stock_model():
    for job in (Job("sigmoid", True), Job("kto", True), Job("orpo", False)):
        check(run_job(job, doors.parallel(None)), job)


@pytest.mark.parametrize(
    ("cp_size", "every"),
    [(3, 4), *(pytest.param(size, 1, marks=pytest.mark.slow) for size in (2, 3))],
)
def test_losses_metrics_and_gradients_are_those_of_the_stock_model(ranks, cp_size, every):
    jobs = [Job(loss, share) for loss in LOSSES for share in (True, False)]
    jobs += [Job("sigmoid", True, wrap="fsdp"), Job("sigmoid", True, 83, layout="zigzag")]
    jobs += [Job("kto", True, 101, layout="contiguous")]
    jobs += [Job("sigmoid", True, reference="stored"), Job("sigmoid", False, reference="adapters")]
    jobs += [Job("sigmoid", True, wrap="fsdp", reference="adapters")]
    jobs = jobs[::every]
    for found in ranks(cp_size).run(run_jobs, jobs):
        for one, job in zip(found, jobs, strict=True):
            check(one, job)


def test_a_comparison_with_the_stock_model_is_refused():
    module, cp = build_module("sigmoid"), doors.parallel(None)
    with (
        cp.alone(batch_of(Job("sigmoid", False)), stock=True) as full,
        pytest.raises(ValueError, match=r"Set monitor.verify_first_batch to false"),
    ):
        module.training_step(full, 0)


def test_a_shared_prompt_is_shorter():
    pair = draw_pairs()[1]._replace(completions=(np.arange(5), np.arange(4)))
    shared, alone = (lay_out(pair, share_prompt=x)["input_ids"] for x in (True, False))
    assert len(alone) - len(shared) == len(pair.prompt) - 1
