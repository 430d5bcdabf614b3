"""Models that transformers distributes over ranks, compared with the stock model."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.configuration_utils import DistributedConfig

from lightning_cp import ContextParallel
from tests import doors
from tests.parity import hf


@cache
def build_cp(data: int, tensor: int) -> tuple[ContextParallel, int]:
    """Return context parallelism beside data and tensor ranks, and this one's data index."""
    sizes = (data, dist.group.WORLD.size() // (data * tensor), tensor)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "context", "tensor"))
    cp = doors.parallel(mesh["context"], mesh["data"], tensor=mesh["tensor"], check_batches=0)
    return cp, mesh["data"].get_local_rank()


def compare_loaded(
    name: str,
    folder: str,
    sizes: dict[str, Any],
    data: int = 1,
    kind: str = "packed",
    dtype: torch.dtype = torch.float32,
) -> hf.Found | None:
    """Return the errors of a step of a model that is loaded with these sizes, on the first rank.

    Args:
        name: of the model in the zoo.
        folder: with its weights.
        sizes: of the DistributedConfig.
        data: number of data ranks, which share the rows of the batch.
        kind: how the rows are filled.
        dtype: of the weights.
    """
    tensor = sizes.get("tp_size", 1)
    cp, index = build_cp(data, tensor)
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = type(hf.build_model(name)).from_pretrained(
        folder,
        distributed_config=DistributedConfig(**sizes),
        dtype=dtype,
        attn_implementation="eager",
        **options,
    )
    job = hf.Job(name, kind, dtype=dtype, tensor=tensor)
    return hf.check_found(job, hf.run_placed(job, model.eval(), cp, rows=(index, data)))
