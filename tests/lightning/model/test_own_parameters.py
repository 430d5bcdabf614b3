"""Parameters of the LightningModule itself, and numbers: beside sharded ones, as on one device."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_cp import token_mean
from tests import doors
from tests.lightning.jobs import (
    Module,
    PackedRows,
    build_trainer,
    elastic_environment,
    full,
    loader,
)
from tests.parity.steps import whole_loss

pytestmark = pytest.mark.ranks

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
    # With a smaller eps, the sign of a gradient that is rounded to almost 0 would count.
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, fused=True),
    "adamw loop": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, foreach=False),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2, eps=1e-4, foreach=True),
}


class Scaled(nn.Module):
    """Multiplies by a number that it learns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return x * self.scale


class Owner(Module):
    """Learns a temperature, a bias of logits, what some tokens add, and weights of losses."""

    def __init__(self, case):
        super().__init__(dtype=torch.float64)
        self.case, self.grads = case, []
        self.temperature = nn.Parameter(torch.tensor(0.2))
        self.bias = nn.Parameter(torch.linspace(-1, 1, 61))
        self.rare = nn.Parameter(torch.linspace(0.5, -0.5, 61))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.weights = nn.ParameterDict({"loss": nn.Parameter(torch.tensor([0.7, 0.1]))})
        self.scaled = Scaled()
        self.double()
        self.automatic_optimization = not case.manual

    def configure_model(self):
        if self.case.sharded and not isinstance(self.model.head.weight, DTensor):
            for part in (*self.model.blocks, self.model):
                fully_shard(part, mesh=self.trainer.strategy.shard_mesh)

    def finish(self, logits, ids):
        logits = self.scaled(logits) / self.temperature.exp() + self.bias
        is_rare = ids == 3
        if bool(is_rare.any()):  # on some ranks
            logits = logits + is_rare[..., None] * self.rare
        return logits

    def logits(self, batch):
        return self.finish(super().logits(batch), batch["input_ids"])

    def total(self, loss):
        """A parameter times the mean over tokens, and terms that every rank computes alike."""
        weight, decay = self.weights["loss"]
        return weight.exp() * loss + decay * self.bias.square().sum() - weight + self.frozen.sum()

    def training_step(self, batch, batch_idx):
        loss = self.total(token_mean(self.logits(batch), batch["labels"]))
        self.losses.append(float(loss.detach()))
        if self.automatic_optimization:
            return loss
        window, optimizer = self.trainer.strategy.gradient_window, self.optimizers()
        self.manual_backward(loss * window.weigh())
        if (batch_idx + 1) % self.case.accumulate == 0:
            window.finish(self.parameters())
            self.clip_gradients(optimizer, self.case.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer):
        named = self.named_parameters()
        self.grads.append({n: full(p.grad).clone() for n, p in named if p.grad is not None})

    def configure_optimizers(self):
        return OPTIMIZERS[self.case.optimizer](self.parameters())


class Alone(nn.Module):
    """The same on one device: whole_loss() calls it."""

    def __init__(self, case):
        super().__init__()
        self.owner = Owner(case)

    def forward(self, ids, positions, **options):
        return self.owner.finish(self.owner.model(ids, positions, **options), ids)


@dataclass
class Case:
    """A run."""

    dp_size: int = 1
    optimizer: str = "adamw"
    num_batches: int = 6
    verify: bool = True
    accumulate: int = 1
    manual: bool = False
    sharded: bool = False
    clip: float = 0.5
    strategy: dict[str, Any] = field(default_factory=dict)
    averaging: str = ""
    epochs: int = 1
    resume: str | None = None
    save: str | None = None


AVERAGING = {
    "ema": lambda: EMAWeightAveraging(decay=0.7),
    "multi": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7)),
}


def build(case):
    automatic = {"accumulate_grad_batches": case.accumulate, "gradient_clip_val": case.clip}
    return build_trainer(
        strategy=doors.strategy(
            data_parallel_size=case.dp_size, verify_steps=case.verify, **case.strategy
        ),
        max_epochs=case.epochs,
        callbacks=[AVERAGING[case.averaging]()] if case.averaging else [],
        **({} if case.manual else automatic),
    )


def run_case(case):
    """Train, and return what this rank has seen."""
    with elastic_environment():
        module, trainer = Owner(case), build(case)
        if dist.get_rank():  # rank 0's values count
            for name in ("temperature", "bias") if not case.sharded else ():
                getattr(module, name).data.add_(1)
        rows = PackedRows(2 * case.num_batches)
        trainer.fit(module, loader(rows, case.dp_size), ckpt_path=case.resume)
        if case.save:
            trainer.save_checkpoint(case.save)
        plain = {n for n, p in module.named_parameters() if not isinstance(p, DTensor)}
        weights = {n: full(p.detach()).clone() for n, p in module.named_parameters()}
        return module.losses, module.grads, weights, plain


def run_cases(cases):
    """Run several cases in one job; an error instead of a result where one failed."""
    results = {}
    for name, case in cases.items():
        try:
            results[name] = run_case(case)
        except Exception as error:
            raise AssertionError(name) from error
    return results


def run_alone(case):
    """Train on one device with the full global batch."""
    net = Alone(case)
    owner, rows = net.owner, PackedRows(2 * case.num_batches)
    optimizer = owner.configure_optimizers()
    averages, losses, grads = None, [], []
    for start in range(0, case.num_batches * case.epochs, case.accumulate):
        steps = [i % case.num_batches for i in range(start, start + case.accumulate)]
        parts = [whole_loss(net, rows.rows(2 * i, 2 * i + 2)) for i in steps]
        losses += [float(owner.total(total / count).detach()) for total, count in parts]
        count = sum(count for _, count in parts)
        owner.total(sum(total for total, _ in parts) / count).backward()
        named = dict(owner.named_parameters())
        grads.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        nn.utils.clip_grad_norm_(owner.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if case.averaging:  # the first update copies
            current = [p.detach().clone() for p in owner.parameters()]
            pairs = zip(averages or current, current, strict=True)
            averages = [0.7 * a + 0.3 * c for a, c in pairs]
    weights = {n: p.detach() for n, p in owner.named_parameters()}
    return losses, grads, dict(zip(weights, averages, strict=True)) if averages else weights


def check(results, cases):
    exact = {}
    for found in results:
        for name, (losses, grads, weights, plain) in found.items():
            case = cases[name]
            alone = Case(
                optimizer=case.optimizer,
                num_batches=case.num_batches,
                accumulate=case.accumulate,
                averaging="ema" if case.averaging else "",
                epochs=case.epochs,
            )
            exact[str(alone)] = exact.get(str(alone)) or run_alone(alone)
            true_losses, true_grads, true_weights = exact[str(alone)]
            limits = {"rtol": 0, "atol": 1e-11}
            assert losses == pytest.approx(true_losses[-len(losses) :], abs=1e-11), name
            if not case.manual:  # called after clipping there
                for one, true in zip(grads, true_grads[-len(grads) :], strict=True):
                    assert one.keys() == true.keys(), name
                    for key, grad in true.items():
                        torch.testing.assert_close(one[key], grad, **limits, msg=f"{name} {key}")
            for key, weight in true_weights.items():
                torch.testing.assert_close(weights[key], weight, **limits, msg=f"{name} {key}")
            own = {"temperature", "bias", "rare", "frozen", "weights.loss", "scaled.scale"}
            assert own <= plain, name
            assert own == plain or case.strategy, name


COPIES_ONCE = {
    "parameter_sharding": "hybrid",
    "shard_size": 1,
    "reduce_every_microbatch": False,
}
TWO = {
    **{name: Case(optimizer=name) for name in OPTIMIZERS},
    "windows": Case(accumulate=3),
    "reduced once": Case(accumulate=3, strategy={"reduce_every_microbatch": False}),
    "manual": Case(accumulate=2, manual=True),
    "data": Case(dp_size=2, accumulate=2),
    "copies": Case(strategy={"parameter_sharding": "hybrid", "shard_size": 1}),
    "copies, once": Case(accumulate=3, strategy=COPIES_ONCE),
    "none": Case(strategy={"parameter_sharding": "none"}),
    "own sharding": Case(sharded=True),
    "in host memory": Case(strategy={"parameter_offload": True}),
    "ema": Case(averaging="ema"),
    "multi": Case(averaging="multi"),
}


short = partial(Case, num_batches=2, verify=False)


@pytest.mark.slow
def test_parameters_of_the_module_itself_train_as_on_one_device(ranks):
    check(ranks(2).run(run_cases, TWO), TWO)


@pytest.mark.slow
@pytest.mark.parametrize("one_file", [False, True])
def test_they_resume_on_another_number_of_ranks(ranks, tmp_path, one_file):
    path = str(tmp_path / "saved.ckpt")
    kind = {"save_distributed_checkpoint": not one_file}
    first = {"first": short(save=path, strategy=kind)}
    found = ranks(2).run(run_cases, first)
    check(found, first)
    weights = found[0]["first"][2]
    for name, parameter in Owner.load_from_checkpoint(path, case=Case()).named_parameters():
        assert torch.equal(parameter, weights[name]), name
    second = {"second": short(epochs=2, resume=path, strategy=kind)}
    check(ranks(3).run(run_cases, second), second)
