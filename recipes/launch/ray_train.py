# SPDX-License-Identifier: Apache-2.0
"""Ray Train: run a recipe on the workers of a Ray cluster (docs/ray.md).

    python recipes/launch/ray_train.py WORKERS CONFIG [options of `python -m recipes fit`]
    python recipes/launch/ray_train.py 16 recipes/configs/llama31_8b_full_128k.yaml --model.lr 2e-5

From a machine of the cluster (RAY_ADDRESS), or alone: Ray then starts on this machine. Resumes from
the last.ckpt of the config; remove it to start again. `--max-failures 3` starts workers again after
a failure, and they resume. All nodes must see the same checkout and folders.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = "ray.train.lightning.RayLightningEnvironment"


def train(job: dict[str, Any]) -> None:
    """Run the recipe on one worker.

    Args:
        job: ``args``, the options of `fit`; ``folder``, the working directory of the command.
    """
    import ray.train
    import torch.distributed as dist

    from recipes.command import run_recipes

    os.chdir(job["folder"])
    context = ray.train.get_context()
    size, local_size = context.get_world_size(), context.get_local_world_size()
    sizes: list[Any] = [None] * size
    if size > 1:
        dist.all_gather_object(sizes, local_size)
        if set(sizes) != {local_size}:
            raise ValueError(
                f"Ray placed {sorted(set(sizes))} workers on its nodes, but every node must have "
                "the same number. Give WORKERS as a multiple of the devices of a node, and nodes "
                "that are free."
            )
    places = [f"--trainer.num_nodes={size // local_size}", f"--trainer.devices={local_size}"]
    # Ray has connected the processes; the environment tells Lightning their ranks.
    options = [*job["args"], *places, f"--trainer.plugins={ENVIRONMENT}"]
    if run_recipes(options, "python -m recipes"):
        raise RuntimeError("The recipe did not run: see the line that begins with `error:`.")


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers, wait for them, and return the exit status."""
    parser = argparse.ArgumentParser(prog="ray_train.py", usage="%(prog)s WORKERS CONFIG [options]")
    parser.add_argument("workers", type=int, help="processes: one for each GPU, or for a CPU run")
    parser.add_argument("config", help="as for `python -m recipes fit`")
    parser.add_argument("--max-failures", type=int, default=0, help="restarts; -1 for no limit")
    command_arguments, options = parser.parse_known_args(argv)
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError as missing:
        print(f"error: {missing}: pip install 'ray[train]' on every node", file=sys.stderr)
        return 2
    import yaml  # type: ignore[import-untyped]

    from recipes.command import run_recipes

    args = ["fit", "--config", command_arguments.config, "--ckpt_path=last", *options]
    # Check the options first: an error is then printed in one line, once.
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            status = run_recipes([*args, "--print_config"], "python -m recipes")
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    if status:
        return status
    trainer = yaml.safe_load(printed.getvalue())["trainer"]
    ray.init()
    accelerator = trainer["accelerator"]
    use_gpu = accelerator != "cpu" and (accelerator != "auto" or "GPU" in ray.cluster_resources())
    TorchTrainer(
        train,
        train_loop_config={"args": args, "folder": str(Path.cwd())},
        scaling_config=ScalingConfig(num_workers=command_arguments.workers, use_gpu=use_gpu),
        run_config=RunConfig(
            storage_path=str(Path(trainer["default_root_dir"]).absolute() / "ray"),
            failure_config=FailureConfig(max_failures=command_arguments.max_failures),
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
