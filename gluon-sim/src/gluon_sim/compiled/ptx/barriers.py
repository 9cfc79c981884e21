"""Where warps wait for each other and for work: mbarriers, named barriers, clusters, registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.ptx.block import MBarrier, NamedBarrier
from gluon_sim.compiled.ptx.operands import Form
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.races import WORD, joined
from gluon_sim.compiled.ptx.state import Warp

_FEWEST_REGISTERS, _MOST_REGISTERS = 24, 256


def _mbarrier(form: Form) -> Run:
    what = form.parts[1]
    if what == "init":
        return _init(form)
    if what == "inval":
        return _inval(form)
    if what == "arrive":
        return _arrive(form)
    if what == "expect_tx":
        return _expect(form)
    if what in ("try_wait", "test_wait") and form.parts[2] == "parity":
        return _wait(form)
    raise form.unknown()


def _init(form: Form) -> Run:
    address, count = form.address(0), form.read(1, "u32")

    def run(w: Warp) -> None:
        block, at = w.cluster.place(w.one(address(w)))
        if at % 8:
            raise Fault(Kind.ALIGNMENT, f"mbarrier at {at:#x}")
        block.check(at, 8, "mbarrier")
        old = block.mbarriers.get(at)
        if old is not None and old.pending != old.count:
            raise Fault(Kind.BARRIER, f"mbarrier {at:#x} is initialized again in use")
        number = w.one(count(w))
        block.races.write(slice(at // WORD, at // WORD + 2), w.event(), "mbarrier.init")
        block.mbarriers[at] = MBarrier(number, number)

    return run


def _inval(form: Form) -> Run:
    address = form.address(0)

    def run(w: Warp) -> None:
        block, at = w.cluster.place(w.one(address(w)))
        block.barrier(at)
        block.races.write(slice(at // WORD, at // WORD + 2), w.event(), "mbarrier.inval")
        del block.mbarriers[at]

    return run


def _arrive(form: Form) -> Run:
    address, expects = form.address(1), form.has("expect_tx")
    number = form.read(2, "u32") if len(form.operands) > 2 else None
    if form.has("drop", "noinc"):
        raise form.unknown()

    def run(w: Warp) -> None:
        addresses, numbers = address(w), number(w) if number else np.ones(32, np.uint32)
        event, told = w.event(), w.clocks.tell(w.number)
        for lane in w.active():
            block, at = w.cluster.place(int(addresses[lane]))
            block.barrier(at, event)
            if expects:
                block.expect(at, int(numbers[lane]))
            block.arrive(at, 1 if expects else int(numbers[lane]), told)

    return run


def _expect(form: Form) -> Run:
    address, number = form.address(0), form.read(1, "u32")

    def run(w: Warp) -> None:
        for lane in w.active():
            block, at = w.cluster.place(int(address(w)[lane]))
            block.expect(at, int(number(w)[lane]))

    return run


def _wait(form: Form) -> Run:
    """A wait that fails is tried again when something has happened, so it never returns false."""
    write, address, parity = form.write(0, "pred"), form.address(1), form.read(2, "u32")

    def run(w: Warp) -> bool:
        block, at = w.cluster.place(w.one(address(w)))
        wanted = w.one(parity(w))
        if wanted > 1:
            raise Fault(Kind.BARRIER, f"wait for parity {wanted}")
        if block is not w.block:
            raise Fault(Kind.BARRIER, "wait for the mbarrier of another block")
        barrier = block.barrier(at, w.event())
        phase = barrier.phase
        seen, w.waiting_at = w.waiting_at, None
        if phase & 1 != wanted or not w.waits:
            if w.cluster.log.trace is not None:
                w.cluster.log.trace.wait((block.number, at, phase - 1), w.where(), block.products)
            write(w, np.ones(32, bool))
            if w.waits:
                w.clocks.hear(w.number, barrier.known)
            return False
        if seen is not None and seen[:2] == ("mbarrier", at) and seen[2] != phase:
            raise Fault(Kind.PHASE, f"mbarrier {at:#x} turned twice while a warp waited for it")
        w.waiting_at, w.waits_for = ("mbarrier", at, phase), f"mbarrier {at:#x} phase {phase}"
        return True

    return run


def _bar(form: Form) -> Run:
    if form.has("cluster"):
        return _cluster(form)
    if form.has("warp") or form.parts[-1] == "warp":
        return lambda w: None  # lanes of a warp run together
    if form.has("red"):
        raise form.unknown()
    number = form.read(0, "u32")
    count = form.read(1, "u32") if len(form.operands) > 1 else None
    only_arrives = form.has("arrive")

    def run(w: Warp) -> bool:
        w.together("a barrier")
        name = w.one(number(w))
        threads = w.one(count(w)) if count else w.kernel.threads
        barrier = w.block.named.setdefault(name, NamedBarrier(threads))
        if w.waiting_at is not None:
            return not _passed(w, barrier)
        if threads % 32 or (barrier.arrived and barrier.threads != threads):
            message = f"barrier {name} for {threads} threads, others say {barrier.threads}"
            raise Fault(Kind.BARRIER, message)
        barrier.threads = threads
        return _meet(w, barrier, f"barrier {name}", only_arrives)

    return run


def _meet(w: Warp, barrier: NamedBarrier, name: str, only_arrives: bool) -> bool:
    """Arrive; True where the warp has to wait for others."""
    who = w.block.rank << 8 | w.index
    if who in barrier.arrived:
        raise Fault(Kind.BARRIER, f"warp {w.index} comes to {name} twice")
    barrier.arrived.add(who)
    barrier.told = joined(barrier.told, w.clocks.tell(w.number))
    if 32 * len(barrier.arrived) == barrier.threads:
        barrier.arrived.clear()
        barrier.turns += 1
        barrier.known, barrier.told = barrier.told, None
        w.cluster.engine.progress()
        if not only_arrives:
            w.clocks.hear(w.number, barrier.known)
        return False
    if only_arrives:
        return False
    w.waiting_at, w.waits_for = ("barrier", 0, barrier.turns), name
    return True


def _passed(w: Warp, barrier: NamedBarrier) -> bool:
    if w.waiting_at is None or w.waiting_at[2] == barrier.turns:
        return False
    w.waiting_at = None
    w.clocks.hear(w.number, barrier.known)
    return True


def _cluster(form: Form) -> Run:
    if form.has("arrive"):

        def arrive(w: Warp) -> None:
            w.together("a cluster barrier")
            barrier = w.cluster.meeting
            w.met = barrier.turns
            _meet(w, barrier, "the cluster barrier", only_arrives=True)

        return arrive

    def wait(w: Warp) -> bool:
        w.waits_for = "the cluster barrier"
        if w.met == w.cluster.meeting.turns:
            return True
        w.clocks.hear(w.number, w.cluster.meeting.known)
        return False

    return wait


def _setmaxnreg(form: Form) -> Run:
    """Registers move between a warp and its block's pool; who asks for more waits for them."""
    wanted, more = int(form.operands[0]), form.has("inc")

    def run(w: Warp) -> bool:
        w.together("setmaxnreg")
        if wanted % 8 or not _FEWEST_REGISTERS <= wanted <= _MOST_REGISTERS:
            raise Fault(Kind.BARRIER, f"setmaxnreg {wanted}")
        if wanted != w.registers and (wanted > w.registers) != more:
            raise Fault(Kind.BARRIER, f"setmaxnreg from {w.registers} to {wanted}")
        needed = 32 * (wanted - w.registers)
        if needed > w.block.free_registers:
            w.waits_for = f"{needed} registers of {w.block.free_registers} free ones"
            return True
        w.block.free_registers -= needed
        w.registers = wanted
        w.cluster.engine.progress()
        return False

    return run


def _fence(form: Form) -> Run:
    if form.has("proxy"):
        return lambda w: w.block.publish(w.event().heard)
    return lambda w: None


def _exit(form: Form) -> Run:
    def run(w: Warp) -> None:
        w.together("exit")
        w.done = True
        note = w.cluster.log.note
        if w.loads or w.stores:
            note("tcgen05.ld or st that nobody waited for at exit")
        for kind in w.groups:
            work = [*w.open[kind], *(x for group in w.groups[kind] for x in group)]
            if any(not x.done for x in work):
                note(f"{kind} work that nobody waited for at exit")

    return run


BUILDERS: dict[str, Callable[[Form], Run]] = {
    "mbarrier": _mbarrier,
    "bar": _bar,
    "barrier": _bar,
    "setmaxnreg": _setmaxnreg,
    "fence": _fence,
    "ret": _exit,
    "exit": _exit,
}
