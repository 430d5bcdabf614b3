"""Outputs of evaluation and training steps: as on one device, or an error on all ranks."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from lightning_cp import token_mean
from lightning_cp.compare.restore import restored_state
from tests.lightning.jobs import build_strategy, build_trainer, elastic_environment
from tests.lightning.steps.generated_steps import (
    Case,
    Drawn,
    build_batches,
    one,
    run_on_one_device,
    run_on_ranks,
)

pytestmark = pytest.mark.ranks


def is_same(found, exact) -> bool:
    """Say whether two outputs of steps are equal but for rounding."""
    if isinstance(exact, np.ndarray):
        return isinstance(found, np.ndarray) and is_same(
            torch.as_tensor(found), torch.as_tensor(exact)
        )
    if isinstance(exact, Tensor):
        return found.shape == exact.shape and torch.allclose(
            found.double(), exact.double(), atol=1e-6, rtol=1e-6, equal_nan=True
        )
    if isinstance(exact, float):
        return abs(found - exact) <= 1e-5 * max(1, abs(exact)) or (
            found != found and exact != exact
        )
    if isinstance(exact, dict):
        return found.keys() == exact.keys() and all(is_same(found[k], exact[k]) for k in exact)
    if isinstance(exact, list | tuple):
        return len(found) == len(exact) and all(map(is_same, found, exact))
    return found == exact


def check_drawn(ranks, size: int, seeds: list[int]) -> int:
    """Compare drawn steps with one device; return how many were not refused."""
    exact = run_on_one_device(seeds)
    every = ranks(size).run(run_on_ranks, seeds, timeout=900)
    accepted = set()
    for found in every:
        for seed, values in found.items():
            refused = isinstance(values[-1], str) and values[-1].startswith("refused")
            kept = values[:-1] if refused else values
            assert is_same(kept, exact[seed][: len(kept)]), (seed, Case(seed).draw())
            accepted |= set() if refused else {seed}
    return len(accepted)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_300_drawn_steps_give_what_one_device_gives_or_are_refused(ranks, size):
    accepted = sum(check_drawn(ranks, size, list(range(at, at + 50))) for at in range(0, 300, 50))
    assert accepted > 100


class Step(Drawn):
    """One step as users write it, selected by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(Case(0))
        self.kind = kind
        self.count = torchmetrics.SumMetric()
        self.perplexity = Perplexity(ignore_index=-100)
        self.collection = torchmetrics.MetricCollection(
            [torchmetrics.MeanMetric(), torchmetrics.MaxMetric()]
        )
        self.kept: list[Tensor] = []

    def run(self, batch):
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
        out = self.model(**inputs, output_hidden_states=True)
        return getattr(self, self.kind)(out, batch)

    # Lines of one table: what was silently wrong.

    def pooled(self, out, batch):
        return out.hidden_states[-1].mean(1)  # [batch, hidden], as wide as a rank's tokens

    def last_token(self, out, batch):
        return out.logits[:, -1].argmax(-1)

    def lengths(self, out, batch):
        return batch["attention_mask"].sum(1)

    def mean_logit(self, out, batch):
        return out.logits.mean()

    def shifted_metric(self, out, batch):
        self.perplexity(out.logits[:, :-1], batch["labels"][:, 1:])
        self.log("perplexity", self.perplexity)

    def own_loss(self, out, batch):
        self.log("val_loss", cross_entropy(out.logits[:, :-1].mT, batch["labels"][:, 1:]))

    def returned_loss(self, out, batch):
        return cross_entropy(out.logits[:, :-1].mT, batch["labels"][:, 1:])

    def step_metric(self, out, batch):
        self.log("value", self.metrics["mean"](out.logits))

    def decoded(self, out, batch):
        return ["".join(chr(97 + t % 26) for t in row) for row in out.logits.argmax(-1).tolist()]

    def counted(self, out, batch):
        self.log("num_tokens", float(batch["input_ids"].numel()))

    def counted_twice(self, out, batch):
        self.count.update(float(len(batch["input_ids"])))
        self.log("samples", self.count)

    def kept_values(self, out, batch):
        self.kept.append(out.logits.mean())

    def chosen(self, out, batch):
        return out.logits.argmax(-1)[batch["labels"] != -100]

    # The same, right.

    def right_pooled(self, out, batch):
        return self.whole(out.hidden_states[-1]).mean(1)

    def right_last_token(self, out, batch):
        return {"last": self.whole(out.logits)[:, -1].argmax(-1)}

    def right_metric(self, out, batch):
        self.perplexity(out.logits, self.shifted(batch["labels"]))
        self.log("perplexity", self.perplexity)

    def right_loss(self, out, batch):
        loss = token_mean(out.logits, batch["labels"])
        self.log_dict({"val_loss": loss, "perplexity": loss.exp(), "model": out.loss})
        return {"loss": loss, "logits": out.logits, "tokens": batch["input_ids"]}

    def right_sum(self, out, batch):
        valid = (self.shifted(batch["labels"]) != -100).sum()
        self.log("valid", valid.float(), reduce_fx="sum", sync_dist=True)

    def right_output(self, out, batch):
        return out

    def right_tokens(self, out, batch):
        # Across the sequence, in an array, as plain numbers: only the trial run can tell.
        return [out.logits.argmax(-1), out.logits.mT.numpy(), out.logits.softmax(-1)[..., :3]]

    def right_collection(self, out, batch):
        real = batch["attention_mask"].bool()
        self.collection.update(out.logits.amax(-1)[real].float())
        self.log_dict(self.collection)

    def right_together(self, out, batch):
        """Return and log most of it in one step."""
        self.right_metric(out, batch)
        self.right_sum(out, batch)
        self.right_collection(out, batch)
        pooled, last = self.right_pooled(out, batch), self.right_last_token(out, batch)
        return {"pooled": pooled, "last": last, "tokens": self.right_tokens(out, batch)}

    def measured(self, out, batch):
        self.log("rank", float(torch.distributed.is_initialized()), rank_zero_only=True)

    def whole(self, x):
        return x if self.cp is None else self.cp.unshard(x, 1)

    def on_validation_epoch_end(self):
        if self.kind == "kept_values":
            self.log("mean", torch.stack(self.kept).mean())


WRONG = [name for name in vars(Step) if not name.startswith(("_", "on_", "right_", "run", "whole"))]
RIGHT = [name for name in vars(Step) if name.startswith("right_")]
WRONG.remove("measured")
FEW = ["right_together", "right_output"]


def some_batches(kind):
    """Return two of the four batches."""
    none, right, left, odd = build_batches()
    return {"right_loss": [left, odd], "right_output": [none, left]}.get(kind, [right, odd])


def all_batches(kind):
    """Return all batches."""
    return build_batches()


def run_steps(kinds, one_device, options, choose=some_batches):
    """Return what leaves each step, or the refusal; predictions where nothing is logged."""
    found = {}
    for kind in kinds:
        module = Step(kind)
        if one_device:
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
        else:
            trainer = build_trainer(strategy=build_strategy(**options))
        found[kind] = []
        try:
            for batch in choose(kind):
                module.seen.clear()
                (logged,) = trainer.validate(module, one(batch), verbose=False)
                found[kind].append([list(map(plain, module.seen)), logged])
        except (ValueError, TypeError) as error:
            found[kind] = str(error)
    return found


def plain(x):
    """Return tensors and containers without classes of models."""
    if isinstance(x, dict):
        return {k: plain(v) for k, v in x.items() if v is not None and k != "past_key_values"}
    return [plain(v) for v in x] if isinstance(x, list | tuple) else x


def run_steps_on_ranks(kinds, options, choose=some_batches):
    with elastic_environment():
        return run_steps(kinds, False, options, choose)


def on_host(x):
    """Return all tensors on the CPU."""
    if isinstance(x, Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {key: on_host(value) for key, value in x.items()}
    return [on_host(value) for value in x] if isinstance(x, list | tuple) else x


REFUSED = {
    "shifted_metric": "updated self.perplexity",
    "counted_twice": "data_parallel_group",
    "own_loss": "logged 'val_loss'",
    "counted": "logged 'num_tokens'",
    "step_metric": "logged 'value'",
    "kept_values": "kept self.kept",
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.slow
def test_what_one_rank_computes_alone_is_refused_on_all(ranks, size):
    for found in ranks(size).run(run_steps_on_ranks, WRONG, {}):
        for kind in WRONG:
            assert isinstance(found[kind], str), (kind, found[kind])
            assert REFUSED.get(kind, "validation_step() returned output") in found[kind], (
                kind,
                found,
            )
            assert "context_parallel" in found[kind]


@pytest.mark.parametrize(
    ("size", "kinds", "choose"),
    [
        (2, FEW, some_batches),
        *(pytest.param(n, RIGHT, all_batches, marks=pytest.mark.slow) for n in (2, 3)),
    ],
)
def test_what_is_computed_from_all_tokens_is_that_of_one_device(ranks, size, kinds, choose):
    exact = run_steps(kinds, True, {}, choose)
    for found in ranks(size).run(run_steps_on_ranks, kinds, {}, choose):
        for kind in kinds:
            assert is_same(found[kind], exact[kind]), (kind, found[kind], exact[kind])


def test_without_a_trial_run_ranks_still_compare(ranks):
    right = ["right_loss", "right_output"]
    kinds = ["pooled", "last_token", "mean_logit", "own_loss", *right]
    exact = run_steps(right, True, {})
    options = {"verify_steps": False, "sequence_dims": {"logits": 1}}
    for found in ranks(2).run(run_steps_on_ranks, kinds, options):
        for kind in kinds:
            if kind in right:
                assert is_same(found[kind], exact[kind]), kind
            else:
                assert "computed from the tokens of one rank" in found[kind], kind


class Training(Step):
    """Trains and logs, selected by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.calls, self.weights = 0, (1.0 for _ in range(9))
        self.logged: list[str] = []

    def training_step(self, batch, batch_idx):
        self.calls += 1
        if self.kind == "shifted local mean":
            logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            return cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:])
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
        out = self.model(**inputs)
        if self.kind == "local accuracy":
            self.log("accuracy", (out.logits.argmax(-1) == batch["labels"]).double().mean())
        if self.kind == "late":  # long after ranks have stopped to compare at once
            value = out.logits.mean() if batch_idx > 9 else torch.tensor(1.0)
            self.log("late", value)
        if self.kind == "drawn":
            return out.loss * next(self.weights)
        if self.kind == "metric":
            self.log("train_mean", self.metrics["mean"](out.logits))
        if self.kind == "metric object":
            self.metrics["mean"](out.logits)
            self.log("train_mean", self.metrics["mean"], on_step=True)
        if self.kind == "right":
            self.log_dict(
                {"train_loss": out.loss, "lr": 0.1, "samples": float(len(batch["labels"]))}
            )
            return {"loss": out.loss, "logits": out.logits, "text": "a"}
        return out.loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.kind == "right":
            # Left as they are: this rank's tokens.
            assert outputs["logits"].shape[1] < batch["labels"].shape[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


TRAINED = {
    "local accuracy": "training_step() logged 'accuracy'",
    "late": "computed different values since the last comparison; one of: logged 'late'",
    "shifted local mean": "Context parallelism changes the results of this model",
    "drawn": "draws from `Training.__init__.<locals>.<genexpr>`, an iterator that cannot be set",
    "metric": "training_step() logged 'train_mean'",
    "metric object": "training_step() logged 'train_mean (of this step)'",
    "right": "trained in 2 calls",
}


def run_training(kinds):
    """Return the result of each training step."""
    results = {}
    for kind in kinds:
        with elastic_environment():
            loss = "local_mean" if kind == "shifted local mean" else "auto"
            strategy = build_strategy(loss=loss)
            trainer = build_trainer(strategy=strategy, max_epochs=1)
            module = Training(kind)
            batches = build_batches()[:1] * 12 if kind == "late" else build_batches()[:2]
            loader = DataLoader(batches, batch_size=None)
            try:
                trainer.fit(module, loader)
            except (ValueError, RuntimeError) as error:
                results[kind] = str(error)
            else:
                results[kind] = f"trained in {module.calls} calls"
    return results


QUICK = ("late", "right")
OTHERS = [kind for kind in TRAINED if kind not in QUICK]


@pytest.mark.parametrize("kinds", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_what_training_logs_is_global_or_refused(ranks, kinds):
    for results in ranks(2).run(run_training, kinds):
        for kind in kinds:
            assert TRAINED[kind] in results[kind], (kind, results[kind])


class Unlabelled(Step):
    def right_loss(self, out, batch):
        self.log("val_loss", out.loss)


def run_without_labels():
    with elastic_environment():
        trainer = build_trainer(strategy=build_strategy())
        batch, other = build_batches()[:2]
        empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        losses = [
            trainer.validate(
                Unlabelled("right_loss"), DataLoader(rows, batch_size=None), verbose=False
            )
            for rows in ([empty], [empty, other], [other])
        ]
        return [float(found["val_loss"]) for (found,) in losses]


def test_a_batch_without_any_label_counts_for_nothing(ranks):
    for alone, beside, other in ranks(2).run(run_without_labels):
        assert alone == 0.0  # not 0 / 0
        assert beside == pytest.approx(other, abs=1e-7)


def run_over_data():
    """Validate and train on data ranks of which only one has padding."""
    with elastic_environment():
        trainer = build_trainer(strategy=build_strategy(data_parallel_size=2), max_epochs=1)
        rank = torch.distributed.get_rank() // 2
        batches = build_batches()[:2]
        rows = DataLoader([batches[rank], batches[1 - rank], batches[0]], batch_size=None)
        module = Training("right")
        trainer.fit(module, rows)
        (found,) = trainer.validate(Step("right_metric"), rows, verbose=False)
        return found["perplexity"]


@pytest.mark.slow
def test_data_ranks_with_batches_of_other_kinds_take_part_in_each_trial(ranks):
    found = ranks(4).run(run_over_data)
    assert found == [found[0]] * 4


def test_a_trial_run_leaves_nothing_in_the_module():
    module = torch.nn.Linear(2, 2)
    module.by_loader, module.total, module.place = {0: [1]}, torch.zeros(()), (1, [2])
    module.array, module.view = np.zeros(2), torch.zeros(1).expand(3)
    with restored_state(module):
        module.by_loader[0].append(9)
        module.by_loader[1] = []
        module.total += 5
        module.place[1].append(3)
        module.array += 1
        module.added = []
    assert (module.by_loader, float(module.total), module.place) == ({0: [1]}, 0.0, (1, [2]))
    assert module.array.tolist() == [0, 0]
    assert not hasattr(module, "added")
