"""`openmla bench cpu`: the CPU kernels against plain torch, and against torch.mm's rate.

Work is counted as the attention needs it, 2 flops per multiply-add; a causal mask halves it. Peers
are not charged for the copies they need to make (K to full width), only timed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

import openmla
from openmla.cache import DTYPES
from openmla.lab.bench import peers
from openmla.lab.bench.memory import peak_extra_bytes
from openmla.lab.bench.report import Report, duration
from openmla.lab.bench.timing import Contestant, race, seconds_of

D_NOPE, D_ROPE, D_V, LATENT = 128, 64, 128, 512
SCALE = (D_NOPE + D_ROPE) ** -0.5


@dataclass(frozen=True)
class Peer:
    """Another way to the same result, in the same run."""

    name: str
    seconds: float
    times_faster: float
    """Peer's seconds over ours: above 1, openmla is faster."""
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One benchmark case: our time and rate, the peers', and torch.mm's rate."""

    case: str
    dtype: str
    seconds: float
    gflops: float
    mm_gflops: float
    peers: list[Peer] = field(default_factory=list)
    extra_bytes: int | None = None
    peer_extra_bytes: int | None = None

    @property
    def mm_share(self) -> float:
        """Our rate as a share of torch.mm's in the same dtype and run."""
        return self.gflops / self.mm_gflops

    def __str__(self) -> str:
        return f"{self.case}, {self.dtype}"

    def lines(self) -> Iterator[tuple[str, ...]]:
        """What a table has of it: the case, our result, then one line per peer."""
        yield f"[bold]{self}[/]{_memory(self)}", "", "", ""
        share = f"{self.mm_share:.2f} of torch.mm"
        yield "  openmla", duration(self.seconds), f"{self.gflops:.1f}", share
        for peer in self.peers:
            name = f"  {peer.name}" + (f" ({peer.note})" if peer.note else "")
            rate = f"{self.gflops * self.seconds / peer.seconds:.1f}"
            yield name, duration(peer.seconds), rate, f"{peer.times_faster:.2f}x"


def run_cpu(rounds: int = 5, quick: bool = False) -> Iterator[Row]:
    """All CPU cases, one Row each as it is done."""
    for dtype in ("fp32", "bf16"):
        yield _dense(dtype, heads=4 if quick else 16, length=512 if quick else 2048, rounds=rounds)
    for dtype in ("fp32", "bf16"):  # a layer of DeepSeek-V3.2
        yield _sparse(dtype, 8 if quick else 256, 8192, 2048, 128, rounds=rounds)
    with busy_cores():
        rows = (_dense("fp32", 4, 512, rounds), _sparse("fp32", 64, 1024, 256, 32, rounds))
    for row in rows:
        yield replace(row, case=row.case + ", every core shared with a busy process")


@contextmanager
def busy_cores() -> Iterator[None]:
    """Inside of it, every core has something else to do: one process each that never rests."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def mm_gflops(dtype: torch.dtype) -> float:
    """torch.mm's rate on square matrices, as large as fits in a couple of seconds."""
    size = 256
    while True:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        torch.mm(a, b)
        seconds = min(seconds_of(partial(torch.mm, a, b)) for _ in range(3))
        rate = 2 * size**3 / seconds / 1e9
        if size >= 2048 or seconds * 8 > 1.0:
            return rate
        size *= 2


def _dense(dtype: str, heads: int, length: int, rounds: int) -> Row:
    kind = DTYPES[dtype]
    q = torch.randn(length, heads, D_NOPE + D_ROPE).to(kind)
    kv = torch.randn(length, heads, D_NOPE + D_V).to(kind)
    k_nope, v = kv[..., :D_NOPE], kv[..., D_NOPE:]
    k_rope = torch.randn(length, D_ROPE).to(kind)
    cu = torch.tensor([0, length], dtype=torch.int32)

    def ours() -> object:
        return openmla.mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=cu)

    def peer(padded: bool, upto: int = heads, upcast: bool = False) -> Callable[[], Tensor]:
        cast = torch.float32 if upcast else kind
        group = slice(0, upto)

        def run() -> Tensor:
            a, b, c, d = (x.to(cast) for x in (q[:, group], k_nope[:, group], k_rope, v[:, group]))
            return peers.sdpa(a, b, c, d, padded).to(kind)

        return run

    contestants = [Contestant("openmla", ours)]
    for padded, name in ((False, "torch SDPA"), (True, "torch SDPA, V padded")):
        contestants.append(Contestant(name, peer(padded), peer(padded, upto=1), 1 / heads))
        if kind != torch.float32:
            contestants.append(
                Contestant(name + ", inputs cast to fp32", peer(padded, upcast=True))
            )
    flops = heads * length * (length + 1) * (D_NOPE + D_ROPE + D_V)
    return _row(f"dense causal, {heads} heads, {length} tokens", dtype, flops, contestants, rounds)


def _sparse(dtype: str, s_q: int, s_kv: int, topk: int, heads: int, rounds: int) -> Row:
    kind = DTYPES[dtype]
    q = torch.randn(s_q, heads, LATENT + D_ROPE).to(kind)
    kv = torch.randn(s_kv, LATENT + D_ROPE).to(kind)
    indices = torch.stack([torch.randperm(s_kv)[:topk] for _ in range(s_q)]).int()

    def ours() -> object:
        return openmla.mla_prefill_sparse(q, kv, indices, scale=SCALE)

    def peer(upto: int, upcast: bool = False) -> Callable[[], Tensor]:
        def run() -> Tensor:
            cast = torch.float32 if upcast else kind
            given = (q[:upto].to(cast), kv.to(cast), indices[:upto])
            return peers.gather_einsum(*given, LATENT, SCALE).to(kind)

        return run

    share = max(s_q // 64, 1)
    contestants = [Contestant("openmla", ours)]
    if s_q < 256:
        contestants.append(Contestant("torch gather + einsum", peer(s_q)))
    else:
        whole = peer(s_q)
        contestants.append(Contestant("torch gather + einsum", whole, peer(share), share / s_q))
    if kind != torch.float32:
        contestants.append(
            Contestant("torch gather + einsum, inputs cast to fp32", peer(s_q, upcast=True))
        )
    flops = 2 * s_q * topk * heads * (LATENT + D_ROPE + LATENT)
    case = f"sparse, {s_q} queries, top {topk} of {s_kv}, {heads} heads"
    row = _row(case, dtype, flops, contestants, rounds)
    # The peer's memory grows with the queries, so its share of them tells its whole appetite.
    peer_bytes = peak_extra_bytes(peer(share))
    return replace(
        row,
        extra_bytes=peak_extra_bytes(ours),
        peer_extra_bytes=None if peer_bytes is None else peer_bytes * s_q // share,
    )


def _row(case: str, dtype: str, flops: int, contestants: list[Contestant], rounds: int) -> Row:
    timings = race(contestants, rounds)
    ours = timings.pop("openmla").seconds
    rivals = [Peer(t.name, t.seconds, t.seconds / ours, t.note) for t in timings.values()]
    return Row(case, dtype, ours, flops / ours / 1e9, mm_gflops(DTYPES[dtype]), rivals)


def report(rows: Iterable[Row]) -> Report:
    """All cases."""
    found = list(rows)
    return Report(
        "openmla bench cpu",
        ("case and contestants", "time", "GFLOP/s", "openmla is"),
        [line for row in found for line in row.lines()],
        {"rows": [asdict(row) | {"mm_share": row.mm_share} for row in found]},
    )


def _memory(row: Row) -> str:
    if row.extra_bytes is None or not row.peer_extra_bytes:
        return ""
    part = row.extra_bytes / row.peer_extra_bytes
    return f"; peak memory +{row.extra_bytes / 2**20:.0f} MiB, {part:.1%} of the first peer's"
