"""Models with images, video or audio, trained through the strategy: the curves of one process."""

from dataclasses import replace

import pytest

from tests.hf_patches.multimodal.media_training import (
    Training,
    differences,
    evaluate,
    evaluate_alone,
    real_logits,
    refusal,
    train,
    train_alone,
)
from tests.hf_patches.trainers import trainer_jobs
from tests.hf_patches.trainers.test_trainer_matrix import covering

pytestmark = pytest.mark.ranks

MODELS = ("qwen3_vl", "gemma3", "llava", "voxtral")
LIMIT = 1e-10


def check(ranks, cp_size, job):
    exact = train_alone(job)
    half = len(exact[0]) // 2
    assert sum(exact[0][half:]) < sum(exact[0][:half])
    for found in ranks(job.dp_size * cp_size).run(train, job):
        losses, (weights, name) = differences(found, exact)
        assert losses < LIMIT
        assert weights < LIMIT, name


@pytest.mark.slow
def test_a_few_steps_equal_those_of_one_process(ranks):
    kinds = ("packed", "text")
    check(ranks, 2, Training("llava", checkpointing=True, kinds=kinds, epochs=1, max_len=2048))


SETTINGS = {
    "model": MODELS,
    "ranks": ((1, 2), (1, 3), (2, 2)),  # data ranks, context ranks
    "trained": ("full", "frozen towers", "lora", "lora everywhere"),
    "weights": ("full", "none"),
    "memory": ("kept", "checkpointing"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", covering(SETTINGS), ids=lambda row: "-".join(map(str, row.values()))
)
def test_thirty_steps_equal_those_of_one_process(ranks, row):
    dp_size, cp_size = row["ranks"]
    job = Training(
        row["model"],
        dp_size,
        row["trained"],
        row["weights"],
        checkpointing=row["memory"] == "checkpointing",
    )
    check(ranks, cp_size, job)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_some_data_ranks_may_have_media_and_others_not(ranks, model):
    check(ranks, 2, Training(model, dp_size=2, weights="none", uneven=True))


@pytest.mark.slow
def test_sharded_towers_are_called_by_all_data_ranks_or_by_none(ranks):
    for kinds in (("plain", "text"), ("text", "plain")):
        job = Training("llava", dp_size=2, uneven=True, kinds=kinds)
        for run in (refusal, refusal_of_validation):
            for said in ranks(4).run(run, job):
                assert "Some data ranks got `pixel_values` in this step and others did" in said


def refusal_of_validation(job):
    return refusal(job, validates=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "other", "cp_size"),
    [
        (Training("qwen3_vl"), {}, 3),
        (Training("llava", trained="lora everywhere"), {"weights": "none"}, 2),
        (Training("voxtral", trained="frozen towers", weights="none"), {"weights": "full"}, 3),
    ],
    ids=lambda value: getattr(value, "model", str(value)),
)
def test_a_resumed_run_goes_on_as_it_was(ranks, job, other, cp_size, tmp_path):
    path, exact = str(tmp_path / "saved.ckpt"), train_alone(job)
    ranks(2).run(train_and_save, replace(job, epochs=1), path)
    for losses, weights in ranks(cp_size).run(resume, replace(job, **other), path):
        part = exact[0][-len(losses) :]
        assert len(losses) == 2 * job.num_batches
        found, (far, name) = differences((losses, weights), (part, exact[1]))
        assert found < LIMIT
        assert far < LIMIT, name


def train_and_save(job, path):
    train(job, save=path)


def resume(job, path):
    return train(job, resume=path)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_validate_and_predict_return_those_of_one_process(ranks, model):
    job = Training(model)
    exact, reference = evaluate_alone(job)
    given, stock = (job.batches(0, stock=x) for x in (False, True))
    for loss, predicted in ranks(2).run(evaluate, job):
        assert loss == pytest.approx(exact, abs=LIMIT)
        for found, batch, expected, unpacked in zip(
            predicted, given, reference, stock, strict=True
        ):
            expected = real_logits(expected, unpacked)
            assert (real_logits(found, batch) - expected).abs().max() < LIMIT


@pytest.mark.slow
def test_the_trial_run_takes_full_sequences_where_truncation_cuts_media_off(ranks):
    job = Training("llava", kinds=("plain",), epochs=1, strategy={"verify_max_len": 24})
    check(ranks, 2, job)


@pytest.mark.slow
def test_truncation_may_cut_off_media_of_one_data_rank(ranks):
    # 60 tokens hold the batch of the first data rank, and not that of the second.
    job = Training("llava", dp_size=2, uneven=True, kinds=("plain", "packed"), epochs=1)
    check(ranks, 2, replace(job, strategy={"verify_max_len": 60}))


@pytest.mark.slow
def test_a_truncated_first_batch_says_why_it_has_too_few_placeholders(ranks):
    for said in ranks(2).run(refusal, Training("llava", epochs=1, max_len=24)):
        assert "Image features and image tokens do not match" in said
        assert "Sequences were truncated to 24 tokens, which may cut off placeholders" in said


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_first_batch_is_verified(ranks, model):
    for kind in ("packed", "plain", "left"):
        for weights in ("full", "none"):
            job = Training(model, weights=weights, kinds=(kind,), epochs=1, max_len=2048)
            assert ranks(2).run(refusal, job) == ["", ""]


# ---------------------------------------------------------------- transformers' Trainer


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_vl", "llava"])
@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        ("plain text left no_predictions", 2),
        ("plain packed no_predictions", 3),
        ("plain text left fsdp checkpointing no_predictions", 2),
        ("plain left lora no_predictions", 4),
        ("plain left", 2),
    ],
)
def test_a_run_of_the_trainer_is_that_of_fewer_processes(ranks, model, flags, num_ranks):
    size = 2 if num_ranks == 4 else num_ranks
    job = trainer_jobs.Job(size=size, flags=("media", *flags.split()), model=model)
    exact = ranks(num_ranks // size).run(trainer_jobs.train, replace(job, size=0))[0]
    found = ranks(num_ranks).run(trainer_jobs.train, job)[0]
    if "packed" in flags:  # padding is counted too
        found.counts = exact.counts = ()
        for run in (found, exact):
            for entry in run.log:
                entry.pop("num_input_tokens_seen", None)
    largest = trainer_jobs.differences(found, exact)
    assert {name: x for name, x in largest.items() if not x < 2e-6} == {}
    assert "eval_loss" in largest
    assert max(entry["grad_norm"] for entry in exact.log if "grad_norm" in entry) > 0.1
