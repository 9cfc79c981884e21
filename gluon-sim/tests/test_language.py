"""Arithmetic, conversions and shapes against PyTorch; every other way a run can end."""

from pathlib import Path

import numpy as np
import pytest
import torch
from triton.experimental.gluon import language as gl

from gluon_sim import Kind, Limits, Unsupported, intercept, register_asm, simulate
from gluon_sim.language import shapes
from gluon_sim.values import dtypes
from gluon_sim.values.tensors import Tensor
from toys import cdna4_features, language


def test_integers_divide_to_zero_and_wrap():
    x = torch.tensor([-7, 7, -7, 2**31 - 1] * 32, dtype=torch.int32)
    y = torch.tensor([2, -2, -2, 3] * 32, dtype=torch.int32)
    out = torch.zeros(5, 128, dtype=torch.int32)
    simulate(language.arithmetic, 1, (x, y, out), {"N": 128}).raise_if_bad()
    quotient = torch.div(x, y, rounding_mode="trunc")
    assert torch.equal(out[0], quotient)
    assert torch.equal(out[1], x - quotient * y)
    assert torch.equal(out[2], x * y)
    assert torch.equal(out[3], (x << 3) ^ (y >> 1))
    assert torch.equal(out[4], torch.where(x < y, torch.maximum(x, y), x.clamp(max=7)))


def test_conversions_round_like_torch():
    x = torch.randn(128, generator=torch.Generator().manual_seed(0)) * 300
    x[:3] = torch.tensor([1e6, -1e6, 0.0])
    half, brain = torch.zeros(128, dtype=torch.float16), torch.zeros(128, dtype=torch.bfloat16)
    eight, total = torch.zeros(128, dtype=torch.float8_e4m3fn), torch.zeros(128)
    args = (x, half, brain, eight, total)
    simulate(language.roundings, 1, args, {"N": 128}).raise_if_bad()
    b = x.bfloat16()
    assert torch.equal(half, x.half())
    assert torch.equal(brain, b)
    assert torch.equal(eight.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(total, (b + b * 3).float())


def test_shapes_and_reductions():
    out = torch.zeros(32, dtype=torch.int32)
    simulate(language.halves, 1, (out,)).raise_if_bad()
    x = torch.arange(256).view(32, 4, 2)
    assert torch.equal(out, (x[..., 0].sum(1) - x[..., 1].amax(1)).int())


def test_neighbors_of_a_row_are_taken_apart_in_each_cta_of_a_cluster():
    """Rows that a cluster splits stay where they are; halves of the split axis would move."""
    rows = Tensor(np.arange(16, dtype=np.float32).reshape(4, 2, 2), dtypes.float32, split=-3)
    low, high = shapes.split(rows)
    assert (low.split, high.split) == (-2, -2) and low.value[1].tolist() == [4, 6]
    joined = shapes.join(low, high)
    assert joined.split == -3 and np.array_equal(joined.value, rows.value)
    with pytest.raises(Unsupported, match="a split"):
        shapes.split(Tensor(rows.value, dtypes.float32, split=-1))
    with pytest.raises(Unsupported, match="a join"):
        shapes.join(low, Tensor(high.value, dtypes.float32))


def test_running_sums():
    out = torch.zeros(256, dtype=torch.int32)
    simulate(language.sums, 1, (out, 5)).raise_if_bad()
    x = torch.arange(5, 133)
    both = torch.cat([x.cumsum(0), x.flip(0).cumsum(0).flip(0)])
    assert torch.equal(out, both.int())


def test_lanes_that_write_one_element_must_agree():
    out = torch.zeros(64, dtype=torch.int32)
    assert simulate(language.pairs, 1, (out,), {"SAME": True}).ok
    assert torch.equal(out, torch.arange(64, dtype=torch.int32))
    report = simulate(language.pairs, 1, (out,), {"SAME": False})
    assert report.kinds() == {Kind.RACE}
    assert "lanes of one store write different values" in str(report)
    nan = torch.full((64,), torch.nan)
    assert simulate(language.pairs, 1, (nan.clone(),), {"SAME": True}).ok


def test_named_tuples():
    x = torch.arange(5 * 130, dtype=torch.int32).view(5, 130)
    out = torch.zeros(2, 128, dtype=torch.int32)
    how = language.Choices(negative=True, times=3)
    simulate(language.named_records, 1, (x, out, 5, 130, how)).raise_if_bad()
    assert torch.equal(out[0], -3 * x[:, :128].sum(0).int())
    assert torch.equal(out[1], -x[0, :128])


def test_records_with_methods():
    out = torch.zeros(128, dtype=torch.int32)
    simulate(language.record, 1, (out, 5)).raise_if_bad()
    assert torch.equal(out, torch.arange(5, 133).int())


def test_a_loop_without_end_is_stopped():
    one = torch.ones(1, dtype=torch.int32)
    report = simulate(language.endless, 1, (one,), limits=Limits(steps=2000))
    assert report.reason == "step limit"
    assert report.kinds() == {Kind.LIMIT}


def test_a_loop_the_simulator_cannot_count_is_stopped_by_the_clock():
    one = torch.ones(1, dtype=torch.int32)
    report = simulate(language.constant_loop, 1, (one,), limits=Limits(seconds=0.2))
    assert report.reason == "time limit"
    assert report.kinds() == {Kind.LIMIT}


def test_a_deadlock_names_who_waits_for_what():
    report = simulate(language.lonely, 1, (torch.ones(1, dtype=torch.int32),))
    assert report.reason == "deadlock"
    assert report.kinds() == {Kind.DEADLOCK, Kind.ARRIVE}
    stuck = next(f for f in report.findings if f.kind is Kind.DEADLOCK)
    assert (stuck.buffer, stuck.stage, stuck.phase, stuck.partition) == ("box", 1, 0, "main")
    assert "1 of 2 arrivals missing" in stuck.message
    line = Path(stuck.file).read_text().splitlines()[stuck.line - 1]
    assert line.strip().startswith("mbarrier.wait")


def test_an_access_past_the_end_is_reported_and_not_done():
    guarded = torch.zeros(200, dtype=torch.int32)
    report = simulate(language.outside, 1, (guarded[:100], 120))
    assert report.kinds() == {Kind.BOUNDS}
    assert "element 100 of o_ptr, which spans 100 (21 elements outside)" in str(report)
    assert not guarded[100:].any()


def test_a_read_of_unwritten_memory():
    report = simulate(language.unwritten, 1, (torch.zeros(128, dtype=torch.int32),))
    assert report.kinds() == {Kind.UNWRITTEN}


def test_a_python_error_in_the_kernel_is_a_finding_with_its_line():
    report = simulate(language.mismatch, 1, (torch.zeros(1, dtype=torch.int32),))
    assert report.reason == "kernel error"
    (finding,) = report.findings
    assert finding.kind is Kind.ERROR
    assert finding.file.endswith("language.py")
    assert "store of shape (128,) to box of shape (64,)" in finding.message


def test_a_store_to_shared_memory_does_not_round():
    """Triton refuses it."""
    report = simulate(language.unrounded, 1, (torch.zeros(1, dtype=torch.int32),))
    (finding,) = report.findings
    assert finding.kind is Kind.ERROR and "store of fp32 to box of bf16" in finding.message


def test_a_product_has_operands_of_one_type():
    """Triton refuses others."""
    p, v = torch.ones(128, 64, dtype=torch.float16), torch.ones(64, 128, dtype=torch.bfloat16)
    layout = {"SHARED": gl.SwizzledSharedLayout(8, 1, 16, [1, 0])}
    report = simulate(cdna4_features.lds_matmul, 1, (p, v, torch.zeros(128, 128)), layout)
    assert "product of fp16 and bf16" in report.findings[0].message


def test_unknown_assembly_raises_until_it_is_registered():
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Unsupported, match="popc"):
        simulate(language.assembly, 1, (out,))
    register_asm(r"popc\.b32 \$0, (?P<n>\d+);", lambda m, _: int(m["n"]).bit_count())
    simulate(language.assembly, 1, (out,)).raise_if_bad()
    assert out.item() == 3


def test_outputs_must_be_written_exactly_once():
    out = torch.zeros(128, dtype=torch.int32)
    twice = simulate(language.record, 2, (out, 5), outputs=("o_ptr",), ignore=[Kind.RACE])
    assert "written more than once" in str(twice)
    partly = simulate(
        language.record, 1, (torch.zeros(130, dtype=torch.int32), 5), outputs=["o_ptr"]
    )
    assert "o_ptr[128] is never written (2 elements)" in str(partly)
    mask = torch.arange(130) < 128
    exact = simulate(
        language.record, 1, (torch.zeros(130, dtype=torch.int32), 5), outputs={"o_ptr": mask}
    )
    assert exact.ok


def test_several_launches_write_their_outputs_together():
    memory = torch.zeros(300, dtype=torch.int32)
    out, gap, rest = memory[:128], memory[128:140], memory[140:268]

    def found(outputs, *targets):
        with intercept(outputs=outputs) as reports:
            for target in targets:
                language.record[(1,)](target, 5)
        return [str(f) for report in reports for f in report.findings]

    assert found({"out": out, "rest": rest}, out, rest) == []
    assert "rest[0] is never written (128 elements)" in found({"out": out, "rest": rest}, out)[0]
    assert "out[0] is written more than once (128" in found({"out": out}, out, out)[0]
    assert "around out[140] is written (128 elements)" in found({"out": out}, out, rest)[0]
    assert "gap[0] is never written (12" in found({"out": out, "gap": gap}, out)[0]
    assert found({"out": out}) == []  # nothing was launched


def test_findings_can_be_ignored_by_kind():
    out = torch.zeros(128, dtype=torch.int32)
    assert simulate(language.unwritten, 1, (out,), ignore=[Kind.UNWRITTEN]).ok


def test_numpy_errors_do_not_leak_into_the_caller():
    before = np.geterr()
    simulate(language.halves, 1, (torch.zeros(32, dtype=torch.int32),))
    assert np.geterr() == before


def test_a_number_that_a_loop_carries_is_a_register():
    out = torch.zeros(1, dtype=torch.int32)
    simulate(language.carried, 1, (out, 7)).raise_if_bad()
    assert out.item() == sum(
        int(i / 2) + int(i % 2 * (1 if i >= 0 else -1)) + i for i in range(-3, 4)
    )


def test_what_is_not_modeled_raises():
    with pytest.raises(Unsupported, match="histogram"):
        simulate(language.unmodeled, 1, (torch.zeros(1, dtype=torch.int32),))


@pytest.mark.parametrize("seed", range(5))
def test_programs_can_wait_for_each_other(seed):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    simulate(language.relay, 2, (flag, out), seed=seed, outputs=("o_ptr",)).raise_if_bad()
    assert out.tolist() == [42, 43]
    relaxed = simulate(language.relay, 2, (flag.zero_(), out, True), seed=seed)
    assert relaxed.kinds() == {Kind.RACE}, "the flag is seen, what was stored before it need not be"


@pytest.mark.parametrize("size", [48, 1 << 21])
def test_shapes_that_triton_refuses(size):
    report = simulate(language.filled, 1, (torch.zeros(1, dtype=torch.int32), size, 4))
    assert report.kinds() == {Kind.ERROR}


@pytest.mark.parametrize(("warps", "ok"), [(4, True), (2, False), (8, False)])
def test_layouts_have_the_warps_of_their_partition(warps, ok):
    report = simulate(language.filled, 1, (torch.zeros(1, dtype=torch.int32), 64, warps))
    assert report.ok is ok
