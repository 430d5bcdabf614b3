"""Inside a step the host does not wait for the GPU: it launches ahead of it.

transformers waits at the start of each forward, to find packed documents.
"""

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from hf_patches import enable
from tests import doors

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
LENGTH = 512


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gemma3():
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=100))


def batch_of(kind):
    ids = torch.randint(5, 999, (2, LENGTH), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    if kind == "packed":
        positions = torch.cat([torch.arange(200), torch.arange(LENGTH - 200)])
        batch["position_ids"] = positions.expand(2, -1).cuda()
    if kind == "padded":
        batch["attention_mask"] = (torch.arange(LENGTH, device="cuda") < 500).expand(2, -1).long()
    return batch


@pytest.fixture
def waiting_raises():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("build", [llama, gemma3])
@pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
def test_forward_and_backward_do_not_wait(waiting_raises, build, kind):
    torch.manual_seed(0)
    model = build().to(device="cuda", dtype=torch.bfloat16)
    model.set_attn_implementation("sdpa")
    enable(model)
    cp, batch = doors.parallel(None), batch_of(kind)

    def run_step(*, strictly):
        # Documents and padding are read from the batch when a step is opened.
        with cp.step(batch) as local:
            if strictly:
                waiting_raises()
            model(**local).loss.backward()

    for _ in range(12):  # kernels are compiled, batches compared
        run_step(strictly=False)
    run_step(strictly=True)
