# SPDX-License-Identifier: Apache-2.0
"""How ``Trainer(precision="bf16-mixed")`` is carried out: by autocast, or by FSDP2.

Lightning's plugin runs steps under autocast. FSDP2 casts weights when it gathers them, so that all
activations are bfloat16. docs/memory.md compares them.
"""

from lightning.pytorch.plugins import MixedPrecision as AutocastPrecision
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_cp.config import MixedPrecision
from lightning_cp.fsdp.sharding import is_sharded


class ShardedMixedPrecision(Precision):
    """bf16-mixed without autocast: FSDP2 computes with bfloat16 copies of float32 weights."""

    precision = "bf16-mixed"


def resolve_plugin(name: MixedPrecision, plugin: Precision) -> Precision:
    """Return the precision plugin of a run: ours instead of Lightning's autocast, if requested."""
    if name == "autocast" or isinstance(plugin, ShardedMixedPrecision):
        return plugin
    if type(plugin) is not AutocastPrecision or plugin.precision != "bf16-mixed":
        raise ValueError(
            f"parameters=Parameters(mixed_precision='fsdp') needs Trainer(precision="
            "'bf16-mixed'), but the Trainer has "
            f"{type(plugin).__name__}({plugin.precision!r}). Set that precision, or leave "
            "mixed_precision out."
        )
    return ShardedMixedPrecision()


def check_not_sharded(name: MixedPrecision, model: nn.Module) -> None:
    """Raise if a user has sharded the model, whose policies are then the user's own."""
    if name == "fsdp" and is_sharded(model):
        raise ValueError(
            "parameters=Parameters(mixed_precision='fsdp') sets the policy of the modules that the "
            "strategy shards, but configure_model() has sharded the model. Use "
            "Trainer(precision='32-true') and fully_shard(..., mp_policy="
            "MixedPrecisionPolicy(torch.bfloat16, torch.float32))."
        )
