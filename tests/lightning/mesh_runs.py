"""Runs on ranks that share samples, tokens and weights, and the same on one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full

LENGTH, GLOBAL_BATCH = 19, 8

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.3,
}


def build(name, **options):
    """Return a model in float64, with norms and routers that compute in it."""
    torch.manual_seed(0)
    shape = SHAPE | options
    if name == "llama":
        shape.pop("moe_intermediate_size", None)
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    else:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        config = Qwen3MoeConfig(**(experts | shape), experts_implementation="eager")
        model = Qwen3MoeForCausalLM(config)
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = partial(norm, part)
        if type(part).__name__.endswith("Router"):
            part.forward = partial(route, part)
    return model.double().train()


def norm(part, x):
    return F.rms_norm(x, part.weight.shape, part.weight, part.variance_epsilon)


def route(part, hidden):
    logits = F.linear(hidden, part.weight)
    return logits, *logits.softmax(-1).topk(part.top_k)


def build_optimizer(model):
    # With a smaller eps, the sign of a gradient that is rounded to almost 0 would count.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


class Samples(Dataset):
    """Samples of which some have few labels."""

    def __init__(self, num_batches, length=LENGTH):
        generator = torch.Generator().manual_seed(1)
        size = (num_batches * GLOBAL_BATCH, length)
        self.tokens = torch.randint(0, SHAPE["vocab_size"], size, generator=generator)
        self.labels = self.tokens.clone()
        for row, cut in enumerate(torch.randint(1, length - 2, size[:1], generator=generator)):
            self.labels[row, :cut] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Module(LightningModule):
    def __init__(self, name):
        super().__init__()
        self.model = build(name)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return build_optimizer(self)


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def run_fit(
    name,
    num_batches,
    context,
    options,
    accumulate=1,
    resume=None,
    save=None,
    epochs=1,
    kind=None,
    num_losses=None,
    length=LENGTH,
    **trainer_options,
):
    """Train on all ranks of the pool; return losses, weights and how they are sharded."""
    with elastic_environment():
        num_same = context * options.get("tensor_parallel_size", 1)  # ranks with the same samples
        data_size = dist.get_world_size() // num_same  # noqa: TID251
        module, samples = (kind or Module)(name), Samples(num_batches, length)
        sampler = DistributedSampler(samples, data_size, dist.get_rank() // num_same, shuffle=False)
        trainer = build_trainer(
            strategy=doors.strategy(context, **options),
            max_epochs=epochs,
            gradient_clip_val=0.5,
            accumulate_grad_batches=accumulate,
            **trainer_options,
        )
        loader = DataLoader(samples, GLOBAL_BATCH // data_size, sampler=sampler)
        trainer.fit(module, loader, ckpt_path=resume)
        if save:
            trainer.save_checkpoint(save)
        weights = {n: full(p.detach()) for n, p in module.model.named_parameters()}
        held = sum(local(p).numel() for p in module.parameters())
        return (
            module.losses[-(num_losses or num_batches) :],
            weights,
            held,
            trainer.strategy.describe(),
        )


def run_alone(
    name, num_batches, accumulate=1, epochs=1, clip=0.5, num_losses=None, device="cpu", **shape
):
    """Train the stock model on one process, with the whole batch of each step at once."""
    model, samples = build(name, **shape).to(device), Samples(num_batches)
    optimizer = build_optimizer(model)
    losses = []
    for _ in range(epochs):
        for start in range(0, num_batches, accumulate):
            window = range(start, min(start + accumulate, num_batches))
            total = count = 0
            for index in window:
                rows = slice(GLOBAL_BATCH * index, GLOBAL_BATCH * (index + 1))
                targets = samples.labels[rows, 1:].flatten().to(device)
                inputs = samples.tokens[rows].to(device)
                logits = model(input_ids=inputs).logits[:, :-1].flatten(0, 1)
                loss = F.cross_entropy(logits, targets, reduction="sum")  # HF's is in float32
                num_tokens = int((targets != -100).sum())
                losses.append(float(loss.detach()) / num_tokens)
                total, count = total + loss, count + num_tokens
            (total / count).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses[-(num_losses or num_batches) :], {
        n: p.detach().cpu() for n, p in model.named_parameters()
    }


def check(found, exact):
    losses, weights, *_ = found
    exact_losses, exact_weights = exact
    assert losses == pytest.approx(exact_losses, abs=1e-9)
    for name, weight in exact_weights.items():
        torch.testing.assert_close(weights[name].cpu(), weight, rtol=0, atol=1e-9, msg=name)


def hybrid(shard_size, **options):
    return {"parameter_sharding": "hybrid", "shard_size": shard_size, **options}
