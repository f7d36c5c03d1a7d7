"""Deliberate bugs, and the tests that must find them.

    python -m bench.mutations [--only NAME ...] [--jobs N] [--write bench/results]

Each mutation changes one place of the package as a plausible bug would, in a copy of the
repository, and the tests it names run against that copy: one of them must fail. The working tree is
only read. Before that the same tests must pass on the unchanged copy. Exit status 1 when a mutation
survives, when the place it changes is not there exactly once, or when its tests are no use.

A mutant is killed when a test fails, crashes or hangs. One that cannot even be imported, or whose
tests are all skipped, says nothing and counts as an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400  # of one mutation's tests
INTERPRETED = "tests/test_kernel_interpret.py"
REPORT = "mutations.md"
CRASHES = (-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV)


@dataclass(frozen=True)
class Mutation:
    """One wrong place, and the pytest node ids of which at least one must fail on it."""

    name: str
    file: str  # below rope_compile/
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def area(self) -> str:
        """``kernel`` or the name of the module."""
        return "kernel" if self.file.startswith("kernels/") else Path(self.file).stem

    @property
    def path(self) -> Path:
        return Path("rope_compile") / self.file

    @property
    def interpreted(self) -> bool:
        """Whether its tests run the Triton kernel in the interpreter, in a process for it."""
        return all(test.startswith(INTERPRETED) for test in self.tests)


MUTATIONS: list[Mutation] = []


def mutate(file: str, *entries: tuple[str, str, str, str]) -> None:
    """Entries ``(name, old, new, tests)``; tests are ``file::test`` without ``tests/test_``."""
    for name, old, new, tests in entries:
        ids = tuple("tests/test_" + test.replace("::", ".py::", 1) for test in tests.split())
        MUTATIONS.append(Mutation(name, file, old, new, ids))


# fmt: off
mutate(
    "kernels/reference.py",
    ("reference-sign",
        "            new_low -= crossed_low\n            new_high += crossed_high",
        "            new_low += crossed_low\n            new_high -= crossed_high",
        "native::test_every_width_gives_the_bits_of_plain_torch"),
    ("reference-clamp-one-row-too-far",
        "positions.clamp(0, rows - 1)", "positions.clamp(0, rows)",
        "native::test_outside_the_table_any_position_is_right"),
    ("reference-first-row-outside-is-read",
        "high.item() < rows", "high.item() <= rows",
        "mutation_kills::test_the_first_row_past_the_table_is_computed"),
    ("reference-negative-positions-are-read",
        "outside = (positions < 0) | (positions >= rows)", "outside = positions >= rows",
        "native::test_outside_the_table_any_position_is_right"),
    ("reference-phase-in-float32",
        "    phase = positions.to(torch.float64) * inv_freq.to(torch.float64)\n",
        "    phase = (positions.to(torch.float32) * inv_freq).to(torch.float64)\n",
        "native::test_outside_the_table_any_position_is_right"),
    ("reference-phase-not-rounded",
        "    if inv_freq.dtype == torch.float32:\n        phase = phase",
        "    if inv_freq.dtype == torch.float16:\n        phase = phase",
        "native::test_outside_the_table_any_position_is_right"),
    ("reference-inverse-of-full-width-not-transposed",
        "crossed_low, crossed_high = high * sin_high, low * sin_low",
        "crossed_low, crossed_high = high * sin_low, low * sin_high",
        "native::test_every_axis_map_gives_the_bits_of_plain_torch"),
    ("reference-inverse-moves-channels-forward",
        'return ("half", "interleaved") if inverse else ("interleaved", "half")',
        'return ("interleaved", "half")',
        "native::test_every_width_gives_the_bits_of_plain_torch"),
    ("reference-channels-behind-the-rotation-not-copied",
        "            out[..., stop:] = x[..., stop:]\n", "",
        "native::test_every_width_gives_the_bits_of_plain_torch"),
)
mutate(
    "kernels/cpu.py",
    ("blocks-drop-the-last-token",
        "for s in range(0, seq, seq_step)", "for s in range(0, seq - 1, seq_step)",
        "mutation_kills::test_blocks_of_one_token_do_not_show"),
    ("blocks-cut-the-axes-of-positions",
        "positions[(..., *block)]", "positions[block]",
        "mutation_kills::test_blocks_of_one_token_do_not_show"),
)
mutate(
    "kernels/triton_rope.py",
    ("triton-sign",
        "y_low = tl.fma(a, cos_low, -(b * sin_low))", "y_low = tl.fma(a, cos_low, b * sin_low)",
        "kernel_interpret::test_every_head_count"),
    ("triton-inverse-not-transposed",
        "            y_low = tl.fma(a, cos_low, b * sin_high)\n"
        "            y_high = tl.fma(b, cos_high, -(a * sin_low))",
        "            y_low = tl.fma(a, cos_low, b * sin_low)\n"
        "            y_high = tl.fma(b, cos_high, -(a * sin_high))",
        "kernel_interpret::test_full_width_axes"),
    ("triton-row-past-the-table",
        "tl.cast(rows, tl.int64) - 1)", "tl.cast(rows, tl.int64))",
        "kernel_interpret::test_without_frequencies_the_nearest_row_is_taken"),
    ("triton-first-row-outside-is-not-computed",
        "chosen = ((position < 0) | (position >= rows))",
        "chosen = ((position < 0) | (position > rows))",
        "kernel_interpret::test_every_token_count_and_rank "
        "kernel_interpret::test_nothing_outside_q_and_k_is_written "
        "kernel_interpret::test_computed_rows_match_float64_at_any_distance"),
    ("triton-negative-positions-go-unnoticed",
        "outside = in_checked & ((position < 0) | (position >= rows))",
        "outside = in_checked & (position >= rows)",
        "kernel_interpret::test_multi_axis"),
    ("triton-phase-in-float32",
        "phase = position.to(tl.float64) * inv_freq.to(tl.float64)",
        "phase = (position.to(tl.float32) * inv_freq.to(tl.float32)).to(tl.float64)",
        "kernel_interpret::test_computed_rows_match_float64_at_any_distance"),
    ("triton-phase-never-rounded",
        "        if not EXACT_PHASE:\n            phase =",
        "        if EXACT_PHASE:\n            phase =",
        "kernel_interpret::test_computed_rows_match_float64_at_any_distance"),
    ("triton-walks-past-the-last-head",
        "    stop_head = tl.minimum(start_head + heads_per_program, HEADS)\n    x_tile_ptr",
        "    stop_head = start_head + heads_per_program\n    x_tile_ptr",
        "kernel_interpret::test_one_program_walks_several_heads"),
    ("triton-output-without-the-batch",
        "out_start = (batch * seq + seq_start) * (HEADS * HEAD_DIM)",
        "out_start = (batch + seq_start) * (HEADS * HEAD_DIM)",
        "kernel_interpret::test_every_token_count_and_rank"),
    ("triton-one-token-too-many",
        "    in_tile = token < tokens\n", "    in_tile = token <= tokens\n",
        "kernel_interpret::test_nothing_outside_q_and_k_is_written "
        "kernel_interpret::test_every_token_count_and_rank"),
    ("triton-copy-shifts-at-the-offset",
        "tl.where(column < OFFSET, column, column + 2 * LANES)",
        "tl.where(column <= OFFSET, column, column + 2 * LANES)",
        "kernel_interpret::test_partial_widths_first_and_last"),
    ("triton-copy-past-the-last-token",
        "in_tile = (head < stop_head) & (seq_start + token < seq_end)",
        "in_tile = head < stop_head",
        "kernel_interpret::test_partial_widths_first_and_last kernel_interpret::test_every_layout"),
    ("triton-grid-of-one-axis",
        "block = tl.program_id(2) * GRID_LIMIT + tl.program_id(1)", "block = tl.program_id(1)",
        "kernel_interpret::test_blocks_of_tokens_beyond_one_axis_of_the_grid"),
    ("triton-launch-rounds-blocks-down",
        '((seq + compiled["TOKENS"] - 1) // compiled["TOKENS"])', '(seq // compiled["TOKENS"])',
        "kernel_interpret::test_every_token_count_and_rank"),
    ("triton-axes-packed-too-tightly",
        "axis << (4 * lane)", "axis << (3 * lane)",
        "kernel_interpret::test_multi_axis"),
    ("triton-alignment-of-k-not-asked",
        "_divisible(q_strides[:3] + k_strides[:3], 8)", "_divisible(q_strides[:3], 8)",
        "mutation_kills::test_k_with_odd_strides_beside_an_even_q"),
    ("triton-decode-swaps-no-positions",
        '"stride_positions_batch": at[order[0]], "stride_positions_seq": at[order[1]],',
        '"stride_positions_batch": at[0], "stride_positions_seq": at[1],',
        "kernel_interpret::test_every_token_count_and_rank"),
    ("triton-narrow-accesses",
        "    (2, False): 8,", "    (2, False): 4,",
        "ptx::test_q_and_k_move_in_16_byte_accesses"),
    ("triton-full-width-vectors-spill",
        "granule = LANES_OF_FULL_WIDTH_VECTOR if full_width else lanes", "granule = lanes",
        "ptx::test_two_angles_a_lane_move_8_bytes"),
    ("triton-multiply-add-left-to-the-compiler",
        "y_high = tl.fma(b, cos_high, a * sin_high)", "y_high = b * cos_high + a * sin_high",
        "ptx::test_rounding_does_not_hang_on_a_compiler_flag"),
    ("triton-a-binary-for-every-count",
        '@triton.jit(do_not_specialize=(*RUNTIME_INTS, "positions_ptr"))', "@triton.jit",
        "launch::test_one_binary_serves_every_token_count ptx::test_token_counts_share_a_binary"),
)
mutate(
    "kernels/native.py",
    ("native-key-without-the-source",
        "    key.update(SOURCE.read_bytes())\n", "",
        "mutation_kills::test_the_library_is_named_by_all_that_its_code_depends_on"),
    ("native-key-without-the-flags",
        '        " ".join(COMPILE_FLAGS),\n', "",
        "mutation_kills::test_the_library_is_named_by_all_that_its_code_depends_on"),
    ("native-failed-build-is-tried-again",
        "if failure.exists() and not retry:", "if False:",
        "native::test_a_broken_compiler_breaks_no_call_and_is_not_tried_twice"),
    ("native-library-not-checked",
        "                    _check(candidate)\n", "",
        "native::test_a_library_that_is_wrong_or_crashes_is_never_loaded"),
    ("native-cannot-be-switched-off",
        '"ROPE_COMPILE_NATIVE", "1") != "0"', '"ROPE_COMPILE_NATIVE", "1") != ""',
        "native::test_it_can_be_switched_off"),
)
mutate(
    "kernels/rope_cpu.cpp",
    ("cpp-sign",
        "high * angle(at.cos_high) + low * angle(at.sin_high);",
        "high * angle(at.cos_high) - low * angle(at.sin_high);",
        "mutation_kills::test_where_there_is_a_compiler_the_native_kernel_runs"),
    ("cpp-row-past-the-table",
        "if (position >= 0 && position < rows)", "if (position >= 0 && position <= rows)",
        "native::test_outside_the_table_any_position_is_right"),
    ("cpp-inverse-not-transposed",
        "      negated[i] = -at.sin_high[i];\n      negated[half + i] = -at.sin_low[i];",
        "      negated[i] = -at.sin_low[i];\n      negated[half + i] = -at.sin_high[i];",
        "native::test_every_axis_map_gives_the_bits_of_plain_torch"),
    ("cpp-bfloat16-ties-go-up",
        "bits + 0x7fffu + ((bits >> 16) & 1u);", "bits + 0x8000u;",
        "mutation_kills::test_ties_round_to_even"),
    ("cpp-phase-not-rounded",
        "if (!exact) phase =", "if (false) phase =",
        "native::test_outside_the_table_any_position_is_right"),
    ("cpp-every-thread-starts-at-the-first-token",
        "for (int64_t d = call.lead - 1, rest = begin; d >= 0; --d)",
        "for (int64_t d = call.lead - 1, rest = 0; d >= 0; --d)",
        "native::test_one_thread_and_several_give_the_same_bits "
        "native::test_an_output_above_the_mapping_threshold"),
    ("cpp-no-word-to-autograd",
        "if (x && !x->is_inference()) x->unsafeGetTensorImpl()->bump_version();", "{}",
        "native::test_a_write_in_place_is_seen_by_autograd"),
    ("cpp-overlaps-are-written",
        "    if (x.numel() && !nested(dims, 0)) return false;\n", "",
        "native::test_memory_that_cannot_be_written_right_is_refused"),
)
mutate(
    "ops.py",
    ("ops-schema-hides-a-mutation",
        'LIB.define(f"rope_(Tensor(a!) q,', 'LIB.define(f"rope_(Tensor q,',
        "ops::test_opcheck_passes_in_place"),
    ("ops-fake-keeps-strides",
        "return x.new_empty(x.shape)", "return torch.empty_like(x)",
        "ops::test_opcheck_passes_on_every_layout"),
    ("ops-longer-positions-pass",
        "        return a != b\n", "        return a > b\n",
        "ops::test_bad_arguments_raise_one_sentence"),
    ("ops-frequencies-of-another-device-pass",
        "        or (inv_freq is not None and inv_freq.device != device)\n", "",
        "errors::test_wrong_arguments_get_one_sentence_and_change_nothing[rope]"),
    ("ops-negative-offset-passes",
        "not 0 <= rotary_offset <= x.shape[-1] - rotary_dim",
        "not rotary_offset <= x.shape[-1] - rotary_dim",
        "ops::test_bad_arguments_raise_one_sentence"),
    ("ops-offset-one-too-far",
        "not 0 <= rotary_offset <= x.shape[-1] - rotary_dim",
        "not 0 <= rotary_offset <= x.shape[-1] - rotary_dim + 1",
        "ops::test_bad_arguments_raise_one_sentence"),
    ("ops-16-bit-table-passes",
        "if cos_sin_cache.dtype != torch.float32:", "if cos_sin_cache.dtype == torch.float64:",
        "ops::test_bad_arguments_raise_one_sentence"),
    ("ops-freed-memory-is-read",
        "    check_alive(q=q, k=k, positions=positions, cos_sin_cache=rest[0], inv_freq=rest[1])\n",
        "",
        "errors::test_wrong_arguments_get_one_sentence_and_change_nothing[rope]"),
    ("ops-unsorted-blocks-pass",
        'if style == "half_blocks" and list(axes) != sorted(axes):', "if False:",
        "errors::test_wrong_arguments_get_one_sentence_and_change_nothing[rope]"),
    ("ops-heads-of-stride-0-are-written",
        "            if stride <= reach:\n                return True",
        "            if stride < reach:\n                return True",
        "ops::test_in_place_refuses_what_it_cannot_do_right"),
    ("ops-gradient-turns-forward",
        "inverse=not ctx.shape[-1]", "inverse=ctx.shape[-1]",
        "ops::test_gradients_of_first_and_second_order"),
    ("ops-tangent-turns-backward",
        "_linear(ctx, tangents[:2], inverse=ctx.shape[-1])",
        "_linear(ctx, tangents[:2], inverse=not ctx.shape[-1])",
        "ops::test_forward_mode_pushes_tangents_through_the_rotation"),
    ("ops-gradient-keeps-q",
        "        ctx.save_for_backward(*rest[:3])\n",
        "        ctx.save_for_backward(*rest[:3], q)\n",
        "ops::test_backward_saves_neither_q_nor_k"),
    ("ops-vmap-forgets-the-axes",
        "positions, head = positions.movedim(0, 1), 1", "head = 1",
        "ops::test_vmap_with_axes_and_without_k"),
    ("ops-in-place-under-gradients",
        "    if _records(q, k):\n        raise RuntimeError(",
        "    if False:\n        raise RuntimeError(",
        "ops::test_in_place_refuses_what_it_cannot_do_right"),
)
mutate(
    "selector.py",
    ("selector-off-by-one",
        "choice >= number", "choice > number",
        "selector::test_each_token_has_the_bits_of_its_own_module"),
    ("selector-forgets-the-magnitude",
        "float(rope._attention_scaling), False,", "1.0, False,",
        "faults_h::test_h1_no_position_reads_the_rows_of_the_other_set"),
    ("selector-counts-the-axes-as-tokens",
        "if self._lane_axes and positions.dim() > 1 else", "if False else",
        "selector::test_each_token_has_the_bits_of_its_own_module"),
    ("selector-drops-the-direction",
        "rotate_(q, k, at, table, None, axes, self._style, self._rotary_offset, 1.0, inverse)",
        "rotate_(q, k, at, table, None, axes, self._style, self._rotary_offset, 1.0, False)",
        "selector::test_each_token_has_the_bits_of_its_own_module"),
)
mutate(
    "table.py",
    ("table-rows-rounded-down",
        "return -(-rows // multiple) * multiple", "return rows // multiple * multiple",
        "table::test_rows_are_a_multiple_of_128"),
    ("table-dead-one-is-left-dead",
        "if needed <= capacity and self.dead() is None:", "if needed <= capacity:",
        "table::test_a_dead_table_is_refused_and_reserve_revives_it"),
    ("table-revival-loses-rows",
        "self._publish(max(needed, capacity))", "self._publish(needed)",
        "table::test_a_dead_table_is_refused_and_reserve_revives_it"),
    ("table-grows-inside-the-guard",
        "            if self._frozen:\n", "            if False:\n",
        "table::test_frozen_tables_do_not_grow_and_freezing_nests"),
    ("table-grows-in-capture",
        '            self._refuse_in_capture("grow", needed)\n', "",
        "table::test_growth_while_capturing_is_refused"),
    ("table-grows-without-the-lock",
        "        with self._lock:\n            capacity = self.capacity\n",
        "        with contextlib.nullcontext():\n            capacity = self.capacity\n",
        "threads::test_concurrent_growth_reallocates_once"),
    ("table-published-before-it-is-filled",
        "            _fill(table, frequencies, config.attention_scaling)\n",
        '            self._buffers["cos_sin_cache"] = table\n'
        "            _fill(table, frequencies, config.attention_scaling)\n",
        "threads::test_while_a_table_is_filled_readers_see_the_one_before"),
    ("table-phase-not-rounded",
        "        if inv_freq.dtype == torch.float32:\n", "        if False:\n",
        "table::test_phase_is_the_rounded_exact_product"),
    ("table-magnitude-not-rounded",
        "torch.tensor(attention_scaling, dtype=torch.float32, device=table.device).double()",
        "torch.tensor(attention_scaling, dtype=torch.float64, device=table.device)",
        "table::test_rows_equal_the_oracle"),
    ("table-magnitude-twice",
        "torch.polar(magnitude.expand_as(phase), phase)",
        "torch.polar((magnitude * magnitude).expand_as(phase), phase)",
        "table::test_rows_equal_the_oracle"),
    ("table-sine-first",
        "copy_(wave.real)\n        block[:, half:].copy_(wave.imag)",
        "copy_(wave.imag)\n        block[:, half:].copy_(wave.real)",
        "table::test_first_row_is_the_identity"),
    ("table-blocks-overlap-by-a-row",
        "phase = positions.unsqueeze(1) * frequencies",
        "phase = (positions - (start > 0)).unsqueeze(1) * frequencies",
        "table::test_neither_blocks_nor_threads_change_a_bit"),
    ("table-cosine-of-mkl",
        "block[:, :half].copy_(wave.real)", "block[:, :half].copy_(phase.cos() * magnitude)",
        "table::test_no_cosine_is_left_to_threads_of_mkl"),
    ("table-pin-keeps-nothing",
        "                    self._pinned.append(tensor)\n", "                    pass\n",
        "table::test_pinned_storage_outlives_growth"),
    ("table-pin-does-not-mark",
        "            self._stay()\n            pinned =", "            pinned =",
        "cuda_graphs::test_the_mark_is_that_of_dynamo "
        "capture::test_what_is_pinned_is_static_for_compiled_code"),
    ("table-rebuild-trusts-the-buffer",
        "                    x.copy_(frequencies)\n", "                    pass\n",
        "table::test_rebuild_refills_at_the_same_address"),
    ("table-rebuild-forgets-what-graphs-read",
        "for x in (*self.buffers(), *self._pinned)", "for x in self.buffers()",
        "table::test_rebuild_refills_what_captured_graphs_read"),
    ("table-moved-storage-goes-unseen",
        "                or tensor.data_ptr() != known.address\n", "",
        "table::test_every_death_is_named"),
    ("table-follows-casts",
        "        return self\n\n    def __reduce__",
        "        super()._apply(fn, recurse)\n        return self\n\n    def __reduce__",
        "table::test_nothing_that_changes_a_module_changes_a_table"),
    ("table-made-of-inference-tensors",
        "        torch.no_grad(),\n        torch.inference_mode(False),\n",
        "        torch.no_grad(),\n",
        "table::test_surroundings_leave_no_trace"),
    ("table-ignores-the-phase-dtype",
        "frequencies = config.inv_freq(config.phase_dtype).to(device)",
        "frequencies = config.inv_freq().to(device)",
        "table::test_rows_equal_the_oracle"),
)
mutate(
    "factory.py",
    ("factory-hit-without-the-liveness-check",
        "module.device == device and module.table.dead() is None:", "module.device == device:",
        "factory::test_a_dead_entry_is_replaced_with_one_warning"),
    ("factory-miss-without-the-liveness-check",
        "if module is None or reason is not None:", "if module is None:",
        "factory::test_a_dead_entry_is_replaced_with_one_warning"),
    ("factory-builds-without-the-lock",
        "        with self._lock:\n            reason = self._renew(key)",
        "        with contextlib.nullcontext():\n            reason = self._renew(key)",
        "threads::test_a_concurrent_first_call_builds_once"),
    ("factory-key-without-the-device",
        "        key = (config, device)\n        number",
        '        key = (config, torch.device("cpu"))\n        number',
        "factory::test_a_meta_entry_is_never_handed_out_for_real "
        "factory::test_layers_share_a_meta_module"),
    ("factory-modules-follow-one-owner",
        "            fresh._shared = True\n", "",
        "module::test_one_owner_changes_nothing_for_another"),
    ("factory-replacement-forgets-the-reserve",
        "0 if module is None else module.capacity", "0",
        "factory::test_a_dead_entry_is_replaced_with_one_warning"),
    ("factory-guard-lets-new-tables-grow",
        "                table.freeze()\n                held.append(table)\n",
        "                pass\n",
        "capture::test_the_guard_without_a_model_covers_what_is_built_inside"),
    ("factory-guard-pins-nothing",
        "                    if table.device != _META:\n"
        "                        self.pin(table.pin())\n",
        "",
        "capture::test_the_guard_without_a_model_covers_what_is_built_inside"),
    ("factory-meta-entry-is-handed-out-for-real",
        "        self._release_materialised(config)\n", "",
        "factory::test_a_materialised_meta_module_is_no_meta_entry"),
    ("factory-materialised-module-is-forgotten",
        "            self._released.add(module)\n", "            pass\n",
        "factory::test_a_materialised_module_stays_known_beside_a_real_entry"),
)
mutate(
    "scaling.py",
    ("scaling-linear-multiplies",
        "return 1.0 / lanes.wavelengths() / self.factor\n",
        "return 1.0 / lanes.wavelengths() * self.factor\n",
        "scaling::test_golden_6_linear"),
    ("scaling-ntk-counts-lanes-from-0",
        "lanes.indices(1, lanes.rotary_dim // 2 + 1)", "lanes.indices(0, lanes.rotary_dim // 2)",
        "scaling::test_golden_7_ntk"),
    ("scaling-alpha-exponent",
        "self.alpha ** (width / (width - 2))", "self.alpha ** ((width - 2) / width)",
        "scaling::test_golden_12_alpha"),
    ("scaling-dynamic-shrinks-short-sequences",
        "self.factor * max(length, original) / original", "self.factor * length / original",
        "scaling::test_golden_9_dynamic_by_length"),
    ("scaling-dynamic-clamps-no-tensor",
        "length.clamp(min=original)", "length",
        "scaling::test_length_may_be_a_tensor"),
    ("scaling-static-factor-uses-the-factor-once",
        "return self.factor * self.factor", "return self.factor",
        "scaling::test_golden_10_dynamic_static"),
    ("scaling-yarn-ignores-truncate",
        "truncate=self._truncate,", "truncate=True,",
        "scaling::test_golden_14_15_yarn_truncate"),
    ("scaling-yarn-singular-ramp",
        "            high += 0.001  # the singular ramp becomes a step\n", "            pass\n",
        "mutation_kills::test_yarn_of_a_length_below_one_turn_is_a_step"),
    ("scaling-yarn-clamps-at-the-last-lane",
        "min(high, rotary_dim - 1)", "min(high, rotary_dim // 2 - 1)",
        "mutation_kills::test_yarn_ranges_end_at_the_last_channel"),
    ("scaling-yarn-ramp-turned-round",
        "        kept = 1 - ramp\n", "        kept = ramp\n",
        "scaling::test_golden_13_yarn"),
    ("scaling-yarn-drops-attn-factor",
        "        return inferred * self.attn_factor", "        return inferred",
        "scaling::test_golden_21_magnitudes scaling::test_golden_21_attention_factor_replaces"),
    ("scaling-magnitude-ignores-mscale",
        "0.1 * mscale * math.log(factor)", "0.1 * math.log(factor)",
        "scaling::test_golden_21_magnitudes"),
    ("scaling-deepseek-default-of-all-dim",
        "    mscale_all_dim: float = 0.0\n", "    mscale_all_dim: float = 1.0\n",
        "scaling::test_golden_21_magnitudes scaling::test_golden_16_deepseek_yarn"),
    ("scaling-llama3-bounds-exchanged",
        "long = wavelengths > self.original_max_position / self.low_freq_factor",
        "long = wavelengths > self.original_max_position / self.high_freq_factor",
        "scaling::test_golden_22_llama3"),
    ("scaling-llama3-blend-without-the-factor",
        "(1 - smooth) * result / self.factor + smooth", "(1 - smooth) * result + smooth",
        "scaling::test_golden_22_llama3"),
    ("scaling-longrope-switches-one-early",
        "extension = long if length > self.original_max_position else short",
        "extension = long if length >= self.original_max_position else short",
        "scaling::test_golden_25_longrope_switch"),
    ("scaling-longrope-tensor-switches-one-early",
        "torch.where(length > self.original_max_position, long, short)",
        "torch.where(length >= self.original_max_position, long, short)",
        "scaling::test_length_may_be_a_tensor"),
    ("scaling-longrope-magnitude-without-the-root",
        "return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))",
        "return 1 + math.log(self.factor) / math.log(self.original_max_position)",
        "scaling::test_golden_24_longrope_magnitude"),
    ("scaling-proportional-stills-the-first-lanes",
        "torch.cat((rotated, still))", "torch.cat((still, rotated))",
        "scaling::test_golden_26_proportional"),
    ("scaling-query-scale-in-float32",
        'torch.div(tokens, window, rounding_mode="floor")',
        'torch.div(tokens.to(torch.float32), window, rounding_mode="floor")',
        "mutation_kills::test_query_windows_are_counted_in_integers"),
)
mutate(
    "checks.py",
    ("checks-bools-are-numbers",
        "    if isinstance(plain, bool) or not isinstance(plain, int | float | str):",
        "    if not isinstance(plain, int | float | str):",
        "scaling::test_wrong_types_are_named"),
    ("checks-negative-sizes-pass",
        "not torch.compiler.is_compiling() and result < 0:",
        "not torch.compiler.is_compiling() and result < -1:",
        "table::test_negative_rows_are_refused"),
    ("checks-mapped-tensors-are-read",
        " or torch._C._are_functorch_transforms_active()", "",
        "checks::test_values_are_read_where_nothing_waits_or_traces "
        "axes::test_position_helpers_map_over_boundaries"),
    ("checks-any-error-is-a-missing-device",
        "if device is None or _exists(device):", "if device is None:",
        "checks::test_other_errors_than_a_missing_device_stay_what_they_are"),
)
mutate(
    "axes.py",
    ("axes-boundaries-may-decrease",
        " or (cu_seqlens.diff() < 0).any():", ":",
        "errors::test_wrong_arguments_get_one_sentence_and_change_nothing"
        "[positions_from_cu_seqlens]"),
    ("axes-interleaved-one-lane-too-long",
        "i < 3 * self.sections[i % 3]", "i // 3 <= self.sections[i % 3]",
        "axes::test_golden_28_interleaved axes::test_golden_29_interleaved_short"),
    ("axes-glm-starts-at-0",
        "for a in range(lane, lane + 3) if left", "for a in range(3) if left",
        "axes::test_golden_30_glm_round_robin"),
    ("axes-pangu-ties-go-to-the-last",
        "(Fraction(placed[a], wanted[a]), a)", "(Fraction(placed[a], wanted[a]), -a)",
        "axes::test_golden_31_openpangu"),
    ("axes-ernie-order",
        "        return time, height, width\n", "        return height, width, time\n",
        "axes::test_error_sentences"),
    ("axes-global-frequencies-in-blocks",
        "shared[turn :: len(self.dims)] for turn in",
        "shared.chunk(len(self.dims))[turn] for turn in",
        "axes::test_axial_layouts axes::test_same_angles_as_transformers_vision_towers"),
    ("axes-own-frequencies-of-the-whole-width",
        "parts = [frequencies(self.dims[axis]) for axis in self._turns]",
        "parts = [frequencies(rotary_dim)[: self.dims[axis] // 2] for axis in self._turns]",
        "axes::test_golden_34_flux"),
    ("axes-odd-grids-off-centre",
        "torch.arange(length // 2 - length, length // 2,",
        "torch.arange(-(length // 2), length - length // 2,",
        "axes::test_golden_37_centred"),
    ("axes-boundary-token-in-the-sequence-before",
        "tokens, right=True)", "tokens, right=False)",
        "axes::test_golden_38_cu_seqlens"),
    ("axes-zigzag-second-chunk",
        "own + (2 * ranks - 2 - rank) * chunk", "own + (2 * ranks - 1 - rank) * chunk",
        "axes::test_golden_39_zigzag"),
    ("axes-packed-zigzag-counts-from-the-batch",
        "_zigzag(own - starts // ranks, chunk, rank, ranks)",
        "_zigzag(own - starts, chunk, rank, ranks)",
        "axes::test_golden_40_zigzag_packed"),
)
mutate(
    "config.py",
    ("config-key-without-the-phase-dtype",
        "    phase_dtype: torch.dtype = torch.float32\n\n    def __post_init__",
        "    phase_dtype: torch.dtype = field(default=torch.float32, compare=False)\n\n"
        "    def __post_init__",
        "factory::test_every_field_is_part_of_the_key"),
    ("config-key-without-the-offset",
        "    rotary_offset: int = 0\n    base: float",
        "    rotary_offset: int = field(default=0, compare=False)\n    base: float",
        "factory::test_every_field_is_part_of_the_key"),
    ("config-default-base",
        "    base: float = 10000.0\n", "    base: float = 500000.0\n",
        "config::test_defaults"),
    ("config-odd-widths-pass",
        "if self.rotary_dim < 0 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:",
        "if self.rotary_dim < 0 or self.rotary_dim > self.head_dim:",
        "config::test_construction_errors"),
    ("config-sglang-policy",
        '"sglang": "static_factor"', '"sglang": "by_length"',
        "config::test_dynamic_per_dialect"),
    ("config-vllm-longrope-policy",
        'policy: LongRopePolicy = "static" if context.dialect == "vllm" else "by_length"',
        'policy: LongRopePolicy = "by_length"',
        "config::test_longrope_per_dialect"),
    ("config-longrope-factor-of-every-dialect",
        'factor=factor if factor is not None and context.dialect == "transformers" else implied,',
        "factor=factor if factor is not None else implied,",
        "config::test_longrope_per_dialect"),
    ("config-unknown-keys-pass",
        "    keys.finish()\n", "",
        "config::test_refused_dictionaries"),
    ("config-writes-to-the-callers-dictionary",
        "entries = dict(dictionary(model.name, rope))", "entries = dictionary(model.name, rope)",
        "config::test_trap_the_callers_dictionary_is_never_mutated "
        "mutation_kills::test_a_switched_off_key_stays_in_the_callers_dictionary"),
    ("config-ignores-truncate",
        "truncate=truncate is not False,", "truncate=True,",
        "config::test_types"),
    ("config-disagreement-passes",
        "if inside is not None and beside is not None and inside != beside:", "if False:",
        "config::test_trap_theta_matrix"),
    ("config-original-length-of-the-dictionary-wins",
        "        entries[_LO] = original  #", "        entries.setdefault(_LO, original)  #",
        "config::test_a_top_level_original_length_wins"),
    ("config-partial-factor-counts-twice",
        "width = model.head_dim if partial is None else int(model.head_dim * partial)",
        "width = model.head_dim if partial is None else int(model.head_dim * partial * partial)",
        "config::test_golden_27_partial_factor_counts_once"),
    ("config-rotates-backwards-models-forwards",
        '_BACKWARDS = ("nanochat",)', "_BACKWARDS = ()",
        "config::test_models_that_are_refused_by_name"),
)
mutate(
    "capture.py",
    ("capture-plan-adds-steps-and-tokens",
        "longest + self.speculative_steps * self.draft_tokens + self.margin",
        "longest + self.speculative_steps + self.draft_tokens + self.margin",
        "capture::test_lengths_of_the_example"),
    ("capture-plan-forgets-the-draft",
        "longest = max(self.max_position, self.draft_max_position)", "longest = self.max_position",
        "capture::test_a_longer_draft_gives_the_same_lengths"),
    ("capture-plan-without-a-margin",
        "    margin: int = 1024\n    align: int = 128\n\n    def __post_init__",
        "    margin: int = 0\n    align: int = 128\n\n    def __post_init__",
        "capture::test_defaults"),
    ("capture-reserves-the-length-alone",
        "table.reserve(plan.reserve_length)", "table.reserve(plan.max_position)",
        "capture::test_hook_reserves_and_reports"),
    ("capture-pins-nothing",
        "        registry.pin(table.pin())\n        cache =", "        cache =",
        "capture::test_what_a_capture_saw_outlives_growth_and_model"),
    ("capture-guard-does-not-freeze",
        "        table.freeze()\n", "        pass\n",
        "capture::test_growth_inside_the_guard_raises"),
    ("capture-guard-stays-frozen",
        "            table.thaw()\n", "            pass\n",
        "capture::test_an_exception_inside_leaves_the_guard_clean capture::test_guards_nest"),
    ("capture-dead-tables-pass",
        "        if reason is not None:\n            raise RuntimeError(",
        "        if False:\n            raise RuntimeError(",
        "capture::test_a_dead_table_is_refused_by_name_before_anything_grows"),
    ("capture-meta-tables-are-prepared",
        'if table.device.type != "meta"]', "]",
        "capture::test_a_meta_table_beside_the_real_one_is_left_out"),
    ("capture-length-of-the-first-config-only",
        "    return max(lengths)\n", "    return lengths[0]\n",
        "capture::test_lengths_are_found_in "
        "mutation_kills::test_the_longest_of_several_lengths_counts"),
)
mutate(
    "functional.py",
    ("functional-debug-misses-the-first-row-outside",
        "if low < 0 or high >= rows:", "if low < 0 or high > rows:",
        "functional::test_debug_names_the_position_the_rows_and_the_remedy"),
    ("functional-debug-while-compiling",
        "if not compiling and _Debug.enabled:", "if _Debug.enabled:",
        "functional::test_debug_is_never_active_while_compiling"),
    ("functional-debug-stays-on",
        "            _Debug.enabled = before\n", "            pass\n",
        "mutation_kills::test_debug_restores_what_was"),
    ("functional-stated-width-not-compared",
        "if rotary_dim is not None and rotary_dim != cos_sin_cache.shape[-1]:", "if False:",
        "functional::test_bad_arguments_get_one_sentence_and_change_nothing"),
    ("functional-in-place-drops-the-direction",
        "        operator(*arguments)\n", "        operator(*arguments[:-1], False)\n",
        "module::test_in_place_equals_functional "
        "functional::test_apply_rope_equals_float64_and_its_in_place_twin"),
)
mutate(
    "module.py",
    ("module-magnitude-missing-outside-the-table",
        "self._attention_scaling = repr(float(config.attention_scaling))",
        'self._attention_scaling = "1.0"',
        "module::test_output_equals_the_oracle "
        "module::test_a_row_read_and_the_same_row_computed_agree"),
    ("module-serves-its-home-device-alone",
        "            table = self.table_on(q.device)\n        if table",
        "            table = None\n        if table",
        "module::test_a_shared_module_serves_both_devices"),
    ("module-move-loses-the-reserve",
        "table = RopeTable(self.config, target, home.capacity)",
        "table = RopeTable(self.config, target)",
        "module::test_a_lone_module_moves module::test_a_shared_module_serves_both_devices"),
    ("module-reserves-one-device",
        "grown = [table.reserve(rows) for table in self._tables()]",
        "grown = [self.table.reserve(rows)]",
        "module::test_a_shared_module_serves_both_devices "
        "mutation_kills::test_reserve_reaches_every_device"),
    ("module-copy-loses-the-reserve",
        "return _restore, (self.config, probes, self.capacity, self.training)",
        "return _restore, (self.config, probes, 0, self.training)",
        "module::test_a_copy_is_a_lone_module"),
    ("module-legacy-keys-are-unexpected",
        "unexpected_keys[:] = [key for key in unexpected_keys if key not in legacy]", "pass",
        "module::test_no_key_is_saved_and_legacy_keys_are_ignored"),
    ("module-offset-forgotten",
        "self._rotary_offset = config.rotary_offset", "self._rotary_offset = 0",
        "module::test_output_equals_the_oracle"),
)
mutate(
    "distributed.py",
    ("distributed-chunks-rounded-down",
        "chunk = -(-size // mesh.size(i))", "chunk = size // mesh.size(i)",
        "distributed::test_dtensors_equal_one_process"),
    ("distributed-sharded-channels-pass",
        "elif type(placement) is Shard and placement.dim < lead:",
        "elif type(placement) is Shard:",
        "distributed::test_what_is_not_local_is_named"),
    ("distributed-no-word-to-autograd",
        "        torch.autograd.graph.increment_version(parts)\n", "",
        "distributed::test_in_place_writes_through_views_and_tells_autograd"),
)
# fmt: on


# ---------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Result:
    mutation: Mutation
    status: str  # "killed", "SURVIVED" or "error"
    seconds: float
    detail: str  # the test that killed it, or what is wrong


class Unusable(Exception):
    """The copy cannot be tested."""


def repository_files(root: Path) -> list[Path]:
    """What git tracks or would track, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return sorted({Path(name) for name in listed.split("\0") if name and (root / name).is_file()})


def copy_repository(root: Path, copy: Path) -> None:
    for name in repository_files(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, copy / name)


@dataclass(frozen=True)
class Outcome:
    """Of one pytest run; tests by node id without parameters, as mutations name them."""

    status: int
    passed: frozenset[str]
    failed: tuple[str, ...]  # with parameters, in the order they ran
    output: str

    @property
    def last(self) -> str:
        lines = self.output.strip().splitlines() or ["no output"]
        return next((line for line in lines if line.startswith("ERROR")), lines[-1])


def crashes(status: int, output: str) -> list[str]:
    """The test that ended the process, as memory written out of bounds does."""
    if status not in CRASHES:
        return []
    frames = re.findall(r'/tests/(test_\w+\.py)", line \d+ in (test_\w+)', output)
    # Broken memory may show only later, where no test is on the stack.
    where = "tests/{}::{}".format(*frames[0]) if frames else "after a test that broke memory"
    return [f"{where} ({signal.Signals(-status).name})"]


class Copy:
    """A copy of the repository, in which one mutation at a time is tested."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        copy_repository(root, folder / "repository")
        self.root = folder / "repository"

    def environment(
        self, tests: Sequence[str] = ("",), *, native: bool = False, built: bool = False
    ) -> dict[str, str]:
        # No bytecode: two versions of a file may have one size and one second. No compiled graphs
        # or kernels of another version either; of the C++ kernel a new one only where it changed.
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }
        if native:
            caches["ROPE_COMPILE_CACHE_DIR"] = str(self.folder / "native")
        elif built:
            # What tests/conftest.py asks, to leave the build of the C++ kernel to another process.
            caches["PYTEST_XDIST_WORKER"] = "gw0"
        interpreted = {"TRITON_INTERPRET": "1"} if tests[0].startswith(INTERPRETED) else {}
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        return {
            **own, **caches, **interpreted,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self.root),
        }  # fmt: skip

    def run(self, tests: Sequence[str], *, first: bool = True, native: bool = False) -> Outcome:
        """Run tests against the copy; ``first`` stops at the first failure."""
        for name in ("inductor", "triton"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        log = self.folder / "log.xml"
        log.unlink(missing_ok=True)
        options = ["-n0", "-q", "-p", "no:cacheprovider", f"--junitxml={log}"]
        command = [sys.executable, "-m", "pytest", *options, "-o", "junit_family=xunit1"]
        with subprocess.Popen(
            [*command, *(["-x"] if first else []), *tests],
            cwd=self.root, env=self.environment(tests, native=native, built=first), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S if first else None)
            except subprocess.TimeoutExpired:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # the session that was started two lines above
                process.communicate()
                return Outcome(1, frozenset(), (f"no end after {TIMEOUT_S} s",), "")
        passed, failed = set(), []
        for case in ET.parse(log).iter("testcase") if log.exists() else ():
            node = f"{case.get('file')}::{case.get('name')}"
            kinds = {child.tag for child in case}
            if kinds & {"failure", "error"}:
                failed.append(node)
            elif "skipped" not in kinds:
                passed |= {node, node.partition("[")[0]}
        failed += crashes(process.returncode, output)
        return Outcome(process.returncode, frozenset(passed), tuple(failed), output)

    def check_import(self) -> None:
        """The copy answers, and not an installed package.

        Raises:
            Unusable: it does not.
        """
        answer = subprocess.run(
            [sys.executable, "-c", "import rope_compile; print(rope_compile.__file__)"],
            cwd=self.root / "tests", env=self.environment(), text=True,
            capture_output=True,
        )  # fmt: skip
        expected = self.root / "rope_compile" / "__init__.py"
        if Path(answer.stdout.strip()) != expected:
            raise Unusable(f"rope_compile must be {expected}, got {answer.stdout}{answer.stderr}")

    def test(self, mutation: Mutation, sound: frozenset[str]) -> Result:
        """Apply a mutation, run its tests, take it back. ``sound`` passed without it."""
        start = time.perf_counter()

        def result(status: str, detail: str) -> Result:
            return Result(mutation, status, time.perf_counter() - start, detail)

        path = self.root / mutation.path
        original = path.read_text()
        found = original.count(mutation.old)
        if found != 1:
            return result("error", f"its old text must occur once in {mutation.file}, not {found}")
        useless = [test for test in mutation.tests if test not in sound]
        if useless:
            return result("error", f"without the mutation must pass: {', '.join(useless)}")
        path.write_text(original.replace(mutation.old, mutation.new))
        try:
            seen = self.run(mutation.tests, native=path.suffix == ".cpp")
        finally:
            path.write_text(original)
        if seen.status in (1, *CRASHES) and seen.failed:
            return result("killed", seen.failed[0])
        if seen.status == 0 and seen.passed:
            return result("SURVIVED", f"passed: {', '.join(mutation.tests)}")
        return result("error", f"pytest ended with {seen.status}, no test passed: {seen.last}")


def baseline(copy: Copy, mutations: Sequence[Mutation]) -> frozenset[str]:
    """The named tests that pass on the unchanged copy.

    Raises:
        Unusable: one of them does not exist, so that pytest runs none.
    """
    sound: set[str] = set()
    for interpreted in (False, True):
        named = {t for m in mutations if m.interpreted is interpreted for t in m.tests}
        if named:
            seen = copy.run(sorted(named), first=False)
            if seen.status not in (0, 1):
                raise Unusable(f"the tests must run without a mutation, got {seen.last}")
            broken = {node.partition("[")[0] for node in seen.failed} | set(seen.failed)
            sound |= seen.passed - broken
    return frozenset(sound)


def test_all(mutations: Sequence[Mutation], jobs: int, scratch: Path) -> Iterator[Result]:
    """Results, in the order of the list."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    first = Copy(scratch / "0")
    first.check_import()
    sound = baseline(first, mutations)
    for copy in (first, *(Copy(scratch / str(i)) for i in range(1, jobs))):
        copies.put(copy)

    def test(mutation: Mutation) -> Result:
        copy = copies.get()
        try:
            return copy.test(mutation, sound)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(test, mutations)


def report(results: Sequence[Result]) -> str:
    """Markdown: one line a mutation."""
    killed = sum(result.status == "killed" for result in results)
    lines = [
        "# Mutations",
        "",
        f"{killed} of {len(results)} deliberate bugs are found by the tests that name them "
        "(`python -m bench.mutations`).",
        "",
        "| mutation | file | killed by | seconds |",
        "|---|---|---|---:|",
    ]
    for result in results:
        by = result.detail if result.status == "killed" else f"**{result.status}** {result.detail}"
        by = by.removeprefix("tests/").replace("|", "\\|")
        lines.append(
            f"| {result.mutation.name} | {result.mutation.file} | {by} | {result.seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def arguments(argv: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=names, help="these alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at one time")
    parser.add_argument("--write", metavar="FOLDER", type=Path, help=f"where {REPORT} goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, listed: Sequence[Mutation] = MUTATIONS) -> int:
    options = arguments(argv, [mutation.name for mutation in listed])
    chosen = [m for m in listed if not options.only or m.name in options.only]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        print(f"{len(chosen)} mutations; first their tests without any of them", flush=True)
        for result in test_all(chosen, options.jobs, Path(scratch)):
            results.append(result)
            print(
                f"[{len(results):3}/{len(chosen)}] {result.status:8} {result.seconds:6.1f} s  "
                f"{result.mutation.name}: {result.detail}",
                flush=True,
            )
    bad = [result for result in results if result.status != "killed"]
    print(f"{len(results) - len(bad)} of {len(results)} killed")
    if options.write:
        (options.write / REPORT).write_text(report(results))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
