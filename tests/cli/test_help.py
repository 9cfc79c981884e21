"""`openmla --help`: at once, without torch; every command says what its list entry says."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import openmla
from openmla import __version__
from openmla.cli import COMMANDS


def ran(*arguments: str) -> str:
    program = (
        f"import sys; sys.argv = {['openmla', *arguments]!r}\n"
        "from openmla.cli import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_torch_is_not_imported(option: str) -> None:
    output = ran(option)
    assert output.split()[-1] == "False"
    assert all(name in output for name in COMMANDS) or __version__ in output


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_exists_and_its_docstring_begins_alike(name: str) -> None:
    command = COMMANDS[name]
    function = getattr(import_module(command.module), command.function)
    assert function.__doc__ and function.__doc__.split()[0] == command.help.split()[0]


def test_public_names_are_found_when_they_are_used() -> None:
    assert {name for name in openmla.__all__ if name not in dir(openmla)} == set()
    assert all(getattr(openmla, name) is not None for name in openmla.__all__)
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        openmla.attention  # noqa: B018


def test_a_cache_alone_registers_its_operators() -> None:
    program = (
        "from openmla.cache import LatentCache; import torch; "
        "LatentCache.allocate(num_pages=1, page_size=4); torch.ops.openmla.cache_append"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
