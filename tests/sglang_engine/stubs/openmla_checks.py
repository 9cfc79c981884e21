"""A plug-in of SGLang that compares every call of openmla's backend with float64, and records some.

SGLang loads it in each of its processes, as it loads openmla. OPENMLA_CHECKS names a folder:
`seen.json` has what was called and how far off it was at most, `calls.pt` the first calls of the
first layer, for tests/integrations/sglang.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VARIABLE = "OPENMLA_CHECKS"
FORWARD = "openmla.integrations.sglang.forward"
BACKEND = "openmla.integrations.sglang.attention.OpenMLABackend"
KINDS = 2  # batches that are kept of each kind


class Checks:
    """Calls of this process so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: Counter[str] = Counter()
        self.off = {"latent": 0.0, "fresh": 0.0}
        self.batch: Any = None
        self.kept: list[dict[str, Any]] = []

    def prepared(self, original: Any, backend: Any, forward_batch: Any) -> None:
        """`init_forward_metadata`: what the calls that follow belong to."""
        original(backend, forward_batch)
        self.batch = forward_batch
        self.seen[forward_batch.forward_mode.name] += 1

    def latent(
        self,
        original: Any,
        q: Tensor,
        rows: Tensor,
        requests: Any,
        page_size: int,
        d_v: int,
        scale: float,
        invariant: bool = False,
        range_keys: int | None = None,
    ) -> Tensor:
        """`attend_latent`."""
        out: Tensor = original(q, rows, requests, page_size, d_v, scale, invariant, range_keys)
        starts, lengths = requests.cu_seqlens_q.tolist(), requests.lengths.tolist()
        self.seen["invariant"] += invariant * len(lengths)
        for i, length in enumerate(lengths):
            pages = requests.block_table[i].long()[:, None]
            slots = pages * page_size + torch.arange(page_size)
            keys = rows.flatten(1)[slots.flatten()[:length]].double()
            mine = slice(starts[i], starts[i + 1])
            want = _attention(q[mine].double(), keys, keys[:, :d_v], scale)
            self._compare("latent", out[mine], want)
        self._keep(q, rows, requests, page_size, d_v, scale, out)
        self._write()
        return out

    def fresh(
        self,
        original: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        requests: Any,
        d_nope: int,
        scale: float,
    ) -> Tensor:
        """`attend_fresh`."""
        out: Tensor = original(q, k, v, requests, d_nope, scale)
        starts = requests.cu_seqlens_q.tolist()
        for start, end in pairwise(starts):
            for head in range(q.shape[1]):
                one = (slice(start, end), slice(head, head + 1))
                keys, values = k[start:end, head].double(), v[start:end, head].double()
                self._compare("fresh", out[one], _attention(q[one].double(), keys, values, scale))
        self._write()
        return out

    def _compare(self, form: str, out: Tensor, want: Tensor) -> None:
        self.seen[form] += 1
        if len(want):
            self.off[form] = max(self.off[form], (out.double() - want).abs().max().item())

    def _keep(
        self, q: Tensor, rows: Tensor, requests: Any, page: int, d_v: int, scale: float, out: Tensor
    ) -> None:
        """A decoding batch, or one with a cached prefix, with the pages that it reads."""
        if self.batch is None:  # not the first layer
            return
        batch, self.batch = self.batch, None
        mode, count = batch.forward_mode.name, len(requests.lengths)
        prefixes = mode == "EXTEND" and int(batch.extend_prefix_lens.max()) > 0
        if count < 3 or not (prefixes or mode == "DECODE"):
            return
        if sum(call["mode"] == mode for call in self.kept) == KINDS:
            return
        used = [-(-length // page) for length in requests.lengths.tolist()]
        named = [requests.block_table[i, :n] for i, n in enumerate(used)]
        # Page 0 is nobody's: SGLang writes there what fills a batch up.
        pages, inverse = torch.cat([torch.tensor([0]), *named]).unique(return_inverse=True)
        assert inverse[0] == 0 and not (inverse[1:] == 0).any()
        slots = torch.zeros(count + 1, max(used) * page, dtype=torch.int64)
        for i, mine in enumerate(inverse[1:].split(used)):
            slots[i + 1, : len(mine) * page] = (mine[:, None] * page + torch.arange(page)).flatten()
        call = {
            "mode": mode,
            "q": q,
            "rows": rows.flatten(1)[: len(rows) // page * page].unflatten(0, (-1, page))[
                pages.long()
            ],
            "slots": slots,
            "seq_lens": batch.seq_lens,
            "extend_seq_lens": None if mode == "DECODE" else batch.extend_seq_lens,
            "d_v": d_v,
            "scale": scale,
            "out": out,
        }
        self.kept.append({n: x.clone() if isinstance(x, Tensor) else x for n, x in call.items()})
        torch.save(self.kept, self.folder / "calls.pt")

    def _write(self) -> None:
        found = {"seen": self.seen, "off": self.off}
        (self.folder / "seen.json").write_text(json.dumps(found))


def _attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal, the last query at the last key, in float64."""
    score = torch.einsum("thd,kd->thk", q, keys) * scale
    position = torch.arange(len(q)) + len(keys) - len(q)
    hidden = torch.arange(len(keys)) > position[:, None]
    return torch.softmax(score.masked_fill(hidden[:, None], -torch.inf), -1) @ values


def register() -> None:
    """What SGLang calls."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    checks = Checks(Path(os.environ[VARIABLE]))
    HookRegistry.register(f"{FORWARD}.attend_latent", checks.latent, HookType.AROUND)
    HookRegistry.register(f"{FORWARD}.attend_fresh", checks.fresh, HookType.AROUND)
    HookRegistry.register(f"{BACKEND}.init_forward_metadata", checks.prepared, HookType.AROUND)
