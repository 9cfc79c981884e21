"""The launcher of the kernels over latent rows: of a pair of CTAs, or of one at a time."""

from collections.abc import Iterator

from openmla.kernels.blackwell.pair.launch import calls as pair_calls
from openmla.kernels.blackwell.sparse.launch import Operands
from openmla.kernels.blackwell.sparse.launch import calls as single_calls
from openmla.kernels.call import Call
from openmla.operands import Results
from openmla.planning import Plan
from openmla.planning.blackwell.sparse.pair import takes_pair


def calls(plan: Plan, op: Operands, results: Results) -> Iterator[Call]:
    """What a launch runs."""
    return (pair_calls if takes_pair(plan.config) else single_calls)(plan, op, results)
