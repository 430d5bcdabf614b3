"""Bad input: every rank raises, with a message that says what to do, and nobody waits for ever."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_cp import Mask, attention, token_mean
from lightning_cp.attn.choose import name_algorithm
from tests import doors
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks

TOKENS = torch.arange(24).view(2, 12)


def step_message(batches, options):
    """Return what this rank says to its batch."""
    cp = doors.parallel(dist.group.WORLD, **options)
    try:
        with cp.step(batches[dist.get_rank() % len(batches)]):
            return "accepted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


STEP_CASES = {
    "length 0": (
        [{"input_ids": TOKENS[:, :0]}],
        {},
        r"`input_ids` has shape \(2, 0\): sequences of length 0",
    ),
    "no sequence": (
        [{"pixels": TOKENS}],
        {},
        r"keys \['pixels'\], and none of them.*sequence_dims=",
    ),
    "no batch": (
        ["text"],
        {},
        r"TypeError: cp.step\(\) got a str, but needs tensors in",
    ),
    "unknown sequence dim": (
        [{"input_ids": TOKENS, "weights": torch.ones(2, 3, 12)}],
        {},
        r"`weights` of shape \(2, 3, 12\), whose dim 2 is as long.*"
        r"sequence_dims=\{'weights': 2\} to shard it, \{'weights': None\} to keep it full",
    ),
    "unknown sequence dim, nested": (
        [{"input_ids": TOKENS, "extra": {"weights": [torch.ones(12)]}}],
        {},
        r"`extra.weights.0` of shape \(12,\).*sequence_dims=\{'extra.weights.0': 0\} to shard it",
    ),
    "a list that should be cut": (
        [{"input_ids": TOKENS, "labels": TOKENS.tolist()}],
        {},
        r"TypeError: `labels` holds a sequence and would be sharded along dim 1, but is a list",
    ),
    "one row without a batch": (
        [{"input_ids": TOKENS[0]}],
        {},
        r"`input_ids` has shape \(12,\), but needs a batch dim.*unsqueeze",
    ),
    "packed rows told by positions of three axes": (
        [{"input_ids": TOKENS, "position_ids": (TOKENS % 6).expand(3, 2, 12)}],
        {},
        r"`position_ids` of shape \(3, 2, 12\).*start again at 0.*`document_ids`",
    ),
    "lengths of queries and keys that differ": (
        [{"input_ids": TOKENS[:1], "cu_seq_lens_q": [0, 12], "cu_seq_lens_k": [0, 5, 12]}],
        {},
        "`cu_seq_lens_q` and `cu_seq_lens_k` differ",
    ),
    "sequence dim that is not there": (
        [{"input_ids": TOKENS, "weights": torch.ones(2)}],
        {"sequence_dims": {"weights": 1}},
        r"sequence_dims=\{'weights': 1\}, but `weights` has shape \(2,\)",
    ),
    "two sequence lengths": (
        [{"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}],
        {},
        r"two sequence lengths: `input_ids` has 12 tokens, `decoder_input_ids` of shape \(2, 5\) "
        r"has 5. Open one `cp.step` for each sequence",
    ),
    "documents that disagree": (
        [
            {
                "input_ids": TOKENS,
                "document_ids": (TOKENS % 12 > 5).long(),
                "position_ids": (TOKENS % 12) % 7,
            }
        ],
        {},
        r"in two ways that disagree: `document_ids` and `position_ids` differ in sample 0 at "
        r"position 6",
    ),
    "documents that come back": (
        [{"input_ids": TOKENS, "document_ids": (TOKENS % 12 // 4 % 2).long()}],
        {},
        "Sample 0 of `document_ids` uses id 0 again at position 8",
    ),
    "documents of a wrong shape": (
        [{"input_ids": TOKENS, "document_ids": torch.zeros(2, 12)}],
        {},
        r"`document_ids` must be integers of shape \[2, 12\], but are torch.float32",
    ),
    "lengths of several rows": (
        [{"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 12])}],
        {},
        r"`cu_seq_lens_q` describes one sample, but the batch has 2. Use `document_ids`",
    ),
    "lengths that fall": (
        [{"input_ids": TOKENS[:1], "cu_seq_lens_q": torch.tensor([0, 8, 5, 12])}],
        {},
        r"must increase from 0 to at most the sequence length 12, but is \[0, 8, 5, 12\]",
    ),
    "a 4-D mask": (
        [{"input_ids": TOKENS, "attention_mask": torch.ones(2, 12, 12)}],
        {},
        r"`attention_mask` of shape \(2, 12, 12\) cannot be sharded: give \[batch, 12\]",
    ),
    "documents in the attention mask": (
        [{"input_ids": TOKENS, "attention_mask": TOKENS}],
        {},
        r"holds values from 0 to 23, but may only hold 1 for tokens and 0 for padding",
    ),
    "other values on another rank": (
        [{"input_ids": TOKENS}, {"input_ids": TOKENS + 1}],
        {},
        "must hold the same batch, but rank 1 and rank 0 differ in their values.*Usual causes",
    ),
    "other order on another rank": (
        [{"input_ids": TOKENS}, {"input_ids": TOKENS.flip(1)}],
        {},
        "rank 1 and rank 0 differ in their values",
    ),
    "other shapes on another rank": (
        [{"input_ids": TOKENS}, {"input_ids": TOKENS[:, :6]}],
        {"check_batches": 0},
        r"rank 1 and rank 0 differ in their shapes; this is rank \d, with input_ids \(2, (12|6)\)",
    ),
}


@pytest.mark.parametrize("name", STEP_CASES)
def test_all_ranks_refuse_a_bad_batch(ranks, name):
    batches, options, pattern = STEP_CASES[name]
    for message in ranks(2).run(step_message, batches, options):
        assert re.search(pattern, message), message


@pytest.mark.parametrize(
    ("bad", "pattern"),
    [
        ({"input_ids": TOKENS[:, :0]}, "sequences of length 0"),
        ({"input_ids": TOKENS, "labels": TOKENS.to_sparse()}, "."),
        ({"input_ids": TOKENS, "cu_seq_lens_q": object()}, "."),
    ],
    ids=["refused", "cannot be sharded", "cannot be read"],
)
def test_a_bad_batch_on_one_rank_is_refused_by_all(ranks, bad, pattern):
    good = {"input_ids": TOKENS}
    first, second = ranks(2).run(step_message, [good, bad], {})
    assert re.search(f"Rank 1 of the context-parallel group refused its batch: .*{pattern}", first)
    assert re.search(pattern, second)


def data_axis_message(batches):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "context_parallel"))
    cp = doors.parallel(mesh["context_parallel"], mesh["data_parallel"])
    try:
        with cp.step(batches[mesh["data_parallel"].get_local_rank()]):
            return "accepted"
    except ValueError as error:
        return str(error)


def test_a_bad_batch_in_one_group_stops_the_groups_beside_it(ranks):
    good, bad = {"input_ids": TOKENS}, {"input_ids": TOKENS[:, :0]}
    messages = ranks(4).run(data_axis_message, [good, bad])
    assert all("Another context-parallel group of this job" in m for m in messages[:2])
    assert all("sequences of length 0" in m for m in messages[2:])


def build_message(arguments):
    try:
        doors.parallel(*arguments.pop("positional", ()), **arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


BUILD_CASES = {
    "algorithm": ({"mesh": None, "algorithm": "star"}, "algorithm='star' is unknown. Use one of"),
    "kernel": (
        {"mesh": None, "kernel": "magic"},
        r"Attention\(kernel='magic'\) is unknown. Use one of",
    ),
    "layout": ({"mesh": None, "layout": "spiral"}, "layout='spiral' is unknown. Use one of"),
    "mesh": (
        {"mesh": 8},
        r"TypeError: ContextParallel\(mesh=...\) got a int. Give a 1-D DeviceMesh",
    ),
}


@pytest.mark.parametrize("name", BUILD_CASES)
def test_bad_settings_are_refused_at_once(name):
    arguments, pattern = BUILD_CASES[name]
    assert re.search(pattern, build_message(dict(arguments)))


def mesh_message():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data_parallel", "context_parallel"))
    return build_message({"mesh": mesh})


def test_a_mesh_of_two_axes_is_refused(ranks):
    for message in ranks(2).run(mesh_message):
        assert re.search(
            r"axes \('data_parallel', 'context_parallel'\), but needs exactly one", message
        )


def swap_messages():
    """Return what this rank says to sizes of neighbourhoods that do not fit."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp_between", "cp_inside"))
    wrong = [
        {"mesh": dist.group.WORLD, "ulysses_size": 3},
        {"mesh": dist.group.WORLD, "ulysses_size": 2, "algorithm": "ulysses"},
        {"mesh": mesh, "ulysses_size": 1},
        {"mesh": mesh, "algorithm": "ulysses"},
    ]
    return [build_message(arguments) for arguments in wrong]


def test_neighbourhoods_that_do_not_fit_are_refused(ranks):
    for messages in ranks(2).run(swap_messages):
        assert (
            "Attention(ulysses_size=3) does not divide the 2 ranks that share a sequence. Use one "
            "of [1, 2]."
        ) in messages[0]
        assert "Leave it out; or choose the algorithm between Ulysses groups" in messages[1]
        assert "('cp_between', 'cp_inside') is a Ulysses group of 2 ranks" in messages[2]
        assert "but 1 are requested" in messages[2]
        assert "but all are requested" in messages[3]


def build_on_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_between", "cp_inside"))
    cp = doors.parallel(mesh, algorithm="ring")
    return name_algorithm(cp.config.algorithm, cp.groups), cp.cp_size, cp.cp_rank


def test_a_mesh_of_two_axes_that_share_rows(ranks):
    found = ranks(4).run(build_on_two_axes)
    assert found == [("ulysses x ring", 4, rank) for rank in range(4)]


def attention_message(shape, arguments, options):
    """Return what this rank says to an attention call inside a step of 12 tokens."""
    cp = doors.parallel(dist.group.WORLD, **options)
    q = torch.randn(*shape)
    with cp.step({"input_ids": TOKENS}):
        try:
            attention(q, q, q, **{"mask": Mask(causal=True), **arguments})
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return "accepted"


ATTENTION_CASES = {
    "a whole row": (
        (2, 4, 12, 8),
        {},
        {},
        r"got 12 tokens inside a step whose ranks hold 6 each \(12 over 2 ranks\). That is the "
        r"full sequence. .*cp.paused\(\)",
    ),
    "one token, as in generate()": ((2, 4, 1, 8), {}, {}, r"got 1 tokens inside a step.*cp.paused"),
    "dropout": (
        (2, 4, 6, 8),
        {"dropout": 0.1},
        {},
        r"dropout=0.1\): attention dropout is not exact",
    ),
    "softcap": ((2, 4, 6, 8), {"softcap": 0.0}, {}, r"softcap=0.0\): pass a number above 0"),
    "a kernel that cannot": (
        (2, 4, 6, 8),
        {"softcap": 20.0},
        {"kernel": "cpu"},
        r"kernel='cpu' cannot compute this attention: it has no softcap.*Use kernel='auto'",
    ),
    "sinks": ((2, 4, 6, 8), {"sinks": torch.zeros(3)}, {}, r"shape \(3,\).*per query head: \(4,\)"),
    "another batch size": (
        (3, 4, 6, 8),
        {"mask": Mask(documents=torch.stack([TOKENS[0] // 3, TOKENS[0] // 4]))},
        {},
        "the mask has 2 samples .*but the tensors have a batch of 3",
    ),
    "three dims": (
        (4, 6, 8),
        {},
        {},
        r"needs \[batch, heads, tokens, head_dim\]; it got q \(4, 6, 8\)",
    ),
}


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_all_ranks_refuse_a_bad_attention_call(ranks, name):
    shape, arguments, options, pattern = ATTENTION_CASES[name]
    for message in ranks(2).run(attention_message, shape, arguments, options):
        assert re.search(pattern, message), message


def rows_message():
    """Give a mask of too many rows to two ranks, of which one holds only padding."""
    cp = doors.parallel(dist.group.WORLD, layout="contiguous")
    q = torch.randn(3, 1, 1, 4)
    with cp.step({"input_ids": torch.zeros(3, 1, dtype=torch.long)}):
        try:
            attention(q, q, q, mask=Mask(padding=torch.tensor([[True], [False]])))
        except ValueError as error:
            return str(error)
    return "accepted"


def test_ranks_that_hold_only_padding_refuse_too(ranks):
    for message in ranks(2).run(rows_message):
        assert "the mask has 2 samples" in message


def uneven_groups_message():
    dist.new_group([0, 1], use_local_synchronization=True) if dist.get_rank() < 2 else None
    try:
        doors.parallel(dist.group.WORLD)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_ranks_with_different_numbers_of_groups_are_told():
    pool = RankPool(3)
    try:
        for message in pool.run(uneven_groups_message):
            assert "have made different numbers of process groups" in message
    finally:
        pool.stop()


def timeouts_of_groups():
    """Return the timeouts of the groups that are made, in seconds."""
    found, new_group = [], dist.new_group

    def spy(*args, timeout=None, **options):
        found.append(timeout.total_seconds())
        return new_group(*args, timeout=timeout, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", spy)
        doors.parallel(dist.group.WORLD, timeout=timedelta(seconds=17))
    return set(found)


def test_the_timeout_reaches_the_group_of_attention(ranks):
    assert ranks(2).run(timeouts_of_groups) == [{17.0}, {17.0}]


def loss_message():
    cp = doors.parallel(dist.group.WORLD)
    with cp.step({"input_ids": TOKENS}):
        try:
            token_mean(torch.zeros(2, 12, 5), torch.zeros(2, 12).long())
        except ValueError as error:
            return str(error)
    return "accepted"


def test_whole_labels_inside_a_step_are_refused(ranks):
    for message in ranks(2).run(loss_message):
        assert "12 tokens per sample inside a step whose ranks hold 6 each" in message
