# SPDX-License-Identifier: Apache-2.0
"""Private names of transformers' Trainer, accelerate, TRL and torch's schedulers.

Checked with transformers 5.19 to 5.22, accelerate 1.15 and TRL 1.15. `TrainerHandle.replace` checks
that a name is there before it replaces it. No other module uses private names of trainers
(tests/tools/test_private_names.py).
"""

from typing import Any, Final

from lightning_cp.patch import require

PREPARE_DEVICE_MESH: Final = "_prepare_device_mesh"
"""`Accelerator`: builds its mesh. Context ranks would be data ranks."""

PREPARE_FOR_TRAINING: Final = "_prepare_for_training"
"""`Trainer`: wraps the model. A model that was evaluated before would train without averaging."""

NUM_ITEMS: Final = "_get_num_items_in_batch"
"""`Trainer`: counts labels. Those of context ranks would count several times."""

TRACK_TOKENS: Final = "_track_num_input_tokens"
"""`Trainer`: counts tokens. Those of context ranks would count several times."""

GENERATE: Final = "_generate"
"""`GRPOTrainer`, `RLOOTrainer`: counts the tokens of completions, once for each context rank."""

FROM_FIRST: Final = ("_generate_single_turn", "_prepare_inputs")
"""`GRPOTrainer`, `RLOOTrainer`: sample and score. Context ranks would have other completions."""

_COLUMNS: Final = "_signature_columns"


def signature_columns(trainer: Any) -> tuple[str, list[str] | None]:
    """Return the attribute with the columns that a Trainer keeps, and them.

    `Trainer._signature_columns`; without ``document_ids`` documents would not be told apart.
    """
    trainer._set_signature_columns_if_needed()
    return _COLUMNS, getattr(trainer, _COLUMNS)


def set_num_tokens(trainer: Any) -> None:
    """Log the number of tokens that TRL's trainer has seen (`_metrics`), as its `state` has it."""
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode]["num_tokens"] = [trainer.state.num_input_tokens_seen]


def forget_model(accelerator: Any, model: Any) -> None:
    """Let an Accelerator prepare a model anew (`_models`, `_is_accelerate_prepared`).

    It takes a model that it has prepared for evaluation as prepared for training.
    """
    require(accelerator, "_models", library="accelerate", use="models are prepared anew")
    vars(model).pop("_is_accelerate_prepared", None)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    accelerator._models = [other for other in accelerator._models if other is not model]


def forget_optimizer(accelerator: Any, optimizer: Any) -> None:
    """Remove an optimizer that was prepared (`Accelerator._optimizers`): it is not stepped."""
    accelerator._optimizers.remove(optimizer)


def num_steps(scheduler: Any) -> int:
    """Return how often a scheduler was called (`LRScheduler._step_count`); no public name tells."""
    return int(scheduler._step_count)


def logged_metrics(trainer: Any) -> Any:
    """Return the metrics that TRL's trainer has collected (`_metrics`), which its steps log."""
    return getattr(trainer, "_metrics", {})
