"""Steps, batches of parts, and what a step holds for others."""

import gc
import weakref

import pytest
import torch

from lightning_cp import Mask, attention, token_mean
from lightning_cp.step import active_step
from lightning_cp.step.step import BatchOfParts, PerStep, Step, full_step, per_step
from tests import doors

IDS = torch.arange(12).view(2, 6)


def test_a_value_is_computed_once_per_step_and_arguments():
    calls = []

    @per_step
    def double(step, x, *, plus=0):
        calls.append((step.uid, plus))
        return x * 2 + plus

    x, equal = torch.ones(2), torch.ones(2)
    one, other = full_step(4), full_step(4)
    assert double(one, x) is double(one, x)
    assert double(one, equal) is not double(one, x)  # another object
    assert double(one, x, plus=1).tolist() == [3, 3]
    assert double(other, x) is not double(one, x)
    assert [plus for _, plus in calls] == [0, 0, 1, 0]


def test_each_writer_has_its_own_values():
    first, second, step = PerStep(), PerStep(), full_step(4)
    first.put(step, "a", "key")
    assert second.get(step, "key") is None
    assert second.find(step, "key", lambda: "b") == "b"
    assert (first.all(step), second.all(step)) == (["a"], ["b"])
    assert first.all(full_step(4)) == []


def test_a_batch_of_parts_is_no_step_and_counts_its_parts():
    cp = doors.parallel(None, sequence_dims={"a": None, "b": None})
    part = {"input_ids": IDS, "labels": IDS, "attention_mask": (IDS != 5).long()}
    with cp.step({"a": part, "b": {"input_ids": IDS[:1], "labels": IDS[:1]}}) as batch:
        opened = active_step.opened()
        assert isinstance(opened, BatchOfParts)
        assert not isinstance(opened, Step)
        assert (opened.seq_len, opened.num_tokens, opened.work_by_rank()) == (6, 0, [0])
        with pytest.raises(RuntimeError, match="was not sharded, as sequence_dims requests"):
            active_step.current()
        for name in ("a", "b"):
            with cp.step(batch[name], sequence_dims={}) as local:
                token_mean(torch.zeros(*local["labels"].shape, 16), local["labels"])
                q = torch.randn(len(local["labels"]), 1, 6, 4)
                attention(q, q, q, mask=Mask(causal=True))
        assert (opened.num_samples, opened.num_tokens) == (3, 17)
        assert [int(mark.num_tokens) for mark in opened.losses] == [10, 5]
        assert opened.work_by_rank() == [sum(x.work_by_rank()[0] for x in opened.parts)]
        assert opened.work_by_rank()[0] > 0


def test_a_call_outside_of_steps_is_that_of_one_rank_and_leaves_nothing():
    q = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    mask = Mask(causal=True, documents=documents)
    out = attention(q, q, q, mask=mask)
    with doors.parallel(None).step({"input_ids": IDS}):
        assert torch.equal(attention(q, q, q, mask=mask), out)
    alive = weakref.ref(documents)
    del documents, mask
    gc.collect()
    assert alive() is None
