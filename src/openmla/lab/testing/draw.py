"""Random cases, biased to boundaries: lengths at tile edges, odd widths, empty everything.

`random_case(seed)` always gives the same case for the same seed, on every device. A case is drawn
in one of five profiles, because one distribution for all would be either too slow or too tame:

    widths    any width from 1 to 576, each drawn by itself, any head count from 1 to 128
    ragged    batches of very short sequences, every option mixed in
    long_k    few queries, keys around the edges of key tiles (63 … 1025)
    long_q    queries around the edges of query tiles (15 … 257), few keys or few heads
    model     widths and head counts of real models, few tokens
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openmla.formats import FORMATS
from openmla.lab.testing.case import Case, CaseSource

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
MOST_WIDTH, NARROW, MOST_HEADS = 576, 32, 128
MODEL_WIDTHS = (32, 64, 128, 192, 256, 448, 512)
KEY_EDGES = tuple(n + d for n in (16, 64, 128, 256, 512, 512, 1024, 1024) for d in (-1, 0, 1))
"""The CPU kernels cut keys at 512, so that an online softmax of two blocks starts at 513."""
QUERY_EDGES = tuple(n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1))
PAGE_SIZES = (1, 2, 3, 7, 16, 32, 48, 64, 64, 128, 1024)
SMALL_LENGTHS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 13)
TILE_LENGTHS = (1, 1, 2, 3, 5, 7, 15, 16, 17, 33, 64, 65, 128, 129, 257, 513)
"""What of them fits is drawn beside random widths; many are one more than a tile has."""
TOPKS = (0, 1, 2, 5, 16, 31, 63, 64, 65, 100, 127, 128, 129)
VARIANT_STEP = 1_000_003
COST_LIMIT = 1_500_000
"""Multiply-adds of a case: about 10 ms of float64 reference on one core."""
MASKED = 0.2
"""Share of dense cases with a key_mask."""
WINDOWED = 0.15
"""Share of causal dense and latent cases with a window."""
FP32_OUT = 0.15
"""Share of cases with a given `out`, beside narrower queries, where it is fp32."""
GROUPED = 0.1
"""Share of dense cases of several heads with fewer heads of K and V."""
ATTENDS = 0.15
"""Share of cases that are calls of mla_attend."""
TURNED = 0.4
"""Share of those whose results are turned back; all of one list."""
BROKEN = 0.1
"""Share of those with NaN and Inf in rows that are seen."""
PROFILES = {"widths": 45, "ragged": 26, "long_k": 12, "long_q": 6, "model": 11}
"""How often each is drawn, in percent."""


def random_case(seed: int) -> Case:
    """The case number `seed`.

    >>> random_case(7) == random_case(7)
    True
    """
    attends = random.Random(f"attend {seed}")  # numbers of their own, as windows have
    if attends.random() < ATTENDS:
        return _attend(attends, seed)
    rng = random.Random(seed)
    form = rng.choice(("dense", "dense", "latent", "sparse"))
    profile = rng.choices(tuple(PROFILES), weights=tuple(PROFILES.values()))[0]
    fields: dict[str, Any] = {"form": form, "seed": seed}
    if profile == "widths":
        fields |= _any_dims(rng, form)
        fields |= _lengths_within(rng, fields)
    else:
        fields |= _dims(rng, form, profile)
        fields |= _lengths(rng, profile)
    fields |= _numbers(rng, form)
    fields |= {"dense": _dense, "latent": _latent, "sparse": _sparse}[form](rng, fields)
    fields |= _options(rng)
    if form == "dense" and rng.random() < MASKED:
        fields["key_mask"] = rng.choice(("half", "half", "few", "all"))
    fields |= _window(seed, fields)
    if fields["values"] == "exact":
        fields["scale"] = 0.25  # products of small integers and this are exact
    return _with_fp32(_grouped(fit(Case(**fields), COST_LIMIT)))


def _attend(rng: random.Random, seed: int) -> Case:
    """A call of mla_attend over one or two sources of any formats that exist at its widths."""
    d_nope, d_rope = rng.choices(
        ((512, 0), (512, 64), (448, 64), (max(_width(rng), 2), rng.choice((0, 64, _width(rng))))),
        weights=(6, 2, 1, 3),
    )[0]
    d_v = d_nope if rng.random() < 0.85 else rng.randint(2, d_nope)
    heads = rng.choice((rng.randint(1, 4), rng.randint(1, MOST_HEADS), rng.choice(HEADS)))
    sources = tuple(drawn_source(rng, d_nope, d_rope, TOPKS) for _ in range(rng.choice((1, 2, 2))))
    fields: dict[str, Any] = {
        "form": "sparse",
        "seed": seed,
        "heads": heads,
        "d_nope": d_nope,
        "d_rope": d_rope,
        "d_v": d_v,
        "q_lens": (rng.choice((0, 1, 1, 2, 3, 5, 9)),),
        "k_lens": (0,),
        "sources": sources,
        "turned": drawn_turn(rng, sources, d_v),
    }
    fields |= _numbers(rng, "sparse") | _options(rng) | {"q_scale": False, "k_scale": False}
    fields["scale"] = _latent_scale(rng, fields)
    if rng.random() < BROKEN:
        fields["values"] = "broken"
    if fields["values"] == "exact":
        fields["scale"] = 0.25
    return _with_fp32(fit(Case(**fields), COST_LIMIT))


def drawn_source(
    rng: random.Random, d_nope: int, d_rope: int, most: Sequence[int], kv: str = ""
) -> CaseSource:
    """A list or a span, of a format (drawn unless given) that exists at these widths; of as many
    rows as one of `most`, or of what a query of it may see, or far more."""
    kind = rng.choice(("list", "span"))
    if not kv:
        formats = [name for name, format in FORMATS.items() if format.takes(d_nope, d_rope)]
        kv = rng.choice(formats if kind == "span" else [*formats, "plain"])
    if kind == "span" and kv == "plain":
        kv = "bf16"
    topk = rng.choice(most)
    rows = max(rng.choice((1, topk, topk, topk + 1, 2 * topk, topk // 2)), 0)
    kinds = ("distinct", "duplicates", "mixed", "invalid")
    index_kind = rng.choices(kinds, weights=(3, 3, 5, 1))[0]
    lengths = rng.choice(("none", "full", "ragged", "ragged", "wild")) if kind == "list" else "none"
    return CaseSource(
        kind,
        kv,
        rng.choice(PAGE_SIZES),
        topk,
        rows,
        index_kind if rows else "invalid",
        lengths,
    )


def drawn_turn(rng: random.Random, sources: Sequence[CaseSource], d_v: int) -> int:
    """Columns that are turned back: often 64, as models have; always some where one list is all."""
    one_list = [source.kind for source in sources] == ["list"]
    pairs = min(rng.choice((32, 32, 32, 1, d_v // 2, rng.randint(1, 32))), d_v // 2)
    return 2 * pairs if one_list or rng.random() < TURNED else 0


def _with_fp32(case: Case) -> Case:
    """Some cases that are given an `out` get one of fp32; by numbers of their own, as a window."""
    rng = random.Random(f"fp32 out {case.seed}")
    given = case.out != "fresh" and case.dtype != "fp32"
    return replace(case, fp32_out=True) if given and rng.random() < FP32_OUT else case


def _grouped(case: Case) -> Case:
    """Some dense cases with fewer heads of K and V; by numbers of its own, as a window."""
    rng = random.Random(f"group {case.seed}")
    divisors = [n for n in range(2, case.heads + 1) if case.heads % n == 0]
    if case.form != "dense" or not divisors or rng.random() >= GROUPED:
        return case
    return replace(case, group=rng.choice(divisors))


def _window(seed: int, fields: dict[str, Any]) -> dict[str, Any]:
    """A window at an edge of blocks or of the keys, for some causal cases. It has numbers of its
    own: other cases are what they were before there were windows."""
    rng = random.Random(f"window {seed}")
    if fields["form"] == "sparse" or not fields["causal"] or rng.random() >= WINDOWED:
        return {}
    longest = max(fields["k_lens"], default=1) or 1
    edges = (1, 2, 15, 16, 17, 127, 128, 129, longest, longest + 1, rng.randint(1, longest))
    return {"window": rng.choice(edges)}


def varied(case: Case, number: int) -> Case:
    """Variant `number` of a case: other lengths and numbers for the same compiled kernels.

    On a GPU most of the time goes into compiling, which variants share. Variant 0 is the case.

    >>> case = random_case(4)
    >>> again = varied(case, 1)
    >>> (again.d_nope, again.d_v, again.kv) == (case.d_nope, case.d_v, case.kv), again == case
    (True, False)
    """
    if number == 0:
        return case
    rng = random.Random(f"{case.seed} {number}")
    if case.sources:
        return _varied_sources(case, number, rng)
    shape = {name: getattr(case, name) for name in ("form", "heads", "d_nope", "d_rope", "d_v")}
    fields = _lengths_within(rng, shape)
    fields |= {"seed": case.seed + number * VARIANT_STEP, "spare": rng.choice((0, 0, 1, 3))}
    if case.values != "exact":  # which needs a scale of its own
        fields["values"] = rng.choice(("normal", "peaky", "rising", "tiny", "large", "equal"))
    if case.sink != "none":
        fields["sink"] = rng.choice(("normal", "low", "high", "mixed"))
    if case.key_mask != "none":
        fields["key_mask"] = rng.choice(("half", "few", "all"))
    if case.topk_lengths != "none":
        fields["topk_lengths"] = rng.choice(("full", "ragged", "wild"))
    if case.form == "sparse":
        kinds = ("distinct", "duplicates", "mixed") if sum(fields["k_lens"]) else ("invalid",)
        fields["index_kind"] = rng.choice(kinds)
    return fit(replace(case, **fields), COST_LIMIT)


def _varied_sources(case: Case, number: int, rng: random.Random) -> Case:
    """Other queries, rows and numbers over sources of the same kinds, formats and pages."""
    sources = []
    for source in case.sources:
        drawn = drawn_source(rng, case.d_nope, case.d_rope, TOPKS, source.kv)
        lengths = rng.choice(("full", "ragged", "wild"))
        kept: dict[str, Any] = {"kind": source.kind, "page_size": source.page_size}
        kept["topk_lengths"] = "none" if source.topk_lengths == "none" else lengths
        sources.append(replace(drawn, kv=source.kv, **kept))
    fields: dict[str, Any] = {"q_lens": (rng.choice((1, 2, 3, 5, 9)),), "sources": tuple(sources)}
    fields |= {"seed": case.seed + number * VARIANT_STEP, "spare": rng.choice((0, 0, 1, 3))}
    if case.values not in ("exact", "broken"):
        fields["values"] = rng.choice(("normal", "peaky", "rising", "tiny", "large", "equal"))
    if case.sink != "none":
        fields["sink"] = rng.choice(("normal", "low", "high", "mixed"))
    return fit(replace(case, **fields), COST_LIMIT)


def fit(case: Case, limit: int) -> Case:
    """Cut lengths, then heads, until the case costs at most `limit`.

    >>> case = Case("dense", 128, 128, 64, 128, q_lens=(64,), k_lens=(64,))
    >>> fit(case, 3_000_000).cost
    2621440
    """
    while case.cost > limit:
        if case.sources:
            case = _with_less(case)
        elif case.form == "sparse" and case.topk > 8 and case.heads <= 8:
            case = replace(case, topk=case.topk * 3 // 4)
        elif max(case.k_lens) > 40 and max(case.q_lens) > 40 and case.heads > 2:
            case = replace(case, k_lens=tuple(k // 2 for k in case.k_lens))
        elif max(case.q_lens) > 3:
            case = replace(case, q_lens=tuple(min(q, max(case.q_lens) // 2) for q in case.q_lens))
        elif case.form != "sparse" and max(case.k_lens) > 8 and case.heads <= 8:
            case = replace(case, k_lens=tuple(min(k, max(case.k_lens) // 2) for k in case.k_lens))
        elif case.heads > 1:
            case = replace(case, heads=case.heads // 2, group=1)
        elif case.form == "sparse":
            case = replace(case, topk=case.topk // 2)
        else:
            case = replace(case, k_lens=tuple(k // 2 for k in case.k_lens))
    return case


def _with_less(case: Case) -> Case:
    """A call of mla_attend that costs less: fewer heads, queries, then rows; of every third seed
    fewer queries, rows, then heads."""
    most = max(source.topk for source in case.sources)
    if case.heads > 8 and (case.seed % 3 or (case.total_q == 1 and most < 8)):
        return replace(case, heads=case.heads // 2)
    if case.total_q > 2 or (case.total_q == 2 and case.heads > 8):
        return replace(case, q_lens=(case.total_q // 2,))
    sources = tuple(replace(source, topk=source.topk * 3 // 4) for source in case.sources)
    return replace(case, sources=sources)


def has_listed_widths(case: Case) -> bool:
    """Whether the widths are from a table above; all others are random.

    >>> has_listed_widths(Case("dense", 1, 128, 64, 128)), has_listed_widths(random_case(4))
    (True, False)
    """
    table = (*(DENSE_DIMS if case.form == "dense" else LATENT_DIMS), *SMALL_DIMS)
    listed = {(nope, rope): v for nope, rope, v in table}.get((case.d_nope, case.d_rope))
    if listed is None or case.form == "dense":
        return listed == case.d_v
    return case.d_v in (min(listed, case.d_nope), max(min(listed, case.d_nope) // 2, 1))


def _any_dims(rng: random.Random, form: str) -> dict[str, Any]:
    """Widths that nobody listed, each drawn by itself; narrow V beside anything is drawn often."""
    d_nope = _width(rng)
    d_rope = rng.choice((0, 32, 64, 64, _width(rng), _width(rng), _width(rng)))
    d_v = rng.randint(1, NARROW) if rng.random() < 0.35 else _width(rng)
    if form != "dense":
        if rng.random() < 0.2:  # some formats exist at few widths, and are to be seen too
            d_nope, d_rope = rng.choice([w for format in FORMATS.values() for w in format.widths])
        d_v = min(d_nope, rng.choice((d_v, MOST_WIDTH)))
    heads = rng.choice((rng.randint(1, 4), rng.randint(1, MOST_HEADS), rng.choice(HEADS)))
    return {"heads": heads, "d_nope": d_nope, "d_rope": d_rope, "d_v": d_v}


def _width(rng: random.Random) -> int:
    """1 to 576: any, or with weight on what hardware and models like."""
    unit = rng.choice((1, 1, 8, 16, 32, 0))
    return unit * rng.randint(1, MOST_WIDTH // unit) if unit else rng.choice(MODEL_WIDTHS)


def _lengths_within(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Lengths that cost no more than allowed, so that heads need not be cut afterwards."""
    width = fields["d_nope"] + fields["d_rope"] + fields["d_v"]
    pairs = max(COST_LIMIT // (fields["heads"] * width), 1)
    if fields["form"] == "sparse":
        q_len, topk = _factors(rng, pairs, TOPKS)
        pool = rng.choice((1, topk // 2, topk + 1, topk + 1, 3 * topk, rng.choice(KEY_EDGES)))
        return {"q_lens": (q_len,), "k_lens": (pool,), "topk": topk}
    batch = rng.choice((1, 1, 2))
    lens = [_factors(rng, pairs // batch, TILE_LENGTHS) for _ in range(batch)]
    return {"q_lens": tuple(q for q, _ in lens), "k_lens": tuple(k for _, k in lens)}


def _factors(rng: random.Random, most: int, lengths: tuple[int, ...]) -> tuple[int, int]:
    """Two numbers with a product of at most `most`; the second, from `lengths`, is often larger."""
    if rng.random() < 0.2 and most >= 4:
        side = rng.choice([n for n in TILE_LENGTHS if n * (n + 1) <= most])
        return side, side + rng.randint(0, 1)
    first, second = lengths, TILE_LENGTHS
    if rng.random() < 0.3:
        first, second = second, first
    large = max(rng.choice([n for n in first if n <= max(most, 1)]) for _ in range(2))
    small = rng.choice([n for n in second if n * large <= max(most, 1)])
    return (small, large) if first is lengths else (large, small)


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
        if rng.random() < 0.15:  # a row that engines keep: most exist at one width
            d_nope, d_rope = rng.choice([w for format in FORMATS.values() for w in format.widths])
            d_v = d_nope
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
    """Keys: as many as queries, more (a cached prefix), fewer (early rows are empty), or 0."""
    kind = rng.choice(("same", "same", "longer", "longer", "shorter", "none"))
    if kind == "longer":
        return q_len + rng.choice((1, 2, 5, 16, 31, 33))
    return {"same": q_len, "shorter": q_len // 2, "none": 0}[kind]


def _numbers(rng: random.Random, form: str) -> dict[str, Any]:
    dtype = rng.choices(("bf16", "fp16", "fp32", "e4m3"), weights=(5, 3, 1, 2))[0]
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
        ropes = {name: {d for _, d in format.widths} for name, format in FORMATS.items()}
        kv = rng.choice([name for name, d in ropes.items() if not d or fields["d_rope"] in d])
    return {"rope": rope, "kv": kv, "scale": scale, "page_size": rng.choice(PAGE_SIZES)}


def _latent(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv": _row_format(rng, fields),
        "page_size": rng.choice(PAGE_SIZES),
        "scale": _latent_scale(rng, fields),
        "invariant": sum(fields["q_lens"]) % 3 == 0,
        "range_keys": _range_keys(sum(fields["k_lens"]), sum(fields["q_lens"])),
    }


def _range_keys(keys: int, queries: int) -> int:
    """Ranges of a step or two: for half of the invariant calls, and for some that do not ask to be
    invariant but have a key past a range. No number is drawn, so that older cases stay as they
    were.

    >>> [_range_keys(keys, queries=3) for keys in (255, 256, 257, 513)]
    [256, 0, 128, 128]
    >>> [_range_keys(keys, queries=1) for keys in (1, 255, 257, 513)]
    [0, 0, 128, 128]
    """
    if queries % 3 == 0:
        return (0, 128, 0, 256)[keys % 4]
    return 128 if keys > 128 and keys % 8 == 1 else 0


def _sparse(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    pool = sum(fields["k_lens"])
    topk = rng.choice(TOPKS)
    if rng.random() < 0.15:
        topk = rng.choice((511, 512, 513, 1023, 1025, 1100))
    return {
        "kv": _row_format(rng, fields) if rng.random() < 0.6 else "plain",
        "page_size": rng.choice(PAGE_SIZES),
        "scale": _latent_scale(rng, fields),
        "topk": fields.get("topk", topk),
        "index_kind": rng.choices(
            ("distinct", "duplicates", "mixed", "invalid"), weights=(4, 3, 5, 1)
        )[0]
        if pool
        else "invalid",
        "topk_lengths": rng.choice(("none", "full", "ragged", "ragged", "wild")),
        "return_max_logits": rng.random() < 0.4,
    }


def _row_format(rng: random.Random, fields: dict[str, Any]) -> str:
    widths = fields["d_nope"], fields["d_rope"]
    anywhere = [name for name, format in FORMATS.items() if not format.widths]
    # Some formats exist at few widths: where they can be drawn, they are drawn often.
    made_for = [name for name, format in FORMATS.items() if widths in format.widths]
    return rng.choice(("plain", *anywhere, *(made_for * 6)))


def _latent_scale(rng: random.Random, fields: dict[str, Any]) -> float:
    natural = round(float((fields["d_nope"] + fields["d_rope"]) ** -0.5), 4)
    return rng.choice((natural, natural, natural, 0.1, 0.02, -0.05, 0.0))


def _options(rng: random.Random) -> dict[str, Any]:
    return {
        "spare": rng.choice((0, 0, 1, 3)),
        "causal": rng.random() < 0.7,
        "sink": rng.choices(("none", "normal", "low", "high", "mixed"), weights=(6, 3, 1, 1, 2))[0],
        "q_scale": rng.random() < 0.25,
        "k_scale": rng.random() < 0.25,
        "return_lse": rng.random() < 0.8,
        "layout": rng.choice(("contiguous", "strided", "aligned", "aligned", "values")),
        "out": rng.choice(("fresh", "given", "strided", "aligned")),
        "default_dtype": rng.choice(("fp32", "fp32", "fp32", "bf16", "fp16")),
        "default_device": rng.choice(("", "", "", "", "", "meta", "same")),
    }
