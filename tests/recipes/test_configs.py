"""Every config is read, says what it needs, and trains two steps of a small model of its kind."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml

from recipes.cli import main
from tests.lightning.jobs import elastic_environment
from tests.recipes.memory import compute, describe, job_of
from tests.recipes.shrunken import write_config

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def read(name):
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


KINDS = {
    "meta-llama/Llama-3.1-8B": "llama",
    "meta-llama/Llama-3.1-70B": "llama",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-8B-Base": "qwen3",
    "Qwen/Qwen3-30B-A3B-Base": "qwen3_moe",
    "google/gemma-3-12b-pt": "gemma3",
    "openai/gpt-oss-20b": "gpt_oss",
    "Qwen/Qwen3-VL-8B-Instruct": "tiny-image",  # processors of video need torchvision
}
"""What stands in for a model of the hub."""


def header(name):
    """The comment at the top, as one line."""
    lines = (CONFIGS / f"{name}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") and len(line) <= 100 for line in lines)
    return " ".join(" ".join(line.lstrip("# ") for line in lines).split())


@pytest.mark.parametrize("name", NAMES)
def test_a_header_says_what_the_config_needs(name):
    said, config = header(name), read(name)
    titles = ["Purpose", "Hardware", "Memory", "Measured", "Launch"]
    places = [said.index(f" {title} ") for title in titles]
    assert places == sorted(places)
    devices, nodes = config["trainer"]["devices"], config["trainer"].get("num_nodes", 1)
    path = f"recipes/configs/{name}.yaml"
    if nodes == 1:
        assert f"recipes/launch/one_node.sh {devices} {path}" in said
    else:
        assert f"recipes/launch/several_nodes.sh {nodes} {devices} HOST {path}" in said
        assert f"sbatch --nodes {nodes} recipes/launch/slurm.sbatch {path}" in said


QUICK = ("gpt_oss_20b_lora_128k", "llama31_8b_lora_256k", "qwen3_30b_a3b_128k")


def is_on_hub(name):
    return "/" in (read(name)["model"]["model"] or "")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if is_on_hub(name)
    ],
)
def test_the_memory_in_a_header_is_what_the_arithmetic_gives(name):
    job = job_of(read(name))
    assert f"Memory {describe(job)} Measured nothing at this size." in header(name)
    assert sum(compute(job).values()) < 75


def write_conversations(file):
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]
    with file.open("w") as out:
        for number in range(60):
            out.write(json.dumps({"messages": turns * (1 + number % 3)}) + "\n")


def shrunken_data(kind, folder):
    """What makes the data of a config small."""
    if kind == "PasskeyData":
        return {"data.lengths": [110, 128], "data.train_lengths": [100, 128]}
    packed = {"data.val_fraction": 0.4, "data.cache_dir": folder / "cache"}
    if kind == "ChatData":
        write_conversations(folder / "conversations.jsonl")
        return {"data.source": folder / "conversations.jsonl", "data.seq_len": 512, **packed}
    if kind == "MediaChatData":
        pictures = {"data.source": "null", "data.processor": "null", "data.max_documents": 60}
        return {**pictures, "data.seq_len": 256, **packed}
    return {"data.source": "null", "data.max_documents": 3, **packed}


def shrunken_args(name, folder):
    """What makes a config small, and nothing else: the rest stays as it is written."""
    config = read(name)
    args = ["fit", "--config", str(CONFIGS / f"{name}.yaml")]
    model = config["model"]["model"]
    if KINDS.get(model, model) == "tiny-image":
        args += ["--model.model", "tiny-image"]
    elif model is not None:
        path = write_config(KINDS[model], folder / "model")
        args += ["--model.model", str(path), "--model.random_weights", "true"]
    elif config["model"].get("config"):
        args += ["--model.config", "null"]  # the embedded model as it is
    small = {
        "data.tokenizer": "null",
        "data.seq_len": 128,
        "data.num_workers": 0,
        **shrunken_data(config["data"]["class_path"].split(".")[-1], folder),
        "trainer.accelerator": "cpu",
        "trainer.devices": 2,
        "trainer.num_nodes": 1,
        "trainer.strategy.context_parallel_size": 2,
        "trainer.max_steps": 2,
        "trainer.limit_val_batches": 1,
        "trainer.num_sanity_val_steps": 0,
        "trainer.accumulate_grad_batches": 1,
        "trainer.val_check_interval": 2,
        "trainer.enable_progress_bar": "false",
        "trainer.enable_model_summary": "false",
        "trainer.logger": "lightning.pytorch.loggers.CSVLogger",
        "trainer.logger.save_dir": folder,
        "monitor.every_n_steps": 1,
    }
    return args + [f"--{key}={value}" for key, value in small.items()]


def fit(args, folder):
    with elastic_environment(), contextlib.chdir(folder):
        return main(args), sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_trains_two_steps(name, ranks, tmp_path):
    args = shrunken_args(name, tmp_path)
    for status, _ in ranks(2).run(fit, args, tmp_path):
        assert status == 0
    (metrics,) = tmp_path.rglob("metrics.csv")
    rows = [line.split(",") for line in metrics.read_text().splitlines()]
    column = rows[0].index("train_loss")
    losses = [float(row[column]) for row in rows[1:] if row[column]]
    assert len(losses) == 2
    assert "val_loss" in rows[0]
    assert (tmp_path / "runs" / name / "base" / "config.json").is_file()
    assert (tmp_path / "runs" / name / "adapter").is_dir() == ("lora" in read(name)["model"])
