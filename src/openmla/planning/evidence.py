"""How a kernel is known to work on a chip, in one of three words. This is the one place for them.

measured    it ran on that chip, was compared with float64 there, and a result file says so
simulated   compiled for that chip, run in the simulator, its compiled code executed on a CPU; it
            has never run on the chip itself
portable    plain Triton for any GPU: compiled for the chip, not tuned on it

A new kernel is "simulated" until a result file is named here.

>>> word_of("hopper", "dense", "h200"), word_of("hopper", "dense", "h100")
('measured', 'simulated')
>>> word_of("blackwell", "dense", "b200"), word_of("portable", "tiled", "a100")
('simulated', 'portable')
>>> word_of("portable", "select_gluon", "a100")
'simulated'
"""

from collections.abc import Collection
from typing import Literal, get_args

from openmla.backward.problem import BackwardProblem
from openmla.formats import V41, V41_FP4, V41_FP4_SPLIT, V41_SPLIT
from openmla.planning.problems import AnyProblem
from openmla.planning.target import target_by_name

Word = Literal["measured", "simulated", "portable"]
WORDS: tuple[Word, ...] = get_args(Word)
MEANING: dict[Word, str] = {
    "measured": "it ran on this chip, and was compared with float64 there",
    "simulated": "compiled for this chip, run in a simulator, its code executed on a CPU; "
    "never on the chip itself",
    "portable": "plain Triton for any GPU, compiled for this chip, not tuned on it",
}
WINDOW = "window"
TURNED_BACK = "results that are turned back"
WIDE_GRADIENTS = "gradients of 256 columns"
WIDE_V = 256
V41_ROWS = tuple(rows.name for rows in (V41, V41_SPLIT, V41_FP4, V41_FP4_SPLIT))
MEASURED = {
    ("hopper", "dense", "h200"): "hopper-dense-h200-2026-11-16.json",
    ("hopper", "dense_fp8", "h200"): "hopper-dense-fp8-h200-2026-11-16.json",
    ("hopper", "latent", "h200"): "hopper-sparse-h200-2026-11-15.json",
    ("hopper", "sparse", "h200"): "hopper-sparse-h200-2026-11-16.json",
    ("hopper", "sparse_fp8", "h200"): "hopper-fp8-queries-h200-2026-11-16.json",
    ("hopper", "sparse_fp8_cache", "h200"): "validate-h200-2026-11-16.json",
    ("hopper", "latent_fp8_cache", "h200"): "validate-h200-2026-11-16.json",
    ("hopper", "attend", "h200"): "peers-all-h200-2026-11-18.json",
    ("hopper", "backward", "h200"): "backward-h200-2026-11-18.json",
    ("hopper", "sparse_backward", "h200"): "sparse-backward-h200-2026-11-18.json",
    ("hopper", "scores", "h200"): "peers-h200-2026-11-18.json",
    ("hopper", "select", "h200"): "indexer-h200-2026-11-16.json",
}
"""Family, kernel and chip -> the file of benchmarks/results that shows it."""
NEVER_RUN = {
    ("hopper", "sparse", "fp8_584"),
    ("hopper", "latent", "fp8_584"),
    ("hopper", "backward", WIDE_GRADIENTS),
    ("hopper", "attend", TURNED_BACK),
    # On the chip, pools of these rows were dequantized whole; since then the kernels read them.
    *(("hopper", kernel, rows) for kernel in ("attend", "latent", "sparse") for rows in V41_ROWS),
}
"""Family, kernel and a form of problem that a measured kernel serves, but did not when it ran. Of
the others, gpu-tests-h200-2026-11-19.json says which tests ran on the chip."""
GLUON = {("portable", "select_gluon")}
"""Kernels of the portable family that are not plain Triton."""
FOLLOWS = {
    ("blackwell", "dense"): "MLAConfig",
    ("blackwell", "dense_pair"): "MLAConfig",
    ("blackwell", "dense_fp8"): "MLAConfig",
    ("blackwell", "dense_no_rope"): "FA4Config",
    ("blackwell", "dense_no_rope_fp8"): "FA4Config",
    ("blackwell", "sparse"): "MLAPrefillSparse",
    ("blackwell", "sparse_pair"): "MLAPrefillSparse",
    ("blackwell", "sparse_fp8"): "MLAPrefillSparse",
    ("blackwell", "sparse_fp8_rows"): "MLAPrefillSparse",
    ("blackwell", "sparse_fp8_rows_pair"): "MLAPrefillSparse",
    ("cdna4", "dense"): "MlaConfigV2 and MlaMmaOp",
    ("cdna4", "dense_fp8"): "MlaConfigV2 and MlaMmaOp",
    ("cdna4", "dense_8"): "MlaConfigV2 and MlaMmaOp",
}
"""Family and kernel -> the system of Modular's kernels (docs/modular.md) that it follows."""


def forms_of(problem: AnyProblem) -> frozenset[str]:
    """What a problem asks for that a kernel may have learned after it was measured: the types of
    the rows or index keys that it reads, a window, results that are turned back, and gradients of
    V with 256 columns.

    >>> from openmla.problem import Problem, RowSource
    >>> sizes = {"heads": 16, "d_nope": 512, "d_rope": 0, "d_v": 512}
    >>> sorted(forms_of(Problem("sparse", **sizes, second=RowSource(kv_dtype="fp8_584"))))
    ['bf16', 'fp8_584']
    >>> sorted(forms_of(Problem("latent", **sizes, page_size=64, window=128)))
    ['bf16', 'window']
    """
    rows = {str(source.kv_dtype) for source in getattr(problem, "sources", ())}
    rows |= {key for key in [getattr(problem, "key_dtype", "")] if key}
    if getattr(problem, "window", 0):
        rows.add(WINDOW)
    if getattr(problem, "turned_back", 0):
        rows.add(TURNED_BACK)
    if isinstance(problem, BackwardProblem) and problem.d_v == WIDE_V:  # GLM-5
        rows.add(WIDE_GRADIENTS)
    return frozenset(rows)


def word_of(family: str, kernel: str, target: str, forms: Collection[str] = ()) -> Word:
    """The word for a kernel on a chip; `forms`: those of a problem."""
    if family in ("portable", "reference") and (family, kernel) not in GLUON:
        return "portable"
    if family == "cpu":  # where tests run, every one of them
        return "measured"
    if any((family, kernel, form) in NEVER_RUN for form in forms):
        return "simulated"
    return "measured" if (family, kernel, target) in MEASURED else "simulated"


def meaning_of(family: str, kernel: str, target: str, forms: Collection[str] = ()) -> str:
    """What the word says of this kernel on this chip."""
    if family == "reference":
        return "the definition itself, in float64: slow, and right wherever torch runs"
    word = word_of(family, kernel, target, forms)
    arch = target_by_name(target).arch
    relatives = [
        chip
        for (name, one, chip) in MEASURED
        if (name, one) == (family, kernel) and chip != target and target_by_name(chip).arch == arch
    ]
    if relatives:
        return f"never run on this chip; measured on an {relatives[0].upper()}, {arch} too"
    return MEANING[word]


def follows(family: str, kernel: str) -> str:
    """The design that a kernel follows, in a few words."""
    system = FOLLOWS.get((family, kernel))
    return f"after Modular's {system}" if system else "openmla's own design"
