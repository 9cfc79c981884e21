"""Bytes moved: predicted, printed, and documented; the picture and the example beside them."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from distributed.zigzag_picture import split_picture
from openmla.cli.plan import plan_command
from openmla.distributed import split, volume
from openmla.planning.models import MODELS, model_by_name

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs" / "context-parallel.md").read_text()
V3 = model_by_name("deepseek-v3")
app = typer.Typer()
app.command()(plan_command)


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_least_that_can_be_moved(name: str):
    found = volume.received_bytes(split([5000, 77], 6, 0), MODELS[name])
    assert min(found.values()) == min(n for way, n in found.items() if "latent rows" in way) > 0


def test_heads_are_divided_and_rows_are_not():
    whole, eighth = (volume.received_bytes(split([4096], 4, 0), V3, tp) for tp in (1, 8))
    assert whole[volume.KEYS_AND_VALUES] == 8 * eighth[volume.KEYS_AND_VALUES]
    assert whole[volume.ROWS] == eighth[volume.ROWS]


def test_nothing_is_moved_alone():
    assert set(volume.received_bytes(split([4096], 1, 0), V3).values()) == {0}


def test_the_documented_table_is_computed():
    table = volume.volume_table(V3, 8, (32768, 131072, 1048576))
    begin, end = "<!-- volume table: begin -->\n", "\n<!-- volume table: end -->"
    assert DOCS.partition(begin)[2].partition(end)[0] == table
    moved = volume.received_bytes(split([131072], 8, 0), V3)
    ratio = moved["sharded pool, merged"] / moved[volume.ROWS]
    assert f"It moves {ratio:.0f} times what" in " ".join(DOCS.split())
    assert round(moved[volume.KEYS_AND_VALUES] / moved[volume.ROWS]) == 71


def test_the_picture_is_drawn_by_the_package():
    assert (ROOT / "docs" / "zigzag.svg").read_text() == split_picture()
    assert split_picture().count("rank 3</title>") == 2 * 4  # both ways, four tokens each


def test_plan_prints_shares_balance_and_bytes():
    arguments = ["--world", "8", "--layout", "zigzag", "--tokens", "131072"]
    text = CliRunner().invoke(app, arguments).output
    assert "131072 tokens on 8 ranks, zigzag" in text
    assert re.search(r"^ +7 +16384 +1073750016 +1\.000  57344 to 65535, 65536", text, re.M)
    assert re.search(r"latent rows, bf16 +126\.0 MiB", text)
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert report["problem"]["total_q"] == 16384 and report["problem"]["batch"] == 2
    assert report["context_parallel"]["pairs"] == [1073750016] * 8


def test_plan_counts_a_cached_prefix_and_names_a_wrong_layout():
    arguments = ["--world", "2", "--tokens", "64", "--context", "96", "--json"]
    report = json.loads(CliRunner().invoke(app, arguments).output)
    assert sum(report["context_parallel"]["pairs"]) == 64 * 65 // 2 + 64 * 32
    wrong = CliRunner().invoke(app, ["--world", "2", "--layout", "ring"])
    assert wrong.exit_code == 2 and "zigzag" in wrong.output


def test_many_ranks_are_not_all_listed():
    text = CliRunner().invoke(app, ["--world", "64", "--tokens", "65536"]).output
    assert "and 48 more ranks" in text


def test_the_example_runs_under_torchrun():
    example = ROOT / "examples" / "context_parallel.py"
    assert len(example.read_text().splitlines()) < 80
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(example),
    ]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d): (\d+) tokens", done.stdout)) == [
        ("0", "172"),
        ("1", "171"),
    ]


def test_examples_in_docstrings():
    assert doctest.testmod(volume).failed == 0
