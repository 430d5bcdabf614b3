from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_cp import Mask, attention, token_mean
from lightning_cp.data.batch import SEQUENCE_DIMS, read_batch, truncate, unpack_documents
from lightning_cp.data.consistency import find_differing
from lightning_cp.step import leaves
from lightning_cp.step.leaves import flatten
from tests import doors
from tests.ranks import run_threads

TOKENS = torch.arange(12).view(2, 6)


def read(batch, sequence_dims=None, **more):
    return read_batch(flatten(batch), sequence_dims={**(sequence_dims or {}), **more})


def test_a_step_yields_exactly_the_users_keys():
    batch = {"input_ids": TOKENS, "labels": TOKENS, "name": "a", "index": torch.arange(2)}
    with doors.parallel(None).step(batch) as local:
        assert list(local) == list(batch)
        assert local["name"] == "a"
        assert torch.equal(local["labels"], TOKENS)


def test_the_users_batch_is_left_as_it_was():
    batch = {"input_ids": TOKENS.clone(), "labels": TOKENS.clone()}
    with doors.parallel(None, layout="zigzag").step(batch) as local:
        local["labels"].fill_(-100)
    assert torch.equal(batch["labels"], TOKENS)


@pytest.mark.parametrize("dim", [1, -2])
def test_a_named_tensor_is_cut_where_the_user_says(dim):
    batch = {"input_ids": TOKENS, "weights": torch.ones(2, 6, 3)}
    assert read(batch, weights=dim).dims == {"input_ids": 1, "weights": dim}
    assert "weights" not in read(batch, weights=None).dims


def test_the_users_word_goes_before_the_defaults():
    batch = {"input_ids": TOKENS, "token_type_ids": torch.zeros(2, 4)}
    assert read(batch, token_type_ids=None).dims == {"input_ids": 1}


def test_an_unknown_key_is_judged_by_the_first_batch_only():
    cp = doors.parallel(None)
    with cp.step({"input_ids": TOKENS, "ages": torch.ones(2, 5)}):
        pass
    with cp.step({"input_ids": TOKENS[:, :5], "ages": torch.ones(2, 5)}) as local:
        assert local["ages"].shape == (2, 5)


def test_labels_of_rows_are_kept_whole():
    whole = read({"input_ids": TOKENS, "labels": torch.tensor([0, 1])})
    assert "labels" not in whole.dims


def test_positions_of_several_axes_are_cut_along_the_last():
    positions = torch.arange(6).expand(3, 2, -1)
    assert read({"input_ids": TOKENS, "position_ids": positions}).dims["position_ids"] == -1


def test_one_document_per_row_is_no_documents():
    for extra in (
        {"document_ids": torch.tensor([[5] * 6, [2] * 6])},
        {"position_ids": torch.arange(6).expand(2, -1) + 3},
        {"attention_mask": torch.ones(2, 6)},
    ):
        whole = read({"input_ids": TOKENS, **extra})
        assert whole.documents is None
        assert whole.padding is None


def test_positions_of_left_padded_rows_are_no_documents():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    whole = read({"input_ids": TOKENS, "attention_mask": mask, "position_ids": positions})
    assert whole.documents is None
    assert np.array_equal(whole.padding, (mask == 0).numpy())


def test_documents_of_one_row_are_numbered_along_it():
    ids = torch.tensor([[7, 7, 3, 3, 3, -1], [1, 1, 1, 1, 2, 2]])
    whole = read({"input_ids": TOKENS, "document_ids": ids})
    assert whole.documents.tolist() == [[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 1, 1]]


def test_position_ids_restart_in_each_document():
    cp = doors.parallel(None, layout="contiguous")
    ids = torch.tensor([[7, 7, 3, 3, 3, 3], [1, 1, 1, 1, 2, 2]])
    with cp.step({"input_ids": TOKENS, "document_ids": ids}):
        assert cp.position_ids().tolist() == [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]]
    with cp.step({"input_ids": TOKENS}):
        assert cp.position_ids().tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_labels_that_cannot_be_ignored_are_refused():
    batch = {"input_ids": torch.zeros(1, 4).long(), "labels": torch.zeros(1, 4, dtype=torch.uint8)}
    with (
        pytest.raises(ValueError, match=r"torch.uint8, .* Give `labels.long\(\)`"),
        doors.parallel(None).step(batch),
    ):
        pass


def test_known_keys_are_those_of_hugging_face_batches():
    assert {"input_ids", "labels", "attention_mask", "position_ids"} <= set(SEQUENCE_DIMS)


def test_documents_apart_by_padding_stay_apart():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2]])
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1]])
    batch = {"input_ids": positions, "position_ids": positions, "attention_mask": mask}
    assert read(batch).documents.tolist() == [[0, 0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]])
def test_positions_that_go_on_over_padding_are_one_document(positions):
    tokens, mask = torch.tensor([positions]), torch.tensor([[1, 1, 1, 0, 1, 1, 1]])
    batch = {"input_ids": tokens, "position_ids": tokens, "attention_mask": mask}
    assert read(batch).documents is None


def test_a_hole_does_not_cut_a_document_in_two():
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]])
    ids = torch.tensor([[0, 0, 9, 0, 1, 1], [7, 0, 0, 1, 1, 7]])
    batch = {"input_ids": TOKENS, "attention_mask": mask, "document_ids": ids}
    assert read(batch).documents.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_position_ids_of_one_row_serve_all():
    cp = doors.parallel(None, layout="contiguous")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with cp.step({"input_ids": TOKENS, "position_ids": positions}):
        assert cp.position_ids().shape == (2, 6)
    assert read({"input_ids": TOKENS, "position_ids": positions}).documents.shape == (1, 6)


def test_lengths_may_be_a_list_and_embeddings_stand_for_tokens():
    batch = {"input_ids": None, "inputs_embeds": torch.ones(1, 6, 4), "cu_seq_lens_k": [0, 2, 6]}
    assert read(batch).documents.tolist() == [[0, 0, 1, 1, 1, 1]]


def test_a_key_that_was_none_is_judged_when_it_comes():
    cp = doors.parallel(None)
    with cp.step({"input_ids": TOKENS, "extra": None}):
        pass
    with (
        pytest.raises(ValueError, match="`extra` of shape"),
        cp.step({"input_ids": TOKENS, "extra": torch.ones(2, 6)}),
    ):
        pass


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_steps_work_without_gradients(mode):
    cp = doors.parallel(None, layout="contiguous")
    with mode(), cp.step({"input_ids": TOKENS, "labels": TOKENS}) as local:
        q = torch.randn(2, 2, 6, 4)
        attention(q, q, q, mask=Mask(causal=True))
        assert token_mean(torch.zeros(2, 6, 20), local["labels"]) > 0


def test_a_step_of_another_object_is_not_taken_for_ones_own():
    ours, theirs = doors.parallel(None), doors.parallel(None)
    with (
        theirs.step({"input_ids": TOKENS}),
        pytest.raises(
            RuntimeError, match=r"cp.position_ids\(\) was called inside a step of another"
        ),
    ):
        ours.position_ids()


@pytest.mark.parametrize("name", ["position_ids", "mask", "recompute"])
def test_what_needs_a_step_says_so_outside(name):
    with pytest.raises(RuntimeError, match=rf"cp.{name}\(\) was called outside a step"):
        getattr(doors.parallel(None), name)()


def test_unshard_names_the_length_that_it_needs():
    cp = doors.parallel(None, layout="contiguous")
    with (
        cp.step({"input_ids": TOKENS}),
        pytest.raises(ValueError, match=r"shape \(2, 5\), but this rank holds 6 tokens"),
    ):
        cp.unshard(torch.zeros(2, 5), dim=1)


def test_positions_that_jump_ahead_beside_a_mask_are_ambiguous():
    ahead = torch.tensor([[0, 1, 2, 40, 41, 42]]).expand(2, -1)
    batch = {"input_ids": TOKENS, "position_ids": ahead}
    assert read(batch).documents[0].tolist() == [0, 0, 0, 1, 1, 1]
    masked = {**batch, "attention_mask": torch.ones(2, 6)}
    with pytest.raises(ValueError, match=r"jump ahead in sample 0 at position 3: .*`document_ids`"):
        read(masked)
    assert read({**masked, "document_ids": (ahead > 20).long()}).documents is not None


def test_a_ready_mask_is_cut_along_its_queries():
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones(2, 1, 6, 6).bool()}
    whole = read(batch)
    assert whole.dims["attention_mask"] == -2
    assert whole.padding is None


def test_documents_become_rows_of_their_own():
    batch = {
        "input_ids": TOKENS,
        "labels": TOKENS,
        "document_ids": torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, -1]]),
        "name": torch.tensor([7, 8]),
    }
    rows = unpack_documents(read(batch))
    assert rows["attention_mask"].sum(1).tolist() == [2, 4, 5]
    assert rows["input_ids"][1, :4].tolist() == TOKENS[0, 2:].tolist()
    assert rows["labels"][0].tolist() == [*TOKENS[0, :2].tolist(), -100, -100, -100]
    assert rows["name"].tolist() == [7, 7, 8]
    assert "document_ids" not in rows


def test_a_step_takes_a_batch_apart_once(monkeypatch):
    roots, walk = [], leaves._walk

    def counted(x, above):
        roots.extend([x] if not above.path else [])
        return walk(x, above)

    monkeypatch.setattr(leaves, "_walk", counted)
    batch = {"text": {"input_ids": TOKENS, "labels": TOKENS}, "sizes": [1, 2]}
    with doors.parallel(None).step(batch) as local:
        assert local["sizes"] is batch["sizes"]
    assert len(roots) == 1


def test_a_truncated_batch_holds_the_first_label_whatever_its_structure():
    ids = torch.arange(20).view(1, 20)
    labels = torch.where(ids < 15, -100, ids)
    for batch in (
        UserDict(input_ids=ids, labels=labels),
        {"a": {"input_ids": ids, "labels": labels}},
    ):
        cut = truncate(read(batch), 6)
        part = cut.get("a", cut)
        assert type(cut) is type(batch)
        assert part["input_ids"].tolist() == [[12, 13, 14, 15, 16, 17]]
        assert part["labels"].tolist() == [[-100, -100, -100, 15, 16, 17]]


def test_lengths_of_documents_become_ids_when_a_batch_is_truncated():
    ids, lengths = torch.arange(20).view(1, 20), torch.tensor([0, 4, 20])
    batch = UserDict(input_ids=ids, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=16)
    cut = truncate(read(batch), 6)
    assert list(cut) == ["input_ids", "document_ids"]
    assert cut["document_ids"].tolist() == [[0, 0, 0, 0, 1, 1]]
    nested = {"text": dict(batch)}
    with pytest.raises(ValueError, match="`cu_seq_lens_q` is inside a nested batch"):
        truncate(read(nested), 6)


Pair = namedtuple("Pair", ["input_ids", "labels"])


@dataclass
class Sample:
    input_ids: torch.Tensor
    name: str = "x"


@pytest.mark.parametrize(
    "batch",
    [
        TOKENS,
        (TOKENS, TOKENS),
        [TOKENS, torch.tensor([1, 0])],
        (TOKENS, torch.zeros(2, 6), torch.zeros(2, 6, 3), torch.tensor(3.0)),
        torch.zeros(2, 6, 3),
        Pair(TOKENS, TOKENS),
        Sample(TOKENS),
        {"text": {"input_ids": TOKENS, "labels": TOKENS}, "names": ["a", "b"]},
        OrderedDict(input_ids=TOKENS),
        UserDict(input_ids=TOKENS),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(2, 6)}, TOKENS),
        {"a": {"input_ids": TOKENS}, "b": {"input_ids": TOKENS, "attention_mask": TOKENS * 0 + 1}},
        {"a": (TOKENS, TOKENS), "b": None},
        {0: TOKENS.clone(), "input_ids": TOKENS} | {0: None},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_step_gives_back_the_structure_that_it_got(batch):
    with doors.parallel(None, layout="contiguous").step(batch) as local:
        assert type(local) is type(batch)
        assert repr(local) == repr(batch)


def test_what_has_no_name_goes_by_its_place():
    assert read((TOKENS, torch.zeros(2, 6), torch.arange(2))).dims == {"0": 1, "1": 1}
    assert read(({"input_ids": TOKENS}, TOKENS)).dims == {"0.input_ids": 1, "1": 1}
    assert read({"a": (TOKENS, TOKENS)}).dims == {"a.0": 1, "a.1": 1}
    assert read((torch.zeros(2, 6), torch.zeros(2, 3)), {"0": 1, "1": None}).dims == {"0": 1}
    assert read(torch.zeros(2, 3, 6), {"batch": 2}).dims == {"batch": 2}


def test_a_path_goes_before_a_name():
    batch = {"text": {"input_ids": TOKENS, "extra": TOKENS}, "other": {"extra": torch.ones(2, 6)}}
    assert read(batch, {"extra": 1, "other.extra": None}).dims == {
        "text.input_ids": 1,
        "text.extra": 1,
    }
    assert read(batch, {"text.extra": 1, "other": None}).dims == {
        "text.input_ids": 1,
        "text.extra": 1,
    }


def test_tensors_without_names_are_not_filled_up():
    assert read({"input_ids": TOKENS}).shows_padding
    assert not read((TOKENS, TOKENS)).shows_padding
    assert not read(({"input_ids": TOKENS}, TOKENS)).shows_padding


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2, 6), r"shapes do not show.*`batch` \(2, 6\).*sequence_dims=\{'batch': 1\}"),
        ((torch.zeros(2, 6), torch.arange(2)), r"sequence_dims=\{'0': 1\}"),
        ((TOKENS, TOKENS[:, :4]), r"'0': 1, '1': 1"),
        (
            (TOKENS, torch.zeros(2, 3)),
            r"`1` of shape \(2, 3\).*sequence_dims=\{'1': None\} to keep",
        ),
        ((TOKENS, torch.zeros(2, 6, 6)), r"`1` .*sequence_dims=\{'1': 1\} to shard it"),
        ((TOKENS, torch.zeros(6)), r"`1` of shape \(6,\).*sequence_dims=\{'1': 0\}"),
        (
            {"input_ids": TOKENS, "x": {"y": TOKENS}},
            r"`x.y`.*sequence_dims=\{'x.y': 1\} to shard it, \{'x.y': None\}",
        ),
        ({"input_ids": TOKENS, "labels": [TOKENS[0], TOKENS[1]]}, "`labels.0`.*Stack them"),
        (
            {"a": {"input_ids": TOKENS}, "b": {"input_ids": TOKENS[:, :4]}},
            r"two sequence lengths: `a.input_ids` has 6 .*sequence_dims=\{'a': None, 'b': None\}",
        ),
        (
            {"a": {"input_ids": TOKENS}, "b": {"input_ids": TOKENS[:1]}},
            r"`b.input_ids` .* another batch size than the batch, 2",
        ),
        (
            [{"input_ids": TOKENS}, {"input_ids": TOKENS, "attention_mask": (TOKENS > 0).long()}],
            r"`0` and `1` .* different padding. .*\{'0': None, '1': None\}.*cp.step\(batch\[0\]\)",
        ),
        (
            {
                "a": {"input_ids": TOKENS, "document_ids": (TOKENS > 3).long()},
                "b": {"input_ids": TOKENS, "document_ids": (TOKENS > 2).long()},
            },
            "`a` and `b` are in one batch, and have different documents",
        ),
        (
            {
                "a": {"input_ids": TOKENS},
                "b": {"input_ids": TOKENS, "position_ids": torch.arange(1, 7).expand(2, -1)},
            },
            "different position ids",
        ),
        (
            {
                "a": {"input_ids": TOKENS},
                "b": {"attention_mask": (TOKENS > 0).long()},
                "c": {"attention_mask": (TOKENS > 1).long()},
            },
            "several `attention_mask`, and `c.attention_mask` differs",
        ),
        ({"a.b": TOKENS, "a": {"b": TOKENS}}, "two values with the path `a.b`"),
    ],
)
def test_a_batch_that_may_be_read_in_two_ways_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        read(batch)


def test_padding_beside_no_tokens_is_that_of_all():
    mask = (TOKENS > 0).long()
    batch = {"a": {"input_ids": TOKENS}, "b": {"input_ids": TOKENS}, "c": {"attention_mask": mask}}
    assert np.array_equal(read(batch).padding, (mask == 0).numpy())


def test_a_batch_that_is_kept_whole_is_handed_over():
    batch = {"a": {"input_ids": TOKENS}, "b": (TOKENS[:, :4],)}
    cp = doors.parallel(None, sequence_dims={"a": None, "b": None})
    with cp.step(batch) as whole:
        assert whole is batch
        for call in (
            lambda: token_mean(torch.zeros(2, 6, 12), TOKENS),
            lambda: attention(*[torch.zeros(2, 1, 6, 4)] * 3, mask=Mask(causal=True)),
            lambda: torch.nn.functional.scaled_dot_product_attention(
                *[torch.zeros(2, 1, 6, 4)] * 3
            ),
            cp.position_ids,
        ):
            with pytest.raises(RuntimeError, match="was not sharded.*Open a step for each part"):
                call()
        with cp.paused():
            token_mean(torch.zeros(2, 6, 12), TOKENS)
        with cp.step(whole["b"]) as part:
            assert part[0].shape == (2, 4)
            token_mean(torch.zeros(2, 4, 12), part[0])


def test_a_part_that_is_kept_whole_again_is_refused():
    batch = [(TOKENS, TOKENS), (TOKENS, TOKENS)]
    cp = doors.parallel(None, sequence_dims={"0": None, "1": None})
    with cp.step(batch) as whole:
        with (
            pytest.raises(ValueError, match=r"cp.step\(part, sequence_dims=\{...\}\)"),
            cp.step(whole[0]),
        ):
            pass
        with cp.step(whole[0], sequence_dims={}) as part:
            assert torch.equal(part[0], TOKENS)


def test_a_document_of_padding_alone_is_padding_of_the_one_before_it():
    ids, mask = torch.tensor([[0, 0, 1, 1, 2, 2]]), torch.tensor([[1, 1, 0, 0, 1, 1]])
    q = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    own = attention(q, q, q, mask=Mask(causal=True, documents=ids, padding=mask == 0))
    assert not own[:, :, 2:4].any()
    cp = doors.parallel(None, layout="contiguous")
    with cp.step({"input_ids": ids, "document_ids": ids, "attention_mask": mask}):
        read_ = attention(q, q, q, mask=Mask(causal=True))
    joined = torch.tensor([[0, 0, 0, 0, 2, 2]])
    expected = attention(q, q, q, mask=Mask(causal=True, documents=joined, padding=mask == 0))
    assert torch.allclose(read_, expected)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([2, 1, 3])),  # the same numbers in another order
        (torch.tensor([[0.5, 2.0]]), torch.tensor([[2.0, 0.5]])),
        (torch.tensor(1.0), torch.tensor(-1.0)),
        (0.0, -0.0),
        ({"a": 1}, {"a": 2}),
    ],
    ids=str,
)
def test_values_that_differ_between_ranks_are_found(mine, other):
    def work(transport):
        values = [torch.ones(2), other if transport.rank else mine, "text"]
        return find_differing(values, transport), find_differing(values[::2], transport)

    assert run_threads(2, work) == [([1], [])] * 2
