"""Steps that overlap, end early or are recomputed: each attention call keeps to its own."""

import gc
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lightning_cp import Mask, attention, token_mean
from lightning_cp.attn.blockwise.function import BlockwiseCall
from lightning_cp.attn.plan import Plan
from lightning_cp.data.shard import shard, shift_labels
from lightning_cp.geometry.bounds import Bounds
from lightning_cp.geometry.layout import Layout, build_layout
from lightning_cp.loss import means as loss_module
from lightning_cp.private.groups import num_process_groups
from lightning_cp.step import active_step
from lightning_cp.step.step import Step
from tests import doors
from tests.oracle import errors
from tests.parity.batches import BATCHES
from tests.parity.steps import average_, build_model, gradients, whole_step

pytestmark = pytest.mark.ranks


def build(**options):
    return doors.parallel(dist.group.WORLD, **options)


def several_steps_then_one_backward(batches, kind):
    """Run forward on each batch in a step of its own, then one backward over the sum."""
    cp, model, losses = build(), build_model(), []
    for batch in batches:
        with cp.step(batch) as local:
            wrapped = None
            if kind == "recompute":

                def wrapped(block, *args):
                    return checkpoint(block, *args, use_reentrant=False)

            logits = model(local["input_ids"], cp.position_ids(), checkpoint=wrapped)
            losses.append(token_mean(logits, local["labels"]))
    sum(losses).backward()
    average_(model)
    return gradients(model)


@pytest.mark.parametrize("kind", ["plain", "recompute"])
def test_several_steps_before_one_backward(ranks, kind):
    rows = [BATCHES[name](8) for name in ("document_ids", "left_padded", "plain")]
    exact = [whole_step([r]) for r in rows]
    summed = {name: sum(e[name] for e in exact) for name in exact[0] if name != "loss"}
    for found in ranks(2).run(several_steps_then_one_backward, [r.batch for r in rows], kind):
        assert max(errors(found, summed).values()) < 1e-10


def many_steps_of_other_documents():
    """Train on rows that are packed otherwise each time; return what lives after 10 and 20."""
    cp, model, counts = build(), build_model(), []
    kinds = (Step, Plan, BlockwiseCall, Layout, Bounds)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 61, (2, 40), generator=generator)
        documents = (torch.rand(2, 40, generator=generator) < 0.2).cumsum(1)
        with cp.step({"input_ids": ids, "labels": ids, "document_ids": documents}) as local:
            logits = model(local["input_ids"], cp.position_ids())
            token_mean(logits, local["labels"]).backward()
        del local, logits
        if seed in (9, 19):
            gc.collect()
            alive = Counter(type(x) for x in gc.get_objects() if type(x) in kinds)
            counts.append([alive[kind] for kind in kinds])
    return counts


def test_steps_leave_nothing_behind(ranks):
    for early, late in ranks(2).run(many_steps_of_other_documents):
        # Some layouts are kept for steps to come, a limited number.
        assert all(b <= a + 8 for a, b in zip(early, late, strict=True)), (early, late)
        assert late[0] <= early[0], "a step outlived its end"


def recompute_elsewhere(where, device="cpu"):
    """Checkpoint and go backward elsewhere; return what is said about it."""
    cp = build()
    q = torch.randn(1, 2, 4, 8, device=device, requires_grad=True)
    batch = {"input_ids": torch.arange(8, device=device)[None]}
    reentrant = "reentrant" in where

    def layer(x):
        mixed = attention(x, x, x, mask=Mask(causal=True)).transpose(1, 2).flatten(2)
        if "loss" in where:
            return token_mean(mixed, local["input_ids"])
        return mixed

    def loss_alone(x):
        return token_mean(x.transpose(1, 2).flatten(2), local["input_ids"])

    with cp.step(batch) as local:
        out = checkpoint(loss_alone if "loss" in where else layer, q, use_reentrant=reentrant)
        loss = out if "loss" in where else token_mean(out, local["input_ids"])
    try:
        if "another step" in where:
            with cp.step(batch):
                loss.backward()
        elif "paused" in where:
            with cp.paused():
                loss.backward()
        else:
            loss.backward()
    except RuntimeError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("attention, no step, reentrant", "but its step has ended"),
        ("attention, another step, reentrant", "recomputed under another step"),
        ("loss, no step, reentrant", "but its step has ended"),
    ],
)
def test_recompute_outside_its_step_is_refused(ranks, where, message):
    for said in ranks(2).run(recompute_elsewhere, where):
        assert message in said
        assert "use_reentrant=False" in said


@pytest.mark.parametrize("what", ["attention", "loss"])
@pytest.mark.parametrize("where", ["no step", "another step", "paused"])
def test_recompute_goes_back_to_its_step(ranks, what, where):
    assert ranks(2).run(recompute_elsewhere, f"{what}, {where}") == ["accepted", "accepted"]


def backward_twice():
    """Go through one checkpointed graph twice; return the two gradients."""
    cp = build()
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with cp.step({"input_ids": torch.arange(8)[None]}):
        out = checkpoint(
            lambda x: attention(x, x, x, mask=Mask(causal=True)),
            q,
            use_reentrant=False,
            context_fn=cp.recompute,
        )
    grads = []
    for keep in (True, False):
        q.grad = None
        out.square().sum().backward(retain_graph=keep)
        grads.append(q.grad)
    return grads


def test_a_graph_that_is_kept_can_be_recomputed_twice(ranks):
    for first, second in ranks(2).run(backward_twice):
        assert torch.equal(first, second)


def checkpointed_loss(batch):
    """Recompute head and loss in backward, after the step; return loss and gradients."""
    cp, model = build(), build_model()
    with cp.step(batch) as local:
        hidden = model(local["input_ids"], cp.position_ids())
        loss = checkpoint(
            token_mean, hidden, local["labels"], use_reentrant=False, context_fn=cp.recompute
        )
    loss.backward()
    average_(model)
    return {"loss": loss.detach(), **gradients(model)}


def test_a_checkpointed_loss_is_exact(ranks):
    rows = BATCHES["document_ids"](12)
    exact = whole_step([rows])
    for found in ranks(2).run(checkpointed_loss, rows.batch):
        assert max(errors(found, exact).values()) < 1e-10


def nested_and_broken():
    """Enter steps inside each other, leave one by an exception; return what was active when."""
    cp, seen = build(), []
    batch = {"input_ids": torch.arange(8)[None]}
    with cp.step(batch):
        outer = active_step.current()
        with cp.step({"input_ids": torch.arange(5)[None]}):
            seen.append(active_step.current() is not outer)
            with cp.paused():
                seen.append(active_step.current() is None)
        seen.append(active_step.current() is outer)
        try:
            with cp.step(batch):
                raise KeyError("on purpose")
        except KeyError:
            seen.append(active_step.current() is outer)
    seen.append(active_step.current() is None)
    return seen


def test_steps_nest_and_are_left_behind_by_exceptions(ranks):
    assert ranks(2).run(nested_and_broken) == [[True] * 5] * 2


def pause():
    """Attend over whole rows inside a step, on one rank alone."""
    cp = build()
    q = torch.randn(1, 2, 8, 4)
    expected = attention(q, q, q, mask=Mask(causal=True))
    with cp.step({"input_ids": torch.arange(8)[None]}), cp.paused():
        if dist.get_rank() == 0:  # nobody else takes part
            return torch.equal(attention(q, q, q, mask=Mask(causal=True)), expected)
    return True


def test_paused_attention_sees_whole_rows_and_needs_no_peer(ranks):
    assert ranks(2).run(pause) == [True, True]


def unshard_hidden():
    """Return error of a loss that is computed from whole rows, and of its gradient."""
    cp = build(layout="zigzag")
    torch.manual_seed(0)
    weight = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    scale = torch.randn(2, 11, 6, dtype=torch.float64)
    expected = ((x @ weight).cumsum(1).tanh() * scale).sum()
    (exact,) = torch.autograd.grad(expected, weight)
    with cp.step({"inputs_embeds": x}) as local:
        whole = cp.unshard(local["inputs_embeds"] @ weight, dim=1)
    assert whole.shape == (2, 11, 6)
    loss = (whole.cumsum(1).tanh() * scale).sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    weight.grad /= cp.cp_size
    return float((loss - expected).abs()), float((weight.grad - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2))]
)
def test_unshard_gives_whole_rows_and_exact_gradients(ranks, cp_size):
    for loss_error, gradient_error in ranks(cp_size).run(unshard_hidden):
        assert loss_error < 1e-10
        assert gradient_error < 1e-12


def edited_labels(edit):
    """Return the loss when the user changes the labels inside the step."""
    cp = build()
    rows = BATCHES["document_ids"](9)
    model = build_model()
    with cp.step(rows.batch) as local:
        labels = local["labels"]
        if edit == "in place":
            labels[local["input_ids"] % 3 == 0] = -100
        elif edit == "on one rank":
            if dist.get_rank() == 1:
                labels = labels.masked_fill(local["input_ids"] % 3 == 0, -100)
        else:
            labels = labels.masked_fill(local["input_ids"] % 3 == 0, -100)
        loss = token_mean(model(local["input_ids"], cp.position_ids()), labels)
        loss.backward()
    average_(model)
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("edit", ["in place", "copy", "on one rank"])
def test_labels_that_the_user_edits_inside_the_step_count_as_edited(ranks, edit):
    rows = BATCHES["document_ids"](9)
    tokens = rows.batch["input_ids"]
    edited = tokens % 3 == 0
    if edit == "on one rank":
        owned = build_layout("zigzag", seq_len=tokens.shape[1], cp_size=3).positions(1)
        edited &= torch.isin(torch.arange(tokens.shape[1]), owned)
    rows.batch["labels"] = rows.batch["labels"].masked_fill(edited, -100)
    exact = whole_step([rows])
    for found in ranks(3).run(edited_labels, edit):
        assert max(errors(found, exact).values()) < 1e-10


def unshifted_loss():
    cp = build()
    tokens = torch.arange(14).view(2, 7)
    labels = tokens.masked_fill(tokens % 4 == 0, -100)
    logits = torch.randn(2, 7, 20, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with cp.step({"input_ids": tokens, "labels": labels}) as local:
        mine = shard(logits, 1, layout=active_step.current().layout, rank=cp.cp_rank)
        found = token_mean(mine, local["labels"], shift=False)
        # Our padding is filled with token 0: it must not pass for a label.
        all_count = token_mean(mine, local["input_ids"], shift=False)
    blind = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return max(float((found - expected).abs()), float((all_count - blind).abs()))


def test_labels_of_the_same_token(ranks):
    assert max(ranks(3).run(unshifted_loss)) < 1e-6


def evaluate_unevenly(steps):
    """Evaluate another number of batches on each data rank; return the losses."""
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("data_parallel", "context_parallel")
    )
    cp = doors.parallel(mesh["context_parallel"], mesh["data_parallel"])
    model, losses = build_model(), []
    with torch.no_grad():
        for _ in range(steps[mesh["data_parallel"].get_local_rank()]):
            rows = BATCHES["plain"](10 + mesh["data_parallel"].get_local_rank())
            with cp.step(rows.batch) as local:
                logits = model(local["input_ids"], cp.position_ids())
                losses.append(float(token_mean(logits, local["labels"])))
    return losses


def test_evaluation_does_not_wait_for_other_rows(ranks):
    found = ranks(4).run(evaluate_unevenly, [1, 3])
    exact = [float(whole_step([BATCHES["plain"](10 + r)])["loss"]) for r in (0, 1)]
    assert [len(losses) for losses in found] == [1, 1, 3, 3]
    for losses, expected in zip(found, (exact[0], exact[0], exact[1], exact[1]), strict=True):
        assert losses == pytest.approx([expected] * len(losses), abs=1e-12)


# Break one thing, and parity must notice.


def shift_locally(labels, step, shift=True):
    """Shift as if each rank had only its own part."""
    return shift_labels(labels, None)


def broken_step(what):
    cp, rows, model = build(), BATCHES["plain"](11), build_model()
    with cp.step(rows.batch) as local, pytest.MonkeyPatch.context() as patch:
        if what == "label shift":
            patch.setattr(loss_module, "scored_labels", shift_locally)
        if what == "token count":  # a mean over each rank's own tokens
            patch.setattr(Step, "loss_groups", ())
        loss = token_mean(model(local["input_ids"], cp.position_ids()), local["labels"])
        loss.backward()
    average_(model)
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("what", ["label shift", "token count"])
def test_parity_notices(ranks, what):
    exact = whole_step([BATCHES["plain"](11)])
    for found in ranks(2).run(broken_step, what):
        assert max(errors(found, exact).values()) > 1e-3
    for found in ranks(2).run(broken_step, "nothing"):
        assert max(errors(found, exact).values()) < 1e-10


def shared_communicators():
    first, count = build(), num_process_groups()
    assert build(layout="contiguous").groups.attend is first.groups.attend
    assert num_process_groups() == count
    # Other Ulysses groups need communicators of their own.
    assert build(algorithm="ulysses").groups.inside is not first.groups.inside


def test_objects_over_the_same_ranks_share_their_communicators(ranks):
    ranks(2).run(shared_communicators)
