"""Models with images, video and audio on NCCL ranks: towers shared, and one long step in bf16."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from hf_patches import enable
from tests.oracle import errors
from tests.parity import media_zoo
from tests.parity.hf import build_cp
from tests.parity.media import MediaJob, compare_all
from tests.ranks import average_over_ranks

pytestmark = pytest.mark.gpu

NAMES = ("llava", "qwen2_vl", "qwen3_vl", "gemma3", "mllama", "voxtral", "chameleon", "qwen3_5")
IMAGE = 31_999


def compare_in_float32(jobs):
    torch.backends.cudnn.allow_tf32 = False  # the default of convolutions, which patches are
    return compare_all(jobs)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_process(nccl, name):
    try:
        media_zoo.build_batches(name, "plain")
    except (KeyError, AttributeError, ValueError) as error:
        pytest.skip(f"not in this version of transformers: {error}")
    kinds = ("packed", "right") if media_zoo.ENTRIES[name].packs else ("left", "right")
    jobs = [
        MediaJob(name, kinds[0], device="cuda"),
        MediaJob(name, kinds[1], device="cuda", checkpointing=False),
    ]
    for job, found in zip(jobs, nccl(2).run(compare_in_float32, jobs)[0], strict=True):
        assert not isinstance(found, str), (job, found)
        assert abs(found.loss - found.exact_loss) < 1e-4, job
        assert found.worst[1] < 2e-3, (job, found.worst)


# ---------------------------------------------------------------- a long step


def build_long(dtype: torch.dtype) -> Qwen3VLForConditionalGeneration:
    """Return a model with two decoder layers and a small tower, weights on the GPU."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
            "max_position_embeddings": 1 << 17,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": 1024,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    return model.to("cuda", dtype).eval()


def long_batch(dtype: torch.dtype) -> dict[str, Any]:
    """Return 65,536 tokens with 40 images of 576 to 1,600 tokens."""
    generator = torch.Generator().manual_seed(3)
    ids, types, grids = [], [], []
    for number in range(40):
        side = 48 + 4 * (number % 9)
        text = torch.randint(1000, 31_000, (100 + 17 * number,), generator=generator)
        num_tokens = side * side // 4
        ids += [text, torch.full((num_tokens,), IMAGE)]
        types += [torch.zeros_like(text), torch.ones(num_tokens, dtype=torch.long)]
        grids.append([1, side, side])
    tokens, kinds = torch.cat(ids), torch.cat(types)
    rest = torch.randint(1000, 31_000, (65_536 - len(tokens),), generator=generator)
    tokens, kinds = torch.cat([tokens, rest]), torch.cat([kinds, torch.zeros_like(rest)])
    grid = torch.tensor(grids)
    pixels = torch.randn(int(grid.prod(1).sum()), 1536, generator=generator)
    return {
        "input_ids": tokens[None].cuda(),
        "labels": torch.where(kinds == 1, -100, tokens)[None].cuda(),
        "mm_token_type_ids": kinds[None].int().cuda(),
        "pixel_values": pixels.to("cuda", dtype),
        "image_grid_thw": grid.cuda(),
    }


def step_of_long(dtype: torch.dtype, *, sharded: bool) -> dict[str, torch.Tensor]:
    """Return loss and gradients of one step, averaged over ranks."""
    model, batch = build_long(dtype), long_batch(dtype)
    if not sharded:
        loss = model(**batch).loss
    else:
        cp = build_cp()
        enable(model)
        with cp.step(batch) as local:
            loss = model(**local).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if sharded:
        average_over_ranks(list(found.values()))
    return {"loss": loss.detach().cpu(), **{name: x.cpu() for name, x in found.items()}}


def long_step() -> dict[str, torch.Tensor] | None:
    found = step_of_long(torch.bfloat16, sharded=True)
    return found if dist.get_rank() == 0 else None


def test_a_step_of_64k_tokens_with_images_is_that_of_one_device(nccl):
    found = nccl(2).run(long_step, timeout=300)[0]
    assert found is not None
    same = step_of_long(torch.bfloat16, sharded=False)
    exact = step_of_long(torch.float32, sharded=False)
    ours, theirs = errors(found, exact), errors(same, exact)
    for name in exact:
        assert ours[name] <= 2 * theirs[name] + 4 * 2**-8, (name, ours[name], theirs[name])
