"""transformers' Trainer with accelerate's FSDP2 in bf16 on NCCL ranks, packed documents."""

import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_patches import context_parallel
from tests.parity.trainer_step import processes

pytestmark = pytest.mark.gpu

LENGTH, VOCAB, STEPS = 1021, 97, 50


def documents(count: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of packed documents, some without labels, with something to learn."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(count):
        ids = torch.randint(1, VOCAB, (LENGTH,), generator=generator)
        ids[2::3] = ids[1:-1:3]  # every third token repeats the one before it
        lengths = torch.randint(5, 300, (LENGTH // 5,), generator=generator)
        starts = torch.cat((torch.zeros(1, dtype=torch.long), lengths.cumsum(0)))
        document = torch.bucketize(torch.arange(LENGTH), starts, right=True) - 1
        labels = torch.where(torch.rand(LENGTH, generator=generator) < 0.7, ids, -100)
        positions = torch.arange(LENGTH) - starts[document]
        labels[positions == 0] = -100
        samples.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return samples


def stacked(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in features]) for name in features[0]}


def train(size: int, bf16: bool) -> list[dict[str, Any]]:
    """Return what a run logs; ``size`` 0: by transformers alone, one sample per rank."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        use_cache=False,
    )
    with processes(use_cpu=False), tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            # A group of two context ranks gets both samples that two data ranks would get.
            per_device_train_batch_size=max(size, 1),
            gradient_checkpointing=size == 2,
            max_steps=STEPS,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            bf16=bf16,
            seed=3,
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )
        samples = documents(16)
        model = LlamaForCausalLM(config)
        trainer = Trainer(model, arguments, train_dataset=samples, data_collator=stacked)
        if size:
            context_parallel(trainer, size=size)
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "FSDPLlamaForCausalLM"
        dist.barrier()
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_fsdp2_in_bf16_is_within_the_noise_of_data_parallelism(nccl):
    exact, stock, ours = (
        nccl(2).run(train, size, bf16)[0] for size, bf16 in ((0, False), (0, True), (2, True))
    )
    assert len(ours) == STEPS

    def largest(run: list[dict[str, Any]], name: str) -> float:
        pairs = zip(run, exact, strict=True)
        return max(abs(float(a[name]) - float(b[name])) for a, b in pairs)

    print(  # noqa: T201
        f"loss {exact[0]['loss']:.4f} to {exact[-1]['loss']:.4f};",
        *(
            f"{name}: stock {largest(stock, name):.2e}, ours {largest(ours, name):.2e};"
            for name in ("loss", "grad_norm")
        ),
    )
    assert exact[-1]["loss"] < 0.8 * exact[0]["loss"]
    for name in ("loss", "grad_norm"):
        assert largest(ours, name) < 2 * largest(stock, name) + 1e-3
