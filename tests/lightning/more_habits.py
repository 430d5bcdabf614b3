"""What users of Lightning and Hugging Face do, as further cases of tests/lightning/features.py."""

import multiprocessing
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as cb
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

from lightning_cp import token_mean
from tests import doors
from tests.lightning.features import (
    LENGTH,
    VOCAB,
    Backbone,
    Memory,
    Module,
    Rows,
    alone,
    approx,
    build_trainer,
    case,
    fit,
    results,
)

# ------------------------------------------------------------------------------- the module


class Kept(Module):
    """Keeps the outputs of validation steps in a list, since Lightning 2 does not."""

    def on_validation_epoch_start(self):
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        loss = token_mean(self(batch), batch["labels"])
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self):
        self.log("val_loss", torch.stack(self.outputs).mean())
        self.log("val_gathered", self.all_gather(torch.stack(self.outputs)).mean())


@case("outputs kept for on_validation_epoch_end")
def _(path):
    return fit(path, Kept())


@case("ReduceLROnPlateau")
def _(path):
    class Plateau(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=0.05
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }

    return fit(
        path,
        Plateau(lr=0.5),
        max_epochs=4,
        also=lambda t, m: t.optimizers[0].param_groups[0]["lr"],
    )


@case("configure_gradient_clipping overridden")
def _(path):
    class Clipping(Module):
        def configure_gradient_clipping(
            self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
        ):
            value = 0.2 if self.current_epoch == 0 else 0.1
            self.clip_gradients(optimizer, gradient_clip_val=value, gradient_clip_algorithm="norm")

    return fit(path, Clipping())


@case("optimizer hooks overridden")
def _(path):
    class Hooks(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            scale = min(1.0, (self.trainer.global_step + 1) / 4)  # warm-up, as in Lightning's docs
            for group in optimizer.param_groups:
                group["lr"] = scale * self.lr
            optimizer.step(closure=optimizer_closure)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)

        def backward(self, loss):
            (2 * loss).backward()

    return fit(path, Hooks())


@case("lr_scheduler_step overridden")
def _(path):
    class Stepping(Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.5, total_steps=self.trainer.estimated_stepping_batches
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()

    return fit(path, Stepping(), accumulate_grad_batches=2)


@case("LBFGS", verdict="refused", says="torch.optim.LBFGS is not supported")
def _(path):
    class Newton(Module):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    return fit(path, Newton(), max_epochs=1)


@case("AdamW with groups of parameters")
def _(path):
    class Groups(Module):
        def configure_optimizers(self):
            decayed = [p for p in self.parameters() if p.dim() > 1]
            others = [p for p in self.parameters() if p.dim() <= 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
            return torch.optim.AdamW(groups, lr=1e-2, foreach=True)

    return fit(path, Groups())


class Gan(pl.LightningModule):
    """Two networks that train in turns, as in Lightning's example of a GAN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator, self.discriminator = Backbone(), nn.Linear(16, VOCAB)
        self.double()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer, sign in ((first, 1.0), (second, -0.5)):
            with self.toggled_optimizer(optimizer):
                hidden = self.generator(batch["input_ids"], batch["position_ids"])
                hidden = hidden if sign > 0 else hidden.detach()
                loss = sign * token_mean(self.discriminator(hidden), batch["labels"])
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            self.log("generator" if sign > 0 else "discriminator", loss, prog_bar=True)
        if self.trainer.is_last_batch:
            self.lr_schedulers()[0].step()

    def configure_optimizers(self):
        optimizers = [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.05),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

    def train_dataloader(self):
        return DataLoader(Rows(8), batch_size=2)


@case("GAN, toggled_optimizer, lr_schedulers by hand")
def _(path):
    return fit(path, Gan())


@case("step returns a dict")
def _(path):
    class Dict(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "ppl": loss.detach().exp(), "name": "x"}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append(float(outputs["ppl"]))

    return fit(path, Dict())


@case("step returns None", verdict="refused", says="returning None in distributed training")
def _(path):
    class Skipping(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    return fit(path, Skipping())


@case("eval() and train() inside steps")
def _(path):
    class Switching(Module):
        def training_step(self, batch, batch_idx):
            self.backbone.eval()
            with torch.no_grad():
                teacher = token_mean(self(batch), batch["labels"])
            self.backbone.train()
            loss = super().training_step(batch, batch_idx)
            self.log("teacher", teacher)
            return loss

    return fit(path, Switching())


@case("freeze and unfreeze")
def _(path):
    class Frozen(Module):
        def __init__(self):
            super().__init__()
            self.backbone.requires_grad_(False)
            self.backbone.eval()

        def on_train_epoch_start(self):
            self.backbone.requires_grad_(self.current_epoch > 0)

    return fit(path, Frozen(), max_epochs=3)


@case("trainer.model and trainer attributes")
def _(path):
    class Asking(Module):
        def training_step(self, batch, batch_idx):
            assert self.trainer.model is not None
            assert self.trainer.lightning_module is self
            self.seen.append(float(self.trainer.num_training_batches))
            self.seen.append(float(self.trainer.estimated_stepping_batches))
            return super().training_step(batch, batch_idx)

    return fit(path, Asking())


@case("configure_callbacks")
def _(path):
    class Bringing(Module):
        def configure_callbacks(self):
            return [cb.EarlyStopping("val_loss", patience=0, min_delta=10.0)]

    return fit(path, Bringing(), max_epochs=5)


@case("example_input_array")
def _(path):
    class Example(Module):
        def __init__(self):
            super().__init__()
            self.example_input_array = ({k: v[None] for k, v in Rows(1)[0].items()},)

    return fit(path, Example(), enable_model_summary=True)


@case(
    "torch.compile of the module",
    verdict="refused",
    says="Using a compiled model is incompatible with the current strategy",
)
def _(path):
    return fit(path, torch.compile(Module(), backend="eager"))


@case("torch.compile of a part")
def _(path):
    class Compiled(Module):
        def __init__(self):
            super().__init__()
            self.backbone = torch.compile(self.backbone, backend="aot_eager")

    return fit(path, Compiled())


@case("torch.compile in configure_model")
def _(path):
    class Compiled(Module):
        def configure_model(self):
            self.backbone.compile(backend="aot_eager")

    return fit(path, Compiled())


@case("log with reduce_fx, log_dict, rank_zero_only")
def _(path):
    class Logging(Module):
        def validation_step(self, batch, batch_idx):
            loss = token_mean(self(batch), batch["labels"])
            self.log("worst", loss, reduce_fx="max")
            self.log_dict({"a": loss, "b": loss.exp()}, on_epoch=True, sync_dist=True)
            if self.trainer.is_global_zero:
                self.log("rank", 1.0, rank_zero_only=True)

    def without_rank(trainer, module):
        return {k: float(v) for k, v in trainer.callback_metrics.items() if k != "rank"}

    found = fit(path, Logging(), also=without_rank)
    found["metrics"].pop("rank", None)
    return found


@case("save_hyperparameters and log_hyperparams")
def _(path):
    class Named(Module):
        def __init__(self, lr=0.1, *, names=("a", "b"), extra=None):
            super().__init__(lr)
            self.save_hyperparameters(ignore=["extra"])

        def on_fit_start(self):
            self.logger.log_hyperparams(self.hparams)

    logger = Memory()
    module = Named(extra=nn.Linear(1, 1))
    kept = cb.ModelCheckpoint(path / "kept", save_last=True)
    found = fit(
        path,
        module,
        logger=logger,
        callbacks=[kept],
        enable_checkpointing=True,
        also=lambda t, m: {"rank 0": logger.kept} if t.is_global_zero else {},
    )
    return found, dict(module.hparams)


@case("test and validate with ckpt_path=best")
def _(path):
    kept = cb.ModelCheckpoint(path / "kept", monitor="val_loss")
    module = Module()
    trainer = build_trainer(path, callbacks=[kept], enable_checkpointing=True)
    trainer.fit(module)
    return (
        trainer.test(module, ckpt_path="best", verbose=False),
        trainer.validate(module, ckpt_path="best", verbose=False),
        trainer.predict(module, ckpt_path="best"),
    )


@case("init_module")
def _(path):
    trainer = build_trainer(path)
    with trainer.init_module():
        module = Module()
    trainer.fit(module)
    return results(trainer, module)


# ------------------------------------------------------------------------------- metrics


@case("torchmetrics Perplexity on whole rows", sizes=(2, 3))
def _(path):
    from torchmetrics.text import Perplexity

    class Text(Module):
        def __init__(self):
            super().__init__()
            self.perplexity = Perplexity(ignore_index=-100)

        def validation_step(self, batch, batch_idx):
            logits, labels = self(batch), batch["labels"]
            if not alone():
                cp = self.trainer.strategy.context_parallel
                logits, labels = cp.unshard(logits, 1), cp.unshard(labels, 1)
            self.perplexity(logits[:, :-1], labels[:, 1:])
            self.log("perplexity", self.perplexity, on_step=False, on_epoch=True)

    return fit(path, Text())


@case(
    "torchmetrics Perplexity, shifted by hand",
    verdict="refused",
    says="shift_labels",
)
def _(path):
    from torchmetrics.text import Perplexity

    class Text(Module):
        def __init__(self):
            super().__init__()
            self.perplexity = Perplexity(ignore_index=-100)

        def validation_step(self, batch, batch_idx):
            logits = self(batch)
            self.perplexity(logits[:, :-1], batch["labels"][:, 1:])
            self.log("perplexity", self.perplexity, on_step=False, on_epoch=True)

    return fit(path, Text())


@case("MetricCollection, compute by hand, train and val")
def _(path):
    class Collected(Module):
        def __init__(self):
            super().__init__()
            both = torchmetrics.MetricCollection(
                {
                    "accuracy": torchmetrics.classification.MulticlassAccuracy(
                        VOCAB, average="micro", ignore_index=-100
                    ),
                    "f1": torchmetrics.classification.MulticlassF1Score(VOCAB, ignore_index=-100),
                }
            )
            self.train_metrics, self.val_metrics = both.clone("train_"), both.clone("val_")

        def training_step(self, batch, batch_idx):
            logits = self(batch)
            self.train_metrics.update(logits.flatten(0, 1), batch["labels"].flatten())
            loss = token_mean(logits, batch["labels"])
            self.seen.append(float(loss.detach()))
            return loss

        def on_train_epoch_end(self):
            self.log_dict(self.train_metrics.compute())
            self.train_metrics.reset()

        def validation_step(self, batch, batch_idx):
            self.val_metrics(self(batch).flatten(0, 1), batch["labels"].flatten())
            self.log_dict(self.val_metrics, on_step=False, on_epoch=True)

    return fit(path, Collected())


# ------------------------------------------------------------------------------- data


class Data(pl.LightningDataModule):
    """A data module that counts and changes batches, and has a state."""

    def __init__(self):
        super().__init__()
        self.count, self.stages = 0, []

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        self.stages.append(stage)
        self.rows = Rows(8)

    def train_dataloader(self):
        self.count += 1
        return DataLoader(self.rows, batch_size=2)

    def val_dataloader(self):
        return [DataLoader(Rows(4, seed=s), batch_size=2) for s in (1, 2)]

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "input_ids": (batch["input_ids"] + 1) % VOCAB}

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "labels": batch["input_ids"].flip(0)}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class TwoLoaders(Module):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", token_mean(self(batch), batch["labels"]))


@case("LightningDataModule: state, hooks of batches, two loaders")
def _(path):
    data, module = Data(), TwoLoaders()
    trainer = build_trainer(path, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(path / "x.ckpt")
    first = results(trainer, module), data.count, data.stages
    data, module = Data(), TwoLoaders()
    trainer = build_trainer(path, max_epochs=3)
    trainer.fit(module, datamodule=data, ckpt_path=path / "x.ckpt")
    return first, results(trainer, module), data.count


class ByLength(torch.utils.data.Sampler):
    """A batch sampler of a user, with another order."""

    def __init__(self, rows, batch_size=2):
        self.rows, self.batch_size = rows, batch_size

    def __iter__(self):
        order = torch.arange(len(self.rows)).flip(0).tolist()
        yield from (
            order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)
        )

    def __len__(self):
        return len(self.rows) // self.batch_size


@case("custom batch sampler")
def _(path):
    class Own(Module):
        def train_dataloader(self):
            rows = Rows(8)
            return DataLoader(rows, batch_sampler=ByLength(rows))

    return fit(path, Own())


@case(
    "custom batch sampler, use_distributed_sampler=True",
    verdict="refused",
    says="set `Trainer(use_distributed_sampler=False)`",
)
def _(path):
    class Own(Module):
        def train_dataloader(self):
            rows = Rows(8)
            return DataLoader(rows, batch_sampler=ByLength(rows))

    return fit(path, Own(), use_distributed_sampler=True)


def other_order(found: Any, exact: Any, size: int) -> None:
    """Lightning seeds again once processes are connected: samples have another order."""
    assert len(found["losses"]) == len(exact["losses"])
    assert found["losses"][0] != approx(exact["losses"][0])


@case("shuffle=True after seed_everything", verdict="differs", check=other_order)
def _(path):
    class Shuffled(Module):
        def train_dataloader(self):
            return DataLoader(Rows(8), batch_size=2, shuffle=True)

    pl.seed_everything(11, workers=True, verbose=False)
    return fit(path, Shuffled())


@case("sampler with a generator")
def _(path):
    class Shuffled(Module):
        def train_dataloader(self):
            generator = torch.Generator().manual_seed(5)
            rows = Rows(8)
            return DataLoader(rows, batch_size=2, sampler=RandomSampler(rows, generator=generator))

    return fit(path, Shuffled())


@case("workers that persist")
def _(path):
    multiprocessing.current_process().daemon = False  # loaders have workers

    class Workers(Module):
        def train_dataloader(self):
            return DataLoader(
                Rows(8), batch_size=2, num_workers=1, persistent_workers=True, drop_last=True
            )

    return fit(path, Workers())


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Rows(8)[index] for index in range(8))


@case("iterable data without a length")
def _(path):
    class Streaming(Module):
        def train_dataloader(self):
            return DataLoader(Stream(), batch_size=2)

    return fit(path, Streaming(), limit_train_batches=3, val_check_interval=2)


@case("random_split and Subset, loaders given to fit")
def _(path):
    generator = torch.Generator().manual_seed(1)
    train, val = torch.utils.data.random_split(Rows(10), [8, 2], generator=generator)
    module, trainer = Module(), build_trainer(path)
    trainer.fit(
        module, DataLoader(train, batch_size=2), DataLoader(Subset(val, [0, 1]), batch_size=1)
    )
    return results(trainer, module)


@case("loaders that grow with the epoch")
def _(path):
    class Growing(Module):
        def train_dataloader(self):
            return DataLoader(Rows(4 + 2 * self.current_epoch), batch_size=2)

    return fit(path, Growing(), reload_dataloaders_every_n_epochs=1, max_epochs=3)


# ------------------------------------------------------------------------------- Hugging Face


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return LlamaForCausalLM(config).double()


class Hugging(pl.LightningModule):
    def __init__(self, model=None):
        super().__init__()
        self.model = llama() if model is None else model
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_epoch=True)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def train_dataloader(self):
        return DataLoader(HuggingRows(8), batch_size=2)

    def val_dataloader(self):
        return DataLoader(HuggingRows(4, seed=1), batch_size=2)


class HuggingRows(Rows):
    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


HF = ("transformers",)


@case("HF get_cosine_schedule_with_warmup", needs=HF, rel=1e-5, sizes=(2, 3))
def _(path):
    from transformers import get_cosine_schedule_with_warmup

    class Cosine(Hugging):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            steps = self.trainer.estimated_stepping_batches
            scheduler = get_cosine_schedule_with_warmup(optimizer, 2, steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return fit(path, Cosine(), also=lambda t, m: t.optimizers[0].param_groups[0]["lr"])


class Tokenizer:
    """The part of a tokenizer that collators use; tests have no access to the hub."""

    def __new__(cls):
        from tokenizers import Tokenizer as Fast
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        words = {str(at): at for at in range(VOCAB)}
        return PreTrainedTokenizerFast(
            tokenizer_object=Fast(WordLevel(words, unk_token="3")),
            pad_token="0",
            bos_token="1",
            eos_token="2",
            unk_token="3",
            mask_token="4",
        )


def ragged(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of different lengths, as a tokenizer gives them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, LENGTH, (num_rows,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(5, VOCAB, (n,), generator=generator).tolist()} for n in lengths
    ]


def collated(collate: Any, model: Any = None) -> Hugging:
    class Collated(Hugging):
        def train_dataloader(self):
            return DataLoader(ragged(8), batch_size=2, collate_fn=collate)

        def val_dataloader(self):
            return DataLoader(ragged(4, seed=1), batch_size=4, collate_fn=collate)

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.seen.append(float(loss.detach()))
            return loss

    return Collated(model)


@case("HF DataCollatorForLanguageModeling", needs=HF, rel=1e-5, sizes=(2, 3))
def _(path):
    from transformers import DataCollatorForLanguageModeling

    return fit(path, collated(DataCollatorForLanguageModeling(Tokenizer(), mlm=False)))


@case("HF DataCollatorForLanguageModeling, padded to a multiple", needs=HF, rel=1e-5)
def _(path):
    from transformers import DataCollatorForLanguageModeling

    collate = DataCollatorForLanguageModeling(Tokenizer(), mlm=False, pad_to_multiple_of=8)
    return fit(path, collated(collate))


@case("HF DataCollatorWithFlattening, use_cache=False", needs=HF, rel=1e-5, sizes=(2, 3))
def _(path):
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening(return_tensors="pt")
    return fit(path, collated(collate, llama(use_cache=False)))


def kept_apart(found: Any, exact: Any, size: int) -> None:
    """Samples are separate here, as if padded; stock SDPA with a cache mixes them."""
    assert found["losses"][:3] == [pytest.approx(x, rel=1e-5) for x in exact["padded"][:3]]
    assert found["losses"][0] != pytest.approx(exact["losses"][0], rel=1e-4)


@case("HF DataCollatorWithFlattening", needs=HF, verdict="differs", check=kept_apart)
def _(path):
    from transformers import DataCollatorForLanguageModeling, DataCollatorWithFlattening

    padded = collated(DataCollatorForLanguageModeling(Tokenizer(), mlm=False))
    fit(path, padded)
    found = fit(path, collated(DataCollatorWithFlattening(return_tensors="pt")))
    return found | {"padded": padded.seen}


@case("HF DataCollatorForSeq2Seq as a padder of labels", needs=HF, rel=1e-5)
def _(path):
    from transformers import DataCollatorForSeq2Seq

    class Labelled(Hugging):
        def train_dataloader(self):
            rows = [{**row, "labels": row["input_ids"]} for row in ragged(8)]
            return DataLoader(rows, batch_size=2, collate_fn=DataCollatorForSeq2Seq(Tokenizer()))

        def training_step(self, batch, batch_idx):
            # Not logged: over an epoch it is weighted by tokens, on one device by samples.
            loss = self.model(**batch).loss
            self.seen.append(float(loss.detach()))
            return loss

    return fit(path, Labelled(), also=None, limit_val_batches=0)


@case(
    "HF DataCollatorForLanguageModeling, mlm=True, masked LM",
    needs=HF,
    rel=1e-5,
)
def _(path):
    from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    collate = DataCollatorForLanguageModeling(Tokenizer(), mlm=True)
    collate.generator = torch.Generator().manual_seed(3)  # it draws: the same on all ranks
    return fit(path, collated(collate, BertForMaskedLM(config).double()))


@case("HF gradient_checkpointing_enable", needs=HF, rel=1e-5, sizes=(2, 3))
def _(path):
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return fit(path, Hugging(model))


def fit_compiled(path, module):
    """Fit twice, and validate between; few graphs, which are slow to compile."""
    options = {} if alone() else {"strategy": doors.strategy(verify_steps=False)}
    limits = dict.fromkeys(("limit_train_batches", "limit_val_batches"), 1)
    trainer = build_trainer(path, max_epochs=1, num_sanity_val_steps=0, **limits, **options)
    module.model.model.layers = module.model.model.layers[:1]
    trainer.fit(module)
    between = trainer.validate(module, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return between, results(trainer, module)


@case("HF torch.compile of the model", needs=HF, rel=1e-5)
def _(path):
    class InConfigureModel(Hugging):
        def configure_model(self):
            if "_orig_mod" not in dict(self.model.named_children()):
                self.model = torch.compile(self.model, backend="aot_eager")

    before = Hugging()
    before.model = torch.compile(before.model, backend="eager")
    return fit_compiled(path, before), fit_compiled(path, InConfigureModel())


@case("PEFT LoRA with modules_to_save", needs=("transformers", "peft"), rel=1e-5, sizes=(2, 3))
def _(path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, modules_to_save=["lm_head"]
    )
    torch.manual_seed(1)
    return fit(path, Hugging(get_peft_model(llama(), config).double()))


@case(
    "PEFT LoRA, resize_token_embeddings, enable_input_require_grads",
    needs=("transformers", "peft"),
    rel=1e-5,
)
def _(path):
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(4)
    model.resize_token_embeddings(VOCAB + 3)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).double()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return fit(path, Hugging(model))


@case("HF generate in validation, paused", needs=HF, rel=1e-5)
def _(path):
    class Generating(Hugging):
        def on_validation_epoch_end(self):
            prompt = torch.tensor([[5, 6, 7]])
            found = self.model.generate(prompt, max_new_tokens=4, do_sample=False)
            self.seen += [float(x) for x in found.flatten()]

    return fit(path, Generating(), max_epochs=1)


@case("HF output_hidden_states, return_dict=False", needs=HF, rel=1e-5)
def _(path):
    class Asking(Hugging):
        def training_step(self, batch, batch_idx):
            output = self.model(**batch, output_hidden_states=True, return_dict=False)
            self.seen.append(float(output[0].detach()))
            return output[0]

    return fit(path, Asking())


@case("HF datasets with set_format and map", needs=("transformers", "datasets"), rel=1e-5)
def _(path):
    import datasets

    rows = [{"input_ids": row["input_ids"].tolist()} for row in map(Rows(8).__getitem__, range(8))]
    table = datasets.Dataset.from_list(rows)
    table = table.map(lambda row: {"labels": row["input_ids"]}).with_format("torch")

    class Table(Hugging):
        def train_dataloader(self):
            return DataLoader(table, batch_size=2)

    return fit(path, Table())


# ------------------------------------------------------------------------------- other libraries


@case(
    "Optuna's pruning callback",
    needs=("optuna", "optuna_integration"),
    verdict="refused",
    says="supports only optuna.storages.RDBStorage",
)
def _(path):
    import optuna
    from optuna_integration import PyTorchLightningPruningCallback

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    callback = PyTorchLightningPruningCallback(study.ask(), monitor="val_loss")
    return fit(path, callbacks=[callback])


@case("bf16-true with EMA")
def _(path):
    ema = cb.EMAWeightAveraging(decay=0.9)
    found = fit(path, Module().float(), callbacks=[ema], precision="bf16-true")
    return len(found["losses"])


@case("saved by one strategy, resumed by another")
def _(path):
    module = Module()
    options = {} if alone() else {"strategy": doors.strategy(save_distributed_checkpoint=False)}
    trainer = build_trainer(path, max_epochs=1, **options)
    trainer.fit(module)
    trainer.save_checkpoint(path / "x.ckpt")
    options = {} if alone() else {"strategy": doors.strategy(parameter_sharding="none")}
    module = Module()
    trainer = build_trainer(path, max_epochs=2, **options)
    trainer.fit(module, ckpt_path=path / "x.ckpt")
    return results(trainer, module)


@case("the same Trainer and module for fit, validate, test, predict, fit again")
def _(path):
    module, trainer = Module(), build_trainer(path, max_epochs=1)
    trainer.fit(module)
    first = trainer.validate(module, verbose=False), trainer.test(module, verbose=False)
    predicted = trainer.predict(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    return first, predicted, results(trainer, module)
