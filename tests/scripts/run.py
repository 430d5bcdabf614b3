"""Runs the script of torch's prototype: as it is, with its import changed, or on whole rows."""

from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

SCRIPT = Path(__file__).parent / "torch_prototype.py"
LINE = "from torch.distributed.tensor.experimental._attention import (\n"


def run(line, mesh, *args, **kwargs):
    """Return what ``train()`` of the script returns, with another line for its import."""
    text = SCRIPT.read_text()
    assert text.count(LINE) == 1
    space = {"__name__": "script"}
    exec(compile(text.replace(LINE, line), str(SCRIPT), "exec"), space)
    found = space["train"](mesh, *args, **kwargs)
    return {name: x.cpu() for name, x in found.items()}


def run_shared(device, *args, ours=True, **kwargs):
    """Run the script on all ranks of this job."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return run("from lightning_cp import (\n" if ours else LINE, mesh, device, *args, **kwargs)


def run_alone(*args, **kwargs):
    """Run the script on this process: whole rows, and torch's own attention."""
    return run("from tests.scripts.run import (\n", None, *args, **kwargs)


def context_parallel(mesh, **kwargs):
    return nullcontext()


def context_parallel_unshard(mesh, buffers, seq_dims):
    return buffers
