# SPDX-License-Identifier: Apache-2.0
"""Host cost of one routed attention call on tiny tensors, compared with plain SDPA.

One process, cp_size 1, so that only bookkeeping is added. torch's prototype cannot be compared
here: it does not run on a CPU.
"""

import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from lightning_cp import ContextParallel

ROUNDS, CALLS = 15, 400


def spent(call: Callable[[], Any]) -> float:
    """Return microseconds per call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / CALLS


def main() -> None:
    """Print a table; plain and routed calls alternate, so that machine load affects both."""
    torch.set_num_threads(1)
    q = torch.randn(1, 4, 16, 8, requires_grad=True)
    dout = torch.ones_like(q)
    x = torch.randn(4, 4)
    cp = ContextParallel(None)
    step = {"inputs_embeds": torch.zeros(1, 16, 8)}

    def forward() -> None:
        scaled_dot_product_attention(q, q, q, is_causal=True)

    def both() -> None:
        out = scaled_dot_product_attention(q, q, q, is_causal=True)
        torch.autograd.grad(out, q, dout)

    def other() -> None:
        x + x

    print(f"torch {torch.__version__}, {platform.machine()}, one thread; q, k, v [1, 4, 16, 8];")
    print(f"microseconds per call, medians of {ROUNDS} rounds of {CALLS} alternating calls.\n")
    print("| call | plain | in a step | ratio |\n|---|---|---|---|")
    named = {"SDPA forward": forward, "SDPA forward + backward": both, "another op (x + x)": other}
    for name, call in named.items():
        plain, routed = [], []
        for _ in range(ROUNDS):
            plain.append(spent(call))
            with cp.step(step):
                routed.append(spent(call))
        a, b = median(plain), median(routed)
        print(f"| {name} | {a:.1f} | {b:.1f} | {b / a:.2f} |")


if __name__ == "__main__":
    main()
