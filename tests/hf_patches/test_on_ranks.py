"""What enabled models do on several ranks, beside what the parity suite compares."""

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from hf_patches import enable
from tests import doors
from tests.parity import zoo
from tests.parity.hf import Double, Job, build_batch, build_cp, errors

pytestmark = pytest.mark.ranks


def double(name, **options):
    return zoo.build_model(name, dtype=torch.float64, **options).eval()


def gradients(model, cp=None):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if cp is not None and not hasattr(parameter.grad, "full_tensor"):
            dist.all_reduce(gradient)
            gradient = gradient / cp.cp_size
        found[name] = gradient
    return found


LAYOUTS = ("zigzag", "contiguous", "balanced")


def compare(name, batch, *, attention="sdpa"):
    """Return the largest error of a gradient in each layout; the reference takes the batch."""
    stock, worst = double(name, attention=attention), []
    with Double():
        stock(**batch).loss.backward()
    for layout in LAYOUTS:
        model, cp = double(name, attention=attention), build_cp(layout=layout)
        enable(model)
        with cp.step(batch) as local, Double():
            loss = model(**local).loss
        loss.backward()
        worst.append(max(errors(gradients(model, cp), gradients(stock)).values()))
    return worst


def plain():
    return build_batch(Job("llama"), zoo.VOCAB_SIZE, 1)


def ready_mask():
    batch = plain()
    place = torch.arange(batch["input_ids"].shape[1])
    seen = (place[None] <= place[:, None]) | (place[None] % 3 == 0)
    seen = torch.stack([seen, seen | (place[None] % 5 == 1)])[:, None]
    return compare("llama", {**batch, "attention_mask": seen})


def image_spans():
    batch = plain()
    marked = torch.zeros_like(batch["input_ids"])
    marked[0, 3:12] = marked[0, 28:35] = marked[1, 20:31] = 1
    assert marked.sum(1).max() < 2 * zoo.WINDOW
    return compare("gemma3", {**batch, "token_type_ids": marked}, attention="eager")


@pytest.mark.parametrize("case", [pytest.param(ready_mask, marks=pytest.mark.slow), image_spans])
def test_masks_that_a_model_is_given_are_served_exactly(ranks, case):
    worst = dict(zip(LAYOUTS, ranks(3).run(case)[0], strict=True))
    assert max(worst.values()) < 1e-9, worst


def attend(x):
    heads = x[:, None]
    return x + functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0]


class OwnNorm(nn.Module):
    def forward(self, x):
        return attend(x)


def hook(model, stack):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: attend(out))


def override(model, stack):
    mlp = model.model.layers[1].mlp
    mlp.forward = partial(lambda forward, x: attend(forward(x)), mlp.forward)


def replaced(model, stack):
    model.model.norm = OwnNorm()


def patched_class(model, stack):
    plain = LlamaMLP.forward
    patch = mock.patch.object(LlamaMLP, "forward", lambda self, x: attend(plain(self, x)))
    stack.enter_context(patch)


def hook_of_all_modules(model, stack):
    def attends(module, args, out):
        return attend(out) if isinstance(module, LlamaDecoderLayer) else None

    stack.callback(register_module_forward_hook(attends).remove)


def users_code(change):
    """Return the error of gradients where code of a user attends, before and after a step."""
    batch = plain()
    stock, model, cp = double("llama"), double("llama"), build_cp(layout="zigzag")
    enable(model)
    with cp.step(batch) as local, Double():
        unchanged = model(**local).loss.item()
    with ExitStack() as stack:
        change(stock, stack)
        with Double():
            stock(**batch).loss.backward()
    with ExitStack() as stack:
        change(model, stack)
        with cp.step(batch) as local, Double():
            loss = model(**local).loss
        loss.backward()
    assert abs(loss.item() - unchanged) > 1e-4
    return max(errors(gradients(model, cp), gradients(stock)).values())


CHANGES = (hook, override, replaced, patched_class, hook_of_all_modules)


def users_codes():
    return {change.__name__: users_code(change) for change in CHANGES}


def test_attention_in_code_of_users_inside_a_known_model_is_exact(ranks):
    for found in ranks(2).run(users_codes):
        assert max(found.values()) < 1e-9, found


def convolved():
    model, cp = zoo.build_model("llama"), build_cp(layout="zigzag")
    enable(model)
    weight = torch.ones(model.config.hidden_size, 1, 2)

    def convolve(module, args, out):
        return out + functional.conv1d(out.mT, weight, padding=1, groups=len(weight)).mT[:, :-1]

    model.model.layers[1].mlp.register_forward_hook(convolve)
    with cp.step(plain()) as local, pytest.raises(RuntimeError) as raised:
        model(**local)
    return str(raised.value)


def test_a_convolution_in_code_of_users_inside_a_known_model_is_refused(ranks):
    for said in ranks(2).run(convolved):
        assert "conv1d() was called inside a step" in said


def logits_whole():
    batch = plain()
    stock = double("mistral")
    with Double():
        exact = stock(input_ids=batch["input_ids"]).logits
    model, cp = double("mistral"), build_cp(layout="zigzag")
    enable(model)
    with torch.no_grad(), cp.step({"input_ids": batch["input_ids"]}) as local, Double():
        output = model(**local, output_hidden_states=True)
        assert output.loss is None
        assert output.logits.shape[1] == output.hidden_states[0].shape[1] == 22
        return (cp.unshard(output.logits, 1) - exact).abs().max().item()


def test_logits_are_this_ranks_and_come_back_whole(ranks):
    assert max(ranks(3).run(logits_whole)) < 1e-9


def sharded(name, chunked):
    batch = build_batch(Job(name, "right"), zoo.VOCAB_SIZE, 1)
    stock = zoo.build_model(name)
    stock(**batch).loss.backward()
    model, cp = zoo.build_model(name), build_cp(layout="zigzag")
    enable(model, chunked_loss=chunked)
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with cp.step(batch) as local:
        output = model(**local)
        assert (output.logits is None) == (chunked == "always")
        output.loss.backward()
    return max(errors(gradients(model), gradients(stock)).values())


QUICK = [("llama", "never"), ("llama:tied", "always"), ("gemma2", "always")]
OTHERS = [("llama", "always"), ("llama:tied", "never"), ("gemma2", "never")]


@pytest.mark.parametrize(
    ("name", "chunked"),
    [*QUICK, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
)
def test_sharded_models_and_heads_are_exact(ranks, name, chunked):
    assert max(ranks(2).run(sharded, name, chunked)) < 1e-5


def said(name, batch, given, head="causal"):
    """Return what a rank was told, having edited its part of the batch."""
    model, cp = zoo.build_model(name, head=head), build_cp(layout="contiguous")
    checked = doors.parallel(dist.group.WORLD) if given == "ids" else cp
    enable(model)
    try:
        with checked.step(batch) as local:
            if given == "mask":
                mask = (local["input_ids"] != 1).long()
                return model(input_ids=local["input_ids"], attention_mask=mask).logits.sum().item()
            if given == "positions":
                places = (cp.position_ids() - 20).clamp(min=0)
                return model(input_ids=local["input_ids"], position_ids=places).logits.sum().item()
            return model(**local).loss.item()
    except ValueError as error:
        return str(error)


def test_what_only_one_rank_can_see_is_said_by_all(ranks):
    batch = plain()
    assert all(isinstance(x, float) for x in ranks(2).run(said, "llama", batch, "mask"))
    padded = {"input_ids": batch["input_ids"].clone()}
    padded["input_ids"][0, :3] = 1  # on the first rank only
    for text in ranks(2).run(said, "llama", padded, "mask"):
        assert "The model got `attention_mask` that the batch of this step did not hold" in text
    for text in ranks(2).run(said, "llama", batch, "positions"):
        assert "The model got `position_ids` that the batch of this step did not hold" in text
    for key in ("input_ids", "labels"):
        wrong = {**batch, key: batch[key].clone()}
        wrong[key][1, 50] = 4000  # on the last rank only
        for text in ranks(2).run(said, "llama", wrong, "ids"):
            assert (
                f"`{key}` hold ids outside of the vocabulary of LlamaForCausalLM: 0 to 96" in text
            )


def data_rows(head):
    """Rows of two data ranks, some without an answer; compared with one process that has all."""
    generator = torch.Generator().manual_seed(4)
    whole = {"input_ids": torch.randint(5, zoo.VOCAB_SIZE, (6, 23), generator=generator)}
    if head == "sequence":
        whole["labels"] = torch.tensor([0, -100, -100, 1, 2, 1])
    else:
        whole["start_positions"] = torch.tensor([3, 23, 40, 5, 9, 1])
        whole["end_positions"] = torch.tensor([4, 23, 40, 8, 9, 22])
    stock = zoo.build_model("bert", head=head, dtype=torch.float64, attention="sdpa").eval()
    with Double():
        stock(**{k: v.clone() for k, v in whole.items()}).loss.backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    cp = doors.parallel(mesh["context"], mesh["data"])
    rank = mesh["data"].get_local_rank()
    model = zoo.build_model("bert", head=head, dtype=torch.float64).eval()
    enable(model)
    with cp.step({k: v[3 * rank : 3 * rank + 3] for k, v in whole.items()}) as local, Double():
        model(**local).loss.backward()
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient /= 4
    return max(errors(found, gradients(stock)).values())


@pytest.mark.parametrize("head", ["sequence", "question"])
def test_rows_without_an_answer_count_for_nothing(ranks, head):
    assert max(ranks(4).run(data_rows, head)) < 1e-9


def eager_units():
    """Attention modules that are FSDP2 units keep their eager function outside of steps."""
    batch = plain()
    exact = zoo.build_model("llama")(**batch).loss
    model = zoo.build_model("llama")
    enable(model)
    for layer in model.model.layers:
        fully_shard(layer.self_attn)
    fully_shard(model)
    return (model(**batch).loss - exact).abs().item()


def test_attention_that_is_sharded_by_itself_keeps_its_stock_function(ranks):
    assert max(ranks(2).run(eager_units)) < 1e-5


def head_unit(mode, tied, accumulates):
    """Return the error of gradients, whether logits were held, and how often weights travelled.

    Embedding, and last norm and head, are units of their own, as accelerate wraps a model.
    """
    # What FSDP2 gathers together: no public class does, and torch counts gathers nowhere.
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from hf_patches.model import forward
    from lightning_cp.loss import chunked_loss

    def build():
        model = double("llama").train()
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    batch, cp, stock, model = plain(), build_cp(layout="zigzag"), build(), build()
    with Double():
        (2 * stock(**batch).loss).backward()
    enable(model, chunked_loss=mode)
    for layer in model.model.layers:
        fully_shard(layer)
    tail = [model.model.norm, model.lm_head]
    if tied:
        tail.insert(1, model.model.embed_tokens)
    fully_shard(tail, reshard_after_forward=False)
    fully_shard(model)
    gathered, unshard = [], FSDPParamGroup.unshard

    def count(group, *args, **kwargs):
        # A gather that begins.
        if group._all_gather_result is None and not group.is_unsharded:
            gathered.append(group)
        return unshard(group, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "unshard", count)
        patch.setattr(forward, "LARGEST_LOGITS", 0)
        patch.setattr(chunked_loss, "MAX_CHUNK_LOGITS", 8 * zoo.VOCAB_SIZE)
        for is_last in (False, True):
            if accumulates:
                model.set_requires_gradient_sync(is_last)
            with cp.step(batch) as local, Double():
                output = model(**local)
            output.loss.backward()
    error = max(errors(gradients(model, cp), gradients(stock)).values())
    return error, output.logits is not None, len(gathered)


@pytest.mark.parametrize(
    ("tied", "accumulated"),
    [
        (False, (True,)),
        (True, (True,)),
        pytest.param(False, (False,), marks=pytest.mark.slow),
        pytest.param(True, (False,), marks=pytest.mark.slow),
    ],
)
def test_a_head_that_is_a_unit_is_scored_in_chunks_with_weights_that_stay(ranks, tied, accumulated):
    error, has_logits, num_gathered = ranks(2).run(head_unit, "never", tied, False)[0]
    assert has_logits
    for accumulates in accumulated:
        found = ranks(2).run(head_unit, "auto", tied, accumulates)[0]
        assert not found[1]
        assert max(error, found[0]) < 1e-9
        assert found[2] <= num_gathered
