"""Compiling without a GPU: reports, predictions, the cache, and the command."""

import dataclasses
import json

import pytest
import torch
import typer
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from typer.testing import CliRunner

from openmla.cli.compile import compile_command
from openmla.kernels.call import Call
from openmla.kernels.jobs import Predicted
from openmla.lab.compiling import jobs as aot
from openmla.lab.compiling import table as aot_table
from openmla.lab.compiling.jobs import CompileJob, CompileReport, compile_job


@gluon.jit
def scale(o_ptr, n, FACTOR: gl.constexpr):
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(o_ptr + i, i * FACTOR, mask=i < n)


@gluon.jit
def broken(o_ptr, n, FACTOR: gl.constexpr):
    gl.store(o_ptr + gl.arange(0, 100, gl.BlockedLayout([1], [32], [4], [0])), n)


OUT = torch.zeros(256, dtype=torch.int32)


def job(kernel=scale, arguments=None, **changes) -> CompileJob:
    given = {"o_ptr": OUT, "n": 100, "FACTOR": 3} | (arguments or {})
    return dataclasses.replace(CompileJob("scale", Call(kernel, 1, given), "sm90"), **changes)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENMLA_COMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_nvidia_targets(target):
    report = compile_job(job(target=target))
    assert not report.error
    assert 0 < report.registers < 64
    assert (report.spills, report.shared, report.tmem, report.warps) == (0, 0, 0, 4)


def test_amd_target():
    @gluon.jit
    def wide(o_ptr, n):
        gl.store(o_ptr + gl.arange(0, 256, gl.BlockedLayout([1], [64], [4], [0])), n)

    report = compile_job(CompileJob("wide", Call(wide, 1, {"o_ptr": OUT, "n": 100}), "gfx950"))
    assert not report.error
    assert report.registers > 0
    assert report.occupancy is not None


def test_second_call_is_free_and_equal():
    first, second = compile_job(job()), compile_job(job())
    assert not first.cached
    assert second.cached
    assert dataclasses.replace(second, cached=False, seconds=first.seconds) == first


def test_key_follows_constexprs_target_options_and_source():
    keys = {
        aot.job_key(j)
        for j in (
            job(),
            job(arguments={"FACTOR": 4}),
            job(target="sm100"),
            job(arguments={"num_warps": 8}),
            job(kernel=broken),
            job(arguments={"o_ptr": OUT[1:]}),  # an address that 16 does not divide
            job(arguments={"n": 112}),
            job(arguments={"n": 1}),
        )
    }
    assert len(keys) == 8


def test_key_does_not_follow_values_that_are_compiled_alike():
    assert aot.job_key(job()) == aot.job_key(job(arguments={"o_ptr": OUT[:4], "n": 99}))


def test_a_call_is_specialized_as_a_launch_would_be():
    signature, constexprs, options = aot.specialized(job(arguments={"n": 1, "num_warps": 8}))
    assert signature == {"o_ptr": "*i32:16"}
    assert constexprs == {"n": 1, "FACTOR": 3}
    assert options == {"num_warps": 8, "enable_fp_fusion": True}


def test_a_kernel_that_does_not_compile_is_a_report_and_is_not_cached(tmp_path):
    report = compile_job(job(kernel=broken))
    assert "arange" in report.error or "power of" in report.error
    assert report.differences(Predicted())[0].startswith("does not compile")
    assert not list(tmp_path.rglob("*.json"))


def test_differences_spell_out_both_numbers():
    report = CompileReport(
        "k", "sm90", "3.6.0", 1.0, shared=1024, tmem=128, registers=200, spills=8
    )
    assert report.differences(Predicted(1024, 128, 200, 8)) == []
    assert report.differences(Predicted(1000, 256, 168, 0)) == [
        "shared: planned 1000, compiled 1024",
        "tmem: planned 256, compiled 128",
        "registers: planned at most 168, compiled 200",
        "spills: planned at most 0, compiled 8",
    ]


def test_compile_all_prints_a_table_and_filters_targets(capsys):
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=120)
    jobs = [job(), job(name="other", target="sm100", predicted=Predicted(shared=5))]
    rows = aot_table.compile_all(jobs, console=console)
    assert [r.name for _, r in rows] == ["scale", "other"]
    assert aot_table.failures(rows) == ["other for sm100: shared: planned 5, compiled 0"]
    assert len(aot_table.compile_all(jobs, targets=["sm90"], console=console)) == 1
    assert "2 kernel configurations" in capsys.readouterr().out


def test_command_line_returns_1_for_a_failure(monkeypatch):
    app = typer.Typer()
    app.command()(compile_command)
    monkeypatch.setattr(aot_table, "discover", lambda: [job()])
    result = CliRunner().invoke(app, ["--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["name"] == "scale"
    monkeypatch.setattr(aot_table, "discover", lambda: [job(kernel=broken)])
    result = CliRunner().invoke(app, ["--json", "--no-cache"])
    assert result.exit_code == 1 and "does not compile" in result.stderr


def test_barriers_of_inline_assembly_do_not_count():
    own = "\t// begin inline asm\n\tbar.sync 8, 256;\n\t// end inline asm\n"
    warp = "\tbar.warp.sync \t-1;\n"
    assert aot.count_barriers(f"\tbar.sync \t0, 128;\n{own}\tbarrier.sync \t1;\n{warp}") == 2
    assert aot.count_barriers("\tbar.sync \t%r1, 128;\n") == 1
    assert aot.count_barriers("\ts_barrier\n\t;;#ASMSTART\n\ts_barrier\n\t;;#ASMEND\n") == 1
