"""What a plan takes of its chip, against what there is: no plan may exceed its target."""

from dataclasses import dataclass

from openmla.planning.registry import Plan
from openmla.planning.target import target_by_name


@dataclass(frozen=True, slots=True)
class Use:
    """How much of one resource is used, of how much."""

    name: str
    used: int
    limit: int

    def __str__(self) -> str:
        return f"{self.name} {self.used} of {self.limit}"


def uses(plan: Plan) -> list[Use]:
    """Everything a plan takes of its target; empty on a CPU."""
    target, block = target_by_name(plan.target), plan.block
    if block is None:
        return []
    smem = block.memory
    listed = [
        Use("shared memory bytes", smem.used, min(smem.limit, target.smem_per_block)),
        Use("threads", block.threads, target.max_threads),
    ]
    if block.tensor_memory:
        end = max(columns.first + columns.count for columns in block.tensor_memory)
        listed.append(Use("tensor-memory columns", end, target.tmem_cols))
    if block.registers:
        listed.append(Use("registers", block.registers, target.registers_per_sm))
    return listed


def over_budget(plan: Plan) -> str:
    """The first resource that a plan exceeds; empty when it keeps within all."""
    return next((str(use) for use in uses(plan) if use.used > use.limit), "")
