"""Offloading on a GPU: side streams and pinned memory change no bit, and memory does not grow."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lightning_cp import Mask, attention, token_mean
from lightning_cp.memory import offload
from lightning_cp.memory.arena import Arena, aligned
from lightning_cp.memory.budget import Budget
from lightning_cp.memory.offload import OffloadGroup, Store
from tests import doors
from tests.tiny import TinyLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

recompute = partial(checkpoint, use_reentrant=False)
LENGTH, WIDTH, NUM_LAYERS, NUM_HEADS = 8192, 512, 8, 8
HIDDEN = LENGTH * WIDTH * 2  # bf16; an attention output is as large, and its lse too small to move


def build_model():
    torch.manual_seed(3)
    model = TinyLM(
        dim=WIDTH, num_heads=NUM_HEADS, num_kv_heads=2, num_layers=NUM_LAYERS, max_len=LENGTH
    )
    for block in model.blocks:
        block.mask = Mask(causal=True)  # of windows FlexAttention would keep more than the formula
    return model.to("cuda", torch.bfloat16)


def attend(q, k, v, mask, sinks):
    return attention(q, k, v, mask=mask)


def make_batch(seed=0, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (1, length), generator=generator).cuda()
    return {"input_ids": ids, "labels": ids}


def forward(cp, model, batch):
    with cp.step(batch) as local:
        logits = model(local["input_ids"], cp.position_ids(), attend=attend, checkpoint=recompute)
        return token_mean(logits, local["labels"])


def group():
    return dist.group.WORLD if dist.is_initialized() else None


def train(steps, *, lengths=(LENGTH,), in_flight=1, **options):
    """Return losses, all gradients of the last step, and memory after each step."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Fused kernels sum gradients in any order.
    options = {"kernel": "reference", **options}
    cp, model = doors.parallel(group(), **options), build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, memory = [], []
    for step in range(steps):
        batches = [make_batch(step + i, lengths[step % len(lengths)]) for i in range(in_flight)]
        pending = [forward(cp, model, batch) for batch in batches]
        optimizer.zero_grad(set_to_none=False)
        sum(pending).backward()
        losses.append(torch.stack(pending).detach().cpu())
        del pending
        for p in model.parameters():
            if dist.is_initialized() and p.grad is not None:
                dist.all_reduce(p.grad)
        optimizer.step()
        held = 0 if cp.offloaded is None else cp.offloaded.arena.num_bytes
        memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), held))
    torch.use_deterministic_algorithms(False)
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    if cp.offloaded is not None:
        assert cp.offloaded.used_bytes == 0
        cp.close()
        assert cp.offloaded.arena.num_bytes == 0
    return torch.cat(losses), grads, memory


CASES = [
    {"offload": "all"},
    {"offload": "all", "keep_attention": "all"},
    {"offload": 3.5 * HIDDEN / 2**30, "keep_attention": "all"},
    {"offload": "all", "keep_attention": "all", "offload_after": 2 * HIDDEN / 2**30},
]


def compare(steps, **how):
    """Return for each case whether losses and gradients keep every bit."""
    exact = train(steps, **how)
    rows = []
    for case in CASES:
        losses, grads, _ = train(steps, **how, **case)
        rows.append(torch.equal(losses, exact[0]) and is_same(grads, exact[1]))
    return rows


def is_same(found, exact):
    return bool(exact) and all(torch.equal(found[name], exact[name]) for name in exact)


@pytest.mark.parametrize(
    "how", [{}, {"in_flight": 3}, {"lengths": (LENGTH, 2048, 6000)}], ids=["one", "three", "sizes"]
)
def test_losses_and_gradients_keep_every_bit(how):
    assert is_same(train(3, **how)[1], train(3, **how)[1])  # or nothing can be compared
    assert compare(3, **how) == [True] * len(CASES)


def test_on_ranks_too(nccl):
    assert nccl(2).run(compare, 4, timeout=300) == [[True] * len(CASES)] * 2


def test_two_hundred_steps_take_no_more_memory():
    *_, memory = train(200, kernel="auto", offload="all", keep_attention="all")
    assert memory[-1] == memory[9]
    assert len(set(memory[9:])) == 1


def peak(**options):
    """Return the peak of GPU memory of a step after the first, above what the model takes."""
    cp, model = doors.parallel(None, **options), build_model()
    for _ in range(3):
        model.zero_grad(set_to_none=False)  # in backward they would come as regions go
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        forward(cp, model, make_batch()).backward()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("keep", ["none", "all"])
def test_the_peak_is_lower_by_all_regions_but_three(keep):
    saved = peak(keep_attention=keep) - peak(keep_attention=keep, offload="all")
    region = HIDDEN * (2 if keep == "all" else 1)
    # The peak is in the backward of the last layer: three regions are on the device there.
    assert saved == pytest.approx((NUM_LAYERS - 3) * region, rel=0.05)


def slow_kernel():
    torch.cuda._sleep(20_000_000)  # about 10 ms; torch has no public one


def test_copies_wait_for_the_tensor_and_its_memory_is_not_reused_too_early(monkeypatch):
    """The compute stream is slow, then the copies are: either way values must be right."""
    monkeypatch.setattr(offload, "SMALL_BYTES", 0)
    for slow in ("compute", "out", "back", "none"):
        store = Store(Budget(2**30))
        lanes = offload.lanes_of(torch.device("cuda", torch.cuda.current_device()))
        for repeat in range(20):
            saved, exact = [], []
            for i in range(8):
                if slow == "compute":
                    slow_kernel()
                x = torch.full((2**20,), float(repeat * 100 + i), device="cuda")
                exact.append(repeat * 100 + i)
                if slow == "out":
                    with torch.cuda.stream(lanes.out.stream):
                        slow_kernel()
                saved.append(OffloadGroup(store).save(x))
                del x
                torch.full((2**20,), float("nan"), device="cuda")  # takes memory that was freed
            for i in reversed(range(8)):
                if slow == "back":
                    with torch.cuda.stream(lanes.back.stream):
                        slow_kernel()
                found = saved[i].get()
                assert bool((found == exact[i]).all()), (slow, repeat, i)
                del found
                torch.full((2**20,), float("nan"), device="cuda")
                if repeat % 2:
                    saved[i] = None  # blocks are reused while copies may be running
            saved = None
        torch.cuda.synchronize()
        assert store.used_bytes == 0


def test_what_is_dropped_while_it_is_copied_harms_nobody(monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 0)
    store = Store(Budget(2**30))
    lanes = offload.lanes_of(torch.device("cuda", torch.cuda.current_device()))
    for repeat in range(50):
        saved = [
            OffloadGroup(store).save(torch.full((2**20,), float(i), device="cuda"))
            for i in range(6)
        ]
        with torch.cuda.stream(lanes.back.stream):
            slow_kernel()
        saved[2].get()  # starts to fetch the one before, into memory that is dropped now
        saved = None
        others = [torch.full((2**20,), float(repeat), device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert all(bool((x == repeat).all()) for x in others)
    assert store.used_bytes == 0


def test_host_memory_is_pinned_and_has_no_rounding():
    arena = Arena(2**30)
    block = arena.take(3 * 2**20 + 5, pinned=True)
    assert block.memory.is_pinned()
    assert block.num_bytes == aligned(3 * 2**20 + 5)
    del block
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        other = Arena(300 * 2**20)
        held = other.take(300 * 2**20, pinned=True)
        assert held.memory.is_pinned()
        del held, other
    assert torch.cuda.memory_allocated() == before
