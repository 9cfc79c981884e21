"""Seeded defects of Hopper kernels whose partitions hand over by rules that are easy to break."""

from gluon_sim import Kind
from seeded.defect import NOTHING, of

HANDOVER = [
    *of(
        "ping_pong",
        (
            "the server does not wait for the reply",
            Kind.RACE,
            'signal("bar.sync 9, 256; mov.b32 $0, 0;")',
            'signal("bar.arrive 9, 256; mov.b32 $0, 0;")',
        ),
        (
            "the reader does not wait for the box",
            Kind.RACE,
            'signal("bar.sync 8, 256; mov.b32 $0, 0;")',
            'signal("bar.arrive 8, 256; mov.b32 $0, 0;")',
        ),
        (
            "the thread counts of a named barrier differ",
            Kind.ARRIVE,
            "bar.arrive 9, 256",
            "bar.arrive 9, 384",
        ),
        ("a reply is never sent", Kind.DEADLOCK, "bar.arrive 9, 256", "bar.arrive 10, 256"),
        (
            "a named barrier of less than a warp",
            Kind.BARRIER,
            "bar.arrive 9, 256",
            "bar.arrive 9, 250",
        ),
        (
            "a named barrier that does not exist",
            Kind.BARRIER,
            'signal("bar.sync 8,',
            'signal("bar.sync 16,',
        ),
        (
            "the barrier of the default warps",
            Kind.BARRIER,
            'signal("bar.sync 8,',
            'signal("bar.sync 0,',
        ),
        (
            "the barrier that starts partitions",
            Kind.BARRIER,
            'signal("bar.sync 8,',
            'signal("bar.sync 1,',
        ),
        (
            "the barrier of the other partition",
            Kind.BARRIER,
            'signal("bar.sync 8,',
            'signal("bar.sync 2,',
        ),
    ),
    *of(
        "in_turn",
        (
            "the reader listens at the barrier of the other turn",
            Kind.DEADLOCK,
            "turn(i)",
            "turn(i + 1)",
            "def read",
        ),
        (
            "the number of a turn is that of another barrier",
            Kind.ARRIVE,
            "return 11 + (i & 1)",
            "return 10 + (i & 1)",
        ),
        (
            "one barrier for all turns: the writer arrives at it twice",
            Kind.ARRIVE,
            "return 11 + (i & 1)",
            "return 11",
        ),
        (
            "one barrier for all turns: nobody comes while the reader listens",
            Kind.DEADLOCK,
            "return 11 + (i & 1)",
            "return 11",
        ),
        (
            "the reader does not wait for its turn",
            Kind.RACE,
            'signal_at("bar.sync $1, 256; mov.b32 $0, 0;", turn(i))',
            NOTHING,
        ),
    ),
    *of(
        "trusted_copies",
        (
            "nobody says that copies are trusted",
            Kind.FENCE,
            'signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")',
            NOTHING,
        ),
        (
            "copies are trusted before they have arrived",
            Kind.FENCE,
            "    mbarrier.wait(landed, 0)\n"
            '    signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")\n',
            '    signal("mov.b32 $0, 0; // copies that have arrived are seen by wgmma")\n'
            "    mbarrier.wait(landed, 0)\n",
        ),
        (
            "an ordinary write before the trusted copies is not fenced",
            Kind.FENCE,
            "    fence_async_shared()\n",
            "",
        ),
        (
            "an ordinary write after the trusted copies is not fenced",
            Kind.FENCE,
            'are seen by wgmma")\n',
            'are seen by wgmma")\n    box.store(value)\n',
        ),
        (
            "copies are trusted and not waited for",
            Kind.RACE,
            "    mbarrier.wait(landed, 0)\n",
            "",
        ),
    ),
    *of(
        "reused_operand",
        (
            "a tile is overwritten while other warps read it",
            Kind.RACE,
            "thread_barrier()  # every warp's product has read the tile",
            NOTHING,
        ),
        (
            "a wait that passes at once takes the place of a barrier of the warps",
            Kind.RACE,
            "thread_barrier()  # every warp's product has read the tile",
            "mbarrier.wait(loaded, 0)",
        ),
    ),
    *of(
        "two_notices",
        (
            "the announcement of a copy stands for what all warps wrote",
            Kind.RACE,
            "    mbarrier.wait(noted, 0)\n",
            "",
        ),
    ),
]
