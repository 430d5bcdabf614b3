"""FlexAttention on packed documents, sharded over several ranks, compared with one device.

    torchrun --nproc-per-node 2 examples/flex_documents.py

On CPU processes in float64, or on GPUs, one per rank, in float32. Each rank holds a shard of every
sequence; mask_mod and score_mod take global positions, as on one device. Prints the errors of the
loss and each gradient relative to one device, and fails if one is too large.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import lightning_cp
from lightning_cp import ContextParallel, token_mean

LENGTH, HEADS, DIM = 999, 4, 16  # need not be divisible by the number of ranks


class Model(nn.Module):
    """One layer of attention with a learned penalty on distance, per head."""

    def __init__(self) -> None:
        """Build the layers."""
        super().__init__()
        self.tokens = nn.Embedding(100, HEADS * DIM)
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.slopes = nn.Parameter(torch.linspace(0.01, 0.1, HEADS))
        self.head = nn.Linear(HEADS * DIM, 100)
        # On a GPU, use torch.compile(flex_attention) as usual.
        self.attend = flex_attention

    def forward(self, input_ids: Tensor, block_mask: object) -> Tensor:
        """Return logits."""

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - self.slopes[h] * (q - k)

        x = self.tokens(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v, score_mod=score_mod, block_mask=block_mask)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


def packed_documents(device: torch.device) -> Tensor:
    """Return document ids [2, LENGTH]; the two samples are packed differently."""
    starts = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.02
    return starts.cumsum(1).to(device)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss and the gradient of every parameter."""
    model.zero_grad()
    loss.backward()
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **grads}


def main() -> None:
    """Run one step on all ranks, and the same on one device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank(0)) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    cp = ContextParallel(dist.group.WORLD)
    torch.manual_seed(0)
    model = Model().to(device, torch.float32 if on_gpu else torch.float64)
    documents = packed_documents(device)
    tokens = torch.randint(0, 100, (2, LENGTH)).to(device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    # The full batch, the same on each rank. Labels belong to the same token: shift=False.
    batch = {"input_ids": tokens, "labels": tokens.flip(1), "document_ids": documents}
    with cp.step(batch) as local:
        logits = model(local["input_ids"], cp.block_mask(mask_mod))
        loss = token_mean(logits, local["labels"], shift=False)
    sharded = {name: cp.groups.mean(x) for name, x in gradients(model, loss).items()}

    # One device: full sequences, no step. On a CPU torch's flex_attention has no backward.
    model.attend = lightning_cp.flex_attention
    if on_gpu:
        model.attend = torch.compile(flex_attention)
    blocks = torch.nn.attention.flex_attention.create_block_mask
    full_mask = blocks(mask_mod, 2, None, LENGTH, LENGTH, device=device)
    logits = model(tokens, full_mask)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    alone = gradients(model, loss)

    worst = {name: float((sharded[name] - x).norm() / x.norm()) for name, x in alone.items()}
    if cp.cp_rank == 0:
        print(f"{cp.cp_size} ranks on {device.type}, {LENGTH} tokens, {cp.config.layout} layout")
        for name, error in worst.items():
            print(f"{name:15} {error:.1e}")
    limit = 1e-4 if on_gpu else 1e-12
    if max(worst.values()) > limit:
        raise SystemExit("FlexAttention on several ranks differs from one device.")
    if cp.cp_rank == 0:
        print("Same results.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
