import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_cp import sequence_logp, token_logp
from lightning_cp.loss import chunked_loss
from tests import doors

WIDTH, VOCAB = 6, 11


def build(dtype=torch.float64, head=None):
    """Return a head, hidden states and labels; 2 rows of 9 tokens."""
    torch.manual_seed(3)
    head = (head or nn.Linear(WIDTH, VOCAB)).to(dtype)
    hidden = torch.randn(2, 9, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 9))
    labels[0, 4:6], labels[1, 0] = -100, -100
    return head, hidden, labels


def plain(logits, labels):
    wide = torch.promote_types(logits.dtype, torch.float32)
    logp = logits[:, :-1].to(wide).log_softmax(-1)
    targets = labels[:, 1:]
    found = logp.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(targets == -100, 0.0)


def gradients(logp, hidden, head, **options):
    weights = torch.linspace(-1, 2, logp.numel(), dtype=logp.dtype).view(logp.shape)
    return torch.autograd.grad((logp * weights).sum(), [hidden, *head.parameters()], **options)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk_len", [1, 7, None])
def test_outside_a_step_it_is_log_softmax(chunk_len, softcap):
    head, hidden, labels = build()
    logits = head(hidden) if softcap is None else softcap * torch.tanh(head(hidden) / softcap)
    exact = plain(logits, labels)
    for found in (
        token_logp((hidden, head), labels, chunk_len=chunk_len, softcap=softcap),
        token_logp(head(hidden), labels, softcap=softcap),
    ):
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=1e-12)
        both = gradients(found, hidden, head), gradients(exact, hidden, head, retain_graph=True)
        torch.testing.assert_close(*both, atol=1e-12, rtol=1e-12)


def test_half_precision_is_scored_in_float32_and_gradients_are_summed_in_float32(monkeypatch):
    head, hidden, labels = build(torch.bfloat16)
    dtypes = []
    add = chunked_loss.add_gradients
    monkeypatch.setattr(
        chunked_loss,
        "add_gradients",
        lambda sums, found: (add(sums, found), dtypes.extend(x.dtype for x in sums)),
    )
    logp = token_logp((hidden, head), labels, chunk_len=4)
    assert logp.dtype == torch.float32
    assert {x.dtype for x in gradients(logp, hidden, head)} == {torch.bfloat16}
    assert set(dtypes) == {torch.float32}


def test_ignored_labels_get_zero_and_no_gradient():
    head, hidden, labels = build()
    labels[:] = -100
    logp = token_logp((hidden, head), labels, chunk_len=4)
    assert not logp.any()
    assert not any(x.any() for x in gradients(logp, hidden, head))


def test_dropout_and_autocast_of_the_head_are_those_of_forward():
    head, hidden, labels = build(torch.float32, nn.Sequential(nn.Dropout(0.5), nn.Linear(6, VOCAB)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(8)
        exact = plain(head(hidden), labels)
        torch.manual_seed(8)
        found = token_logp((hidden, head), labels, chunk_len=18)
    torch.testing.assert_close(found, exact)
    before = torch.get_rng_state()
    results = gradients(found, hidden, head)
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(results, gradients(exact, hidden, head), atol=1e-2, rtol=1e-2)
    assert torch.equal(results[0] == 0, gradients_are_zero(hidden, head, labels))


def gradients_are_zero(hidden, head, labels):
    """Return where dropout left no gradient."""
    torch.manual_seed(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return gradients(plain(head(hidden), labels), hidden, head)[0] == 0


def test_all_logits_are_never_held():
    head, hidden, labels = build()
    shapes, sizes = [], []

    def spy(x):
        sizes.append(x.shape[1])
        return head(x)

    weights = list(head.parameters())
    with saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        logp = token_logp((hidden, spy), labels, parameters=weights, chunk_len=5)
        logp.sum().backward()
    assert shapes == [(2, 9, WIDTH), (VOCAB, WIDTH), (VOCAB,)]
    assert sizes == [5, 5, 4, 4] * 2


def test_weights_that_change_before_backward_are_noticed():
    head, hidden, labels = build()
    logp = token_logp((hidden, head), labels, chunk_len=5)
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_backward_twice_but_not_differentiated_twice():
    head, hidden, labels = build()
    logp = token_logp((hidden, head), labels, chunk_len=5)
    once, again = (gradients(logp, hidden, head, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    (gradient,) = torch.autograd.grad(logp.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_gradients(mode):
    head, hidden, labels = build()
    exact = plain(head(hidden), labels)
    with getattr(torch, mode)():
        found = token_logp((hidden, head), labels, chunk_len=5)
    assert not found.requires_grad
    torch.testing.assert_close(found.clone(), exact.detach())


def test_segments_by_ids():
    head, hidden, labels = build()
    ids = torch.tensor([[-1, 0, 0, 1, 1, 1, 1, -1, 3], [0, 0, 2, 2, 2, 2, 0, 0, 0]])
    logp = plain(head(hidden), labels)
    inside = ids[:, 1:]
    valid = labels[:, 1:] != -100
    for batch in (None, {"labels": labels, "ids": ids}):
        if batch is None:
            found = sequence_logp(logp, labels, per=ids)
        else:
            with doors.parallel(None, sequence_dims={"ids": 1}).step(batch) as local:
                found = sequence_logp(logp, local["labels"], per=local["ids"])
        for segment in range(4):
            part = (inside == segment) & valid
            torch.testing.assert_close(found.sums[:, segment], (logp * part).sum(1))
            assert torch.equal(found.num_tokens[:, segment], part.sum(1))
        torch.testing.assert_close(found.means, found.sums / found.num_tokens.clamp(min=1))
    whole = sequence_logp(logp, labels)
    torch.testing.assert_close(whole.sums, logp.sum(1, keepdim=True))
    assert whole.num_tokens.tolist() == [[6], [8]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, x, y: token_logp(x, y[:, 1:]), r"needs logits \[batch, tokens, classes\]"),
        (lambda h, x, y: token_logp((x, h), y[0]), r"needs hidden states \[batch, tokens, width\]"),
        (lambda h, x, y: token_logp(h(x), y, chunk_len=3), "got logits, and parameters or chunk"),
        (lambda h, x, y: token_logp((x, h), y, softcap=0.0), r"softcap=0.0\): pass a number above"),
        (lambda h, x, y: token_logp((x, h), y, chunk_len=0), r"token_logp\(chunk_len=0\): pass"),
        (lambda h, x, y: token_logp((x, h.forward), y), r"a head that is a method, not a module"),
        (
            lambda h, x, y: token_logp((x, h.forward), y, parameters=[]),
            r"token_logp\(\): head computes with a tensor of shape \(11,.* is not in `parameters`",
        ),
        (
            lambda h, x, y: token_logp((x, h), y, parameters=[h.weight * 2]),
            r"token_logp\(parameters=...\) has a tensor of shape \(11, 6\) that is computed",
        ),
        (
            lambda h, x, y: token_logp((x, lambda z: z[:, :1]), y, parameters=[]),
            r"token_logp\(\) needs a head that computes logits",
        ),
        (
            lambda h, x, y: sequence_logp(x[..., 0], y),
            r"sequence_logp\(\) got \(2, 9\) and labels \(2, 9\), but needs .* \(2, 8\). Pass what",
        ),
        (lambda h, x, y: sequence_logp(x[:, 1:, 0], y, per="row"), r"per='row'\): pass 'sample'"),
        (lambda h, x, y: sequence_logp(x[:, 1:, 0], y, per=y[:, 1:]), r"integer ids of the shape"),
        (lambda h, x, y: sequence_logp(x[:, 1:, 0], y, per=y * 0.5), r"got torch.float32 of shape"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, message):
    head, hidden, labels = build()
    with pytest.raises(ValueError, match=message):
        call(head, hidden, labels)


def test_documents_are_known_inside_a_step():
    head, hidden, labels = build()
    with pytest.raises(RuntimeError, match="outside a step, which knows the documents"):
        sequence_logp(hidden[:, 1:, 0], labels, per="document")
    message = "got 9 tokens per sample inside a step whose ranks hold 8 each"
    with (
        doors.parallel(None).step({"input_ids": torch.zeros(2, 8).long()}),
        pytest.raises(ValueError, match=message),
    ):
        token_logp((hidden, head), labels)
