"""ORPO in a loop of your own: prompts are computed once for both completions, tokens are sharded.

    python examples/orpo.py                              # one process
    torchrun --nproc-per-node 2 examples/orpo.py         # two: the same losses

On CPU processes; the model is tiny, and nothing is downloaded. Log-probabilities of completions are
the same on every process: for another loss, replace `orpo_losses`.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from hf_patches import enable
from lightning_cp import ContextParallel, sample_mean, sequence_logp

PADDING = {"input_ids": 0, "labels": -100, "document_ids": -1, "branch_ids": -1}


def lay_out(prompt: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Return a sample: the prompt without its last token, and that token and a completion, twice.

    The last token predicts another first token in each branch, so it is in both.
    """
    parts = (prompt[:-1], prompt[-1:], chosen, prompt[-1:], rejected)
    sizes = torch.tensor([len(part) for part in parts])
    tokens = torch.cat(parts)
    is_learned = torch.tensor([False, False, True, False, True]).repeat_interleave(sizes)
    return {
        "input_ids": tokens,
        "labels": tokens.where(is_learned, -100),
        "document_ids": torch.zeros_like(tokens),
        "branch_ids": torch.tensor([-1, 0, 0, 1, 1]).repeat_interleave(sizes),
    }


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad samples to the same length; padding is no document."""
    return {
        name: pad_sequence([sample[name] for sample in samples], True, fill)
        for name, fill in PADDING.items()
    }


def orpo_losses(means: Tensor, beta: float = 0.1) -> Tensor:
    """Return the losses of odds ratio preference optimization (arXiv 2403.07691).

    With p the geometric mean of the probabilities of a completion's tokens: -log p(chosen), and
    beta times -log sigmoid of the log odds ratio; odds(p) = p / (1 - p).

    Args:
        means: log p of the chosen and of the rejected completion, [pairs, 2].
        beta: weight of the odds ratio; lambda in the paper.
    """
    known = means.clamp(max=-torch.finfo(means.dtype).eps)  # p = 1 has infinite odds
    chosen, rejected = (known - torch.log(-torch.expm1(known))).unbind(1)
    return -means[:, 0] - beta * logsigmoid(chosen - rejected)


def score(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean log-probability of each completion, [pairs, completions], on every rank."""
    logp = model(**batch, token_logp=True).token_logp
    return sequence_logp(logp, batch["labels"], per=batch["branch_ids"]).means


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
    )
    return LlamaForCausalLM(config)


def build_batch() -> dict[str, Tensor]:
    """Return prompts that count upward; the chosen completion goes on, the rejected one back."""
    samples = []
    for start, middle, end in torch.randint(3, 25, (8, 3)).tolist():
        tokens = torch.arange(start, start + middle + end)
        samples.append(lay_out(tokens[:middle], tokens[middle:], tokens.flip(0)[: end + 2]))
    return collate(samples)


def main() -> None:
    """Train, and print the loss of each step."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    cp = ContextParallel(dist.group.WORLD if dist.is_initialized() else None)
    model = build_model()
    enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = build_batch()  # the full batch, the same on each rank
    for _ in range(10):
        with cp.step(batch) as local:
            loss = sample_mean(orpo_losses(score(model, local)))
        loss.backward()
        for parameter in model.parameters():  # DDP and FSDP2 average too
            parameter.grad = cp.groups.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if cp.cp_rank == 0:
            print(f"loss {loss.item():.6f}")
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
