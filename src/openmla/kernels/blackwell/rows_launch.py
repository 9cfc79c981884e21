"""The launcher of the kernels over latent rows: the pair kernel or the sparse kernel."""

from collections.abc import Iterator

from openmla.kernels.blackwell.pair.launch import calls as pair_calls
from openmla.kernels.blackwell.sparse.launch import Operands
from openmla.kernels.blackwell.sparse.launch import calls as single_calls
from openmla.kernels.call import Call
from openmla.operands import Results
from openmla.planning import Plan


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """The kernel calls of a launch."""
    return (pair_calls if plan.config.ctas == 2 else single_calls)(plan, op, results)
