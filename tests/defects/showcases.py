"""The cases on which seeded defects are judged, and the register of defects.

Showcases are small and named for what they contain; each runs with several seeds. A defect names
the showcases in which it makes a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from defects.blocked import Blocked
from openmla.lab.testing.case import Case

SEEDS = (1, 2, 3)
_DENSE = Case("dense", 4, 32, 16, 32, q_lens=(20, 9, 35), k_lens=(40, 9, 70))
_LONG = Case("dense", 2, 16, 8, 16, q_lens=(6,), k_lens=(700,))
_LATENT = Case(
    "latent",
    5,
    64,
    16,
    64,
    q_lens=(17, 5),
    k_lens=(50, 33),
    kv="bf16",
    page_size=8,
    spare=1,
    scale=0.1,
)
_SPARSE = Case(
    "sparse",
    4,
    32,
    8,
    32,
    q_lens=(12,),
    k_lens=(90,),
    topk=70,
    topk_lengths="ragged",
    spare=2,
    scale=0.15,
)
SHOWCASES = {
    "dense": _DENSE,
    "full": replace(_DENSE, causal=False),
    "fp16": replace(_DENSE, dtype="fp16"),
    "fp16_tiny": replace(_DENSE, dtype="fp16", values="tiny"),
    "peaky": replace(_DENSE, values="peaky"),
    "narrow": replace(_DENSE, d_v=1, values="peaky"),
    "rising": replace(_LONG, values="rising", k_lens=(90,), causal=False),
    "long": _LONG,
    "large": replace(_DENSE, values="large"),
    "exact": replace(_DENSE, values="exact", scale=0.25),
    "odd_width": replace(_DENSE, d_nope=33, d_rope=15, d_v=31),
    "rope_cache": replace(_DENSE, rope="cache", kv="bf16", page_size=8),
    "scaled": replace(_DENSE, dtype="e4m3", side_dtype="bf16", q_scale=True, k_scale=True),
    "empty": replace(_DENSE, q_lens=(6, 3, 4), k_lens=(3, 0, 5)),
    "sink": replace(_DENSE, sink="normal"),
    "sink_inf": replace(_DENSE, sink="high"),
    "fp32_out": replace(_DENSE, out="given", fp32_out=True),
    "fp32_out_fp16": replace(_LATENT, dtype="fp16", out="given", fp32_out=True),
    "grouped": replace(_DENSE, group=2, rope="per_head"),
    "window": replace(_DENSE, window=17),
    "window_of_one": replace(_DENSE, window=1),
    "window_of_one_empty": replace(_DENSE, q_lens=(6, 3, 4), k_lens=(3, 0, 5), window=1),
    "window_long": replace(_LONG, window=128),
    "window_paged": replace(_LATENT, window=17),
    "paged": _LATENT,
    "paged_from_start": replace(_LATENT, q_lens=(50, 33)),
    "paged_scaled": replace(_LATENT, k_scale=True),
    "fp8": replace(_LATENT, kv="fp8_block32"),
    "sparse": _SPARSE,
    "sparse_exact_lists": replace(_SPARSE, topk_lengths="none"),
    "sparse_duplicates": replace(_SPARSE, index_kind="duplicates", topk_lengths="none"),
    "sparse_invalid": replace(_SPARSE, index_kind="mixed", topk_lengths="none"),
    "max_logits": replace(_SPARSE, return_max_logits=True),
}


@dataclass(frozen=True)
class Defect:
    """One deliberate mistake: an implementation that differs from `Blocked` in one step."""

    name: str
    breaks: str
    shows: tuple[str, ...]
    """Showcases in which the mistake makes a difference."""
    implementation: type[Blocked]

    def cases(self) -> list[Case]:
        """The showcases with every seed."""
        return [replace(SHOWCASES[name], seed=seed) for name in self.shows for seed in SEEDS]


REGISTER: list[Defect] = []


def defect(breaks: str, *shows: str) -> Callable[[type[Blocked]], type[Blocked]]:
    """Register a class as a defect; its name becomes words."""
    if unknown := set(shows) - set(SHOWCASES):
        raise ValueError(f"unknown showcases: {sorted(unknown)}")

    def register(implementation: type[Blocked]) -> type[Blocked]:
        words = "".join(f" {c.lower()}" if c.isupper() else c for c in implementation.__name__)
        REGISTER.append(Defect(words.strip(), breaks, shows, implementation))
        return implementation

    return register
