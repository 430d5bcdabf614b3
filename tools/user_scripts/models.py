"""Small models, and batches of the kinds that users have."""

import random

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, WIDTH, CLASSES = 61, 32, 3
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,  # attention that is not uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}

CAUSAL = ("llama", "qwen3", "gemma3", "gpt2")
ANY = (*CAUSAL, "bert", "own")
KINDS = {
    **dict.fromkeys(CAUSAL, ("plain", "right", "left", "packed", "empty row")),
    "bert": ("plain", "right"),
    "own": ("plain", "right", "empty row"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Own(nn.Module):
    """A model that somebody wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor | None = None):
        x = self.embed(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return {"loss": next_token_loss(logits, labels), "logits": logits}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy as people write it."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build_model(name: str, seed: int = 0) -> nn.Module:
    """Build a model; `lora` and `tied` behind a plus sign change it."""
    name, _, change = name.partition("+")
    torch.manual_seed(seed)
    tied = {"tie_word_embeddings": change == "tied"}
    none = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    builders = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED, **tied)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, **tied)),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **_GROUPED,
                **tied,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
            )
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCAB,
                n_embd=WIDTH,
                n_layer=2,
                n_head=4,
                n_positions=64,
                initializer_range=0.2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
                **tied,
            )
        ),
        "bert": lambda: BertForSequenceClassification(
            BertConfig(**_SIZES, **none, num_labels=CLASSES)
        ),
        "own": Own,
    }
    model = builders[name]()
    if name in CAUSAL:
        model.config.use_cache = False  # with a cache, stock models let packed documents leak
    if change == "lora":
        targets = ["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"]
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def build_batches(model: str, kind: str, number: int, seed: str) -> list[dict[str, Tensor]]:
    """Return ready batches of different, often odd lengths."""
    rng = random.Random(seed)
    return [_batch(model.partition("+")[0], kind, rng) for _ in range(number)]


def _batch(model: str, kind: str, rng: random.Random) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    length, rows = rng.randint(17, 45), 1 if kind == "packed" else 2
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    place = torch.arange(length).expand(rows, -1)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
    labels[:, 0] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "packed":  # three documents, one of them of a single token
        first = rng.randint(3, length - 8)
        starts = torch.tensor([0, first, first + 1])
        batch["position_ids"] = place - starts[(place[0, :, None] >= starts).sum(-1) - 1]
        labels[:, starts] = -100
    elif model == "own":
        batch["position_ids"] = place
    if kind == "empty row":
        labels[1] = -100
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        cut = rng.randint(1, length // 2)
        mask[1, length - cut :] = 0
        if kind == "left":
            mask = mask.flip(1)
        ids.masked_fill_(mask == 0, 0)
        # The first token behind padding is predicted from padding.
        labels.masked_fill_((mask == 0) | (pad(mask[:, :-1], (1, 0)) == 0), -100)
        if model != "own":
            batch["attention_mask"] = mask
    if model == "bert":
        batch["labels"] = torch.randint(0, CLASSES, (rows,), generator=generator)
    return batch


def twin(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of the same shape, with labels at the same places, and other tokens."""
    ids = batch["input_ids"]
    other = torch.where(ids > 2, 3 + (ids + 4) % (VOCAB - 3), ids)
    labels = batch["labels"]
    labels = torch.where(labels == -100, -100, other) if labels.dim() == 2 else 2 - labels
    return {**batch, "input_ids": other, "labels": labels}
