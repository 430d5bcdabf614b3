"""Break one thing, and compare: a suite that stays green then is blind."""

import dataclasses
from contextlib import ExitStack
from unittest import mock

import torch

import hf_patches.model.attention
import lightning_cp.loss.means
from lightning_cp import ContextParallel
from tests.parity.hf import Found, Job, compare


def _wide_window():
    build = hf_patches.model.mask_reader.build_mask

    def wider(*args):
        mask = build(*args)
        return dataclasses.replace(mask, window=mask.window + 1) if mask.window else mask

    return mock.patch("hf_patches.model.mask_reader.build_mask", wider)


def _moved_document():
    step = ContextParallel.step

    def moved(self, batch):
        ids = batch["document_ids"].clone()
        ids[0, 17] = 0  # the first document of the first row is one token longer
        return step(self, {**batch, "document_ids": ids})

    return mock.patch.object(ContextParallel, "step", moved)


def _no_sinks():
    attention = hf_patches.model.attention.api.attend
    return mock.patch(
        "hf_patches.model.attention.api.attend",
        lambda *args, **kwargs: attention(*args, **{**kwargs, "sinks": None}),
    )


def _lost_label():
    """Each rank shifts its own labels: the last token of a part loses its target."""

    def local(labels, step, shift=True):
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        return shifted

    return mock.patch.object(lightning_cp.loss.means, "scored_labels", local)


def _local_positions():
    """Each rank counts from 0."""

    def count(step, rule, input_ids):
        return torch.arange(step.layout.local_len).expand(step.batch_size, -1)

    return mock.patch("hf_patches.interface.positions.local_positions", count)


BREAKS = {
    "a window one too wide": (_wide_window, Job("mistral")),
    "a document one too long": (_moved_document, Job("llama", "packed")),
    "missing sinks": (_no_sinks, Job("gpt_oss")),
    "labels shifted on each rank": (_lost_label, Job("llama")),
    "positions counted on each rank": (_local_positions, Job("gpt2")),
}


def compare_broken(what: str) -> Found | None:
    """Run a job with something broken, on this rank."""
    breaking, job = BREAKS[what]
    with ExitStack() as stack:
        stack.enter_context(breaking())
        return compare(job)
