"""Towers of models with media: each rank computes some items, and gets the features of all."""

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from hf_patches import enable
from hf_patches.multimodal import outer, sharing
from hf_patches.multimodal.table import MERGE_SHARDS, UNITS
from hf_patches.support import MULTIMODAL
from lightning_cp.step import active_step
from tests.parity import media_zoo
from tests.parity.hf import build_cp, errors
from tests.ranks import average_over_ranks

# By unit: a model, the module of its tower, and the dim 0 of what that module gets.
TOWERS = {
    "frames": ("qwen3_vl", "model.visual"),
    "grids": ("glm4v", "model.visual"),
    "items": ("llava", "model.vision_tower"),
    "clips": ("voxtral", "model.audio_tower"),
}


def test_ranges_cover_all_units_and_have_about_equal_costs():
    rng = np.random.default_rng(0)
    for _ in range(200):
        costs, num_ranks = rng.integers(1, 50, rng.integers(1, 30)), int(rng.integers(1, 9))
        ranges = sharing.deal(costs, num_ranks)
        assert [i for r in ranges for i in range(*r)] == list(range(len(costs)))
        loads = [costs[r.start : r.stop].sum() for r in ranges]
        assert max(loads) <= costs.sum() / num_ranks + costs.max()


def test_units_are_those_of_served_types():
    named = " ".join(UNITS.values()).split()
    assert len(named) == len(set(named))
    assert all(MULTIMODAL[name].is_served for name in (*named, *MERGE_SHARDS.split()))


def count_tower(name, path, kind, *, training=False, freeze=False):
    """Return what a tower gets on this rank, in its calls, and whether features have gradients."""
    cp, model = build_cp(), media_zoo.build_model(name)
    model.train(training)
    batch, _ = media_zoo.build_batches(name, kind)
    enable(model)
    sizes = []
    tower = model.get_submodule(path)
    tower.requires_grad_(not freeze)
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    with cp.step(batch) as local:
        model(**local).loss.backward()
    return sizes, [p.grad is not None for p in tower.parameters()]


def count_all():
    found = {unit: count_tower(*tower, "plain") for unit, tower in TOWERS.items()}
    found["batch norm"] = count_tower("granite_speech", "model.encoder", "plain", training=True)
    found["frozen"] = count_tower("llava", "model.vision_tower", "plain", freeze=True)
    return found


def test_each_rank_computes_some_items(ranks):
    results = ranks(2).run(count_all)
    # 16 patches of an image; 48 and 32 of videos with three and two frames.
    sizes = [found["frames"][0] for found in results]
    assert [sum(calls) for calls in zip(*sizes, strict=True)][-1] == 80
    assert all(0 < calls[-1] < 80 for calls in sizes)
    totals = {"grids": 56, "items": 3, "clips": 3}
    for unit, total in totals.items():
        parts = [found[unit][0][0] for found in results]
        assert sum(parts) == total, (unit, parts)
        assert min(parts) > 0, (unit, parts)
    for found in results:
        assert found["batch norm"][0] == [3]  # statistics of all clips
        assert not any(found["frozen"][1])
        assert all(any(found[unit][1]) for unit in ("frames", "grids", "items"))


def no_items():
    """Return the gradients of a tower on a rank that has no item, and the size of its call."""
    cp, model = build_cp(), media_zoo.build_model("llava")
    enable(model)
    tokens = torch.tensor([[30, *[3] * 16, 31, 32, 33, 34]])
    batch = {"input_ids": tokens, "labels": tokens, "pixel_values": torch.randn(1, 3, 32, 32)}
    sizes = []
    tower = model.model.vision_tower
    tower.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len((*args, *kwargs.values())[0])), with_kwargs=True
    )
    with cp.step(batch) as local:
        model(**local).loss.backward()
    return sizes, max(p.grad.abs().max().item() for p in tower.parameters() if p.grad is not None)


def test_a_rank_without_items_runs_the_tower_all_the_same(ranks):
    """Layers that FSDP2 shards are gathered by all ranks together."""
    found = ranks(3).run(no_items)
    assert [sizes for sizes, _ in found] == [[1], [1], [1]]
    assert sorted(largest > 0 for _, largest in found) == [False, False, True]


IMAGES, PATCHES = torch.zeros(4, 3, 8, 8), torch.zeros(32, 4)
GRID = {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
# Arguments of a tower's method beside its pixels, and whether each rank computes some items.
CALLS = [
    ("items", IMAGES, {}, True),
    ("items", IMAGES, {"vision_feature_layers": [-2, -1]}, True),
    ("items", IMAGES, {"image_sizes": [[8, 8]] * 4}, False),
    ("items", IMAGES, {"batch_num_images": torch.tensor([2, 1, 1, 0])}, False),
    ("items", IMAGES, {"input_ids": torch.zeros(4, 5)}, False),
    ("items", IMAGES, {"image_sizes": torch.zeros(2, 2)}, False),
    ("grids", PATCHES, GRID, True),
    ("grids", PATCHES[:8], GRID, False),
    ("grids", PATCHES, {"image_grid_thw": GRID["image_grid_thw"][:0]}, False),
    ("grids", PATCHES, {}, False),
]


def count_given():
    """Return how many of the pixels of each call the stock method gets on this rank."""
    cp, sizes = build_cp(), []

    def method(pixel_values, **kwargs):
        sizes.append(len(pixel_values))
        return BaseModelOutput(last_hidden_state=pixel_values.flatten(1))

    with cp.step({"input_ids": torch.arange(8)[None]}):
        for unit, pixels, others, _ in CALLS:

            def features(unit=unit, **given):
                call = "get_image_features", unit, nn.Linear(1, 1), method
                return sharing.shared_features(*call, **given)

            given = {"pixel_values": pixels, **others}
            outer.run(features, given, active_step.current(), frozenset())
    return sizes


def test_what_is_not_one_per_item_is_not_cut(ranks):
    for sizes in ranks(2).run(count_given):
        for size, (_, pixels, others, is_cut) in zip(sizes, CALLS, strict=True):
            assert size == (len(pixels) // 2 if is_cut else len(pixels)), others


def bad_and_given_items():
    """Return what a bad item raises, and the loss of features that the user has computed."""
    cp, model = build_cp(), media_zoo.build_model("lfm2_vl")
    batch, _ = media_zoo.build_batches("lfm2_vl", "plain")
    enable(model)
    batch["spatial_shapes"][-1] = torch.tensor([1, 7])
    said = ""
    try:
        with cp.step(batch) as local:
            model(**local)
    except (ValueError, RuntimeError) as error:
        said = str(error)
    model = media_zoo.build_model("qwen3_vl")
    batch, stock = media_zoo.build_batches("qwen3_vl", "plain")
    for name in ("pixel_values_videos", "video_grid_thw"):
        del batch[name], stock[name]
    ids = batch["input_ids"]
    batch["input_ids"] = stock["input_ids"] = torch.where(ids == 4, 30, ids)
    types = batch["mm_token_type_ids"]
    batch["mm_token_type_ids"] = stock["mm_token_type_ids"] = torch.where(types == 2, 0, types)
    features = model.model.get_image_features(
        stock.pop("pixel_values"), stock["image_grid_thw"], return_dict=True
    )
    del batch["pixel_values"]
    expected = model(**stock, mm_encoder_outputs={"image": features}).loss
    enable(model)
    with cp.step(batch) as local:
        loss = model(**local, mm_encoder_outputs={"image": features}).loss
    return said, abs(float(loss - expected)), audio_of_gemma4(cp)


def audio_of_gemma4(cp):
    """Return the worst error of a gradient, with clips of which two are shorter."""
    stock, model = (media_zoo.build_model("gemma4_unified", dtype=torch.float64) for _ in "ab")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 60, (2, 32), generator=generator)
    ids[:, 3:6] = model.config.audio_token_id
    width = model.model.embed_audio.embedding_projection.in_features
    mask = torch.tensor([[True] * 3 + [False], [True] * 3 + [False]])
    clips = torch.randn(2, 4, width, generator=generator, dtype=torch.float64)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == model.config.audio_token_id).long() * 3,
        "input_features": clips,
        "input_features_mask": mask,
    }
    stock(**batch).loss.backward()
    enable(model)
    with cp.step(batch) as local:
        model(**local).loss.backward()
    used = {name for name, p in stock.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in model.named_parameters() if name in used}
    average_over_ranks(list(found.values()))
    exact = {name: p.grad for name, p in stock.named_parameters() if name in used}
    return max(errors(found, exact).values())


def test_bad_items_given_features_and_clips_with_masks(ranks):
    found = ranks(2).run(bad_and_given_items)
    texts = [text for text, *_ in found]
    assert all(texts)
    assert any("could not compute the media of another rank" in text for text in texts)
    for _, distance, worst in found:
        assert distance < 1e-5
        assert worst < 1e-6
