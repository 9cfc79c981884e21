"""What a plan takes of the chip: shared memory, tensor memory, threads, registers.

Every kernel family keeps its numbers in its own config; here they are read as one kind of record,
for pictures and for the rule that no plan ever exceeds its target.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from openmla.plan.blackwell_fa4 import FA4Config
from openmla.plan.blackwell_mla import MLAConfig
from openmla.plan.blackwell_smem import SM100AttentionSMem
from openmla.plan.blackwell_sparse_prefill import (
    P_TMEM_ADDR,
    MLAPrefillSparse,
    MLAPrefillSparseFP8,
)
from openmla.plan.blackwell_sparse_qkv_fp8 import MLAPrefillSparseQKVFP8
from openmla.plan.blackwell_sparse_smem import Offsets
from openmla.plan.blackwell_units import NUM_THREADS, SMEM_CARVEOUT, TMEM_ADDR_BYTES, TMEM_COLS
from openmla.plan.cdna4_prefill import LDS_BYTES, MlaPrefillV2
from openmla.plan.config import Plan
from openmla.plan.families import fp8_cache_smem
from openmla.plan.hopper_dense import HopperDenseConfig
from openmla.plan.hopper_sparse import HopperSparseConfig
from openmla.plan.memory import MemoryMap, Region, Wanted, lay_out
from openmla.plan.portable import PortableConfig
from openmla.plan.target import target_by_name

_SPARSE_KINDS = {"qkvo_union": "k", "scores": "p", "p": "p", "q": "q", "kv": "k", "v": "v"}


@dataclass(frozen=True, slots=True)
class Use:
    """How much of one resource is used, of how much."""

    name: str
    used: int
    limit: int

    def __str__(self) -> str:
        return f"{self.name} {self.used} of {self.limit}"


@dataclass(frozen=True, slots=True)
class Columns:
    """A range of tensor-memory columns."""

    name: str
    first: int
    count: int


def uses(plan: Plan) -> list[Use]:
    """Everything a plan takes of its target; empty on a CPU."""
    target = target_by_name(plan.target)
    smem = memory_map(plan)
    if smem is None:
        return []
    listed = [
        Use("shared memory bytes", smem.used, min(smem.limit, target.smem_per_block)),
        Use("threads", threads(plan.config), target.max_threads),
    ]
    if columns := tmem_columns(plan):
        end = max(c.first + c.count for c in columns)
        listed.append(Use("tensor-memory columns", end, target.tmem_cols))
    registers = registers_per_block(plan.config)
    if registers:
        listed.append(Use("registers", registers, target.registers_per_sm))
    return listed


def over_budget(plan: Plan) -> str:
    """The first resource that a plan exceeds; empty when it keeps within all."""
    return next((str(use) for use in uses(plan) if use.used > use.limit), "")


def threads(config: Any) -> int:
    """Threads of one block."""
    if isinstance(config, MLAConfig):
        return config.launch_num_threads()
    if isinstance(config, MlaPrefillV2):
        return config.NUM_THREADS
    return int(getattr(config, "num_threads", NUM_THREADS))


def registers_per_block(config: Any) -> int:
    """Registers the plan fixes itself; 0 where the compiler decides."""
    if isinstance(config, HopperDenseConfig | HopperSparseConfig):
        registers = config.registers
        return max(registers.total, registers.threads * registers.at_launch)
    return 0


def memory_map(plan: Plan) -> MemoryMap | None:
    """Shared memory or LDS of one block, region by region; None on a CPU."""
    config = plan.config
    if isinstance(config, HopperDenseConfig | HopperSparseConfig):
        return config.smem_map()
    if isinstance(config, MLAConfig):
        return _blackwell_map(config.fa4_config)
    if isinstance(config, FA4Config):
        return _blackwell_map(config)
    if isinstance(config, MLAPrefillSparse | MLAPrefillSparseQKVFP8):
        return _sparse_map(plan)
    if isinstance(config, MlaPrefillV2):
        return _cdna4_map(config)
    return _portable_map(config) if isinstance(config, PortableConfig) else None


def _blackwell_map(config: FA4Config) -> MemoryMap:
    smem = SM100AttentionSMem(config)
    stages = range(config.num_kv_stages)
    wanted = [
        Wanted("Q nope", "q", smem.q_nope_bytes, align=1),
        Wanted("Q rope", "q", smem.q_rope_bytes, align=1),
    ]
    if config.use_fused_kv:
        wanted += [Wanted(f"slot {i}: K or V", "k", smem.k_stage_bytes, align=1) for i in stages]
        each = smem.rope_bytes // max(smem.num_rope_bufs, 1)
        wanted += [Wanted(f"K rope {i}", "rope", each, align=1) for i in range(smem.num_rope_bufs)]
    else:
        wanted += [Wanted(f"K{i}", "k", smem.k_stage_bytes, align=1) for i in stages]
        wanted += [Wanted(f"V{i}", "v", smem.v_stage_bytes, align=1) for i in stages]
    wanted += [
        Wanted("correction", "stats", smem.correction_bytes, align=1),
        Wanted("Q scales", "stats", smem.q_scale_bytes, align=1),
        Wanted("K scales", "stats", smem.k_scale_bytes, align=1),
        Wanted("barriers", "barriers", smem.mbar_bytes, align=1),
        Wanted("TMEM address", "barriers", TMEM_ADDR_BYTES, align=1),
        Wanted("reserved", "scratch", config.smem_used - smem.smem_size(), align=1),
    ]
    return lay_out(wanted, SMEM_CARVEOUT)


def _sparse_map(plan: Plan) -> MemoryMap:
    """The big fields by name, everything small as one region of barriers and statistics."""
    config = plan.config
    offsets = config.smem.offsets
    big = [name for name in offsets if name in _SPARSE_KINDS]
    ends = _ends(offsets)
    regions = [
        Region(_sparse_label(name), _SPARSE_KINDS[name], offsets[name], ends[name] - offsets[name])
        for name in big
    ]
    rest = max(ends[name] for name in big)
    end = offsets["_end"]
    regions.append(Region("barriers, masks, row statistics", "barriers", rest, end - rest))
    if isinstance(config, MLAPrefillSparseFP8):
        total = fp8_cache_smem(config, plan.problem).size_of
        regions.append(Region("scales of the FP8 rows", "stats", end, total - end))
    return MemoryMap(tuple(regions), SMEM_CARVEOUT)


def _sparse_label(name: str) -> str:
    labels = {"qkvo_union": "Q, then Q + V + K, then output", "p": "P", "kv": "K (and V)"}
    return labels.get(name, name)


def _ends(offsets: Offsets) -> dict[str, int]:
    """Where each field stops: where the next one starts."""
    names = list(offsets)
    return {name: offsets[after] for name, after in pairwise(names)}


def _cdna4_map(block: MlaPrefillV2) -> MemoryMap:
    k_slots = block.k_ring_bytes // block.k_slot_bytes
    v_slots = block.v_ring_bytes // block.v_slot_bytes
    wanted = [Wanted("Q", "q", block.q_bytes)]
    wanted += [Wanted(f"K{i}", "k", block.k_slot_bytes) for i in range(k_slots)]
    wanted += [Wanted(f"V{i}", "v", block.v_slot_bytes) for i in range(v_slots)]
    return lay_out(wanted, LDS_BYTES)


def _portable_map(config: PortableConfig) -> MemoryMap:
    stages = [
        Wanted(f"stage {i}: K and V", "k", config.stage_bytes, align=1)
        for i in range(config.buffers)
    ]
    q, p = Wanted("Q", "q", config.q_bytes, align=1), Wanted("P", "p", config.p_bytes, align=1)
    return lay_out([q, *stages, p], config.smem_limit)


def tmem_columns(plan: Plan) -> list[Columns]:
    """Tensor memory of one block, range by range; empty without tensor memory."""
    config = plan.config
    if isinstance(config, MLAConfig):
        return _dense_columns(config.fa4_config)
    if isinstance(config, FA4Config):
        return _dense_columns(config)
    if isinstance(config, MLAPrefillSparseQKVFP8):
        atom = config.O_ATOM_PHYS_COLS
        scores = [
            Columns(f"S{i}", config.S_TMEM_BASE + i * config.S_SLOT_STRIDE, config.S_SLOT_STRIDE)
            for i in range(config.NUM_S_SLOTS)
        ]
        return [Columns("O left", 0, atom), Columns("O right", atom, atom), *scores]
    if isinstance(config, MLAPrefillSparse):
        atom = config.O_ATOM_PHYS_COLS
        return [
            Columns("O left", 0, atom),
            Columns("O right", atom, atom),
            Columns("scores", P_TMEM_ADDR, config.score_cols),
            Columns("Q", config.Q_TMEM_ADDR, TMEM_COLS - config.Q_TMEM_ADDR),
        ]
    return []


def _dense_columns(config: FA4Config) -> list[Columns]:
    score, out = config.TMEM_S1, config.padded_ov_depth
    columns = [Columns("S0, then P0", 0, score), Columns("S1, then P1", score, score)]
    if config.single_o:
        return [*columns, Columns("O", config.TMEM_O0, out)]
    return [*columns, Columns("O0", config.TMEM_O0, out), Columns("O1", config.TMEM_O1, out)]
