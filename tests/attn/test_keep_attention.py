"""Under activation checkpointing attention runs once per call and step, with the same gradients."""

import gc
import weakref
from functools import partial
from math import inf

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from hf_patches import enable
from lightning_cp import Mask, attention, token_mean
from lightning_cp.attn import keep_attention
from lightning_cp.attn.blockwise import function
from lightning_cp.attn.flex import from_mask
from lightning_cp.step import active_step
from tests import doors
from tests.parity import zoo
from tests.parity.hf import Job, build_batch
from tests.tiny import TinyLM

recompute = partial(checkpoint, use_reentrant=False)


class Watch:
    """Counts attention forwards, and regions that are alive."""

    def __init__(self, monkeypatch):
        self.forwards, self.regions = 0, []
        build = keep_attention.RecomputedRegion.__init__

        def counted(compute):
            def forward(*args, **kwargs):
                self.forwards += 1
                return compute(*args, **kwargs)

            return forward

        def init(region, *args):
            self.regions.append(weakref.ref(region))
            build(region, *args)

        # Kernels run once for each tile: this is the call.
        monkeypatch.setattr(function, "compute_forward", counted(function.compute_forward))
        monkeypatch.setattr(from_mask, "attend_plain", counted(from_mask.attend_plain))
        monkeypatch.setattr(keep_attention.RecomputedRegion, "__init__", init)

    def alive(self):
        return sum(region() is not None for region in self.regions)


def build_model(num_layers=4):
    torch.manual_seed(5)
    return TinyLM(num_layers=num_layers).double()


def make_batch(length=37, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (2, length), generator=generator)
    documents = (torch.arange(length) >= torch.tensor([[9], [20]])).long()
    return {"input_ids": ids, "labels": ids, "document_ids": documents}


def in_pairs(model, ids, positions):
    """Checkpoint groups of two blocks, each block of which is checkpointed again."""
    x = model.tokens(ids) + model.positions(positions)

    def pair(x, first, second):
        return recompute(second, recompute(first, x, attention_of), attention_of)

    for i in range(0, len(model.blocks), 2):
        x = recompute(pair, x, model.blocks[i], model.blocks[i + 1])
    return model.head(x)


def attention_of(q, k, v, mask, sinks):
    return attention(q, k, v, mask=mask, sinks=sinks)


def changed_in_place(q, k, v, mask, sinks):
    out = attention_of(q, k, v, mask, sinks)
    return out.mul_(1.5)


def twice(q, k, v, mask, sinks):
    """Two calls of one kind in a region."""
    return attention_of(q, k, v, mask, sinks) - attention_of(q.flip(1), k, v, mask, sinks.flip(0))


FORWARDS = {
    "no checkpointing": lambda m, ids, at: m(ids, at),
    "per layer": lambda m, ids, at: m(ids, at, checkpoint=recompute),
    "pairs of layers": in_pairs,
    "two calls": lambda m, ids, at: m(ids, at, attend=twice, checkpoint=recompute),
    "two calls, no checkpointing": lambda m, ids, at: m(ids, at, attend=twice),
    "changed in place": lambda m, ids, at: m(
        ids, at, attend=changed_in_place, checkpoint=recompute
    ),
}


def run(how, keep, *, backwards=1, options=None, batch=None, cp=None):
    """Return loss, gradients, attention forwards of the step, and regions alive after it."""
    with pytest.MonkeyPatch.context() as patch:
        group = dist.group.WORLD if dist.is_initialized() else None
        cp = cp or doors.parallel(group, keep_attention=keep, **(options or {}))
        watch, model = Watch(patch), build_model()
        with cp.step(batch or make_batch()) as local:
            logits = FORWARDS[how](model, local["input_ids"], cp.position_ids())
            loss = token_mean(logits, local["labels"])
        for i in range(backwards):
            loss.backward(retain_graph=i + 1 < backwards)
        grads = {name: p.grad for name, p in model.named_parameters()}
        for grad in grads.values():
            if dist.is_initialized():
                dist.all_reduce(grad)
        value = loss.detach()
        del loss, logits
        return value, grads, watch.forwards, watch.alive()


OPTIONS = {
    "gather": {"algorithm": "gather"},
    "ring": {"algorithm": "ring", "layout": "contiguous"},
    "ulysses": {"algorithm": "ulysses"},
    "balanced": {"layout": "balanced"},
    "flex": {"kernel": "flex"},
    "flex, ulysses": {"kernel": "flex", "algorithm": "ulysses"},
}


def compare():
    """Return a row (case, forwards, regions alive, whether gradients are identical) per case."""
    rows = []
    for name in OPTIONS:
        options = OPTIONS[name]
        value, exact, *_ = run("no checkpointing", "none", options=options)
        cases = [("per layer", "all")]
        if "gather" in name or "flex" in name:
            cases += [("pairs of layers", "all")]
        if name == "gather":
            cases += [("per layer", "none"), ("pairs of layers", "none")]
        for how, keep in cases:
            loss, grads, forwards, alive = run(how, keep, options=options)
            same = torch.equal(loss, value) and identical(grads, exact)
            rows.append(((name, how, keep), forwards, alive, same))
    return rows


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [2, 4])
def test_kept_results_give_the_same_bits_with_one_forward_per_layer(ranks, cp_size):
    expected = {
        ("per layer", "none"): 8,
        ("per layer", "all"): 4,
        # Backward recomputes the first layer of a pair, and then each of them.
        ("pairs of layers", "none"): 10,
        ("pairs of layers", "all"): 4,
    }
    for rows in ranks(cp_size).run(compare):
        for (name, how, keep), forwards, alive, same in rows:
            assert same, (name, how, keep)
            assert alive == 0, (name, how, keep)
            assert forwards == expected[how, keep], (name, how, keep)


def identical(found, expected):
    return all(torch.equal(found[name], expected[name]) for name in expected)


KERNELS = [{"kernel": "cpu"}, {"kernel": "flex"}]
each_kernel = pytest.mark.parametrize("options", KERNELS, ids=["cpu", "flex"])


@each_kernel
def test_one_rank_too(options):
    _, exact, forwards, _ = run("no checkpointing", "none", options=options)
    assert forwards == 4
    for keep, number in (("none", 8), ("all", 4)):
        _, grads, forwards, alive = run("per layer", keep, options=options)
        assert identical(grads, exact)
        assert (forwards, alive) == (number, 0)


@each_kernel
def test_two_calls_in_a_region_are_told_apart(options):
    _, exact, *_ = run("two calls, no checkpointing", "none", options=options)
    _, grads, forwards, _ = run("two calls", "all", options=options)
    assert identical(grads, exact)
    assert forwards == 8  # two per layer


@each_kernel
def test_an_output_that_was_changed_in_place_is_computed_again(options):
    _, exact, *_ = run("changed in place", "none", options=options)
    _, grads, forwards, _ = run("changed in place", "all", options=options)
    assert identical(grads, exact)
    assert forwards >= 8


@each_kernel
def test_a_graph_that_is_kept_for_a_second_backward_reads_again(options):
    _, exact, *_ = run("no checkpointing", "none", backwards=2, options=options)
    _, grads, forwards, alive = run("per layer", "all", backwards=2, options=options)
    assert identical(grads, exact)
    # The graph of FlexAttention is freed by the first backward.
    assert (forwards, alive) == (4 if options["kernel"] == "cpu" else 8, 0)


@each_kernel
def test_results_are_kept_until_the_budget_is_used(options):
    # batch, heads, tokens, head dim 8 and lse, in float64; FlexAttention also keeps the output
    # without sinks, and counts lse as float32.
    numbers = 9 if options["kernel"] == "cpu" else 2 * 8 + 0.5
    layer = 2 * 4 * 37 * numbers * 8
    exact = run("no checkpointing", "none", options=options)[1]
    for layers, forwards in ((0.5, 8), (1, 7), (2.5, 6), (4, 4)):
        _, grads, found, _ = run("per layer", layers * layer / 2**30, options=options)
        assert identical(grads, exact)
        assert found == forwards, layers


def test_steps_in_flight_have_regions_of_their_own():
    cp, model = doors.parallel(None, keep_attention="all"), build_model()
    losses = []
    for seed in (1, 2):
        batch = make_batch(seed=seed)
        with cp.step(batch) as local:
            logits = model(local["input_ids"], cp.position_ids(), checkpoint=recompute)
            losses.append(token_mean(logits, local["labels"]))
    (losses[0] + losses[1]).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    plain = build_model()
    for seed in (1, 2):
        with cp.step(make_batch(seed=seed)) as local:
            logits = plain(local["input_ids"], cp.position_ids())
            token_mean(logits, local["labels"]).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-14)


@each_kernel
def test_nothing_stays_after_an_error_or_a_forward_without_backward(options, monkeypatch):
    cp = doors.parallel(None, keep_attention="all", **options)
    model, batch, watch = build_model(), make_batch(), Watch(monkeypatch)

    def fail(q, k, v, mask, sinks):
        attention_of(q, k, v, mask, sinks)
        raise ValueError("in the middle of a layer")

    with pytest.raises(ValueError, match="in the middle"), cp.step(batch) as local:
        model(local["input_ids"], cp.position_ids(), attend=fail, checkpoint=recompute)
    with cp.step(batch) as local:
        logits = model(local["input_ids"], cp.position_ids(), checkpoint=recompute)
    assert watch.alive() >= 4
    del logits
    gc.collect()
    assert watch.alive() == 0


def test_another_batch_finds_nothing_of_the_last_one():
    cp = doors.parallel(None, keep_attention="all")
    for seed in range(3):
        batch = make_batch(seed=seed)
        _, found, forwards, _ = run("per layer", "all", batch=batch, cp=cp)
        _, exact, *_ = run("no checkpointing", "none", batch=batch)
        assert identical(found, exact)
        assert forwards == 4


def test_reentrant_checkpointing_computes_again_as_before():
    cp, model, batch = doors.parallel(None, keep_attention="all"), build_model(), make_batch()
    call = partial(checkpoint, use_reentrant=True)
    with cp.step(batch) as local:
        logits = model(local["input_ids"], cp.position_ids(), checkpoint=call)
        token_mean(logits, local["labels"]).backward()
    exact = run("no checkpointing", "none")[1]
    assert identical({name: p.grad for name, p in model.named_parameters()}, exact)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gpt_oss"])
def test_hugging_face_models_keep_theirs(name, monkeypatch):
    gradients, forwards = [], []
    for keep in ("none", "all"):
        cp = doors.parallel(None, keep_attention=keep)
        watch = Watch(monkeypatch)
        model = zoo.build_model(name).train()
        enable(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with cp.step(build_batch(Job(name, "packed"), zoo.VOCAB_SIZE, 1)) as local:
            loss = model(**{k: v for k, v in local.items() if v is not None}).loss
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        forwards.append(watch.forwards)
        monkeypatch.undo()
    assert identical(*gradients)
    assert gradients[0]
    assert forwards[0] == 2 * forwards[1] > 0


@pytest.mark.parametrize("kernel", ["cpu", "flex"])
@pytest.mark.parametrize(("keep", "share"), [("none", 1.0), ("auto", 0.5), ("all", 0.0)])
def test_auto_recomputes_layers_with_a_window(keep, share, kernel, monkeypatch):
    # Two layers, of which one has a window; it has less to compute, and its result is as large.
    cp = doors.parallel(None, keep_attention=keep, kernel=kernel)
    model = zoo.build_model("gpt_oss").train()
    assert len(model.config.layer_types) == 2 * model.config.layer_types.count("full_attention")
    enable(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    watch = Watch(monkeypatch)
    with cp.step(build_batch(Job("gpt_oss", "packed"), zoo.VOCAB_SIZE, 1)) as local:
        if keep == "auto":  # as the strategy plans it
            active_step.opened().cache.kept_limit = inf
        loss = model(**{k: v for k, v in local.items() if v is not None}).loss
        once = watch.forwards
    loss.backward()
    assert watch.forwards == once + share * once


@pytest.mark.parametrize(
    ("mask", "seq_len", "expected"),
    [
        (Mask(causal=True), 8, False),
        (Mask(causal=True, window=8), 8, False),
        (Mask(causal=True, window=7), 8, True),
        (Mask(causal=True, window=(7, 0)), 8, False),
        (Mask(window=(7, 0)), 8, True),
        (Mask(chunk=7), 8, True),
        (Mask(chunk=8), 8, False),
    ],
)
def test_a_window_that_reaches_everything_is_none(mask, seq_len, expected):
    assert mask.is_windowed(seq_len) is expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some", "keep_attention='some'.* is unknown"),
        (-1.0, r"keep_attention=-1.0\): give the GiB"),
    ],
)
def test_other_values_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        doors.parallel(None, keep_attention=value)


def test_without_a_region_nothing_is_stored(monkeypatch):
    watch = Watch(monkeypatch)
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    out = attention(x, x, x, mask=Mask(causal=True))
    out.sum().backward()
    assert watch.regions == []
