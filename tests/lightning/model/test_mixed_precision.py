"""bf16-mixed by FSDP2: bfloat16 activations; float32 weights, gradients, optimizer states, loss."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import token_mean
from lightning_cp.fsdp import sharding
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment, full

TOKENS = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


class Module(LightningModule):
    """A language model that notes the dtypes of what it computes."""

    def __init__(self, *, sharded=False):
        super().__init__()
        self.model, self.sharded = llama(), sharded
        self.seen, self.grads = {}, {}

    def configure_model(self):
        if self.sharded:
            fully_shard(self.model, mesh=self.trainer.strategy.shard_mesh)

    def training_step(self, batch, index):
        hook = self.model.model.layers[0].register_forward_hook(
            lambda module, args, out: self.seen.update(residual=out.dtype, autocast=autocast())
        )
        output = self.model(**batch)
        hook.remove()
        frequencies = self.model.model.rotary_emb.inv_freq.dtype
        self.seen |= {"loss": output.loss.dtype, "frequencies": frequencies}
        return output.loss

    def on_before_optimizer_step(self, optimizer):
        self.grads = {name: full(p.grad).clone() for name, p in self.model.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def autocast():
    return torch.is_autocast_enabled("cpu")


def batches():
    return DataLoader([{"input_ids": x, "labels": x} for x in TOKENS], batch_size=4)


def run(path, mixed):
    with elastic_environment():
        module = Module()
        trainer = build_trainer(
            strategy=doors.strategy(
                mixed_precision=mixed, save_distributed_checkpoint=False, verify_steps=False
            ),
            precision="bf16-mixed",
            max_steps=1,
        )
        trainer.fit(module, batches())
        trainer.save_checkpoint(path / f"{mixed}.ckpt")
        parameters = {p.dtype for p in module.parameters()}
        states = {x.dtype for state in trainer.optimizers[0].state.values() for x in state.values()}
        return module.seen, module.grads, parameters, states


def error(grads, exact):
    difference = sum((grads[name].double() - x).square().sum() for name, x in exact.items())
    return float((difference / sum(x.square().sum() for x in exact.values())).sqrt())


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_activations_are_bfloat16_and_everything_kept_is_float32(ranks, tmp_path, world_size):
    stock = llama().double()
    stock(input_ids=TOKENS, labels=TOKENS).loss.backward()
    exact = {name: p.grad for name, p in stock.named_parameters()}
    errors = {}
    for mixed in ("autocast", "fsdp"):
        for seen, grads, parameters, states in ranks(world_size).run(run, tmp_path, mixed):
            is_fsdp = mixed == "fsdp"
            assert seen == {
                "residual": torch.bfloat16 if is_fsdp else torch.float32,
                "autocast": not is_fsdp,
                "loss": torch.float32,
                "frequencies": torch.float32,
            }
            assert parameters == states == {torch.float32}
            assert {x.dtype for x in grads.values()} == {torch.float32}
            errors[mixed] = error(grads, exact)
        saved = torch.load(tmp_path / f"{mixed}.ckpt", weights_only=False)["state_dict"]
        assert {x.dtype for x in saved.values()} == {torch.float32}
    assert errors["autocast"] < 0.02
    assert errors["fsdp"] < 2 * errors["autocast"]  # less exact, hence not the default


def test_unknown_and_replicated_are_refused():
    with pytest.raises(ValueError, match="mixed_precision='half'.* is unknown"):
        doors.strategy(mixed_precision="half")
    with pytest.raises(ValueError, match="sharding='none' replicates them"):
        doors.strategy(mixed_precision="fsdp", parameter_sharding="none")


def run_refused(precision, sharded):
    with elastic_environment():
        strategy = doors.strategy(mixed_precision="fsdp")
        trainer = build_trainer(strategy=strategy, precision=precision, max_steps=1)
        trainer.fit(Module(sharded=sharded), batches())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("precision", "sharded", "message"),
    [
        ("32-true", False, "needs Trainer(precision='bf16-mixed')"),
        ("bf16-mixed", True, "configure_model() has sharded the model"),
    ],
)
def test_what_has_another_precision_is_refused(ranks, precision, sharded, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        ranks(1).run(run_refused, precision, sharded)


class Packed(nn.Parameter):
    """Says that its elements are no numbers, as bitsandbytes' Params4bit does."""


class PackedLinear(nn.Module):
    """Holds two weights of one byte in each float16, as quantised layers store them for FSDP."""

    def __init__(self, kind):
        super().__init__()
        codes = torch.randint(-127, 128, (32, 32), dtype=torch.int8).view(torch.float16)
        self.codes = kind(codes, requires_grad=False)
        self.extra = nn.Parameter(torch.randn(32), requires_grad=False)  # ordinary: is cast

    def forward(self, x):
        weight = self.codes.view(torch.int8).to(x.dtype) / 512
        return nn.functional.linear(x, weight) + self.extra.to(x.dtype)


class Quantised(LightningModule):
    def __init__(self, kind=Packed, policy=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.base = nn.Embedding(64, 32), PackedLinear(kind)
        self.head, self.policy, self.losses = nn.Linear(32, 64), policy, []

    def configure_model(self):
        for part in (self.embed, self.base, self.head) if self.policy is not None else ():
            fully_shard(part, mesh=self.trainer.strategy.shard_mesh, mp_policy=self.policy)

    def training_step(self, batch, index):
        loss = token_mean(self.head(self.base(self.embed(batch["input_ids"]))), batch["labels"])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=1.0)


def run_quantised(module, mixed="fsdp", precision="bf16-mixed", keep=True):
    """Train three steps; return the losses and the weights of the embedding, or the error."""
    with elastic_environment(), pytest.MonkeyPatch.context() as patch:
        if not keep:  # what a torch would do that does not know what `keep_packed` relies on
            patch.setattr(sharding, "keep_packed", lambda unit, packed: None)
        strategy = doors.strategy(mixed_precision=mixed)
        trainer = build_trainer(strategy=strategy, precision=precision, max_steps=3)
        try:
            trainer.fit(module, DataLoader([batch for batch in batches() for _ in range(3)], None))
        except (RuntimeError, ValueError) as error:
            return str(error)
        return module.losses, full(module.embed.weight.detach())


def run_packed():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return {
        "fsdp": run_quantised(Quantised()),
        "fsdp, cast anyway": run_quantised(Quantised(), keep=False),
        "fsdp, not said": run_quantised(Quantised(nn.Parameter)),
        "bf16-true": run_quantised(Quantised(), "autocast", "bf16-true"),
        "own policy": run_quantised(Quantised(policy=policy), "autocast", "32-true"),
    }


def train_quantised():
    """Train in plain torch: bfloat16 copies of all numbers, gradients in float32."""
    module = Quantised()
    module.base.extra.data = module.base.extra.data.bfloat16()
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    losses = []
    for _ in range(3):
        copies = {n: p.bfloat16() for n, p in trained.items()}
        hidden = nn.functional.embedding(TOKENS, copies["embed.weight"])
        logits = nn.functional.linear(
            module.base(hidden), copies["head.weight"], copies["head.bias"]
        )
        logits = logits.float()[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten())
        losses.append(float(loss.detach()))
        found = torch.autograd.grad(loss, trained.values())
        for p, gradient in zip(trained.values(), found, strict=True):
            p.data -= gradient
    return losses, module.embed.weight.detach()


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_packed_weights_are_gathered_as_they_are_or_refused_by_all_ranks(ranks, world_size):
    losses, weight = train_quantised()
    for found in ranks(world_size).run(run_packed):
        assert found["fsdp"][0] == pytest.approx(losses, abs=2e-3)
        torch.testing.assert_close(found["fsdp"][1], weight, rtol=0, atol=2e-3)
        dtypes = r"`base.codes` \(float16, gathered as bfloat16\)"
        assert re.search(f"other bytes of the frozen {dtypes}", found["fsdp, cast anyway"])
        for name in ("fsdp, not said", "own policy"):
            assert re.search(f"frozen {dtypes} holds packed bits, it seems", found[name])
            assert "bnb_4bit_quant_storage=torch.uint8" in found[name]
        cast = "precision='bf16-true') has cast the packed weights `base.codes` from torch.float16"
        assert cast in found["bf16-true"]
