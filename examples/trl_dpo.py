"""TRL's DPOTrainer, each sequence sharded over all processes; so are those of the reference model.

    python examples/trl_dpo.py                              # one process
    torchrun --nproc-per-node 2 examples/trl_dpo.py         # two: the same losses

On CPU processes, or on GPUs, one per process. The models are tiny, and nothing is downloaded.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from hf_patches import context_parallel

WORDS = [f"w{i}" for i in range(97)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build_model() -> LlamaForCausalLM:
    """Return a tiny model; or LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def build_data() -> Dataset:
    """Return prompts that count upward; the chosen completion goes on, the rejected one back."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(16):
        start, middle, end = torch.randint(3, 25, (3,), generator=generator).tolist()
        up = [WORDS[(start + i) % 97] for i in range(middle + end)]
        rows.append(
            {
                "prompt": " ".join(up[:middle]),
                "chosen": " ".join(up[middle:]),
                "rejected": " ".join(up[::-1][: end + 2]),
            }
        )
    return Dataset.from_list(rows)


def main() -> None:
    """Train, and print the loss of each step."""
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        args = DPOConfig(
            output_dir=folder,
            max_length=96,
            per_device_train_batch_size=2,  # pairs, per group of processes that share a sequence
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            learning_rate=1e-3,
            beta=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not on_gpu,
            bf16=on_gpu,
        )
        trainer = DPOTrainer(
            model=build_model(),
            ref_model=build_model(),
            args=args,
            train_dataset=build_data(),
            processing_class=build_tokenizer(),
        )
        context_parallel(trainer, size=trainer.accelerator.num_processes)
        trainer.train()
        if trainer.is_world_process_zero():
            for entry in trainer.state.log_history:
                if "loss" in entry:
                    print(f"loss {entry['loss']:.6f}")
        trainer.end()


if __name__ == "__main__":
    main()
