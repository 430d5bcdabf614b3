"""A small training script, written for torch's prototype: it needs GPUs.

`torchrun --nproc-per-node 2 torch_prototype.py`. The tests run this text, and this text with the
line that imports the prototype changed. Its name is private in torch.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import (
    context_parallel,
    context_parallel_unshard,
)

VOCAB, DIM, HEADS, KV_HEADS, LAYERS = 64, 256, 4, 2, 2


def rotate(x, cos, sin):
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv = nn.Linear(DIM, DIM // HEADS * (HEADS + 2 * KV_HEADS))
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, cos, sin):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = rotate(3 * q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(DIM, VOCAB)
        rates = 100.0 ** -torch.linspace(0, 1, DIM // HEADS // 2)
        angles = torch.outer(torch.arange(length), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return self.head(x)


def average(x):
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def train(mesh, device, dtype, length=512, steps=3):
    """Return the losses, and what the first step computed."""
    torch.manual_seed(0)
    model = Model(length).to(device=device, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    model.cos, model.sin = model.cos.to(wide), model.sin.to(wide)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randint(0, VOCAB, (2, length + 1)).to(device)
    losses, first = [], {}
    for _ in range(steps):
        inputs, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
        buffers, dims = [inputs, labels, model.cos, model.sin], [1, 1, 0, 0]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={inputs, labels}
        ):
            logits = model(inputs)
            loss = F.cross_entropy(logits.to(wide).flatten(0, 1), labels.flatten())
            loss.backward()
        for parameter in model.parameters():
            average(parameter.grad)
        losses.append(average(loss.detach()).item())
        if not first:
            (first["logits"],) = context_parallel_unshard(mesh, [logits.detach()], [1])
            first |= {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.tensor(losses), **first}


if __name__ == "__main__":
    dist.init_process_group()
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    found = train(init_device_mesh("cuda", (dist.get_world_size(),)), "cuda", torch.bfloat16)
    if dist.get_rank() == 0:
        print(found["losses"].tolist())
    dist.destroy_process_group()
