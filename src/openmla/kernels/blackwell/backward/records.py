"""Records of Blackwell's backward kernels that no other family has.

Fields annotated `Any` hold run-time values of a kernel; the others are constants. All that other
families' kernels have too is in kernels/gluon/gradients/records.py.
"""

from typing import Any, NamedTuple

# Constants.


class QueryColumns(NamedTuple):
    """TMEM of the query pass: the first column of each tile."""

    nope: int
    rope: int
    scores: int
    products: int
    """dP."""
    gradients: int
    """dS, in 16 bits."""
    widest: int
    """Columns of the widest tile."""
    ctas: int = 1
    """CTAs that share a tile."""


class KeyColumns(NamedTuple):
    """TMEM of the key pass: the first column of each tile, transposed where it says so."""

    v: int
    nope: int
    rope: int
    scores: int
    """S^T."""
    products: int
    """dP^T."""
    weights: int
    """P^T, in 16 bits."""
    gradients: int
    """dS^T, in 16 bits."""
    widest: int
    """Columns of the widest tile."""
    ctas: int = 1
    """CTAs that share a tile."""


class Registers(NamedTuple):
    """REGISTERS: registers of a thread, by partition. The first group has what is left."""

    group: int
    """The second group of warps that compute."""
    single: int
    """Each partition of one warp."""


# Arguments of a kernel.


class Exchanged(NamedTuple):
    """Statistics of a tile's rows in shared memory, [128] each: every group works out half."""

    total: Any
    delta: Any


class Given(NamedTuple):
    """Global memory that the groups of the query pass read and write."""

    saved: Any
    """gluon.gradients.records.Saved"""
    stats: Any
    """Statistics"""
    d_q: Any
    """Rows"""


class QueryBarriers(NamedTuple):
    """Arrays of mbarriers; the head of query_pass.py says who completes them and who waits."""

    q_ready: Any
    d_ready: Any
    k_ready: Any
    k_empty: Any
    v_ready: Any
    v_empty: Any
    t_full: Any
    s_full: Any
    s_empty: Any
    dp_full: Any
    dp_empty: Any
    ds_full: Any
    ds_empty: Any


class KeyBarriers(NamedTuple):
    """Arrays of mbarriers; the head of key_pass.py says who completes them and who waits."""

    k_ready: Any
    v_ready: Any
    q_ready: Any
    d_ready: Any
    d_empty: Any
    q_empty: Any
    s_full: Any
    s_empty: Any
    dp_full: Any
    dp_empty: Any
    p_full: Any
    p_empty: Any
    ds_full: Any
    ds_empty: Any
