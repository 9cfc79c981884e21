"""Seeded defects of what checks: a simulator, a rule or a report that no longer sees something.

A check that finds nothing looks like a kernel that is right. Each of these once found nothing where
something was wrong, was corrected, and is blinded here again; the test that is named must fail
then. `test_checkers.py` plants them.
"""

from __future__ import annotations

from dataclasses import dataclass

SIMULATOR = "gluon-sim/src/gluon_sim"
RULE = "src/openmla/lab/testing"
LAUNCHES = "gluon-sim/tests/test_launches.py"
FEATURES = "gluon-sim/tests/test_features.py"
LANGUAGE = "gluon-sim/tests/test_language.py"
TILES = "gluon-sim/tests/test_tiles.py"
EXERCISE = "gluon-sim/tests/test_exercise.py"
COMPARE = "tests/lab/testing/test_compare.py"


@dataclass(frozen=True)
class Blinded:
    """`old`, which stands once in `file`, becomes `new`, and `test` fails."""

    name: str
    file: str
    old: str
    new: str
    test: str


BLINDED = (
    Blinded(
        "the last of several lanes is right",
        f"{SIMULATOR}/memory/global_memory.py",
        "if not self.contended and not _same_bits(self.flat[position], bits):",
        "if False:",
        f"{LANGUAGE}::test_lanes_that_write_one_element_must_agree",
    ),
    Blinded(
        "an fp32 output may have been rounded",
        f"{RULE}/compare.py",
        "    if judgement.rule.alike:\n",
        "    if False:\n",
        f"{COMPARE}::test_an_fp32_output_that_was_rounded_on_its_way_is_found[dense-bf16]",
    ),
    Blinded(
        "one of several such rows is not enough",
        f"{RULE}/compare.py",
        "if bool(every.any()):",
        "if bool(every.all()):",
        f"{COMPARE}::test_an_fp32_output_that_was_rounded_on_its_way_is_found[sparse-bf16]",
    ),
    # Launches that overlap, and programs of one launch.
    Blinded(
        "a launch may touch what the one in front touches",
        f"{SIMULATOR}/memory/history.py",
        "return before.launch not in launch.running or LaunchEnd(before.launch) in clock.seen",
        "return True",
        f"{LAUNCHES}::test_a_dependent_launch_waits_before_it_reads[simulated]",
    ),
    Blinded(
        "every wait is for all launches before",
        f"{SIMULATOR}/stream.py",
        "return (self.running if self.waited else frozenset()) | {self.number}",
        "return self.running | {self.number}",
        f"{LAUNCHES}::test_the_launch_before_the_one_in_front_may_run_too[simulated]",
    ),
    Blinded(
        "only the launch in front may still run",
        f"{SIMULATOR}/stream.py",
        "frozenset({self.number}) | (frozenset() if self.waited_first else self.running)",
        "frozenset({self.number})",
        f"{LAUNCHES}::test_the_launch_before_the_one_in_front_may_run_too[simulated]",
    ),
    Blinded(
        "a launch of compiled code knows of no other",
        f"{SIMULATOR}/compiled/core/launches.py",
        "memory.running = [self._stream.launches[number] for number in running]",
        "memory.running = running = []",
        f"{LAUNCHES}::test_a_dependent_launch_waits_before_it_reads[executed]",
    ),
    Blinded(
        "programs of a launch never meet",
        f"{SIMULATOR}/memory/history.py",
        "return clock.seen.get(before.component, 0) >= before.time",
        "return True",
        f"{LAUNCHES}::test_programs_of_a_launch_write_apart[simulated]",
    ),
    Blinded(
        "only the last reader is remembered",
        f"{SIMULATOR}/memory/history.py",
        "cells.read_too[at] = np.where(others & (last != 0), last, cells.read_too[at])",
        "pass",
        f"{LAUNCHES}::test_no_program_writes_what_another_reads[simulated-1]",
    ),
    # What Triton refuses.
    Blinded(
        "extents are any number",
        f"{SIMULATOR}/values/rules.py",
        "any(n < 1 or n & (n - 1) for n in shape)",
        "any(n < 1 for n in shape)",
        f"{LANGUAGE}::test_shapes_that_triton_refuses",
    ),
    Blinded(
        "a product may have operands of two types",
        f"{SIMULATOR}/language/amd.py",
        "if a.dtype != b.dtype and 16 in (a.dtype.bits, b.dtype.bits):",
        "if False:",
        f"{LANGUAGE}::test_a_product_has_operands_of_one_type",
    ),
    Blinded(
        "a descriptor has any strides",
        f"{SIMULATOR}/memory/global_memory.py",
        "if size % 16 or not 0 <= size < STRIDE_LIMIT:",
        "if size % 16:",
        f"{FEATURES}::test_a_descriptor_has_strides_that_hardware_takes",
    ),
    # Where the compiler puts the elements of a tile.
    Blinded(
        "a tile without a swizzle may be permuted",
        f"{SIMULATOR}/memory/views.py",
        "if plain and axes != sorted(axes):",
        "if False:",
        f"{TILES}::test_a_permuted_tile_without_a_swizzle_is_refused",
    ),
    Blinded(
        "every view of a buffer is row-major",
        f"{SIMULATOR}/memory/tiles.py",
        "if np.array_equal(here, _places(shape, plain)):",
        "if True:",
        f"{TILES}::test_a_view_reads_what_compiled_code_reads[another swizzle]",
    ),
    Blinded(
        "a copy may be swizzled otherwise than its view",
        f"{SIMULATOR}/language/hopper.py",
        "if copied is None or seen is None or copied.boxes != seen.boxes:",
        "if False:",
        f"{FEATURES}::test_a_copy_is_swizzled_as_its_view",
    ),
    # NaN and Inf in what a row uses.
    Blinded(
        "a finite result is right where there is none",
        f"{RULE}/compare.py",
        "kept = self.lost & ~self.truth.unsettled & self.raw.isfinite()",
        "kept = self.lost & False",
        f"{COMPARE}::test_where_the_truth_is_not_finite_the_result_is_not",
    ),
    Blinded(
        "a finite lse is right where there is none",
        f"{RULE}/compare.py",
        'kept = lost & settled & got.isfinite() if name == "lse" else torch.zeros_like(lost)',
        "kept = torch.zeros_like(lost)",
        f"{COMPARE}::test_where_the_truth_is_not_finite_the_result_is_not",
    ),
    Blinded(
        "elements beside a lost one are not judged",
        f"{RULE}/compare.py",
        "self.out = torch.where(self.lost, 0.0, out.double())",
        "self.out = torch.where(self.lost.any(), truth.out, out.double())",
        f"{COMPARE}::test_what_is_beside_a_lost_element_is_judged",
    ),
    # Cases at the edges of tiles.
    Blinded(
        "keys of drawn cases fill their tiles",
        f"{RULE}/simulate/draw.py",
        "edge = tile * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 1, 1))",
        "edge = tile * rng.choice((1, 1, 2, 3))",
        "tests/lab/testing/test_simulate.py::test_draws_crowd_the_edges[h200]",
    ),
    Blinded(
        "block tables of drawn cases have room",
        f"{RULE}/simulate/draw.py",
        '"spare": rng.choice((0, 0, 0, 1, 3)),',
        '"spare": rng.choice((1, 3)),',
        "tests/lab/testing/test_simulate.py::test_draws_crowd_the_edges[h200]",
    ),
    # What the cases exercise.
    Blinded(
        "a ring may turn once",
        f"{SIMULATOR}/report/gaps.py",
        "if max(turns.values()) < TWICE",
        "if max(turns.values()) < 1",
        f"{EXERCISE}::test_a_ring_that_turns_once_and_waits_that_never_block_are_named",
    ),
    Blinded(
        "a wait need not block",
        f"{SIMULATOR}/report/gaps.py",
        "idle = [wait for wait, waited in waits if not waited.blocked]",
        "idle = []",
        f"{EXERCISE}::test_a_ring_that_turns_once_and_waits_that_never_block_are_named",
    ),
    Blinded(
        "a condition may go one way",
        f"{SIMULATOR}/report/gaps.py",
        "if not times",
        "if False",
        f"{EXERCISE}::test_a_ring_that_turns_once_and_waits_that_never_block_are_named",
    ),
    Blinded(
        "the report ends well whatever is missing",
        "tests/kernels/exercise.py",
        "return [gap for gap in self.gaps if not reason(self.kernel, gap)]",
        "return []",
        "tests/kernels/test_exercise.py"
        "::test_a_wait_that_never_blocks_and_a_ring_that_turns_once_are_missing",
    ),
    # Seeded and drawn defects.
    Blinded(
        "a seeded defect need not be found",
        "tests/kernels/mutants.py",
        'pytest.fail(f"not found; wrong numbers: {wrong}, findings: {kinds}")',
        "return",
        "tests/kernels/test_seeded_defects.py::test_a_defect_that_nothing_shows_is_not_found",
    ),
    Blinded(
        "a drawn defect that lives is found",
        "tests/defects/drawing/judge.py",
        'return Verdict(False, "", seconds)',
        'return Verdict(True, "", seconds)',
        "tests/defects/test_draw.py::test_found_and_alive",
    ),
    Blinded(
        "drawn defects are judged by the package itself",
        "tests/defects/drawing/judge.py",
        "data = edit.apply(changed.read_bytes())",
        "data = changed.read_bytes()",
        "tests/defects/test_draw.py::test_found_and_alive",
    ),
    Blinded(
        "a kernel that fails by itself can be judged",
        "tests/defects/drawing/judge.py",
        'if not kept or kept["failed"]:',
        "if not kept:",
        "tests/defects/test_draw.py::test_a_kernel_that_fails_by_itself_is_an_error",
    ),
)
