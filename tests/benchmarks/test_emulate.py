import pytest
import torch

from benchmarks.emulate import EmulatedTransport, attention_transports, emulated_parallel
from lightning_cp import Mask, attention


def test_bytes_are_those_that_a_rank_receives():
    transport = EmulatedTransport(1, 4, link_gbs=400)
    x = torch.randn(6)
    out = torch.full((4, 6), float("nan"))
    transport.all_gather(out, x)()
    assert torch.equal(out, x.expand(4, 6))
    assert (transport.num_calls, transport.num_bytes) == (1, 3 * 24)

    rows, part = torch.randn(4, 6), torch.empty(6)
    transport.reduce_scatter(part, rows)()
    assert torch.equal(part, rows[1])
    assert transport.num_bytes == 2 * 3 * 24

    flat = torch.empty(10)
    transport.all_to_all(flat, torch.ones(8), [1, 2, 3, 4], [2, 2, 2, 2])()
    assert flat.isfinite().all()
    assert transport.num_bytes == 2 * 3 * 24 + 8 * 4

    into = torch.empty(5)
    transport.exchange([(2, torch.ones(3))], [(0, into)])()
    assert into.tolist() == [1, 1, 1, 0, 0]
    assert (transport.num_calls, transport.num_bytes) == (4, 2 * 3 * 24 + 8 * 4 + 20)


def test_a_transport_that_does_not_fill_gives_the_own_part():
    transport = EmulatedTransport(1, 2, fill=False)
    out = torch.zeros(2, 3)
    transport.all_gather(out, torch.ones(3))()
    assert out.tolist() == [[0, 0, 0], [1, 1, 1]]
    flat = torch.zeros(4)
    transport.all_to_all(flat, torch.ones(4), [2, 2], [2, 2])()
    assert flat.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("rank", [0, 5, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "gather"},
        {"algorithm": "ring"},
        {"algorithm": "ulysses"},
        {"ulysses_size": 4},
    ],
    ids=str,
)
def test_one_process_opens_the_step_of_any_rank(rank, options):
    cp = emulated_parallel(rank, 8, **options)
    batch = {"input_ids": torch.zeros(1, 128, dtype=torch.long)}
    q, k, v = (torch.randn(1, heads, 16, 4, requires_grad=True) for heads in (16, 8, 8))
    with cp.step(batch) as local:
        assert local["input_ids"].shape == (1, 16)
        out = attention(q, k, v, mask=Mask(causal=True))
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert out.shape == q.shape
    assert all(x.isfinite().all() for x in (out, *grads))
    assert (cp.cp_rank, cp.cp_size) == (rank, 8)
    assert all(x.num_calls and x.num_bytes for x in attention_transports(cp))


def test_a_gather_moves_keys_twice_and_gradients_once():
    cp = emulated_parallel(3, 4, algorithm="gather", kernel="reference")
    q, k = (torch.randn(1, heads, 8, 4, requires_grad=True) for heads in (4, 2))
    with cp.step({"input_ids": torch.zeros(1, 32, dtype=torch.long)}):
        out = attention(q, k, k, mask=Mask())
        out.sum().backward()
    (transport,) = attention_transports(cp)
    shards = 3 * 2 * k.nbytes  # of three ranks, keys and values
    assert transport.num_bytes == 3 * shards
