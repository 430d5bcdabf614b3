import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cp.sequence import document_starts, initial_states, split_ranges
from lightning_cp.sequence.token_map import build_token_map, held_ranges
from tests import doors
from tests.ranks import run_threads
from tests.sequence.cases import LAYOUTS, Case, cases, recur

HEADS, KEYS, VALUES = 2, 3, 2
STATE = (HEADS, KEYS, VALUES)
KINDS = {
    "scalars": ((HEADS, 1, 1), torch.mul),
    "vectors": ((HEADS, KEYS, 1), torch.mul),
    "elements": (STATE, torch.mul),
    "matrices": ((HEADS, KEYS, KEYS), torch.matmul),
}


def draw(case, kind):
    """Return decays and inputs of all tokens, and gradients of the states after them."""
    generator = torch.Generator().manual_seed(case.length)
    shapes = (KINDS[kind][0], STATE, STATE)
    decays, inputs, grads = (
        torch.randn(case.batch, case.length, *shape, generator=generator, dtype=torch.float64)
        for shape in shapes
    )
    return decays * 0.7, inputs, grads


def decay_of(decays, apply):
    """Return the product of the decays of a range, [B, ...]."""
    if apply is torch.mul:
        return decays.prod(1)
    total = torch.eye(KEYS, dtype=decays.dtype).expand(decays.shape[0], HEADS, KEYS, KEYS)
    for token in range(decays.shape[1]):
        total = decays[:, token] @ total
    return total


def recur_sharded(decays, inputs, apply):
    """Return the states after this rank's tokens, as a layer would compute them."""
    starts = split_ranges(document_starts(inputs))
    parts = list(zip(starts, split_ranges(decays), split_ranges(inputs), strict=True))
    zero = inputs.new_zeros(inputs.shape[0], *STATE)
    alone = [recur(*part, apply, zero)[:, -1] if part[2].shape[1] else zero for part in parts]
    totals = torch.stack([decay_of(part[1], apply) for part in parts])
    initial = initial_states(totals, torch.stack(alone), apply=apply)
    states = [
        recur(*part, apply, state) if part[2].shape[1] else part[2] + state[:, None]
        for part, state in zip(parts, initial, strict=True)
    ]
    return torch.cat(states, 1)


def gradients(out, dout, decays, inputs):
    grads = torch.autograd.grad(out, [decays, inputs], dout, materialize_grads=True)
    return dict(zip(("out", "ddecays", "dinputs"), (out.detach(), *grads), strict=True))


def expected(case, kind):
    decays, inputs, dout = draw(case, kind)
    decays.requires_grad_(), inputs.requires_grad_()
    flags = [[case.starts(b, t) for t in range(case.length)] for b in range(case.batch)]
    zero = inputs.new_zeros(case.batch, *STATE)
    out = recur(torch.tensor(flags), decays, inputs, KINDS[kind][1], zero)
    return gradients(out, dout, decays, inputs)


def run_shard(case, kind, rank):
    decays, inputs, dout = (case.cut(x, 1, rank) for x in draw(case, kind))
    out = recur_sharded(decays.requires_grad_(), inputs.requires_grad_(), KINDS[kind][1])
    return gradients(out, dout, decays, inputs)


def check(case, found, exact):
    layout = case.build_layout()
    for rank, part in enumerate(found):
        is_real = layout.is_real(rank)
        cut = {name: case.cut(x, 1, rank)[:, is_real] for name, x in exact.items()}
        part = {name: x[:, is_real] for name, x in part.items()}
        for name in exact:
            torch.testing.assert_close(part[name], cut[name], atol=1e-10, rtol=1e-9)


@settings(max_examples=60)
@given(case=cases(), kind=st.sampled_from(list(KINDS)))
def test_a_recurrence_and_its_gradients_are_those_of_full_sequences(threads, case, kind):
    def work(transport):
        threads.enter(case.build_step(transport))
        return run_shard(case, kind, transport.rank)

    check(case, run_threads(case.cp_size, work), expected(case, kind))


def chain(case, decays, states, apply):
    """Return the state before each range, from pairs of all ranges in the order of the sequence."""
    layout = case.build_layout()
    tokens = build_token_map(layout, 0, documents=case.document_ids, padding=case.is_padding)
    found, after = {}, torch.zeros_like(states[0])
    for number, held in enumerate(tokens.in_order):
        start, stop = held.tokens
        cut = [
            [float(start < case.length and not case.starts(b, start)) for b in range(case.batch)],
            [
                float(
                    all(t < case.length and not case.starts(b, t) for t in range(start + 1, stop))
                )
                for b in range(case.batch)
            ],
        ]
        enters, passes = torch.tensor(cut, dtype=after.dtype).view(2, -1, 1, 1, 1)
        if held.tokens.size == 0:
            enters = enters * 0
        found[held.rank, held.number] = before = after * enters
        after = apply(decays[number], before) * passes + states[number]
    return found, [(held.rank, held.number) for held in tokens.in_order]


@settings(max_examples=60)
@given(case=cases(max_len=40), kind=st.sampled_from(list(KINDS)))
def test_pairs_and_their_gradients_are_chained_in_the_order_of_the_sequence(threads, case, kind):
    shape, apply = KINDS[kind]
    layout = case.build_layout()
    counts = [len(held_ranges(layout, rank)) for rank in range(case.cp_size)]
    total = sum(counts)
    generator = torch.Generator().manual_seed(total)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    decays, states = normal(total, case.batch, *shape), normal(total, case.batch, *STATE)
    weights = normal(total, case.batch, *STATE)
    leaves = [decays.requires_grad_(), states.requires_grad_()]
    exact, order = chain(case, decays, states, apply)
    loss = sum((exact[key] * weights[number]).sum() for number, key in enumerate(order))
    loss = loss + 0 * states.sum()  # there may be no state at all
    exact_grads = torch.autograd.grad(loss, leaves, materialize_grads=True)

    def work(transport):
        step = case.build_step(transport)
        threads.enter(step)
        numbers = [order.index((transport.rank, i)) for i in range(counts[transport.rank])]
        own = [leaf.detach()[numbers].requires_grad_() for leaf in leaves]
        found = initial_states(*own, apply=apply)
        grads = torch.autograd.grad(found, own, weights[numbers])
        one = {"initial": found.detach(), "ddecay": grads[0], "dstate": grads[1]}
        key = [(transport.rank, i) for i in range(counts[transport.rank])]
        same = {"initial": torch.stack([exact[k] for k in key]).detach()}
        same |= {"ddecay": exact_grads[0][numbers], "dstate": exact_grads[1][numbers]}
        return one, same

    for one, same in run_threads(case.cp_size, work):
        for name in same:
            torch.testing.assert_close(one[name], same[name], atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("length", [64, 640])
def test_what_is_sent_does_not_depend_on_the_length(threads, length):
    case = Case(length, 4)

    def work(transport):
        threads.enter(case.build_step(transport))
        num_ranges = 1 if transport.rank == 3 else 2
        pair = [torch.ones(num_ranges, 2, 5, 1), torch.ones(num_ranges, 2, 5, 3)]
        initial_states(*(x.requires_grad_() for x in pair)).sum().backward()
        return transport.log, transport.numbers_sent

    for log, numbers_sent in run_threads(4, work):
        assert [line.split()[1] for line in log if line.startswith("start")] == ["all_gather"] * 2
        assert numbers_sent == 2 * 3 * 2 * 2 * 5 * 4  # passes, peers, slots, samples, heads, pair


def test_nothing_is_sent_where_documents_end_with_ranges(threads):
    case = Case(16, 2, "contiguous", documents=((8, 8), (3, 5, 8)))

    def work(transport):
        threads.enter(case.build_step(transport))
        pair = [torch.ones(1, 2, 3, requires_grad=True) for _ in range(2)]
        initial_states(*pair).sum().backward()
        return transport.log

    assert run_threads(2, work) == [[], []]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decays_may_be_constants(threads, layout):
    case = Case(24, 3, layout)

    def work(transport):
        threads.enter(case.build_step(transport))
        decay = torch.full((len(held_ranges(case.build_layout(), transport.rank)), 2, 1), 0.5)
        state = torch.ones(*decay.shape[:2], 4, requires_grad=True)
        initial_states(decay, state).sum().backward()
        return state.grad.sum().item()

    assert sum(run_threads(3, work)) > 0


def test_autocast_does_not_lower_the_states(threads):
    case = Case(8, 2, "contiguous", batch=1)

    def work(transport):
        threads.enter(case.build_step(transport))
        state = torch.randn(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16):
            found = initial_states(state, state, apply=torch.matmul)
        return found.dtype, torch.equal(found, state * transport.rank)

    assert run_threads(2, work) == [(torch.float32, True)] * 2


def test_outside_a_step_states_are_zero():
    state = torch.randn(1, 2, 3)
    assert not initial_states(state, state).any()


@pytest.mark.parametrize(
    ("decay", "state", "message"),
    [
        ((2, 2, 3), (2, 2, 3), r"of shape \[ranges, batch, ...\] for the 1 ranges .* it got"),
        ((1,), (1, 2, 3), r"decay \(1,\) and state \(1, 2, 3\)"),
        ((1, 3, 3), (1, 3, 3), "got 3 samples, but the batch of the step describes"),
        ((1, 2, 3), (1, 2, 1), r"made a state of shape \(2, 3\) .* Give decays that keep"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(decay, state, message):
    batch = {"input_ids": torch.zeros(2, 6).long(), "document_ids": torch.arange(12).view(2, 6)}
    with doors.parallel(None).step(batch), pytest.raises(ValueError, match=message):
        initial_states(torch.zeros(decay), torch.zeros(state))


def test_pairs_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="sends decay and state together, but they are .*float64"):
        initial_states(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2).double())


def test_errors_are_raised_before_anything_is_sent(threads):
    case = Case(8, 2, "contiguous", batch=1)

    def work(transport):
        threads.enter(case.build_step(transport))
        with pytest.raises(ValueError, match="Give decays that keep"):
            initial_states(torch.zeros(1, 1, 3), torch.zeros(1, 1, 1))
        return transport.log

    assert run_threads(2, work) == [[], []]
