"""The key of a compile report: the same in every process, other whenever the code is."""

import importlib.util
import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.call import Call
from openmla.lab.compiling.jobs import CompileJob, job_key
from openmla.lab.compiling.key import stable_key

CONSTANTS = """
from triton.experimental.gluon import language as gl

WARPS = 4
SHIFT = gl.constexpr(7)
"""
KERNEL = """
import key_constants as constants
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

FACTOR = gl.constexpr(3)
UNUSED = gl.constexpr(5)
COUNTS = ["n"]


@gluon.constexpr_function
def half(n):
    return n // 2


@gluon.constexpr_function
def threads(n):
    return half(n) * 2


@aggregate
class Window:
    base: gl.tensor

    @gluon.constexpr_function
    def __init__(self, base):
        self.base = base

    @gluon.jit
    def place(self):
        return self.base + 1


@gluon.jit
def scaled(i):
    return i * FACTOR


@gluon.jit
def shifted(i, BY: gl.constexpr = 1):
    # Words that are no code.
    return scaled(i) + constants.SHIFT + BY


@gluon.jit(do_not_specialize=COUNTS)
def kernel(o_ptr, n):
    UNUSED: gl.constexpr = 128
    i = gl.arange(0, UNUSED, gl.BlockedLayout([1], [threads(32)], [constants.WARPS], [0]))
    gl.store(o_ptr + i + Window(n).place(), shifted(i))
"""
numbers = itertools.count()


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Makes the two modules, with replacements in their source. Names, as a package's, stay."""

    def module(name, source):
        path = tmp_path / f"{name}_{next(numbers)}.py"  # another file: no stale byte code
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    def made(before="", after=""):
        assert before in CONSTANTS + KERNEL
        module("key_constants", CONSTANTS.replace(before, after) if before else CONSTANTS)
        return module("key_kernel", KERNEL.replace(before, after) if before else KERNEL)

    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("gl.store(o_ptr + i", "gl.store(o_ptr + 1 + i"),
        ("return i * FACTOR", "return FACTOR * i * 2"),
        ("FACTOR = gl.constexpr(3)", "FACTOR = gl.constexpr(4)"),
        ("FACTOR = gl.constexpr(3)", "FACTOR = gl.constexpr(3.0)"),
        ("SHIFT = gl.constexpr(7)", "SHIFT = gl.constexpr(8)"),
        ("WARPS = 4", "WARPS = 2"),
        ("return half(n) * 2", "return half(n) + 2"),
        ("return n // 2", "return n // 4"),
        ("BY: gl.constexpr = 1", "BY: gl.constexpr = 2"),
        ('COUNTS = ["n"]', "COUNTS = []"),
        ("@gluon.jit\ndef scaled", "@gluon.jit(noinline=True)\ndef scaled"),
        ("return self.base + 1", "return self.base + 2"),
        ("self.base = base\n", "self.base = base + 0\n"),
        ("base: gl.tensor", "base: gl.constexpr"),
        ("return half(n) * 2", "return half((n,)[0]) * 2"),
    ],
)
def test_the_key_changes_with_what_the_compiler_sees(load, before, after):
    assert stable_key(load().kernel) != stable_key(load(before, after).kernel)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@gluon.jit\ndef scaled", "\n\n# More words.\n\n@gluon.jit\ndef scaled"),
        ("    # Words that are no code.\n", "\n    # Others,\n    # and more.\n\n"),
        ("def scaled(i):\n", 'def scaled(i):  # why\n    """In\n\n    words."""\n'),
        ("class Window:\n", 'class Window:\n    """In words."""\n\n'),
        ("UNUSED = gl.constexpr(5)", "UNUSED = gl.constexpr(6)"),
        ("COUNTS = ", "OTHERS = [1]\nCOUNTS = "),
        ("shifted(i))\n", "shifted(\n            i,\n        ),\n    )\n"),
        ("return i * FACTOR", "return i*FACTOR"),
    ],
)
def test_the_key_does_not_change_with_anything_else(load, before, after):
    first, second = load().kernel, load(before, after).kernel
    assert stable_key(first) == stable_key(second)


def test_a_moved_function_has_another_key_of_tritons(load):
    """Why there is a key of our own: theirs follows the line number."""
    first, second = load().kernel, load("COUNTS = ", "\n\nCOUNTS = ").kernel
    assert first.cache_key != second.cache_key
    assert stable_key(first) == stable_key(second)


def in_a_process(statements: str, folder) -> tuple[str, str]:
    """Our key and Triton's after these statements."""
    program = """
        import sys
        import torch
        from openmla.lab.compiling.jobs import CompileJob, job_key
        from openmla.kernels.call import Call
        {statements}
        from key_kernel import kernel
        call = Call(kernel, 1, dict(o_ptr=torch.zeros(256, dtype=torch.int32), n=100))
        print(job_key(CompileJob("k", call, "sm90")), kernel.cache_key)
    """
    program = textwrap.dedent(program).format(statements=statements)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    ours, theirs = done.stdout.split()
    return ours, theirs


def test_history_and_imports_do_not_matter(tmp_path):
    (tmp_path / "key_constants.py").write_text(CONSTANTS)
    (tmp_path / "key_kernel.py").write_text(KERNEL)
    fresh = in_a_process("", tmp_path)
    hashed = in_a_process(
        "import key_kernel, openmla.kernels.gluon.scores; key_kernel.scaled.cache_key; "
        "key_kernel.shifted.cache_key",
        tmp_path,
    )
    assert fresh[0] == hashed[0]
    if triton.__version__.startswith("3.6."):  # it forgets the constants of a callee's callee
        assert fresh[1] != hashed[1]


def test_functions_made_alike_differ_by_what_they_enclose():
    def made(number):
        constant = gl.constexpr(number)

        @gluon.jit
        def inner(o_ptr):
            gl.store(o_ptr, constant)

        return inner

    assert stable_key(made(1)) == stable_key(made(1))
    assert stable_key(made(1)) != stable_key(made(2))


def test_a_function_given_as_a_constexpr_is_read_too(load):
    @gluon.jit
    def applied(o_ptr, BODY: gl.constexpr):
        gl.store(o_ptr, BODY(1))

    out = torch.zeros(1, dtype=torch.int32)

    def key(module):
        given = {"o_ptr": out, "BODY": module.scaled}
        return job_key(CompileJob("k", Call(applied, 1, given), "sm90"))

    assert key(load()) == key(load())
    assert key(load()) != key(load("return i * FACTOR", "return FACTOR"))


def test_a_function_may_call_itself():
    @gluon.constexpr_function
    def total(n):
        return n + total(n - 1) if n > 0 else 0

    assert stable_key(total) == stable_key(total)


def test_values_have_keys_and_objects_without_a_stable_one_are_refused():
    assert stable_key({"b": 1, "a": (True, None)}) == stable_key({"a": (True, None), "b": 1})
    assert stable_key({3, 1}) == "set(1, 3)"
    assert stable_key([1]) != stable_key((1,))
    with pytest.raises(TypeError, match="another in every process"):
        stable_key(object())
