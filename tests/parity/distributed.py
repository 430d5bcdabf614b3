"""Models that transformers distributes over ranks, compared with the stock model."""

import torch
from transformers.distributed.configuration_utils import DistributedConfig

from tests.parity import hf


def compare_loaded(name: str, folder: str, sizes: dict[str, int]) -> hf.Found | None:
    """Return the errors of a step of a model that is loaded with these sizes, on the first rank."""
    model = type(hf.build_model(name)).from_pretrained(
        folder,
        distributed_config=DistributedConfig(**sizes),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    job = hf.Job(name, "packed", tensor=sizes.get("tp_size", 1))
    return hf.check_found(job, hf.run_placed(job, model.eval()))
