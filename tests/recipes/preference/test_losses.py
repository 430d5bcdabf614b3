"""Preference losses, against the formulas of the papers and those that TRL computes."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from recipes.preference.losses import (
    Completions,
    dpo_losses,
    kto_losses,
    orpo_losses,
)

PAIRS, TOKENS = 5, 7


def draw(seed=0):
    """Return log-probabilities of 2 x 5 completions of 2 to 7 tokens, and of a reference."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    mask = torch.ones(2 * PAIRS, TOKENS)
    for row, length in enumerate(torch.randint(2, TOKENS + 1, (2 * PAIRS,), generator=generator)):
        mask[row, length:] = 0
    logps = (-4 * numbers(2 * PAIRS, TOKENS)) * mask
    return logps.requires_grad_(), mask, -14 * numbers(2 * PAIRS)


def completions(logps, mask):
    both = Completions(logps.sum(1), mask.sum(1).long())
    return tuple(Completions(*parts) for parts in zip(*(x.chunk(2) for x in both), strict=True))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_formulas_of_the_papers():
    logps, mask, reference = draw()
    chosen, rejected = completions(logps, mask)
    refs = reference.chunk(2)
    beta, z = 0.3, torch.tensor(0.7).double()
    found = {
        kind: dpo_losses(chosen, rejected, *refs, beta=beta, kind=kind).values.tolist()
        for kind in ("sigmoid", "ipo", "sigmoid_norm")
    }
    smooth = dpo_losses(chosen, rejected, *refs, beta=beta, label_smoothing=0.2).values.tolist()
    kto = kto_losses(
        chosen, rejected, *refs, z, beta=beta, desirable_weight=1.5, undesirable_weight=0.5
    ).values.tolist()
    orpo = orpo_losses(chosen, rejected, beta=beta).values.tolist()
    for i in range(PAIRS):
        sums = chosen.sums[i].item(), rejected.sums[i].item()
        sizes = chosen.num_tokens[i].item(), rejected.num_tokens[i].item()
        r = [s - float(ref[i]) for s, ref in zip(sums, refs, strict=True)]
        mean = [x / n for x, n in zip(r, sizes, strict=True)]
        d = r[0] - r[1]
        expected = -math.log(sigmoid(beta * d))
        assert found["sigmoid"][i] == pytest.approx(expected, abs=1e-12)
        wrong = -math.log(sigmoid(-beta * d))
        assert smooth[i] == pytest.approx(0.8 * expected + 0.2 * wrong, abs=1e-12)
        ipo = (mean[0] - mean[1] - 1 / (2 * beta)) ** 2
        assert found["ipo"][i] == pytest.approx(ipo, abs=1e-12)
        norm = -math.log(sigmoid(beta * (mean[0] - mean[1])))
        assert found["sigmoid_norm"][i] == pytest.approx(norm, abs=1e-12)
        both = 1.5 * (1 - sigmoid(beta * (r[0] - 0.7))) + 0.5 * (1 - sigmoid(beta * (0.7 - r[1])))
        assert kto[i] == pytest.approx(both / 2, abs=1e-7)
        p = [math.exp(s / n) for s, n in zip(sums, sizes, strict=True)]
        odds = [x / (1 - x) for x in p]
        ratio = math.log(sigmoid(math.log(odds[0] / odds[1])))
        assert orpo[i] == pytest.approx(-math.log(p[0]) - beta * ratio, abs=1e-12)


def test_metrics():
    logps, mask, reference = draw(1)
    chosen, rejected = completions(logps, mask)
    refs = reference.chunk(2)
    metrics = dpo_losses(chosen, rejected, *refs, beta=0.5).metrics
    high, low = 0.5 * (chosen.sums - refs[0]), 0.5 * (rejected.sums - refs[1])
    torch.testing.assert_close(metrics["rewards/chosen"], high.detach())
    torch.testing.assert_close(metrics["rewards/rejected"], low.detach())
    torch.testing.assert_close(metrics["rewards/margins"], (high - low).detach())
    assert metrics["rewards/accuracies"].tolist() == (high > low).double().tolist()
    torch.testing.assert_close(metrics["logps/chosen"], chosen.sums.detach())
    assert not any(x.requires_grad for x in metrics.values())
    kto = kto_losses(chosen, rejected, *refs, torch.tensor(0.2)).metrics
    assert kto["kl"].shape == (PAIRS,)
    assert set(orpo_losses(chosen, rejected).metrics) == {
        *metrics,
        "nll",
        "log_odds",
        "log_odds_ratio",
    }


def test_a_divergence_below_0_counts_as_0():
    logps, mask, reference = draw()
    arguments = *completions(logps, mask), *reference.chunk(2)
    below, zero = (kto_losses(*arguments, torch.tensor(z)) for z in (-3.0, 0.0))
    assert torch.equal(below.values, zero.values)
    assert not below.metrics["kl"].any()


def test_odds_stay_finite_for_certain_and_for_impossible_completions():
    sums = torch.tensor([0.0, -1e-30, -1e-8, -40.0, -500.0], requires_grad=True)
    one = Completions(sums, torch.ones(5).long())
    losses = orpo_losses(one, Completions(sums.flip(0), torch.ones(5).long())).values
    losses.sum().backward()
    assert losses.isfinite().all()
    assert sums.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda *x: dpo_losses(*x, kind="hinge"), "kind='hinge': use one of sigmoid, ipo, sigm"),
        (lambda *x: dpo_losses(*x, beta=0.0), r"beta=0.0: give a number above 0"),
        (lambda *x: dpo_losses(*x, label_smoothing=0.5), "label_smoothing=0.5: give a probab"),
        (lambda *x: dpo_losses(*x, kind="ipo", label_smoothing=0.1), "not defined for kind='ipo'"),
        (lambda *x: kto_losses(*x, torch.zeros(()), beta=-1.0), r"beta=-1.0: give a number"),
        (lambda *x: orpo_losses(*x[:2], beta=float("nan")), r"beta=nan: give a number above 0"),
    ],
)
def test_options_without_a_meaning_are_refused(call, message):
    logps, mask, reference = draw()
    with pytest.raises(ValueError, match=message):
        call(*completions(logps, mask), *reference.chunk(2))


# ---------------------------------------------------------------- TRL


class Outputs(SimpleNamespace):
    """What TRL's fused head returns."""


def trl_self(**options):
    """Return the attributes that TRL's methods read of a trainer."""
    gather = lambda x: x  # noqa: E731
    accelerator = SimpleNamespace(device="cpu", gather=gather, gather_for_metrics=gather)
    return SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )


def trl_inputs(logps, mask):
    """Return a batch whose first token is the prompt, and a model that returns ``logps``."""
    whole = torch.cat([torch.zeros(len(mask), 1), mask], 1).long()
    zeros = torch.zeros_like(logps)

    def model(**_):
        return Outputs(
            log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
        )

    ids = torch.ones_like(whole)
    return model, {"input_ids": ids, "attention_mask": ids, "completion_mask": whole}


@pytest.mark.slow  # importing TRL takes half a minute
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "sigmoid_norm"])
def test_dpo_is_that_of_trl(kind):
    pytest.importorskip("trl")
    from trl import DPOTrainer

    logps, mask, reference = draw(2)
    model, inputs = trl_inputs(logps, mask)
    refs = reference.chunk(2)
    inputs |= {"ref_chosen_logps": refs[0], "ref_rejected_logps": refs[1]}
    fake = trl_self(beta=0.25, loss_types=[kind], loss_weights=[1.0])
    exact = DPOTrainer._compute_loss(fake, model, inputs, False)
    (expected,) = torch.autograd.grad(exact, logps)
    losses = dpo_losses(*completions(logps, mask), *refs, beta=0.25, kind=kind)
    (found,) = torch.autograd.grad(losses.values.mean(), logps)
    torch.testing.assert_close(losses.values.mean(), exact, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    for name, metric in losses.metrics.items():
        assert fake._metrics["eval"][name] == [pytest.approx(metric.mean().item(), abs=1e-7)], name


@pytest.mark.slow
def test_kto_is_that_of_trl():
    pytest.importorskip("trl")
    from trl import KTOTrainer

    logps, mask, reference = draw(3)
    model, inputs = trl_inputs(logps, mask)
    inputs["label"] = torch.tensor([True] * PAIRS + [False] * PAIRS)
    generator = torch.Generator().manual_seed(4)
    mismatched = torch.randn(2 * PAIRS, generator=generator, dtype=torch.float64)
    inputs |= {"ref_logps": reference, "ref_KL_logps": mismatched - 0.4}
    fake = trl_self(
        beta=0.25,
        loss_type="kto",
        desirable_weight=1.3,
        undesirable_weight=0.8,
        calculate_KL=True,
        _compute_kl_logps=lambda *_: mismatched,
    )
    exact = KTOTrainer._compute_loss(fake, model, inputs, False)
    (expected,) = torch.autograd.grad(exact, logps)
    z = torch.tensor(0.4).double()
    losses = kto_losses(
        *completions(logps, mask),
        *reference.chunk(2),
        z,
        beta=0.25,
        desirable_weight=1.3,
        undesirable_weight=0.8,
    )
    (found,) = torch.autograd.grad(losses.values.mean(), logps)
    torch.testing.assert_close(losses.values.mean(), exact, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-7)
    for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"):
        found_mean = losses.metrics[name].mean().item()
        assert fake._metrics["eval"][name] == [pytest.approx(found_mean, abs=1e-6)], name


@pytest.mark.slow
def test_orpo_is_that_of_trl():
    orpo = pytest.importorskip("trl.experimental.orpo")
    logps, mask, _ = draw(5)
    chosen, rejected = completions(logps, mask)
    fake = trl_self(beta=0.25)
    exact, high, low, _, _ = orpo.ORPOTrainer.odds_ratio_loss(fake, chosen.means, rejected.means)
    losses = orpo_losses(chosen, rejected, beta=0.25)
    torch.testing.assert_close(losses.values.float(), (-chosen.means - exact).float())
    torch.testing.assert_close(losses.metrics["rewards/chosen"].float(), high)
    torch.testing.assert_close(losses.metrics["rewards/rejected"].float(), low)
