"""Pass keys: rows from a seed, an exact score on any ranks, a map."""

import sys

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from lightning_cp import ContextParallel
from recipes.data import PasskeyData, RetrievalGrid, heat_map, retrieval_accuracy
from recipes.data.passkey import is_held_out


def passkeys(**options):
    data = PasskeyData(
        **{"seq_len": 128, "lengths": [96, 128], "depths": [0.0, 0.5, 1.0]} | options
    )
    data.setup("fit")
    return data


def key_of(data, row):
    return data.tokenizer.decode(row["labels"][row["labels"] != -100])


@pytest.mark.parametrize("key_len", [2, 5, 18])
def test_the_key_is_hidden_once_and_asked_for_at_the_end(key_len):
    data = passkeys(key_len=key_len, seq_len=300, lengths=[150, 300])
    for rows in (data.train_rows(), data.val_rows()):
        for index in range(20):
            row = rows[index]
            length = int((row["document_ids"] == 0).sum())
            assert length in (150, 300)
            assert (row["document_ids"][length:] == -1).all()
            text, key = data.tokenizer.decode(row["input_ids"][:length]), key_of(data, row)
            assert len(key) == key_len
            assert key.isdigit()
            assert text.endswith(f"What is the pass key? The pass key is {key}")
            assert text.count(f" The pass key is {key}. Remember it.") == 1
            asked = (row["labels"] != -100).nonzero().flatten().tolist()
            assert asked == list(range(length - key_len, length)), "nothing else is a label"


def test_validation_rows_lie_on_the_grid():
    data = passkeys(val_rows_per_cell=2)
    rows = data.val_rows()
    assert len(rows) == 2 * 6
    for index in range(12):
        row = rows[index]
        cell = int(row["cell"])
        length, depth = data.lengths[cell // 3], data.depths[cell % 3]
        assert (row["document_ids"] == 0).sum() == length
        text = data.tokenizer.decode(row["input_ids"][:length])
        before, after = text.index(" The pass key"), text.index(" What is")
        room = before + after - text.index("Remember it.") - len("Remember it.")
        assert before == round(depth * room)
    assert sorted(int(rows[i]["cell"]) for i in range(12)) == sorted([*range(6)] * 2)
    assert int(data.train_rows()[0]["cell"]) == -1


def test_keys_and_depths_of_training_vary_and_validation_keys_are_held_out():
    data = passkeys(key_len=2)
    train, val = data.train_rows(), data.val_rows()
    trained = {key_of(data, train[i]) for i in range(600)}
    tried = {key_of(data, val[i]) for i in range(len(val))}
    assert len(trained) > 70
    assert not trained & tried
    for place in (0, 1):  # every digit is seen at every place
        assert {key[place] for key in trained} == set("0123456789")
    assert 0.05 < sum(map(is_held_out, range(100_000))) / 100_000 < 0.2
    starts = {data.tokenizer.decode(train[i]["input_ids"]).index(" The") for i in range(50)}
    assert len(starts) > 10


def test_rows_are_the_same_in_every_run_and_others_with_another_seed():
    row, again, other = (passkeys(seed=seed).train_rows()[7]["input_ids"] for seed in (3, 3, 4))
    assert torch.equal(row, again)
    assert not torch.equal(row, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [64, 256]}, "a text of 256 tokens does not fit into seq_len=128"),
        ({"lengths": [32]}, "key and question alone take 8. tokens of this tokenizer"),
        ({"depths": [0.5, 1.5]}, r"depths=\[0.5, 1.5\]: give shares from 0"),
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
    batch = {k: torch.stack([data.val_rows()[i][k] for i in rows]) for k in data.val_rows()[0]}
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
    assert retrieval_accuracy(logits, batch).tolist() == EXPECTED
    batch["labels"][0] = -100
    assert not retrieval_accuracy(logits, batch)[0], "a row that fills up was not answered"


def score_on_ranks(layout, lengths):
    data = passkeys(seq_len=max(lengths), lengths=lengths)
    batch, logits = answers(data, range(6), wrong=WRONG)
    cp = ContextParallel(dist.group.WORLD, layout=layout, sequence_dims={"logits": 1})
    with cp.step({**batch, "logits": logits}) as local:
        assert local["logits"].shape[1] < logits.shape[1]
        return retrieval_accuracy(local["logits"], local).tolist(), local["cell"].tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
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
        self.grid.update(retrieval_accuracy(logits, batch), batch["cell"])

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


# ---------------------------------------------------------------- the map


def test_the_map_is_a_table_and_says_if_it_could_not_be_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    accuracy = torch.tensor([[1.0, 0.25], [0.5, float("nan")]])
    table = heat_map(accuracy, [1024, 2048], [0.0, 0.5], tmp_path / "map.png").splitlines()
    assert table[0].split() == ["length", "\\", "depth", "0%", "50%"]
    assert table[1].split() == ["1,024", "1.00", "0.25"]
    assert table[2].split() == ["2,048", "0.50", "nan"]
    assert table[3].endswith("map.png was not drawn: pip install matplotlib.")
    assert not list(tmp_path.iterdir())


def test_the_map_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    said = heat_map(torch.tensor([[1.0, 0.5]]), [64], [0.0, 1.0], tmp_path / "maps/map.png")
    assert "drawn:" in said
    assert (tmp_path / "maps/map.png").read_bytes().startswith(b"\x89PNG")
