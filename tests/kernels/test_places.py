"""Where the rows of each query are listed, as kernels take it: lists of any strides, and spans."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.kernels.gluon.places import NO_SPANS, places_of
from openmla.sources import Listed, Span

ROWS = torch.zeros(50, 576, dtype=torch.bfloat16)
LISTS = torch.arange(12, dtype=torch.int32).view(3, 4)


@pytest.mark.parametrize(
    ("lists", "copied"),
    [
        (LISTS, False),
        (LISTS[:, :3], False),
        (LISTS.t().contiguous().t(), True),
        (LISTS[:, :1].expand(3, 4), True),
        (LISTS[:, ::2], True),
    ],
    ids=[
        "side by side",
        "with gaps",
        "column by column",
        "one entry again and again",
        "every other",
    ],
)
def test_entries_of_a_list_lie_side_by_side(lists: Tensor, copied: bool) -> None:
    """Kernels take a stride of lists and none of entries; what lies so already is not copied."""
    found = places_of(Listed(ROWS, lists))
    taken = found["indices_ptr"]
    assert torch.equal(taken, lists) and taken.stride(1) == 1
    assert (taken.data_ptr() != lists.data_ptr()) == copied
    assert (found["indices_stride"], found["topk"]) == (taken.stride(0), lists.shape[1])
    assert found["rows"] == 50 and not found.keys() & NO_SPANS.keys()


def test_a_span_has_the_places_of_its_table() -> None:
    table = torch.tensor([[7, 2], [1, 0]], dtype=torch.int32)
    request, begin, end = (torch.tensor([x, x], dtype=torch.int32) for x in (1, 2, 6))
    cache = LatentCache.allocate(num_pages=10, page_size=5, device="cpu")
    found = places_of(Span(cache, table, request, begin, end))
    assert found["indices_ptr"] is table and found["indices_stride"] == 2
    assert (found["requests"], found["topk"], found["rows"]) == (2, 10, 50)
    for name, want in (("request_ptr", request), ("begin_ptr", begin), ("lengths_ptr", end)):
        assert torch.equal(found[name], want), name
