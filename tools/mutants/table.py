"""The mutants: small faults, where each is put, and the tests that should notice it.

A mutant is a definition (`module:qualified.name`), a snippet that occurs exactly once in its
source, and what replaces the snippet. Who moves code updates its entries in the same commit; who
deletes it moves them to `RETIRED`, with the mechanism that is gone.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Args:
        name: by which it is run and reported.
        where: the definition that holds it.
        old: the snippet that is replaced.
        new: what replaces it.
        tests: files, or tests in them, that should notice it: the fastest first.
        reason: what it is.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    reason: str


RETIRED: dict[str, str] = {}
"""Mutants whose code is gone, by name, with the mechanism that went with it."""

SURVIVED = (
    "causal-tile-sees-more",
    "checksum-without-places",
    "window-not-reset",
    "window-divided-twice",
    "shared-head-of-one-query",
    "recompute-in-another-step",
    "replicas-summed-in-half",
    "shards-reduced-in-half",
    "tiles-without-autocast",
    "workers-of-the-global-rank",
    "plan-without-margin",
    "dense-mask-shows-padding",
)
"""Mutants whose listed tests do not exist at df0532d."""

_FUNCTION = "tests/attn/blockwise/test_function.py"
_GRID = f"{_FUNCTION}::test_out_and_gradients_are_those_of_one_device"
_KERNELS = "tests/attn/blockwise/test_kernels.py"
_MASK = "tests/geometry/test_mask.py"
_BATCH = "tests/data/test_batch.py"
_SHARDING = "tests/data/test_shard.py"
_LIFETIME = "tests/parity/test_lifetime.py"
_DATA = "tests/recipes/test_data.py"
_CHECKPOINT = "tests/checkpoint/test_checkpoint.py"
_HF = "tests/parity/test_hf.py"
_MODELS = f"{_HF}::test_models_are_those_of_one_process[some]"
_EXACT_MODELS = f"{_HF}::test_in_double_precision_the_algebra_is_exact[some]"
_RECOMPUTED_HF = f"{_HF}::test_layers_may_be_recomputed_in_backward"
_WHOLE_ROWS = "tests/hf_patches/test_shard_in_forward.py"
_ROWS_ON_RANKS = f"{_WHOLE_ROWS}::test_a_model_returns_what_the_stock_model_returns"
_LINEAR = "tests/hf_patches/mixers/test_linear_models.py"
_EXACT_LINEAR = f"{_LINEAR}::test_in_double_precision_the_algebra_is_exact"
_STEPS = "tests/lightning/steps/test_steps.py"
_FOUR_STEPS = "tests/lightning/test_training.py::test_four_steps_equal_those_of_one_process"
_OFFLOAD = "tests/memory/test_offload.py"

GEOMETRY = (
    Mutant(
        "window-one-wide",
        "lightning_cp.geometry.mask:_compute_bounds",
        "else (reach - 1, reach - 1)",
        "else (reach, reach - 1)",
        (f"{_MASK}::test_bounds_are_the_mask_written_out",),
        "a window sees one key more before the query",
    ),
    Mutant(
        "document-one-early",
        "lightning_cp.geometry.mask:runs",
        "start[:, 1:] = np.where(change, positions[1:], 0)",
        "start[:, 1:] = np.where(change, positions[:-1], 0)",
        (f"{_MASK}::test_bounds_are_the_mask_written_out",),
        "a document begins with the last token of the one before",
    ),
    Mutant(
        "chunks-from-padding",
        "lightning_cp.geometry.mask:_chunk_starts",
        "origin = np.take_along_axis(next_real, np.ascontiguousarray(first), 1)",
        "origin = np.ascontiguousarray(first)",
        (f"{_MASK}::test_bounds_are_the_mask_written_out",),
        "chunks are counted from padding at the start of a document",
    ),
    Mutant(
        "empty-bounds-cross",
        "lightning_cp.geometry.bounds:build_bounds",
        "last = np.maximum(first, np.take_along_axis(after_real, last, 1))",
        "last = np.take_along_axis(after_real, last, 1)",
        (f"{_MASK}::test_bounds_are_the_mask_written_out",),
        "a query that sees nothing has bounds that end before they begin",
    ),
    Mutant(
        "causal-tile-sees-more",
        "lightning_cp.geometry.bounds:Bounds._is_causal",
        "bool((self.last[:, part] == steps).all())",
        "bool((self.last[:, part] >= steps).all())",
        (f"{_MASK}::test_tiles_of_all_blocks",),
        "a tile that sees later keys is computed as a causal one",
    ),
    Mutant(
        "hull-of-first-query",
        "lightning_cp.geometry.bounds:Bounds.hull",
        "self.last[:, query.stop - 1]",
        "self.last[:, query.start]",
        (f"{_MASK}::test_bounds_are_the_mask_written_out",),
        "keys that only later queries of a range see are not sent",
    ),
    Mutant(
        "stale-mask",
        "lightning_cp.geometry.mask:Mask.key",
        "(id(x), tensor_version(x)) if isinstance",
        "id(x) if isinstance",
        ("tests/attn/test_api.py::test_a_mask_whose_tensor_was_edited_is_worked_out_again",),
        "a mask that was changed in place is taken from the cache",
    ),
    Mutant(
        "zigzag-without-mirror",
        "lightning_cp.geometry.layout:_zigzag",
        "(chunks[r], chunks[-1 - r])",
        "(chunks[r], chunks[cp_size + r])",
        ("tests/geometry/test_layout.py::test_zigzag_balances_a_causal_row",),
        "a valid layout that is not even",
    ),
    Mutant(
        "unshard-with-padding",
        "lightning_cp.geometry.layout:Layout.order",
        "return order[: self.seq_len]",
        "return order",
        ("tests/geometry/test_layout.py", _SHARDING),
        "full sequences come back with the padding that we appended",
    ),
    Mutant(
        "chain-of-next-range",
        "lightning_cp.geometry.balance:_Chain.__init__",
        "self._before = work[:-1] - work_before[starts]",
        "self._before = work[1:] - work_before[starts]",
        (
            "tests/geometry/test_layout.py::test_balanced_is_zigzag_for_a_causal_row",
            "tests/geometry/test_balance.py",
        ),
        "work of a window over several ranges is wrong by one of them",
    ),
    Mutant(
        "branches-see-earlier-ones",
        "lightning_cp.geometry.branches:BranchMask.bounds",
        "(numbers == SHARED) | (numbers == self.number)",
        "(numbers == SHARED) | (numbers <= self.number)",
        ("tests/geometry/test_branches.py",),
        "a branch sees the branches before it",
    ),
    Mutant(
        "branch-positions-from-document",
        "lightning_cp.geometry.branches:read_branches",
        "offsets = np.where(inside, own - origin, 0)",
        "offsets = np.where(inside, own - begin, 0)",
        (
            "tests/geometry/test_branches.py",
            "tests/hf_patches/test_token_logp.py",
        ),
        "positions of a branch start again at 0, not behind what it shares",
    ),
)

DATA = (
    Mutant(
        "label-of-next-document",
        "lightning_cp.data.shard:shift_labels",
        "documents[:, :-1] == documents[:, 1:]",
        "documents[:, :-1] <= documents[:, 1:]",
        (f"{_SHARDING}::test_labels_are_those_of_the_next_token_of_the_document",),
        "the last token of a document predicts the next document",
    ),
    Mutant(
        "tokens-of-no-document-predict",
        "lightning_cp.data.shard:shift_labels",
        " & (documents[:, :-1] != NO_DOCUMENT)",
        "",
        (f"{_SHARDING}::test_labels_are_those_of_the_next_token_of_the_document",),
        "tokens of no document are counted in the loss",
    ),
    Mutant(
        "padding-has-label-0",
        "lightning_cp.data.batch:_FILL",
        '"labels": IGNORED_LABEL,\n    "shift',
        '"labels": 0,\n    "shift',
        (_BATCH, f"{_STEPS}::test_a_local_mean_is_weighed_by_its_labels"),
        "the padding that we append has labels",
    ),
    Mutant(
        "unshard-own-gradient",
        "lightning_cp.data.shard:_Unshard.backward",
        "transport.reduce_scatter(local, shards)()",
        "local.copy_(shards[transport.rank])",
        (_SHARDING,),
        "gradients of other ranks for this rank's tokens are lost",
    ),
    Mutant(
        "unshard-sums-in-half",
        "lightning_cp.data.shard:_Unshard.backward",
        "dtype = accumulation_dtype(grad.dtype)",
        "dtype = grad.dtype",
        (_SHARDING,),
        "gradients are summed over ranks in half precision",
    ),
    Mutant(
        "cu-seq-lens-one-late",
        "lightning_cp.data.batch:_documents_from_lengths",
        'side="right"',
        'side="left"',
        (_BATCH, "tests/compare/test_verify.py"),
        "a document starts one token after its boundary in cu_seq_lens",
    ),
    Mutant(
        "padding-splits-documents",
        "lightning_cp.data.batch:_documents_from_jumps",
        " & (step != index[1:] - before)",
        "",
        (f"{_BATCH}::test_positions_that_go_on_over_padding_are_one_document", _BATCH),
        "positions that count padding are taken for a new document",
    ),
    Mutant(
        "positions-in-the-sequence",
        "lightning_cp.data.batch:count_positions",
        "np.where(change, positions, 0)",
        "np.where(change, 0, 0)",
        (_BATCH,),
        "position ids go on over documents",
    ),
    Mutant(
        "checksum-without-places",
        "lightning_cp.data.outputs:checksum",
        "return (bits * weights).sum()",
        "return bits.sum()",
        (f"{_BATCH}::test_values_that_differ_between_ranks_are_found",),
        "values in another order have the same checksum",
    ),
    Mutant(
        "evaluation-uses-up-checks",
        "lightning_cp.data.consistency:BatchChecks.count_batch",
        "self._counts[training] += 1",
        "self._counts[True] += 1",
        ("tests/lightning/test_habits.py::test_evaluation_does_not_use_up_the_check_of_batches",),
        "batches of evaluation are counted as those of training",
    ),
    Mutant(
        "bad-batch-of-one-rank",
        "lightning_cp.data.consistency:BatchChecks.check_batch",
        "            raise problem",
        "            if context.rank == 0:\n                raise problem",
        ("tests/parity/test_refusals.py::test_a_bad_batch_on_one_rank_is_refused_by_all",),
        "a bad batch is an error on one rank only",
    ),
    Mutant(
        "no-document-unpacked",
        "lightning_cp.data.batch:_intervals",
        " if ids[start] != NO_DOCUMENT",
        "",
        (f"{_BATCH}::test_documents_become_rows_of_their_own", "tests/hf_patches/test_verify.py"),
        "tokens of no document become a sample of the reference",
    ),
)

COMM = (
    Mutant(
        "transfer-not-awaited",
        "lightning_cp.comm.transport:_Pending.__call__",
        "work.wait()",
        "pass",
        ("tests/parity/test_attention_on_processes.py::test_float64_is_exact",),
        "results are used before they have arrived",
    ),
    Mutant(
        "errors-of-context-only",
        "lightning_cp.compare.verify:distances",
        "for group in groups:",
        "for group in groups[:1]:",
        ("tests/compare/test_verify.py::test_data_ranks_verify_the_same_rows",),
        "errors of gradients leave the data axis out",
    ),
    Mutant(
        "flag-of-one-rank",
        "lightning_cp.comm.collective_errors:any_rank",
        "count > 0 for count",
        "count > 1 for count",
        ("tests/hf_patches/test_on_ranks.py::test_what_only_one_rank_can_see_is_said_by_all",),
        "what one rank alone has found is not an error on the others",
    ),
    Mutant(
        "watchdog-of-itself",
        "lightning_cp.comm.watchdog:Watchdog._listen",
        "(self._rank + 1) % self._size",
        "self._rank",
        ("tests/comm/test_watchdog.py::test_a_silent_rank_is_named",),
        "each rank listens to its own heartbeat",
    ),
)

LOSS = (
    Mutant(
        "loss-gradient-unscaled",
        "lightning_cp.loss.means:_GlobalMean.forward",
        "ctx.save_for_backward(num_ranks / num_tokens,",
        "ctx.save_for_backward(1 / num_tokens,",
        (f"{_LIFETIME}::test_a_checkpointed_loss_is_exact",),
        "averaging over ranks divides the gradient once too often",
    ),
    Mutant(
        "loss-of-data-rank",
        "lightning_cp.loss.means:_GlobalMean.forward",
        "for transport in groups:",
        "for transport in groups[:1]:",
        ("tests/parity/test_step.py::test_data_parallel_beside_it_with_uneven_labels[gather]",),
        "tokens are counted over the context ranks only",
    ),
    Mutant(
        "padding-scored-unshifted",
        "lightning_cp.loss.means:scored_labels",
        "return labels.masked_fill(appended, IGNORED_LABEL)",
        "return labels",
        (f"{_LIFETIME}::test_labels_of_the_same_token",),
        "the padding that we append counts in a loss without a shift",
    ),
    Mutant(
        "bucket-one-late",
        "lightning_cp.loss.means:_by_position",
        "right=True",
        "right=False",
        ("tests/lightning/test_callback.py::test_the_loss_by_position_is_that_of_full_sequences",),
        "the first token of a bucket of positions is in the one before",
    ),
    Mutant(
        "loss-shifted-on-each-rank",
        "lightning_cp.loss.means:local_targets",
        "shifted = shift_labels(full_tokens(labels, step), ids)",
        "shifted = shift_labels(full_tokens(labels, step), None)",
        (f"{_LIFETIME}::test_a_checkpointed_loss_is_exact",),
        "labels are shifted across documents",
    ),
    Mutant(
        "chunks-summed-in-half",
        "lightning_cp.loss.gradients:add_gradients",
        "gradient.to(accumulation_dtype(gradient.dtype), copy=True)",
        "gradient.clone()",
        (
            "tests/loss/test_means.py::test_chunked_sums_gradients_in_float32_where_there_is_a_sum",
            "tests/loss/test_logp.py",
        ),
        "gradients of parts are summed in half precision",
    ),
    Mutant(
        "head-drops-others-in-backward",
        "lightning_cp.loss.chunked_loss:_ChunkedLosses.backward",
        "with ctx.state.restored():",
        "if True:",
        ("tests/loss/test_logp.py::test_dropout_and_autocast_of_the_head_are_those_of_forward",),
        "dropout of the head is another one when it runs again",
    ),
    Mutant(
        "chunks-unweighted",
        "lightning_cp.loss.chunked_loss:_ChunkedLosses.backward",
        "weights=grad",
        "weights=None",
        ("tests/loss/test_logp.py::test_outside_a_step_it_is_log_softmax",),
        "each token has the gradient of a plain sum",
    ),
    Mutant(
        "logp-of-first-token",
        "lightning_cp.loss.logp:_full",
        "full_tokens(x, step))[:, :-1]",
        "full_tokens(x, step))[:, 1:]",
        ("tests/loss/test_logp.py::test_outside_a_step_it_is_log_softmax",),
        "columns belong to other labels",
    ),
    Mutant(
        "segment-of-the-predicting-token",
        "lightning_cp.loss.logp:sequence_logp",
        "to_device(ids, logp.device)[:, 1:].long()",
        "to_device(ids, logp.device)[:, :-1].long()",
        ("tests/loss/test_logp.py::test_segments_by_ids",),
        "a label is in the segment of the token before it",
    ),
    Mutant(
        "window-not-reset",
        "lightning_cp.loss.accumulate:GradientWindow.finish",
        "self._reset()",
        "pass",
        ("tests/loss/test_accumulate.py",),
        "tokens of the last optimizer step count in the next",
    ),
    Mutant(
        "window-divided-twice",
        "lightning_cp.loss.accumulate:GradientWindow.finish",
        "factor = first / total.clamp(min=1)",
        "factor = first / total.clamp(min=1) / num_microbatches",
        ("tests/loss/test_accumulate.py",),
        "accumulated gradients are divided by the number of batches too",
    ),
)

ATTENTION = (
    Mutant(
        "ring-backwards",
        "lightning_cp.attn.plan:_ring_stages",
        "source, target = (rank - shift) % cp_size, (rank + shift) % cp_size",
        "source, target = (rank + shift) % cp_size, (rank - shift) % cp_size",
        ("tests/attn/test_plan.py",),
        "a rank expects keys of a rank that does not send them",
    ),
    Mutant(
        "run-at-start-of-piece",
        "lightning_cp.attn.plan:_runs",
        "place.offset + piece.positions.start - place.positions.start",
        "place.offset",
        ("tests/attn/test_plan.py", f"{_GRID}[gather-documents-mqa-3]"),
        "keys arrive at the start of the piece that they are a part of",
    ),
    Mutant(
        "block-at-start-of-piece",
        "lightning_cp.attn.plan:_block_of",
        "piece.offset + hull.start - piece.positions.start",
        "piece.offset",
        (f"{_FUNCTION}::test_any_mask_shape_size_and_ownership_is_exact",),
        "queries that see nothing are not left out of a block",
    ),
    Mutant(
        "own-piece-too-long",
        "lightning_cp.attn.mask_blocks:Block._combinations",
        "keys.positions.start <= query.positions.start < keys.positions.stop",
        "keys.positions.start <= query.positions.start <= keys.positions.stop",
        (
            "tests/attn/test_plan.py::test_blocks_hold_all_visible_pairs_once",
            f"{_GRID}[gather-causal-mha-3]",
        ),
        "a piece and the one after it are taken for the same tokens",
    ),
    Mutant(
        "lse-of-base-2",
        "lightning_cp.attn.accumulators:merge_into",
        "weight = torch.sigmoid(b_lse - a_lse)",
        "weight = torch.sigmoid((b_lse - a_lse) * 1.4427)",
        ("tests/attn/test_accumulators.py::test_merged_parts_are_the_whole",),
        "partial softmaxes are merged with an lse of another base",
    ),
    Mutant(
        "empty-merged-with-empty",
        "lightning_cp.attn.accumulators:merge_into",
        "weight = torch.where(b_lse == NEVER, 0.0, weight).unsqueeze(-1)",
        "weight = weight.unsqueeze(-1)",
        ("tests/attn/test_accumulators.py::test_rows_that_saw_nothing_stay_empty_and_finite",),
        "a query that sees nothing becomes NaN",
    ),
    Mutant(
        "sinks-twice",
        "lightning_cp.attn.blockwise.function:compute_forward",
        "        add_sinks_(out, lse, sinks)",
        "        add_sinks_(out, lse, sinks)\n        add_sinks_(out, lse, sinks)",
        (f"{_GRID}[gather-bidirectional-gqa-3]",),
        "sinks take their share twice",
    ),
    Mutant(
        "sink-gradient-sign",
        "lightning_cp.attn.accumulators:sink_gradient",
        "return -shares.sum((0, 2))",
        "return shares.sum((0, 2))",
        ("tests/attn/test_accumulators.py::test_a_sink_is_a_key_of_value_zero",),
        "sinks move the wrong way",
    ),
    Mutant(
        "gradient-summed-in-half",
        "lightning_cp.attn.accumulators:GradAccumulator._empty",
        "dtype=dtype if raised else None",
        "dtype=None",
        (
            "tests/attn/test_accumulators.py",
            f"{_FUNCTION}::test_lower_precisions_earn_their_tolerance",
        ),
        "gradients of queries and keys are summed in half precision",
    ),
    Mutant(
        "uncovered-not-cleared",
        "lightning_cp.attn.accumulators:PartialSums._clear_rest",
        "if sum(region.size for region in regions) < self.region.size:",
        "if False:",
        (
            "tests/attn/test_accumulators.py::test_parts_that_cover_anything_add_up",
            f"{_GRID}[gather-right padding-mqa-3]",
        ),
        "what no tile covers is memory that nobody has written",
    ),
    Mutant(
        "keys-not-awaited",
        "lightning_cp.attn.kv_exchange:_fetch_into",
        "        wait()\n        for parcel",
        "        for parcel",
        (f"{_GRID}[gather-documents-mqa-3]",),
        "keys are used before they have arrived",
    ),
    Mutant(
        "second-gradient-cleared",
        "lightning_cp.attn.kv_exchange:KVGradBuffer.add",
        "self._written = union((first[0], covered))",
        "self._written = union((first[0],))",
        (f"{_GRID}[gather-documents-mqa-3]", f"{_GRID}[ring-window-gqa-3]"),
        "gradients of keys that only the second tile covers are cleared",
    ),
    Mutant(
        "gaps-not-cleared",
        "lightning_cp.attn.kv_exchange:_empty_buffer",
        "(*stage.gaps, Range(used, buffer_len))",
        "(Range(used, buffer_len),)",
        (
            "tests/attn/flex/test_from_mask.py::test_keys_lie_in_blocks_as_in_the_row",
            "tests/attn/flex/test_from_mask.py::test_only_what_is_needed_travels",
        ),
        "gaps between keys hold memory that nobody has written",
    ),
    Mutant(
        "wire-of-the-model",
        "lightning_cp.attn.accumulators:wire_dtype",
        'return dtype if gradient_wire == "model" else accumulation_dtype(dtype)',
        "return dtype",
        (
            f"{_FUNCTION}::test_gradients_in_the_models_precision_are_half_of_the_bytes",
            "lightning_cp/attn/accumulators.py",
        ),
        "collectives sum gradients in half precision, unasked",
    ),
    Mutant(
        "slots-at-start",
        "lightning_cp.attn.kv_exchange:_scatter_slots",
        "add(_view_records(out, key_dim), slot.start)",
        "add(_view_records(out, key_dim), 0)",
        (f"{_GRID}[gather-causal-mqa-3]",),
        "gradients of all chunks are added to the first one",
    ),
    Mutant(
        "shared-head-of-one-query",
        "lightning_cp.attn.ulysses:_sum_shared",
        "total.index_add_(1, index,",
        "total.index_copy_(1, index,",
        (f"{_FUNCTION}::test_key_heads_that_neighbours_share_unevenly",),
        "a key head that query heads share has the gradient of one of them",
    ),
    Mutant(
        "softcap-derivative",
        "lightning_cp.attn.blockwise.kernels.reference:_logits",
        "1 - tanh * tanh",
        "1 - tanh",
        (f"{_FUNCTION}::test_softcap_runs_on_the_reference_kernel", _KERNELS),
        "the derivative of the softcap is wrong",
    ),
    Mutant(
        "softmax-without-delta",
        "lightning_cp.attn.blockwise.kernels.reference:ReferenceKernel.tile_backward",
        " - delta)",
        ")",
        (f"{_KERNELS}::test_kernels_agree_with_the_oracle_however_they_are_tiled",),
        "the derivative of the softmax misses a term",
    ),
    Mutant(
        "blind-query-of-lse-0",
        "lightning_cp.attn.blockwise.kernels.cpu:CpuKernel.tile_forward",
        "lse = torch.where(sees_any, lse, NEVER)",
        "pass",
        (f"{_KERNELS}::test_queries_that_see_nothing_return_zero_and_never",),
        "a query that sees nothing in a tile takes part of the softmax",
    ),
    Mutant(
        "tile-mask-one-wide",
        "lightning_cp.attn.blockwise.kernels.base:TileMask.visible",
        "(positions < last)",
        "(positions <= last)",
        (f"{_KERNELS}::test_kernels_agree_with_the_oracle_however_they_are_tiled",),
        "a masked tile shows one key too many",
    ),
    Mutant(
        "overlapping-heads",
        "lightning_cp.attn.blockwise.kernels.dense:_are_apart",
        "if stride % 8 or stride < end:",
        "if stride % 8:",
        (
            f"{_KERNELS}::test_queries_that_share_memory_get_their_own_gradients",
            "lightning_cp/attn/blockwise/kernels/dense.py",
        ),
        "an op writes gradients of expanded queries over each other",
    ),
    Mutant(
        "alibi-sign",
        "lightning_cp.attn.call:AlibiSlopes.of_tile",
        "return -slopes",
        "return slopes",
        (f"{_FUNCTION}::test_slopes_by_distance",),
        "scores rise with the distance",
    ),
    Mutant(
        "kept-call-of-another",
        "lightning_cp.attn.keep_attention:_Pass.next_key",
        "return call, self._counts[call]",
        "return call, 1",
        ("tests/attn/test_keep_attention.py::test_two_calls_in_a_region_are_told_apart",),
        "equal calls of a checkpointed region share one result",
    ),
    Mutant(
        "kept-although-changed",
        "lightning_cp.memory.offload:Saved.is_unchanged",
        "return tensor_version(self._probe) == self._version",
        "return True",
        (
            "tests/attn/test_keep_attention.py::test_an_output_that_was_changed_in_place_is_computed_again",
        ),
        "a kept output that was changed in place is used",
    ),
    Mutant(
        "flex-heads-from-0",
        "lightning_cp.attn.flex.mods:local_mask",
        "return mask_mod(b, h + offset,",
        "return mask_mod(b, h,",
        (
            "tests/attn/flex/test_remote_kv.py::"
            "test_heads_of_a_part_of_the_model_keep_their_numbers",
        ),
        "a mask_mod sees the heads of a rank counted from 0",
    ),
    Mutant(
        "closure-without-version",
        "lightning_cp.attn.flex.closure_key:_identity",
        "return Tensor, id(x), version",
        "return Tensor, id(x)",
        ("tests/attn/flex/test_closure_key.py",),
        "a block mask is taken from the cache after a captured tensor has changed",
    ),
    Mutant(
        "block-full-but-one",
        "lightning_cp.attn.flex.block_mask:_block_states",
        "earliest_last[..., None] >= start + BLOCK_SIZE)",
        "earliest_last[..., None] >= start + BLOCK_SIZE - 1)",
        ("tests/attn/flex/test_kernel.py::test_blocks_of_a_mask_are_those_of_its_pairs",),
        "a block of which one key is hidden counts as full",
    ),
    Mutant(
        "flex-bias-of-buffer",
        "lightning_cp.attn.flex.block_mask:add_bias",
        "numbers[b, h, q, positions[k]]",
        "numbers[b, h, q, k]",
        ("tests/attn/flex/test_from_mask.py::test_out_and_gradients_are_those_of_one_device",),
        "a bias is read at places of the key buffer",
    ),
    Mutant(
        "flex-gradients-in-half",
        "lightning_cp.attn.flex.remote_kv:_GatherSequence.backward",
        "wire = wire_dtype(dk.dtype, route.gradient_wire)",
        "wire = dk.dtype",
        ("tests/attn/flex/test_remote_kv.py::test_sums_are_kept_in_float32",),
        "gradients of gathered keys are summed in half precision",
    ),
    Mutant(
        "routed-mask-of-rank-0",
        "lightning_cp.routing:_bias",
        "mask = own_tokens(mask, step, -2)",
        "mask = mask.narrow(-2, 0, local_len)",
        ("tests/parity/test_sdpa_calls.py::test_masks_of_every_shape",),
        "all ranks take the mask of the first rank's queries",
    ),
    Mutant(
        "sdpa-not-restored",
        "lightning_cp.routing:_attend_multi_head",
        "    finally:\n        functional.scaled_dot_product_attention = original",
        "    finally:\n        pass",
        ("tests/test_routing.py",),
        "torch's function stays replaced after nn.MultiheadAttention",
    ),
    Mutant(
        "recompute-in-another-step",
        "lightning_cp.step.guards:check_mark",
        "if int(mark) != uid:",
        "if False:",
        ("tests/attn/test_api.py::test_what_is_recomputed_in_another_step_does_not_go_backward",),
        "what was recomputed in another step goes backward",
    ),
)

SEQUENCE = (
    Mutant(
        "halo-one-short",
        "lightning_cp.sequence.halo:visible_halo",
        "Range(max(start - left, ",
        "Range(max(start - left + 1, ",
        (
            "tests/sequence/test_halo.py::test_halos_and_their_gradients_are_those_of_full_sequences",
        ),
        "the first token of a halo is zero",
    ),
    Mutant(
        "halo-gradient-overwrites",
        "lightning_cp.sequence.halo:_return_grads",
        "dx.narrow(dim, move.start, move.size).add_(part)",
        "dx.narrow(dim, move.start, move.size).copy_(part)",
        (
            "tests/sequence/test_conv.py::"
            "test_convolution_and_gradients_are_those_of_full_sequences",
        ),
        "gradients of halos replace those of the tokens",
    ),
    Mutant(
        "halo-shows-padding",
        "lightning_cp.sequence.halo:find_hidden",
        "other |= ~tokens.is_real[:, slice(*needed)]",
        "pass",
        (
            "tests/sequence/test_halo.py::test_halos_and_their_gradients_are_those_of_full_sequences",
        ),
        "padding is not hidden in halos",
    ),
    Mutant(
        "conv-tap-of-another-document",
        "lightning_cp.sequence.conv:_build_patch",
        "is_cut = (age < left)",
        "is_cut = (age < left - 1)",
        (
            "tests/sequence/test_conv.py::"
            "test_convolution_and_gradients_are_those_of_full_sequences",
        ),
        "the first tap reaches into the document before",
    ),
    Mutant(
        "state-enters-documents",
        "lightning_cp.sequence.recurrence:_build_link",
        "tokens.first[:, start] < start",
        "tokens.first[:, start] <= start",
        (
            "tests/sequence/test_recurrence.py::"
            "test_a_recurrence_and_its_gradients_are_those_of_full_sequences",
        ),
        "the state of a document enters the next one",
    ),
    Mutant(
        "decay-gradient-lost",
        "lightning_cp.sequence.recurrence:_backward",
        "(d_decay[link.number],) = rest",
        "pass",
        (
            "tests/sequence/test_recurrence.py::"
            "test_a_recurrence_and_its_gradients_are_those_of_full_sequences",
        ),
        "decays have no gradient from the states of other ranks",
    ),
)

FSDP = (
    Mutant(
        "replicas-divided-twice",
        "lightning_cp.fsdp.replication:_Replicas._average_bucket",
        "flat.div_(self._size)",
        "flat.div_(self._size**2)",
        ("tests/fsdp/test_replication.py",),
        "averaged gradients are divided twice",
    ),
    Mutant(
        "unused-has-zero-gradient",
        "lightning_cp.fsdp.replication:_Replicas._average_bucket",
        "elif used[index] > 0:",
        "else:",
        ("tests/fsdp/test_replication.py",),
        "weight decay moves parameters that no rank has used",
    ),
    Mutant(
        "replicas-summed-in-half",
        "lightning_cp.fsdp.replication:_Replicas._average_bucket",
        "dtype = accumulation_dtype(bucket[0].dtype)",
        "dtype = bucket[0].dtype",
        ("tests/fsdp/test_replication.py::test_gradients_of_half_precision_are_added_in_float32",),
        "gradients are averaged in half precision",
    ),
    Mutant(
        "shards-reduced-in-half",
        "lightning_cp.fsdp.sharding:_policy",
        "reduce_dtype=torch.float32 if half else None",
        "reduce_dtype=None",
        ("tests/fsdp/test_sharding.py::test_gradients_of_half_precision_are_added_in_float32",),
        "FSDP2 sums gradients of half-precision weights in their precision",
    ),
    Mutant(
        "gradient-of-one-rank-dropped",
        "lightning_cp.fsdp.sharding:drop_unused_gradients",
        "if number == 0:",
        "if number < mesh.size():",
        ("tests/fsdp/test_sharding.py::test_a_parameter_that_one_rank_used_has_its_mean_gradient",),
        "a parameter that one rank has not used has no gradient",
    ),
    Mutant(
        "norm-of-own-shard",
        "lightning_cp.fsdp.scalars:_unsharded",
        "return x.full_tensor() if _is_scalar(x) else x",
        "return x.to_local() if _is_scalar(x) else x",
        (
            "tests/lightning/model/test_weights.py::"
            "test_terms_over_parameters_and_norms_of_gradients_are_whole",
        ),
        "a norm of a sharded parameter is that of this rank's shard",
    ),
    Mutant(
        "late-gradients-accepted",
        "lightning_cp.fsdp.gathering:check_reduced",
        "if has_unreduced_gradients(unit):",
        "if False:",
        (
            "tests/lightning/model/test_weights.py::"
            "test_parameters_that_would_not_get_their_gradient_are_refused_by_all_ranks",
        ),
        "gradients that were not reduced over the ranks are used",
    ),
)

MEMORY = (
    Mutant(
        "resident-bytes-not-returned",
        "lightning_cp.memory.offload:Store._collect",
        "self._resident_bytes -= resident",
        "pass",
        (
            f"{_OFFLOAD}::test_the_first_regions_stay_within_offload_after",
            f"{_OFFLOAD}::test_memory_is_reused_from_step_to_step",
        ),
        "after some steps nothing stays on the device",
    ),
    Mutant(
        "blocks-overlap",
        "lightning_cp.memory.arena:_Chunk.take",
        "rest = (start + num_bytes, stop)",
        "rest = (start + num_bytes // 2, stop)",
        (f"{_OFFLOAD}::test_blocks_do_not_overlap_and_are_reused",),
        "two tensors share host memory",
    ),
    Mutant(
        "host-memory-of-all-ranks",
        "lightning_cp.memory.budget:resolve_budget",
        "int(SHARE * available) // num for num, _, available",
        "int(SHARE * available) for num, _, available",
        (f"{_OFFLOAD}::test_ranks_of_a_host_share_its_memory_and_decide_alike",),
        "each rank of a host takes all of its memory",
    ),
    Mutant(
        "gradient-of-last-tile",
        "lightning_cp.memory.tiles:_Job.backward",
        "add_gradients(sums, tile_gradients)",
        "sums = list(tile_gradients)",
        ("tests/memory/test_tiles.py::test_any_number_of_tokens_and_tiles",),
        "weights get the gradient of the last tile only",
    ),
    Mutant(
        "tiles-without-autocast",
        "lightning_cp.memory.tiles:_Job.backward",
        "with torch.enable_grad(), self.autocast():",
        "with torch.enable_grad():",
        ("tests/memory/test_tiles.py::test_backward_computes_tiles_under_the_autocast_of_forward",),
        "backward computes in another precision than forward",
    ),
    Mutant(
        "patch-below-forgotten",
        "lightning_cp.patch:Patch.remove",
        "            over.previous = self.previous",
        "            pass",
        ("tests/test_patch.py",),
        "a patch that is removed under another one comes back with it",
    ),
    Mutant(
        "patch-acts-after-its-end",
        "lightning_cp.patch:Method.__call__",
        "if not self.patch.is_active:",
        "if False:",
        ("tests/test_patch.py",),
        "a method that a user has wrapped acts on after its patch is removed",
    ),
    Mutant(
        "patch-over-a-wrapper",
        "lightning_cp.patch:Patch.remove",
        "if self._is_value(*self._current()) or not isinstance(self.value, Method):",
        "if True:",
        ("tests/test_patch.py",),
        "a user's wrapper of a patched method is thrown away",
    ),
    Mutant(
        "forward-of-block-lost",
        "lightning_cp.patch:Patch._put_back",
        "            setattr(self.owner, self.name, *self.previous)",
        "            delattr(self.owner, self.name)",
        ("tests/memory/test_activation_checkpointing.py",),
        "a forward that a user had put on a block is gone after undo",
    ),
)

CHECKPOINT = (
    Mutant(
        "checksum-of-last-buffer",
        "lightning_cp.checkpoint.checksums:_sum_block",
        "zlib.crc32(buffer[:count], checksum)",
        "zlib.crc32(buffer[:count])",
        (
            f"{_CHECKPOINT}::test_long_files_have_many_blocks",
            f"{_CHECKPOINT}::test_each_byte_of_a_checkpoint_is_checked_by_one_rank",
        ),
        "of a long block only the last part is checked",
    ),
    Mutant(
        "shards-unchecked",
        "lightning_cp.checkpoint.checksums:check_folder",
        "_check_blocks(folder, common + _part_of(shared, share))",
        "_check_blocks(folder, common)",
        (f"{_CHECKPOINT}::test_changed_bytes_are_refused_on_all_ranks",),
        "damaged shards are loaded",
    ),
    Mutant(
        "removed-before-renamed",
        "lightning_cp.checkpoint.folder:_put_in_place",
        "os.rename(folder, aside)",
        "remove(folder)",
        (f"{_CHECKPOINT}::test_the_only_checkpoint_outlives_a_kill_and_a_failure",),
        "a kill between removing and renaming leaves no checkpoint",
    ),
    Mutant(
        "optimizer-state-lost",
        "lightning_cp.checkpoint.load:_restore",
        "state[index] = states[name]",
        "pass",
        (f"{_CHECKPOINT}::test_one_process_without_a_group_loads_and_trains_on",),
        "moments start from zero after loading",
    ),
    Mutant(
        "tied-weight-saved-twice",
        "lightning_cp.checkpoint.state:model_state",
        "gathered[twin] if twin in gathered else map_tensors(_gather, value)",
        "map_tensors(_gather, value)",
        (f"{_CHECKPOINT}::test_full_state_has_the_form_of_one_device",),
        "a tied weight becomes two tensors",
    ),
    Mutant(
        "removed-although-failed",
        "lightning_cp.checkpoint.background:BackgroundSaver.after_save",
        "save.result()",
        "save.exception()",
        (
            "tests/checkpoint/test_background.py::"
            "test_a_failure_is_raised_on_all_ranks_and_nothing_is_removed",
        ),
        "the former checkpoint is removed although the new one was not saved",
    ),
    Mutant(
        "copy-shares-memory",
        "lightning_cp.checkpoint.staging:HostStager._copy",
        "host.copy_(_bytes(x), non_blocking=True)",
        "host = _bytes(x)",
        ("tests/checkpoint/test_staging.py",),
        "what is saved in the background changes with the weights",
    ),
)

LIGHTNING = (
    Mutant(
        "trial-keeps-metrics",
        "lightning_cp.compare.restore:Reached._save_module",
        " or is_metric(type(module))",
        "",
        ("tests/lightning/test_habits.py::test_verifying_leaves_no_trace",),
        "a trial run counts in the metrics",
    ),
    Mutant(
        "trial-draws-numbers",
        "lightning_cp.compare.restore:restored_random_states",
        "with torch.random.fork_rng([*devices]):\n            yield",
        "yield",
        ("tests/lightning/test_habits.py::test_verifying_leaves_no_trace",),
        "a trial run changes the random numbers of training",
    ),
    Mutant(
        "trial-leaves-evaluation",
        "lightning_cp.compare.restore:Reached._save_module",
        'self._save(path, lambda: module.training, partial(setattr, module, "training"))',
        "pass",
        ("tests/lightning/test_habits.py::test_verifying_leaves_no_trace",),
        "the model stays in evaluation after a trial run",
    ),
    Mutant(
        "workers-of-the-global-rank",
        "lightning_cp.lightning.processes.loaders:Loaders.prepare",
        "seed_workers(dataloader, data.get_local_rank())",
        "seed_workers(dataloader, meshes.ranks.get_local_rank())",
        ("tests/lightning/processes/test_loaders.py::test_workers_are_seeded_by_the_data_rank",),
        "context ranks augment the same samples in different ways",
    ),
    Mutant(
        "loader-ends-alone",
        "lightning_cp.lightning.processes.loaders:Agreement._all_have_one",
        "if num_ready in (0, self._group.size()):",
        "if True:",
        (
            "tests/lightning/processes/test_loaders.py::"
            "test_iterable_datasets_of_different_lengths_end_or_fail_on_all_ranks",
        ),
        "ranks without a batch go on with those that have one",
    ),
    Mutant(
        "microbatches-divided-twice",
        "lightning_cp.lightning.steps.accumulation:Accumulation.weigh",
        "weight = self.window.weigh(step) * module.trainer.accumulate_grad_batches",
        "weight = self.window.weigh(step)",
        (f"{_FOUR_STEPS}[dp 2, cp 2-2-False]",),
        "Lightning's division by the number of batches is not undone",
    ),
    Mutant(
        "logged-mean-weighs",
        "lightning_cp.loss.accumulate:GradientWindow.weigh",
        "marks = [mark for mark in marks if mark.node is not None] or marks",
        "pass",
        ("tests/loss/test_accumulate.py",),
        "a mean that is only logged sets the weight of a batch",
    ),
    Mutant(
        "late-parameters-drift",
        "lightning_cp.lightning.strategy:ContextParallelStrategy.on_train_batch_start",
        "average_new(self._module(), self.optimizers)",
        "pass",
        ("tests/lightning/test_edges.py",),
        "gradients of parameters that are made after set-up are not averaged",
    ),
    Mutant(
        "hook-logs-unseen",
        "lightning_cp.lightning.steps.logs:noted_hook_logs",
        "fx not in _STEPS and",
        "fx in () and",
        ("tests/lightning/test_edges.py",),
        "ranks log different values in hooks",
    ),
    Mutant(
        "interrupted-gradients-stay",
        "lightning_cp.lightning.steps.accumulation:Accumulation.start_run",
        "drop_gradients(module)",
        "pass",
        ("tests/lightning/processes/test_interrupted.py",),
        "gradients of an interrupted run enter the next one",
    ),
    Mutant(
        "plugin-stays-changed",
        "lightning_cp.lightning.private:around_hooks",
        'with Patch(plugin, "_after_closure", after_closure):\n        yield',
        'Patch(plugin, "_after_closure", after_closure)\n    yield',
        ("tests/lightning/steps/test_accumulation.py",),
        "the Trainer's precision plugin stays changed",
    ),
    Mutant(
        "logged-without-weight",
        "lightning_cp.lightning.steps.logs:recorded_logs",
        'changes["batch_size"] = loss.num_tokens.clamp(min=_NO_TOKENS)',
        'changes["batch_size"] = 1',
        ("tests/lightning/steps/test_logs.py::test_a_loss_gets_the_weight_of_its_tokens",),
        "the mean of an epoch is a mean of means",
    ),
    Mutant(
        "local-mean-unweighted",
        "lightning_cp.lightning.steps.loss_policy:to_global_loss",
        "torch.zeros_like(loss)) * count",
        "torch.zeros_like(loss))",
        (f"{_STEPS}::test_a_local_mean_is_weighed_by_its_labels",),
        "a local mean is not weighted by its labels",
    ),
    Mutant(
        "average-is-the-model",
        "lightning_cp.lightning.model.averaging:_shard_like",
        "value = param.detach().to(device=device, dtype=old.dtype, copy=True)",
        "value = param.detach().to(device=device, dtype=old.dtype)",
        ("tests/lightning/model/test_averaging.py::test_averages_are_those_of_one_device",),
        "the averaged weights are the trained ones",
    ),
    Mutant(
        "plan-without-margin",
        "lightning_cp.lightning.memory.memory_choice:fits",
        "MARGIN * plan.peak <= USABLE * device",
        "plan.peak <= USABLE * device",
        ("tests/lightning/memory/test_memory_choice.py::test_a_run_fits_with_a_margin",),
        "auto takes a run that fits without a margin",
    ),
    Mutant(
        "undone-in-order",
        "lightning_cp.lightning.model.preparation:Preparation.undo",
        "self.undos.pop()()",
        "self.undos.pop(0)()",
        ("tests/lightning/model/test_preparation.py",),
        "what was changed first is restored first",
    ),
    Mutant(
        "one-trial-more",
        "lightning_cp.lightning.steps.step_outputs:Evidence.count_trial",
        "if self.num_trials >= MAX_TRIALS:",
        "if self.num_trials > MAX_TRIALS:",
        ("tests/lightning/steps/test_step_outputs.py",),
        "trial runs of a uniform value end one too late",
    ),
    Mutant(
        "copies-by-the-largest-device",
        "lightning_cp.lightning.model.model_setup:choose_sharding",
        "HYBRID_SHARE * min(x for x in devices if x is not None)",
        "HYBRID_SHARE * max(x for x in devices if x is not None)",
        ("tests/lightning/processes/test_hybrid.py::test_auto_counts_frozen_weights_once",),
        "the smallest device cannot hold its part",
    ),
)

PLANNER = (
    Mutant(
        "pairs-of-the-window",
        "lightning_cp.planner.attention_cost:visible_pairs",
        "width * (width - 1) // 2",
        "width * (width + 1) // 2",
        (
            "tests/planner/test_time.py::test_visible_pairs_are_those_of_the_mask",
            "lightning_cp/planner/attention_cost.py",
        ),
        "a causal sequence has too few pairs",
    ),
    Mutant(
        "moments-on-every-rank",
        "lightning_cp.planner.memory:_states",
        '"optimizer": states.optimizer * trained / size',
        '"optimizer": states.optimizer * trained',
        (
            "tests/planner/test_memory.py::test_parameters_in_host_memory_leave_the_gpu_and_cost_time",
        ),
        "moments are counted in full on each rank",
    ),
    Mutant(
        "copies-reduced-once",
        "lightning_cp.planner.time:_Traffic.reduce",
        "between = 2 * num_bytes",
        "between = num_bytes",
        ("tests/planner/test_time.py",),
        "an all-reduce between copies counts half of its bytes",
    ),
)

HF = (
    Mutant(
        "items-forgotten",
        "hf_patches.model.forward:_score_tokens",
        "loss = loss * (step.losses[-1].num_tokens / num_items).to(loss.dtype)",
        "pass",
        (f"{_ROWS_ON_RANKS}",),
        "num_items_in_batch does not scale the loss",
    ),
    Mutant(
        "balance-loss-unscaled",
        "hf_patches.model.forward:_score_tokens",
        "loss = loss + coefficient * output",
        "loss = loss + output",
        (_MODELS, _EXACT_MODELS),
        "the balance loss enters without its coefficient",
    ),
    Mutant(
        "module-stays-replaced",
        "hf_patches.model.forward:replaced",
        "    finally:\n        setattr(owner, name, real)",
        "    finally:\n        pass",
        (
            "tests/hf_patches/test_enable.py::"
            "test_large_logits_are_made_in_equal_pieces_without_asking_for_the_vocabulary",
        ),
        "a submodule stays replaced after a call",
    ),
    Mutant(
        "implementation-stays-ours",
        "hf_patches.enable:EnabledModel.remove",
        "_implement(self.model, {key: STOCK.get(name, name) for key, name in names.items()})",
        "pass",
        ("tests/hf_patches/test_enable.py::test_undo_leaves_no_trace",),
        "a model keeps our attention after undo",
    ),
    Mutant(
        "router-counts-padding",
        "hf_patches.model.moe_loss:_real_tokens",
        "real &= ~torch.from_numpy(step.padding)",
        "pass",
        (f"{_ROWS_ON_RANKS}", _MODELS),
        "the balance loss is taken over padding too",
    ),
    Mutant(
        "router-of-this-rank",
        "hf_patches.model.moe_loss:balance_loss",
        "for transport in step.loss_groups:",
        "for transport in step.loss_groups[1:]:",
        (_MODELS, _EXACT_MODELS),
        "both means of the balance loss are those of this rank",
    ),
    Mutant(
        "router-gradient-unscaled",
        "hf_patches.model.moe_loss:balance_loss",
        "(num_experts * num_ranks / sums[-1].clamp(min=1))",
        "(num_experts / sums[-1].clamp(min=1))",
        (_MODELS, _EXACT_MODELS),
        "averaging over ranks divides the balance loss's gradient once too often",
    ),
    Mutant(
        "counts-one-more-per-document",
        "hf_patches.interface.positions:count_real",
        "total.gather(1, start) - real.gather(1, start).long()",
        "total.gather(1, start)",
        (_MODELS, _EXACT_MODELS),
        "counted positions start one too low",
    ),
    Mutant(
        "frequencies-of-this-rank",
        "hf_patches.interface.positions:_append_longest",
        "gather(positions.max(), step.groups.context).max()",
        "positions.max()",
        (f"{_RECOMPUTED_HF}[False]",),
        "RoPE that depends on the length sees this rank's longest position",
    ),
    Mutant(
        "temperature-one-early",
        "hf_patches.interface.positions:temperature",
        "document_positions(step).to(torch.float32) + 1.0",
        "document_positions(step).to(torch.float32)",
        (f"{_RECOMPUTED_HF}[False]",),
        "queries are scaled by the position before",
    ),
    Mutant(
        "model-window-one-wide",
        "hf_patches.model.mask_reader:_LEAVES",
        'left=closure["sliding_window"] - 1',
        'left=closure["sliding_window"]',
        (_MODELS, _EXACT_MODELS),
        "the window of a model sees one key too many",
    ),
    Mutant(
        "rows-shift-across-documents",
        "hf_patches.shard_in_forward:_targets",
        'shift_labels(batch["labels"], batch.get("document_ids"))',
        'shift_labels(batch["labels"], None)',
        (
            "tests/hf_patches/trainers/test_trainer.py::"
            "test_document_ids_reach_the_model_and_the_count_of_labels",
        ),
        "labels are shifted across document_ids",
    ),
    Mutant(
        "generate-stays-ours",
        "hf_patches.shard_in_forward:ShardedModel.remove",
        "for name, function in _METHODS.items():",
        "for name, function in [*_METHODS.items()][:1]:",
        (f"{_WHOLE_ROWS}::test_undo_restores_the_model",),
        "generate() stays replaced after undo",
    ),
    Mutant(
        "first-logits-kept",
        "hf_patches.shard_in_forward:_kept",
        "slice(-keep or None, None)",
        "slice(keep or None, None)",
        (f"{_ROWS_ON_RANKS}",),
        "logits_to_keep drops the first logits, not all but the last",
    ),
    Mutant(
        "gathered-of-first-ranks",
        "hf_patches.trainers.trainer:_first_of_each",
        "x.view(num_groups, size, length, *x.shape[1:])[:, 0]",
        "x.view(size, num_groups, length, *x.shape[1:])[0]",
        (
            "tests/hf_patches/trainers/test_trainer.py::test_a_run_is_that_of_fewer_processes[accelerate--4-2]",
        ),
        "metrics hold the samples of one data rank twice",
    ),
    Mutant(
        "scheduler-one-step",
        "hf_patches.trainers.trainer:_step_per_data_rank",
        "range(num_data_ranks if is_update else 1)",
        "range(1)",
        (
            "tests/hf_patches/trainers/test_trainer.py::test_a_run_is_that_of_fewer_processes[accelerate--4-2]",
        ),
        "the schedule advances once per step, not per data rank",
    ),
    Mutant(
        "tokens-of-all-ranks",
        "hf_patches.trainers.trainer:_count_once",
        "before + added // size",
        "before + added",
        (
            "tests/hf_patches/trainers/test_trainer.py::test_a_run_is_that_of_fewer_processes[trainer--2-2]",
        ),
        "tokens are counted once per context rank",
    ),
    Mutant(
        "verify-draws-numbers",
        "hf_patches.trainers.trainer:_first_batches",
        "with restored_random_states(trainer.model):",
        "if True:",
        (
            "tests/hf_patches/trainers/test_trainer_verify.py::"
            "test_batches_of_a_trainer_pass_and_training_starts_as_without",
        ),
        "verify(trainer) changes the order of training",
    ),
    Mutant(
        "export-unties",
        "hf_patches.weights.export:_assign",
        "model.tie_weights()",
        "pass",
        (
            "tests/hf_patches/weights/test_export.py::test_ties_experts_and_other_names_come_out_right",
            "tests/hf_patches/weights/test_export.py",
        ),
        "tied weights of an exported model are two tensors",
    ),
    Mutant(
        "export-left-half-done",
        "hf_patches.weights.export:_write",
        "    finally:\n        remove(temporary)",
        "    finally:\n        pass",
        (
            "tests/hf_patches/weights/test_export.py::test_a_size_that_is_none_leaves_nothing_behind",
        ),
        "an export that fails leaves a folder behind",
    ),
    Mutant(
        "reset-one-late",
        "hf_patches.mixers.rows:_index",
        "at[cuts[held.number][of]] - 1] = True",
        "at[cuts[held.number][of]]] = True",
        ("tests/hf_patches/mixers/test_rows.py",),
        "the first token of a document is a reset",
    ),
    Mutant(
        "state-read-undecayed",
        "hf_patches.mixers.mamba2:_read",
        "return read * log_decay.exp().unsqueeze(-1)",
        "return read",
        (f"{_EXACT_LINEAR}[bamba]",),
        "the state before a range does not decay in it",
    ),
    Mutant(
        "padding-writes-states",
        "hf_patches.mixers.mamba2:chunk_scan",
        "rows.arrange(rows.hide(hidden_states))",
        "rows.arrange(hidden_states)",
        (
            "tests/hf_patches/mixers/test_rows.py::test_outputs_and_gradients_are_those_of_documents_alone",
        ),
        "padding enters the state of a recurrence",
    ),
    Mutant(
        "constant-decay-twice",
        "hf_patches.mixers.lightning_attention:_attend",
        "-slope.float()",
        "-2 * slope.float()",
        (f"{_EXACT_LINEAR}[minimax]",),
        "states of lightning attention decay twice as fast",
    ),
    Mutant(
        "near-rows-one-short",
        "hf_patches.mixers.replicated:near_source",
        "np.maximum(start - reach, tokens.first",
        "np.maximum(start - reach + 1, tokens.first",
        (
            "tests/hf_patches/mixers/test_replicated.py::"
            "test_each_real_token_is_found_after_the_tokens_that_it_sees",
        ),
        "rows begin one token too late",
    ),
    Mutant(
        "samples-show-their-padding",
        "hf_patches.mixers.base_model:_build_samples",
        "real[rows] & (np.arange",
        "real[rows] | (np.arange",
        (
            "tests/hf_patches/mixers/test_base_model.py::"
            "test_models_without_double_precision_or_a_mask_are_exact",
        ),
        "documents of replicated base models see the padding behind them",
    ),
    Mutant(
        "indexer-ignored",
        "hf_patches.mixers.block_indexer:_BuildMask.call",
        "keep = keep & (attention_mask",
        "keep = (attention_mask",
        (
            "tests/hf_patches/mixers/test_eager_attention.py::test_each_mechanism_is_exact_in_double_precision",
        ),
        "queries see blocks that they have not chosen",
    ),
    Mutant(
        "dense-mask-shows-padding",
        "hf_patches.mixers.gathered_keys:_table",
        "& real[:, None]",
        "",
        (
            "tests/hf_patches/mixers/test_eager_attention.py::test_dense_masks_hide_padding_between_tokens",
        ),
        "dense masks show padding between tokens",
    ),
    Mutant(
        "features-of-one-rank",
        "hf_patches.multimodal.features:_ExchangeRows.backward",
        "total.index_add_(0, rows,",
        "total.index_copy_(0, rows,",
        (
            "tests/hf_patches/multimodal/test_sharing.py",
            "tests/parity/test_media.py::test_loss_and_gradients_are_those_of_the_stock_model",
        ),
        "a feature has the gradient of one of the ranks that use it",
    ),
    Mutant(
        "media-changes-ignored",
        "hf_patches.multimodal.outer:full_value",
        "return known.leaf.value if is_unchanged else full_tokens(x, step, known.leaf.dim)",
        "return known.leaf.value",
        (
            "tests/hf_patches/multimodal/test_multimodal.py::"
            "test_declarations_and_changes_in_place_keep_their_meaning",
        ),
        "what a user has changed in place is read from the batch",
    ),
)

RECIPES = (
    Mutant(
        "documents-joined",
        "recipes.data.packing:_OpenSample.add",
        "self._num_documents += 1",
        "pass",
        (f"{_DATA}::test_a_document_that_is_continued_is_one_of_its_own", _DATA),
        "documents of a sample see each other",
    ),
    Mutant(
        "same-order-every-epoch",
        "recipes.data.loader:plan_training",
        "np.random.default_rng([seed, epoch])",
        "np.random.default_rng([seed, 0])",
        (f"{_DATA}::test_epochs_and_seeds_differ",),
        "each epoch has the order of the first",
    ),
    Mutant(
        "filled-sample-counts",
        "recipes.data.loader:_FilledSamples.__getitem__",
        'sample["labels"] = torch.full_like(sample["labels"], IGNORED_LABEL)',
        "pass",
        (f"{_DATA}::test_a_row_that_fills_up_has_no_labels",),
        "a sample that fills up a batch is counted",
    ),
    Mutant(
        "failed-batch-skipped",
        "recipes.data.loader:SampleLoader.state_dict",
        "self._current if self._num_pending() else self._next",
        "self._next",
        (f"{_DATA}::test_a_batch_whose_step_failed_is_tried_again",),
        "a resumed run leaves out the batch whose step failed",
    ),
    Mutant(
        "end-of-turn-not-learned",
        "recipes.data.chat:render",
        "any(a <= start and stop <= b for a, b in spans)",
        "any(a <= start and stop < b for a, b in spans)",
        (f"{_DATA}::test_only_what_the_assistant_says_is_learned",),
        "the last token of an answer is not learned",
    ),
    Mutant(
        "start-of-answer-learned",
        "recipes.data.chat:answer_spans",
        "text_of(messages[:turn], prompt=True)",
        "text_of(messages[:turn])",
        (f"{_DATA}::test_only_what_the_assistant_says_is_learned", _DATA),
        "the header of an answer is learned",
    ),
    Mutant(
        "held-out-keys-trained",
        "recipes.data.passkey:PasskeySamples._draw_key",
        "if is_held_out(key) == self._held_out:",
        "if True:",
        (
            "tests/recipes/test_passkey.py::"
            "test_keys_and_depths_of_training_vary_and_validation_keys_are_held_out",
        ),
        "keys of validation are trained on",
    ),
    Mutant(
        "validation-trained",
        "recipes.data.packed_data:PackedData._chosen",
        "else set(range(num_documents)).difference(held_out)",
        "else set(range(num_documents))",
        (f"{_DATA}::test_validation_documents_are_not_trained_on",),
        "documents of validation are trained on",
    ),
    Mutant(
        "stale-samples",
        "recipes.data.packed_data:PackedData._fingerprint",
        '"seq_len": self.seq_len,',
        "",
        (f"{_DATA}::test_rows_are_packed_once",),
        "samples of another length are taken from the cache",
    ),
    Mutant(
        "stale-source",
        "recipes.data.sources:DataSource.fingerprint",
        "(str(f), f.stat().st_size, f.stat().st_mtime_ns)",
        "(str(f), f.stat().st_size)",
        (f"{_DATA}::test_rows_are_packed_once",),
        "samples of a file that has changed since are taken from the cache",
    ),
    Mutant(
        "warm-up-from-0",
        "recipes.schedule:lr_factor",
        "return (step + 1) / (warmup + 1)",
        "return step / (warmup + 1)",
        ("recipes/schedule.py",),
        "the first step has a learning rate of 0",
    ),
)

MUTANTS = (
    *GEOMETRY,
    *DATA,
    *COMM,
    *LOSS,
    *ATTENTION,
    *SEQUENCE,
    *FSDP,
    *MEMORY,
    *CHECKPOINT,
    *LIGHTNING,
    *PLANNER,
    *HF,
    *RECIPES,
)
