"""Multimodal models under context parallelism: loss and every gradient of the stock model.

A subset; `python -m tools.media_report` runs all names.
"""

import pytest
import torch
import torch.distributed as dist

from hf_patches import enable
from hf_patches.support import MULTIMODAL
from tests import doors
from tests.parity import media_zoo, zoo
from tests.parity.broken_media import BREAKS, compare_broken
from tests.parity.media import REFUSED_BATCHES, MediaJob, compare_all

pytestmark = pytest.mark.ranks

# One of each way in which media and text meet.
CLASSES = (
    "llava",  # scattered into the embeddings
    "qwen2_vl",  # 3-D positions
    "qwen3_vl",  # features added in layers
    "gemma3",  # images in both directions
    "gemma3:wide",  # longer than the window
    "paligemma",  # prefix in both directions, positions from 1
    "mllama",  # cross-attention
    "chameleon",  # merged in the decoder
)
SERVED = [name for name, known in MULTIMODAL.items() if known.is_served]


def check(ranks, cp_size, jobs, limit=1e-3, loss_limit=1e-5):
    results = ranks(cp_size).run(compare_all, jobs)[0]
    for job, found in zip(jobs, results, strict=True):
        refusal = REFUSED_BATCHES.get((job.name, job.kind))
        if refusal is not None:
            assert isinstance(found, str), str(job)
            assert refusal in found, str(job)
            continue
        assert not isinstance(found, str), (str(job), found)
        assert abs(found.loss - found.exact_loss) < loss_limit, (str(job), found.loss, found)
        assert found.worst[1] < limit, (str(job), found.worst)


def with_options(name, kind, layout="zigzag", algorithm="gather", **given):
    return MediaJob(name, kind, options=(("layout", layout), ("algorithm", algorithm)), **given)


JOBS = [
    with_options("llava", "right", "balanced"),
    with_options("gemma3", "packed", "contiguous"),
    with_options("mllama", "left"),
    with_options("qwen3_vl_moe:aux", "packed"),
]
OTHERS = [
    with_options("qwen3_vl", "packed"),
    with_options("chameleon", "plain"),
    with_options("llava", "text"),
    with_options("gemma3:wide", "plain"),
]


@pytest.mark.parametrize("jobs", [JOBS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_loss_and_gradients_are_those_of_the_stock_model(ranks, jobs):
    check(ranks, 2, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in media_zoo.ENTRIES if ":" in name])
def test_every_variant_is_exact(ranks, name):
    check(ranks, 2, [MediaJob(name, kind) for kind in ("plain", "packed", "right")])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_in_double_precision_the_algebra_is_exact(ranks, name):
    kinds = ("plain", "left", *(("packed",) if media_zoo.ENTRIES[name].packs else ()))
    jobs = [with_options(name, kind, dtype=torch.float64) for kind in kinds]
    check(ranks, 2, jobs, limit=1e-9, loss_limit=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_layers_may_be_recomputed_in_backward(ranks, name):
    check(ranks, 2, [with_options(name, "left", checkpointing=False)])


@pytest.mark.slow
def test_the_loss_without_all_logits_is_the_same(ranks):
    always = (("chunked_loss", "always"),)
    jobs = [with_options(name, "plain", enabling=always) for name in (*CLASSES, "blip-2")]
    check(ranks, 2, jobs)


def test_every_name_is_served_or_refused_with_a_reason():
    missing = [name for name in media_zoo.names() if name not in MULTIMODAL]
    assert missing == [] or zoo.is_newer_than_the_table()
    assert set(SERVED) == {name for name in media_zoo.ENTRIES if ":" not in name}


def _without(batch, name):
    return {key: x for key, x in batch.items() if key != name}


def _bad_batches():
    """Return bad batches of two ranks, by what is wrong with them; the last one is good."""
    good, _ = media_zoo.build_batches("qwen3_vl", "plain")
    text = torch.where(good["input_ids"] == 3, 30, good["input_ids"])
    is_first, pixels = dist.get_rank() == 0, good["pixel_values"]
    return {
        "no placeholders": {**good, "input_ids": text},
        "no grid": _without(good, "image_grid_thw"),
        "no grid of a video": _without(good, "video_grid_thw"),
        "no types": _without(good, "mm_token_type_ids"),
        "on one rank": good if is_first else _without(good, "pixel_values"),
        "fewer on one rank": good if is_first else {**good, "pixel_values": pixels[:8]},
        "other values": good if is_first else {**good, "pixel_values": pixels + 1},
        "good": good,
    }


def bad_media():
    """Return what each of some bad batches raises on this rank."""
    cp, model = doors.parallel(dist.group.WORLD), media_zoo.build_model("qwen3_vl")
    enable(model)
    found = {}
    for what, batch in _bad_batches().items():
        try:
            with cp.step(batch) as local:
                found[what] = str(model(**local).loss.isfinite().item())
        except (ValueError, TypeError, AttributeError) as error:
            found[what] = " ".join([str(error), *getattr(error, "__notes__", ())])
    return found


BAD = {
    "no placeholders": (
        "Image features and image tokens do not match",
        "Qwen3VLForConditionalGeneration got image_grid_thw, pixel_values",
        "shorten samples before it, so that each feature has its placeholder",
    ),
    "no grid": ("got `pixel_values` without `image_grid_thw`", "its processor returns them"),
    "no grid of a video": ("got `pixel_values_videos` without `video_grid_thw`",),
    "no types": ("`mm_token_type_ids` is missing", "everything that its processor returns"),
    "on one rank": ("must hold the same batch, but rank 1 and rank 0 differ in their shapes",),
    "fewer on one rank": (
        "must hold the same batch, but rank 1 and rank 0 differ in their shapes",
    ),
    "other values": ("must hold the same batch, but rank 1 and rank 0 differ in their values",),
    "good": ("True",),  # after bad ones
}


def test_bad_media_raise_on_all_ranks(ranks):
    for found in ranks(2).run(bad_media):
        assert found.keys() == BAD.keys()
        for what, texts in BAD.items():
            assert all(text in found[what] for text in texts), (what, found[what])


QUICK = (
    "positions one off after an image",
    "features on the wrong sample",
    "vision gradients counted by every rank",
    "a block cut at the border of a rank",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [what if what in QUICK else pytest.param(what, marks=pytest.mark.slow) for what in BREAKS],
)
def test_the_suite_notices(ranks, what):
    found = ranks(2).run(compare_broken, what)[0]
    assert found.worst[1] > 1e-2, found.worst
