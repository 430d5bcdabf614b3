"""Memory: bytes of a real layer on a CPU, peaks measured on an H200, and tables of longest runs."""

import itertools
from dataclasses import replace

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_patches import model_shape
from lightning_cp.planner import KNOWN, Setup
from lightning_cp.planner.memory import (
    COMPILED_LAYER_SAVED,
    OTHER_BYTES,
    STATES,
    plan_memory,
    token_bytes,
)
from lightning_cp.planner.time import plan_time
from tests.planner.live_bytes import measure
from tests.recipes.memory import REAL

_DENSE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
# A prime number of tokens: no activation has the size of a parameter.
NUM_TOKENS = 101
CONFIGS = {
    "llama": (LlamaConfig, {**_DENSE, "intermediate_size": 896}),
    "qwen3": (Qwen3Config, {**_DENSE, "intermediate_size": 768}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            **_DENSE,
            "hidden_size": 128,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            **_DENSE,
            "hidden_size": 192,
            "intermediate_size": 192,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "intermediate_size": 512,
            "first_k_dense_replace": 99,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            **_DENSE,
            "hidden_size": 240,
            "num_attention_heads": 4,
            "head_dim": 64,
            "intermediate_size": 960,
        },
    ),
}


def build(name, num_layers):
    cls, sizes = CONFIGS[name]
    changes = {"num_hidden_layers": num_layers, "vocab_size": 64, "use_cache": False}
    if name in ("gpt_oss", "gemma3"):
        changes["layer_types"] = ["full_attention"] * num_layers
    return cls(**sizes, **changes)


def each(names, quick):
    """Return the names with either precision, of which some are measured in each run."""
    for name, mixed in itertools.product(names, (False, True)):
        marks = () if (name, mixed) in quick else pytest.mark.slow
        label = f"{name}-{'bf16-mixed' if mixed else 'bf16-true'}"
        yield pytest.param(name, mixed, marks=marks, id=label)


PLAIN = {(name, at % 2 == 1) for at, name in enumerate(CONFIGS) if at % 4 == 1}


@pytest.mark.parametrize(("name", "mixed"), list(each(CONFIGS, PLAIN)))
def test_bytes_of_a_layer_are_those_of_hugging_face(name, mixed):
    setup = Setup(4096, 1, precision="bf16-mixed" if mixed else "bf16-true")
    shape = model_shape(build(name, 2))
    told = token_bytes(shape.layers[0], shape.hidden, setup)
    plain, recomputed = (
        [
            measure(build(name, n), num_tokens=NUM_TOKENS, checkpointing=checkpointing, mixed=mixed)
            for n in (1, 2)
        ]
        for checkpointing in (False, True)
    )
    assert told.saved == pytest.approx(plain[1].after - plain[0].after, rel=0.05)
    assert told.checkpoint == pytest.approx(recomputed[1].after - recomputed[0].after, rel=0.01)
    # What the peak adds to the checkpoints: the layer that is recomputed.
    assert told.mlp == pytest.approx(recomputed[1].peak - 2 * told.checkpoint, rel=0.07)


MEASURED = [
    # GB of max_memory_allocated on one H200, bf16-mixed, logits in chunks of 256 MiB
    # as listed in tests/recipes/memory.py
    ("meta-llama/Llama-3.1-8B", 4, 0, 16384, 43.5),
    ("meta-llama/Llama-3.1-8B", 8, 64, 16384, 15.5),
    ("meta-llama/Llama-3.1-8B", 8, 64, 65536, 35.7),
    ("Qwen/Qwen3-8B", 8, 0, 32768, 63.6),
    ("Qwen/Qwen3-30B-A3B-Base", 4, 0, 16384, 62.5),
    ("google/gemma-3-12b-pt", 6, 0, 16384, 57.3),
    ("openai/gpt-oss-20b", 6, 32, 32768, 29.3),
]


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_peaks_are_those_of_an_h200(row):
    name, num_layers, rank, seq_len, measured = row
    shape = model_shape(REAL[name])
    shape = replace(shape, layers=shape.layers[:num_layers])
    setup = Setup(seq_len, 1, lora_rank=rank, chunk_logits=2**26, accumulates=False)
    told = plan_memory(shape, setup).peak - OTHER_BYTES
    is_routed = "oss" in name or "A3B" in name
    assert told / 1e9 == pytest.approx(measured, rel=0.08 if is_routed else 0.05)


@pytest.mark.parametrize(
    ("seq_len", "checkpointing", "measured"),
    [
        # benchmarks/results/training_gpu_h200_202611.jsonl: peak of a step beyond the weights
        (32768, "none", 7.0857),
        (32768, "full", 5.5075),
        (131072, "none", 12.5317),
        (131072, "full", 6.2190),
    ],
)
def test_activations_are_those_of_a_rank_of_8(seq_len, checkpointing, measured):
    model = KNOWN["llama-8b"]
    model = replace(model, layers=model.layers[:2])
    setup = Setup(seq_len, 8, precision="bf16-true", checkpointing=checkpointing)
    assert peak_of_step(plan_memory(model, setup)) / 1e9 == pytest.approx(measured, rel=0.02)


def peak_of_step(plan):
    """Return the peak without weights and what is sharded, which the emulated rank has in full."""
    names = ("checkpoints", "kept attention", "saved activations", "one layer", "loss")
    return max(
        sum(parts[name] for name in (*names, "attention buffers"))
        for parts in plan.moments.values()
    )


@pytest.mark.parametrize(
    ("seq_len", "num_checkpointed", "measured"),
    [
        # benchmarks/results/step_h200_202611.md: GiB of a step beyond the weights. MLPs and norms
        # alone were compiled then, which saves less.
        (131072, 0, 73.4),
        (131072, 14, 47.1),
        (131072, 16, 43.4),
        (262144, 8, 111.8),
        (262144, 16, 81.8),
    ],
)
def test_activations_of_some_checkpointed_layers_are_those_of_a_rank_of_8(
    seq_len, num_checkpointed, measured
):
    setup = Setup(
        seq_len,
        8,
        precision="bf16-true",
        checkpointing="keep" if num_checkpointed else "none",
        checkpointed_layers=num_checkpointed,
        compiled=True,
    )
    model = KNOWN["llama-8b"]
    saved = COMPILED_LAYER_SAVED * model.hidden * (32 - num_checkpointed) * seq_len // 8
    planned = peak_of_step(plan_memory(model, setup)) - saved
    assert planned / 2**30 == pytest.approx(measured, rel=0.02)


def test_some_checkpointed_layers_are_between_all_and_none():
    model, setup = KNOWN["llama-8b"], Setup(131072, 8, precision="bf16-true")
    numbers = range(1, len(model.layers))
    some = [plan_memory(model, replace(setup, checkpointed_layers=n)) for n in numbers]
    none = plan_memory(model, replace(setup, checkpointing="none"))
    peaks = [none.peak, *(plan.peak for plan in some)]
    assert peaks == sorted(peaks, reverse=True)
    # While the last layer is computed, what it has saved is there anyway.
    full = plan_memory(model, setup).moments["backward, MLP"]
    last = some[-1].moments["backward, MLP"]
    assert sum(last.values()) < sum(full.values())
    times = [plan_time(model, replace(setup, checkpointed_layers=n)) for n in (8, 24)]
    steps = [plan_time(model, replace(setup, checkpointing="none")), *times]
    steps.append(plan_time(model, setup))
    seconds = [plan.step for plan in steps]
    assert seconds == sorted(seconds)
    assert times[0].seconds["recomputed layers"] == pytest.approx(
        steps[-1].seconds["recomputed layers"] / 4
    )


def test_wrong_numbers_of_checkpointed_layers_are_refused():
    with pytest.raises(ValueError, match="checkpointed_layers=3 with checkpointing='none'. Give"):
        Setup(1024, 2, checkpointing="none", checkpointed_layers=3)
    with pytest.raises(ValueError, match="checkpointed_layers=-1: give 0 or more"):
        Setup(1024, 2, checkpointed_layers=-1)
    with pytest.raises(ValueError, match="checkpointed_layers=33: the model has 32 layers. Give"):
        plan_memory(KNOWN["llama-8b"], Setup(1024, 2, checkpointed_layers=33))


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True], ids=["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3"])
def test_bytes_of_a_tiled_layer_are_those_of_hugging_face(name, mixed):
    setup = Setup(4096, 1, precision="bf16-mixed" if mixed else "bf16-true", tiles=16)
    shape = model_shape(build(name, 1))
    told = token_bytes(shape.layers[0], shape.hidden, setup)
    saved = [
        measure(
            build(name, n),
            num_tokens=NUM_TOKENS,
            checkpointing=False,
            mixed=mixed,
            tile_tokens=NUM_TOKENS // 16,
        ).after
        for n in (1, 2)
    ]
    assert told.saved == pytest.approx(saved[1] - saved[0], rel=0.12)
    measured = measure(
        build(name, 1), num_tokens=509, checkpointing=True, mixed=mixed, tile_tokens=32,
        keep_attention="all",
    )  # fmt: skip
    held = told.checkpoint + told.kept
    held += 2 * (4 if mixed else 2) * shape.layers[0].head_dim  # cos and sin
    assert told.mlp == pytest.approx(measured.peak - held, rel=0.12)


def test_a_tiled_layer_of_llama_8b_takes_67_kib():
    model = KNOWN["llama-8b"]
    setup = Setup(2**17, 8, precision="bf16-true", tiles=16)
    sizes = token_bytes(model.layers[0], model.hidden, setup)
    assert sizes.mlp / 1024 == pytest.approx(67, rel=0.01)


def test_parts_add_up_and_grow_with_the_sequence():
    model = KNOWN["llama-8b"]
    short, long = (plan_memory(model, Setup(n, 8)) for n in (2**17, 2**20))
    assert short.peak == pytest.approx(sum(short.parts.values()))
    assert long.parts["checkpoints"] == 8 * short.parts["checkpoints"]
    assert long.parts["weights"] == short.parts["weights"] == 4 * model.num_params / 8


def test_replicated_parameters_are_not_divided():
    model = KNOWN["llama-8b"]
    replicated = plan_memory(model, Setup(2**17, 8, sharding="none"))
    parts = replicated.parts
    casts = STATES["bf16-mixed"].cast * model.largest_layer
    assert replicated.moments["backward, MLP"]["gathered parameters"] == casts
    assert parts["weights"] == 4 * model.num_params


def test_checkpoints_take_twice_the_memory_under_autocast():
    model = KNOWN["llama-8b"]
    true, mixed, lora = (
        plan_memory(model, setup).parts["checkpoints"]
        for setup in (
            Setup(2**17, 8, precision="bf16-true"),
            Setup(2**17, 8),
            Setup(2**17, 8, lora_rank=8),
        )
    )
    assert mixed == 2 * true == 2 * lora


def test_offloaded_tensors_are_on_the_host():
    model = KNOWN["llama-8b"]
    kept = plan_memory(model, Setup(2**20, 8, checkpointing="keep", precision="bf16-true"))
    moved = plan_memory(
        model, Setup(2**20, 8, checkpointing="keep", offload="all", precision="bf16-true")
    )
    # Without what attention of the last layer keeps: that is a part of "one layer".
    stash = kept.parts["checkpoints"] + kept.parts["kept attention"] * 32 / 31
    assert moved.host == pytest.approx(8 * stash)
    alone = plan_memory(model, Setup(2**20, 8, offload="all", precision="bf16-true"))
    assert alone.host == pytest.approx(8 * kept.parts["checkpoints"])
    assert moved.parts["checkpoints"] == pytest.approx(kept.parts["checkpoints"] * 3 / 32)


def test_parameters_in_host_memory_leave_the_gpu_and_cost_time():
    model, setup = KNOWN["llama-8b"], Setup(2**15, 8)
    offloaded = replace(setup, parameter_offload=True)
    plan, moved = plan_memory(model, setup), plan_memory(model, offloaded)
    for part in ("weights", "gradients", "optimizer"):
        assert moved.parts[part] == 0 < plan.parts[part]
    assert moved.host_parameters == pytest.approx(16 * model.num_params)
    assert plan.peak - moved.peak == pytest.approx(16 * model.num_params / 8, rel=0.1)
    first, second = plan_time(model, setup), plan_time(model, offloaded)
    assert second.seconds["optimizer"] > 100 * first.seconds["optimizer"]
    assert second.seconds["waiting for links"] > first.seconds["waiting for links"]
