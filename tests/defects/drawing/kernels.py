"""The kernels that defects are drawn from: their sources, and the tests that `make test` has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
NOT_DRAWN = ("/jobs.py",)
"""Files that only list what is compiled ahead."""

OF_PLANS = ("plan.py", "resources.py", "family.py", "chip.py", "lds.py")
"""Files that are drawn from where they are named, not with the folder of their kernel."""
HOPPER_KERNELS = (
    "backward",
    "dense",
    "dense_fp8",
    "few",
    "indexer",
    "latent",
    "latent_fp8",
    "sparse_backward",
)
BLACKWELL_KERNELS = ("backward", "dense", "indexer", "pair", "sparse")
CDNA4_KERNELS = ("backward", "dense", "indexer", "sparse")
PORTABLE_KERNELS = ("backward", "indexer", "indexer_loss", "sparse_backward")


@dataclass(frozen=True)
class Suite:
    """A file or folder of tests; with `words`, only tests whose names have one of them."""

    path: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """Files and folders below src/openmla, and what tests them."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[Suite, ...]
    shared: tuple[str, ...] = ()
    """Files of which only what it uses is drawn from."""
    triton: str = ""
    """The folder of .tritons that is put in front, where the checkout has it."""

    def files(self, package: Path) -> list[str]:
        """Its own files below the package, sorted."""
        found: set[Path] = set()
        for source in self.sources:
            place = package / source
            inside = (path for path in place.rglob("*.py") if path.name not in OF_PLANS)
            found |= {place} if place.is_file() else set(inside)
        named = sorted(path.relative_to(package).as_posix() for path in found)
        return [file for file in named if not file.endswith(NOT_DRAWN)]


HOPPER = (
    "kernels/gluon/barriers.py",
    "kernels/gluon/boxes.py",
    "kernels/gluon/compat.py",
    "kernels/gluon/descriptors.py",
    "kernels/gluon/requests.py",
    "kernels/gluon/scores.py",
    "kernels/hopper/accumulator.py",
)
BLACKWELL = (*HOPPER, "kernels/blackwell/dequantize.py")
CDNA4 = (
    "kernels/cdna4/copies.py",
    "kernels/cdna4/layouts.py",
    "kernels/cdna4/mma_op.py",
    "kernels/cdna4/softmax.py",
    "kernels/cdna4/tiles.py",
    "kernels/gluon/requests.py",
    "kernels/gluon/scores.py",
)
GRADIENTS = tuple(
    f"kernels/gluon/gradients/{file}.py"
    for file in ("launch", "loads", "rows", "statistics", "sums", "work_items")
)
INDEXER = ("kernels/gluon/indexer_operands.py", "kernels/gluon/indexer_work.py")
RANGES = (
    "kernels/gluon/pages.py",
    "kernels/gluon/places.py",
    "kernels/gluon/ranges/launch.py",
    "kernels/gluon/ranges/merge.py",
    "kernels/gluon/ranges/rule.py",
)
"""Where the rows of a query are listed, and requests whose keys are split."""
ATTENTION = tuple(
    f"kernels/portable/{file}.py"
    for file in (
        "arguments",
        "attend",
        "dense",
        "latent",
        "launch",
        "row_block",
        "rows",
        "softmax",
        "sparse",
        "split",
        "tiles",
    )
)

LAUNCHES = (
    Suite("tests/kernels/test_launch.py"),
    Suite("tests/kernels/test_launches.py"),
    Suite("tests/kernels/test_plan_constants.py"),
    Suite("tests/kernels/test_loop_values.py"),
)
PLANS = tuple(
    Suite(f"tests/planning/test_{name}.py")
    for name in ("target", "registry", "models", "latent_split", "plan", "fuzz", "plan_json")
)


def everywhere(*words: str) -> tuple[Suite, ...]:
    """The tests that all attention kernels have together, of some of them."""
    files = ("test_far_rows.py", "test_wild_values.py", "test_boundaries.py")
    return (*LAUNCHES, *(Suite(f"tests/kernels/{file}", words) for file in files))


def indexer(family: str) -> tuple[Suite, ...]:
    """The tests of an indexer in Gluon."""
    more = {"hopper": ("three_consumers", "narrow_output", "counter")}.get(family, ())
    return (
        *LAUNCHES,
        Suite("tests/kernels/test_indexer_scores.py", (family, *more)),
        Suite("tests/kernels/test_wild_values.py", (f"scores_stay_inside_their_tensors[{family}",)),
    )


CACHED = Suite("tests/kernels/test_cached_launches.py")
HOST = (
    Kernel(
        "host.calls",
        (
            "api",
            "arithmetic.py",
            "block_scaling.py",
            "cache.py",
            "cached.py",
            "checks.py",
            "dispatch.py",
            "formats.py",
            "kept.py",
            "operands.py",
            "ops.py",
            "problem.py",
            "records.py",
            "sequences.py",
            "sources.py",
        ),
        (
            *(
                Suite(f"tests/test_{name}.py")
                for name in (
                    "api",
                    "attend",
                    "block_scaling",
                    "cached",
                    "dispatch",
                    "kept",
                    "merge",
                    "ops",
                    "problem",
                    "quantize",
                    "records",
                    "sequences",
                )
            ),
            CACHED,
            Suite("tests/cache"),
            Suite("tests/contract"),
            Suite("tests/malformed"),
        ),
    ),
    Kernel(
        "host.cpu",
        ("kernels/cpu",),
        (
            Suite("tests/kernels/cpu"),
            Suite("tests/test_attend.py"),
            Suite("tests/contract"),
            Suite("tests/backward"),
            Suite("tests/indexer"),
        ),
    ),
    Kernel(
        "host.backward",
        ("backward",),
        (
            Suite("tests/backward"),
            Suite("tests/nn/test_invariant.py"),
            Suite("tests/kernels/portable/test_sparse_backward.py"),
        ),
    ),
    Kernel(
        "host.indexer",
        ("indexer", "compressor"),
        (
            Suite("tests/indexer"),
            Suite("tests/compressor"),
            Suite("tests/malformed"),
            Suite("tests/kernels/test_cached_launches.py", ("topk", "scores", "index")),
        ),
    ),
    Kernel("host.nn", ("nn",), (Suite("tests/nn"),)),
    Kernel("host.distributed", ("distributed",), (Suite("tests/distributed"),)),
    Kernel("host.compat", ("compat",), (Suite("tests/compat"),)),
    Kernel(
        "host.transformers",
        ("integrations/transformers",),
        (Suite("tests/integrations/transformers"),),
    ),
    Kernel("host.vllm", ("integrations/vllm",), (Suite("tests/integrations/vllm"),)),
    Kernel("host.sglang", ("integrations/sglang",), (Suite("tests/integrations/sglang"),)),
)
"""Not of one kernel: calls and what they check, the CPU path, layers, ranks and engines."""
_TABLE = (
    *HOST,
    Kernel(
        "hopper.dense",
        ("kernels/hopper/dense",),
        (
            CACHED,
            Suite("tests/kernels/hopper/test_far_rows.py"),
            *everywhere("hopper dense", "shared_keys"),
            Suite("tests/kernels/hopper/dense"),
        ),
        shared=HOPPER,
    ),
    Kernel(
        "hopper.backward",
        ("kernels/hopper/backward", "kernels/gluon/gradients"),
        (*LAUNCHES, Suite("tests/kernels/hopper/backward")),
        shared=HOPPER,
    ),
    Kernel(
        "hopper.sparse_backward",
        ("kernels/hopper/sparse_backward",),
        (*LAUNCHES, Suite("tests/kernels/hopper/sparse_backward")),
        shared=HOPPER,
    ),
    Kernel(
        "hopper.dense_fp8",
        ("kernels/hopper/dense_fp8", "kernels/gluon/upcast"),
        (
            CACHED,
            *everywhere("hopper dense fp8"),
            Suite("tests/kernels/hopper/test_far_rows.py", ("dense fp8",)),
            Suite("tests/kernels/hopper/dense_fp8"),
        ),
        shared=HOPPER,
    ),
    Kernel(
        "hopper.latent",
        (
            "kernels/hopper/latent",
            "kernels/gluon/ranges",
            "kernels/gluon/pages.py",
            "kernels/gluon/places.py",
            "kernels/gluon/turning.py",
        ),
        (
            CACHED,
            Suite("tests/kernels/hopper/test_far_rows.py"),
            *everywhere("hopper pages", "hopper rows"),
            Suite("tests/kernels/test_places.py"),
            Suite("tests/planning/test_latent_split.py"),
            Suite("tests/kernels/hopper/latent"),
        ),
        shared=HOPPER,
    ),
    Kernel(
        "hopper.few",
        ("kernels/hopper/few",),
        (
            CACHED,
            *everywhere("hopper rows, few"),
            Suite("tests/kernels/hopper/few"),
            Suite("tests/kernels/hopper/test_far_rows.py"),
        ),
        shared=(*HOPPER,),
    ),
    Kernel(
        "hopper.latent_fp8",
        ("kernels/hopper/latent_fp8",),
        (
            CACHED,
            *everywhere("hopper rows, fp8 queries"),
            Suite("tests/kernels/hopper/latent_fp8"),
            Suite("tests/kernels/hopper/test_far_rows.py"),
        ),
        shared=HOPPER,
    ),
    Kernel(
        "hopper.indexer",
        ("kernels/hopper/indexer", "kernels/gluon/select"),
        (
            *indexer("hopper"),
            Suite(
                "tests/kernels/test_wild_values.py",
                ("selection_stays",),
            ),
            Suite("tests/kernels/hopper/indexer"),
        ),
        shared=(
            *INDEXER,
            *HOPPER,
        ),
    ),
    Kernel(
        "blackwell.dense",
        ("kernels/blackwell/dense",),
        (*everywhere("blackwell dense"), Suite("tests/kernels/blackwell/dense")),
        shared=BLACKWELL,
        triton="3.9.0",
    ),
    Kernel(
        "blackwell.sparse",
        ("kernels/blackwell/sparse",),
        (
            *everywhere("blackwell pages", "blackwell rows"),
            Suite("tests/kernels/blackwell/sparse"),
        ),
        shared=(*BLACKWELL, *RANGES),
    ),
    Kernel(
        "blackwell.pair",
        ("kernels/blackwell/pair",),
        (*LAUNCHES, Suite("tests/kernels/blackwell/pair")),
        shared=(*BLACKWELL, *RANGES),
        triton="3.9.0",
    ),
    Kernel(
        "blackwell.backward",
        ("kernels/blackwell/backward",),
        (*LAUNCHES, Suite("tests/kernels/blackwell/backward")),
        shared=(*BLACKWELL, *GRADIENTS),
    ),
    Kernel(
        "blackwell.indexer",
        ("kernels/blackwell/indexer",),
        (
            *indexer("blackwell"),
            Suite("tests/kernels/hopper/indexer/test_defects.py", ("blackwell",)),
        ),
        shared=(
            *INDEXER,
            *HOPPER,
        ),
    ),
    Kernel(
        "cdna4.dense",
        ("kernels/cdna4/dense",),
        (
            Suite("tests/kernels/cdna4/test_layouts.py"),
            *everywhere("cdna4 dense"),
            Suite("tests/kernels/cdna4/dense"),
        ),
        shared=CDNA4,
    ),
    Kernel(
        "cdna4.sparse",
        ("kernels/cdna4/sparse",),
        (
            Suite("tests/kernels/cdna4/test_layouts.py"),
            *everywhere("cdna4 pages", "cdna4 rows"),
            Suite("tests/kernels/cdna4/sparse"),
        ),
        shared=(*CDNA4, *RANGES),
    ),
    Kernel(
        "cdna4.backward",
        ("kernels/cdna4/backward",),
        (
            Suite("tests/kernels/cdna4/test_layouts.py"),
            Suite("tests/kernels/cdna4/backward"),
        ),
        shared=(*CDNA4, "kernels/gluon/gradients/sums.py"),
    ),
    Kernel(
        "cdna4.indexer",
        ("kernels/cdna4/indexer",),
        indexer("cdna4"),
        shared=(
            *INDEXER,
            *CDNA4,
        ),
    ),
    Kernel(
        "gluon.dequantize",
        ("kernels/gluon/dequantize",),
        (
            CACHED,
            *LAUNCHES,
            Suite("tests/kernels/hopper/latent"),
            Suite("tests/kernels/blackwell/sparse"),
        ),
        shared=HOPPER,
    ),
    Kernel(
        "portable.attention",
        (*ATTENTION, "kernels/portable/formats.py"),
        (
            *LAUNCHES,
            CACHED,
            Suite("tests/kernels/test_fallback.py"),
            Suite("tests/kernels/portable/test_interpreted.py"),
            Suite("tests/kernels/portable/test_attend.py"),
        ),
    ),
    Kernel(
        "portable.backward",
        ("kernels/portable/backward",),
        (*LAUNCHES, Suite("tests/kernels/portable/test_backward.py")),
    ),
    Kernel(
        "portable.sparse_backward",
        ("kernels/portable/sparse_backward",),
        (*LAUNCHES, Suite("tests/kernels/portable/test_sparse_backward.py")),
        shared=("kernels/portable/backward/sums.py",),
    ),
    Kernel(
        "portable.indexer_loss",
        ("kernels/portable/indexer_loss",),
        (*LAUNCHES, Suite("tests/kernels/portable/test_index_loss.py")),
        shared=("kernels/portable/backward/sums.py",),
    ),
    Kernel(
        "portable.indexer",
        ("kernels/portable/indexer",),
        (*LAUNCHES, Suite("tests/kernels/portable/test_indexer.py")),
    ),
    Kernel(
        "portable.quantize",
        ("kernels/portable/quantize.py", "kernels/portable/cache_ops.py"),
        (
            *LAUNCHES,
            Suite(
                "tests/kernels/portable/test_interpreted.py",
                ("cache", "packed", "e4m3", "quantize", "far"),
            ),
        ),
    ),
    Kernel(
        "planning.hopper",
        (
            "kernels/hopper/chip.py",
            "kernels/hopper/family.py",
            *(f"kernels/hopper/{kernel}/plan.py" for kernel in HOPPER_KERNELS),
            "kernels/gluon/select/plan.py",
            "kernels/gluon/gradients/plan.py",
            "planning/latent_split.py",
            "planning/split.py",
        ),
        (
            Suite("tests/kernels/hopper/plans"),
            *PLANS,
            *LAUNCHES,
            Suite("tests/kernels/hopper/few/test_few.py"),
            Suite("tests/explain"),
        ),
    ),
    Kernel(
        "planning.blackwell",
        (
            "kernels/blackwell/chip.py",
            "kernels/blackwell/family.py",
            "kernels/blackwell/dense/resources.py",
            *(f"kernels/blackwell/{kernel}/plan.py" for kernel in BLACKWELL_KERNELS),
            "modular/blackwell",
        ),
        (
            Suite("tests/kernels/blackwell/plans"),
            Suite("tests/modular/blackwell"),
            *PLANS,
            *LAUNCHES,
            Suite("tests/explain"),
        ),
    ),
    Kernel(
        "planning.cdna4",
        (
            "kernels/cdna4/chip.py",
            "kernels/cdna4/family.py",
            "kernels/cdna4/lds.py",
            *(f"kernels/cdna4/{kernel}/plan.py" for kernel in CDNA4_KERNELS),
            "modular/cdna4",
        ),
        (
            Suite("tests/kernels/cdna4/plans"),
            Suite("tests/modular/cdna4"),
            *PLANS,
            *LAUNCHES,
            Suite("tests/kernels/cdna4/test_layouts.py"),
            Suite("tests/explain"),
        ),
    ),
    Kernel(
        "planning.portable",
        (
            "kernels/portable/family.py",
            "kernels/portable/plan.py",
            *(f"kernels/portable/{kernel}/plan.py" for kernel in PORTABLE_KERNELS),
        ),
        (
            Suite("tests/kernels/portable/plans"),
            Suite("tests/kernels/portable/test_host.py"),
            *PLANS,
            *LAUNCHES,
            Suite("tests/explain"),
        ),
    ),
)
KERNELS = {kernel.name: kernel for kernel in _TABLE}

FAMILIES = {
    "hopper": (
        *(f"hopper.{kernel}" for kernel in HOPPER_KERNELS),
        "gluon.dequantize",
        "planning.hopper",
    ),
    "blackwell": (
        "blackwell.dense",
        "blackwell.sparse",
        "blackwell.pair",
        "blackwell.backward",
        "blackwell.indexer",
        "planning.blackwell",
    ),
    "cdna4": (
        "cdna4.dense",
        "cdna4.sparse",
        "cdna4.backward",
        "cdna4.indexer",
        "planning.cdna4",
    ),
    "portable": (
        "portable.attention",
        "portable.backward",
        "portable.sparse_backward",
        "portable.indexer",
        "portable.indexer_loss",
        "portable.quantize",
        "planning.portable",
    ),
    "host": tuple(kernel.name for kernel in HOST),
}


def family(name: str) -> Kernel:
    """All kernels of a family as one, without the tests of other families."""
    kernels = [KERNELS[kernel] for kernel in FAMILIES[name]]
    others = tuple(f"tests/kernels/{other}" for other in FAMILIES if other != name)

    def once(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
        return tuple(dict.fromkeys(part for each in parts for part in each))

    tests = once(kernel.tests for kernel in kernels)
    return Kernel(
        name,
        once(kernel.sources for kernel in kernels),
        tuple(test for test in tests if test.words or not test.path.startswith(others)),
        once(kernel.shared for kernel in kernels),
        max(kernel.triton for kernel in kernels),
    )
