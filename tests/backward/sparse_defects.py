"""A plain backward pass of the sparse form with bf16 roundings, and deliberate mistakes in it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from openmla.backward.reference import Saved
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase
from openmla.lab.testing.row_gradients import BuiltRowGradients

_LISTS = Case("sparse", 4, 32, 8, 32, q_lens=(40,), k_lens=(60,), topk=24, scale=0.2)
SHOWCASES = {
    "plain": GradientCase(_LISTS),
    "lse": GradientCase(_LISTS, d_lse=True),
    "sink and lse": GradientCase(replace(_LISTS, sink="normal"), d_lse=True),
    "duplicates": GradientCase(replace(_LISTS, index_kind="duplicates")),
    "ignored": GradientCase(replace(_LISTS, index_kind="mixed", topk_lengths="ragged")),
    "fp32": GradientCase(replace(_LISTS, dtype="fp32")),
}
DEFECTS = {
    "the scale is not applied to d_q": ("plain", "fp32"),
    "the scale is not applied to d_rows": ("plain", "fp32"),
    "d_q is 1 % too large": ("plain",),
    "d_rows is 1 % too large": ("plain",),
    "D is left out": ("plain", "fp32"),
    "D is that of the query before": ("plain",),
    "the gradient of lse is dropped": ("lse", "sink and lse"),
    "the gradient of lse goes by weights with the sink": ("sink and lse",),
    "weights ignore the sink": ("sink and lse",),
    "rows get nothing as values": ("plain",),
    "rows get nothing as keys": ("plain",),
    "rope columns get nothing": ("plain",),
    "the last head gives nothing to rows": ("plain",),
    "the first entry is left out": ("plain",),
    "the last entry is left out": ("plain",),
    "a duplicate counts once": ("duplicates",),
    "what is ignored goes to row 0": ("ignored",),
    "what is ignored goes to the last row": ("ignored",),
    "lengths are ignored": ("ignored",),
    "sums of rows are bf16": ("plain",),
    "d_sink has the other sign": ("sink and lse",),
    "the last query is left out": ("plain",),
}


def differentiate(built: BuiltRowGradients, saved: Saved, mistake: str = "") -> dict[str, Tensor]:
    """Gradients by name, entry by entry of every list, with one mistake."""
    assert not mistake or mistake in DEFECTS
    op, dtype = built.operands, built.operands.q.dtype
    assert isinstance(op.cache, Tensor)
    scale, sink, d_v = op.weights.scale, op.weights.sink, op.d_v
    d_q = torch.zeros(op.q.shape)
    d_rows = torch.zeros(op.cache.shape)
    d_sink = torch.zeros(op.q.shape[1])
    before = torch.zeros(op.q.shape[1])
    for t in range(op.q.shape[0] - (mistake == "the last query is left out")):
        keys = _keys(op, t, mistake)
        if not len(keys):
            continue
        q, k = op.q[t].float(), op.cache[keys].float()
        d_out, lse = built.d_out[t].float(), saved.lse[t]
        s = scale * (q @ k.T)
        alone = torch.exp(s - lse[:, None])
        share = torch.zeros_like(lse) if sink is None else torch.sigmoid(sink - lse)
        p = alone if mistake == "weights ignore the sink" else alone * (1 - share)[:, None]
        own = (saved.out[t].float() * d_out).sum(-1)
        d_sum = {"D is left out": 0 * own, "D is that of the query before": before}.get(
            mistake, own
        )
        before = own
        d_s = p * (d_out @ k[:, :d_v].T - d_sum[:, None])
        if built.d_lse is not None and mistake != "the gradient of lse is dropped":
            by = p if mistake == "the gradient of lse goes by weights with the sink" else alone
            d_s = d_s + by * built.d_lse[t][:, None]
        d_s, p = d_s.to(dtype).float(), p.to(dtype).float()
        d_q[t] = (1.0 if mistake == "the scale is not applied to d_q" else scale) * (d_s @ k)
        if mistake == "the last head gives nothing to rows":
            d_s, p = d_s[:-1], p[:-1]
            q, d_out = q[:-1], d_out[:-1]
        each = (1.0 if mistake == "the scale is not applied to d_rows" else scale) * (d_s.T @ q)
        if mistake == "rows get nothing as keys":
            each.zero_()
        if mistake != "rows get nothing as values":
            each[:, :d_v] += p.T @ d_out
        if mistake == "rope columns get nothing":
            each[:, d_v:] = 0.0
        d_rows.index_add_(0, keys, each)
        if mistake == "sums of rows are bf16":
            d_rows = d_rows.bfloat16().float()
        d_sink += (1 if mistake == "d_sink has the other sign" else -1) * share * own
    larger = {"d_q is 1 % too large": d_q, "d_rows is 1 % too large": d_rows}.get(mistake)
    if larger is not None:
        larger *= 1.01
    found = {"q": d_q.to(dtype), "rows": d_rows.to(dtype)}
    return found if sink is None else {**found, "sink": d_sink}


def _keys(op, t: int, mistake: str) -> Tensor:
    """The rows of a list that count."""
    listed = op.indices[t].long()
    if op.topk_lengths is not None and mistake != "lengths are ignored":
        listed = listed[: max(int(op.topk_lengths[t]), 0)]
    counts = (listed >= 0) & (listed < op.rows)
    if mistake.startswith("what is ignored goes to"):
        elsewhere = 0 if mistake.endswith("row 0") else op.rows - 1
        listed, counts = torch.where(counts, listed, elsewhere), torch.ones_like(counts)
    keys = listed[counts]
    if mistake == "a duplicate counts once":
        keys = keys.unique()
    if mistake == "the first entry is left out":
        keys = keys[1:]
    return keys[:-1] if mistake == "the last entry is left out" else keys
