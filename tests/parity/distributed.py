"""Models that transformers distributes over ranks, compared with the stock model."""

import torch
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig

from hf_patches import enable
from lightning_cp.lightning.model_setup import place_model
from tests.parity import hf, zoo


def compare_loaded(name: str, folder: str, sizes: dict[str, int]) -> hf.Found | None:
    """Return the errors of a step of a model that is loaded with these sizes, on the first rank."""
    tensor = sizes.get("tp_size", 1)
    mesh, cp = hf.build_meshes(tensor), hf.build_tensor_cp(tensor)
    model = type(hf.build_model(name)).from_pretrained(
        folder,
        distributed_config=DistributedConfig(**sizes),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    job = hf.Job(name, "packed")
    batch = hf.build_batch(job, zoo.VOCAB_SIZE, hf.padding_of(model))
    enable(model.eval())
    place_model(
        torch.nn.ModuleDict({"model": model}),
        mesh["context_parallel"],
        sharding="full",
        tensor=mesh["tensor_parallel"],
        shard_modules=None,
        mixed_precision="autocast",
        offload=False,
        device=torch.device("cpu"),
        to_device=lambda: None,
    )
    with cp.step(batch) as local:
        loss = model(**local).loss
    loss.backward()
    found = hf.gradients(model)
    if dist.get_rank() > 0:
        return None
    exact_loss, exact = hf.exact_gradients(name, "packed", "causal", torch.float32)
    return hf.Found(loss.item(), exact_loss, hf.errors(found, exact))
