"""FlexAttention inside a step, on ranks: however it is called, against one device.

torch tests its own on GPUs: causal and document masks, with and without load balancing, block masks
of the whole row that are cut, compiled, out and lse and gradients; lengths that 128 x ranks does
not divide are refused there. The same here on CPU processes, any length, with score_mod.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

import lightning_cp
from lightning_cp import Mask, attention
from lightning_cp.data.shard import shard
from lightning_cp.step import active_step
from tests import doors
from tests.attn import cases
from tests.attn.flex.cases import (
    MASKS,
    SCORES,
    Captured,
    build,
    differentiate,
    flex_whole,
    make_flex_case,
    weights_of_lse,
)
from tests.oracle import attend_whole, errors

pytestmark = pytest.mark.ranks


def compiled(*args, **kwargs):
    return torch.compile(flex_attention, backend="aot_eager")(*args, **kwargs)


def compiled_around(*args, **kwargs):
    def model(q, *args, **kwargs):
        out, lse = flex_attention(q * 2.0, *args, **kwargs)
        return out + 0.0, lse

    scale = kwargs.pop("scale") or args[0].shape[-1] ** -0.5
    return torch.compile(model, backend="aot_eager")(*args, scale=scale / 2, **kwargs)


def checkpointed(q, k, v, **kwargs):
    return checkpoint(lambda *x: flex_attention(*x, **kwargs), q, k, v, use_reentrant=False)


def with_aux(*args, return_lse, **kwargs):
    out, aux = flex_attention(*args, return_aux=AuxRequest(lse=True, max_scores=True), **kwargs)
    assert aux.max_scores.shape == aux.lse.shape
    assert not aux.max_scores.requires_grad
    return out, aux.lse


CALLERS = {
    "imported": flex_attention,
    "module": lambda *a, **k: torch.nn.attention.flex_attention.flex_attention(*a, **k),
    "ours": lambda *a, **k: lightning_cp.flex_attention(*a, **k),
    "compiled": compiled,
    "compiled, as on a GPU": lambda *a, **k: torch.compile(flex_attention)(*a, **k),
    "compiled around": compiled_around,
    "checkpointed": checkpointed,
    "aux": with_aux,
}


def run_shared(case, *, how="imported", mask_by="cp", options=None, outside=False, device="cpu"):
    """Return whole rows of out, lse and gradients of one call inside a step."""
    case = case.to(case.inputs.q.dtype, device)
    cp = doors.parallel(dist.group.WORLD, layout=case.layout, **(options or {}))
    inputs, old = case.inputs, case.captured
    batch, heads, length = inputs.q.shape[:3]
    table = old.table.clone().requires_grad_()
    captured = Captured(old.documents, old.prefix, old.slopes, table)
    mask_mod = build(case.mask, MASKS, captured)
    block_mask = None
    if mask_mod is not None and mask_by == "whole":
        rows = 1 if case.mask in ("causal", "window", "by head") else batch
        heads = heads if case.mask == "by head" else 1
        block_mask = create_block_mask(mask_mod, rows, heads, length, length, device=device)
    rows = {"inputs_embeds": torch.zeros(batch, length, 1, device=device)}
    with cp.step(rows):
        layout = active_step.current().layout

        def local(x):
            return shard(x, 2, layout=layout, rank=cp.cp_rank)

        if mask_mod is not None and mask_by == "cp":
            block_mask = cp.block_mask(mask_mod)
        leaves = {"q": local(inputs.q), "k": local(inputs.k), "v": local(inputs.v)}
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        out, lse = CALLERS[how](
            *leaves.values(),
            score_mod=build(case.score, SCORES, captured),
            block_mask=block_mask,
            scale=case.scale,
            enable_gqa=True,
            return_lse=True,
        )
        dlse = local(weights_of_lse(inputs.q[..., 0]).to(lse))
        args = (out, lse, {**leaves, "table": table}, local(inputs.dout), dlse)
        if not outside:
            found = differentiate(*args)
    if outside:
        found = differentiate(*args)
    found = {name: x.to(device) for name, x in found.items()}
    with cp.step(rows):
        whole = {n: cp.unshard(x, dim=2) for n, x in found.items() if n != "dtable"}
    # Not averaged, since the loss here is not a mean over ranks.
    whole["dtable"] = cp.groups.sum(found["dtable"])
    return {name: x.cpu() for name, x in whole.items()}


def run_all(jobs):
    return [run_shared(**job) for job in jobs]


def check(ranks, cp_size, jobs):
    for found in ranks(cp_size).run(run_all, jobs):
        for job, part in zip(jobs, found, strict=True):
            worst = errors(part, flex_whole(job["case"]))
            rest = {name: value for name, value in job.items() if name != "case"}
            said = (job["case"].mask, job["case"].score, job["case"].layout, rest)
            assert max(worst.values()) < 1e-10, (said, worst)


@pytest.mark.slow
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_what_torch_checks_of_its_own(ranks, cp_size):
    """Masks, load balancing, block masks that are cut or made, other documents in each row."""
    choices = itertools.product(["causal", "document"], ["zigzag", "contiguous"], ["whole", "cp"])
    jobs = [
        {
            "case": make_flex_case(mask, layout=layout, length=length, heads="mha", dims=(4, 4)),
            "mask_by": mask_by,
        }
        for (mask, layout, mask_by), length in zip(
            choices, itertools.cycle([301, 64, 128]), strict=False
        )
    ]
    check(ranks, cp_size, jobs)


@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
)
def test_any_mask_and_score_is_exact(ranks, cp_size):
    choices = [*itertools.product(MASKS, ["alibi"]), *itertools.product(["document"], SCORES)]
    jobs = [
        {"case": make_flex_case(mask, score, layout=layout), "mask_by": mask_by}
        for (mask, score), layout, mask_by in zip(
            choices,
            itertools.cycle(["zigzag", "contiguous", "balanced"]),
            itertools.cycle(["cp", "cp", "whole"]),
            strict=False,
        )
    ]
    ulysses = [{**job, "options": {"algorithm": "ulysses"}} for job in jobs]
    if cp_size == 3:  # they take turns
        jobs[::2], ulysses = ulysses[::2], []
    check(ranks, cp_size, jobs + ulysses)


@pytest.mark.parametrize(
    "ways",
    [
        ("imported", "aux", "checkpointed"),
        *(
            pytest.param((how,), marks=pytest.mark.slow)
            for how in ("imported", "aux", "checkpointed")
        ),
    ],
    ids="-".join,
)
def test_neighbours_swap_heads_and_keys_travel_between_them(ranks, ways):
    choices = itertools.product(["document", "by head"], ["zigzag", "balanced"], ["cp", "whole"])
    jobs = [
        {
            "case": make_flex_case(mask, "alibi", layout=layout),
            "mask_by": mask_by,
            "how": how,
            "options": {"ulysses_size": 2},
        }
        for (mask, layout, mask_by), how in zip(choices, itertools.cycle(ways), strict=False)
    ]
    check(ranks, 4, jobs[::2] if len(ways) > 1 else jobs)


@pytest.mark.parametrize(
    ("cp_size", "outside"),
    [
        (2, ("imported", "checkpointed")),
        *((size, tuple(CALLERS)) for size in (2, 3)),
    ],
)
@pytest.mark.slow
def test_calls_are_exact_whichever_way_they_come(ranks, cp_size, outside):
    """And with backward after the step, where they are in ``outside``."""
    case = make_flex_case("document", "relative")
    is_quick = len(outside) < len(CALLERS)
    left_out = ("compiled, as on a GPU",) if is_quick else ()
    jobs = [{"case": case, "how": how} for how in CALLERS if how not in left_out]
    jobs += [{"case": case, "how": how, "outside": True} for how in outside]
    check(ranks, cp_size, jobs)


def other_ways(case):
    """Return the largest error of calls whose gradients nobody asks for, in several modes."""
    cp = doors.parallel(dist.group.WORLD)
    inputs, exact = case.inputs, flex_whole(case)["out"]
    mask_mod = and_masks(build(case.mask, MASKS, case.captured), lambda b, h, q, k: k >= 0)
    worst = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), cp.step({"inputs_embeds": torch.zeros(2, inputs.q.shape[2], 1)}):
            layout = active_step.current().layout
            q, k, v = (
                shard(x, 2, layout=layout, rank=cp.cp_rank) for x in (inputs.q, inputs.k, inputs.v)
            )
            out = flex_attention(q, k, v, block_mask=cp.block_mask(mask_mod), enable_gqa=True)
            worst.append(float((cp.unshard(out, dim=2) - exact).abs().max()))
    rows = {"inputs_embeds": torch.zeros(2, inputs.q.shape[2], 1)}
    with torch.autocast("cpu", torch.bfloat16), cp.step(rows):
        q, k, v = (x.float() for x in (q, k, v))
        out = flex_attention(q, k, v, block_mask=cp.block_mask(mask_mod), enable_gqa=True)
        assert out.dtype == torch.bfloat16
        error = (cp.unshard(out, dim=2) - exact).abs().max() / exact.abs().max()
    assert error < 0.02
    return max(worst)


def test_evaluation_inference_mode_and_autocast(ranks):
    assert max(ranks(2).run(other_ways, make_flex_case("document"))) < 1e-12


def captured_cut_message(which, device="cpu"):
    cp = doors.parallel(dist.group.WORLD)
    ids = (torch.arange(24).view(2, 12) // 5).to(device)
    batch = {"document_ids": ids, "inputs_embeds": torch.zeros(2, 12, 1, device=device)}
    with cp.step(batch) as local:
        ids, table = local["document_ids"], torch.zeros(2 * 6 - 1, device=device)
        q = torch.zeros(2, 2, 6, 16, device=device)
        mask_mod, score_mod = {
            "mask": (lambda b, h, q, k: ids[b, q] == ids[b, k], None),
            "score": (causal, lambda score, b, h, q, k: score + table[q - k + 5]),
        }[which]
        try:
            flex_attention(q, q, q, score_mod, block_mask=cp.block_mask(mask_mod))
        except ValueError as error:
            return str(error)
    return "accepted"


def causal(b, h, q, k):
    return q >= k


@pytest.mark.parametrize("which", ["mask", "score"])
def test_functions_that_captured_this_ranks_part_are_refused(ranks, which):
    for message in ranks(2).run(captured_cut_message, which):
        assert "reads past the end of a tensor that it captured (index 1" in message
        assert "12 tokens, of which this rank holds 6" in message
        assert "before cp.step(...) shards the batch" in message


def local_block_mask_message(lengths):
    cp = doors.parallel(dist.group.WORLD)
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, *lengths, device="cpu")
    with cp.step({"inputs_embeds": torch.zeros(2, 12, 1)}):
        q = torch.zeros(2, 2, 6, 4)
        try:
            flex_attention(q, q, q, block_mask=block_mask)
        except ValueError as error:
            return str(error)
    return "accepted"


@pytest.mark.parametrize("lengths", [(6, 6), (6, 12), (24, 24)])
def test_a_block_mask_that_is_not_of_the_row_is_refused(ranks, lengths):
    for message in ranks(2).run(local_block_mask_message, lengths):
        assert f"a block mask of {lengths[0]} x {lengths[1]} tokens inside a step" in message
        assert "cp.block_mask(mask_mod)" in message


def run_kernel(case, options, device="cpu", recompute=False):
    """Return whole rows of `attention()` and its gradients by the flex kernel."""
    cp = doors.parallel(dist.group.WORLD, kernel="flex", **options)
    inputs = case.inputs.on(torch.device(device))
    rows = {"inputs_embeds": torch.zeros(2, inputs.q.shape[2], 1, device=device)}
    with cp.step(rows):
        layout = active_step.current().layout

        def local(x):
            return shard(x, 2, layout=layout, rank=cp.cp_rank)

        leaves = [local(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
        added = {}
        if case.bias is not None and case.bias.dim() == 1:
            added["alibi"] = case.bias.to(device)
        elif case.bias is not None:
            added["bias"] = local(case.bias).to(device)

        def attend(*leaves):
            return attention(
                *leaves,
                mask=case.mask,
                softcap=case.softcap,
                sinks=sinks,
                scale=case.scale,
                **added,
            )

        out = checkpoint(attend, *leaves, use_reentrant=False) if recompute else attend(*leaves)
        wanted = leaves if sinks is None else [*leaves, sinks]
        grads = torch.autograd.grad(out, wanted, local(inputs.dout))
        names = ("dq", "dk", "dv", "dsinks")
        found = {"out": out.detach(), **dict(zip(names, grads, strict=False))}
        whole = {n: cp.unshard(x, dim=2) for n, x in found.items() if n != "dsinks"}
    if sinks is not None:
        whole["dsinks"] = cp.groups.sum(found["dsinks"])
    return {name: x.cpu() for name, x in whole.items()}


def run_kernels(jobs):
    return [run_kernel(**job) for job in jobs]


ALGORITHMS = ({}, {"algorithm": "ulysses"})


@pytest.mark.parametrize(
    ("cp_size", "is_full"),
    [(2, False), *(pytest.param(size, True, marks=pytest.mark.slow) for size in (1, 2, 3))],
)
def test_masks_softcap_sinks_and_bias_by_the_flex_kernel(ranks, cp_size, is_full):
    generator = torch.Generator().manual_seed(2)
    jobs = []
    for mask, heads, layout in [
        *itertools.product(cases.MASKS, ["gqa"], ["zigzag"]),
        *itertools.product(["documents+window", "left padding"], ["mha"], ["contiguous"]),
    ]:
        case = cases.make_case(mask, heads=heads, softcap=2.0 if heads == "gqa" else None)
        if layout == "contiguous":
            case.bias = torch.randn(2, 1, 37, 37, generator=generator, dtype=torch.float64)
            case.bias[:, :, :, 5] = float("-inf")
        both = [{"case": case, "options": {"layout": layout, **a}} for a in ALGORITHMS]
        jobs += both if is_full else both[len(jobs) % 2 :][:1]  # they take turns
    slopes = torch.tensor([0.0, 0.3, 0.1, 0.7], dtype=torch.float64)
    for mask, softcap, algorithm in itertools.product(
        ["documents+window", "bidirectional"], [None, 2.0], ["gather", "ulysses"]
    ):
        case = cases.make_case(mask, softcap=softcap, bias=slopes)
        both = [
            {"case": case, "options": {"algorithm": algorithm}, "recompute": recompute}
            for recompute in (False, True)
        ]
        jobs += both if is_full or softcap else both[:1]
    for found in ranks(cp_size).run(run_kernels, jobs):
        for job, part in zip(jobs, found, strict=True):
            case = job["case"]
            exact = attend_whole(
                case.inputs, case.mask, scale=case.scale, softcap=case.softcap, bias=case.whole_bias
            )
            worst = errors(part, exact)
            assert max(worst.values()) < 1e-10, (case.mask, job["options"], worst)


class Model(torch.nn.Module):
    """A model with a learned position bias in its score_mod; its mask sees documents."""

    def __init__(self, length):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.table = torch.nn.Parameter(torch.randn(2, 2 * length - 1) * 0.1)
        self.head = torch.nn.Linear(8, 20)

    def forward(self, x, block_mask):
        middle = self.table.shape[1] // 2

        def score_mod(score, b, h, q, k):
            return score + self.table[h, q - k + middle]

        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = flex_attention(q, k, v, score_mod, block_mask=block_mask)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


def train_against_alone(length, sharded):
    """Return the largest difference of loss and gradients between a step and whole rows alone."""
    cp = doors.parallel(dist.group.WORLD)
    torch.manual_seed(0)
    model = Model(length).double()
    position = torch.arange(length)
    ids = torch.stack([position // 7, (position + 3) // 5])
    batch = {
        "inputs_embeds": torch.randn(2, length, 8, dtype=torch.float64),
        "labels": torch.arange(2 * length).view(2, length) % 20,
        "document_ids": ids,
    }

    def mask_mod(b, h, q, k):
        return (ids[b, q] == ids[b, k]) & (q >= k)

    results = []
    for opened in (cp.reference, cp.step):
        model.zero_grad()
        if sharded and opened == cp.step:
            fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        with opened(batch) as local:
            logits = model(local["inputs_embeds"], cp.block_mask(mask_mod))
            loss = lightning_cp.token_mean(logits, local["labels"])
        loss.backward()
        grads = {name: x.grad.clone() for name, x in model.named_parameters()}
        if opened == cp.step:
            grads = {
                name: x.full_tensor() if sharded else cp.groups.mean(x) for name, x in grads.items()
            }
        results.append({"loss": loss.detach(), **grads})
    return max(errors(results[1], results[0]).values())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("cp_size", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_learned_bias_is_trained_as_on_whole_rows(ranks, cp_size, sharded):
    """Also with parameters that are whole only while a layer runs, and recomputes in backward."""
    assert max(ranks(cp_size).run(train_against_alone, 29, sharded)) < 1e-10


def keep_masks():
    cp = doors.parallel(dist.group.WORLD)
    ids = torch.zeros(1, 8).long()

    def mask_mod(b, h, q, k):
        return ids[b, q] == ids[b, k]

    seen = []
    for change in (False, False, True):
        if change:
            ids[0, 4] = 1
        with cp.step({"inputs_embeds": torch.zeros(1, 8, 1)}):
            seen.append(cp.block_mask(mask_mod))
            assert cp.block_mask(mask_mod) is seen[-1]
    return seen[0] is seen[1] and seen[1] is not seen[2]


def test_masks_are_kept_over_layers_and_steps(ranks):
    assert ranks(2).run(keep_masks) == [True, True]


def documents_by_mask(length):
    """Return how far FlexAttention with documents is from `Mask` with the same documents."""
    cp = doors.parallel(dist.group.WORLD)
    ids = cases.documents(2, length)
    with cp.step({"document_ids": ids, "inputs_embeds": torch.zeros(2, length, 1)}):
        q = torch.randn(2, 2, active_step.current().layout.local_len, 8, dtype=torch.float64)
        block_mask = cp.block_mask(lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k))
        by_flex = flex_attention(q, q, q, block_mask=block_mask)
        by_mask = attention(q, q, q, mask=Mask(causal=True))
        real = active_step.current().layout.is_real(cp.cp_rank)
    return float((by_flex - by_mask)[:, :, real].abs().max())


def test_documents_are_those_of_mask(ranks):
    assert max(ranks(3).run(documents_by_mask, 41)) < 1e-12
