"""Batches of every kind that a user may bring, each with the same thing said plainly."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.parity.steps import IGNORED, Rows

VOCAB = 61


def _tokens(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw tokens, and labels of which some are ignored, unevenly along the sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) < torch.linspace(0.9, 0, length)
    return tokens, tokens.masked_fill(ignored, IGNORED)


def _ids(*sizes: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _restarting(documents: Tensor) -> Tensor:
    """Return positions that start again in each document."""
    rows = []
    for ids in documents:
        row: list[int] = []
        for at, number in enumerate(ids.tolist()):
            row.append(row[-1] + 1 if at and number == ids[at - 1] else 0)
        rows.append(row)
    return torch.tensor(rows)


def plain(seed: int) -> Rows:
    tokens, labels = _tokens(2, 29, seed)
    return Rows({"input_ids": tokens, "labels": labels})


def document_ids(seed: int) -> Rows:
    """Different documents in each row, some tokens in none."""
    tokens, labels = _tokens(2, 29, seed)
    ids = torch.stack([_ids(3, 1, 9, 1, 15) + 4, _ids(12, 13, 4)])
    ids[1, 25:] = -1
    return Rows(
        {"input_ids": tokens, "labels": labels, "document_ids": ids},
        documents=ids,
        positions=_restarting(ids),
    )


def cu_seq_lens(seed: int) -> Rows:
    """One row with an empty document, documents of one token, and a tail that belongs to none."""
    tokens, labels = _tokens(1, 29, seed)
    ids = torch.cat([_ids(5, 1, 1, 14, 6), torch.tensor([-1, -1])])[None]
    lengths = torch.tensor([0, 5, 6, 6, 7, 21, 27], dtype=torch.int32)
    batch = {"input_ids": tokens, "labels": labels, "cu_seq_lens_q": lengths, "max_length_q": 14}
    return Rows(batch, documents=ids, positions=_restarting(ids))


def position_jumps(seed: int) -> Rows:
    tokens, labels = _tokens(2, 29, seed)
    ids = torch.stack([_ids(3, 1, 9, 1, 15), _ids(12, 13, 4)])
    positions = _restarting(ids)
    return Rows(
        {"input_ids": tokens, "labels": labels, "position_ids": positions},
        documents=ids,
        positions=positions,
    )


def told_in_all_ways(seed: int) -> Rows:
    tokens, labels = _tokens(1, 29, seed)
    ids = _ids(5, 1, 17, 6)[None]
    batch = {
        "input_ids": tokens,
        "labels": labels,
        "document_ids": ids * 7 + 2,
        "cu_seq_lens_q": torch.tensor([0, 5, 6, 23, 29]),
        "position_ids": _restarting(ids),
    }
    return Rows(batch, documents=ids, positions=_restarting(ids))


def _padded(seed: int, *, left: bool) -> Rows:
    tokens, labels = _tokens(2, 29, seed)
    width = torch.tensor([[11], [4]])
    position = torch.arange(29)[None]
    padding = position < width if left else position >= 29 - width
    batch = {
        "input_ids": tokens,
        "labels": labels.masked_fill(padding, IGNORED),
        "attention_mask": (~padding).long(),
    }
    return Rows(batch, padding=padding)


def left_padded(seed: int) -> Rows:
    return _padded(seed, left=True)


def right_padded(seed: int) -> Rows:
    return _padded(seed, left=False)


def padded_and_packed(seed: int) -> Rows:
    """Packed rows told by position ids, of which the end is padding."""
    tokens, labels = _tokens(2, 29, seed)
    ids = torch.stack([_ids(3, 1, 9, 1, 15), _ids(12, 13, 4)])
    positions = _restarting(ids)
    padding = torch.zeros(2, 29).bool()
    padding[0, 20:], padding[1, 25:] = True, True
    positions[padding] = 0
    batch = {
        "input_ids": tokens,
        "labels": labels.masked_fill(padding, IGNORED),
        "position_ids": positions,
        "attention_mask": (~padding).long(),
    }
    return Rows(batch, documents=ids.masked_fill(padding, -1), padding=padding, positions=positions)


def embeds(seed: int) -> Rows:
    _, labels = _tokens(2, 29, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 29, 32, generator=generator, dtype=torch.float64)
    return Rows({"inputs_embeds": x.requires_grad_(), "labels": labels})


def own_positions(seed: int) -> Rows:
    """Positions that go on from somewhere: no documents."""
    tokens, labels = _tokens(2, 29, seed)
    positions = torch.arange(29).expand(2, -1) + torch.tensor([[100], [7]])
    return Rows(
        {"input_ids": tokens, "labels": labels, "position_ids": positions}, positions=positions
    )


def short(seed: int) -> Rows:
    """Rows shorter than most cp sizes."""
    tokens, _ = _tokens(2, 3, seed)
    return Rows({"input_ids": tokens, "labels": tokens})


def one_token(seed: int) -> Rows:
    tokens, _ = _tokens(1, 1, seed)
    return Rows({"input_ids": tokens, "labels": tokens})


def no_label(seed: int) -> Rows:
    tokens, _ = _tokens(2, 29, seed)
    return Rows({"input_ids": tokens, "labels": torch.full_like(tokens, IGNORED)})


def few_labels(seed: int) -> Rows:
    """Labels in one place only: the first of 2 or 3 ranks has none, in either layout."""
    rows = plain(seed)
    labels = torch.full_like(rows.batch["input_ids"], IGNORED)
    labels[:, 18:22] = rows.batch["input_ids"][:, 18:22]
    return Rows({**rows.batch, "labels": labels})


BATCHES: dict[str, Callable[[int], Rows]] = {
    build.__name__: build
    for build in (
        plain,
        document_ids,
        cu_seq_lens,
        position_jumps,
        told_in_all_ways,
        left_padded,
        right_padded,
        padded_and_packed,
        embeds,
        own_positions,
        short,
        one_token,
        no_label,
    )
}
