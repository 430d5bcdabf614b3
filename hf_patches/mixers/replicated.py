# SPDX-License-Identifier: Apache-2.0
"""Mixers whose stock module runs on rows of tokens that it can compute alone.

Each document becomes a row of its own, without padding before it: of full sequences, unsharded on
every rank; or, for a mixer that sees a few tokens only, of this rank's ranges and the tokens before
them. Every rank takes its own tokens of the output. Rows end with padding, which a causal mixer
does not see. So packed documents, left and right padding are correct, whatever the stock module
does with them. Norms, MLPs and the other parts of a layer stay sharded.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, sliding_window_overlay

from hf_patches.interface.input_checks import name_arguments
from hf_patches.interface.names import step_of
from hf_patches.mixers.replacement import Replacement, kind_of
from lightning_cp.comm.transport import to_device
from lightning_cp.data.shard import full_tokens
from lightning_cp.geometry.ranges import BoolArray, IntArray
from lightning_cp.patch import Patch
from lightning_cp.private.compiler import outside_graphs
from lightning_cp.sequence.halo import build_halo_plan, extend
from lightning_cp.sequence.token_map import TokenMap, token_map
from lightning_cp.step import active_step
from lightning_cp.step.step import PerStep, Step, StepMask, per_step


@dataclass(frozen=True)
class Spec:
    """How a mixer is called, and what it sees.

    Args:
        tokens: arguments with one entry per token, [B, L, ...], or tuples and dicts of such.
        positions: the same, of values that depend on the position of a token only.
        masks: causal attention masks, which are built again for the rows.
        dropped: arguments that become None: masks that hide padding and other documents only.
        reach: returns how many tokens before its own a token of a mixer sees; None for all.
        multiple: returns what the length of a row must be a multiple of.
        dense_mask: whether masks are needed as tensors, also where causality alone would do.
        all_outputs: whether all tensors of the returned tuple hold tokens, or the first one only.
    """

    tokens: tuple[str, ...] = ("hidden_states",)
    positions: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ("attention_mask",)
    reach: Callable[[Any], int] | None = None
    multiple: Callable[[Any], int] | None = None
    dense_mask: bool = False
    all_outputs: bool = False


_MAMBA: Final = Spec()

SPECS: Final[Mapping[str, Spec]] = {
    "DeepseekV4Attention": Spec(
        positions=("position_embeddings", "position_ids"),
        masks=("attention_mask",),
        dropped=(),
        dense_mask=True,
    ),
    "FalconMambaMixer": _MAMBA,
    "InklingAttention": Spec(masks=("attention_mask",), dropped=("conv_mask",)),
    "InklingShortConvolution": Spec(
        dropped=("conv_mask",), reach=lambda mixer: mixer.conv_kernel_size - 1
    ),
    "JambaMambaMixer": _MAMBA,
    "MambaMixer": _MAMBA,
    "Qwen4ExpTextAttention": Spec(
        positions=("position_embeddings",),
        masks=("attention_mask",),
        dropped=(),
        dense_mask=True,
    ),
    "Qwen4ExpTextGatedDeltaNet": _MAMBA,
    "Qwen4ExpTextPLELayer": Spec(
        tokens=("hidden_states", "input_ids"),
        dropped=("conv_mask",),
        reach=lambda mixer: mixer.short_conv_state_len + mixer.ple_embedding.context_len,
    ),
    "RecurrentGemmaRecurrentBlock": Spec(tokens=("input_states",), positions=("position_ids",)),
    "RwkvFeedForward": Spec(tokens=("hidden",), dropped=(), reach=lambda _: 1),
    "RwkvSelfAttention": Spec(tokens=("hidden",), dropped=()),
    "xLSTMLayer": Spec(tokens=("x",), dropped=(), multiple=lambda mixer: mixer.config.chunk_size),
    "ZambaMambaMixer": _MAMBA,
    "ZayaCCAProjection": Spec(
        dropped=("conv_mask",), reach=lambda mixer: max(mixer.conv_kernel_size, 1), all_outputs=True
    ),
}
"""By the name of the mixer's class."""

_STATES: Final = ("past_key_values", "cache_params", "state")


# ---------------------------------------------------------------- documents as rows


@dataclass(frozen=True, eq=False)
class Group:
    """Documents of similar lengths, as rows of one batch.

    Args:
        index: int64 [N, T], the index of each token in the flattened source; the last token of a
            document again, where its row is longer.
        by_count: int64 [N, T], the index of a token with the position that the token would have if
            its document started without padding.
    """

    index: Tensor
    by_count: Tensor


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The documents of a step, each as a row of its own, and how to find this rank's tokens.

    Args:
        groups: the documents.
        back: int64 [B * L], the index of each of this rank's tokens in the concatenated outputs of
            all groups; the number of these outputs for padding.
    """

    groups: tuple[Group, ...]
    back: Tensor


@dataclass(frozen=True, eq=False)
class TokenSource:
    """Where the tokens of rows come from: full sequences, or this rank's ranges and their halos.

    Indices are those of the flattened source, all samples one after another.

    Args:
        starts: [N], of the first token of each document, ascending.
        lengths: [N], tokens of each document.
        counted: [N], of the token at which the positions of each document start.
        local: [B * L], of this rank's tokens.
        is_real: [B * L], false for padding.
    """

    starts: IntArray
    lengths: IntArray
    counted: IntArray
    local: IntArray
    is_real: BoolArray


def full_source(
    tokens: TokenMap, *, batch_size: int, seq_len: int, kept: BoolArray | None = None
) -> TokenSource:
    """Return the documents of the full batch: of tokens that are kept, by default the real ones."""
    samples = np.arange(batch_size)[:, None] * seq_len
    first = tokens.first[:, :seq_len] + samples
    is_real = np.broadcast_to(tokens.is_real[:, :seq_len] if kept is None else kept, first.shape)
    real = np.flatnonzero(is_real)
    counted, begins, lengths = np.unique(first.ravel()[real], return_index=True, return_counts=True)
    inside = tokens.positions < seq_len
    local = samples + np.where(inside, tokens.positions, 0)
    return TokenSource(
        starts=real[begins],
        lengths=lengths,
        counted=counted,
        local=local.ravel(),
        is_real=(inside & is_real.ravel()[local]).ravel(),
    )


def near_source(tokens: TokenMap, *, batch_size: int, reach: int) -> TokenSource:
    """Return the parts of documents in this rank's ranges, after the tokens that they see."""
    num_extended = sum(reach + held.tokens.size for held in tokens.held)
    samples = np.arange(batch_size)[:, None] * num_extended
    positions = tokens.positions
    shape = batch_size, len(positions)
    is_real = np.broadcast_to(tokens.is_real[:, positions], shape)
    first = np.broadcast_to(tokens.first[:, positions], shape)
    # The number of halos up to a token tells where the token is in the extended ranges.
    number = np.repeat(np.arange(len(tokens.held)), tokens.lengths)
    extended = np.arange(len(positions)) + reach * (number + 1)
    begins = is_real.copy()
    begins[:, 1:] &= ~is_real[:, :-1] | (first[:, 1:] != first[:, :-1]) | (np.diff(number) > 0)
    sample, at = np.nonzero(begins)
    owner = np.cumsum(begins) - 1
    sizes = np.bincount(owner[is_real.ravel()], minlength=len(at))
    # Padding at the start of a document is not seen. Real tokens are consecutive, so those that a
    # token sees before its range are right before it.
    row, start = sample % tokens.num_samples, positions[at]
    earliest = np.maximum(start - reach, tokens.first[row, start])
    num_real = np.pad(np.cumsum(tokens.is_real, 1), ((0, 0), (1, 0)))
    before: IntArray = num_real[row, start] - num_real[row, earliest]
    starts = sample * num_extended + extended[at] - before
    return TokenSource(
        starts=starts,
        lengths=sizes + before,
        counted=starts,
        local=(samples + extended).ravel(),
        is_real=is_real.ravel(),
    )


def _check_holes(tokens: TokenMap) -> None:
    """Raise if padding separates real tokens of a document."""
    sample, position = np.nonzero(tokens.is_real)
    first = tokens.first[sample, position]
    goes_on = (np.diff(sample) == 0) & (np.diff(first) == 0)
    if (goes_on & (np.diff(position) != 1)).any():
        raise ValueError(
            "The attention mask of the batch hides tokens in the middle of a sequence or document. "
            "This model mixes tokens outside of attention, where such tokens cannot be left out. "
            "Remove them from the sequences: only padding at the start or the end is supported."
        )


def pack(
    source: TokenSource, *, width: int | None = None, multiple: int = 1
) -> tuple[list[IntArray], list[IntArray], IntArray]:
    """Lay documents out as rows, in groups of similar lengths; find this rank's tokens in them.

    Without ``width``, a group holds documents whose lengths have the same number of bits, so that
    less than half of its tokens are padding.

    Args:
        source: the documents.
        width: of all rows, which are then one group.
        multiple: what the length of a row must be a multiple of.

    Returns:
        For each group ``index`` and ``by_count``, then ``back``: see `Group` and `DocumentRows`.

    Example:
        >>> from lightning_cp.geometry.layout import build_layout
        >>> from lightning_cp.sequence.token_map import build_token_map
        >>> layout = build_layout("contiguous", seq_len=5, cp_size=2)
        >>> documents = np.array([[0, 0, 1, 1, 1]])
        >>> tokens = build_token_map(layout, 1, documents=documents, padding=None)
        >>> index, _, back = pack(full_source(tokens, batch_size=1, seq_len=5))
        >>> [group.tolist() for group in index], back.tolist()
        ([[[0, 1, 1], [2, 3, 4]]], [4, 5, 6])
    """
    starts, lengths = source.starts, source.lengths
    num_bits = np.frexp(lengths)[1] if width is None else np.zeros(len(lengths), np.int64)
    index, by_count = [], []
    places = np.zeros(len(starts), np.int64)  # of the first token of each document in the outputs
    offset = 0
    for bits in np.unique(num_bits):
        chosen = np.flatnonzero(num_bits == bits)
        row_len = -(-(width or int(lengths[chosen].max())) // multiple) * multiple
        columns = np.minimum(np.arange(row_len), lengths[chosen, None] - 1)
        index.append(starts[chosen, None] + columns)
        by_count.append(source.counted[chosen, None] + columns)
        places[chosen] = offset + np.arange(len(chosen)) * row_len
        offset += len(chosen) * row_len
    owner = np.maximum(np.searchsorted(starts, source.local, side="right") - 1, 0)
    back = places[owner] + source.local - starts[owner]
    return index, by_count, np.where(source.is_real, back, offset)


@per_step
def rows_of(step: Step, *, reach: int | None, multiple: int) -> DocumentRows:
    """Return the rows of a step, on the device of its tokens; computed once."""
    tokens, batch_size = token_map(step), step.batch_size
    _check_holes(tokens)
    if reach is None:
        source = full_source(tokens, batch_size=batch_size, seq_len=step.layout.seq_len)
    else:
        source = near_source(tokens, batch_size=batch_size, reach=reach)
    if not len(source.starts):  # a rank that holds padding only computes something as well
        source = replace(source, starts=np.array([0]), lengths=np.array([1]), counted=np.array([0]))
    # Among equal scores, some indexers choose by the length of the row: keep that of the batch.
    is_plain = reach is None and step.documents is None
    width = step.layout.seq_len if is_plain else None
    index, by_count, back = pack(source, width=width, multiple=multiple)
    if step.has_position_ids or reach is not None:
        by_count = index  # each token has its own position
    device = step.position_ids.device
    pairs = zip(index, by_count, strict=True)
    return DocumentRows(
        tuple(Group(*(to_device(torch.from_numpy(x), device) for x in pair)) for pair in pairs),
        to_device(torch.from_numpy(back), device),
    )


# ---------------------------------------------------------------- the tokens of rows


def _map(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Call a function for each tensor of nested tuples and dicts."""
    if isinstance(x, tuple | list):
        return tuple(_map(function, part) for part in x)
    if isinstance(x, dict):
        return {key: _map(function, part) for key, part in x.items()}
    return function(x) if isinstance(x, Tensor) else x


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def _full(step: Step, x: Tensor) -> Tensor:
    """Return the tokens of the full batch, [B * S, ...]; differentiable."""
    x = x.expand(step.batch_size, *x.shape[1:])
    return full_tokens(x, step).flatten(0, 1)


def _near(step: Step, x: Tensor, reach: int) -> Tensor:
    """Return this rank's ranges, each after its halo, [B * E, ...]; differentiable."""
    return extend(x, 1, build_halo_plan(step, reach, x.device)).flatten(0, 1)


_shared_full, _shared_near = per_step(_full), per_step(_near)


def _source(step: Step, x: Tensor, reach: int | None) -> Tensor:
    """Return the tokens of rows; layers share what needs no gradient."""
    if reach is None:
        return _full(step, x) if x.requires_grad else _shared_full(step, x)
    return _near(step, x, reach) if x.requires_grad else _shared_near(step, x, reach)


# ---------------------------------------------------------------- the mixer

_masks = PerStep[Any]()


class RowMixer(Replacement):
    """The forward of a mixer, whose ``kind`` is its key in `SPECS`."""

    @property
    def spec(self) -> Spec:
        """Return how the mixer is called."""
        return SPECS[self.kind]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer: on rows inside a step, as the stock module outside."""
        arguments = name_arguments(self.module, args, kwargs)
        step = self._step(arguments)
        return self.stock(**arguments) if step is None else self._run(step, arguments)

    def _step(self, arguments: Mapping[str, Any]) -> Step | None:
        # When a layer is recomputed, its step may be closed; the mask still carries it.
        for name in (*self.spec.masks, *self.spec.dropped):
            mask = arguments.get(name)
            if isinstance(mask, StepMask) and not active_step.is_paused():
                return mask.step
        return step_of()

    @outside_graphs
    def _run(self, step: Step, arguments: dict[str, Any]) -> Any:
        spec = self.spec
        known = {*spec.tokens, *spec.positions, *spec.masks, *spec.dropped}
        check_arguments(self.module, known, arguments)
        reach = None if spec.reach is None else spec.reach(self.module)
        multiple = 1 if spec.multiple is None else spec.multiple(self.module)
        rows = rows_of(step, reach=reach, multiple=multiple)
        row_arguments = {
            name: arguments[name]
            for name in (*spec.tokens, *spec.positions)
            if arguments.get(name) is not None
        }
        source = _map(lambda x: _source(step, x, reach), row_arguments)
        # Masks and attention inside are those of the stock model.
        with active_step.paused():
            outputs = [self._run_group(group, step, arguments, source) for group in rows.groups]
        return self._own_tokens(outputs, rows, step, arguments)

    def _run_group(
        self, group: Group, step: Step, arguments: Mapping[str, Any], source: Mapping[str, Any]
    ) -> Any:
        """Run the stock module on the documents of one group."""
        spec = self.spec
        own: dict[str, Any] = dict.fromkeys(spec.dropped)
        for name, x in source.items():
            index = group.by_count if name in spec.positions else group.index
            own[name] = _map(partial(_take, index=index), x)
        for name in spec.masks:
            own[name] = self._mask(group, step, arguments[name], own[spec.tokens[0]])
        return self.stock(**{**arguments, **own})

    def _mask(self, group: Group, step: Step, mask: Any, hidden: Tensor) -> Any:
        """Return the stock mask of a group; layers share it."""
        if (
            not isinstance(mask, StepMask)
            or not mask.causal
            or mask.chunk
            or mask.spans is not None
        ):
            raise ValueError(
                f"{type(self.module).__name__} got an attention mask that is not a causal one, or "
                "one of its own, inside a step: its mask is built for full sequences. Leave out "
                "4-D masks, or run the model on full sequences: `with cp.paused():`."
            )
        window = mask.window[0] + 1 if isinstance(mask.window, tuple) else mask.window
        build = partial(
            create_causal_mask,
            config=self.module.config,  # type: ignore[arg-type]
            inputs_embeds=hidden.detach()[..., :1],
            attention_mask=None,
            past_key_values=None,
            and_mask_function=None if window is None else sliding_window_overlay(window),
            allow_is_causal_skip=not self.spec.dense_mask,
        )
        key = group, window, self.spec.dense_mask, hidden.dtype
        return _masks.find(step, key, build)

    def _own_tokens(
        self, outputs: list[Any], rows: DocumentRows, step: Step, arguments: Mapping[str, Any]
    ) -> Any:
        """Return this rank's tokens of the outputs, [B, L, ...]; zeros for padding."""
        if not isinstance(outputs[0], tuple):
            return select(outputs, rows.back, step)
        parts = list(zip(*outputs, strict=True))
        if self.spec.all_outputs:
            return tuple(select(list(part), rows.back, step) for part in parts)
        # The others are attention weights and states, which no rank holds.
        return (select(list(parts[0]), rows.back, step), *(None for _ in parts[1:]))


def select(outputs: list[Tensor], back: Tensor, step: Step) -> Tensor:
    """Return this rank's tokens of the outputs of all groups, [B, L, ...]; zeros for padding."""
    flat = [x.flatten(0, 1) for x in outputs]
    flat.append(flat[0].new_zeros(1, *flat[0].shape[1:]))
    local = torch.cat(flat)[back]
    return local.view(step.batch_size, step.tensor_len, *local.shape[1:])


def check_arguments(
    module: nn.Module, known: Collection[str], arguments: Mapping[str, Any]
) -> None:
    """Raise for arguments that hold a part of the tokens, or that keep a state for later calls.

    Args:
        module: the module.
        known: the names of arguments that it can be called with.
        arguments: of the call.
    """
    name = type(module).__name__
    for state in _STATES:
        if arguments.get(state) is not None:
            raise ValueError(
                f"{name} got `{state}` inside a step: a state or cache would hold this rank's "
                "tokens only. Leave it out, with use_cache=False; run generate() under "
                "`with cp.paused():`."
            )
    for other, x in arguments.items():
        if other not in known and _has_tensors(x):
            raise ValueError(
                f"{name} got `{other}`, which is not supported inside a step: it may hold this "
                "rank's tokens only. Leave it out, or run the model on full sequences: "
                "`with cp.paused():`."
            )


def _has_tensors(x: Any) -> bool:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, tuple | list):
        return any(map(_has_tensors, x))
    return isinstance(x, Tensor)


# ---------------------------------------------------------------- installing


def check_dropout(path: str, mixer: nn.Module) -> None:
    """Raise if a module has dropout: ranks would drop different parts of the same sequence."""
    for part in mixer.modules():
        rates = {name: x for name, x in vars(part).items() if "drop" in name}
        if isinstance(part, nn.Dropout):
            rates["p"] = part.p
        for name, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise ValueError(
                    f"{path} ({type(mixer).__name__}) has dropout ({name} = {rate}), and runs on "
                    "full sequences on every rank: the ranks would drop different values of the "
                    "same sequence. Load the model with this dropout set to 0.0."
                )


def install(model: PreTrainedModel) -> Iterator[Patch]:
    """Replace the forward of each mixer that `SPECS` names; yield the mixers."""
    for path, module in model.named_modules():
        kind = kind_of(module, SPECS)
        if kind is not None:
            check_dropout(path, module)
            yield RowMixer(module, kind).install()
