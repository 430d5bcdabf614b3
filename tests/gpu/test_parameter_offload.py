"""Parameters in host memory, on one GPU: the same training, without their memory on the GPU."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

# A process of its own: the process group must have gloo for the CPU beside NCCL.
CODE = """
import json, sys
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader
from lightning_cp import ContextParallelStrategy, Parameters
from tests.gpu.test_lightning import Documents, Module

module = Module()
strategy = ContextParallelStrategy(1, parameters=Parameters(offload=sys.argv[1] == "True"))
trainer = Trainer(
    strategy=strategy, accelerator="gpu", devices=1, max_epochs=1, gradient_clip_val=0.5,
    accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(module, DataLoader(Documents(8), batch_size=2))
norms = [float(p.detach().float().norm().full_tensor()) for p in module.parameters()]
devices = sorted({p.device.type for p in module.parameters()})
print(json.dumps([norms, devices, str(module.device)]))
"""


def train(offload):
    command = [sys.executable, "-c", CODE, str(offload)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_parameters_in_host_memory_train_as_on_the_gpu():
    norms, devices, _ = train(False)
    assert devices == ["cuda"]
    offloaded, devices, device = train(True)
    assert devices == ["cpu"]
    assert device == "cuda:0"
    assert offloaded == pytest.approx(norms, rel=1e-5)
