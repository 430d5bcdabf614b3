# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.peer_torch`: torch's own context_parallel as one rank of N, in JSON lines.

A separate process: its fake process group, which sends nothing, must not affect our steps.
"""

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import host_time, peak_memory, timed

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
METHODS = ("allgather", "alltoall")


@contextmanager
def torch_context(mesh: DeviceMesh, seq_len: int, device: torch.device) -> Iterator[None]:
    """Enter torch's context, with an unused buffer to shard, which it requires."""
    buffer = torch.zeros(1, seq_len, device=device)
    with experimental.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
        yield


def draw(heads: int, length: int, dim: int, device: torch.device) -> Tensor:
    """Return a random tensor that requires a gradient."""
    x = torch.randn(1, heads, length, dim, device=device, dtype=torch.bfloat16)
    return x.requires_grad_()


def measure(args: argparse.Namespace, backend: str, method: str, *, gqa: bool) -> dict[str, float]:
    """Return milliseconds, host milliseconds of one forward, and peak bytes."""
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = init_device_mesh("cuda", (args.cp_size,))
    set_rotate_method(method)
    length = args.seq_len // args.cp_size
    key_heads = args.kv_heads if gqa else args.heads
    heads = (args.heads, key_heads, key_heads)
    q, k, v = (draw(n, length, args.dim, device) for n in heads)
    dout = torch.randn_like(q)

    def forward() -> Tensor:
        # Looked up in its module, where torch's context replaces it.
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

    def both() -> tuple[Tensor, ...]:
        out = forward()
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    with torch_context(mesh, args.seq_len, device), sdpa_kernel(BACKENDS[backend]):
        spent = timed(both, device, repeats=args.repeats)
        peak = peak_memory(both, device)
        return {
            "ms": spent,
            "host_ms": host_time(forward, device),
            "extra": peak / q.nbytes,
            "kept": sum(x.nbytes for x in (q, q, k, v)) / q.nbytes,
        }


def main() -> None:
    """Print one line per backend and rotation method, or the error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--cp-size", type=int, default=8)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "fake", store=FakeStore(), rank=args.cp_size // 2, world_size=args.cp_size
    )
    for backend in BACKENDS:
        for method in METHODS:
            result: dict[str, object] = {"backend": backend, "method": method}
            for gqa in (True, False):  # key heads are repeated where GQA is not supported
                try:
                    result |= measure(args, backend, method, gqa=gqa) | {"gqa": gqa, "error": None}
                    break
                except Exception as error:  # noqa: BLE001  a failure is a result
                    result["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
