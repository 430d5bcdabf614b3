"""Rows: packed from any source, the same in every run, read by data rank, resumed anywhere."""

import gzip
import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.data import ChatData, PasskeyData, TextData
from recipes.data.loader import SampleLoader, plan_evaluation, plan_training
from recipes.data.packed_data import SampleData
from recipes.data.packing import OPEN_SAMPLES, document, pack
from recipes.data.sources import find_source
from recipes.tokens import byte_tokenizer, load_tokenizer
from tests import doors

# ---------------------------------------------------------------- packing

lists = st.lists(st.lists(st.integers(1, 99), max_size=12), max_size=30)


def numbered(tokens):
    """Make documents whose labels differ from their tokens, and now and then are none."""
    return [document(ids, [i + 100 if i % 3 else -100 for i in ids]) for ids in tokens]


def pieces(rows):
    """Return the documents of rows: their tokens and labels."""
    found = []
    for row in rows:
        ids = row["document_ids"]
        used = int((ids >= 0).sum())
        assert (ids[used:] == -1).all(), "padding is at the end"
        assert (row["labels"][used:] == -100).all()
        assert (row["input_ids"][used:] == 0).all()
        assert set(ids[:used].tolist()) == set(range(int(ids.max()) + 1)), "numbered 0, 1, ..."
        assert (np.diff(ids[:used]) >= 0).all()
        for number in range(int(ids.max()) + 1):
            here = ids == number
            found.append((row["input_ids"][here].tolist(), row["labels"][here].tolist()))
    return found


@given(lists, st.integers(1, 9))
def test_split_documents_fill_every_row_and_lose_nothing(tokens, seq_len):
    rows = list(pack(numbered(tokens), seq_len))
    assert all(len(values) == seq_len for row in rows for values in row.values())
    assert all((row["document_ids"] >= 0).all() for row in rows[:-1])
    written = [i for ids, _ in pieces(rows) for i in ids]
    assert written == [i for ids in tokens for i in ids]
    labels = [i for _, labels in pieces(rows) for i in labels]
    assert labels == [i + 100 if i % 3 else -100 for ids in tokens for i in ids]
    assert len(rows) == -(-len(written) // seq_len)


@given(lists, st.integers(1, 9))
def test_a_document_that_is_continued_is_one_of_its_own(tokens, seq_len):
    rows = list(pack(numbered(tokens), seq_len))
    starts = np.cumsum([0, *(len(ids) for ids in tokens)])
    expected = sum(  # the rows that a document touches
        (stop - 1) // seq_len - start // seq_len + 1
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
        if stop > start
    )
    assert len(pieces(rows)) == expected


@given(lists, st.integers(1, 12))
def test_truncated_documents_stay_whole_otherwise(tokens, seq_len):
    rows = list(pack(numbered(tokens), seq_len, long_documents="truncate"))
    kept = [(d.ids[:seq_len].tolist(), d.labels[:seq_len].tolist()) for d in numbered(tokens)]
    assert sorted(pieces(rows)) == sorted(document for document in kept if document[0])


def test_whole_documents_waste_little():
    generator = np.random.default_rng(0)
    tokens = [[1] * n for n in generator.integers(1, 400, 5000).tolist()]
    rows = list(pack(numbered(tokens), 512, long_documents="refuse"))
    padding = 1 - sum(map(len, tokens)) / (512 * len(rows))
    assert padding < 0.03
    assert len(rows) > OPEN_SAMPLES


def test_a_document_longer_than_a_row_is_refused_if_asked():
    with pytest.raises(ValueError, match=r"Document 1 has 5 tokens, but samples hold seq_len=4"):
        list(pack([document([1]), document([1] * 5, number=1)], 4, long_documents="refuse"))


def test_wrong_options_of_packing_are_refused():
    with pytest.raises(ValueError, match="long_documents='cut': use one of split, refuse"):
        pack([], 4, long_documents="cut")
    with pytest.raises(ValueError, match="seq_len=0"):
        pack([], 0)


# ---------------------------------------------------------------- tokens


def test_any_text_comes_back_from_bytes():
    tokenizer = byte_tokenizer()

    @given(st.lists(st.integers(0, 127) | st.integers(0, 0xD7FF) | st.integers(0xE000, 0x10FFFF)))
    def check(codes):
        text = "".join(map(chr, codes))
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        if "<" not in text:
            assert ids == list(text.encode())

    check()


def test_the_byte_tokenizer_is_saved_and_loaded_as_others_are(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert loaded("a<eos>é")["input_ids"] == [97, 258, 195, 169]
        assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (256, 257, 258)
        assert loaded.chat_template == byte_tokenizer().chat_template


def test_an_unknown_role_is_refused_by_the_byte_tokenizer():
    with pytest.raises(Exception, match="knows the roles system, user and assistant, not tool"):
        byte_tokenizer().apply_chat_template([{"role": "tool", "content": "x"}])


def test_tokenizers_that_cannot_be_found_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="tokenizer='./nowhere': there is no such folder"):
        load_tokenizer("./nowhere")
    with pytest.raises(ValueError, match="could not be loaded, neither as a folder nor") as error:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(error.value)

    def offline(name, **_):
        raise OSError("We couldn't connect.\nMore lines.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(ValueError, match=r"'some/name' could not .* \(We couldn't connect\)"):
        load_tokenizer("some/name")


# ---------------------------------------------------------------- sources

SPLITS = (("test", 3), ("train", None))
TEXTS = [f"Document {i}: " + "so it goes on. " * (i % 5) for i in range(20)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(TEXTS)))
    return path


def prepared(data):
    data.prepare_data()
    data.setup("fit")
    return data


def text_of(data, rows):
    ids = [i for row in rows for i in row["input_ids"][row["document_ids"] >= 0].tolist()]
    return data.tokenizer.decode(ids)


def all_rows(rows):
    return [rows[i] for i in range(len(rows))]


def small(source, tmp_path, **options):
    options = {"seq_len": 64, "val_fraction": 0.0, "cache_dir": str(tmp_path / "cache")} | options
    return TextData(None if source is None else str(source), **options)


@pytest.mark.parametrize(
    "kind",
    ["jsonl", "json", "parquet", "csv", "jsonl.gz", "txt [1]", "folder", "saved", "saved splits"],
)
def test_every_kind_of_source_gives_the_same_rows(kind, jsonl, tmp_path):
    path = {"jsonl": jsonl, "folder": tmp_path / "folder"}.get(kind, tmp_path / f"texts.{kind}")
    if kind == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif kind == "parquet":
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    elif kind == "csv":
        datasets.Dataset.from_dict({"text": TEXTS}).to_csv(path)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(jsonl.read_bytes()))
    elif kind == "saved":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
    elif kind == "saved splits":
        parts = {name: datasets.Dataset.from_dict({"text": TEXTS[:n]}) for name, n in SPLITS}
        datasets.DatasetDict(parts).save_to_disk(path)
        with pytest.raises(ValueError, match="has the splits test, train, but not split='dev'"):
            small(path, tmp_path, split="dev").prepare_data()
    elif kind in ("txt [1]", "folder"):
        path.mkdir()
        for i, text in enumerate(TEXTS):
            (path / f"{i:03}.txt").write_text(text)
    data = prepared(small(path, tmp_path))
    assert text_of(data, all_rows(data.train_samples())) == "".join(f"{t}<eos>" for t in TEXTS)
    assert data.val_dataloader() == []


def test_the_hub_is_asked_for_other_names(tmp_path, monkeypatch):
    asked = []

    def load(*args, **options):
        asked.append((*args, options["split"]))
        return datasets.Dataset.from_dict({"body": [*TEXTS, None, ""]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = small("owner/name", tmp_path, text_column="body", config_name="de", split="test")
    assert text_of(prepared(data), all_rows(data.train_samples())).startswith("Document 0")
    assert asked == [("owner/name", "de", "test")]

    def missing(*args, **options):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'x' doesn't exist.\nOr is gated.")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(
        ValueError, match=r"neither a file nor a folder, .* the hub .* doesn't exist"
    ):
        small("another", tmp_path).prepare_data()


def test_the_embedded_corpus_is_long_documents_without_tests():
    source = find_source(None)
    names = [file.name for file in source.files]
    assert len(names) > 100
    assert "argparse.py" in names
    assert not [file for file in source.files if "site-packages" in file.parts]
    assert min(file.stat().st_size for file in source.files) >= 16_384
    assert find_source(None) == source


def test_a_python_without_sources_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"source=None reads the sources .* holds none"):
        find_source(None)


def test_the_embedded_corpus_needs_nothing(tmp_path):
    data = prepared(small(None, tmp_path, max_documents=3, seq_len=512, val_fraction=0.3))
    source = find_source(None)
    sizes = [len(file.read_text().encode()) + 1 for file in source.files[:3]]
    tables = (data.train_samples(), data.val_samples())
    tokens = [sum(int((row["document_ids"] >= 0).sum()) for row in all_rows(t)) for t in tables]
    assert sum(tokens) == sum(sizes)
    assert tokens[1] in sizes, "validation rows are a document that training does not see"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", r"source='.*missing.jsonl': there is no such file or folder \(in "),
        ("./nowhere", "there is no such file or folder"),
        ("empty", "the folder holds no .jsonl / .json / .* / .txt file"),
        ("mixed", r"files of several formats \(json, text\)"),
        ("data.tsv", "the format '.tsv' is not supported"),
        ("nothing.jsonl", r"nothing.jsonl' cannot be read as json \(it holds no record\)"),
        ("without.jsonl", r"without.jsonl' cannot be read as json \(it holds no record\)"),
        ("broken.jsonl", "cannot be read as json"),
        ("one.txt", "has 1 document, so val_fraction=0.1 cannot be set aside"),
        ("other.jsonl", "has no column 'text'; it has words. Choose one: text_column="),
        ("list.jsonl", "Record . holds a list in 'text', but plain text is a string"),
        ("blank.jsonl", "has no tokens for"),
    ],
)
def test_sources_that_do_not_serve_are_refused_in_one_line(name, message, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed").mkdir()
    files = {
        "mixed/a.txt": "a",
        "mixed/b.json": "[]",
        "data.tsv": "a,b",
        "nothing.jsonl": "\n",
        "without.jsonl": "",
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "one.txt": "a text",
        "other.jsonl": '{"words": "a"}\n{"words": "b"}\n',
        "list.jsonl": '{"text": ["a"]}\n{"text": ["b"]}\n',
        "blank.jsonl": '{"text": ""}\n{"text": ""}\n',
    }
    for path, text in files.items():
        (tmp_path / path).write_text(text)
    source = name if name.startswith(".") else tmp_path / name
    with pytest.raises((ValueError, FileNotFoundError, TypeError), match=message) as error:
        small(source, tmp_path, val_fraction=0.1).prepare_data()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "seq_len=1: give a number of at least 2"),
        ({"batch_size": 0}, "batch_size=0: give a number of at least 1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0: give a fraction from 0 to below 1"),
        ({"long_documents": "drop"}, "long_documents='drop': use one of"),
        ({"max_documents": 0}, "max_documents=0: give at least 1, or None for all"),
    ],
)
def test_wrong_options_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small(None, tmp_path, **options)


def test_a_document_longer_than_a_row_is_refused_by_name_of_the_option(jsonl, tmp_path):
    with pytest.raises(ValueError, match="Document 4 has .* tokens, but samples hold seq_len=64"):
        small(jsonl, tmp_path, long_documents="refuse").prepare_data()


def test_too_few_rows_are_refused(jsonl, tmp_path):
    data = small(jsonl, tmp_path, batch_size=100)
    data.prepare_data()
    with pytest.raises(ValueError, match="samples of 64 tokens to train on, but a"):
        data.setup("fit")  # before a model is built
    data.setup("validate")
    with pytest.raises(ValueError, match="There are 2 samples of 1024 tokens"):
        PasskeyData(num_train_rows=2, batch_size=3).setup("fit")


# ---------------------------------------------------------------- on disk


def test_rows_are_packed_once(jsonl, tmp_path, monkeypatch):
    first = prepared(small(jsonl, tmp_path, val_fraction=0.2))
    kept = [row["input_ids"].tolist() for row in all_rows(first.train_samples())]
    packed = []
    encode = TextData.encode
    monkeypatch.setattr(TextData, "encode", lambda *a: packed.append(1) or encode(*a))
    again = prepared(small(jsonl, tmp_path, val_fraction=0.2))
    assert [row["input_ids"].tolist() for row in all_rows(again.train_samples())] == kept
    assert not packed
    for options in ({"seq_len": 32}, {"add_eos": False}, {"seed": 1}, {"max_documents": 9}):
        packed.clear()
        prepared(small(jsonl, tmp_path, **{"val_fraction": 0.2, **options}))
        assert packed, options
    text = jsonl.read_text()
    for changed in (text + '{"text": "new", "id": 20}\n', text, text.replace("goes", "does")):
        jsonl.write_text(changed)  # the last two are as long as the first
        packed.clear()
        prepared(small(jsonl, tmp_path, val_fraction=0.2))
        assert packed, "a changed file"


def test_a_killed_run_leaves_no_half_of_the_samples(jsonl, tmp_path, monkeypatch):
    def dies(self, values, numbers):
        yield document([1] * 1000)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TextData, "encode", dies)
        with pytest.raises(KeyboardInterrupt):
            small(jsonl, tmp_path).prepare_data()
    data = prepared(small(jsonl, tmp_path))
    assert text_of(data, all_rows(data.train_samples())) == "".join(f"{t}<eos>" for t in TEXTS)


def test_validation_documents_are_not_trained_on(jsonl, tmp_path):
    data = prepared(small(jsonl, tmp_path, val_fraction=0.2))
    train, val = (text_of(data, all_rows(t)) for t in (data.train_samples(), data.val_samples()))
    found = sorted(f"{text}<eos>" for text in TEXTS)
    parts = [f"{part}<eos>" for text in (train, val) for part in text.split("<eos>")[:-1]]
    assert sorted(parts) == found
    assert val.count("<eos>") == 4
    other = prepared(small(jsonl, tmp_path, val_source=str(jsonl)))
    assert text_of(other, all_rows(other.val_samples())) == "".join(f"{t}<eos>" for t in TEXTS)


# ---------------------------------------------------------------- chat

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <3"},
    {"role": "assistant", "content": "Hé!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long."},
]


def chat_file(tmp_path, conversations, column="messages"):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({column: c}) + "\n" for c in conversations))
    return str(path)


def templated(tmp_path, template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def chat(tmp_path, conversations, **options):
    options = {"seq_len": 128, "val_fraction": 0.0, "cache_dir": str(tmp_path / "cache")} | options
    return ChatData(chat_file(tmp_path, conversations), **options)


def unmarked():
    template = byte_tokenizer().chat_template
    return template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


@pytest.mark.parametrize("marks", [True, False], ids=["generation marks", "prefixes"])
def test_only_what_the_assistant_says_is_learned(marks, tmp_path):
    options = {} if marks else {"tokenizer": templated(tmp_path, unmarked())}
    data = prepared(chat(tmp_path, [CHAT, CHAT[:3]], **options))
    (row,) = all_rows(data.train_samples())
    whole = "<|system|>Be brief.<eos><|user|>Hi <3<eos><|assistant|>Hé!<eos>"
    rest = "<|user|>Bye<eos><|assistant|>So long.<eos>"
    assert text_of(data, [row]) == whole + rest + whole
    learned = row["labels"] != -100
    assert data.tokenizer.decode(row["labels"][learned]) == "Hé!<eos>So long.<eos>Hé!<eos>"
    assert torch.equal(row["input_ids"][learned], row["labels"][learned])
    assert row["document_ids"].unique().tolist() == [-1, 0, 1]


def test_a_template_may_be_given(tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    data = prepared(chat(tmp_path, [CHAT[1:3]], chat_template=str(own)))
    assert text_of(data, all_rows(data.train_samples())) == "Hi <3Hé!"
    data = prepared(chat(tmp_path, [CHAT[1:]], seq_len=256, chat_template="chatml"))
    (row,) = all_rows(data.train_samples())
    turns = ("user", "Hi <3"), ("assistant", "Hé!"), ("user", "Bye"), ("assistant", "So long.")
    written = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    assert text_of(data, [row]) == written
    learned = data.tokenizer.decode(row["labels"][row["labels"] != -100])
    assert learned == "Hé!<|im_end|>So long.<|im_end|>"
    with pytest.raises(FileNotFoundError, match="chat_template='chatlm': there is no such file"):
        chat(tmp_path, [CHAT], chat_template="chatlm").prepare_data()


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    plain = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "plain")
    data = chat(tmp_path, [CHAT], tokenizer=str(tmp_path / "plain"))
    with pytest.raises(ValueError, match="has no chat template, so conversations cannot be") as e:
        data.prepare_data()
    assert "\n" not in str(e.value)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    rewriting = (
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{{ m['content'] if loop.last else m['content'][:2] }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    data = chat(tmp_path, [CHAT], tokenizer=templated(tmp_path, rewriting))
    with pytest.raises(ValueError, match="renders turn 2 of conversation 0 differently"):
        data.prepare_data()


def test_a_template_whose_marks_are_empty_is_refused(tmp_path):
    silent = (
        "{% for m in messages %}{{ m['content'] }}{% generation %}{% endgeneration %}{% endfor %}"
    )
    data = chat(tmp_path, [CHAT], tokenizer=templated(tmp_path, silent))
    with pytest.raises(ValueError, match="marks no token of conversation 0 as the assistant's"):
        data.prepare_data()


@pytest.mark.parametrize("bad", [[], [{"from": "human"}], [{"role": "user"}]])
def test_what_is_no_conversation_is_refused(bad, tmp_path):
    with pytest.raises(ValueError, match="Conversation 0 is not a list of messages with `role`"):
        chat(tmp_path, [bad]).prepare_data()


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_conversations_of_the_sharegpt_kind_are_read(column, tmp_path):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]
    usual = prepared(chat(tmp_path, [CHAT]))
    options = {"seq_len": 128, "val_fraction": 0.0, "cache_dir": str(tmp_path / "other")}
    data = prepared(ChatData(chat_file(tmp_path, [shared], column), **options))
    for one, other in zip(
        all_rows(data.train_samples()), all_rows(usual.train_samples()), strict=True
    ):
        assert all(torch.equal(one[key], other[key]) for key in other)
    bad = ChatData(chat_file(tmp_path, [[{"from": "narrator", "value": "x"}]], column), **options)
    with pytest.raises(ValueError, match="message from 'narrator'. Supported are human, user, gpt"):
        bad.prepare_data()


def test_a_conversation_longer_than_a_row_is_refused_by_default(tmp_path):
    with pytest.raises(ValueError, match="Document 0 has .* tokens, but samples hold seq_len=16"):
        chat(tmp_path, [CHAT], seq_len=16).prepare_data()


# ---------------------------------------------------------------- who reads which rows


def fake_trainer(data_rank, data_size):
    strategy = SimpleNamespace(data_parallel_rank=data_rank, data_parallel_size=data_size)
    progress = SimpleNamespace(current=SimpleNamespace(ready=0, processed=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    return SimpleNamespace(
        strategy=strategy, limit_train_batches=1.0, overfit_batches=0, fit_loop=loop
    )


class Counted:
    """Rows that hold their own number."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        tokens = torch.full((4,), index)
        return {"input_ids": tokens, "labels": tokens, "cell": torch.tensor(index)}


class CountedData(SampleData):
    def __init__(self, num_rows=23, num_val_rows=5, *, batch_size=2, num_workers=0, seed=0):
        super().__init__(seq_len=4, batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.sizes = num_rows, num_val_rows

    def train_samples(self):
        return Counted(self.sizes[0])

    def val_samples(self):
        return Counted(self.sizes[1])


def numbers(batches):
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def test_ranks_of_a_group_read_the_same_rows_and_data_ranks_others():
    by_rank = []
    for rank in range(4):  # dp 2 x cp 2: neighbours share rows
        data = CountedData()
        data.trainer = fake_trainer(rank // 2, 2)
        data.setup("fit")
        by_rank.append(numbers(data.train_dataloader()))
    assert by_rank[0] == by_rank[1]
    assert by_rank[2] == by_rank[3]
    first, second = ({i for batch in by_rank[r] for i in batch} for r in (0, 2))
    assert not first & second
    assert len(first | second) == 20, "the last 3 rows do not fill a global batch"


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_training_batches_hold_the_same_rows_for_any_number_of_ranks(rows, batch, size, epoch):
    shared = [
        plan_training(rows, batch, rank=r, size=size, seed=7, epoch=epoch) for r in range(size)
    ]
    alone = plan_training(rows, batch * size, rank=0, size=1, seed=7, epoch=epoch)
    assert np.array_equal(np.concatenate(shared, 1), alone)
    assert len(set(alone.flatten().tolist())) == rows // (batch * size) * batch * size


def test_epochs_and_seeds_differ():
    orders = [
        plan_training(50, 1, rank=0, size=1, seed=seed, epoch=epoch).flatten().tolist()
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (None, 0))
    ]
    assert len(set(map(tuple, orders))) == 4
    assert orders[3] == list(range(50))


@given(st.integers(1, 50), st.integers(1, 4), st.integers(1, 4))
def test_validation_takes_every_row_once_and_as_many_steps_on_all_ranks(rows, batch, size):
    plans = [plan_evaluation(rows, batch, rank=r, size=size) for r in range(size)]
    assert len({len(plan) for plan in plans}) == 1
    taken = sorted(row for plan in plans for b in plan for row in b)
    assert [row for row in taken if row >= 0] == list(range(rows))
    assert len(taken) - rows < size


def test_a_row_that_fills_up_has_no_labels():
    data = CountedData(num_val_rows=5)
    data.trainer = fake_trainer(1, 2)
    *_, last = data.val_dataloader()
    assert last["labels"].tolist() == [[-100] * 4]
    assert last["cell"].tolist() == [-1]


# ---------------------------------------------------------------- resuming


class Watching(LightningModule):
    """Learns a little from each batch, and writes down which one it was; may die on the way."""

    def __init__(self, dies_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.Embedding(64, 1)
        self.seen, self.losses, self.dies_at = [], [], dies_at

    def training_step(self, batch, batch_idx):
        if len(self.seen) == self.dies_at:
            raise RuntimeError("power cut")
        loss = (self.weights(batch["input_ids"]) - 1).square().mean()
        self.seen.append(batch["input_ids"][:, 0].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", batch["input_ids"].sum().float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": "callbacks" in options, **quiet, **options}
    return Trainer(accelerator="cpu", devices=1, **options)


def saving(folder, **when):
    return ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when)


ROWS, BATCHES = 23, 11  # two to a batch


@pytest.fixture(scope="module")
def uninterrupted():
    module = Watching()
    trainer(max_epochs=3).fit(module, datamodule=CountedData(ROWS))
    assert len(module.seen) == 3 * BATCHES
    assert module.seen[:BATCHES] != module.seen[BATCHES : 2 * BATCHES]
    return module


def check_goes_on(module, uninterrupted, step):
    assert module.seen == uninterrupted.seen[step : step + len(module.seen)]
    assert module.losses == uninterrupted.losses[step : step + len(module.seen)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_in_the_middle_of_an_epoch_it_goes_on_with_the_same_batches(
    num_workers, tmp_path, uninterrupted, recwarn
):
    step = BATCHES + 4
    callbacks = [saving(tmp_path, every_n_train_steps=step)]
    killed = Watching(dies_at=step + 2)
    data = CountedData(ROWS, num_workers=num_workers)
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(max_epochs=3, callbacks=callbacks).fit(killed, datamodule=data)
    resumed = Watching()
    data = CountedData(ROWS, num_workers=num_workers)
    trainer(max_epochs=3).fit(resumed, datamodule=data, ckpt_path=tmp_path / f"step={step}.ckpt")
    assert len(resumed.seen) == 3 * BATCHES - step
    check_goes_on(resumed, uninterrupted, step)
    assert not [w for w in recwarn if "not resumable" in str(w.message)]


@pytest.mark.parametrize("step", [3, BATCHES - 1, BATCHES, BATCHES + 1, 2 * BATCHES])
def test_it_goes_on_from_any_step(step, tmp_path, uninterrupted):
    callbacks = [saving(tmp_path, every_n_train_steps=step)]
    trainer(max_steps=step, callbacks=callbacks).fit(Watching(), datamodule=CountedData(ROWS))
    resumed = Watching()
    checkpoint = tmp_path / f"step={step}.ckpt"
    trainer(max_epochs=3).fit(resumed, datamodule=CountedData(ROWS), ckpt_path=checkpoint)
    assert len(resumed.seen) == 3 * BATCHES - step
    check_goes_on(resumed, uninterrupted, step)


def test_it_goes_on_from_the_end_of_an_epoch_and_from_validation(tmp_path, uninterrupted):
    callbacks = [saving(tmp_path / "epochs", save_on_train_epoch_end=True)]
    callbacks += [saving(tmp_path / "val", monitor="val", save_on_train_epoch_end=False)]
    trainer(max_epochs=2, callbacks=callbacks, val_check_interval=4).fit(
        Watching(), datamodule=CountedData(ROWS)
    )
    found = sorted(tmp_path.rglob("*.ckpt"))
    assert len(found) == 2 + 4
    for checkpoint in found:
        resumed = Watching()
        trainer(max_epochs=3).fit(resumed, datamodule=CountedData(ROWS), ckpt_path=checkpoint)
        step = int(checkpoint.stem.removeprefix("step="))
        assert len(resumed.seen) == 3 * BATCHES - step
        check_goes_on(resumed, uninterrupted, step)


def test_a_batch_whose_step_failed_is_tried_again(tmp_path, uninterrupted):
    for step in (5, 2 * BATCHES - 1):
        failing = trainer(max_epochs=3)
        with pytest.raises(RuntimeError, match="power cut"):
            failing.fit(Watching(dies_at=step), datamodule=CountedData(ROWS))
        failing.save_checkpoint(tmp_path / "failed.ckpt")
        resumed = Watching()
        trainer(max_epochs=3).fit(
            resumed, datamodule=CountedData(ROWS), ckpt_path=tmp_path / "failed.ckpt"
        )
        assert len(resumed.seen) == 3 * BATCHES - step
        check_goes_on(resumed, uninterrupted, step)


def test_short_epochs_go_on_too(tmp_path):
    alone = Watching()
    options = {"limit_train_batches": 4}
    trainer(max_epochs=3, **options).fit(alone, datamodule=CountedData(ROWS))
    assert len(alone.seen) == 12
    assert alone.seen[:4] != alone.seen[4:8]
    callbacks = [saving(tmp_path, every_n_train_steps=1)]
    trainer(max_epochs=2, callbacks=callbacks, **options).fit(
        Watching(), datamodule=CountedData(ROWS)
    )
    for step in (3, 4, 5, 8):
        resumed = Watching()
        trainer(max_epochs=3, **options).fit(
            resumed, datamodule=CountedData(ROWS), ckpt_path=tmp_path / f"step={step}.ckpt"
        )
        assert len(resumed.seen) == 12 - step
        check_goes_on(resumed, alone, step)


def test_other_data_in_the_middle_of_an_epoch_are_refused():
    loader = CountedData(ROWS).train_dataloader()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    others = [
        ("global_batch_size=2, but here it is 4", CountedData(ROWS, batch_size=4)),
        ("seed=0, but here it is 1", CountedData(ROWS, seed=1)),
        ("num_rows=23, but here it is 22", CountedData(22)),
    ]
    for said, other in others:
        other.load_state_dict({"train": state})
        with pytest.raises(ValueError, match=f"in the middle of an epoch with {said}"):
            other.train_dataloader()
    list(batches)
    ended = CountedData(ROWS, batch_size=4)
    ended.load_state_dict({"train": loader.state_dict()})
    assert ended.train_dataloader().state_dict()["epoch"] == 1


def test_a_new_run_starts_anew_and_a_reloaded_loader_does_not():
    data, first, second = CountedData(ROWS), Watching(), Watching()
    trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(first, datamodule=data)
    trainer(max_epochs=2).fit(second, datamodule=data)
    assert first.seen == second.seen
    assert first.seen[:BATCHES] != first.seen[BATCHES:]


def test_an_epoch_that_is_left_early_is_not_gone_on_with():
    loader = CountedData(ROWS).train_dataloader()
    first = numbers(loader)
    other = CountedData(ROWS).train_dataloader()
    other.load_state_dict({"epoch": 0, "batch": 2})
    iter(other)  # Lightning does so, and takes nothing
    assert numbers([next(iter(other))]) == first[2:3]
    assert numbers(other) == numbers(loader), "the next epoch, from its start"


def test_overfitting_takes_the_same_batches_again():
    module = Watching()
    trainer(max_epochs=3, overfit_batches=2).fit(module, datamodule=CountedData(ROWS))
    assert module.seen == [[0, 1], [2, 3]] * 3


def test_a_data_module_can_be_printed():
    assert str(CountedData()) == "CountedData(seq_len=4, batch_size=2)"


def test_workers_do_not_touch_torchs_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(SampleLoader(Counted(4), lambda _: [[0], [1]]))
    assert torch.equal(torch.rand(1), expected)


# ---------------------------------------------------------------- under the strategy


class OnRanks(Watching):
    def __init__(self):
        super().__init__()
        self.val_seen = []
        self.model = self.weights  # FSDP2 shards a child that is called

    def training_step(self, batch, batch_idx):
        from lightning_cp import token_mean

        self.seen.append(batch["input_ids"][:, 0].tolist())
        logits = self.model(batch["input_ids"]).expand(-1, -1, 64)
        return token_mean(logits, batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.val_seen += batch["input_ids"][:, 0][batch["cell"] >= 0].tolist()


def fit_on_ranks(data_size, folder):
    from tests.lightning.jobs import build_trainer, elastic_environment

    found = []
    for checkpoint in (None, f"{folder}/step=3.ckpt"):
        with elastic_environment():
            module = OnRanks()
            trainer = build_trainer(
                strategy=doors.strategy(data_parallel_size=data_size),
                max_epochs=2,
                use_distributed_sampler=True,  # Lightning's default
                enable_checkpointing=checkpoint is None,
                callbacks=[saving(folder, every_n_train_steps=3)] if checkpoint is None else [],
                num_sanity_val_steps=0,
            )
            trainer.fit(module, datamodule=CountedData(ROWS), ckpt_path=checkpoint)
        found.append((module.seen, module.val_seen))
    return found


@pytest.mark.ranks
def test_under_the_strategy_rows_are_split_once_and_resumed(ranks, tmp_path):
    (a, resumed_a), (b, resumed_b) = ranks(2).run(fit_on_ranks, 2, str(tmp_path))
    epoch = ROWS // 4
    assert len(a[0]) == len(b[0]) == 2 * epoch
    taken = sorted(i for seen in (a[0], b[0]) for batch in seen[:epoch] for i in batch)
    assert len(set(taken)) == len(taken) == 4 * epoch
    assert sorted(a[1][:3] + b[1][:2]) == list(range(5))
    for whole, rest in ((a, resumed_a), (b, resumed_b)):
        assert rest[0] == whole[0][3:]
