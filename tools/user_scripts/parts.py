"""What users hang on a model or a step. A part's docstring says what the script does.

A part is a function that gets the `Use` of a script after the model is built. Numbers of scripts
depend on the order of the parts: add new ones at the end, and run scripts beyond the first 200.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.functional import (
    cosine_similarity,
    cross_entropy,
    kl_div,
    log_softmax,
    mse_loss,
    normalize,
)
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from lightning_cp.loss.means import global_mean
from tools.user_scripts.models import ANY, CAUSAL, VOCAB, WIDTH, build_model, next_token_loss

HF = (*CAUSAL, "bert")
LORA = tuple(f"{name}+lora" for name in CAUSAL)


class Use:
    """One script while it runs: what its parts see and change.

    Args:
        door: ``lightning`` or ``trainer``.
        name: of the model.
        owner: the LightningModule, or the Trainer once it is built.
    """

    def __init__(self, door: str, name: str, owner: Any = None) -> None:
        self.door, self.name, self.owner = door, name, owner
        self.model: Any = build_model(name)
        self.base = "model"  # whose loss it is: "logits" are scored by the step itself
        self.arguments: dict[str, Any] = {}  # of each call of the model
        self.terms: list[Callable[[Tensor], Tensor]] = []  # from loss to loss
        self.on_gradients: list[Callable[[], None]] = []  # callbacks before the optimizer's step
        self.on_step: list[Callable[[], None]] = []  # callbacks after it
        self.on_epoch_end: list[Callable[[], None]] = []
        self.on_logs: list[Callable[[dict[str, Any]], None]] = []
        self.methods: dict[str, Callable[..., Any]] = {}  # which the user's class overrides
        self.rates: dict[str, float] = {}  # learning rates by a part of a parameter's name
        self.handles: list[Any] = []
        self.options: dict[str, Any] = {}  # of the trainer
        self.before: list[Callable[[], None]] = []  # calls before training
        self.batch: dict[str, Tensor] = {}
        self.call: Any = None  # the model as a step calls it
        self.out: Any = None
        self.items: Any = None  # num_items_in_batch
        self.teacher: Any = None  # becomes an attribute of a LightningModule

    def layer(self, i: int) -> nn.Module:
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList))[i]

    def inputs(self) -> dict[str, Tensor]:
        return {k: v for k, v in self.batch.items() if k != "labels" and isinstance(v, Tensor)}

    @property
    def logits(self) -> Tensor:
        return self.out if isinstance(self.out, Tensor) else self.out["logits"]

    def log(self, name: str, value: Any) -> None:
        if self.door == "lightning":
            self.owner.log(name, value)
        else:
            self.owner.log({name: float(value)})

    def keep(self, name: str, value: Any) -> None:
        """Append a value to a list that the script prints when it ends."""
        self.owner.kept.setdefault(name, []).append(float(value))

    def add(self, term: Callable[[], Tensor]) -> None:
        """Add a term to the loss."""
        self.terms.append(lambda loss: loss + term())

    def look(self, function: Callable[[], Any]) -> None:
        """Call a function in each step, after the loss is computed."""
        self.terms.append(lambda loss: (function(), loss)[1])


@dataclass(frozen=True)
class Part:
    attach: Callable[[Use], None]
    doors: str
    models: tuple[str, ...]
    is_harmless: bool
    is_replicated: bool

    @property
    def name(self) -> str:
        return self.attach.__name__

    @property
    def text(self) -> str:
        return " ".join((self.attach.__doc__ or "").split())


PARTS: list[Part] = []


def part(
    doors: str = "LT",
    models: tuple[str, ...] = CAUSAL,
    *,
    harmless: bool = False,
    replicated: bool = False,
) -> Callable[[Callable[[Use], None]], Callable[[Use], None]]:
    """Register a part.

    Args:
        doors: first letters of the doors that it is for.
        models: that it is for.
        harmless: whether it is added to scripts of other parts too.
        replicated: whether its scripts never shard parameters.
    """

    def register(attach: Callable[[Use], None]) -> Callable[[Use], None]:
        PARTS.append(Part(attach, doors, models, harmless, replicated))
        return attach

    return register


def in_step(
    *args: Any, base: str = "model", hidden: bool = False, **options: Any
) -> Callable[[Callable[[Use, Tensor], Tensor]], Callable[[Use], None]]:
    """Register a part that is called in each step with its loss, and returns the loss."""

    def register(function: Callable[[Use, Tensor], Tensor]) -> Callable[[Use], None]:
        @functools.wraps(function)
        def attach(use: Use) -> None:
            use.base = base
            use.arguments |= {"output_hidden_states": True} if hidden else {}
            use.terms.append(lambda loss: function(use, loss))

        return part(*args, **options)(attach)

    return register


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def features(module: nn.Module) -> dict[str, Tensor]:
    """Store the last output of a module by a forward hook, as feature extractors do."""
    kept: dict[str, Tensor] = {}
    module.register_forward_hook(lambda m, i, output: kept.update(x=first(output)))
    return kept


def frozen(use: Use) -> nn.Module:
    """Return a teacher, another model of the same kind."""
    return build_model(use.name.partition("+")[0], seed=7).eval().requires_grad_(False)


# ---------------------------------------------------------------- hooks that reach the loss


@part(models=ANY)
def feature_penalty(use: Use) -> None:
    """A forward hook on layer 0 stores its output; the loss adds 0.1 * its mean square."""
    kept = features(use.layer(0))
    use.add(lambda: 0.1 * kept["x"].pow(2).mean())


@part()
def probe(use: Use) -> None:
    """A forward hook on layer 1 stores its output; a fixed probe of it is scored with labels."""
    kept = features(use.layer(1))
    weight = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(3)) / 8
    use.add(lambda: 0.2 * next_token_loss(kept["x"] @ weight, use.batch["labels"]))


@part(models=ANY)
def feature_distillation(use: Use) -> None:
    """Hooks on a layer of the model and of a frozen teacher; MSE of the two enters the loss."""
    use.teacher = teacher = [frozen(use)]  # a list is not registered
    inner = next(m for m in teacher[0].modules() if isinstance(m, nn.ModuleList))[0]
    mine, other = features(use.layer(0)), features(inner)

    def term() -> Tensor:
        with torch.no_grad():
            teacher[0](**use.inputs())
        return 0.1 * mse_loss(mine["x"], other["x"])

    use.add(term)


@part(models=ANY)
def input_penalty(use: Use) -> None:
    """A forward pre-hook on layer 1 stores its input; the loss adds its mean magnitude."""
    kept: dict[str, Tensor] = {}
    use.layer(1).register_forward_pre_hook(
        lambda m, args, kwargs: kept.update(x=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    use.add(lambda: 0.1 * kept["x"].abs().mean())


@part(models=ANY)
def global_hook_penalty(use: Use) -> None:
    """A global forward hook sums the mean magnitude of all outputs of MLPs into the loss."""
    found: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if type(module).__name__ in ("LlamaMLP", "Qwen3MLP", "Gemma3MLP", "GPT2MLP", "Sequential"):
            found.append(first(output).abs().mean())

    use.handles.append(register_module_forward_hook(hook))

    def term() -> Tensor:
        total = sum(found, torch.zeros(()))
        found.clear()
        return 0.1 * total

    use.add(term)


@part()
def last_token_hook(use: Use) -> None:
    """A hook stores the last layer's output; the loss adds the mean square of the last token."""
    kept = features(use.layer(1))
    use.add(lambda: 0.1 * kept["x"][:, -1].pow(2).mean())


@part(models=("llama", "qwen3", "gemma3"))
def attention_hook(use: Use) -> None:
    """A hook on self_attn stores the output of attention; its variance enters the loss."""
    kept = features(use.layer(0).self_attn)
    use.add(lambda: 0.1 * kept["x"].var())


@part(models=ANY)
def steering(use: Use) -> None:
    """A forward hook adds a fixed vector to each token's output of layer 0 (steering)."""
    vector = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4))

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    use.layer(0).register_forward_hook(hook)


@part()
def centering(use: Use) -> None:
    """A forward hook subtracts the mean over the sequence from the output of layer 0."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        x = first(output) - first(output).mean(1, keepdim=True)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    use.layer(0).register_forward_hook(hook)


@part()
def first_token_hook(use: Use) -> None:
    """A forward hook adds the first token's features to all tokens (a global token)."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        x = first(output) + 0.5 * first(output)[:, :1]
        return (x, *output[1:]) if isinstance(output, tuple) else x

    use.layer(0).register_forward_hook(hook)


# ---------------------------------------------------------------- hooks that do not


@part(models=ANY, harmless=True)
def counting_hooks(use: Use) -> None:
    """Forward hooks and pre-hooks on all modules count calls and store shapes (a profiler)."""
    seen: dict[int, list[Any]] = {}
    for module in use.model.modules():
        module.register_forward_pre_hook(lambda m, args: seen.setdefault(id(m), []).append(0))
        module.register_forward_hook(
            lambda m, args, out: seen[id(m)].append(getattr(first(out), "shape", None))
        )


@part(models=ANY, harmless=True)
def unused_features(use: Use) -> None:
    """A feature extractor stores detached outputs of all layers, and nobody reads them."""
    kept: dict[int, Tensor] = {}
    for i in (0, 1):
        use.layer(i).register_forward_hook(
            lambda m, args, out, i=i: kept.update({i: first(out).detach().cpu().clone()})
        )


@part(models=ANY, harmless=True)
def global_profiler(use: Use) -> None:
    """Global forward hooks and pre-hooks count calls of all modules."""
    calls: list[str] = []
    use.handles.append(register_module_forward_pre_hook(lambda m, i: calls.append("before")))
    use.handles.append(register_module_forward_hook(lambda m, i, o: calls.append("after")))


@part(models=ANY, harmless=True)
def backward_hooks(use: Use) -> None:
    """Full backward hooks on layers store norms of gradients, and nobody reads them."""
    norms: list[float] = []
    for i in (0, 1):
        use.layer(i).register_full_backward_hook(
            lambda m, inputs, outputs: norms.append(float(outputs[0].norm()))
        )


@part()
def backward_hook_logged(use: Use) -> None:
    """A full backward hook stores the norm of the gradient at layer 0; the next step logs it."""
    norms = [0.0]
    use.layer(0).register_full_backward_hook(
        lambda m, inputs, outputs: norms.append(float(outputs[0].norm()))
    )
    use.look(lambda: use.log("grad_at_layer", norms[-1]))


@part(models=ANY)
def activation_logged(use: Use) -> None:
    """A forward hook stores the mean magnitude of layer 1's output; the step logs it."""
    kept = features(use.layer(1))
    use.look(lambda: use.log("magnitude", kept["x"].detach().abs().mean()))


@part()
def backward_scaling(use: Use) -> None:
    """A full backward hook halves the gradient that enters layer 0."""
    use.layer(1).register_full_backward_hook(
        lambda m, inputs, outputs: (0.5 * inputs[0], *inputs[1:])
    )


@part(models=ANY)
def parameter_hook(use: Use) -> None:
    """`register_hook` on weights halves their gradients."""
    for p in use.layer(0).parameters():
        p.register_hook(lambda grad: 0.5 * grad)


@part(models=ANY)
def parameter_clamp(use: Use) -> None:
    """`register_hook` on weights clamps their gradients to 1e-3."""
    for p in use.layer(0).parameters():
        p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


@in_step(base="logits")
def logits_hook(use: Use, loss: Tensor) -> Tensor:
    """`logits.register_hook` halves the gradient of the logits."""
    use.logits.register_hook(lambda grad: 0.5 * grad)
    return loss


@in_step(hidden=True)
def hidden_clamp(use: Use, loss: Tensor) -> Tensor:
    """`hidden_states[1].register_hook` clamps the gradient of an auxiliary loss to 1e-4."""
    x = use.out.hidden_states[1] * 1.0
    x.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    return loss + 0.1 * x.pow(2).mean()


@part(models=ANY, harmless=True)
def after_accumulation(use: Use) -> None:
    """`register_post_accumulate_grad_hook` on all weights counts them."""
    counts: list[int] = []
    for p in use.model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: counts.append(p.numel()))


# ---------------------------------------------------------------- outputs of the model


@in_step(models=HF, hidden=True)
def hidden_penalty(use: Use, loss: Tensor) -> Tensor:
    """`output_hidden_states=True`; the loss adds 0.1 * the mean square of one of them."""
    return loss + 0.1 * use.out.hidden_states[1].pow(2).mean()


@in_step(models=HF, hidden=True)
def hidden_logged(use: Use, loss: Tensor) -> Tensor:
    """`output_hidden_states=True`; the step logs the mean norm of the last ones."""
    use.log("norm", use.out.hidden_states[-1].detach().norm(dim=-1).mean())
    return loss


@part()
def attention_entropy(use: Use) -> None:
    """`output_attentions=True`; the entropy of attention enters the loss."""
    use.model.set_attn_implementation("eager")
    use.arguments["output_attentions"] = True

    def term() -> Tensor:
        weights = use.out.attentions[0]
        return -0.01 * (weights * (weights + 1e-9).log()).sum(-1).mean()

    use.add(term)


@in_step(base="logits")
def own_loss(use: Use, loss: Tensor) -> Tensor:
    """The step calls the model without labels and scores its logits."""
    return loss


@in_step()
def reads_logits(use: Use, loss: Tensor) -> Tensor:
    """The step calls the model with labels and reads `out.logits`: a z-loss is added."""
    return loss + 1e-3 * use.out.logits.logsumexp(-1).pow(2).mean()


@in_step(base="logits")
def z_loss(use: Use, loss: Tensor) -> Tensor:
    """The step scores logits of a call without labels, and adds a z-loss."""
    return loss + 1e-3 * use.logits.logsumexp(-1).pow(2).mean()


def token_losses(use: Use) -> tuple[Tensor, Tensor]:
    labels = use.batch["labels"][:, 1:]
    losses = cross_entropy(use.logits[:, :-1].mT, labels, reduction="none")
    return losses, (labels != -100).to(losses.dtype)


@in_step(base="logits")
def weighted_tokens(use: Use, loss: Tensor) -> Tensor:
    """The loss is a weighted mean: tokens with even ids count twice."""
    losses, real = token_losses(use)
    weights = real * (2 - use.batch["labels"][:, 1:] % 2)
    return (losses * weights).sum() / weights.sum()


@in_step(base="logits")
def focal(use: Use, loss: Tensor) -> Tensor:
    """A focal loss over tokens, instead of the model's."""
    losses, real = token_losses(use)
    return ((1 - (-losses).exp()).pow(2) * losses * real).sum() / real.sum()


@in_step(base="logits")
def sample_means(use: Use, loss: Tensor) -> Tensor:
    """The loss is the mean over samples of each one's mean over its tokens."""
    losses, real = token_losses(use)
    return ((losses * real).sum(1) / real.sum(1).clamp(min=1)).mean()


@in_step(base="logits")
def entropy_bonus(use: Use, loss: Tensor) -> Tensor:
    """The loss subtracts 0.01 * the mean entropy of the predictions."""
    logp = log_softmax(use.logits, -1)
    return loss + 0.01 * (logp.exp() * logp).sum(-1).mean()


def accuracy(use: Use) -> Tensor:
    """Return how often the next token is among the ten likeliest."""
    labels = use.batch["labels"][:, 1:]
    right = (use.logits[:, :-1].topk(10).indices == labels[..., None]).any(-1)
    return right[labels != -100].float().mean()


@in_step(base="logits")
def accuracy_logged(use: Use, loss: Tensor) -> Tensor:
    """The step logs the accuracy of next tokens, from logits."""
    use.log("accuracy", accuracy(use))
    return loss


@in_step(base="logits")
def accuracy_kept(use: Use, loss: Tensor) -> Tensor:
    """The step appends the accuracy of next tokens to a list; the script prints it at the end."""
    use.keep("accuracy", accuracy(use))
    return loss


@in_step(models=ANY)
def perplexity_logged(use: Use, loss: Tensor) -> Tensor:
    """The step logs exp(loss)."""
    use.log("ppl", loss.detach().exp())
    return loss


@in_step(models=ANY)
def detached_weight(use: Use, loss: Tensor) -> Tensor:
    """The loss is multiplied by a function of its own detached value."""
    return loss * loss.detach().clamp(max=2).sqrt()


@in_step(models=ANY)
def label_count_weight(use: Use, loss: Tensor) -> Tensor:
    """The loss is multiplied by the number of labels in the batch / 50."""
    return loss * (use.batch["labels"] != -100).sum() / 50


@in_step(models=ANY)
def weight_penalty(use: Use, loss: Tensor) -> Tensor:
    """The loss adds 1e-3 * the sum of squares of all weights."""
    weights = [p for p in use.model.parameters() if p.requires_grad]
    return loss + 1e-3 * sum(p.pow(2).sum() for p in weights)


@in_step(hidden=True)
def contrastive(use: Use, loss: Tensor) -> Tensor:
    """Mean-pooled hidden states of the samples are contrasted with each other."""
    pooled = normalize(use.out.hidden_states[-1].mean(1), dim=-1)
    return loss + 0.1 * (pooled @ pooled.T).logsumexp(-1).mean()


# ---------------------------------------------------------------- more calls of models


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """Return KL(target, prediction) of each token."""
    return kl_div(log_softmax(logits, -1), target.softmax(-1), reduction="none").sum(-1)


@in_step(models=HF)
def two_forwards(use: Use, loss: Tensor) -> Tensor:
    """The same batch runs twice; the second loss counts half."""
    return loss + 0.5 * use.call(**use.batch).loss


@in_step(base="logits")
def consistency(use: Use, loss: Tensor) -> Tensor:
    """A second forward without labels and gradients; KL of the step's logits from its logits."""
    with torch.no_grad():
        other = use.call(**use.inputs()).logits * 0.9
    return loss + 0.1 * divergence(use.logits, other).mean()


@in_step()
def shorter_forward(use: Use, loss: Tensor) -> Tensor:
    """A second forward on the first half of the tokens; its loss counts half."""
    half = use.batch["input_ids"].shape[1] // 2
    batch = {name: x[:, :half] for name, x in use.batch.items()}
    return loss + 0.5 * use.call(**batch).loss


@in_step(models=HF)
def eval_inside(use: Use, loss: Tensor) -> Tensor:
    """`model.eval()`, a forward without gradients, whose loss is logged, and `model.train()`."""
    use.model.eval()
    with torch.no_grad():
        use.log("eval_mode_loss", use.call(**use.batch).loss)
    use.model.train()
    return loss


def soft_targets(use: Use, teacher: Any, temperature: float = 2.0) -> Tensor:
    with torch.no_grad():
        target = teacher(**use.inputs()).logits
    return divergence(use.logits / temperature, target / temperature)


@part(models=(*CAUSAL, *LORA[:2]))
def distillation(use: Use) -> None:
    """KL from the logits of a frozen teacher, averaged over all tokens."""
    use.base = "logits"
    teacher = use.teacher = frozen(use)
    use.add(lambda: 0.5 * soft_targets(use, teacher).mean())


@part()
def distillation_of_labels(use: Use) -> None:
    """KL from the logits of a frozen teacher (held in a list), averaged over tokens with labels."""
    use.base = "logits"
    teacher = [frozen(use)]

    def term() -> Tensor:
        real = (use.batch["labels"] != -100).float()
        return 0.5 * (soft_targets(use, teacher[0]) * real).sum() / real.sum()

    use.add(term)


@part()
def hidden_distillation(use: Use) -> None:
    """1 - cosine of hidden states of model and frozen teacher, averaged over all tokens."""
    use.arguments["output_hidden_states"] = True
    teacher = use.teacher = frozen(use)

    def term() -> Tensor:
        with torch.no_grad():
            target = teacher(**use.inputs(), output_hidden_states=True).hidden_states[1]
        return 0.2 * (1 - cosine_similarity(use.out.hidden_states[1], target, dim=-1)).mean()

    use.add(term)


@part("L")
def distillation_by_global_mean(use: Use) -> None:
    """Distillation as the documentation has it: `global_mean(total, count)` over tokens."""
    use.base = "logits"
    teacher = use.teacher = frozen(use)

    def term() -> Tensor:
        x = soft_targets(use, teacher)
        real = (use.batch["labels"] != -100).to(x.dtype)
        return 0.5 * global_mean((x * real).sum(), real.sum())

    use.add(term)


@part("L", models=ANY)
def feature_by_global_mean(use: Use) -> None:
    """A hook's features, made a loss by `global_mean` over tokens with labels."""
    kept = features(use.layer(0))

    def term() -> Tensor:
        real = (use.batch["input_ids"] > 2).to(kept["x"].dtype)
        return 0.1 * global_mean((kept["x"].pow(2).mean(-1) * real).sum(), real.sum())

    use.add(term)


PROMPT = torch.tensor([[5, 9, 13, 7, 21]])


@part(models=HF)
def callback_forward(use: Use) -> None:
    """A callback calls the model on a fixed prompt after each step, and keeps a logit."""

    def call() -> None:
        was_training = use.model.training
        use.model.eval()
        with torch.no_grad():
            use.keep("prompt", use.model(input_ids=PROMPT).logits.flatten()[-1])
        use.model.train(was_training)

    use.on_step.append(call)


@part(models=("llama", "qwen3"))
def callback_generate(use: Use) -> None:
    """A callback generates three tokens greedily after each step."""

    def call() -> None:
        use.model.eval()
        ids = use.model.generate(
            input_ids=PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=3,
            do_sample=False,
        )
        use.keep("generated", ids[0, -1])
        use.model.train()

    use.on_step.append(call)


@part(models=ANY, harmless=True)
def callback_logs(use: Use) -> None:
    """A callback reads the logged losses, and keeps their running mean."""
    seen: list[float] = []

    def read(logs: dict[str, Any]) -> None:
        value = logs.get("loss", logs.get("train_loss"))
        if value is not None:
            seen.append(float(value))
            use.keep("running", sum(seen) / len(seen))

    use.on_logs.append(read)


# ---------------------------------------------------------------- weights


def norm(p: Tensor) -> float:
    return float(p.full_tensor().norm() if hasattr(p, "full_tensor") else p.norm())


@part(models=(*ANY, "llama+lora"))
def ema(use: Use) -> None:
    """A callback keeps an average of the weights, and its norm."""
    copies: dict[str, Tensor] = {}

    def update() -> None:
        for name, p in use.model.named_parameters():
            copies.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.5)
        use.keep("ema", sum(norm(p) for p in copies.values()))

    use.on_step.append(update)


@part(models=CAUSAL)
def ema_model(use: Use) -> None:
    """A callback updates a deep copy of the model, calls it, and keeps the loss of a prompt."""
    copies: list[Any] = []

    def update() -> None:
        if not copies:
            copies.append(copy.deepcopy(use.model).eval())
        with torch.no_grad():
            for a, b in zip(copies[0].parameters(), use.model.parameters(), strict=True):
                a.lerp_(b, 0.5)
            use.keep("ema loss", copies[0](input_ids=PROMPT, labels=PROMPT).loss)

    use.on_step.append(update)


@part(models=ANY)
def gradient_norms(use: Use) -> None:
    """A callback keeps the norm of each layer's gradient before the optimizer's step."""

    def read() -> None:
        for i in (0, 1):
            grads = [p.grad for p in use.layer(i).parameters() if p.grad is not None]
            use.keep(f"norm {i}", sum(norm(g) ** 2 for g in grads) ** 0.5)

    use.on_gradients.append(read)


@part(models=ANY, harmless=True)
def layer_rates(use: Use) -> None:
    """Layers have learning rates of their own."""
    use.rates = {".0.": 0.02, ".1.": 0.05}


@part(models=ANY, harmless=True)
def frozen_layer(use: Use) -> None:
    """Layer 0 and the embeddings are frozen."""
    use.layer(0).requires_grad_(False)
    for module in use.model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)


@part(models=ANY, replicated=True)
def unfreezing(use: Use) -> None:
    """Layer 0 is frozen, and a callback unfreezes it after the first step."""
    use.layer(0).requires_grad_(False)
    use.on_step.append(lambda: use.layer(0).requires_grad_(True))


@part(models=ANY)
def freezing(use: Use) -> None:
    """A callback freezes layer 0 after the first step."""
    use.on_step.append(lambda: use.layer(0).requires_grad_(False))


@part(models=tuple(f"{name}+tied" for name in CAUSAL))
def tied(use: Use) -> None:
    """Input and output embeddings are tied."""


@part(models=LORA)
def lora(use: Use) -> None:
    """LoRA by PEFT."""


@part(models=LORA)
def lora_merged(use: Use) -> None:
    """A callback merges the adapters after each step, reads a logit, and unmerges them."""

    def call() -> None:
        use.model.merge_adapter()
        with torch.no_grad():
            use.keep("merged", use.model(input_ids=PROMPT).logits.flatten()[-1])
        use.model.unmerge_adapter()

    use.on_step.append(call)


@in_step(models=LORA, base="logits")
def lora_off(use: Use, loss: Tensor) -> Tensor:
    """KL from the same model with its adapters disabled, averaged over all tokens."""
    with torch.no_grad(), use.model.disable_adapter():
        target = use.call(**use.inputs()).logits
    return loss + 0.5 * divergence(use.logits, target).mean()


@part(models=HF, harmless=True)
def checkpointing(use: Use) -> None:
    """`gradient_checkpointing_enable()`."""
    use.model.gradient_checkpointing_enable({"use_reentrant": False})


@part(models=("llama", "qwen3", "gpt2"))
def from_embeddings(use: Use) -> None:
    """The step calls the model with `inputs_embeds` that it has scaled, and scores the logits."""
    use.base = "embeddings"


# ---------------------------------------------------------------- state of the script


@in_step(models=ANY)
def counted_warmup(use: Use, loss: Tensor) -> Tensor:
    """The step counts its calls (`self.calls += 1`) and weighs the loss with them."""
    use.owner.calls = getattr(use.owner, "calls", 0) + 1
    return loss * min(1.0, 0.25 * use.owner.calls)


@part(models=ANY)
def losses_kept(use: Use) -> None:
    """The step appends its loss to a list; their mean is logged at the end of the epoch."""

    def append(loss: Tensor) -> Tensor:
        use.keep("losses", loss.detach())
        return loss

    use.terms.append(append)
    use.on_epoch_end.append(
        lambda: use.log("epoch_mean", torch.tensor(use.owner.kept["losses"]).mean())
    )


@part()
def accuracy_of_epoch(use: Use) -> None:
    """The step appends counts of right tokens to lists; their ratio is logged after the epoch."""
    accuracy_kept(use)
    use.on_epoch_end.append(
        lambda: use.log("epoch_accuracy", torch.tensor(use.owner.kept["accuracy"]).mean())
    )


@in_step(models=ANY)
def curriculum(use: Use, loss: Tensor) -> Tensor:
    """The weight of the loss depends on the trainer's step."""
    step = use.owner if use.door == "lightning" else use.owner.state
    return loss / (1 + step.global_step)


@part("L", models=ANY)
def learned_weight(use: Use) -> None:
    """`self.scale = nn.Parameter(...)` on the LightningModule weighs the loss."""
    use.owner.scale = nn.Parameter(torch.tensor(0.5))
    use.terms.append(lambda loss: loss * use.owner.scale.exp() - use.owner.scale)


@part("L")
def trained_probe(use: Use) -> None:
    """`self.probe = nn.Linear(...)` scores hidden states of a hook by a token mean."""
    from lightning_cp import token_mean

    kept = features(use.layer(0))
    torch.manual_seed(2)
    use.owner.probe = nn.Linear(WIDTH, VOCAB)
    use.add(lambda: 0.2 * token_mean(use.owner.probe(kept["x"]), use.batch["labels"]))


@part("L", models=ANY)
def manual_optimization(use: Use) -> None:
    """`automatic_optimization = False`."""
    use.owner.automatic_optimization = False


@part("L", models=ANY)
def torchmetric(use: Use) -> None:
    """A torchmetrics.MeanMetric is updated with the loss, and logged."""
    use.owner.mean = torchmetrics.MeanMetric()

    def update(loss: Tensor) -> Tensor:
        use.owner.mean(loss.detach())
        use.log("mean_loss", use.owner.mean)
        return loss

    use.terms.append(update)


# ---------------------------------------------------------------- of the Trainer alone


@in_step("T")
def times_processes(use: Use, loss: Tensor) -> Tensor:
    """`compute_loss` multiplies by `self.accelerator.num_processes`, as transformers did."""
    return loss * use.owner.accelerator.num_processes


@in_step("T", base="logits")
def sum_by_items(use: Use, loss: Tensor) -> Tensor:
    """`compute_loss` sums over tokens, divides by `num_items_in_batch` x processes' number."""
    trainer = use.owner
    scale = trainer.accelerator.num_processes // trainer.get_tp_size()
    return token_losses(use)[0].sum() / use.items * scale


@part("T", models=HF)
def own_training_step(use: Use) -> None:
    """`training_step` is overridden: it calls the Trainer's and keeps the loss."""

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = super(type(self), self).training_step(*args, **kwargs)
        self.use.keep("step loss", loss)
        return loss

    use.methods["training_step"] = training_step


@part("T")
def loss_function(use: Use) -> None:
    """`compute_loss_func=` sums over tokens and divides by num_items_in_batch."""

    def compute(out: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = out["logits"]
        losses = cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return losses / num_items_in_batch

    use.options["compute_loss_func"] = compute


@part("T")
def smoothing(use: Use) -> None:
    """`label_smoothing_factor=0.1`."""
    use.options["label_smoothing_factor"] = 0.1


@in_step("T", models=HF)
def gathered(use: Use, loss: Tensor) -> Tensor:
    """`compute_loss` keeps the mean of `accelerator.gather(loss)`."""
    use.keep("gathered", use.owner.accelerator.gather(loss.detach().view(1)).mean())
    return loss


@part("T")
def evaluate_first(use: Use) -> None:
    """`trainer.evaluate()` before `train()`."""
    use.before.append(lambda: use.owner.evaluate())


@part("T")
def evaluate_with_metrics(use: Use) -> None:
    """Evaluates after each epoch with `compute_metrics`."""

    def accuracy(prediction: Any) -> dict[str, float]:
        labels = prediction.label_ids[:, 1:]
        right = prediction.predictions.argmax(-1)[:, :-1] == labels
        return {"accuracy": float(right[labels != -100].mean())}

    use.options |= {"compute_metrics": accuracy, "eval_strategy": "epoch"}


@part("T", models=("own",))
def own_model(use: Use) -> None:
    """A model that somebody wrote, whose forward takes labels and returns a loss."""
