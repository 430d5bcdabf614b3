import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_cp import ContextParallel, token_mean


def test_outside_a_step_it_is_the_plain_mean():
    logits, labels = torch.randn(2, 5, 11), torch.randint(0, 11, (2, 5))
    labels[0, 2] = -100
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(token_mean(logits, labels), expected)
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(token_mean(logits, labels, shift=False), expected)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(1, 4096, 5).bfloat16()
    labels = torch.randint(0, 5, (1, 4096))
    loss = token_mean(logits, labels)
    assert loss.dtype == torch.float32
    expected = cross_entropy(logits[0, :-1].double(), labels[0, 1:])
    assert abs(loss.item() - expected.item()) < 1e-6


def test_no_valid_label_is_zero_with_zero_gradient():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = token_mean(logits, torch.full((1, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert not logits.grad.any()


def test_one_rank_walks_the_same_code():
    cp = ContextParallel(None)
    logits, labels = torch.randn(2, 6, 7), torch.randint(0, 7, (2, 6))
    with cp.step({"input_ids": labels, "labels": labels}) as local:
        inside = token_mean(logits, local["labels"])
    torch.testing.assert_close(inside, token_mean(logits, labels))


@pytest.mark.parametrize(
    ("logits", "labels"),
    [((2, 4, 5), (2, 5)), ((8, 5), (8,)), ((2, 4, 5), (2, 4, 5))],
)
def test_shapes_that_do_not_fit_are_refused(logits, labels):
    with pytest.raises(ValueError, match=r"needs logits \[batch, tokens, classes\]"):
        token_mean(torch.zeros(logits), torch.zeros(labels).long())
