# SPDX-License-Identifier: Apache-2.0
"""`PreferenceModule`: trains a causal language model on preferences, with sharded sequences.

Batches come from `PairData`. The log-probabilities of full sequences are the same on every context
rank, so losses and metrics are computed as on one device.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from lightning_cp import active_step, sequence_logp
from lightning_cp.logp import SequenceLogp
from lightning_cp.loss import global_mean
from lightning_cp.options import check_choice
from recipes.module import CausalLMModule
from recipes.preference.losses import (
    ACCURACIES,
    Completions,
    Losses,
    PreferenceLoss,
    dpo_losses,
    kto_losses,
    orpo_losses,
)
from recipes.preference.pairs import REFERENCE
from recipes.weights import adapters_off, find_weights, load_pretrained

Reference = Literal["auto", "model", "adapters", "stored"]
"""Where the log-probabilities of the reference come from."""


class PreferenceModule(CausalLMModule):
    """A causal language model that learns which of two completions is preferred.

    The loss is the mean over the pairs of all ranks. Metrics are means over them, too: rewards,
    accuracies and margins as in the papers.

    Args:
        loss: ``sigmoid`` (DPO), ``ipo``, ``sigmoid_norm`` (DPO per token), ``kto`` or ``orpo``.
        beta: how much a deviation from the reference counts; in ORPO, the odds ratio.
        label_smoothing: of ``sigmoid`` and ``sigmoid_norm``: the probability that a pair is
            labelled the wrong way round.
        desirable_weight: of chosen completions in KTO.
        undesirable_weight: of rejected completions in KTO.
        reference: ``model``, a frozen copy of the model as it was; ``adapters``, the model without
            its LoRA; ``stored``, log-probabilities in the data. ``auto``: stored if the data has
            them, else adapters if there is LoRA, else model. ORPO has none.
        options: as in `CausalLMModule`.

    Example:
        >>> module = PreferenceModule(loss="ipo", beta=0.2, warmup_steps=10)
    """

    def __init__(
        self,
        loss: PreferenceLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        reference: Reference = "auto",
        **options: Any,
    ) -> None:
        check_choice("loss", loss, get_args(PreferenceLoss))
        check_choice("reference", reference, get_args(Reference))
        super().__init__(**options)
        if reference == "adapters" and self._lora is None:
            raise ValueError(
                "reference='adapters' computes the reference without LoRA, but model.lora is not "
                "set. Set it, or use reference='model'."
            )
        if reference == "model" and self._lora is not None:
            raise ValueError(
                "reference='model' holds a second model, though with LoRA the model without its "
                "adapters is the reference. Use reference='adapters'."
            )
        self.reference: Any = None
        self._kind: str = reference
        self._is_pretrained = self._loads
        self._has_reference = False

    @property
    def num_completions(self) -> int:
        """Return the number of completions of a prompt that the loss needs."""
        return 3 if self.hparams["loss"] == "kto" else 2

    def setup(self, stage: str) -> None:
        """Check the data, and decide where the reference comes from."""
        super().setup(stage)
        data = getattr(self.trainer, "datamodule", None)
        found = getattr(data, "num_completions", self.num_completions)
        if found != self.num_completions:
            raise ValueError(
                f"loss={self.hparams['loss']!r} needs {self.num_completions} completions per "
                f"prompt, but the data has {found}. Set data.init_args.mismatched to "
                f"{str(self.num_completions == 3).lower()}."
            )
        is_stored = bool(getattr(data, "stored_reference", False))
        if self._kind == "auto":
            self._kind = "stored" if is_stored else "adapters" if self._lora else "model"
        if self.hparams["loss"] == "orpo":
            self._kind = "none"
        if self._kind == "stored" and not is_stored:
            raise ValueError(
                "reference='stored' reads log-probabilities from the data. Set data.init_args."
                "stored_reference to true, or use another reference."
            )

    def configure_model(self) -> None:
        """Build the model, and the frozen copy if there is one."""
        super().configure_model()
        if self._kind == "model" and self.reference is None and self._trainer is not None:
            self.reference = self.build_model(trained=False)
            # A copy can be loaded again: it is not saved.
            self.strict_loading = self.strict_loading and not self._is_pretrained

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize a module of either model."""
        models = [m for m in self.modules() if isinstance(m, PreTrainedModel)]
        owners = [m for m in models if any(part is module for part in m.modules())]
        owners[-1]._init_weights(module)

    def _load(self) -> None:
        """Load pretrained weights, and those of the reference."""
        super()._load()
        if self.reference is None or self._has_reference:
            return
        self._has_reference = True
        if self._is_pretrained:
            folder = find_weights(str(self.hparams["model"]), fetch=False)
            load_pretrained(self.reference, folder, dequantize=self._dequantize)
        elif self.trainer.ckpt_path is None:
            _copy_parameters(self.model, self.reference)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave a reference out that can be loaded again."""
        super().on_save_checkpoint(checkpoint)
        if self._is_pretrained:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name: x for name, x in state.items() if not name.startswith("reference.")
            }

    # ---------------------------------------------------------------- steps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss over the pairs of all ranks, and log the metrics."""
        return self._score(batch, "train_loss", "")

    def _evaluate(self, batch: dict[str, Tensor], name: str) -> None:
        self._score(batch, name, f"{name.removesuffix('loss')}")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return log-probabilities and tokens of the completions, [batch, pairs, completions]."""
        found = self._sums(self.model, batch)
        return {"logps": found.sums, "num_tokens": found.num_tokens}

    def _score(self, batch: dict[str, Tensor], name: str, prefix: str) -> Tensor:
        step = active_step.opened()
        if step is not None and step.is_stock:
            raise ValueError(
                "Pairs cannot be compared with a stock model, which gets each document alone. Set "
                "monitor.verify_first_batch to false; trial runs compare steps with full sequences."
            )
        with torch.no_grad():
            reference = self._reference_sums(batch)
        policy = self._sums(self.model, batch)
        is_pair = (policy.num_tokens > 0).all(-1)
        losses = self._losses(policy, reference, is_pair)
        loss = _mean(losses.values, is_pair)
        self.log(name, loss, prog_bar=True)
        strategy: Any = self.trainer.strategy
        for metric, values in losses.metrics.items():
            # Before training, the sign of a margin is rounding: two runs need not agree on it.
            if metric == ACCURACIES and getattr(strategy, "is_verifying", False):
                continue
            self.log(f"{prefix}{metric}", _mean(values, is_pair))
        return loss

    def _losses(self, policy: SequenceLogp, reference: Tensor | None, is_pair: Tensor) -> Losses:
        options = self.hparams
        loss, beta = options["loss"], options["beta"]
        parts = (x.unbind(-1) for x in policy)
        chosen, rejected, *_ = (Completions(*part) for part in zip(*parts, strict=True))
        if loss == "orpo":
            return orpo_losses(chosen, rejected, beta=beta)
        assert reference is not None  # noqa: S101  all other losses have one
        if loss == "kto":
            mismatched = (policy.sums - reference)[..., 2].detach()
            return kto_losses(
                chosen,
                rejected,
                reference[..., 0],
                reference[..., 1],
                _mean(mismatched, is_pair),
                beta=beta,
                desirable_weight=options["desirable_weight"],
                undesirable_weight=options["undesirable_weight"],
            )
        return dpo_losses(
            chosen,
            rejected,
            reference[..., 0],
            reference[..., 1],
            beta=beta,
            kind=loss,
            label_smoothing=options["label_smoothing"],
        )

    def _reference_sums(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Return the log-probabilities of the reference, [batch, pairs, completions]."""
        if self._kind == "none":
            return None
        if self._kind == "stored":
            strategy: Any = self.trainer.strategy
            bits = strategy.context_parallel.unshard(batch[REFERENCE], 1).to(torch.int32)
            # A sum over a completion of one number and zeros.
            values = bits.view(torch.float32)[:, 1:]
            found = sequence_logp(values, batch["labels"], per=batch["branch_ids"])
            return self._by_pair(found).sums
        if self._kind == "adapters":
            with adapters_off(self.model):
                return self._sums(self.model, batch).sums
        return self._sums(self.reference, batch).sums

    def _sums(self, model: Any, batch: Mapping[str, Tensor]) -> SequenceLogp:
        """Return the log-probabilities of completions, [batch, pairs, completions]."""
        inputs = {key: x for key, x in batch.items() if key != REFERENCE}
        logp = model(**inputs, token_logp=True).token_logp
        found = sequence_logp(logp, batch["labels"], per=batch["branch_ids"])
        return self._by_pair(found)

    def _by_pair(self, found: SequenceLogp) -> SequenceLogp:
        number = self.num_completions
        missing = -found.sums.shape[1] % number
        return SequenceLogp(*(pad(x, (0, missing)).unflatten(1, (-1, number)) for x in found))


def _mean(values: Tensor, is_pair: Tensor) -> Tensor:
    """Return the mean over the pairs of all ranks."""
    # Every context rank has all pairs of its samples: both sums count them cp_size times.
    total = torch.where(is_pair, values, 0.0).sum()
    return global_mean(total, is_pair.sum(), unit="pairs")


@torch.no_grad()
def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters of a model into another of the same shape, shard by shard."""
    pairs = zip(source.named_parameters(), target.named_parameters(), strict=True)
    for (name, x), (other, y) in pairs:
        assert name == other, (name, other)  # noqa: S101
        from_shard, to_shard = (p.to_local() if isinstance(p, DTensor) else p for p in (x, y))
        to_shard.copy_(from_shard)
