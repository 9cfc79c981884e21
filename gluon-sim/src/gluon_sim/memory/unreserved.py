"""Memory that takes up space only where it is touched, so that a tensor may span terabytes."""

from __future__ import annotations

import mmap

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which the mmap module does not name


def unreserved(size: int) -> mmap.mmap:
    """`size` bytes of zeros for `torch.frombuffer`; the system reserves none of them beforehand.

    >>> far = torch.frombuffer(unreserved(2**40), dtype=torch.int8)        # doctest: +SKIP
    """
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
