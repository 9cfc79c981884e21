"""What the warps of a partition know of one another.

To the simulator a partition is one thread. Its warps are not, until they meet at a barrier of their
own: one warp may have finished its part of a product while another still reads the operands, and
one thread that signals for all of them says only what it knows.
"""

from __future__ import annotations

from gluon_sim.machine.clocks import Clock, Component


class Warps:
    """When the warps of one partition, which knows `clock`, last met, and what happened since."""

    def __init__(self, clock: Clock, component: Component) -> None:
        self.barriers = 0  # met so often, see Access.epoch
        self.touched = False  # they used shared memory since, as far as the compiler sees
        self.unmet = False  # they used what the compiler does not see as shared memory
        self._clock, self._component = clock, component
        self._met = Clock()

    def meet(self) -> None:
        """A barrier: what one of them did, all of them now know."""
        self.barriers += 1
        self._met = self._clock.copy()
        self._clock.tick(self._component)
        self.touched = self.unmet = False

    def known_to_one(self) -> Clock:
        """What a thread can tell others: of its own partition only what was done before they met.

        That is its partition's own accesses, and the queues of operations that its warps issue
        together; what other partitions told it, every thread heard by itself.
        """
        known = self._clock.copy()
        for part, before in ((known.seen, self._met.seen), (known.fenced, self._met.fenced)):
            for component in part:
                owner = component[0] if isinstance(component, tuple) else component
                if owner == self._component:
                    part[component] = before.get(component, 0)
        return known
