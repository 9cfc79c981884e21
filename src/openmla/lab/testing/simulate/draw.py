"""Random cases for the simulator: what a target's Gluon kernels serve, at the edges of their tiles.

`simulated_case(target, seed)` always gives the same case. A case starts from a `Menu`, the widths,
types and formats that the target's kernels declare to serve in one form. In two cases of five a
width, or all of them, is arbitrary instead: a family must refuse that or compute it correctly. A
few cases ask for a feature that the family does not have, to see it refused.

A simulation takes milliseconds per tile of 64 rows and 64 keys, so cases are a few dozen tiles.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from openmla.formats import BF16, FORMATS
from openmla.lab.testing.case import Case
from openmla.lab.testing.draw import BROKEN, drawn_source, drawn_turn
from openmla.planning import TARGETS
from openmla.planning.registry import families_of
from openmla.problem import CACHE_FORMATS

MOST_TILES = 40
"""Most tiles of 64 rows and 64 keys. A case that has more is cut down."""
ARBITRARY = 0.4
"""Share of cases with arbitrary widths."""
UNSERVED = 0.04
"""Share of cases with a feature that the family does not have."""
ATTENDS = 0.2
"""Share of cases that are calls of mla_attend."""
NEWER, NOT_YET = 0.3, 0.02
"""Shares of cases with a window, grouped heads or fp32 out, where a family has them and not."""


@dataclass(frozen=True)
class Menu:
    """What a family serves in one form, and where its tiles end."""

    d_nope: tuple[int, ...]
    d_rope: tuple[int, ...]
    d_v: tuple[int, ...]
    """Empty: as many as d_nope."""
    dtypes: tuple[str, ...]
    heads: tuple[int, ...]
    kv: tuple[str, ...]
    """Where keys are stored; in the dense form, the cache that rope comes from."""
    pages: tuple[int, ...]
    per_token_scales: bool
    query_tiles: tuple[int, ...]
    key_tiles: tuple[int, ...]
    long_keys: tuple[int, ...] = ()
    """Keys of requests that are split."""
    mixed: bool = False
    """Whether e4m3 queries go with V of 16 bits and with scales; otherwise with e4m3 values."""
    window: bool = False
    group: bool = False
    fp32_out: bool = False


# What is drawn from, as far as a family serves it; what stands twice is drawn twice as often.
_WIDTHS = (16, 32, 48, 64, 96, 128, 128, 160, 192, 256, 512, 512)
_ROPE = (0, 16, 32, 64, 64, 128)
_FEW_HEADS = (1, 1, 2, 3, 4, 5, 6)
_ROW_HEADS = (1, 3, 8, 16, 20, 24, 40, 56, 63, 64, 65, 96, 128)
_ROWS_SEEN = (0, 1, 5, 31, 32, 33, 63, 64, 65, 65, 100, 127, 128, 129, 200)
_PAGES = (1, 3, 7, 8, 16, 24, 32, 48, 64, 128, 256)
# Tiles of queries and of keys, and keys that are split.
_TILES: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "h200": {
        "dense": ((64, 128), (16, 32, 64, 128, 128), (2048, 2049, 4097)),
        "latent": ((64,), (64, 128)),
        "sparse": ((64,), (64, 128)),
    },
    "b200": {
        "dense": ((128, 256), (16, 64, 128, 128)),
        "latent": ((64,), (64, 128)),
        "sparse": ((64,), (64, 128)),
    },
    "mi355x": {
        "dense": ((32, 128, 256), (16, 64, 64, 128)),
        "latent": ((64,), (64,), (4097, 4600)),
        "sparse": ((64,), (64,)),
    },
}


def menu_of(target: str, form: str) -> Menu:
    """What the declarations of the target's own family allow.

    >>> menu_of("b200", "sparse").d_nope, menu_of("b200", "sparse").d_rope
    ((256, 512, 512), (0, 64, 64))
    """
    family, *_ = families_of(TARGETS[target])
    serves = [kernel.serves for kernel in family.of_form(form) if kernel.launcher]

    def served(field: str, *values: Any) -> tuple[Any, ...]:
        return tuple(x for x in values if any(s.takes(field, x) for s in serves))

    dense = form == "dense"
    together = any(("d_nope", "d_v") in s.allowed for s in serves)
    caches = served("rope_dtype" if dense else "kv_dtype", *CACHE_FORMATS)
    return Menu(
        d_nope=served("d_nope", *_WIDTHS),
        d_rope=served("d_rope", *_ROPE),
        d_v=served("d_v", *_WIDTHS) if dense and not together else (),
        dtypes=served("q_dtype", "bf16", "bf16", "fp16", "e4m3"),
        heads=served("heads", *(_FEW_HEADS if dense else _ROW_HEADS)),
        kv=caches if dense else ("plain", *caches),
        pages=served("page_size", *_PAGES),
        per_token_scales=bool(served("has_q_scale", True)),
        mixed=any(s.takes("q_dtype", "e4m3") and s.takes("v_dtype", "bf16") for s in serves),
        window=bool(served("window", 100)),
        group=bool(served("group", 2)),
        fp32_out=bool(served("fp32_out", True)),
        **dict(zip(("query_tiles", "key_tiles", "long_keys"), _TILES[target][form], strict=False)),
    )


def served_of_sources(target: str, field: str, *values: Any) -> tuple[Any, ...]:
    """Those values of a field that the target's own kernels for several sources take.

    >>> served_of_sources("b200", "kv_dtype", *CACHE_FORMATS)
    ('bf16', 'fp8_584')
    """
    family, *_ = families_of(TARGETS[target])
    serves = [kernel.serves for kernel in family.of_form("sparse") if kernel.launcher]
    several = [s for s in serves if s.takes("span", True)]
    return tuple(x for x in values if any(s.takes(field, x) for s in several))


MENUS = {
    target: {form: menu_of(target, form) for form in forms} for target, forms in _TILES.items()
}


def simulated_case(target: str, seed: int) -> Case:
    """Case number `seed` for a target.

    >>> simulated_case("h200", 7) == simulated_case("h200", 7)
    True
    """
    attends = random.Random(f"attend {target} {seed}")  # numbers of their own
    if attends.random() < ATTENDS:
        return _attend(attends, target, seed)
    rng = random.Random(f"{target} {seed}")
    forms = MENUS[target]
    turns = [*forms, "dense"]  # dense has the most to vary
    form = turns[seed % len(turns)]  # so that a few cases in a row have every form
    menu = forms[form]
    fields: dict[str, Any] = {"form": form, "seed": seed, "heads": rng.choice(menu.heads)}
    fields |= _widths(rng, form, menu)
    fields |= {"dense": _dense, "latent": _rows, "sparse": _rows}[form](rng, menu, fields)
    fields |= _lengths(rng, form, menu)
    if form == "sparse":
        fields |= _lists(rng, fields)
    fields = _options(rng, menu) | fields
    if fields["values"] == "exact":
        fields["scale"] = 0.25  # products of small integers and this are exact
    return _with_newer_options(_cut(Case(**fields)), target, menu)


def _attend(rng: random.Random, target: str, seed: int) -> Case:
    """A call of mla_attend over one or two sources, mostly of rows that the target's kernels read:
    windows and lists that end at their blocks, and pools that lie unevenly."""
    d_nope, d_rope = (512, 0) if rng.random() >= UNSERVED else rng.choice(((512, 64), (256, 0)))
    formats = (*served_of_sources(target, "kv_dtype", *CACHE_FORMATS), "plain")
    served = [x for x in formats if FORMATS.get(x, BF16).takes(d_nope, d_rope)]
    sources = []
    for _ in range(rng.choice((1, 2, 2))):
        kv = rng.choice(served) if rng.random() >= UNSERVED else ""
        sources.append(drawn_source(rng, d_nope, d_rope, _ROWS_SEEN, kv))
    turned = drawn_turn(rng, sources, d_nope)
    fields: dict[str, Any] = {
        "form": "sparse",
        "seed": seed,
        "heads": rng.choice(_ROW_HEADS),
        "d_nope": d_nope,
        "d_rope": d_rope,
        "d_v": d_nope,
        "q_lens": (rng.choice((0, 1, 1, 2, 3, 5, 9)),),
        "k_lens": (0,),
        "sources": tuple(sources),
        "turned": 64 if turned and rng.random() >= UNSERVED else turned,
    }
    fields |= _options(rng, MENUS[target]["sparse"]) | {"q_scale": False, "k_scale": False}
    fields["scale"] = rng.choice((0.0442, 0.0442, 0.1, -0.05, 0.0))
    fields["values"] = "broken" if rng.random() < BROKEN else fields["values"]
    if fields["values"] == "exact":
        fields["scale"] = 0.25
    fp32_out = bool(served_of_sources(target, "fp32_out", True))
    menu = replace(MENUS[target]["sparse"], fp32_out=fp32_out)
    return _with_newer_options(_cut(Case(**fields)), target, menu)


def _with_newer_options(case: Case, target: str, menu: Menu) -> Case:
    """Windows, grouped heads and fp32 out, by numbers of their own: cases without them stay what
    they were. A window ends at an edge of tiles or of the keys."""
    rng = random.Random(f"newer options {target} {case.seed}")
    longest = max(case.k_lens, default=1) or 1
    edges = [1, 2, longest - 1, longest, rng.randint(1, longest)]
    edges += [tile + more for tile in menu.key_tiles for more in (-1, 0, 1)]
    if case.causal and case.form != "sparse" and rng.random() < (NEWER if menu.window else NOT_YET):
        case = replace(case, window=max(rng.choice(edges), 1))
    divisors = [n for n in range(2, case.heads + 1) if case.heads % n == 0]
    if case.form == "dense" and divisors and rng.random() < (NEWER if menu.group else NOT_YET):
        case = replace(case, group=rng.choice(divisors))
    if rng.random() < (NEWER if menu.fp32_out else NOT_YET):
        case = replace(case, out="aligned", fp32_out=case.dtype != "fp32")
    return case


def tiles(case: Case) -> int:
    """Tiles of 64 rows and 64 keys: how long a simulation takes.

    >>> tiles(Case("dense", 2, 128, 64, 128, q_lens=(65, 1), k_lens=(129, 0)))
    14
    """
    if case.form == "sparse":
        blocks = sum(_blocks(lists.topk) for lists in case.sources or (case,))
        return case.total_q * _blocks(case.heads) * blocks
    pairs = list(zip(case.q_lens, case.k_lens, strict=True))
    if case.form == "latent":
        return sum(_blocks(q * case.heads) * _blocks(k) for q, k in pairs)
    return case.heads * sum(_blocks(q) * _blocks(k) for q, k in pairs)


def _blocks(n: int) -> int:
    return max(1, -(-n // 64))


def _cut(case: Case) -> Case:
    """Fewer heads, then fewer sequences, then fewer queries, until a case is small enough."""
    while tiles(case) > MOST_TILES:
        q_lens, k_lens = case.q_lens, case.k_lens
        if case.form == "dense" and case.heads > 1:
            case = replace(case, heads=case.heads // 2)
        elif len(q_lens) > 1:
            case = replace(case, q_lens=q_lens[1:], k_lens=k_lens[1:])
        elif q_lens[0] > (64 if case.form == "dense" else 1):
            case = replace(case, q_lens=(q_lens[0] // 2,))
        else:
            return case  # one tile of queries and many keys
    return case


def _widths(rng: random.Random, form: str, menu: Menu) -> dict[str, Any]:
    d_nope, d_rope = rng.choice(menu.d_nope), rng.choice(menu.d_rope)
    d_v = rng.choice(menu.d_v) if menu.d_v else d_nope
    if rng.random() < ARBITRARY:
        which = rng.choices(("d_nope", "d_rope", "d_v", "all"), weights=(6, 2, 3, 1))[0]
        d_nope = _width(rng) if which in ("d_nope", "all") else d_nope
        d_rope = _width(rng) if which in ("d_rope", "all") else d_rope
        d_v = _width(rng) if which in ("d_v", "all") else d_v
        if not menu.d_v and which in ("d_nope", "d_rope"):
            d_v = d_nope
        if form != "dense":
            d_v = min(d_v, d_nope)
    return {"d_nope": d_nope, "d_rope": d_rope, "d_v": d_v}


def _width(rng: random.Random) -> int:
    """1 to 576, mostly a multiple of 8, 16 or 32, and mostly no wider than a head."""
    if rng.random() < 0.15:
        return 1 << rng.randrange(10)
    unit, below = rng.choices((1, 8, 16, 32), weights=(2, 3, 4, 1))[0], rng.choice((272, 272, 577))
    return unit * rng.randrange(1, -(-below // unit))


def _dense(rng: random.Random, menu: Menu, fields: dict[str, Any]) -> dict[str, Any]:
    dtype = rng.choice(menu.dtypes)
    sides = 1 - UNSERVED if menu.mixed else UNSERVED
    side = rng.choice(("bf16", "fp16")) if dtype == "e4m3" and rng.random() < sides else ""
    scale = rng.choice((None, None, None, 0.07, 0.25, -0.1, 0.0))
    found = {"dtype": dtype, "side_dtype": side, "scale": scale}
    if dtype == "e4m3" and menu.mixed:
        found["rope_dtype"] = rng.choice(("e4m3", "e4m3", ""))
        found |= {name: rng.random() < 0.4 for name in ("q_scale", "k_scale")}
    if fields["d_rope"] == 0:
        return found | {"rope": "none"}
    rope = rng.choice(("shared", "shared", "shared_3d", "per_head", "cache", "cache", "cache"))
    if rope == "cache":
        found["kv"] = _fitting(rng.choice(menu.kv), 512, fields["d_rope"])
        one_type = set(menu.kv) == {"bf16"} or found["kv"] != "bf16"
        beside_fp8 = menu.mixed and dtype == "e4m3"
        if one_type and not beside_fp8 and rng.random() >= UNSERVED:
            found["dtype"] = "bf16"  # what rows of a cache are, or are dequantized to
    return found | {"rope": rope, "page_size": rng.choice(menu.pages)}


def _rows(rng: random.Random, menu: Menu, fields: dict[str, Any]) -> dict[str, Any]:
    kv = _fitting(rng.choice(menu.kv), fields["d_nope"], fields["d_rope"])
    plain_rows = fields["form"] == "sparse" and kv == "plain"
    dtype = rng.choice(menu.dtypes) if plain_rows or rng.random() < UNSERVED else "bf16"
    natural = round(float((fields["d_nope"] + fields["d_rope"]) ** -0.5), 4)
    return {
        "kv": kv,
        "dtype": dtype,
        "page_size": rng.choice(menu.pages),
        "scale": rng.choice((natural, natural, 0.1, -0.05, 0.0)),
    }


def _fitting(kv: str, latent: int, rope: int) -> str:
    """Another format, if this one does not exist at these widths."""
    return kv if FORMATS.get(kv, BF16).takes(latent, rope) else "fp8_block64"


def _lengths(rng: random.Random, form: str, menu: Menu) -> dict[str, Any]:
    batch = rng.choice((1, 1, 2, 2, 3, 5))
    if form == "sparse":
        pool = rng.choice((0, 1, 5, 70, 70, 150, 150, 300))
        return {"q_lens": (rng.choice((0, 1, 1, 2, 3, 5)),), "k_lens": (pool,)}
    if menu.long_keys and rng.random() < 0.05:
        return {"q_lens": (rng.choice((1, 17, 65)),), "k_lens": (rng.choice(menu.long_keys),)}
    q_lens, k_lens = [], []
    for _ in range(batch):
        tile = rng.choice(menu.query_tiles)
        edges = (tile - 1, tile, tile + 1, tile + 1) if form == "dense" else (5, 9)
        q_len = rng.choice((0, 1, 2, 5, 17, 33, *edges))
        q_lens.append(q_len)
        k_lens.append(_keys(rng, q_len, rng.choice(menu.key_tiles)))
    return {"q_lens": tuple(q_lens), "k_lens": tuple(k_lens)}


def _keys(rng: random.Random, q_len: int, tile: int) -> int:
    """Mostly one key into a tile, or as many as fill it; also none, or fewer than queries."""
    kind = rng.choice(("edge", "edge", "edge", "prefix", "same", "shorter", "none"))
    edge = tile * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 1, 1))
    return {
        "edge": edge,
        "prefix": q_len + edge,
        "same": q_len,
        "shorter": q_len // 2,
        "none": 0,
    }[kind]


def _lists(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = ("distinct", "duplicates", "mixed", "invalid", "block_end")
    kind = rng.choices(kinds, weights=(3, 2, 4, 1, 3))[0]
    return {
        "topk": rng.choice((0, 1, 5, 63, 64, 65, 100, 127, 128, 129, 200)),
        "index_kind": kind if sum(fields["k_lens"]) else "invalid",
        "topk_lengths": rng.choice(("none", "none", "full", "ragged", "wild")),
        "return_max_logits": rng.random() < 0.4,
    }


def _options(rng: random.Random, menu: Menu) -> dict[str, Any]:
    scaled = 0.25 if menu.per_token_scales else UNSERVED
    kinds = ("normal", "peaky", "rising", "tiny", "large", "equal", "exact")
    return {
        "spare": rng.choice((0, 0, 0, 1, 3)),
        "causal": rng.random() < 0.7,
        "sink": rng.choices(("none", "normal", "low", "high", "mixed"), weights=(6, 3, 1, 1, 2))[0],
        "q_scale": rng.random() < scaled,
        "k_scale": rng.random() < scaled,
        "return_lse": rng.random() < 0.8,
        "values": rng.choices(kinds, weights=(8, 3, 3, 2, 2, 1, 2))[0],
        "layout": rng.choice(("contiguous", "aligned")),
        "out": rng.choice(("fresh", "aligned")),
    }
