"""Models that know nothing of context parallelism, and a training step of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from lightning_cp import token_mean
from tests import doors, torch_names
from tests.parity.steps import average_, gradients

DIM, HEADS, VOCAB = 24, 4, 19
Wrap = Callable[[nn.Module], nn.Module]


class GPTBlock(nn.Module):
    """Causal attention with grouped heads; every other block calls the function by another name."""

    def __init__(self, imported: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv = nn.Linear(DIM, 2 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU())
        self.imported = imported

    def forward(self, x: Tensor) -> Tensor:
        sdpa = (
            scaled_dot_product_attention
            if self.imported
            else functional.scaled_dot_product_attention
        )
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2)
        q, k, v = parts.split([HEADS, HEADS // 2, HEADS // 2], 1)
        mixed = sdpa(3 * q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList([GPTBlock(imported=False), GPTBlock(imported=True)])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor, call: Callable[..., Any]) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = call(block, x)
        return self.head(x)


class Encoder(nn.Module):
    """Bidirectional, of stock parts, with a key padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).layers
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x: Tensor, padding: Tensor, call: Callable[..., Any]) -> Tensor:
        for layer in self.layers:
            x = call(layer, 2 * x, src_key_padding_mask=padding)
        return x


class Decoder(nn.Module):
    """Stock parts: causal over its own sequence, and across to another one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2).layers
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(
        self, tokens: Tensor, positions: Tensor, memory: Tensor, call: Callable[..., Any]
    ) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        causal = nn.Transformer.generate_square_subsequent_mask(
            x.shape[1], device=x.device, dtype=x.dtype
        )
        for layer in self.layers:
            x = call(layer, 2 * x, memory, tgt_mask=causal, tgt_is_causal=True)
        return self.head(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()


MODELS = {"gpt": GPT, "encoder": Encoder, "pair": Pair}


def build(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[kind]().double()


def batch(length: int = 21) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, VOCAB, (2, length), generator=generator)
    x = torch.randn(2, length, DIM, generator=generator, dtype=torch.float64)
    padding = torch.arange(length) >= torch.tensor([[length], [length - 8]])
    labels = tokens.masked_fill(torch.rand(2, length, generator=generator) < 0.4, -100)
    return {"tokens": tokens, "x": x, "padding": padding, "labels": labels}


DIMS = {"tokens": 1, "x": 1, "padding": 1, "labels": 1}


def plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def alone(kind: str) -> dict[str, Tensor]:
    """Return loss and gradients of one process that never heard of context parallelism."""
    model, whole = build(kind), batch()
    positions = torch.arange(21).expand(2, -1)
    if kind == "gpt":
        logits, shift = model(whole["tokens"], positions, plain_call), True
    elif kind == "encoder":
        logits, shift = model.head(model(whole["x"], whole["padding"], plain_call)), False
    else:
        longer = batch(33)
        memory = model.encoder(longer["x"], longer["padding"], plain_call)
        logits, shift = model.decoder(whole["tokens"], positions, memory, plain_call), True
    labels = whole["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@dataclass
class SdpaJob:
    kind: str
    algorithm: str = "gather"
    layout: str = "zigzag"
    checkpointing: bool = False
    compiled: str | None = None
    backend: str = "aot_eager"
    device: str = "cpu"


def shared(job: SdpaJob) -> dict[str, Tensor]:
    """Return loss and averaged gradients of the same model inside steps."""
    options = {"algorithm": job.algorithm, "layout": job.layout, "sequence_dims": DIMS}
    cp = doors.parallel(dist.group.WORLD, **options)
    model = build(job.kind).to(job.device)
    whole = {key: value.to(job.device) for key, value in batch().items()}
    call: Callable[..., Any] = plain_call
    if job.checkpointing:
        call = partial(checkpoint, use_reentrant=False)
    if job.compiled == "layers":
        for module in model.modules():
            if isinstance(
                module, GPTBlock | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
            ):
                module.compile(backend=job.backend)
    if job.compiled == "whole":
        for module in model.children() if job.kind == "pair" else [model]:
            module.compile(backend=job.backend)
    if job.kind == "gpt":
        with cp.step(whole) as local:
            logits = model(local["tokens"], cp.position_ids(), call)
            loss = token_mean(logits, local["labels"])
    elif job.kind == "encoder":
        with cp.step(whole) as local:
            logits = model.head(model(local["x"], local["padding"], call))
            loss = token_mean(logits, local["labels"], shift=False)
    else:
        longer = {key: value.to(job.device) for key, value in batch(33).items()}
        cp.exempt(*(layer.multihead_attn for layer in model.decoder.layers))
        with cp.step(longer) as local:
            memory = cp.unshard(model.encoder(local["x"], local["padding"], call), dim=1)
        with cp.step(whole) as local:
            logits = model.decoder(local["tokens"], cp.position_ids(), memory, call)
            loss = token_mean(logits, local["labels"])
    loss.backward()
    if job.compiled:
        if job.kind == "gpt" and not job.checkpointing:
            # Before and after attention, for two blocks; 2.15 takes one for blocks that are alike.
            least = 3 if TorchVersion(torch.__version__) < (2, 15) else 1
            assert torch_names.num_graphs() > least
        torch_names.graph_counts().clear()
        torch.compiler.reset()
    average_(model)
    found = {"loss": loss.detach(), **gradients(model)}
    return {name.replace("_orig_mod.", ""): x.cpu() for name, x in found.items()}


def shared_jobs(jobs: list[SdpaJob]) -> list[dict[str, Tensor]]:
    return [shared(job) for job in jobs]
