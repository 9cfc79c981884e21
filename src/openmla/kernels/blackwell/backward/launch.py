"""Host side of Blackwell's backward pass: its kernels beside what all families share.

The calls themselves are listed by kernels/gluon/gradients/launch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.kernels.blackwell.backward.key_pass import key_pass_kernel
from openmla.kernels.blackwell.backward.plan import (
    GROUP_REGISTERS,
    SINGLE_REGISTERS,
    BlackwellBackwardConfig,
    KeyPass,
    QueryPass,
)
from openmla.kernels.blackwell.backward.query_pass import query_pass_kernel
from openmla.kernels.blackwell.backward.records import KeyColumns, QueryColumns, Registers
from openmla.kernels.call import Call
from openmla.kernels.gluon.gradients.launch import Passes, tiles_of
from openmla.kernels.gluon.gradients.launch import calls as calls_of_passes
from openmla.planning import Plan


def calls(plan: Plan, operands: BackwardOperands, gradients: Gradients) -> Iterator[Call]:
    """What a backward pass runs, in order."""
    passes = Passes(query_pass_kernel, key_pass_kernel, plan.config.own_rows, _launched)
    return calls_of_passes(plan, operands, gradients, passes)


def _launched(kernel: Any, plan: Plan, rows: int, arguments: dict[str, Any]) -> Call:
    """A program per work item; lengths are on the device, so there may be more."""
    config: BlackwellBackwardConfig = plan.config
    by_keys = kernel is key_pass_kernel
    columns = key_columns(KeyPass(config)) if by_keys else query_columns(QueryPass(config))
    own = {
        "REGISTERS": Registers(GROUP_REGISTERS, SINGLE_REGISTERS),
        "TMEM": columns,
        "TMEM_COLUMNS": (KeyPass if by_keys else QueryPass)(config).tmem_columns,
    }
    return Call(kernel, tiles_of(plan, rows), {**arguments, **own})


def query_columns(own: QueryPass) -> QueryColumns:
    """Tensor memory of the query pass; without rope, its columns are an alias of nope's."""
    first = {name: columns.first for name, columns in own.tile_columns.items()}
    return QueryColumns(
        nope=first["d_q nope"],
        rope=first.get("d_q rope", first["d_q nope"]),
        scores=first["scores"],
        products=first["products"],
        gradients=first["dS"],
        widest=own.widest,
    )


def key_columns(own: KeyPass) -> KeyColumns:
    """Tensor memory of the key pass, likewise."""
    first = {name: columns.first for name, columns in own.tile_columns.items()}
    return KeyColumns(
        v=first["d_v"],
        nope=first["d_k nope"],
        rope=first.get("d_k rope", first["d_k nope"]),
        scores=first["scores"],
        products=first["products"],
        weights=first["P"],
        gradients=first["dS"],
        widest=own.widest,
    )
