"""What checkpointed regions save is moved to host memory, and gradients keep every bit."""

import gc
import itertools
import os
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patches import enable
from lightning_cp import token_mean
from lightning_cp.comm.mesh import lone_groups
from lightning_cp.config import Memory
from lightning_cp.memory import arena as arenas
from lightning_cp.memory import budget as budgets
from lightning_cp.memory import offload
from lightning_cp.memory.arena import Arena, HostBlock, aligned
from lightning_cp.memory.budget import Budget
from lightning_cp.memory.offload import OffloadGroup, Saved, Store
from tests import doors
from tests.attn.test_keep_attention import attention_of, identical, in_pairs, make_batch
from tests.hf_patches import test_lightning as lightning_job
from tests.parity import zoo
from tests.parity.hf import Job, build_batch
from tests.tiny import TinyLM

recompute = partial(checkpoint, use_reentrant=False)
GIB = 2**30
NUM_LAYERS = 6
HIDDEN = aligned(2 * 37 * 32 * 8)  # batch, tokens, width, float64: a hidden state of one rank
KEPT = aligned(2 * 37 * 32 * 8) + aligned(2 * 37 * 4 * 8)  # an attention output, and its lse


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 1)


class Copies:
    """Counts tensors that were sent and fetched, and those that are alive.

    A tensor that is sent takes a block of host memory; a copy, either way, asks for its bytes.
    """

    def __init__(self, patch):
        self.sent, self.copied, self.items = 0, 0, []
        take, save, memory = Arena.take, OffloadGroup.save, HostBlock.memory.fget

        def take_one(arena, num_bytes, *, pinned):
            block = take(arena, num_bytes, pinned=pinned)
            self.sent += block is not None
            return block

        def copy(block):
            self.copied += 1
            return memory(block)

        def save_one(parcel, x):
            item = save(parcel, x)
            if type(item) is not Saved:
                self.items.append(weakref.ref(item))
            return item

        patch.setattr(Arena, "take", take_one)
        patch.setattr(HostBlock, "memory", property(copy))
        patch.setattr(OffloadGroup, "save", save_one)

    @property
    def fetched(self):
        return self.copied - self.sent

    def alive(self):
        return sum(item() is not None for item in self.items)


def build_model(num_layers=NUM_LAYERS):
    torch.manual_seed(5)
    return TinyLM(num_layers=num_layers).double()


def per_layer(model, ids, positions):
    return model(ids, positions, checkpoint=recompute)


def plain(model, ids, positions):
    return model(ids, positions)


def transposed(model, ids, positions):
    """Hidden states whose dims are permuted, a slice of a larger tensor, and one with gaps."""
    x = model.tokens(ids) + model.positions(positions)
    for i, block in enumerate(model.blocks):
        if i % 3 == 0:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        elif i % 3 == 1:
            x = torch.stack([x, x])[1]
        else:
            x = torch.cat([x, x], -1)[..., :32]
        x = recompute(block, x, attention_of)
    return model.head(x)


HOW = {
    "plain": plain,
    "per layer": per_layer,
    "pairs of layers": in_pairs,
    "views": transposed,
}


def run(how="per layer", *, backwards=1, cp=None, batch=None, **options):
    """Return gradients, counts of copies, and the store after a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SMALL_BYTES", 1)
        group = dist.group.WORLD if dist.is_initialized() else None
        cp = cp or doors.parallel(group, **options)
        copies, model = Copies(patch), build_model()
        with cp.step(batch or make_batch()) as local:
            logits = HOW[how](model, local["input_ids"], cp.position_ids())
            loss = token_mean(logits, local["labels"])
        used = 0 if cp.offloaded is None else cp.offloaded.used_bytes
        for i in range(backwards):
            loss.backward(retain_graph=i + 1 < backwards)
        del loss, logits
        grads = {name: p.grad for name, p in model.named_parameters()}
        return grads, copies, used, cp.offloaded


CASES = [
    *itertools.product(("gather", "ring", "ulysses"), ("per layer",), ("none", "all")),
    *itertools.product(("gather",), ("pairs of layers",), ("none", "all")),
    ("gather", "views", "all"),
]


def compare(cases):
    """Return rows (case, identical, host bytes in flight and after, sent, fetched, alive)."""
    rows = []
    for algorithm, how, keep in cases:
        options = {"algorithm": algorithm, "keep_attention": keep}
        exact, *_ = run(how, **options)
        found, copies, used, store = run(how, offload="all", **options)
        row = (identical(found, exact), used, store.used_bytes)
        case = (algorithm, how, keep)
        rows.append((case, *row, copies.sent, copies.fetched, copies.alive()))
    return rows


def check(rows):
    # The last two of six regions stay; the third last is sent and still on the device in backward.
    expected = {
        ("per layer", "none"): (4, 3),
        ("per layer", "all"): (12, 9),
        # Three regions of two layers each: the first one is sent, and still on the device.
        ("pairs of layers", "none"): (1, 0),
        ("pairs of layers", "all"): (5, 0),
        # Two of the six hidden states have gaps, and stay: their attention results do not.
        ("views", "all"): (11, 8),
    }
    for (algorithm, how, keep), same, used, left, sent, fetched, alive in rows:
        case = (algorithm, how, keep)
        assert same, case
        assert used > 0, case
        assert (left, alive) == (0, 0), case
        assert (sent, fetched) == expected[how, keep], case


def test_gradients_keep_every_bit():
    check(compare(CASES))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cp_size", "cases"),
    [
        (2, [("ring", "per layer", "all"), ("ulysses", "per layer", "none"), CASES[-1]]),
        *(pytest.param(size, CASES, marks=pytest.mark.slow) for size in (2, 4)),
    ],
)
def test_gradients_keep_every_bit_on_ranks(ranks, cp_size, cases):
    for rows in ranks(cp_size).run(compare, cases):
        check(rows)


def test_inputs_of_a_region_inside_a_region_are_recomputed_not_saved():
    _, copies, *_ = run("pairs of layers", offload="all")
    assert len(copies.items) == NUM_LAYERS // 2


def test_the_bytes_on_the_host_are_those_of_the_regions_that_left():
    _, _, used, store = run(offload="all")
    assert used == (NUM_LAYERS - 2) * HIDDEN
    _, _, used, store = run(offload="all", keep_attention="all")
    assert used == (NUM_LAYERS - 2) * (HIDDEN + KEPT)
    assert store.arena.num_bytes >= used


def test_the_region_before_is_fetched_while_one_runs(monkeypatch):
    events = []
    fetch, save = OffloadGroup.fetch, OffloadGroup.save

    def fetch_one(parcel):
        events.append(("fetch", parcel))
        fetch(parcel)

    def save_one(parcel, x):
        item = save(parcel, x)
        get = item.get

        def get_one():
            start = len(events)
            x = get()
            is_late = ("fetch", parcel) in events[start:]
            events.append(("got late" if is_late else "got", parcel))
            return x

        if type(item) is not Saved:
            item.get = get_one
        return item

    monkeypatch.setattr(OffloadGroup, "fetch", fetch_one)
    monkeypatch.setattr(OffloadGroup, "save", save_one)
    run(offload="all")
    got = [parcel for kind, parcel in events if kind == "got"]
    assert not [kind for kind, _ in events if kind == "got late"]
    assert len(got) == NUM_LAYERS
    for later, earlier in pairwise(got):
        assert events.index(("fetch", earlier)) < events.index(("got", later))


@pytest.mark.parametrize(
    ("layers", "sent"), [(0.9, 0), (1, 1), (2.5, 2), (4, 4), (100, 4)], ids=str
)
def test_what_exceeds_the_budget_stays_on_the_device(layers, sent):
    exact, *_ = run("plain")
    found, copies, used, store = run(offload=layers * HIDDEN / GIB)
    assert identical(found, exact)
    assert (copies.sent, used) == (sent, sent * HIDDEN)
    assert store.arena.num_bytes <= layers * HIDDEN
    assert store.used_bytes == 0


@pytest.mark.parametrize(("layers", "sent"), [(0.9, 4), (1, 3), (2.5, 2), (4, 0)], ids=str)
def test_the_first_regions_stay_within_offload_after(layers, sent):
    exact, *_ = run("plain")
    cp = doors.parallel(None, offload="all", offload_after=layers * HIDDEN / GIB)
    for _ in range(2):  # what stayed in the first step is not counted in the second
        found, copies, used, store = run(cp=cp)
        assert identical(found, exact)
        assert (copies.sent, used) == (sent, sent * HIDDEN)
    store.close()


@pytest.mark.parametrize("how", ["per layer", "pairs of layers"])
def test_results_of_flex_attention_are_moved_too(how):
    options = {"kernel": "flex", "offload": "all"}
    exact = run("plain", kernel="flex")[0]
    _, copies, alone, _ = run(how, **options)
    grads, both, used, store = run(how, keep_attention="all", **options)
    assert identical(grads, exact)
    assert used > alone
    assert both.sent > copies.sent
    assert (both.alive(), store.used_bytes) == (0, 0)


def test_no_offload_does_nothing():
    for none in ("none", 0, 0.0):
        _, copies, used, store = run(offload=none)
        assert (copies.sent, copies.alive(), used, store) == (0, 0, 0, None)


def test_a_graph_that_is_kept_is_fetched_again():
    exact, *_ = run("plain", backwards=2)
    for keep in ("none", "all"):
        found, copies, _, store = run(offload="all", keep_attention=keep, backwards=2)
        assert identical(found, exact)
        assert copies.fetched == (6 if keep == "none" else 18)
        assert (copies.alive(), store.used_bytes) == (0, 0)


@pytest.mark.parametrize("order", ["together", "first first", "last first"])
def test_batches_in_flight(order):
    gradients = []
    for how in ("none", "all"):
        cp = doors.parallel(None, offload=how, keep_attention="all")
        model, losses = build_model(), []
        for seed in (1, 2, 3):
            with cp.step(make_batch(seed=seed, length=37 + seed)) as local:
                logits = per_layer(model, local["input_ids"], cp.position_ids())
                losses.append(token_mean(logits, local["labels"]))
        if order == "together":
            sum(losses).backward()
        else:
            for loss in losses if order == "first first" else losses[::-1]:
                loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        losses = loss = logits = None
    assert identical(*gradients)
    assert cp.offloaded.used_bytes == 0


def test_memory_is_reused_from_step_to_step():
    cp = doors.parallel(None, offload="all", keep_attention="all")
    sizes, lengths = set(), [37, 21, 64, 37, 50]
    for step in range(10):
        batch = make_batch(seed=step, length=lengths[step % 5])
        found, copies, _, store = run(cp=cp, batch=batch)
        if step < 5:
            assert identical(found, run("plain", batch=batch)[0])
        assert copies.alive() == 0
        sizes.add(store.arena.num_bytes)
    assert len(sizes) == 1
    assert store.used_bytes == 0
    cp.close()
    assert store.arena.num_bytes == 0
    assert identical(run(cp=cp)[0], run("plain")[0])  # and takes memory again


def test_device_memory_is_freed_and_the_graph_owns_the_rest(monkeypatch):
    cp, model, seen = doors.parallel(None, offload="all"), build_model(), []
    copies = Copies(monkeypatch)

    def watched(block, x, attend):
        seen.append(StorageWeakRef(x.untyped_storage()))
        return recompute(block, x, attend)

    with cp.step(make_batch()) as local:
        logits = model(local["input_ids"], cp.position_ids(), checkpoint=watched)
    # Storages of regions that have left are gone; the last three are still on the device.
    assert [storage.expired() for storage in seen] == [True] * 3 + [False] * 3
    assert copies.alive() == NUM_LAYERS
    store, parcels = cp.offloaded, [weakref.ref(parcel) for parcel in cp.offloaded.recent()]
    del logits
    gc.collect()
    assert copies.alive() == 0
    assert [parcel() for parcel in parcels] == [None] * 3
    assert store.used_bytes == 0


def test_errors_leave_nothing_behind(monkeypatch):
    cp, model = doors.parallel(None, offload="all", keep_attention="all"), build_model()
    copies, count = Copies(monkeypatch), []

    def fail(at, q, k, v, mask, sinks):
        count.append(0)
        out = attention_of(q, k, v, mask, sinks)
        if len(count) == at:
            raise ValueError("in the middle of a layer")
        return out

    def train(at):
        with cp.step(make_batch()) as local:
            ids, positions = local["input_ids"], cp.position_ids()
            logits = model(ids, positions, attend=partial(fail, at), checkpoint=recompute)
            token_mean(logits, local["labels"]).backward()

    for at in (1, 5, NUM_LAYERS + 3):  # in forward, and when backward recomputes
        count.clear()
        with pytest.raises(ValueError, match="in the middle"):
            train(at)
        gc.collect()
        assert copies.alive() == 0
        assert cp.offloaded.used_bytes == 0
    monkeypatch.undo()
    assert identical(run(cp=cp)[0], run("plain")[0])


def test_a_hidden_state_that_was_changed_is_an_error_as_without_offload():
    for how in ("none", "all"):
        for index in range(NUM_LAYERS):  # moved, and not moved
            cp, model = doors.parallel(None, offload=how), build_model()
            hidden = []

            def noted(block, x, attend, hidden=hidden):
                hidden.append(x)
                return recompute(block, x, attend)

            with cp.step(make_batch()) as local:
                logits = model(local["input_ids"], cp.position_ids(), checkpoint=noted)
                with torch.no_grad():
                    hidden[index].view(-1)[:4].add_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace operation.*version"):
                    logits.sum().backward()


def test_an_attention_output_that_was_changed_is_computed_again():
    def changed(q, k, v, mask, sinks):
        return attention_of(q, k, v, mask, sinks).mul_(1.5)

    gradients = []
    for how in ("none", "all"):
        cp, model = doors.parallel(None, offload=how, keep_attention=how), build_model()
        with cp.step(make_batch()) as local:
            ids, at = local["input_ids"], cp.position_ids()
            model(ids, at, attend=changed, checkpoint=recompute).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert identical(*gradients)


def test_parameters_small_tensors_and_shared_tensors_stay(monkeypatch):
    weight, encoded = nn.Parameter(torch.randn(32, 32)), torch.randn(4, 32, requires_grad=True) * 2

    def layer(x, weight, encoded, mask):
        return (x @ weight + encoded.sum() + mask).sin()

    def train(how):
        cp = doors.parallel(None, offload=how)
        weight.grad = None
        with cp.step({"input_ids": torch.arange(6).view(1, 6)}):
            x = torch.ones(4, 6, 32, requires_grad=True)
            out = x * 2
            for _ in range(5):
                out = recompute(layer, out, weight, encoded, torch.ones(4, 6, 32))
            out.sum().backward(retain_graph=True)
        return weight.grad, x.grad

    exact = train("none")
    copies = Copies(monkeypatch)
    found = train("all")
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    assert copies.sent == 3  # hidden states of three of five regions
    monkeypatch.setattr(offload, "SMALL_BYTES", 2**20)
    train("all")
    assert copies.sent == 3


def test_what_selective_checkpointing_counts_is_unchanged():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        saved = op in (torch.ops.aten.copy_.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = partial(create_selective_checkpoint_contexts, policy)
    gradients = []
    for how in ("none", "all"):
        cp, model = doors.parallel(None, offload=how, keep_attention="all"), build_model()
        call = partial(recompute, context_fn=context_fn)
        with cp.step(make_batch()) as local:
            model(local["input_ids"], cp.position_ids(), checkpoint=call).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert identical(*gradients)


def test_without_gradients_nothing_is_saved(monkeypatch):
    cp, copies = doors.parallel(None, offload="all"), Copies(monkeypatch)
    with torch.no_grad(), cp.step(make_batch()) as local:
        per_layer(build_model(), local["input_ids"], cp.position_ids())
    assert copies.items == []


def build_llama(frozen):
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=NUM_LAYERS,
        vocab_size=zoo.VOCAB_SIZE,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    if frozen:  # as PEFT does: the embeddings have no gradient, but the first hidden state has
        model.get_input_embeddings().requires_grad_(False)
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def hf_gradients(frozen, **options):
    model = build_llama(frozen)
    enable(model)
    group = dist.group.WORLD if dist.is_initialized() else None
    cp = doors.parallel(group, **options)
    with cp.step(build_batch(Job("llama", "packed"), zoo.VOCAB_SIZE, 1)) as local:
        loss = model(**{k: v for k, v in local.items() if v is not None}).loss
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare_hf(cases):
    """Return rows (identical, sent, alive)."""
    rows = []
    for frozen, keep in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload, "SMALL_BYTES", 1)
            copies = Copies(patch)
            exact = hf_gradients(frozen, keep_attention=keep)
            found = hf_gradients(frozen, keep_attention=keep, offload="all")
            rows.append((identical(found, exact), copies.sent, copies.alive()))
    return rows


HF_ROWS = {
    (frozen, keep): (True, sent, 0)
    for frozen in (False, True)
    for keep, sent in (("none", 4), ("all", 12))
}


def test_hugging_face_models():
    assert compare_hf(HF_ROWS) == list(HF_ROWS.values())


@pytest.mark.ranks
def test_hugging_face_models_on_ranks(ranks):
    case = (True, "all")
    assert ranks(2).run(compare_hf, [case]) == [[HF_ROWS[case]]] * 2


def train_by_lightning():
    """Return losses, weights, and copies of a Lightning run with FSDP2 and offloading."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SMALL_BYTES", 1)
        patch.setattr(lightning_job, "build", lambda name, lora: build_llama(lora))
        copies = Copies(patch)
        runs = [
            lightning_job.train("llama", False, {"keep_attention": "all", "offload": how}, 4)
            for how in ("none", 1.0)
        ]
        same = all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
        return runs[0][0] == runs[1][0], same, copies.sent > 0, copies.alive()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_lightning_run_is_the_same(ranks):
    assert ranks(2).run(train_by_lightning) == [(True, True, True, 0)] * 2


# The store itself


def make_parcels(num, host_bytes=2**20, **options):
    """Save a tensor per region; return the store, the tensors, what was saved, and storages."""
    store = Store(Budget(host_bytes, **options))
    tensors = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(num)]
    parcels = [OffloadGroup(store) for _ in tensors]
    saved, storages = [], []
    for parcel, x in zip(parcels, tensors, strict=True):
        saved.append(parcel.save(x := x * 1))
        storages.append(StorageWeakRef(x.untyped_storage()))
    return store, tensors, saved, storages


def test_saved_tensors_are_given_back_in_any_order():
    for order in ([5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [3, 0, 3, 5, 1, 3]):
        _, tensors, saved, storages = make_parcels(6)
        assert [storage.expired() for storage in storages] == [True] * 3 + [False] * 3
        for i in order:
            assert torch.equal(saved[i].get(), tensors[i])


def test_what_was_fetched_and_not_used_is_freed(monkeypatch):
    store, _, saved, _ = make_parcels(6)
    copies = Copies(monkeypatch)
    saved[2].get()  # fetches the one before
    assert copies.fetched == 2
    saved[1].get()  # is there, and fetches the one before
    assert copies.fetched == 3
    saved[2].get()  # the caller had it, and the one before
    assert copies.fetched == 5
    del saved
    gc.collect()
    assert store.used_bytes == 0


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4).double().t(),
        torch.randn(2, 3, 4).transpose(0, 2),
        torch.randn(5, 4, 4)[2],
        torch.randn(1, 7, 4)[:, None].expand(1, 1, 7, 4),
        torch.randn(4, 4, dtype=torch.complex64),
        torch.arange(8) > 3,
        torch.randn(6, 4).bfloat16(),
    ],
    ids=lambda x: f"{tuple(x.shape)} {tuple(x.stride())} {x.dtype}",
)
def test_a_moved_tensor_has_its_values_and_strides(x, monkeypatch):
    store, copies = Store(Budget(2**20)), Copies(monkeypatch)
    saved = OffloadGroup(store).save(x)
    assert type(saved) is not Saved
    others = [OffloadGroup(store).save(torch.randn(8)) for _ in range(3)]
    assert copies.fetched == 0
    found = saved.get()
    assert copies.fetched == 1  # it was gone
    assert torch.equal(found, x)
    assert (found.stride(), found.dtype) == (x.stride(), x.dtype)
    assert len(others) == 3


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(6, 8)[:, :4],
        torch.randn(6, 8)[::2],
        torch.randn(1, 4).expand(6, 4),
        torch.randn(9, 4)[1:].view(-1)[1:],
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(4).to_sparse(),
        nn.Parameter(torch.randn(4)),
        torch.empty(4, device="meta"),
    ],
    ids=["gaps", "steps", "expanded", "not aligned", "conj", "sparse", "parameter", "meta"],
)
def test_other_tensors_stay(x):
    store = Store(Budget(2**20))
    saved = OffloadGroup(store).save(x)
    assert type(saved) is Saved
    assert saved.get().shape == x.shape


def test_a_store_without_room_for_all_is_an_error():
    with pytest.raises(MemoryError, match=r"offload='all'\): .* do not fit into this rank's share"):
        make_parcels(6, host_bytes=1024, is_complete=True)


# Host memory


def set_chunks(monkeypatch, num_bytes):
    """Let host memory come in small pieces: they have 256 MiB."""
    monkeypatch.setattr(arenas, "MIN_CHUNK", num_bytes)


def test_blocks_do_not_overlap_and_are_reused(monkeypatch):
    set_chunks(monkeypatch, 4096)
    arena, generator = Arena(64 * 1024), torch.Generator().manual_seed(0)
    taken, most = [], 0
    for step in range(400):
        size = int(torch.randint(1, 3000, (), generator=generator))
        block = arena.take(size, pinned=False)
        if block is not None:
            block.memory.fill_(step % 251)
            taken.append((block, step % 251))
        for block, value in taken:
            assert bool((block.memory == value).all())
        if block is None or len(taken) > 12:
            at = int(torch.randint(0, len(taken), (), generator=generator))
            arena.give(taken.pop(at)[0])
        most = max(most, arena.num_bytes)
        assert arena.used_bytes == sum(block.num_bytes for block, _ in taken)
    assert most <= 64 * 1024
    while taken:
        arena.give(taken.pop()[0])
    arena.trim()
    assert (arena.used_bytes, arena.num_bytes) == (0, 0)


def test_a_block_outlives_its_arena():
    arena = Arena(4096)
    block = arena.take(100, pinned=False)
    block.memory.fill_(7)
    del arena
    gc.collect()
    assert block.memory.sum() == 7 * 512


def test_sizes_that_no_longer_fit_are_replaced(monkeypatch):
    set_chunks(monkeypatch, 1024)
    arena = Arena(10 * 1024)
    blocks = [arena.take(1024, pinned=False) for _ in range(10)]
    assert None not in blocks
    assert arena.take(512, pinned=False) is None
    for block in blocks:
        arena.give(block)
    assert arena.take(10 * 1024, pinned=False) is not None
    assert arena.num_bytes == 10 * 1024


def test_host_memory_is_what_the_system_and_the_container_leave(monkeypatch, tmp_path):
    assert 0 < budgets.available_bytes() < 2**50
    monkeypatch.setattr(budgets, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert budgets.available_bytes() is None
    (tmp_path / "proc").mkdir()
    info = tmp_path / "proc" / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemAvailable:     40 kB\n")
    assert budgets.available_bytes() == 40 * 1024
    folder = tmp_path / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 100")):
        (folder / f"memory.{name}").write_text(text)
    assert budgets.available_bytes() == 400
    (folder / "memory.max").write_text("max")
    assert budgets.available_bytes() == 40 * 1024
    (folder / "memory.max").write_text("1000")
    info.unlink()
    assert budgets.available_bytes() == 400


def test_more_than_the_host_has_is_refused(monkeypatch):
    monkeypatch.setattr(budgets, "available_bytes", lambda: 10 * GIB)
    message = (
        r"offload=12\) takes 12.00 GiB of host memory on a host with 1 ranks, of which 10.00 GiB "
        r"are available. Give offload=10.0 or less"
    )
    with pytest.raises(ValueError, match=message):
        doors.parallel(None, offload=12)
    assert budgets.resolve_budget(Memory(offload=10), lone_groups()) == Budget(10 * GIB)
    budget = budgets.resolve_budget(Memory(offload="all", offload_after=2), lone_groups())
    assert budget == Budget(8 * GIB, 2 * GIB, is_complete=True)
    monkeypatch.setattr(budgets, "available_bytes", lambda: None)
    doors.parallel(None, offload=10**6)  # nobody knows


def ask_for_host_memory(available, wanted):
    """Return the budget or the error of each rank, where ranks see different amounts."""
    with pytest.MonkeyPatch.context() as patch:
        rank = dist.get_rank()
        patch.setattr(budgets, "available_bytes", lambda: available[rank] * GIB)
        try:
            return doors.parallel(dist.group.WORLD, offload=wanted).offloaded.budget
        except ValueError as error:
            return str(error)


@pytest.mark.ranks
def test_ranks_of_a_host_share_its_memory_and_decide_alike(ranks):
    said = ranks(2).run(ask_for_host_memory, [30, 11], 6)
    assert said[0] == said[1]
    assert "takes 12.00 GiB of host memory on a host with 2 ranks" in said[0]
    assert "Give offload=5.5 or less" in said[0]
    assert ranks(2).run(ask_for_host_memory, [30, 12], 6) == [Budget(6 * GIB)] * 2
    shared = Budget(int(0.8 * 10 * GIB) // 2, is_complete=True)
    assert ranks(2).run(ask_for_host_memory, [30, 10], "all") == [shared] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "some"}, "offload='some'.* is unknown. Use one of 'all', 'auto', 'none'"),
        ({"offload": -1.0}, r"offload=-1.0\): give the GiB of host memory"),
        ({"offload": "all", "offload_after": -2}, r"offload_after=-2\): give the GiB"),
    ],
)
def test_other_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        doors.parallel(None, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_does_not_share_the_memory():
    arena = Arena(4096)
    block = arena.take(512, pinned=False)
    block.memory.fill_(1)
    with open("/proc/self/smaps") as file:
        text = file.read()
    address = f"{block.memory.data_ptr() & ~4095:x}-"
    entry = text[text.index(address) :]
    flags = entry[entry.index("VmFlags:") :].split("\n", 1)[0]
    assert " dc" in flags  # do not copy on fork
