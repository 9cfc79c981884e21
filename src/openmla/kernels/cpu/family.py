"""The families that need no GPU: the float64 reference and the CPU kernels. They serve all."""

from openmla.kernels.cpu.backward.plan import BACKWARD_DEFINITION, CPU_BACKWARD
from openmla.kernels.cpu.indexer.plan import CPU_INDEXER, DEFINITION
from openmla.kernels.cpu.indexer_loss.plan import CPU_LOSS, LOSS_DEFINITION
from openmla.kernels.cpu.plan import CpuConfig, plan_cpu
from openmla.kernels.cpu.sparse_backward.plan import (
    CPU_SPARSE_BACKWARD,
    SPARSE_BACKWARD_DEFINITION,
)
from openmla.planning.family import Family, Kernel
from openmla.planning.serves import (
    ANY,
    LENGTHS,
    SECOND,
    OneOf,
    Range,
    Second,
    Serves,
    either,
)
from openmla.problem import CACHE_FORMATS, DTYPE_BYTES, FORMS, MAX_HEADS, ROPE_SOURCES

_STORED = OneOf(*dict.fromkeys((*DTYPE_BYTES, *CACHE_FORMATS)))
EVERYTHING = Serves(
    {
        "form": OneOf(*FORMS),
        "heads": Range(1, MAX_HEADS),
        "d_nope": Range(1),
        "d_rope": ANY,
        "d_v": Range(1),
        "group": Range(1, MAX_HEADS),
        "q_dtype": OneOf(*DTYPE_BYTES),
        "kv_dtype": _STORED,
        "v_dtype": _STORED,
        "rope": OneOf(*ROPE_SOURCES),
        "rope_dtype": _STORED,
        "page_size": ANY,
        "topk": ANY,
        "window": ANY,
        "turned_back": ANY,
        "second": Second({**SECOND, "kv_dtype": _STORED}),
        **LENGTHS,
        **either("causal", "has_k_start", "has_topk_lengths", "has_sink", "has_q_scale", "span"),
        **either("has_k_scale", "has_key_mask", "wants_lse", "wants_max_logits", "aligned_16"),
        **either("invariant", "fp32_out"),
        "range_keys": ANY,
    }
)


REFERENCE = Family(
    name="reference",
    archs=("cpu", "gpu"),
    kernels=(
        Kernel(
            name="definition",
            serves=EVERYTHING,
            config=type(None),
            choose=lambda problem, target: None,
            launcher="openmla.reference",
            explain=lambda config, problem: ["the definition in float64, no tiling"],
        ),
        DEFINITION,
        BACKWARD_DEFINITION,
        SPARSE_BACKWARD_DEFINITION,
        LOSS_DEFINITION,
    ),
)
CPU = Family(
    name="cpu",
    archs=("cpu",),
    kernels=(
        Kernel(
            name="blocked",
            serves=EVERYTHING,
            config=CpuConfig,
            choose=lambda problem, target: plan_cpu(problem),
            launcher="openmla.kernels.cpu.launch",
        ),
        CPU_INDEXER,
        CPU_BACKWARD,
        CPU_SPARSE_BACKWARD,
        CPU_LOSS,
    ),
)
