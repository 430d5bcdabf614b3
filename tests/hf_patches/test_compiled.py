"""Layers of models compiled by torch.compile: attention is one operator of their graphs.

Eager layers are what compiled ones are compared with; those are proved elsewhere.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_patches import enable
from hf_patches.model import mask_reader
from lightning_cp.attn.operator import mark_mask
from lightning_cp.config import Memory
from lightning_cp.fsdp.sharding import find_blocks
from lightning_cp.lightning.memory import activations
from lightning_cp.lightning.memory.activations import prepare_layers
from lightning_cp.memory import checkpoint_layers
from tests import doors, torch_names

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "use_cache": False,
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    ),
}
LENGTHS = (64, 96, 61)  # compiled for one length, then for any; 61 with padding


@dataclass
class Case:
    """Steps of a model with compiled layers, and of one without.

    Args:
        model: a name of `MODELS`.
        backend: of torch.compile.
        documents: whether sequences are packed.
        checkpointing: whether layers are recomputed.
        fullgraph: whether breaks raise.
        by_strategy: whether layers are compiled as by the strategy, and not by `Module.compile`.
        sharded: whether FSDP2 shards the model, before it is compiled or after.
        leaves_windows: whether windows stay outside of graphs, as on GPUs.
        gives_up: the rank that stops compiling; None for none.
        device: of the models.
        dtype: of the weights.
        options: of the step.
    """

    model: str = "llama"
    backend: str = "aot_eager"
    documents: bool = False
    checkpointing: bool = False
    fullgraph: bool = True
    by_strategy: bool = False
    sharded: str = ""
    leaves_windows: bool = False
    gives_up: int | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        torch.manual_seed(0)
        model = MODELS[self.model]().to(self.device, self.dtype).train()
        enable(model)
        return model

    def compile(self, model: Any) -> None:
        if self.by_strategy:
            prepare_layers(model, Memory(compile="layers"), None, training=True)
            return
        for block in find_blocks(model):
            block.compile(backend=self.backend, fullgraph=self.fullgraph)

    def prepare(self, *, compiled: bool) -> Any:
        model = self.build()
        if compiled and self.sharded != "before":
            self.compile(model)
        if self.sharded:
            mesh = init_device_mesh(self.device, (dist.group.WORLD.size(),))
            for part in (*find_blocks(model), model):
                fully_shard(part, mesh=mesh)
        if compiled and self.sharded == "before":
            self.compile(model)
        if self.checkpointing:
            checkpoint_layers(model)
        return model


def step(model, cp, length, documents):
    """Return the loss and the gradients of this rank."""
    device = next(model.parameters()).device
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(length)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    if documents:
        documents = torch.arange(length, device=device) >= length // 3
        batch["document_ids"] = documents.expand(2, -1).long()
    model.zero_grad()
    with cp.step(batch) as local:
        loss = model(input_ids=local["input_ids"], labels=local["labels"]).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    local = (x.to_local() if isinstance(x, DTensor) else x for x in gradients)
    return [loss.detach(), *(x.clone() for x in local)]


def compare(case, lengths=LENGTHS):
    """Return the largest relative difference of each step, and the numbers of graphs and breaks."""
    torch_names.compile_anew()
    group = dist.group.WORLD if dist.is_initialized() else None
    cp = doors.parallel(group, **case.options)
    plain, ours = case.prepare(compiled=False), case.prepare(compiled=True)
    gives_up = dist.is_initialized() and dist.get_rank() == case.gives_up
    errors = []
    with (
        pytest.MonkeyPatch.context() as patch,
        torch_names.compilations_at_most(1 if gives_up else 8),
    ):
        patch.setattr(activations, "BACKEND", case.backend)
        if case.leaves_windows:
            patch.setattr(mask_reader, "mark_mask", lambda x: x if x.window else mark_mask(x))
        for length in lengths:
            exact = step(plain, cp, length, case.documents)
            found = step(ours, cp, length, case.documents)
            pairs = zip(found, exact, strict=True)
            errors.append(max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs))
    breaks = sum(torch_names.graph_counts()["graph_break"].values())
    return errors, torch_names.num_graphs(), breaks


KEPT = {"keep_attention": "all", "offload": "all"}
CASES = {
    "llama": Case(),
    "a window, by ring": Case("mistral", options={"algorithm": "ring"}),
    "documents": Case(documents=True),
    "recomputed": Case("qwen3", checkpointing=True),
    "kept": Case(checkpointing=True, options={"keep_attention": "all"}),
    "by the strategy": Case("mistral", by_strategy=True),
    "compiled, then sharded": Case(sharded="after", by_strategy=True),
    "sharded, then compiled": Case(sharded="before", by_strategy=True, checkpointing=True),
    "by torch, then sharded": Case(sharded="after"),
    "sharded, then by torch": Case(sharded="before", checkpointing=True),
}


def check_bits(results, lengths):
    for errors, graphs, breaks in results:
        assert errors == [0.0] * len(lengths)
        assert breaks == 0
        assert graphs <= len(lengths)  # the first length, others, and lengths with padding


@pytest.mark.ranks
def test_layers_are_one_graph_with_the_bits_of_eager_ones(ranks):
    case = Case("qwen3", checkpointing=True, by_strategy=True, options=KEPT)
    check_bits(ranks(2).run(compare, case, (61,)), (61,))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_at_every_length(ranks, case):
    check_bits(ranks(2).run(compare, case), LENGTHS)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_stops_compiling_pairs_up_with_others(ranks):
    case = Case("mistral", fullgraph=False, gives_up=1, options={"algorithm": "ring"})
    for errors, *_ in ranks(2).run(compare, case):
        assert errors == [0.0] * len(LENGTHS)


OUTSIDE = {
    "windows": Case(
        "gemma3", fullgraph=False, by_strategy=True, checkpointing=True, leaves_windows=True
    ),
    "ulysses": Case(fullgraph=False, options={"algorithm": "ulysses"}),
    "flex": Case(fullgraph=False, documents=True, options={"kernel": "flex"}),
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_other_ways_stay_outside_of_graphs(ranks, case):
    for errors, _, breaks in ranks(2).run(compare, case, (64, 64)):
        assert max(errors) < 1e-6  # other graphs sum gradients in another order
        assert breaks
