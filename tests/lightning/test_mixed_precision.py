"""bf16-mixed by FSDP2: bfloat16 activations; float32 weights, gradients, optimizer states, loss."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_cp import ContextParallelStrategy
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
            strategy=ContextParallelStrategy(
                mixed_precision=mixed, save_distributed_checkpoint=False
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
@pytest.mark.parametrize("world_size", [1, 2])
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
    with pytest.raises(ValueError, match="mixed_precision='half' is unknown"):
        ContextParallelStrategy(mixed_precision="half")
    with pytest.raises(ValueError, match="parameter_sharding='none' replicates them"):
        ContextParallelStrategy(mixed_precision="fsdp", parameter_sharding="none")


def run_refused(precision, sharded):
    with elastic_environment():
        strategy = ContextParallelStrategy(mixed_precision="fsdp")
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
