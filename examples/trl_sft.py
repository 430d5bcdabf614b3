"""TRL's SFTTrainer on packed documents, each sequence sharded over all processes.

    python examples/trl_sft.py                              # one process
    torchrun --nproc-per-node 2 examples/trl_sft.py         # two: the same losses

On CPU processes, or on GPUs, one per process. The model is tiny, and nothing is downloaded. What
context parallelism adds to a script for SFTTrainer is one import and one call.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

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
    """Return documents that count upward, of different lengths."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 97, (24,), generator=generator).tolist()
    lengths = torch.randint(5, 60, (24,), generator=generator).tolist()
    texts = [
        " ".join(WORDS[(start + i) % 97] for i in range(length))
        for start, length in zip(starts, lengths, strict=True)
    ]
    return Dataset.from_dict({"text": texts})


def main() -> None:
    """Train, and print the loss of each step."""
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=96,
            per_device_train_batch_size=2,  # per group of processes that share a sequence
            gradient_accumulation_steps=2,
            num_train_epochs=4,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not on_gpu,
            bf16=on_gpu,
        )
        trainer = SFTTrainer(
            model=build_model(),
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
