"""Hugging Face models under context parallelism: loss and every gradient of the stock model.

A subset; `make parity` runs all architectures that are served.
"""

import itertools

import pytest
import torch

from tests.parity.broken import BREAKS, compare_broken
from tests.parity.hf import KINDS, Job, compare_all

pytestmark = pytest.mark.ranks

LAYOUTS, ALGORITHMS = ("zigzag", "contiguous", "balanced"), ("gather", "ring", "ulysses")

# Together they have everything that an architecture may have.
NAMES = (
    "llama",
    "llama:dynamic",  # RoPE that follows the length of the row
    "phi3:longrope",
    "gpt2",  # a table of positions
    "opt",  # positions counted from the mask
    "roberta",  # positions counted from the padding token
    "bart",  # positions counted by length, labels not shifted
    "mistral",  # window
    "gpt_oss",  # window, sinks, experts
    "gemma2",  # softcap, window
    "gemma3_text:bidirectional",
    "gemma3n_text",  # keys shared between layers
    "llama4_text",  # chunks, temperature by position
    "deepseek_v3",  # latent attention, values of another dim
    "diffllama",  # differential attention
    "mixtral:aux",  # the loss that balances experts
)
NOT_IN_DOUBLE = ("phi3:longrope", "bart")
EXACT = tuple(name for name in NAMES if name not in NOT_IN_DOUBLE)
# Whose results depend on where tokens stand in a row with padding.
POSITIONED = (
    *("llama:dynamic", "gpt2", "opt", "roberta", "gpt_oss", "gemma3n_text", "llama4_text"),
    "mixtral:aux",
)


def check(ranks, cp_size, jobs, limit=1e-3, loss_limit=1e-5):
    results = ranks(cp_size).run(compare_all, jobs)[0]
    for job, found in zip(jobs, results, strict=True):
        assert not isinstance(found, str), (str(job), found)
        assert abs(found.loss - found.exact_loss) < loss_limit, (str(job), found.loss, found)
        assert found.worst[1] < limit, (str(job), found.worst)


def spread(names, kinds=KINDS, **options):
    """Give each name all kinds of batches, and each layout and algorithm its turn."""
    turns = itertools.cycle(itertools.product(LAYOUTS, ALGORITHMS))
    for turn, (name, kind) in zip(turns, itertools.product(names, kinds), strict=False):
        chosen = tuple(zip(("layout", "algorithm"), turn, strict=True))
        yield Job(name, kind, options=chosen, **options)


@pytest.mark.parametrize(
    "names", [NOT_IN_DOUBLE, pytest.param(EXACT, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_models_are_those_of_one_process(ranks, names):
    check(ranks, 2, list(spread(names)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cp_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))]
)
def test_other_numbers_of_ranks_change_nothing(ranks, cp_size):
    check(ranks, cp_size, list(spread(("llama", "gpt_oss", "roberta", "mixtral:aux"), KINDS[:3])))


@pytest.mark.parametrize(
    "kinds",
    [
        {"packed": [n for n in EXACT if n not in ("llama", "mistral")], "left": POSITIONED},
        pytest.param(dict.fromkeys(KINDS, EXACT), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_in_double_precision_the_algebra_is_exact(ranks, kinds):
    jobs = [*spread(EXACT, tuple(kinds), dtype=torch.float64)]
    jobs = [job for job in jobs if job.name in kinds[job.kind]]
    check(ranks, 2, jobs, limit=1e-9, loss_limit=1e-11)


@pytest.mark.parametrize(
    ("head", "kinds"),
    [
        ("masked", ("packed",)),
        *(
            pytest.param(head, kinds, marks=pytest.mark.slow)
            for head, kinds in {
                "masked": KINDS,
                "token": KINDS,
                "sequence": ("plain", "left", "right"),
                "question": ("plain", "left", "right"),
            }.items()
        ),
    ],
)
def test_other_heads_are_exact(ranks, head, kinds):
    names = ("bert", "modernbert", "roberta", "distilbert")
    names += () if head == "masked" else ("llama", "qwen2")
    jobs = [*spread(names, kinds, head=head, dtype=torch.float64)]
    check(ranks, 2, jobs, limit=1e-8, loss_limit=1e-9)


IN_CHUNKS = ("llama:tied", "gemma2", "cohere", "mixtral:aux")
OTHERS_IN_CHUNKS = ("granite", "bert", "opt", "gemma3")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (IN_CHUNKS, "packed"),
        pytest.param(OTHERS_IN_CHUNKS, "packed", marks=pytest.mark.slow),
        pytest.param((*IN_CHUNKS, *OTHERS_IN_CHUNKS), "plain", marks=pytest.mark.slow),
    ],
)
def test_the_loss_without_all_logits_is_the_same(ranks, names, kind):
    always = (("chunked_loss", "always"),)
    check(ranks, 2, list(spread(names, (kind,), enabling=always)))


RECOMPUTED = ("llama", "gpt_oss", "gemma3_text", "llama4_text", "roberta", "llama:dynamic")


@pytest.mark.parametrize(
    ("reentrant", "names"),
    [
        (False, RECOMPUTED),
        (True, RECOMPUTED[:2]),
        pytest.param(True, RECOMPUTED[2:], marks=pytest.mark.slow),
    ],
    ids=["False", "True", "True-others"],
)
def test_layers_may_be_recomputed_in_backward(ranks, reentrant, names):
    check(ranks, 2, list(spread(names, ("packed",), checkpointing=reentrant)))


@pytest.mark.parametrize("what", BREAKS)
def test_the_suite_notices(ranks, what):
    found = ranks(2).run(compare_broken, what)[0]
    assert found.worst[1] > 1e-2, found.worst
