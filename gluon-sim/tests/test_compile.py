"""Every test kernel compiles for its target, with whichever Triton runs these tests."""

import pytest
import triton

from compiling import compiled
from launches import CASES
from toys import language

pytestmark = pytest.mark.compile

# Beside the buffers a kernel allocates, the compiler needs a little shared memory of its own:
# layout conversions, reductions, the state of warp specialization, padding.
SCRATCH = 1024


@pytest.mark.parametrize("name", CASES)
def test_memory_is_as_simulated(name):
    launch = CASES[name]()
    if not launch.compiles:
        pytest.skip(f"Triton {triton.__version__} does not compile it")
    made, simulated = launch.compile().metadata, launch.run()
    assert simulated.shared_bytes <= made.shared <= simulated.shared_bytes + SCRATCH
    if simulated.tmem_columns:
        assert simulated.tmem_columns <= made.tmem_size < 2 * simulated.tmem_columns + 32


@pytest.mark.parametrize("name", ["record", "halves", "sums", "carried"])
def test_kernels_about_the_language_compile(name):
    kernel = getattr(language, name)
    types = {n: "*i32" if n == "o_ptr" else "i32" for n in kernel.arg_names}
    assert "ptx" in compiled(kernel, types, {}, "sm90").asm
