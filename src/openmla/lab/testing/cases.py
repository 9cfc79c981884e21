"""One case generator for tests, fuzzing and benchmarks.

>>> from openmla.lab.testing.cases import build, random_case
>>> built = build(random_case(3))
>>> outcome, truth = built.run(), built.truth()
>>> outcome.out.shape == truth.out.shape
True
"""

from dataclasses import replace

from openmla.formats import V32
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.draw import HEADS, random_case
from openmla.lab.testing.shrink import shrink

__all__ = [
    "HEADS",
    "BuiltCase",
    "Case",
    "Outcome",
    "build",
    "named_cases",
    "random_case",
    "shrink",
]


def named_cases() -> dict[str, Case]:
    """Model-sized cases by name: real widths, head counts and options, a few hundred tokens.

    Too large to shrink or to fuzz, small enough for the reference in seconds; benchmarks replace
    the lengths.
    """
    v3 = Case("dense", 16, 128, 64, 128, q_lens=(48, 16), k_lens=(48, 40))
    latent = Case(
        "latent",
        16,
        512,
        64,
        512,
        q_lens=(16,),
        k_lens=(96,),
        kv="bf16",
        page_size=64,
        scale=192**-0.5,
    )
    return {
        "deepseek_v3": v3,
        "deepseek_v3_rope_cache": replace(v3, rope="cache", kv="bf16", page_size=64, spare=2),
        "deepseek_v3_fp8": replace(
            v3, heads=8, dtype="e4m3", side_dtype="bf16", q_scale=True, k_scale=True
        ),
        "glm5": Case("dense", 8, 192, 64, 256, q_lens=(32,), k_lens=(48,)),
        "glm5_next_nope": Case("dense", 8, 256, 0, 256, q_lens=(32,), k_lens=(32,), rope="none"),
        "mistral_small_4": Case("dense", 32, 64, 64, 128, q_lens=(24,), k_lens=(24,)),
        "minicpm3": Case("dense", 40, 64, 32, 64, q_lens=(24,), k_lens=(24,)),
        "deepseek_v3_latent": latent,
        "deepseek_v32_sparse": replace(
            latent,
            form="sparse",
            q_lens=(8,),
            k_lens=(512,),
            kv=V32.name,
            topk=128,
            topk_lengths="ragged",
        ),
        "deepseek_v4_sparse": replace(
            latent,
            form="sparse",
            d_nope=448,
            d_v=448,
            q_lens=(8,),
            k_lens=(256,),
            kv="plain",
            topk=128,
            index_kind="mixed",
            sink="normal",
        ),
    }
