"""Bank conflicts of a banked memory, counted by enumeration.

A banked memory serves one word per bank and cycle. Lanes that are served together conflict when
they ask one bank for *different* words; asking for the same word is a broadcast and costs nothing.

>>> stride_8 = [8 * lane for lane in range(16)]       # 16 lanes, 8 bytes each, back to back
>>> bank_use(stride_8, 8).ways                        # 128 bytes: banks 0 to 31, once each
1
>>> stride_256 = [256 * lane for lane in range(16)]   # every lane starts in bank 0
>>> bank_use(stride_256, 8).ways, bank_use(stride_256, 8).distinct
(16, 2)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openmla.errors import InvalidArgument


@dataclass(frozen=True)
class Banks:
    """How a memory is banked: `count` banks of `width` bytes, `group` lanes served together."""

    count: int
    width: int
    group: int

    def __post_init__(self) -> None:
        for name in ("count", "width", "group"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, "a positive integer", getattr(self, name))


#: The LDS of gfx950: 64 banks of 4 bytes. An 8- or 16-byte read serves 16 lanes at a time: 16
#: lanes of 16 bytes are exactly one word of every bank.
CDNA4_LDS = Banks(count=64, width=4, group=16)


@dataclass(frozen=True)
class BankUse:
    """What one group of lanes asks of the banks: `words[b]` distinct words of bank b."""

    words: tuple[int, ...]

    @property
    def distinct(self) -> int:
        """How many banks are asked at all."""
        return sum(1 for n in self.words if n)

    @property
    def ways(self) -> int:
        """Cycles the access takes: the load of the busiest bank. 1 is free of conflicts."""
        return max(self.words)


def words_of(address: int, access_bytes: int, banks: Banks = CDNA4_LDS) -> range:
    """Numbers of the words that `access_bytes` bytes from `address` on lie in.

    >>> words_of(1048, 8)          # bytes 1048..1055 are words 262 and 263, in banks 6 and 7
    range(262, 264)
    """
    if address < 0:
        raise InvalidArgument("address", "a byte offset, 0 or more", address)
    if access_bytes < 1:
        raise InvalidArgument("access_bytes", "1 or more", access_bytes)
    return range(address // banks.width, (address + access_bytes - 1) // banks.width + 1)


def bank_use(addresses: Iterable[int], access_bytes: int, banks: Banks = CDNA4_LDS) -> BankUse:
    """Distinct words per bank when every address is read for `access_bytes` bytes at once."""
    asked = {word for address in addresses for word in words_of(address, access_bytes, banks)}
    words = [0] * banks.count
    for word in asked:
        words[word % banks.count] += 1
    return BankUse(tuple(words))


def group_uses(
    lane_addresses: Sequence[int], access_bytes: int, banks: Banks = CDNA4_LDS
) -> tuple[BankUse, ...]:
    """One BankUse per group of `banks.group` consecutive lanes.

    >>> [use.ways for use in group_uses([8 * lane for lane in range(64)], 8)]
    [1, 1, 1, 1]
    """
    if not lane_addresses or len(lane_addresses) % banks.group:
        raise InvalidArgument(
            "lane_addresses", f"a multiple of {banks.group} lanes", f"{len(lane_addresses)} lanes"
        )
    return tuple(
        bank_use(lane_addresses[first : first + banks.group], access_bytes, banks)
        for first in range(0, len(lane_addresses), banks.group)
    )
