"""Random cases, biased to boundaries: lengths at tile edges, odd widths, empty everything.

`random_case(seed)` always gives the same case for the same seed. A case is drawn in one of four
profiles, because one distribution for all would be either too slow or too tame:

    ragged    batches of very short sequences, every option mixed in
    long_k    few queries, keys around the edges of key tiles (63 … 1025)
    long_q    queries around the edges of query tiles (15 … 257), few keys or few heads
    model     widths and head counts of real models, few tokens
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from openmla.problem import CACHE_FORMATS
from openmla.testing.case import Case

Dims = tuple[tuple[int, int, int], ...]
HEADS = (1, 4, 5, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
DENSE_DIMS: Dims = ((128, 64, 128), (192, 64, 256), (256, 0, 256), (64, 64, 128), (64, 32, 64))
"""(d_nope, d_rope, d_v) of the models in use: V3, GLM-5, GLM-5.3-Flash, Mistral 4, MiniCPM3."""
LATENT_DIMS: Dims = ((512, 64, 512), (448, 64, 448), (512, 0, 512), (256, 64, 256), (256, 32, 256))
"""(latent, d_rope, d_v): V3, V4, NoPE, Mistral Small 4, MiniCPM3."""
SMALL_DIMS: Dims = (
    (8, 4, 8),
    (16, 8, 16),
    (24, 8, 20),
    (5, 3, 7),
    (1, 1, 1),
    (33, 2, 17),
    (32, 0, 32),
)
KEY_EDGES = tuple(n + d for n in (64, 128, 256, 512, 512, 1024, 1024) for d in (-1, 0, 1))
"""The CPU kernels cut keys at 512, so that an online softmax of two blocks starts at 513."""
QUERY_EDGES = tuple(n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1))
PAGE_SIZES = (1, 2, 3, 7, 16, 32, 48, 64)
SMALL_LENGTHS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13)
COST_LIMIT = 1_500_000
"""Multiply-adds of a case: about 10 ms of float64 reference on one core."""


def random_case(seed: int) -> Case:
    """The case number `seed`.

    >>> random_case(7) == random_case(7)
    True
    """
    rng = random.Random(seed)
    form = rng.choice(("dense", "dense", "latent", "sparse"))
    profile = rng.choices(("ragged", "long_k", "long_q", "model"), weights=(46, 22, 10, 22))[0]
    fields: dict[str, Any] = {"form": form, "seed": seed}
    fields |= _dims(rng, form, profile)
    fields |= _lengths(rng, profile)
    fields |= _numbers(rng, form)
    fields |= {"dense": _dense, "latent": _latent, "sparse": _sparse}[form](rng, fields)
    fields |= _options(rng)
    if fields["values"] == "exact":
        fields["scale"] = 0.25  # products of small integers and this are exact
    return fit(Case(**fields), COST_LIMIT)


def fit(case: Case, limit: int) -> Case:
    """Cut lengths, then heads, until the case costs at most `limit`.

    >>> case = Case("dense", 128, 128, 64, 128, q_lens=(64,), k_lens=(64,))
    >>> fit(case, 3_000_000).cost
    2621440
    """
    while case.cost > limit:
        if case.form == "sparse" and case.topk > 8 and case.heads <= 8:
            case = replace(case, topk=case.topk * 3 // 4)
        elif max(case.k_lens) > 40 and max(case.q_lens) > 40 and case.heads > 2:
            case = replace(case, k_lens=tuple(k // 2 for k in case.k_lens))
        elif max(case.q_lens) > 3:
            case = replace(case, q_lens=tuple(min(q, max(case.q_lens) // 2) for q in case.q_lens))
        elif case.form != "sparse" and max(case.k_lens) > 8 and case.heads <= 8:
            case = replace(case, k_lens=tuple(min(k, max(case.k_lens) // 2) for k in case.k_lens))
        elif case.heads > 1:
            case = replace(case, heads=case.heads // 2)
        elif case.form == "sparse":
            case = replace(case, topk=case.topk // 2)
        else:
            case = replace(case, k_lens=tuple(k // 2 for k in case.k_lens))
    return case


def _dims(rng: random.Random, form: str, profile: str) -> dict[str, Any]:
    if profile == "model":
        table = DENSE_DIMS if form == "dense" else LATENT_DIMS
        heads = rng.choice(HEADS)
    else:
        table = SMALL_DIMS
        # Long queries over many heads: kernels that group heads then have several groups.
        choices = {"long_k": (1, 2, 4), "long_q": (1, 2, 5, 10, 12, 16, 20)}
        heads = rng.choice(choices.get(profile, (1, 1, 2, 3, 4, 5, 8)))
    d_nope, d_rope, d_v = rng.choice(table)
    if form != "dense":
        d_v = min(d_v, d_nope)
        if rng.random() < 0.1:
            d_v = max(d_v // 2, 1)  # V may be narrower than the latent
    return {"heads": heads, "d_nope": d_nope, "d_rope": d_rope, "d_v": d_v}


def _lengths(rng: random.Random, profile: str) -> dict[str, Any]:
    if profile == "long_k":
        batch = rng.choice((1, 1, 2))
        q_lens = [rng.choice((1, 1, 2, 3, 5)) for _ in range(batch)]
        k_lens = [rng.choice(KEY_EDGES) for _ in range(batch)]
    elif profile == "long_q":
        q_lens = [rng.choice(QUERY_EDGES)]
        near = max(q_lens[0] + rng.choice((-40, -1, 0, 1, 30)), 0)
        k_lens = [rng.choice((near, 1, 5, 17))]
    else:
        batch = rng.choice((0, 1, 1, 2, 3, 4)) if profile == "ragged" else rng.choice((1, 1, 2))
        q_lens = [rng.choice(SMALL_LENGTHS) for _ in range(batch)]
        k_lens = [_key_length(rng, q) for q in q_lens]
    return {"q_lens": tuple(q_lens), "k_lens": tuple(k_lens)}


def _key_length(rng: random.Random, q_len: int) -> int:
    """As long as the queries, longer (a cached prefix), shorter (early rows are empty), or 0."""
    kind = rng.choice(("same", "same", "longer", "longer", "shorter", "none"))
    if kind == "longer":
        return q_len + rng.choice((1, 2, 5, 16, 31, 33))
    return {"same": q_len, "shorter": q_len // 2, "none": 0}[kind]


def _numbers(rng: random.Random, form: str) -> dict[str, Any]:
    dtype = rng.choices(("bf16", "fp16", "fp32", "e4m3"), weights=(5, 2, 2, 2))[0]
    side = rng.choice(("", "bf16", "fp16")) if dtype == "e4m3" and form == "dense" else ""
    kinds = ("normal", "peaky", "rising", "tiny", "large", "equal", "exact")
    return {
        "dtype": dtype,
        "side_dtype": side,
        "values": rng.choices(kinds, weights=(8, 3, 2, 2, 2, 1, 2))[0],
    }


def _dense(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    scale = rng.choice((None, None, None, 0.25, 1.0, -0.5, 0.0))
    if fields["d_rope"] == 0:
        return {"rope": "none", "scale": scale}
    rope = rng.choice(("shared", "shared", "shared_3d", "per_head", "cache"))
    kv = "plain"
    if rope == "cache":
        formats = [f for f in CACHE_FORMATS if f != "fp8_656" or fields["d_rope"] == 64]
        kv = rng.choice(formats)
    return {"rope": rope, "kv": kv, "scale": scale, "page_size": rng.choice(PAGE_SIZES)}


def _latent(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv": _row_format(rng, fields),
        "page_size": rng.choice(PAGE_SIZES),
        "scale": _latent_scale(rng, fields),
    }


def _sparse(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    pool = sum(fields["k_lens"])
    topk = rng.choice((0, 1, 2, 5, 16, 31, 63, 64, 65, 100, 127, 128, 129))
    if rng.random() < 0.15:
        topk = rng.choice((511, 512, 513, 1023, 1025, 1100))
    return {
        "kv": _row_format(rng, fields) if rng.random() < 0.6 else "plain",
        "page_size": rng.choice(PAGE_SIZES),
        "scale": _latent_scale(rng, fields),
        "topk": topk,
        "index_kind": rng.choices(
            ("distinct", "duplicates", "mixed", "invalid"), weights=(4, 3, 5, 1)
        )[0] if pool else "invalid",
        "topk_lengths": rng.choice(("none", "full", "ragged", "ragged", "wild")),
        "return_max_logits": rng.random() < 0.4,
    }  # fmt: skip


def _row_format(rng: random.Random, fields: dict[str, Any]) -> str:
    v32 = (fields["d_nope"], fields["d_rope"]) == (512, 64)
    formats = [f for f in CACHE_FORMATS if f != "fp8_656"]
    # The V3.2 row exists at one width only: where it can be drawn, it is drawn often.
    return rng.choice(("plain", *formats, *(["fp8_656"] * (6 if v32 else 0))))


def _latent_scale(rng: random.Random, fields: dict[str, Any]) -> float:
    natural = round(float((fields["d_nope"] + fields["d_rope"]) ** -0.5), 4)
    return rng.choice((natural, natural, natural, 0.1, 0.02, -0.05))


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "spare": rng.choice((0, 0, 1, 3)),
        "causal": rng.random() < 0.7,
        "sink": rng.choices(("none", "normal", "low", "high", "mixed"), weights=(6, 3, 1, 1, 2))[0],
        "q_scale": rng.random() < 0.25,
        "k_scale": rng.random() < 0.25,
        "return_lse": rng.random() < 0.8,
        "layout": rng.choice(("contiguous", "strided", "strided")),
        "out": rng.choice(("fresh", "given", "strided")),
    }
