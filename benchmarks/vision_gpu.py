# SPDX-License-Identifier: Apache-2.0
"""`python3 -m benchmarks.vision_gpu [--only NAME ...] [--out DIR]`: images and video.

The tower of a Qwen3-VL of 8B's shape on a video of 64 frames, forward and backward: as one rank of
4 on one GPU (`emulate.py`), which computes its share and gets the features of all, and on all
frames without context parallelism, divided by 4. Then the memory of a step with a long video, its
tower frozen: merged as this rank's shard, and merged as full sequences first.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.emulate import emulated_parallel
from benchmarks.measure import Records, describe, peak_memory, timed
from hf_patches import enable
from hf_patches.multimodal.table import Media
from lightning_cp.step import active_step

VIDEO, TEXT = 60, 8
"""The placeholder of videos, and the tokens of text before each pair of frames."""


@dataclass(frozen=True)
class Sizes:
    """Shapes of the model.

    Args:
        text: of the text config.
        vision: of the vision config.
        side: patches along each side of a frame.
        frame_pairs: entries of the grid of the video whose tower is timed: pairs of frames.
        lengths: tokens of the long videos.
        dtype: of the weights.
    """

    text: dict[str, Any]
    vision: dict[str, Any]
    side: int
    frame_pairs: int
    lengths: tuple[int, ...]
    dtype: torch.dtype

    def build(self, device: torch.device) -> Qwen3VLForConditionalGeneration:
        """Build the model with its weights on the device."""
        tokens: dict[str, Any] = {"image_token_id": 61, "video_token_id": VIDEO}
        config = Qwen3VLConfig(text_config=self.text, vision_config=self.vision, **tokens)
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3VLForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        model.train()
        return model

    def pixels(self, frame_pairs: int, device: torch.device) -> dict[str, Tensor]:
        """Return a video of noise."""
        grid = torch.tensor([[frame_pairs, self.side, self.side]], device=device)
        patches = frame_pairs * self.side**2
        width = 3 * 2 * self.vision["patch_size"] ** 2
        noise = torch.randn(patches, width, dtype=self.dtype, device=device)
        return {"pixel_values_videos": noise, "video_grid_thw": grid}

    @property
    def frame_tokens(self) -> int:
        """Return the tokens of a pair of frames."""
        return self.side**2 // 4


LARGE = Sizes(
    text={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
        "max_position_embeddings": 1 << 20,
    },
    vision={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    side=48,
    frame_pairs=32,
    lengths=(131_072, 262_144, 524_288),
    dtype=torch.bfloat16,
)
TINY = Sizes(
    text={
        **LARGE.text,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
    },
    vision={
        **LARGE.vision,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "deepstack_visual_indexes": [0, 1],
    },
    side=4,
    frame_pairs=8,
    lengths=(256,),
    dtype=torch.float32,
)


def time_tower(sizes: Sizes, device: torch.device, records: Records) -> None:
    """Print time and memory of the tower: all frames, and a rank's share."""
    num_ranks = 4
    model = sizes.build(device)
    video = sizes.pixels(sizes.frame_pairs, device)
    ids = torch.full((1, sizes.frame_pairs * sizes.frame_tokens), VIDEO, device=device)
    batch = {"input_ids": ids, "labels": ids}

    def call() -> None:
        output = model.model.get_video_features(**video, return_dict=True)
        levels = (output.pooler_output, *output.deepstack_features)
        rows = (x if isinstance(x, Tensor) else torch.cat(tuple(x)) for x in levels)
        torch.stack([x.float().mean() for x in rows]).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None

    full = timed(call, device, repeats=5), peak_memory(call, device)
    cp = emulated_parallel(1, num_ranks)
    handle = enable(model)

    def shared() -> None:
        with cp.step(batch):
            active_step.declare_full_sequences(1)
            call()
            active_step.declare_full_sequences(-1)

    rank = timed(shared, device, repeats=5), peak_memory(shared, device)
    handle.undo()
    weights = sum(p.nbytes for p in model.parameters())
    share = full[0] / num_ranks / rank[0]
    memory = (rank[1] - weights) / (full[1] - weights)
    print(
        f"tower, {2 * sizes.frame_pairs} frames of {sizes.side**2} patches: all frames "
        f"{full[0]:.1f} ms, rank of {num_ranks} {rank[0]:.1f} ms; (all / {num_ranks}) / rank "
        f"{share:.3f}; peak {full[1] / 1e9:.2f} GB, {rank[1] / 1e9:.2f} GB, without weights "
        f"{memory:.3f} of all",
        flush=True,
    )
    records.add(what="tower", full_ms=full[0], rank_ms=rank[0], share=share, memory=memory)


def time_long(sizes: Sizes, device: torch.device, records: Records) -> None:
    """Print time and memory of steps with a long video, its tower frozen, as a rank of 8."""
    num_ranks = 8
    model = sizes.build(device)
    model.model.visual.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    print("\n| tokens | merged | step, ms | peak, GB |\n|---|---|---|---|", flush=True)
    for length in sizes.lengths:
        # As many for each rank: emulated ranks compute what this one does.
        pairs = length // (sizes.frame_tokens + TEXT) // num_ranks * num_ranks
        ids = torch.full((1, length), 5, device=device)
        frames = ids[0, : pairs * (sizes.frame_tokens + TEXT)].view(pairs, -1)
        frames[:, TEXT:] = VIDEO  # after their time, as text
        batch = {
            "input_ids": ids,
            "labels": torch.where(ids == VIDEO, -100, ids),
            "mm_token_type_ids": torch.where(ids == VIDEO, 2, 0),
            **sizes.pixels(pairs, device),
        }
        for merged in ("shard", "full"):
            cp = emulated_parallel(4, num_ranks)
            handle = enable(model)
            enabled: Any = model.__dict__["_lightning_cp"]
            enabled.media = Media(unit="frames", merges_shards=merged == "shard")

            def call(cp: Any = cp, batch: dict[str, Tensor] = batch) -> None:
                with cp.step(batch) as local:
                    model(**local).loss.backward()
                for parameter in model.parameters():
                    parameter.grad = None

            spent = _measure(call, device)
            handle.undo()
            cells = spent if isinstance(spent, str) else f"{spent[0]:.0f} | {spent[1] / 1e9:.2f}"
            print(f"| {length:,} | {merged} | {cells} |", flush=True)
            records.add(what="long", length=length, merged=merged, spent=spent)
        del batch, ids, frames


def _measure(call: Callable[[], None], device: torch.device) -> tuple[float, int] | str:
    """Return milliseconds and peak bytes, or why there are none."""
    try:
        return timed(call, device), peak_memory(call, device)
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0][:80]


PARTS = {"tower": time_tower, "long": time_long}


def run(parts: Sequence[str], sizes: Sizes, device: torch.device, out: Path | None) -> None:
    """Measure some parts."""
    where = describe(device)
    records = Records(out, "vision_gpu", where)
    print(", ".join(f"{key} {value}" for key, value in where.items()) + ".\n", flush=True)
    for part in parts:
        PARTS[part](sizes, device, records)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.vision_gpu")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON lines")
    parser.add_argument("--tiny", action="store_true", help="a small model, on a CPU")
    given = parser.parse_args(arguments)
    device = torch.device("cpu" if given.tiny else "cuda")
    run(given.only, TINY if given.tiny else LARGE, device, given.out)


if __name__ == "__main__":
    main()
