"""The cases whose compiled kernels are executed: every form, format and kernel of a family.

They are small (a run takes seconds) and few share a compiled kernel.
"""

from __future__ import annotations

from typing import Any

from openmla.lab.testing.case import Case

_DENSE: dict[str, Any] = {"form": "dense", "heads": 2, "d_nope": 128, "d_rope": 64, "d_v": 128}
_ROWS: dict[str, Any] = {
    "heads": 16,
    "d_nope": 512,
    "d_rope": 64,
    "d_v": 512,
    "q_lens": (3,),
    "k_lens": (200,),
    "scale": 192**-0.5,
    "page_size": 64,
}
_RAGGED = {"q_lens": (40, 0, 70), "k_lens": (150, 60, 129)}


def dense(q: int, k: int, **more: Any) -> Case:
    """One sequence of the MHA form, or what `more` says."""
    return Case(**{**_DENSE, "q_lens": (q,), "k_lens": (k,), "spare": 3, **more})


def latent(kv: str, **more: Any) -> Case:
    """Three queries of 16 heads over 200 rows."""
    return Case(**{**_ROWS, "form": "latent", "kv": kv, **more})


def sparse(kv: str, **more: Any) -> Case:
    """The same with a list of 128 rows each, some of them invalid."""
    lists = {"form": "sparse", "topk": 128, "index_kind": "mixed", "kv": kv}
    return Case(**{**_ROWS, **lists, **more})


CASES: dict[str, dict[str, Case]] = {
    "h200": {
        "dense causal": dense(100, 200, seed=1),
        "dense full, ragged, sinks": dense(
            0, 0, heads=3, causal=False, sink="mixed", seed=2, **_RAGGED
        ),
        "dense, rope in pages": dense(100, 200, rope="cache", kv="bf16", page_size=64, seed=3),
        "dense 192+64->256": dense(70, 130, d_nope=192, d_v=256, heads=1, seed=4),
        "dense fp16, rope per head": dense(70, 130, dtype="fp16", rope="per_head", seed=5),
        "dense exact": dense(100, 200, values="exact", scale=0.25, seed=6),
        "latent bf16": latent("bf16", seed=7),
        "latent 656": latent("fp8_656", seed=8),
        "latent ragged": latent("bf16", q_lens=(3, 0, 9), k_lens=(70, 5, 129), seed=9),
        "sparse bf16": sparse("bf16", seed=10),
        "sparse rows, wild lengths, sinks": sparse(
            "plain", topk_lengths="wild", sink="mixed", return_max_logits=True, seed=11
        ),
        "sparse 656": sparse("fp8_656", seed=12),
        "sparse block64": sparse("fp8_block64", seed=13),
        "sparse token": sparse("fp8_token", seed=14),
        "dense fp8": dense(100, 200, dtype="e4m3", seed=15),
        "dense fp8, v bf16": dense(
            100, 200, dtype="e4m3", side_dtype="bf16", rope_dtype="e4m3", q_scale=True, seed=16
        ),
        "dense fp8 exact": dense(
            100, 256, causal=False, dtype="e4m3", values="exact", scale=0.25, seed=17
        ),
        "latent token": latent("fp8_token", seed=18),
        "latent exact": latent("bf16", k_lens=(256,), values="exact", scale=0.25, seed=19),
        "sparse exact": sparse("bf16", values="exact", index_kind="distinct", scale=0.25, seed=20),
    },
    "b200": {
        "dense one tile": dense(100, 200, seed=1),
        "dense two tiles": dense(250, 300, seed=2),
        "dense ragged, sinks": dense(0, 0, heads=3, causal=False, sink="mixed", seed=3, **_RAGGED),
        "dense, rope of 656": dense(250, 300, rope="cache", kv="fp8_656", page_size=64, seed=4),
        "dense, rope in pages of 16": dense(
            100, 300, rope="cache", kv="bf16", page_size=16, seed=5
        ),
        "dense 192+64->256": dense(100, 200, d_nope=192, d_v=256, seed=6),
        "dense exact": dense(250, 300, values="exact", scale=0.25, seed=7),
        "dense rising": dense(100, 300, values="rising", seed=8),
        "dense 128+0": dense(250, 300, d_rope=0, rope="none", seed=15),
        "dense 256+0->256": dense(100, 200, d_nope=256, d_rope=0, d_v=256, rope="none", seed=16),
        "sparse bf16": sparse("bf16", seed=9),
        "sparse 64 heads": sparse("bf16", heads=64, topk=200, q_lens=(2,), seed=10),
        "sparse 656": sparse("fp8_656", seed=11),
        "sparse token": sparse("fp8_token", seed=12),
        "sparse rows, wild lengths, sinks": sparse(
            "plain", topk_lengths="wild", sink="mixed", return_max_logits=True, seed=13
        ),
        "sparse pair": sparse("bf16", heads=128, seed=14),
        "latent bf16": latent("bf16", q_lens=(3, 0, 2), k_lens=(70, 5, 129), seed=17),
        "latent 656": latent("fp8_656", q_lens=(1, 1), k_lens=(70, 5), seed=18),
        "sparse pair, wild lengths, sinks": sparse(
            "plain",
            heads=128,
            topk=300,
            q_lens=(2,),
            topk_lengths="wild",
            sink="mixed",
            return_max_logits=True,
            seed=20,
        ),
        "sparse pair rising": sparse(
            "bf16",
            heads=128,
            topk=600,
            q_lens=(1,),
            k_lens=(700,),
            values="rising",
            scale=1.0,
            seed=21,
        ),
        "sparse pair 656": sparse("fp8_656", heads=128, q_lens=(1,), seed=24),
        "dense pair": dense(2048, 130, heads=1, causal=False, seed=25),
        "dense pair causal, sinks": dense(2048, 2048, heads=1, sink="mixed", seed=26),
        "dense pair fp16, rope per head": dense(
            2100, 70, heads=1, dtype="fp16", rope="per_head", causal=False, seed=27
        ),
        "dense pair falling": dense(
            2048, 300, heads=1, causal=False, values="rising", scale=-0.07, seed=28
        ),
        "dense pair exact": dense(
            2048, 130, heads=1, causal=False, values="exact", scale=0.25, seed=29
        ),
        "sparse 512+0": sparse("bf16", d_rope=0, rope="none", seed=30),
        "sparse 512+0 pair": sparse("bf16", heads=128, d_rope=0, rope="none", q_lens=(1,), seed=31),
        "latent 512+0": latent(
            "bf16", d_rope=0, rope="none", q_lens=(1, 1), k_lens=(70, 5), seed=32
        ),
        "sparse 512+0 block64": sparse("fp8_block64", d_rope=0, rope="none", q_lens=(1,), seed=33),
        "latent 256+64": latent(
            "bf16", d_nope=256, d_v=256, q_lens=(1, 1), k_lens=(150, 5), seed=34
        ),
        "sparse 256+64 token": sparse("fp8_token", d_nope=256, d_v=256, q_lens=(1,), seed=35),
        "sparse 256+64 rising": sparse(
            "bf16", d_nope=256, d_v=256, q_lens=(1,), values="rising", scale=1.0, seed=36
        ),
        "latent pair": latent("bf16", heads=128, q_lens=(1, 1), k_lens=(300, 5), seed=19),
        # Nine ranges of 512 keys, and their merge: the fewest keys that are split.
        "latent split": latent("bf16", heads=8, q_lens=(1,), k_lens=(4097,), seed=50),
        "latent window": latent("bf16", q_lens=(2, 1), k_lens=(200, 60), window=100, seed=52),
        "latent 656 window": latent("fp8_656", q_lens=(1,), k_lens=(200,), window=70, seed=53),
        "latent 584": latent(
            "fp8_584", d_rope=0, rope="none", q_lens=(2, 1), k_lens=(70, 200), seed=55
        ),
        "latent 584 pair": latent(
            "fp8_584", heads=128, d_rope=0, rope="none", q_lens=(1,), k_lens=(300,), seed=56
        ),
        "latent pair window": latent(
            "bf16", heads=128, q_lens=(1,), k_lens=(400,), window=300, seed=54
        ),
        "dense fp8": dense(250, 300, dtype="e4m3", seed=37),
        "dense fp8 one tile, v and rope bf16, scales": dense(
            100, 300, dtype="e4m3", side_dtype="bf16", q_scale=True, k_scale=True, seed=38
        ),
        "dense fp8 128+0, scales": dense(
            *(250, 300),
            **{"d_rope": 0, "rope": "none", "dtype": "e4m3", "q_scale": True, "k_scale": True},
            seed=39,
        ),
        "dense mask": dense(250, 300, key_mask="half", seed=41),
        "dense mask of few, one tile, sinks": dense(
            100, 300, key_mask="few", causal=False, sink="mixed", seed=42
        ),
        "dense window": dense(250, 500, window=150, heads=1, seed=47),
        "dense window of one tile, groups, fp8, scales": dense(
            *(100, 400),
            **{"window": 70, "group": 2, "dtype": "e4m3", "q_scale": True, "k_scale": True},
            seed=48,
        ),
        "dense groups, fp32 out": dense(250, 300, group=2, out="given", fp32_out=True, seed=49),
        "dense fp8 192+64->256": dense(100, 200, d_nope=192, d_v=256, dtype="e4m3", seed=40),
        "dense 64+32->64": dense(250, 300, d_nope=64, d_rope=32, d_v=64, seed=43),
        "sparse fp8 queries and rows": sparse("plain", dtype="e4m3", q_lens=(1,), seed=46),
    },
    "mi355x": {
        "dense bf16": dense(100, 200, seed=1),
        "dense fp8": dense(100, 300, dtype="e4m3", seed=2),
        "dense ragged, sinks": dense(0, 0, heads=3, causal=False, sink="mixed", seed=3, **_RAGGED),
        "dense, rope in pages": dense(100, 200, rope="cache", kv="bf16", page_size=64, seed=4),
        "dense exact": dense(100, 200, values="exact", scale=0.25, seed=5),
        "sparse bf16": sparse("bf16", seed=6),
        "sparse rows, wild lengths, sinks": sparse(
            "plain", topk_lengths="wild", sink="mixed", return_max_logits=True, seed=7
        ),
        "sparse 656": sparse("fp8_656", seed=8),
        "sparse block64": sparse("fp8_block64", seed=9),
        "dense 192+64->256": dense(130, 200, d_nope=192, d_v=256, heads=1, seed=15),
        "dense 64+32->64": dense(40, 300, d_nope=64, d_rope=32, d_v=64, heads=1, seed=16),
        "dense 128+0->128": dense(40, 200, d_rope=0, rope="none", heads=1, seed=17),
        "dense 256+0->256": dense(
            40, 200, d_nope=256, d_rope=0, d_v=256, rope="none", heads=1, seed=18
        ),
        "dense key mask": dense(100, 200, key_mask="half", seed=19),
        "dense fp8 128+0": dense(40, 300, dtype="e4m3", d_rope=0, rope="none", heads=1, seed=22),
        "dense fp8, v bf16, scales": dense(
            40,
            300,
            dtype="e4m3",
            side_dtype="bf16",
            rope_dtype="e4m3",
            q_scale=True,
            k_scale=True,
            seed=23,
        ),
        "dense fp8 scales": dense(40, 300, dtype="e4m3", q_scale=True, k_scale=True, seed=24),
        "dense fp8 192+64->256": dense(
            70, 200, dtype="e4m3", d_nope=192, d_v=256, k_scale=True, heads=1, seed=25
        ),
        "dense fp8 exact": dense(
            40,
            256,
            causal=False,
            dtype="e4m3",
            d_rope=0,
            rope="none",
            values="exact",
            scale=0.25,
            seed=26,
        ),
        "dense fp8 key mask": dense(40, 200, dtype="e4m3", key_mask="few", heads=1, seed=20),
        "dense 192+64->256 key mask": dense(
            40, 130, d_nope=192, d_v=256, key_mask="half", causal=False, heads=1, seed=21
        ),
        "dense window": dense(0, 0, window=50, seed=33, **_RAGGED),
        "dense window, key mask": dense(40, 200, window=70, key_mask="half", heads=1, seed=34),
        "dense window, rope in pages": dense(
            40, 300, window=130, rope="cache", kv="bf16", page_size=16, heads=1, seed=35
        ),
        "dense fp8 window": dense(100, 400, dtype="e4m3", window=129, heads=1, seed=36),
        "dense fp8, v bf16, scales, window, fp32 out": dense(
            40,
            300,
            **{"dtype": "e4m3", "side_dtype": "bf16", "rope_dtype": "e4m3"},
            **{"q_scale": True, "k_scale": True, "out": "aligned", "fp32_out": True},
            window=100,
            heads=1,
            seed=37,
        ),
        "dense 192+64->256 window": dense(
            70, 200, d_nope=192, d_v=256, window=33, heads=1, seed=38
        ),
        "dense fp32 out": dense(100, 200, out="aligned", fp32_out=True, sink="mixed", seed=39),
        "sparse few of many": sparse("bf16", k_lens=(1000,), topk=70, seed=10),
        "sparse fp32 out": sparse("bf16", out="aligned", fp32_out=True, seed=40),
        "latent window": latent(
            "bf16", q_lens=(3, 0, 9), k_lens=(170, 5, 300), window=65, page_size=16, seed=41
        ),
        "latent 656 window": latent(
            "fp8_656", q_lens=(5,), k_lens=(300,), window=100, heads=20, seed=42
        ),
        "latent split, fp32 out": latent(
            "bf16", q_lens=(1,), k_lens=(4200,), out="aligned", fp32_out=True, seed=43
        ),
        "latent bf16": latent("bf16", seed=11),
        "latent ragged, sinks": latent(
            "bf16", q_lens=(3, 0, 9), k_lens=(70, 5, 129), sink="mixed", page_size=16, seed=12
        ),
        "latent 656": latent("fp8_656", q_lens=(5,), seed=13),
        "latent block64, 20 heads": latent(
            "fp8_block64", heads=20, q_lens=(4, 2), k_lens=(9, 70), seed=14
        ),
        "latent 256+64": latent(
            "bf16", d_nope=256, d_v=256, q_lens=(2, 1), k_lens=(150, 5), seed=29
        ),
        "sparse 256+64 token": sparse("fp8_token", d_nope=256, d_v=256, q_lens=(1,), seed=30),
        "latent 656, e4m3 queries": latent("fp8_656", dtype="e4m3", q_lens=(2,), seed=31),
        "sparse token, e4m3 queries": sparse("fp8_token", dtype="e4m3", q_lens=(1,), seed=32),
        "latent split": latent("bf16", q_lens=(1, 1), k_lens=(4200, 70), sink="mixed", seed=27),
        "latent 656 split, 20 heads": latent(
            "fp8_656", heads=20, q_lens=(1,), k_lens=(4100,), page_size=16, seed=28
        ),
        "sparse 584": sparse("fp8_584", d_rope=0, rope="none", q_lens=(2,), seed=33),
        "latent 584, 20 heads": latent(
            *("fp8_584",),
            **{"d_rope": 0, "rope": "none", "heads": 20, "q_lens": (4, 2), "k_lens": (9, 70)},
            seed=34,
        ),
    },
}
_EXACT = {"values": "exact", "scale": 0.25, "seed": 21}
_FEW = {"q_lens": (1,), "k_lens": (65,), "seed": 22}
_TWO = {"q_lens": (2, 1), "k_lens": (70, 129), "values": "rising", "seed": 23}
_LISTS: tuple[dict[str, Any], ...] = (
    {"q_lens": (1,), "seed": 24},
    {"q_lens": (2,), "index_kind": "duplicates", "values": "peaky", "seed": 25},
    {"q_lens": (1,), "index_kind": "invalid", "seed": 26},
)
_TILES: tuple[dict[str, Any], ...] = (
    {"q_lens": (140,), "k_lens": (130,), "seed": 27},
    {"q_lens": (129, 140), "k_lens": (64, 20), "values": "rising", "seed": 28},
    {"q_lens": (140,), "k_lens": (150,), **_EXACT},
)
_LENGTHS: tuple[dict[str, Any], ...] = (
    {"q_lens": (40,), "k_lens": (150,), "seed": 29},
    {"q_lens": (20, 0, 33), "k_lens": (65, 40, 33), "values": "rising", "seed": 30},
    {"q_lens": (33,), "k_lens": (64,), **_EXACT},
)
QUICK: dict[str, dict[str, tuple[dict[str, Any], ...]]] = {
    "h200": {
        "dense causal": ({}, _TILES[0], _TILES[2]),
        "dense full, ragged, sinks": ({}, _LENGTHS[0]),
        "latent bf16": ({}, _FEW, _TWO, _EXACT),
        "sparse 656": ({}, *_LISTS[:2]),
    },
    "b200": {
        "dense one tile": _LENGTHS,
        "dense two tiles": _TILES,
        "sparse bf16": _LISTS,
        "sparse pair": _LISTS,
    },
    "mi355x": {
        "dense bf16": ({}, *_LENGTHS[:2]),
        "dense fp8": _LENGTHS,
        "sparse bf16": _LISTS,
        "sparse 656": _LISTS,
    },
}
"""What `make test` executes: twelve cases per target of few compiled kernels, which changes of a
case's lengths, lists and values do not change. The others run with `-m executed`."""
QUICK_TRITON = {"h200": (3, 7), "b200": (3, 9), "mi355x": (3, 9)}
"""Which of the two versions that `make test` has executes them."""
