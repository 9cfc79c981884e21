"""Option values that several subcommands check alike, and an exit status that they share."""

import tempfile
from importlib import import_module
from pathlib import Path

import torch
import typer

from openmla.errors import InvalidArgument, MissingExtra
from openmla.planning.target import TARGETS, Target, target_by_name

GLUON_CHIPS = ("h200", "b200", "mi355x")
"""The chips with Gluon kernels of their own, which a CPU can simulate."""
INTERRUPTED = 130
"""What shells say of a command that Ctrl-C ended."""
DEVICE_HELP = "Where to run: cpu, cuda, cuda:1 …; auto: a GPU if there is one."


def require_simulator(part: str) -> None:
    """gluon-sim, which runs kernels on a CPU, is an extra."""
    try:
        import_module("gluon_sim")
    except ImportError as error:
        raise MissingExtra(part, "gluon-sim", "sim", str(error)) from error


def device_here(name: str) -> torch.device:
    """A device that this machine has; `auto` is a GPU if there is one, the CPU otherwise."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0][:80]
        raise typer.BadParameter(f"no such device here: {name} ({reason})") from None
    return device


def named_target(name: str) -> Target:
    """A chip by any of its names, as everywhere in openmla."""
    try:
        return target_by_name(name)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None


def gluon_chip(name: str, option: str) -> str:
    """The chip whose Gluon kernels a name stands for: "sm90" and "h100" are kernels of the H200."""
    chips = ", ".join(GLUON_CHIPS)
    if not name:
        raise typer.BadParameter(f"{option} needs a target: --target with one of {chips}")
    chip = named_target(name)
    for known in GLUON_CHIPS:
        if TARGETS[known].arch == chip.arch:
            return known
    raise typer.BadParameter(
        f"target: {name} is {chip.arch}, which only portable kernels serve; {option} takes {chips}"
    )


def writable_file(option: str, path: Path | None, makes_folders: bool = False) -> None:
    """Refuses a file that cannot be written: before anything runs, not when all of it has.

    `makes_folders`: whether the writer makes the folders that it is in.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise typer.BadParameter(f"{option}: {path} is a folder, not a file")
        if makes_folders:
            writable_folder(option, path.parent)
        elif not path.parent.is_dir():
            raise typer.BadParameter(f"{option}: there is no folder {path.parent}")
        there = path.exists()
        # Opening a pipe may block, and a folder may have to be made yet.
        if path.is_file() or (not there and path.parent.is_dir()):
            with path.open("ab"):
                pass
        if not there:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{option}: cannot write {path}: {error.strerror}") from None


def writable_folder(option: str, path: Path | None) -> None:
    """Refuse a folder that cannot be written; it need not exist yet."""
    if path is None:
        return
    try:
        nearest = next((folder for folder in (path, *path.parents) if folder.exists()), Path())
        if not nearest.is_dir():
            raise typer.BadParameter(f"{option}: {nearest} is a file, not a folder")
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{option}: cannot write to {path}: {error.strerror}") from None


def write_file(option: str, path: Path, text: str) -> None:
    """Write results, of which a disk may still have no room."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{option}: cannot write {path}: {error.strerror}") from None
