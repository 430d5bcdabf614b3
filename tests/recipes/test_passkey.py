"""Pass keys: rows from a seed, an exact score on any ranks, a map, and a model that learns them."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything

from recipes.data import PasskeyData, RetrievalGrid, heat_map, retrieval_accuracy
from recipes.data.passkey import is_held_out
from recipes.module import CausalLMModule
from tests import doors
from tests.lightning.jobs import build_trainer, elastic_environment


def passkeys(**options):
    data = PasskeyData(
        **{"seq_len": 128, "lengths": [96, 128], "depths": [0.0, 0.5, 1.0]} | options
    )
    data.setup("fit")
    return data


def key_of(data, row):
    return data.tokenizer.decode(row["labels"][row["labels"] != -100])


def texts_of(row):
    """The documents of a row, each as a row of its own without padding."""
    documents = row["document_ids"]
    found = [documents == number for number in range(int(documents.max()) + 1)]
    return [{k: x[mine] for k, x in row.items() if k != "cell"} for mine in found]


@pytest.mark.parametrize("key_len", [2, 5, 18])
def test_the_key_is_hidden_once_in_each_text_and_asked_for_at_its_end(key_len):
    data = passkeys(key_len=key_len, seq_len=340, lengths=[150, 300])
    for rows in (data.train_samples(), data.val_samples()):
        for index in range(20):
            for part in texts_of(rows[index]):
                text, key = data.tokenizer.decode(part["input_ids"]), key_of(data, part)
                assert len(text) in (150, 300)
                assert len(key) == key_len
                assert key.isdigit()
                assert text.startswith(" ")
                assert text.endswith(f"What is the pass key? The pass key is {key}")
                assert text.count(f" The pass key is {key}. Remember it.") == 1
                assert text.count(" The pass key is ") == 2, "the hidden one, and the question"
                asked = (part["labels"] != -100).nonzero().flatten().tolist()
                last = list(range(len(text) - key_len, len(text)))
                assert asked == last, "nothing else is a label"


def test_training_rows_are_packed_until_nothing_fits():
    data = passkeys(seq_len=700, lengths=[120, 700], train_lengths=[100, 150, 310])
    rows = data.train_samples()
    counts = set()
    for index in range(60):
        documents = rows[index]["document_ids"]
        lengths = [int((documents == n).sum()) for n in range(int(documents.max()) + 1)]
        counts.add(len(lengths))
        assert set(lengths) <= {100, 150, 310}
        assert 700 - sum(lengths) < 100, "another text would fit"
        # One after the other from the start, and padding behind them.
        in_order = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        assert documents.tolist() == [*in_order.tolist(), *[-1] * (700 - sum(lengths))]
        padding = documents == -1
        assert (rows[index]["labels"][padding] == -100).all()
        assert (rows[index]["input_ids"][padding] == data.tokenizer.pad_token_id).all()
        keys = [key_of(data, part) for part in texts_of(rows[index])]
        assert len(set(keys)) > 1, "each text has a key of its own"
    assert len(counts) > 2


def test_a_length_that_is_listed_twice_is_drawn_more_often():
    lengths = {}
    for name, train_lengths in {"once": [100, 200], "often": [100, 100, 100, 200]}.items():
        rows = passkeys(seq_len=400, lengths=[400], train_lengths=train_lengths).train_samples()
        first = [int((rows[i]["document_ids"] == 0).sum()) for i in range(200)]
        lengths[name] = first.count(100) / 200
    assert 0.4 < lengths["once"] < 0.6
    assert 0.65 < lengths["often"] < 0.85


def test_validation_rows_hold_one_text():
    data = passkeys(seq_len=400, lengths=[100, 150, 400])
    for index in range(len(data.val_samples())):
        documents = data.val_samples()[index]["document_ids"]
        length = data.lengths[index % 9 // 3]
        assert documents.tolist() == [0] * length + [-1] * (400 - length)


def test_validation_rows_lie_on_the_grid():
    data = passkeys(val_rows_per_cell=2)
    rows = data.val_samples()
    assert len(rows) == 2 * 6
    for index in range(12):
        row = rows[index]
        cell = int(row["cell"])
        length, depth = data.lengths[cell // 3], data.depths[cell % 3]
        text = data.tokenizer.decode(row["input_ids"][:length])
        before, after = text.index(" The pass key"), text.index(" What is")
        room = before + after - text.index("Remember it.") - len("Remember it.")
        assert before == round(depth * room)
    assert sorted(int(rows[i]["cell"]) for i in range(12)) == sorted([*range(6)] * 2)
    assert int(data.train_samples()[0]["cell"]) == -1


def test_keys_and_depths_of_training_vary_and_validation_keys_are_held_out():
    data = passkeys(key_len=2)
    train, val = data.train_samples(), data.val_samples()
    trained = {key_of(data, text) for i in range(600) for text in texts_of(train[i])}
    tried = {key_of(data, val[i]) for i in range(len(val))}
    assert len(trained) > 70
    assert not trained & tried
    for place in (0, 1):  # every digit is seen at every place
        assert {key[place] for key in trained} == set("0123456789")
    assert 0.05 < sum(map(is_held_out, range(100_000))) / 100_000 < 0.2
    starts = {data.tokenizer.decode(train[i]["input_ids"]).index(" The") for i in range(50)}
    assert len(starts) > 10


def test_rows_are_the_same_in_every_run_and_others_with_another_seed():
    row, again, other = (passkeys(seed=seed).train_samples()[7]["input_ids"] for seed in (3, 3, 4))
    assert torch.equal(row, again)
    assert not torch.equal(row, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [64, 256]}, "a text of 256 tokens does not fit into seq_len=128"),
        ({"train_lengths": [128, 129]}, r"train_lengths=\[128, 129\]: a text of 129 tokens"),
        ({"lengths": [32]}, "key and question alone take 8. tokens of this tokenizer"),
        ({"train_lengths": [64, 128]}, r"^train_lengths=\[64, 128\]: key and question alone"),
        ({"depths": [0.5, 1.5]}, r"depths=\[0.5, 1.5\]: give fractions from 0"),
        ({"key_len": 1}, "key_len=1: give 2 to 18 digits"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message) as error:
        passkeys(**options)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- the score


def answers(data, rows, *, wrong=()):
    """Return a batch, and logits that answer it rightly but for (row, digit) pairs."""
    batch = {
        k: torch.stack([data.val_samples()[i][k] for i in rows]) for k in data.val_samples()[0]
    }
    targets = batch["input_ids"].roll(-1, 1)
    for row, digit in wrong:
        labels = batch["labels"][row]
        last = int((labels != -100).nonzero().max())
        targets[row, last - data.key_len + digit] = 1  # what comes next, but not a digit
    noise = torch.randn(*targets.shape, len(data.tokenizer), generator=torch.manual_seed(0))
    return batch, noise.scatter(2, targets[..., None], 100.0)


WRONG = [(1, 0), (3, 4), (4, 2), (4, 3)]
EXPECTED = [True, False, True, False, False, True]


def test_a_row_counts_only_if_every_digit_is_right():
    batch, logits = answers(passkeys(), range(6), wrong=WRONG)
    assert retrieval_accuracy(logits, batch, cp=None).tolist() == EXPECTED
    batch["labels"][0] = -100
    assert not retrieval_accuracy(logits, batch, cp=None)[0], "no label, no answer"


def score_on_ranks(layout, lengths):
    data = passkeys(seq_len=max(lengths), lengths=lengths)
    batch, logits = answers(data, range(6), wrong=WRONG)
    cp = doors.parallel(dist.group.WORLD, layout=layout, sequence_dims={"logits": 1})
    with cp.step({**batch, "logits": logits}) as local:
        assert local["logits"].shape[1] < logits.shape[1]
        answered = retrieval_accuracy(local["logits"], local, cp=cp)
        return answered.tolist(), local["cell"].tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["zigzag", pytest.param("contiguous", marks=pytest.mark.slow)])
def test_ranks_that_share_rows_agree_on_the_score(ranks, layout):
    for lengths in ([97, 131], [96, 128]):
        for found, cells in ranks(2).run(score_on_ranks, layout, lengths):
            assert found == EXPECTED
            assert cells == list(range(6))


class Oracle(LightningModule):
    """Answers every key but those of the deepest cells, and keeps score."""

    def __init__(self, data):
        super().__init__()
        self.vocab, self.grid = len(data.tokenizer), data.build_metric()
        self.num_rows = 0

    def validation_step(self, batch, batch_idx):
        logits = torch.nn.functional.one_hot(batch["input_ids"].roll(-1, 1), self.vocab).float()
        logits[batch["cell"] % 3 == 2] = 0
        self.num_rows += int((batch["cell"] >= 0).sum())
        cp = getattr(self.trainer.strategy, "context_parallel", None)
        self.grid.update(retrieval_accuracy(logits, batch, cp=cp), batch["cell"])

    def on_validation_epoch_end(self):
        self.found = self.grid.compute()
        self.log("retrieval", self.grid.mean())


def test_the_grid_is_filled_by_a_validation_run():
    data = PasskeyData(
        seq_len=128, lengths=[96, 128], depths=[0.0, 0.5, 1.0], batch_size=5, val_rows_per_cell=3
    )
    module = Oracle(data)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=1, enable_checkpointing=False, **quiet)
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert module.num_rows == 18
    assert module.found.tolist() == [[1, 1, 0], [1, 1, 0]]
    assert metrics["retrieval"] == pytest.approx(2 / 3)


def test_rows_of_no_cell_are_not_counted():
    grid = RetrievalGrid(1, 2)
    grid.update(torch.tensor([True, False, True]), torch.tensor([0, -1, -1]))
    assert grid.compute()[0, 0] == 1
    assert grid.compute()[0, 1].isnan()
    assert grid.mean() == 1


# ---------------------------------------------------------------- learning it

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.08,
}


class Recorded(CausalLMModule):
    """Remembers the loss of every step, and what each validation found."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def on_fit_start(self):
        super().on_fit_start()
        self.losses, self.found = [], []

    def on_validation_end(self):
        metrics = self.trainer.callback_metrics
        self.found.append((float(metrics["val_loss"]), float(metrics["val_retrieval"])))


def learn(folder, max_steps, data_options):
    """Train on the ranks of the pool, as passkey_2k.yaml does; return both curves."""
    with elastic_environment():
        seed_everything(0)
        data = PasskeyData(key_len=4, num_train_rows=100_000, seed=1, **data_options)
        module = Recorded(
            config=SMALL,
            lr=3e-3,
            weight_decay=0.0,
            betas=(0.9, 0.98),
            warmup_steps=50,
            gradient_checkpointing=False,
        )
        trainer = build_trainer(
            strategy=doors.strategy(),
            default_root_dir=folder,
            max_steps=max_steps,
            max_epochs=-1,
            gradient_clip_val=1.0,
            val_check_interval=max_steps // 4,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, datamodule=data)
        return torch.tensor(module.losses), torch.tensor(module.found)


def learn_on_both(ranks, folder, *args):
    """Train on one process and on two; return (losses, found) of each."""
    (alone,) = ranks(1).run(learn, folder / "alone", *args, timeout=1800)
    shared, same = ranks(2).run(learn, folder / "shared", *args, timeout=1800)
    assert all(map(torch.equal, shared, same)), "ranks that share rows have one curve"
    return alone, shared


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_walk_along_the_curve_of_one_process(ranks, tmp_path):
    options = {
        "seq_len": 200,
        "lengths": [110, 200],
        "train_lengths": [95, 95, 200],  # most rows hold two texts
        "batch_size": 4,
        "val_rows_per_cell": 1,
    }
    (losses, found), shared = learn_on_both(ranks, tmp_path, 8, options)
    assert len(losses) == 8
    torch.testing.assert_close(shared[0], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(shared[1], found, rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.ranks
def test_held_out_keys_are_found_under_context_parallelism(ranks, tmp_path):
    options = {"seq_len": 128, "batch_size": 32, "lengths": [96, 128], "val_rows_per_cell": 16}
    (losses, found), shared = learn_on_both(ranks, tmp_path, 400, options)
    # Rounding differs, and training magnifies it: the same curve at first, the same end.
    torch.testing.assert_close(shared[0][:50], losses[:50], rtol=1e-4, atol=0)
    for name, retrieval in {"one process": found[-1, 1], "two ranks": shared[1][-1, 1]}.items():
        assert retrieval > 0.95, name


# ---------------------------------------------------------------- the map


def test_the_map_is_a_table():
    accuracy = torch.tensor([[1.0, 0.25], [0.5, float("nan")]])
    table = heat_map(accuracy, [1024, 2048], [0.0, 0.5]).splitlines()
    assert table[0].split() == ["|", "length", "\\", "depth", "|", "0%", "|", "50%", "|"]
    assert table[2].split() == ["|", "1,024", "|", "1.00", "|", "0.25", "|"]
    assert table[3].split() == ["|", "2,048", "|", "0.50", "|", "nan", "|"]
