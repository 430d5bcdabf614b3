"""A model that takes full sequences, against the stock model: outputs and every gradient."""

import copy
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import convert_to_fp32
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import ModelOutput

from hf_patches import enable, shard_in_forward
from hf_patches.model.left_out import LeftOutError
from lightning_cp.comm.mesh import build_groups
from tests import doors
from tests.parity import zoo
from tests.parity.hf import Double, Job, build_batch, errors, exact_gradients
from tests.parity.trainer_step import forget_processes
from tests.torch_names import tree_map


def build(name="llama", head="causal"):
    return zoo.build_model(name, head=head, dtype=torch.float64, attention="sdpa").eval()


def batch_of(kind, head="causal"):
    batch = build_batch(Job("llama", kind=kind, head=head), zoo.VOCAB_SIZE, 1)
    if kind == "packed":  # as the collators of transformers and TRL describe documents
        batch["input_ids"] = batch["input_ids"].flatten()[None]
        batch["labels"] = batch["labels"].flatten()[None]
        documents = batch.pop("document_ids")
        documents = (documents + 100 * torch.arange(2)[:, None]).flatten()[None]
        place = torch.arange(documents.shape[1])
        starts = torch.cat([documents.new_ones(1, dtype=torch.bool), documents[0].diff() != 0])
        batch["use_cache"] = False  # else the stock model takes documents for one
        batch["position_ids"] = (place - (place * starts).cummax(0).values)[None]
    return batch


def leaves(value, path=""):
    """Return the tensors of an output by path."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach()}
    if isinstance(value, dict | ModelOutput):
        value = {k: x for k, x in value.items() if k != "past_key_values"}
        return {k: v for key, x in value.items() for k, v in leaves(x, f"{path}.{key}").items()}
    if isinstance(value, tuple | list):
        return {k: v for i, x in enumerate(value) for k, v in leaves(x, f"{path}.{i}").items()}
    return {}


def gradients(model, num_ranks=1):
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        elif num_ranks > 1:
            dist.all_reduce(gradient)
            gradient = gradient / num_ranks
        found[name.removeprefix("module.")] = gradient
    return found


def worst(
    ours, stock, call, cp, *, loss=lambda output: output.loss, wrapped=None, precision=Double
):
    """Return the largest error of an output or a gradient; ``stock`` runs on this rank alone."""
    with precision():
        exact = stock(**call)
    handle = shard_in_forward(ours, cp)
    with precision():
        found = (wrapped or ours)(**call)
    wanted, got = leaves(exact), leaves(found)
    if ours.training and "labels" in call:
        assert not any(x.shape[-1:] == (zoo.VOCAB_SIZE,) for x in got.values())
        wanted = {path: x for path, x in wanted.items() if path in got}
        assert ".loss" in wanted
    assert got.keys() == wanted.keys()
    values = [
        (got[path] - x).abs().max().item()
        for path, x in wanted.items()
        if x.dtype.is_floating_point
    ]
    assert all(torch.equal(got[p], x) for p, x in wanted.items() if not x.dtype.is_floating_point)
    with precision():
        loss(exact).backward()
        loss(found).backward()
    num_ranks = 1 if isinstance(wrapped, DistributedDataParallel) else cp.cp_size
    grads = errors(gradients(wrapped or ours, num_ranks), gradients(stock))
    handle.undo()
    return max(*values, *grads.values())


def cases(cp):
    """Yield names, and what returns the largest error of each."""
    items = torch.tensor(31)
    for kind in ("plain", "left", "right", "packed"):
        batch = batch_of(kind)
        if kind in ("left", "packed"):
            batch["num_items_in_batch"] = items
        yield kind, partial(worst, build().train(), build().train(), batch, cp)
    batch = batch_of("right")
    asked = {"output_hidden_states": True}
    yield "evaluation", partial(evaluation, build(), build(), {**batch, **asked}, cp)

    def of_logits(output):
        return output.logits.square().mean()

    inputs = {k: v for k, v in batch.items() if k != "labels"}
    yield "no labels", partial(worst, build(), build(), {**inputs, **asked}, cp, loss=of_logits)
    call = {**inputs, "logits_to_keep": 7}
    yield "last logits", partial(worst, build(), build(), call, cp, loss=of_logits)
    call = {**batch, "shift_labels": batch["labels"].flip(1)}
    yield "shifted labels", partial(worst, build().train(), build().train(), call, cp)
    short = {"input_ids": torch.tensor([[7, 8]]), "labels": torch.tensor([[7, 8]])}
    yield "two tokens", partial(worst, build().train(), build().train(), short, cp)

    def of_hidden(output):
        return output.last_hidden_state.square().mean()

    for name, kind in (("llama", "packed"), ("gpt2", "plain")):
        call = {k: v for k, v in batch_of(kind).items() if k != "labels"}
        models = [build(name).base_model for _ in range(2)]
        yield f"{name} without a head", partial(worst, *models, call, cp, loss=of_hidden)

    ours, stock = build("qwen3_moe").train(), build("qwen3_moe").train()
    call = {**batch, "num_items_in_batch": items, "output_router_logits": True}
    yield "experts", partial(worst, ours, stock, call, cp)
    for head in ("sequence", "token", "question"):
        name = "bert" if head == "question" else "llama"
        call = batch_of("right" if name == "llama" else "plain", head)
        if name == "llama":
            call["num_items_in_batch"] = 5
        yield head, partial(worst, build(name, head).train(), build(name, head).train(), call, cp)

    ours, stock = build().train(), build().train()
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    # The mode does not reach what backward computes again: norms and the loss are in float32.
    yield "checkpointing", partial(worst, ours, stock, batch, cp, precision=nullcontext)
    yield "LoRA", partial(lora, batch, cp)
    ours = build().train()
    yield "DDP", partial(worst, ours, build().train(), batch, cp, wrapped=ddp(ours, cp))
    yield "FSDP2", partial(sharded, batch, cp)


def evaluation(ours, stock, call, cp):
    handle = shard_in_forward(ours, cp)
    with torch.no_grad(), Double():
        exact, found, values = (
            leaves(stock(**call)),
            leaves(ours(**call)),
            ours(return_dict=False, **call),
        )
        handle.logits = "never"
        assert "logits" not in ours(**call)
    assert list(exact) == list(found)
    assert isinstance(values, tuple)
    assert torch.equal(values[1], found[".logits"])
    handle.undo()
    return max((found[path] - x).abs().max().item() for path, x in exact.items())


def ddp(model, cp):
    shard_in_forward(model, cp)
    return DistributedDataParallel(model)


def lora(batch, cp):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(get_peft_model(build().train(), config))
    return worst(*models, batch, cp)


def sharded(batch, cp):
    ours = build().train()
    shard_in_forward(ours, cp)
    for layer in ours.model.layers:
        fully_shard(layer)
    fully_shard(ours)
    return worst(ours, build().train(), batch, cp)


QUICK = ("left", "packed", "evaluation", "last logits", "two tokens", "gpt2 without a head")
QUICK += ("experts", "sequence", "question", "checkpointing", "LoRA", "DDP", "FSDP2")


def run_cases(names):
    cp = doors.parallel(dist.group.WORLD)
    return {name: run() for name, run in cases(cp) if name in (names or (name,))}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [(2, QUICK), *(pytest.param(size, None, marks=pytest.mark.slow) for size in (2, 3))],
)
def test_a_model_returns_what_the_stock_model_returns(ranks, num_ranks, names):
    found = ranks(num_ranks).run(run_cases, names)
    for name, error in found[0].items():
        assert error < (2e-6 if name == "checkpointing" else 1e-9), name
    assert len(found[0]) == (19 if names is None else len(names))


def fused_cases(cp):
    from trl.trainer.utils import add_fused_lm_head

    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")

    def fused(name):
        model = build(name).train()
        add_fused_lm_head(model, temperature=0.7, outputs=outputs)
        return model

    def of_tokens(output):
        weights = torch.linspace(-1, 1, output.log_probs.shape[1])
        return (output.log_probs * weights).sum() + output.entropy.square().sum() + output.loss

    for kind in ("left", "right", "packed"):
        call = {**batch_of(kind), "fused_lm_head": True, "use_cache": False}
        yield kind, worst(fused("llama"), fused("llama"), call, cp, loss=of_tokens)
    call = {**call, "shift_labels": call["labels"], "num_items_in_batch": torch.tensor(9)}
    yield "shifted labels", worst(fused("gemma3"), fused("gemma3"), call, cp, loss=of_tokens)
    call = {**batch_of("right"), "fused_lm_head": True, "output_router_logits": True}
    yield "experts", worst(fused("qwen3_moe"), fused("qwen3_moe"), call, cp, loss=of_tokens)
    short = {"input_ids": torch.tensor([[7, 8]]), "labels": torch.tensor([[7, 8]])}
    yield "two tokens", worst(fused("llama"), fused("llama"), {**short, "fused_lm_head": True}, cp)


def run_fused_cases():
    return dict(fused_cases(doors.parallel(dist.group.WORLD)))


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.slow
def test_trls_fused_head_returns_what_it_returns_for_full_sequences(ranks, num_ranks):
    found = ranks(num_ranks).run(run_fused_cases)
    for name, error in found[0].items():
        assert error < 1e-6, name  # the head computes in float32
    assert len(found[0]) == 6


def generate_on_ranks():
    cp, tokens = doors.parallel(dist.group.WORLD), batch_of("plain")["input_ids"]
    stock, ours = build(), build()
    shard_in_forward(ours, cp)
    # Each rank alone, and for as long as it likes.
    length = 3 + cp.cp_rank
    kwargs = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    equal = [torch.equal(stock.generate(tokens, **kwargs), ours.generate(tokens, **kwargs))]
    kwargs["use_cache"] = False
    equal.append(torch.equal(stock.generate(tokens, **kwargs), ours.generate(tokens, **kwargs)))
    exact, found = (model(tokens, use_cache=True) for model in (stock, ours))
    equal.append(found.past_key_values.get_seq_length() == tokens.shape[1])
    more = torch.full((2, 1), 9)
    exact = stock(more, past_key_values=exact.past_key_values).logits
    equal.append(torch.equal(exact, ours(more, past_key_values=found.past_key_values).logits))
    return equal


@pytest.mark.ranks
def test_generation_and_caches_are_those_of_the_stock_model(ranks):
    assert ranks(2).run(generate_on_ranks) == [[True] * 4] * 2


def refuse_other_rows():
    cp, model = doors.parallel(dist.group.WORLD), build()
    shard_in_forward(model, cp)
    with pytest.raises(ValueError, match="same batch"):
        model(torch.full((1, 9 + cp.cp_rank), 7))
    with pytest.raises(ValueError, match="ids outside of the vocabulary"):
        model(torch.full((1, 9), 7), labels=torch.full((1, 9), 5000))


@pytest.mark.ranks
def test_bad_rows_raise_on_all_ranks(ranks):
    ranks(2).run(refuse_other_rows)


# The mode that computes in float64 does not reach all of their code.
NOT_IN_DOUBLE = ("hunyuan_v1_moe", "xglm", "xlnet")


def served_exactly(names):
    """Return the errors of the loss and the worst gradient by name; None where it is refused."""
    cp, found = doors.parallel(dist.group.WORLD), {}
    for name in names:
        kind = "right" if name == "cpmant" else "packed"
        try:
            model = zoo.build_model(name, dtype=torch.float64).eval()
            shard_in_forward(model, cp)
        except (ValueError, ImportError, StrictDataclassError):  # or cannot be built here
            found[name] = None
            continue
        pad = getattr(model.config.get_text_config(), "pad_token_id", None)
        batch = build_batch(Job(name, kind=kind), zoo.VOCAB_SIZE, 1 if pad is None else pad)
        with Double():
            loss = model(**batch).loss
        loss.backward()
        ours = gradients(model, cp.cp_size)
        exact_loss, exact = exact_gradients(name, kind, "causal", torch.float64)
        exact = {key: exact[key] for key in ours}
        found[name] = abs(loss.item() - exact_loss), max(errors(ours, exact).values())
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_every_causal_model_returns_the_loss_of_its_documents(ranks):
    names = [name for name in zoo.causal_names() if name not in NOT_IN_DOUBLE]
    found = {}
    for at in range(0, len(names), 8):
        found |= ranks(2).run(served_exactly, names[at : at + 8])[0]
    served = {name: pair for name, pair in found.items() if pair is not None}
    assert {name: pair for name, pair in served.items() if max(pair) > 1e-6} == {}
    assert len(served) > 160


def test_undo_restores_the_model():
    model, tokens = build(), torch.arange(5, 15)[None]
    exact = model(tokens).logits
    handle = shard_in_forward(model, doors.parallel(None))
    assert model(tokens).past_key_values is None
    handle.undo()
    handle.undo()
    assert "forward" not in model.__dict__
    assert "generate" not in model.__dict__
    assert zoo.attention_of(model.config) == "sdpa"
    assert torch.equal(model(tokens).logits, exact)


def test_undo_leaves_a_model_enabled_that_was_enabled_before():
    model = build()
    enabled = enable(model)
    shard_in_forward(model, doors.parallel(None)).undo()
    assert zoo.attention_of(model.config) == "lightning_cp"
    with doors.parallel(None).step({"input_ids": torch.arange(5, 15)[None]}) as local:
        model(**local)
    enabled.undo()
    assert zoo.attention_of(model.config) == "sdpa"


def test_a_step_and_a_pause_inside_take_what_an_enabled_model_takes():
    model, cp = build(), doors.parallel(None)
    shard_in_forward(model, cp)
    batch = batch_of("right")
    exact = model(**batch).loss.item()
    with cp.step(batch) as local:
        assert model(**local).loss.item() == pytest.approx(exact, abs=1e-6)
    with cp.paused():
        assert model(**batch).loss.item() == pytest.approx(exact, abs=1e-6)


def test_a_copy_takes_full_sequences_too():
    model = build()
    handle = shard_in_forward(model, doors.parallel(None))
    copied = copy.deepcopy(model)
    assert copied.forward.__self__ is copied
    handle.undo()
    assert copied(**batch_of("right")).loss.item() == pytest.approx(
        model(**batch_of("right")).loss.item(), abs=1e-6
    )


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_model_that_accelerate_unwraps_still_takes_full_sequences():
    from accelerate import Accelerator

    model = zoo.build_model("llama").eval()
    shard_in_forward(model, doors.parallel(None))
    exact = model(**batch_of("right")).loss
    forget_processes()  # other tests of this process have them
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        assert prepared(**batch_of("right")).loss.dtype == torch.float32
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        forget_processes()
    assert unwrapped is model
    assert torch.equal(model(**batch_of("right")).loss, exact)


READS = {
    "attribute": lambda output: output.logits,
    "key": lambda output: output["logits"],
    "index": lambda output: output[2],
    "slice": lambda output: output[1:],
}


def test_logits_that_were_left_out_say_how_to_get_them(monkeypatch):
    model = build("qwen3_moe").train()
    handle = shard_in_forward(model, doors.parallel(None))
    call = {**batch_of("right"), "output_router_logits": True}
    output = model(**call)
    copies = pickle.loads(pickle.dumps(output)), copy.copy(output)
    copies += tree_map(torch.Tensor.detach, output), convert_to_fp32(output)
    for found in (output, *copies):
        for read in READS.values():
            with pytest.raises(LeftOutError, match=r"logits.*handle.models\[0\].logits = 'always'"):
                read(found)
        with pytest.raises(AttributeError, match="^`router_logits` of this MoeCausal"):
            found.router_logits  # noqa: B018
        assert not hasattr(found, "logits")
        assert getattr(found, "logits", None) is None
        assert "logits" not in found
        assert found.to_tuple()[0] == found[0] == found["loss"] == found.loss
        assert repr(found).startswith("MoeCausalLMOutputWithPast({'loss': tensor(")
    with pytest.raises(IndexError):
        output[9]
    # Else the loss is not in chunks.
    monkeypatch.setattr("hf_patches.model.forward.LARGEST_LOGITS", 0)
    handle.logits = "always"
    whole = model(**call)
    assert whole.logits.shape[-1] == zoo.VOCAB_SIZE
    assert whole.loss.item() == pytest.approx(output.loss.item(), abs=1e-6)


def test_a_second_call_takes_the_same_ranks_only():
    model, cp = build(), doors.parallel(None)
    shard_in_forward(model, cp)
    assert shard_in_forward(model, cp).model is model
    with pytest.raises(ValueError, match="with another ContextParallel. Call remove"):
        shard_in_forward(model, doors.parallel(None))


def test_a_fused_head_must_have_been_added_before():
    model = build()
    shard_in_forward(model, doors.parallel(None))
    with pytest.raises(ValueError, match="add_fused_lm_head.* before shard_in_forward"):
        model(**batch_of("right"), fused_lm_head=True)


class Remembers(LlamaForCausalLM):
    def forward(self, input_ids=None, **others):
        output = super().forward(input_ids=input_ids, **others)
        output["memory"] = torch.ones(1)
        return output


def test_fields_that_cannot_be_unsharded_are_refused():
    model = build()
    model.__class__ = Remembers
    enable(model, allow_unknown=True)
    shard_in_forward(model, doors.parallel(None))
    with pytest.raises(ValueError, match="returned `memory`, which is not known to be the same"):
        model(batch_of("plain")["input_ids"])


def with_data_ranks():
    groups = build_groups(None, data=dist.group.WORLD)
    with pytest.raises(ValueError, match="2 data ranks.*Build it without them"):
        shard_in_forward(build(), doors.parallel(groups))


@pytest.mark.ranks
def test_data_ranks_are_refused(ranks):
    ranks(2).run(with_data_ranks)


def test_a_copy_is_restored_by_itself():
    model, cp = build(), doors.parallel(None)
    handle = shard_in_forward(model, cp)
    copied = copy.deepcopy(model)
    shard_in_forward(copied, cp).remove()
    assert "_lightning_cp_full_sequences" in vars(model)
    assert "_lightning_cp_full_sequences" not in vars(copied)
    assert "_lightning_cp_patches" in vars(model)
    handle.remove()
    batch = batch_of("plain")
    assert torch.equal(model(**batch).loss, copied(**batch).loss)
