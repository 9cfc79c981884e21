"""Records of Hopper's backward kernels that no other family has: registers and barriers.

Fields annotated `Any` hold run-time values of a kernel; the others are constants. All that other
families' kernels have too is in kernels/gluon/gradients/records.py.
"""

from typing import Any, NamedTuple


class Registers(NamedTuple):
    """REGISTERS: of a thread, by partition. The scheduler has as many as the producer."""

    consumer: int
    producer: int


class QueryBarriers(NamedTuple):
    """Arrays of mbarriers; the head of query_pass.py says who completes them and who waits."""

    q_ready: Any
    q_empty: Any
    k_ready: Any
    k_empty: Any
    v_ready: Any
    v_empty: Any
    t_ready: Any
    t_empty: Any
    t_request: Any


class KeyBarriers(NamedTuple):
    """Arrays of mbarriers; the head of key_pass.py says who completes them and who waits."""

    k_ready: Any
    k_empty: Any
    q_ready: Any
    q_empty: Any
    d_ready: Any
    d_empty: Any
    t_ready: Any
    t_empty: Any
    t_request: Any


class Sums(NamedTuple):
    """Accumulators of the key pass; without rope, `rope` is an alias of `nope`."""

    v: Any
    nope: Any
    rope: Any
