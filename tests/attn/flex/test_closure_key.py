"""When two functions compute the same, as far as can be seen."""

import math
from functools import partial

import torch

from lightning_cp.attn.flex.closure_key import closure_key

TABLE = torch.arange(4)


def from_globals(b, h, q, k):
    return TABLE[q] > math.floor(2.5)


def with_inner(b, h, q, k):
    return (lambda x: TABLE[x])(q) > k


def same(fn, other):
    found, again = closure_key(fn), closure_key(other)
    return found is not None and again is not None and found[0] == again[0]


def test_code_closures_and_defaults_tell_functions_apart():
    def build(width, scale=1.0):
        def fn(b, h, q, k, power=scale):
            return q - k < width * power

        return fn

    assert same(build(3), build(3))
    assert not same(build(3), build(4))
    assert not same(build(3), build(3.0))
    assert not same(build(3), build(3, 2.0))
    assert not same(build(3), lambda b, h, q, k: q - k < 3)


def test_tensors_count_by_what_they_are_and_by_what_was_written_to_them():
    ids, others = torch.zeros(3), torch.zeros(3)

    def build(x):
        return lambda b, h, q, k: x[q] == x[k]

    before = closure_key(build(ids))
    assert before is not None
    assert before[1] == [ids]
    assert before == closure_key(build(ids))
    assert not same(build(ids), build(others))
    ids[0] = 1
    assert before != closure_key(build(ids))


def test_globals_count_also_in_inner_functions():
    global TABLE
    for fn in (from_globals, with_inner):
        before = closure_key(fn)
        assert before is not None
        assert any(x is TABLE for x in before[1])
        kept, TABLE = TABLE, torch.arange(4)
        assert before != closure_key(fn)
        TABLE = kept
        assert before == closure_key(fn)


def test_partial_tuples_and_functions_of_functions():
    def both(*fns):
        return lambda b, h, q, k: fns[0](b, h, q, k) & fns[1](b, h, q, k)

    def window(b, h, q, k, width):
        return q - k < width

    def itself(b, h, q, k):
        return itself

    assert same(both(from_globals, with_inner), both(from_globals, with_inner))
    assert not same(both(from_globals, with_inner), both(with_inner, from_globals))
    assert same(partial(window, width=2), partial(window, width=2))
    assert not same(partial(window, width=2), partial(window, width=3))
    assert same(itself, itself)


def test_what_may_change_unseen_is_not_known():
    class Holder:
        width = 3

        def mask(self, b, h, q, k):
            return q - k < self.width

        def __call__(self, b, h, q, k):
            return q - k < self.width

    holder, growing = Holder(), [1]
    assert closure_key(holder.mask) is None
    assert closure_key(holder) is None
    assert closure_key(lambda b, h, q, k: q - k < holder.width) is None
    assert closure_key(lambda b, h, q, k: q - k < growing[0]) is None
    with torch.inference_mode():
        ids = torch.zeros(3)
    assert closure_key(lambda b, h, q, k: ids[q] == 0) is None

    def unfilled():
        fn = lambda b, h, q, k: later  # noqa: E731
        found = closure_key(fn)
        later = 1
        return found, later

    assert unfilled()[0] is None
