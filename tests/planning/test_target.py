"""Targets by name and by device."""

from __future__ import annotations

import dataclasses
import doctest
from types import SimpleNamespace

import pytest

from openmla.errors import InvalidArgument
from openmla.planning import target as module
from openmla.planning.registry import families_of
from openmla.planning.target import (
    TARGETS,
    generic_target,
    target_by_name,
    target_of_device,
    target_of_properties,
)


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("name", "arch", "sm_count", "smem"),
    [
        ("h100", "sm_90", 132, 232448),
        ("h200", "sm_90", 132, 232448),
        ("b200", "sm_100", 148, 232448),
        ("mi300x", "gfx942", 304, 65536),
        ("mi355x", "gfx950", 256, 163840),
        ("a100", "sm_80", 108, 166912),
        ("l40s", "sm_89", 142, 101376),
        ("rtx4090", "sm_89", 128, 101376),
        ("rtx5090", "sm_120", 170, 101376),
    ],
)
def test_figures(name: str, arch: str, sm_count: int, smem: int) -> None:
    target = TARGETS[name]
    assert (target.arch, target.sm_count, target.smem_per_block) == (arch, sm_count, smem)
    assert target.bf16_tflops > 0 and target.hbm_gbps > 0


def test_first_families() -> None:
    first = {name: families_of(target)[0].name for name, target in TARGETS.items()}
    assert first["h100"] == first["h200"] == "hopper"
    assert (first["b200"], first["mi355x"], first["cpu"]) == ("blackwell", "cdna4", "cpu")
    others = set(TARGETS) - {"h100", "h200", "b200", "mi355x", "cpu"}
    assert {first[name] for name in others} == {"portable"}


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", " Rtx_4090 ", "rtx4090"])
def test_spelling_does_not_matter(name: str) -> None:
    assert target_by_name(name) is TARGETS["rtx4090"]


@pytest.mark.parametrize(
    ("arch", "name"), [("sm_90", "h200"), ("sm_120", "rtx5090"), ("gfx950", "mi355x")]
)
def test_an_architecture_names_its_chip(arch: str, name: str) -> None:
    assert target_by_name(arch) is TARGETS[name]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(InvalidArgument, match=r"h200.*b200.*mi355x.*got 'h9000'"):
        target_by_name("h9000")


@pytest.mark.parametrize("name", ["sm_86:0x101376", "sm_86:84x0", "sm_86:84", "gfx:1x1", ""])
def test_half_descriptions_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="target"):
        target_by_name(name)


def test_a_generic_target_is_its_name() -> None:
    target = generic_target("sm_86", 84, 101376)
    assert target_by_name(target.name) == target
    assert [family.name for family in families_of(target)] == ["portable"]
    assert target.has_bf16 and not target.has_e4m3


def properties(name: str, arch: str, sm_count: int, smem: int) -> SimpleNamespace:
    if arch.startswith("gfx"):
        return SimpleNamespace(
            name=name,
            gcnArchName=f"{arch}:sramecc+:xnack-",
            multi_processor_count=sm_count,
            shared_memory_per_block=smem,
        )
    return SimpleNamespace(
        name=name,
        gcnArchName=name,  # what torch 2.11 reports on CUDA
        major=int(arch[3:-1]),
        minor=int(arch[-1]),
        multi_processor_count=sm_count,
        shared_memory_per_block_optin=smem,
    )


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (("NVIDIA H200", "sm_90", 132, 232448), "h200"),
        (("NVIDIA H100 80GB HBM3", "sm_90", 132, 232448), "h100"),
        (("NVIDIA H100 PCIe", "sm_90", 114, 232448), "sm_90:114x232448"),
        (("NVIDIA GeForce RTX 5090", "sm_120", 170, 101376), "rtx5090"),
        (("NVIDIA GeForce RTX 3090", "sm_86", 82, 101376), "sm_86:82x101376"),
        (("AMD Instinct MI355X", "gfx950", 256, 163840), "mi355x"),
        (("AMD Instinct MI250X", "gfx90a", 104, 65536), "gfx90a:104x65536"),
        (("NVIDIA GB200", "sm_100", 152, 232448), "sm_100:152x232448"),
    ],
)
def test_devices(device: tuple[str, str, int, int], expected: str) -> None:
    target = target_of_properties(properties(*device))
    assert target.name == expected
    assert target_by_name(target.name) == target


def test_a_slice_of_a_chip_keeps_its_family() -> None:
    piece = target_of_properties(properties("H100 PCIe", "sm_90", 114, 232448))
    assert families_of(piece)[0].name == "hopper"


def test_cpu_device() -> None:
    assert target_of_device("cpu") is TARGETS["cpu"]
    with pytest.raises(InvalidArgument, match="device"):
        target_of_device("meta")


def test_targets_are_frozen_data() -> None:
    assert len({hash(target) for target in TARGETS.values()}) == len(TARGETS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TARGETS["h200"].sm_count = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm90", "h200"),
        ("SM_90a", "h200"),
        ("gfx950", "mi355x"),
        ("gh200", "h100"),
        ("GB200", "b200"),
        ("b300", "sm_103:148x232448"),
        ("mi325x", "mi300x"),
        ("MI 350X", "mi355x"),
    ],
)
def test_one_vocabulary(name: str, expected: str) -> None:
    assert target_by_name(name).name == expected


def test_a_chip_that_was_not_measured_never_stands_for_one_that_was() -> None:
    assert "h200" not in {alias.target for alias in module._ALIASES.values()}


def test_an_unknown_name_gets_a_hint() -> None:
    with pytest.raises(InvalidArgument, match=r"'h20x'; did you mean h20 or h200"):
        target_by_name("h20x")
