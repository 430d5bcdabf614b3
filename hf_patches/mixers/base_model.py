# SPDX-License-Identifier: Apache-2.0
"""Base models that run unchanged on full sequences, on every context rank.

For models of a few thousand positions at most whose layers have no sharded form. Each document
becomes a sample of its own; shorter ones end with padding that a mask hides. The head gets this
rank's tokens. The model is called once per step, so that all ranks gather its weights as often.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_patches.interface.input_checks import name_arguments, parameters_of
from hf_patches.interface.names import step_of
from hf_patches.mixers.replacement import Replacement
from hf_patches.mixers.replicated import (
    check_arguments,
    check_dropout,
    full_source,
    pack,
    select,
)
from hf_patches.multimodal.outer import full_value
from lightning_cp.comm.transport import to_device
from lightning_cp.geometry.mask import NO_DOCUMENT
from lightning_cp.patch import Patch
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.sequence.token_map import token_map
from lightning_cp.step import active_step
from lightning_cp.step.step import Step, per_step

_OF_TOKENS: Final = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "langs")


@dataclass(frozen=True, eq=False)
class DocumentSamples:
    """The documents of a step as samples of one batch, and how to find this rank's tokens.

    Args:
        index: int64 [N, T], the index of each token in the flattened full batch; the last token of
            a document again, where its sample is longer.
        mask: int64 [N, T], 0 where a token is padding; None if none is.
        back: int64 [B * L], the index of each of this rank's tokens in the flattened samples.
        is_packed: whether samples are other than those of the batch.
    """

    index: Tensor
    mask: Tensor | None
    back: Tensor
    is_packed: bool


@per_step
def _build_samples(step: Step) -> DocumentSamples:
    tokens, batch_size, seq_len = token_map(step), step.batch_size, step.layout.seq_len
    kept = np.ones((1, seq_len), np.bool_)
    if step.documents is not None:
        kept = step.documents != NO_DOCUMENT
        kept[:, 0] |= not kept.any()  # something has to be computed
    source = full_source(tokens, batch_size=batch_size, seq_len=seq_len, kept=kept)
    (rows,), _, owned = pack(source, width=int(source.lengths.max()))
    real = np.broadcast_to(tokens.is_real[:, :seq_len], (batch_size, seq_len)).ravel()
    is_packed = not np.array_equal(rows.ravel(), np.arange(batch_size * seq_len))
    is_token = real[rows] & (np.arange(rows.shape[1]) < source.lengths[:, None])
    device = step.position_ids.device
    index, back, mask = (
        to_device(torch.from_numpy(x), device) for x in (rows, owned, is_token.astype(np.int64))
    )
    return DocumentSamples(index, None if is_token.all() else mask, back, is_packed=is_packed)


class BaseModel(Replacement):
    """The forward of a base model."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: on full sequences inside a step, as the stock model outside."""
        arguments = name_arguments(self.module, args, kwargs)
        step = step_of(None)
        return self.stock(**arguments) if step is None else self._run(step, arguments)

    @outside_graphs
    def _run(self, step: Step, arguments: dict[str, Any]) -> Any:
        module = self.module
        mask = arguments.pop("attention_mask", None)
        if isinstance(mask, Tensor) and mask.dim() > 2:
            arguments["attention_mask"] = mask  # of pairs of tokens: refused
        check_arguments(module, _OF_TOKENS, arguments)
        samples = _build_samples(step)
        for name in _OF_TOKENS:
            if isinstance(arguments.get(name), Tensor):
                full = full_value("input_ids", arguments[name], step)  # its dim is that of all
                full = full.expand(step.batch_size, *full.shape[1:])
                arguments[name] = full.flatten(0, 1)[samples.index]
        if "attention_mask" in parameters_of(type(module).forward):
            arguments["attention_mask"] = samples.mask
        elif samples.is_packed and samples.mask is not None:
            raise ValueError(
                f"{type(module).__name__} takes no mask of padding, but the batch holds sequences "
                "of several documents. Give each document its own sequence."
            )
        with active_step.paused():
            output = self.stock(**{**arguments, "return_dict": True})
        return _of_own_tokens(output, samples, step)


def _of_own_tokens(output: Any, samples: DocumentSamples, step: Step) -> Any:
    """Return an output of this rank's tokens; what is neither per token nor per sample is left out.

    Gradients of parameters are those of this rank's tokens: summed over ranks, those of all.
    """

    def own(x: Tensor) -> Tensor:
        return select([x], samples.back, step)

    fields: dict[str, Any] = {"last_hidden_state": own(output[0])}
    if output.get("hidden_states") is not None:
        fields["hidden_states"] = tuple(own(x) for x in output.hidden_states)
    if output.get("pooler_output") is not None and not samples.is_packed:
        fields["pooler_output"] = output.pooler_output
    return type(output)(**fields)


def install(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the forward of the base model of a model; yield it."""
    base: Any = model.base_model
    if getattr(base, "attention_type", "original_full") != "original_full":  # BigBird
        raise ValueError(
            f"The attention_type of {type(base).__name__} is '{base.attention_type}', which is not "
            "supported: its blocks depend on the length of a batch. Load the model with "
            "attention_type='original_full'."
        )
    check_dropout(model.base_model_prefix, base)
    yield BaseModel(base).install()
