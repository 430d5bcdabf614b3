import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_cp import sample_mean, token_mean
from lightning_cp.loss import chunked_loss
from lightning_cp.loss.accumulate import GradientWindow
from lightning_cp.loss.means import chunked_token_mean, global_mean
from lightning_cp.step import active_step
from tests import doors
from tests.oracle import errors


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
    cp = doors.parallel(None)
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


# Chunked: the same loss and gradients, without the logits of all tokens.

WIDTH, VOCAB = 6, 11


class Softcapped(nn.Module):
    """Several modules, a scalar weight, a cap: a head as models have them."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return 3 * torch.tanh(self.scale * self.out(self.norm(x)) / 3)


HEADS = {
    "plain": lambda: nn.Linear(WIDTH, VOCAB, bias=False),
    "bias": lambda: nn.Linear(WIDTH, VOCAB),
    "softcap": Softcapped,
}


def build(kind="softcap", dtype=torch.float64):
    """Return a head, hidden states and labels; 2 rows of 9 tokens."""
    torch.manual_seed(3)
    head = HEADS[kind]().to(dtype)
    hidden = torch.randn(2, 9, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (2, 9))
    labels[0, 4:6], labels[1, 0] = -100, -100
    return head, hidden, labels


def chunked(head, hidden, labels, **options):
    return chunked_token_mean(head, hidden, labels, parameters=list(head.parameters()), **options)


def results(loss, hidden, head):
    """Go backward, and return the loss and every gradient."""
    tensors = {"hidden": hidden, **dict(head.named_parameters())}
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    # An incoming gradient other than 1 must count.
    found = torch.autograd.grad(loss * 3, list(wanted.values()))
    return {"loss": loss.detach(), **dict(zip(wanted, found, strict=True))}


def check(found, exact, tolerance=1e-12):
    assert all(x.dtype == exact[name].dtype for name, x in found.items())
    worst = errors(found, exact)
    assert max(worst.values()) <= tolerance, worst


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("chunk_len", [1, 7, 100, None])
@pytest.mark.parametrize("kind", HEADS)
def test_chunked_is_token_mean(kind, chunk_len, shift):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        head, hidden, labels = build(kind, dtype)
        exact = results(token_mean(head(hidden), labels, shift=shift), hidden, head)
        loss = chunked(head, hidden, labels, shift=shift, chunk_len=chunk_len)
        check(results(loss, hidden, head), exact, tolerance)


def test_chunked_hidden_states_may_lie_anyhow():
    head, hidden, labels = build()
    exact = results(token_mean(head(hidden), labels), hidden, head)
    crossed = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    check(results(chunked(head, crossed, labels, chunk_len=4), hidden, head), exact)
    empty = torch.zeros(2, 0, WIDTH, dtype=torch.float64)
    assert chunked(head, empty, labels[:, :0]).item() == 0.0


def test_chunked_on_the_meta_device():
    with torch.device("meta"):
        head, hidden = nn.Linear(WIDTH, VOCAB), torch.zeros(2, 9, WIDTH, requires_grad=True)
        labels = torch.zeros(2, 9).long()
    chunked(head, hidden, labels, chunk_len=4).backward()
    assert hidden.grad.shape == hidden.shape
    assert head.weight.grad.is_meta


def test_chunked_without_valid_labels_is_zero_with_zero_gradients():
    head, hidden, labels = build()
    loss = chunked(head, hidden, torch.full_like(labels, -100), chunk_len=4)
    found = results(loss, hidden, head)
    assert len(found) == 7
    assert all(not x.any() for x in found.values())


def test_chunked_with_a_weight_tied_to_the_embedding():
    embedding = nn.Embedding(VOCAB, WIDTH).double()
    tokens = torch.randint(0, VOCAB, (2, 9))

    def gradient(loss_of):
        loss = loss_of(lambda x: x @ embedding.weight.T, torch.tanh(embedding(tokens)))
        return torch.autograd.grad(loss, embedding.weight)[0]

    weights = [embedding.weight, embedding.weight]  # named twice, counted once
    found = gradient(
        lambda head, x: chunked_token_mean(head, x, tokens, parameters=weights, chunk_len=5)
    )
    exact = gradient(lambda head, x: token_mean(head(x), tokens))
    torch.testing.assert_close(found, exact, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("frozen", ["head", "hidden", "bias"])
def test_chunked_with_frozen_parts(frozen):
    head, hidden, labels = build("bias")
    {"head": head, "hidden": hidden, "bias": head.bias}[frozen].requires_grad_(False)
    exact = results(token_mean(head(hidden), labels), hidden, head)
    check(results(chunked(head, hidden, labels, chunk_len=5), hidden, head), exact)


def test_chunked_leaves_unused_parameters_alone():
    head, hidden, labels = build()
    unused = nn.Parameter(torch.zeros(4))
    chunked_token_mean(head, hidden, labels, parameters=[unused, *head.parameters()]).backward()
    assert unused.grad is None
    assert head.out.weight.grad is not None


def test_chunked_gradients_of_parameters_that_share_a_tensor_in_autograd():
    """The gradients of a and b in `a + b` are one tensor, which must not be summed into twice."""
    head, hidden, labels = build()
    first, second = (nn.Parameter(torch.zeros(VOCAB).double()) for _ in range(2))
    both = [first, second]

    def added(x):
        return head(x) + (first + second)

    exact = torch.autograd.grad(token_mean(added(hidden), labels), both)
    weights = [*both, *head.parameters()]
    for chunk_len in (2, 18):
        loss = chunked_token_mean(added, hidden, labels, parameters=weights, chunk_len=chunk_len)
        found = torch.autograd.grad(loss, both)
        torch.testing.assert_close(found, exact)
        assert found[0].data_ptr() != found[1].data_ptr()


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "nothing requires a gradient"])
def test_chunked_computes_no_gradient_that_nobody_wants(mode, monkeypatch):
    head, hidden, labels = build()
    expected = token_mean(head(hidden), labels).item()
    monkeypatch.setattr(torch.autograd, "grad", None)
    if mode == "nothing requires a gradient":
        head.requires_grad_(False)
        loss = chunked(head, hidden.detach(), labels, chunk_len=5)
    else:
        with getattr(torch, mode)():
            loss = chunked(head, hidden, labels, chunk_len=5)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("chunk_len", "expected"),
    [
        (1, [1] * 753),
        (7, [7] * 105 + [6] * 3),
        (500, [377, 376]),
        (752, [377, 376]),
        (753, [753]),
        (2000, [753]),
        (None, [1] + [40] * 12 + [39] * 7),  # one token says how large the vocabulary is
    ],
)
def test_chunked_cuts_equal_pieces_of_no_more_tokens_than_asked(chunk_len, expected, monkeypatch):
    monkeypatch.setattr(chunked_loss, "MAX_CHUNK_LOGITS", VOCAB * 40 + 5)
    weight, sizes = torch.randn(WIDTH, VOCAB), []

    def spy(x):
        sizes.append(x.shape[:-1].numel())
        return x @ weight

    hidden = torch.randn(3, 251, WIDTH, requires_grad=True)
    labels = torch.zeros(3, 251).long()
    chunked_token_mean(spy, hidden, labels, parameters=[weight], chunk_len=chunk_len).backward()
    assert sizes == expected


@pytest.mark.parametrize("narrow", ["head", pytest.param("autocast", marks=pytest.mark.slow)])
def test_chunked_float16_has_small_pieces(narrow, monkeypatch):
    """Gradients are summed before any loss scale: many tokens of one label go beyond 65,504."""
    # Chunks of as many tokens as with a vocabulary of 32,000.
    monkeypatch.setattr(chunked_loss, "MAX_CHUNK_LOGITS", chunked_loss.MAX_CHUNK_LOGITS // 32)
    head, hidden = torch.nn.Linear(8, 1000, bias=False), torch.randn(1, 8192, 8)
    hidden[..., 0] = 60
    labels = torch.randint(0, 1000, (1, 8192))
    labels[torch.rand(labels.shape) < 0.15] = 7
    dtype = torch.float16 if narrow == "head" else torch.float32
    head, hidden = head.to(dtype), hidden.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16, enabled=narrow == "autocast"):
        loss = chunked(head, hidden, labels)
    loss.backward()
    assert head.weight.grad.isfinite().all()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize(("chunk_len", "wide"), [(18, False), (9, True), (None, False)])
def test_chunked_sums_gradients_in_float32_where_there_is_a_sum(chunk_len, wide):
    head, hidden, labels = build("bias", torch.bfloat16)
    dtypes = []
    with saved_tensors_hooks(lambda x: dtypes.append(x.dtype) or x, lambda x: x):
        loss = chunked(head, hidden, labels, chunk_len=chunk_len)
    kept = torch.float32 if wide else torch.bfloat16
    assert dtypes[:3] == [torch.bfloat16, kept, kept]
    loss.backward()
    assert {x.grad.dtype for x in (hidden, *head.parameters())} == {torch.bfloat16}


def test_chunked_under_autocast_asks_for_the_vocabulary_without_losing_gradients():
    """Autocast keeps what it made of the weights: the pieces get what the first call got."""
    head, hidden, labels = build("bias", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        asked, told = chunked(head, hidden, labels), chunked(head, hidden, labels, chunk_len=18)
    check(results(asked, hidden, head), results(told, hidden, head), 0.0)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (40, 33)])
def test_chunked_gradients_are_multiplied_in_float32_and_rounded_once(shape, kept, to):
    x, factor = torch.randn(shape).to(kept), torch.tensor(3 / 4097)
    wide = x.to(torch.promote_types(kept, torch.float32))
    found = chunked_loss.multiplied(x, factor, to)  # no gradient shows each pair of dtypes
    assert found.dtype == to
    assert torch.equal(found, (wide * factor).to(to))


def test_chunked_half_precision_is_as_exact_as_token_mean_however_many_pieces():
    torch.manual_seed(0)
    head, hidden = nn.Linear(32, 50), torch.randn(2, 1024, 32)
    labels = torch.randint(0, 50, (2, 1024))
    head, hidden = head.bfloat16(), hidden.bfloat16().requires_grad_()
    wide, wide_hidden = nn.Linear(32, 50).double(), hidden.detach().double().requires_grad_()
    wide.load_state_dict(head.state_dict())
    exact = results(token_mean(wide(wide_hidden), labels), wide_hidden, wide)
    rounding = errors(results(token_mean(head(hidden), labels), hidden, head), exact)
    for chunk_len in (2048, 100, 2):
        loss = chunked(head, hidden, labels, chunk_len=chunk_len)
        worst = errors(results(loss, hidden, head), exact)
        assert all(worst[name] <= 2 * rounding[name] + 1e-7 for name in exact), (chunk_len, worst)


class PartlyWide(nn.Module):
    """A head of which one part leaves autocast."""

    def __init__(self):
        super().__init__()
        self.low, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.seen = set()

    def forward(self, x):
        low = self.low(x)
        self.seen.add(low.dtype)
        with torch.autocast("cpu", enabled=False):
            return self.wide(low.float())


def test_chunked_under_autocast_computes_in_the_dtypes_of_token_mean():
    _, hidden, labels = build(dtype=torch.float32)
    head = PartlyWide()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = token_mean(head(hidden), labels)
        pieces = chunked(head, hidden, labels, chunk_len=18)
        many = chunked(head, hidden, labels, chunk_len=4)
    assert head.seen == {torch.bfloat16}
    exact = results(whole, hidden, head)
    # Backward in bfloat16 where forward was in float32 would be 1e-3 off.
    found, split = results(pieces, hidden, head), results(many, hidden, head)
    for name in ("loss", "wide.weight", "wide.bias"):
        for x in (found, split):
            torch.testing.assert_close(x[name], exact[name], atol=1e-6, rtol=1e-6)
    check(found, exact, 1e-2)
    check(split, exact, 1e-2)


def test_chunked_goes_backward_twice_but_is_not_differentiated_twice():
    head, hidden, labels = build()
    loss = chunked(head, hidden, labels, chunk_len=5)
    first = torch.autograd.grad(loss, [hidden, head.out.weight], retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    second = torch.autograd.grad(loss, [hidden, head.out.weight], retain_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + gradient.square().sum()).backward()


def test_chunked_hooks_on_a_parameter_get_its_gradient_once_and_whole():
    head, hidden, labels = build()
    exact = results(token_mean(head(hidden), labels), hidden, head)["out.weight"]
    seen = []
    handle = head.out.weight.register_hook(lambda gradient: seen.append(gradient) or gradient / 2)
    (chunked(head, hidden, labels, chunk_len=5) * 3).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], exact)
    torch.testing.assert_close(head.out.weight.grad, exact / 2)
    handle.remove()
    (chunked(head, hidden, labels, chunk_len=5) * 3).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_chunked_inside_activation_checkpointing(reentrant):
    head, hidden, labels = build()
    exact = results(token_mean(head(hidden.tanh()), labels), hidden, head)
    sizes = []

    def spy(x):
        sizes.append(x.shape[1])
        return head(x)

    def loss_of(x):
        weights = list(head.parameters())
        return chunked_token_mean(spy, x.tanh(), labels, parameters=weights, chunk_len=7)

    with doors.parallel(None).step({"input_ids": labels.clamp(min=0)}):
        loss = checkpoint(loss_of, hidden, use_reentrant=reentrant)
        (loss * 3).backward()
        assert len(active_step.current().losses) == 1
    found = {name: x.grad for name, x in head.named_parameters()}
    check({"loss": loss.detach(), "hidden": hidden.grad, **found}, exact)
    assert sizes == [6, 6, 6] * 2


def test_chunked_around_a_head_that_is_checkpointed():
    head, hidden, labels = build()
    exact = results(token_mean(head(hidden), labels), hidden, head)
    weights = list(head.parameters())
    loss = chunked_token_mean(
        lambda x: checkpoint(head, x, use_reentrant=False),
        hidden,
        labels,
        parameters=weights,
        chunk_len=5,
    )
    check(results(loss, hidden, head), exact)


def test_chunked_shows_those_who_keep_saved_tensors_its_gradients_only():
    head, hidden, labels = build("bias")
    shapes = []
    with saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
        chunked(head, hidden, labels, chunk_len=5).backward()
    assert shapes == [(2, 9, WIDTH), (VOCAB, WIDTH), (VOCAB,), (), ()]


def test_chunked_is_left_out_of_compiled_graphs():
    head, hidden, labels = build()
    exact = results(token_mean(head(hidden.tanh()), labels), hidden, head)

    def loss_of(x):
        return chunked(head, x.tanh(), labels, chunk_len=5) * 1

    compiled = torch.compile(loss_of, backend="eager")
    check(results(compiled(hidden), hidden, head), exact)


def test_chunked_marks_its_loss_in_a_step_as_token_mean_does():
    cp = doors.parallel(None)
    cp.record_positions((2, 5))
    head, hidden, labels = build()
    with cp.step({"input_ids": labels.clamp(min=0), "labels": labels}) as local:
        whole = token_mean(head(hidden), local["labels"])
        pieces = chunked(head, hidden, local["labels"], chunk_len=4)
        expected, found = active_step.current().losses
    torch.testing.assert_close(pieces, whole)
    assert found.value.data_ptr() == pieces.data_ptr()
    assert torch.equal(found.num_tokens, expected.num_tokens)
    torch.testing.assert_close(found.by_position, expected.by_position)


def test_chunked_is_not_recomputed_after_its_step():
    cp = doors.parallel(None)
    head, hidden, labels = build()
    with cp.step({"input_ids": labels.clamp(min=0), "labels": labels}):
        loss = checkpoint(lambda x: chunked(head, x, labels), hidden, use_reentrant=True)
    with pytest.raises(RuntimeError, match="its step has ended"):
        loss.backward()


@pytest.mark.parametrize(
    ("hidden", "labels"),
    [((2, 4, 5), (2, 5)), ((8, 5), (8,)), ((2, 4, 5), (2, 4, 5))],
)
def test_chunked_shapes_that_do_not_fit_are_refused(hidden, labels):
    with pytest.raises(ValueError, match=r"needs hidden states \[batch, tokens, width\]"):
        chunked_token_mean(
            nn.Identity(), torch.zeros(hidden), torch.zeros(labels).long(), parameters=[]
        )


def test_chunked_whole_rows_inside_a_step_are_refused():
    cp = doors.parallel(None)
    head, hidden, labels = build()
    message = "got 9 tokens per sample inside a step whose ranks hold 8 each"
    with (
        cp.step({"input_ids": torch.zeros(2, 8).long()}),
        pytest.raises(ValueError, match=message),
    ):
        chunked(head, hidden, labels)


def test_chunked_needs_a_chunk_of_at_least_one_token():
    head, hidden, labels = build()
    with pytest.raises(ValueError, match=r"chunk_len=0\): pass a number of tokens above 0"):
        chunked(head, hidden, labels, chunk_len=0)


@pytest.mark.parametrize("bad", [lambda x: x[:, :-1], lambda x: x.sum(-1), lambda x: x[0]])
def test_chunked_head_that_does_not_make_logits_is_refused(bad):
    _, hidden, labels = build()
    with pytest.raises(ValueError, match=r"it returned \(.*\) for \(1, 5, 6\)"):
        chunked_token_mean(bad, hidden, labels, parameters=[], chunk_len=5)


@pytest.mark.parametrize("needs", ["both", "head"])
def test_chunked_weight_that_is_not_listed_is_refused(needs):
    head, hidden, labels = build("bias")
    hidden.requires_grad_(needs == "both")
    message = r"head computes with a tensor of shape \(11,\) that requires a gradient and is not in"
    with pytest.raises(ValueError, match=message):
        chunked_token_mean(head, hidden, labels, parameters=[head.weight])
    with torch.no_grad():
        chunked_token_mean(head, hidden, labels, parameters=[])


def test_chunked_weight_that_is_computed_from_others_is_refused():
    head, hidden, labels = build("bias")
    merged = head.weight * 2
    with pytest.raises(ValueError, match=r"shape \(11, 6\) that is computed from others"):
        chunked_token_mean(lambda x: x @ merged.T, hidden, labels, parameters=[merged])


@pytest.mark.parametrize("shapes", [((2,), ()), ((), (1,))])
def test_a_global_mean_of_vectors_is_refused(shapes):
    total, count = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"needs two scalars.*got shapes .*Sum them up"):
        global_mean(total, count)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
def test_a_sample_mean_of_tokens_is_refused(shape):
    with pytest.raises(ValueError, match=r"one loss per sample.*global_mean\(total, count\)"):
        sample_mean(torch.ones(shape))


def test_a_sample_mean_outside_of_a_step_is_the_mean():
    losses = torch.tensor([1.0, 4.0, 1.0], requires_grad=True)
    sample_mean(losses).backward()
    torch.testing.assert_close(losses.grad, torch.full((3,), 1 / 3))
    assert sample_mean(torch.tensor(0.1)) == torch.tensor(0.1)
    assert sample_mean(torch.zeros(0)) == 0
    assert sample_mean(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def run_samples(batches):
    """Accumulate a token mean and a sample mean of w; return the gradient of w."""
    w, window, cp = nn.Parameter(torch.ones((), dtype=torch.float64)), GradientWindow(), None
    for num_tokens, losses in batches:
        cp = cp or doors.parallel(None)
        with cp.step({"input_ids": torch.zeros(3, 4).long()}):
            loss = global_mean(w * num_tokens, torch.tensor(num_tokens))
            loss = loss + sample_mean(w * torch.tensor(losses))
            (loss * window.weigh()).backward()
    window.finish([w])
    return w.grad.item()


def test_token_and_sample_means_that_grow_alike_have_a_common_weight():
    assert run_samples([(5, [1.0]), (10, [4.0, 7.0])]) == pytest.approx(1 + 12 / 3)
    # A scalar has the weight of the three samples of the batch.
    assert run_samples([(5, 2.0), (5, [1.0, 3.0, 5.0])]) == pytest.approx(1 + (6 + 9) / 6)


@pytest.mark.parametrize(
    "batches",
    [[(5, [1.0]), (10, [4.0])], [(0, [1.0]), (10, [4.0])], [(0, [1.0]), (0, [4.0])]],
)
def test_token_and_sample_means_that_do_not_grow_alike_are_not_accumulated(batches):
    with pytest.raises(RuntimeError, match="two means over different numbers of tokens or samp"):
        run_samples(batches)


def test_a_mean_over_all_ranks_is_no_loss_of_a_sample():
    """Data ranks may hold different numbers of samples, by which it would be weighted."""
    weight, labels = torch.randn(7, 7, requires_grad=True), torch.randint(0, 7, (2, 6))
    with doors.parallel(None).step({"input_ids": labels, "labels": labels}) as local:
        logits = weight[local["input_ids"]]
        own = logits.mean((1, 2))
        mean = token_mean(logits, local["labels"])
        for held in (mean, (mean + own.mean()).exp(), own + 0.1 * mean, sample_mean(own)):
            with pytest.raises(ValueError, match=r"Add the means instead: token_mean\("):
                sample_mean(held)
        (mean + sample_mean(own) + sample_mean(own * mean.detach())).backward()
