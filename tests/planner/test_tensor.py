"""Tensor ranks, by numbers that were counted by hand."""

import pytest

from lightning_cp.attn.hardware import Links
from lightning_cp.planner import KNOWN, Setup, plan_run
from lightning_cp.planner.memory import plan_memory, token_bytes
from lightning_cp.planner.time import plan_time

LLAMA = KNOWN["llama-8b"]
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336  # projections and MLP, no norms


def test_a_tensor_rank_has_its_part_of_everything_but_norms():
    part = LLAMA.part(4)
    layer = part.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.inner) == (8, 2, 3584)
    assert layer.num_params == LAYER // 4 + 2 * 4096
    assert part.root_params == 2 * 128_256 * 4096 // 4 + 4096
    assert (part.head_params, part.vocab, part.hidden) == (128_256 * 1024, 32_064, 4096)
    assert LLAMA.part(1) is LLAMA


def test_weights_are_divided_by_tensor_ranks_and_then_sharded():
    setup = Setup(2**17, 32, cp_size=8, tp_size=2, precision="bf16-true")
    assert (setup.data_size, setup.num_shards, setup.num_copies) == (2, 16, 1)
    plan = plan_memory(LLAMA, setup)
    held = 32 * (LAYER // 2 + 8192) + 128_256 * 4096 + 4096
    assert plan.parts["weights"] == 2 * held / 16
    # Hidden states are not divided: 16,384 tokens, 2 bytes of 4,096 numbers in 32 layers.
    moment = next(parts for name, parts in plan.moments.items() if name.startswith("backward"))
    assert moment["checkpoints"] == 32 * 16_384 * 2 * 4096
    hybrid = Setup(2**17, 32, cp_size=8, tp_size=2, sharding="hybrid")
    assert (hybrid.num_shards, hybrid.num_copies) == (4, 4)  # of a node of 8


def test_a_layer_saves_its_part_of_heads_and_mlp():
    setup = Setup(2**17, 16, tp_size=2, precision="bf16-true")
    size = token_bytes(LLAMA.part(2).layers[0], 4096, setup)
    # docs/planning.md: 16d + 4a + 2c + 4H + 8f
    assert size.saved == 16 * 4096 + 4 * 2048 + 2 * 1024 + 4 * 16 + 8 * 7168


@pytest.mark.parametrize(("checkpointing", "sums"), [("none", 4), ("full", 6), ("keep", 6)])
def test_outputs_and_gradients_are_summed_over_tensor_ranks(checkpointing, sums):
    setup = Setup(2**17, 16, tp_size=2, checkpointing=checkpointing)
    plan = plan_time(LLAMA, setup, links=Links())
    # An all-reduce of 2 ranks: each receives as many bytes as it has. Embeddings and head: 2.
    count, size = 32 * sums + 2, 16_384 * 4096 * 2
    assert plan.wire["tensor parallelism"] == count * size
    seconds = count * (size / 400e9 + 15e-6)
    assert plan.seconds["tensor parallelism"] == pytest.approx(seconds)
    assert plan.exposed["tensor parallelism"] == pytest.approx(seconds)
    four = plan_time(LLAMA, Setup(2**17, 32, tp_size=4, checkpointing=checkpointing))
    assert four.wire["tensor parallelism"] == count * size * 1.5  # 2 x 3/4


def test_ranks_of_one_tensor_index_gather_parts_of_the_parameters():
    plan = plan_time(LLAMA, Setup(2**17, 16, tp_size=2, precision="bf16-true"))
    part = LLAMA.part(2)
    layers = part.num_params - part.root_params
    assert plan.wire["parameters"] == pytest.approx(2 * (2 * layers + part.root_params) * 7 / 8)
    # 8 context ranks x 2 tensor ranks are on two nodes, so keys use the network.
    one_node = plan_time(LLAMA, Setup(2**17, 8))
    assert Links().beside(2).collective_gbs(8) == 45 * 4
    assert plan.exposed["keys and values"] > one_node.exposed["keys and values"]
    assert one_node.seconds["tensor parallelism"] == one_node.wire["tensor parallelism"] == 0


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-8b", {"tp_size": 0}, "tp_size=0: give an integer of at least 1"),
        ("llama-8b", {"tp_size": 3}, "tp_size=3 does not divide num_gpus=64. Give a divisor"),
        (
            "llama-8b",
            {"tp_size": 2, "cp_size": 64},
            "num_gpus=64 / tp_size=2",
        ),
        ("llama-8b", {"tp_size": 16}, "tp_size=16 does not divide num_kv_heads=8"),
        ("llama-8b", {"tp_size": 64}, "tp_size=64 does not divide num_heads=32"),
        ("qwen3-30b-a3b", {"tp_size": 2}, "layers with experts, .* one tensor rank only"),
        ("llama-8b", {"tp_size": 2, "lora_rank": 8}, "tp_size=2 with lora_rank=8"),
        ("llama-8b", {"tp_size": 2, "sharding": "none"}, "tp_size=2 with sharding='none'"),
    ],
)
def test_tensor_ranks_that_cannot_divide_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        plan_run(model, seq_len=8192, num_gpus=64, **options)
