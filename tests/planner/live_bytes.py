"""Bytes of live tensors on a CPU: what a layer saves for backward, and its peak.

Counts storages that exist, apart from parameters and their gradients; the same arithmetic as on a
GPU, apart from the workspaces of kernels.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hf_patches import enable
from lightning_cp.memory import tile_modules
from tests import doors
from tests.torch_names import tree_iter, tree_map

# In bfloat16 they take 250 times as long on CPUs without instructions for it.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_SLOW = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten._grouped_mm.default",
    f"{_ATTENTION}.default",
    f"{_ATTENTION}_backward.default",
}


def _call(func, args, kwargs):
    return func(*args, **kwargs)


def _in_float32(func, args, kwargs):
    """Compute in float32 and return bfloat16; what a kernel's sums are in float32 stays so."""

    def cast(x):
        is_bf16 = isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16
        return x.float() if is_bf16 else x

    out = func(*tree_map(cast, args), **tree_map(cast, kwargs))
    if not isinstance(out, tuple):
        return out.bfloat16()
    is_attention = str(func) == f"{_ATTENTION}.default"
    return (out[0].bfloat16(), *out[1:]) if is_attention else tuple(x.bfloat16() for x in out)


class Live(TorchDispatchMode):
    """Tracks storages that operators return."""

    def __init__(self, model):
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0
        tensors = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        self.known = {StorageWeakRef(x.untyped_storage()).cdata for x in tensors}
        # Casts of weights and gradients on their way: counted by parameters, not by tokens.
        self.sizes = {p.numel() * size for p in model.parameters() for size in (2, 4)}

    def sweep(self):
        for key in [key for key, (ref, _) in self.live.items() if ref.expired()]:
            self.now -= self.live.pop(key)[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_bf16 = args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.bfloat16
        run = _in_float32 if is_bf16 and str(func) in _SLOW else _call
        out: Any = run(func, args, kwargs or {})
        self.sweep()
        for x in tree_iter(out):
            if not isinstance(x, torch.Tensor) or x.is_meta:
                continue
            storage = x.untyped_storage()
            ref, size = StorageWeakRef(storage), storage.nbytes()
            key = ref.cdata
            if key not in self.live and key not in self.known and size not in self.sizes:
                self.live[key] = (ref, size)
                self.now += size
        self.peak = max(self.peak, self.now)
        return out


class Measured(NamedTuple):
    """Bytes per token: after forward, and the peak of the step."""

    after: float
    peak: float


def measure(
    config, *, num_tokens, checkpointing, mixed=False, tile_tokens=None, keep_attention="none"
) -> Measured:
    """Run a step of a model and count bytes per token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if not mixed:
        model.to(torch.bfloat16)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle = enable(model)
    if tile_tokens is not None:
        tile_modules(model, tile_tokens=tile_tokens)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(5, config.vocab_size, (1, num_tokens))
    batch = {"input_ids": ids, "labels": ids}
    cp = doors.parallel(None, kernel="cpu", keep_attention=keep_attention)
    live = Live(model)
    cast = torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext()
    with live, cp.step(batch) as local:
        with cast:
            loss = model(**local).loss
        live.sweep()
        after = live.now
        loss.backward()
    handle.undo()
    return Measured(after / num_tokens, live.peak / num_tokens)
