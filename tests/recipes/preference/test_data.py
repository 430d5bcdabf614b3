"""Pairs as packed samples, and what the data module and the module refuse."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.preference import PairData
from recipes.preference.module import PreferenceModule
from recipes.preference.pairs import REFERENCE, Pair, lay_out, pack_pairs
from recipes.weights import LoraOptions


def pair(prompt, *completions, **more):
    return Pair(np.array(prompt), tuple(np.array(x) for x in completions), **more)


def test_a_pair_with_a_shared_prompt_and_without():
    one = pair([5, 6, 7], [1, 2], [3], reference=(-1.5, -2.25))
    shared, alone = (lay_out(one, share_prompt=x) for x in (True, False))
    assert shared["input_ids"].tolist() == [5, 6, 7, 1, 2, 7, 3]
    assert shared["labels"].tolist() == [-100, -100, -100, 1, 2, -100, 3]
    assert shared["document_ids"].tolist() == [0] * 7
    assert shared["branch_ids"].tolist() == [-1, -1, 0, 0, 0, 1, 1]
    assert shared[REFERENCE].view(np.float32).tolist() == [0, 0, 0, -1.5, 0, 0, -2.25]
    assert alone["input_ids"].tolist() == [5, 6, 7, 1, 2, 5, 6, 7, 3]
    assert alone["labels"].tolist() == [-100, -100, -100, 1, 2, -100, -100, -100, 3]
    assert alone["document_ids"].tolist() == [0] * 5 + [1] * 4
    assert alone["branch_ids"].tolist() == [-1, -1, -1, 0, 0, -1, -1, -1, 1]
    assert alone[REFERENCE].view(np.float32).tolist() == [0, 0, 0, -1.5, 0, 0, 0, 0, -2.25]
    assert all(x.dtype == np.int32 for x in (*shared.values(), *alone.values()))


def test_a_prompt_of_one_token_is_in_every_branch():
    sample = lay_out(pair([5], [1], [3, 4]), share_prompt=True)
    assert sample["input_ids"].tolist() == [5, 1, 5, 3, 4]
    assert sample["branch_ids"].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("share", [True, False])
def test_every_pair_is_in_one_sample(share):
    generator = np.random.default_rng(0)
    pairs = [
        pair(*(generator.integers(0, 50, n) for n in generator.integers(1, 12, 3)), number=i)
        for i in range(40)
    ]
    samples = list(pack_pairs(pairs, 64, share_prompt=share, pad_id=9))
    found = []
    for sample in samples:
        assert all(len(x) == 64 for x in sample.values())
        padding = sample["document_ids"] == -1
        assert (sample["input_ids"][padding] == 9).all()
        assert (sample["labels"][padding] == -100).all()
        assert (sample["branch_ids"][padding] == -1).all()
        count = sample["branch_ids"].max() + 1
        assert count % 2 == 0
        for first in range(0, count, 2):
            mine = [
                sample["labels"][(sample["branch_ids"] == at) & (sample["labels"] != -100)]
                for at in (first, first + 1)
            ]
            found.append(tuple(x.tolist() for x in mine))
    expected = [tuple(x.tolist() for x in one.completions) for one in pairs]
    assert sorted(found) == sorted(expected)


def test_a_pair_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="Pair 7 takes 7 tokens, but samples hold seq_len=6"):
        list(pack_pairs([pair([5, 6, 7], [1, 2], [3], number=7)], 6))


def write(folder, records):
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


RECORDS = [
    {"prompt": f"{i}?", "chosen": "yes" * (i + 1), "rejected": "no", "ref_chosen_logps": -i / 4}
    for i in range(4)
]


def data(folder, records=RECORDS, **options):
    options = {"seq_len": 128, "val_fraction": 0, "cache_dir": str(folder), **options}
    return PairData(write(folder, records), **options)


def texts(found):
    """Return what each branch of the first sample says."""
    found.prepare_data()
    found.setup("fit")
    sample = found.train_samples()[0]
    ids, branches = sample["input_ids"], sample["branch_ids"]
    return [
        found.tokenizer.decode(ids[branches == at], skip_special_tokens=True)
        for at in range(int(branches.max()) + 1)
    ]


def test_pairs_of_a_file(tmp_path):
    assert texts(data(tmp_path))[:4] == ["?yes", "?no", "?yesyes", "?no"]
    alone = data(tmp_path, share_prompts=False)
    assert texts(alone)[:2] == ["yes", "no"]
    assert alone.num_completions == 2


def test_mismatched_completions_are_those_of_another_pair(tmp_path):
    found = data(tmp_path, mismatched=True, share_prompts=False)
    assert found.num_completions == 3
    assert texts(found)[:6] == ["yes", "no", "yes" * 4, "yesyes", "no", "yes"]


def test_stored_log_probabilities(tmp_path):
    records = [{**record, "ref_rejected_logps": -7.5} for record in RECORDS]
    found = data(tmp_path, records, stored_reference=True)
    texts(found)
    bits = found.train_samples()[0][REFERENCE].to(torch.int32).view(torch.float32)
    assert bits[bits != 0].tolist()[:3] == [-7.5, -0.25, -7.5]


def test_long_pairs_are_refused_or_skipped(tmp_path):
    with pytest.raises(ValueError, match="Pair 3 takes"):
        data(tmp_path, seq_len=19).prepare_data()
    found = data(tmp_path, seq_len=19, long_pairs="skip")
    found.prepare_data()
    found.setup("fit")
    assert sum(len(x["labels"]) > 0 for x in found.train_samples()) == 3


def test_made_pairs_are_a_function_of_the_seed(tmp_path):
    def made(seed):
        options = {"seq_len": 256, "max_documents": 2, "val_fraction": 0, "seed": seed}
        found = PairData(cache_dir=str(tmp_path), **options)
        found.prepare_data()
        found.setup("fit")
        return found.train_samples()[0]["input_ids"]

    assert torch.equal(made(0), made(0))
    assert not torch.equal(made(0), made(1))


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"prompt": "a", "chosen": "b"}], {}, "has no column 'rejected'; it has prompt, chosen"),
        ([{"prompt": 5, "chosen": "b", "rejected": "c"}], {}, "Pair 0 holds int, str, str, but"),
        ([{"prompt": "", "chosen": "b", "rejected": "c"}], {}, "the prompt is not empty"),
        (RECORDS[:1], {"mismatched": True}, "there is only 1 pair to choose from"),
        (RECORDS, {"stored_reference": True}, "has no column 'ref_rejected_logps'"),
    ],
)
def test_records_that_are_no_pairs_are_refused(tmp_path, records, options, message):
    with pytest.raises(ValueError, match=message):
        data(tmp_path, records, **options).prepare_data()


def test_options_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mismatched=True adds completions whose log-prob"):
        data(tmp_path, mismatched=True, stored_reference=True)
    with pytest.raises(ValueError, match="long_pairs='drop'"):
        data(tmp_path, long_pairs="drop")
    with pytest.raises(ValueError, match="loss='hinge'"):
        PreferenceModule(loss="hinge")
    with pytest.raises(ValueError, match="reference='adapters' computes the reference without"):
        PreferenceModule(reference="adapters")
    with pytest.raises(ValueError, match="reference='model' holds a second model, though with"):
        PreferenceModule(reference="model", lora=LoraOptions())


def attach(module, found):
    """Give a module a trainer as far as setup() asks for it."""
    strategy = SimpleNamespace(context_parallel=None)
    module._trainer = SimpleNamespace(strategy=strategy, datamodule=found)
    module.setup("fit")
    return module._kind


def test_the_module_chooses_its_reference_and_checks_the_data(tmp_path):
    plain, stored = data(tmp_path), data(tmp_path, stored_reference=True)
    assert attach(PreferenceModule(), plain) == "model"
    assert attach(PreferenceModule(), stored) == "stored"
    assert attach(PreferenceModule(lora=LoraOptions()), plain) == "adapters"
    assert attach(PreferenceModule(loss="orpo"), plain) == "none"
    with pytest.raises(ValueError, match=r"loss='kto' needs 3 .* data has 2. Set .* to true"):
        attach(PreferenceModule(loss="kto"), plain)
    with pytest.raises(ValueError, match=r"loss='ipo' needs 2 .* data has 3. Set .* to false"):
        attach(PreferenceModule(loss="ipo"), data(tmp_path, mismatched=True))
    with pytest.raises(ValueError, match="reference='stored' reads log-probabilities from"):
        attach(PreferenceModule(reference="stored"), plain)
