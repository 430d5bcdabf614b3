"""Windows of a loop of one's own: the gradient of the mean over all tokens of several batches."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_cp import token_mean
from lightning_cp.loss.accumulate import GradientWindow
from tests import doors

CP = doors.parallel(None)


def build_batches(num_labels):
    """Return hidden states and labels of batches with so many labels each."""
    generator = torch.Generator().manual_seed(1)
    for number in num_labels:
        labels = torch.randint(7, (1, 9), generator=generator)
        labels[:, number + 1 :] = -100  # the first label belongs to no token
        yield torch.randn(1, 9, 4, generator=generator).double(), labels


def exact_gradient(weight, batches):
    hidden, labels = (torch.cat(x) for x in zip(*batches, strict=True))
    logits = (hidden @ weight)[:, :-1]
    loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return torch.autograd.grad(loss, weight)[0]


def test_each_window_has_the_gradient_of_its_own_tokens():
    weight, window = torch.randn(4, 7).double().requires_grad_(), GradientWindow()
    for num_labels in ((8, 1), (2, 5, 3), (4,), (1, 7)):
        batches = list(build_batches(num_labels))
        weight.grad = None
        for hidden, labels in batches:
            with CP.step({"inputs_embeds": hidden, "labels": labels}) as local:
                loss = token_mean(local["inputs_embeds"] @ weight, local["labels"])
                (loss * window.weigh()).backward()
        window.finish([weight])
        torch.testing.assert_close(weight.grad, exact_gradient(weight, batches))
        before = weight.grad.clone()
        window.finish([weight])  # nothing is left to do
        assert torch.equal(weight.grad, before)


def test_a_window_needs_a_loss_of_the_step():
    with pytest.raises(
        RuntimeError, match=r"needs a step in which token_mean\(\).* after the loss"
    ):
        GradientWindow().weigh()


def window_of(*steps):
    """Run steps, each a list of what is computed in this order; return the gradient and weights.

    ``loss`` goes backward; ``logged`` is a mean over fewer tokens, ``kept`` the same with gradient.
    """
    weight, window = torch.randn(4, 7).double().requires_grad_(), GradientWindow()
    batches = list(build_batches([7 - index for index in range(len(steps))]))
    for (hidden, labels), kinds in zip(batches, steps, strict=True):
        with CP.step({"inputs_embeds": hidden, "labels": labels}) as local:
            x, y = local["inputs_embeds"] @ weight, local["labels"]
            loss = None
            for kind in kinds:
                with torch.set_grad_enabled(kind != "logged"):
                    mean = token_mean(x, y if kind == "loss" else y.where(y > 4, -100))
                loss = mean if kind == "loss" else loss
            (loss * window.weigh()).backward()
    window.finish([weight])
    return weight.grad, exact_gradient(weight, batches)


@pytest.mark.parametrize(
    "steps",
    [
        (["logged", "loss"], ["logged", "loss"]),
        (["loss", "logged"], ["loss", "logged"]),
        (["logged", "loss"], ["loss"]),
        (["loss", "loss"], ["loss"]),
    ],
)
def test_a_mean_that_is_only_logged_does_not_count(steps):
    torch.testing.assert_close(*window_of(*steps))


@pytest.mark.parametrize("steps", [(["kept", "loss"], ["loss"]), (["loss"], ["loss", "kept"])])
def test_a_mean_that_only_some_steps_compute_is_refused(steps):
    with pytest.raises(RuntimeError, match=r"no common weight.*only logged does not count"):
        window_of(*steps)
