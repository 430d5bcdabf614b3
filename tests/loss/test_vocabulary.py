"""Cross entropy of logits whose classes are sharded over ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_cp import token_mean
from lightning_cp.loss.means import chunked_token_mean


def draw(num_classes):
    generator = torch.Generator().manual_seed(num_classes)
    hidden = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64)
    weight = 5 * torch.randn(num_classes, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, num_classes, (2, 7), generator=generator)
    labels[0, 2:4] = labels[1, -1] = -100
    return hidden.requires_grad_(), weight, labels


def run_sharded(num_classes, in_chunks):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor_parallel",))
    hidden, weight, labels = draw(num_classes)
    weight = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))

    def head(x):
        return F.linear(DTensor.from_local(x, mesh, [Replicate()], run_check=False), weight)

    if in_chunks:
        loss = chunked_token_mean(head, hidden, labels, parameters=[weight], chunk_len=3)
    else:
        loss = token_mean(head(hidden), labels)
    (3 * loss).backward()
    return loss.detach(), hidden.grad, weight.grad.full_tensor()


def run_refused():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor_parallel",))
    logits = distribute_tensor(torch.randn(4, 4, 8), mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"placements .*Shard\(dim=1\).* Shard them along the cla"):
        token_mean(logits, torch.zeros(4, 4, dtype=torch.long))


@pytest.mark.ranks
@pytest.mark.slow
def test_sharded_classes_give_the_loss_and_gradients_of_full_logits(ranks):
    pool = ranks(4)
    for num_classes in (61, 5, 2):  # 5 and 2: the last rank, or the last two, have none
        hidden, weight, labels = draw(num_classes)
        weight.requires_grad_()
        logits = (hidden @ weight.T)[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten())
        (3 * loss).backward()
        for in_chunks in (False, True):
            for found in pool.run(run_sharded, num_classes, in_chunks):
                for x, y in zip(found, (loss.detach(), hidden.grad, weight.grad), strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    pool.run(run_refused)
