"""Lightning runs on several NCCL ranks that share one GPU: streams, autograd threads, FSDP2 beside
attention's own traffic. What they compute is proved on the CPU; here it must hold on the GPU."""

import os
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_cp import ContextParallelCallback, token_mean
from tests import doors
from tests.lightning.jobs import elastic_environment
from tests.tiny import TinyLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

LENGTH = 509


class Documents(Dataset):
    """Packed documents of 5 to 150 tokens: most ring steps of most ranks have nothing to do."""

    def __init__(self, num_samples, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 61, (num_samples, LENGTH), generator=generator)
        # Something to learn: every third token repeats the one before it.
        self.tokens[:, 2::3] = self.tokens[:, 1:-1:3]
        lengths = torch.randint(5, 150, (num_samples, LENGTH // 5), generator=generator)
        place = torch.arange(LENGTH)
        self.documents = torch.stack(
            [torch.bucketize(place, row.cumsum(0), right=True) for row in lengths]
        )
        self.labels = self.tokens.clone()
        self.labels[torch.rand(num_samples, LENGTH, generator=generator) < 0.3] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "labels": self.labels[index],
            "document_ids": self.documents[index],
        }


class Module(pl.LightningModule):
    """A transformer whose blocks are recomputed in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.model = TinyLM(dim=256, num_layers=3, window=40, max_len=LENGTH)
        self.losses, self.val_losses = [], []

    def loss(self, batch):
        logits = self.model(
            batch["input_ids"],
            self.trainer.strategy.context_parallel.position_ids(),
            checkpoint=partial(checkpoint, use_reentrant=False),
        )
        return token_mean(logits, batch["labels"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"] * self.trainer.accumulate_grad_batches)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self):
        self.val_losses.append(self.trainer.callback_metrics.get("val_loss"))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@dataclass
class Job:
    """A run."""

    steps: int = 40
    precision: str = "bf16-mixed"
    dp_size: int = 1
    algorithm: str = "auto"
    layout: str = "auto"
    kernel: str = "auto"
    save: str | None = None
    resume: str | None = None
    reduce_every_microbatch: bool = True
    accelerator: str = "gpu"


def run(job):
    """Fit, validate, perhaps save or resume; return losses, validation loss and figures."""
    with elastic_environment():
        # Ranks that share a GPU look like nodes with one GPU each.
        size = dist.get_world_size()  # noqa: TID251
        os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0"}
        strategy = doors.strategy(
            context_parallel_size=size // job.dp_size,
            algorithm=job.algorithm,
            layout=job.layout,
            kernel=job.kernel,
            reduce_every_microbatch=job.reduce_every_microbatch,
        )
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator=job.accelerator,
            devices=1,
            num_nodes=size,
            precision=job.precision,
            max_steps=job.steps,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[ContextParallelCallback(verify_first_batch=True, verify_max_len=256)],
        )
        module = Module()
        data_rank = dist.get_rank() // (size // job.dp_size)
        rows = torch.utils.data.Subset(Documents(64), range(data_rank, 64, job.dp_size))
        per_rank = 2 // job.dp_size
        trainer.fit(
            module,
            DataLoader(rows, batch_size=per_rank),
            DataLoader(Documents(4, seed=1), batch_size=2),
            ckpt_path=job.resume,
        )
        figures = {k: float(v) for k, v in trainer.callback_metrics.items()}
        if job.save:
            trainer.save_checkpoint(job.save)
        validated = trainer.validate(
            module, DataLoader(Documents(4, seed=1), batch_size=2), verbose=False
        )
        return torch.stack(module.losses).tolist(), validated[0]["val_loss"], figures


@pytest.fixture(scope="module")
def alone(nccl):
    """Return the run on one rank, by precision."""
    done = {}

    def get(**options):
        job = Job(**options)
        return done.setdefault(repr(job), nccl(1).run(run, job, timeout=300)[0])

    return get


# Several ways at once: what differs between runs is told apart by the CPU tests.
WAYS = {
    "gather, 2 ranks": (2, {}),
    "ring, contiguous, flash, reduced once, 4 ranks": (
        4,
        {
            "algorithm": "ring",
            "layout": "contiguous",
            "kernel": "flash",
            "reduce_every_microbatch": False,
        },
    ),
    "data, 4 ranks": (4, {"dp_size": 2}),
}


def distance(a, b):
    """Return the root mean square difference of two curves."""
    return (torch.tensor(a) - torch.tensor(b)).square().mean().sqrt().item()


def test_nothing_hangs_in_two_hundred_steps(nccl):
    for losses, val_loss, _ in nccl(4).run(run, Job(steps=200, algorithm="ring"), timeout=500):
        assert len(losses) == 400
        assert sum(losses[-8:]) < sum(losses[:8])
        assert val_loss == val_loss


@pytest.mark.parametrize("way", WAYS)
def test_the_curve_is_that_of_one_rank_within_noise(nccl, alone, way):
    size, options = WAYS[way]
    one, validated, _ = alone(steps=20)
    exact, *_ = alone(precision="32-true", steps=20)
    noise = distance(one, exact)  # what bfloat16 makes of the same run
    for losses, val_loss, figures in nccl(size).run(run, Job(20, **options), timeout=300):
        assert len(losses) == 40
        assert distance(losses, exact) < 2 * noise
        assert val_loss == pytest.approx(validated, rel=5e-3)
        assert figures["tokens_per_second"] > 0
    assert sum(one[-8:]) < sum(one[:8])  # it learns


def test_in_full_precision_the_curve_is_the_same(nccl, alone):
    exact, validated, _ = alone(precision="32-true", steps=20)
    for losses, val_loss, _ in nccl(4).run(run, Job(20, "32-true"), timeout=300):
        assert losses == pytest.approx(exact, rel=2e-4)
        assert val_loss == pytest.approx(validated, rel=2e-4)


def test_a_run_is_saved_and_resumed_on_other_ranks(nccl, alone, tmp_path):
    path = str(tmp_path / "run.ckpt")
    nccl(2).run(run, Job(steps=16, save=path), timeout=300)  # one epoch: 32 batches, two a step
    one, exact = (alone(precision=p, steps=32)[0][-32:] for p in ("bf16-mixed", "32-true"))
    for losses, *_ in nccl(4).run(run, Job(steps=32, resume=path), timeout=300):
        assert len(losses) == 32
        assert distance(losses, exact) < 2 * distance(one, exact)
