"""One GPU as one rank of N: links take time beside the computation, and whoever needs waits."""

import pytest
import torch

from benchmarks import attention_gpu
from benchmarks.emulate import EmulatedTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def milliseconds(transport, *, wait):
    x = torch.ones(1_000_000, device="cuda")
    out = torch.empty(2, x.numel(), device="cuda")
    times = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        finish = transport.all_gather(out, x)
        if wait:
            finish()
        stop.record()
        torch.cuda.synchronize()
        finish()
        times.append(start.elapsed_time(stop))
    assert torch.equal(out, x.expand_as(out))
    return min(times)


def test_a_link_takes_bytes_over_bandwidth_and_only_who_waits_pays():
    slow = EmulatedTransport(0, 2, link_gbs=0.2)  # 4 MB in 20 ms
    assert milliseconds(slow, wait=True) == pytest.approx(20, rel=0.3)
    assert milliseconds(slow, wait=False) < 5
    assert milliseconds(EmulatedTransport(0, 2), wait=True) < 5


@pytest.mark.parametrize("name", ["causal-32k", "ring-32k", "ulysses-32k", "two-axes-32k"])
def test_cases_run_on_a_gpu(name, capsys):
    attention_gpu.main(["--quick", "--only", name])
    told = capsys.readouterr().out
    assert f"| {name} | " in told
    assert "failed" not in told
