"""The description of cache rows agrees with itself and with the cache."""

from __future__ import annotations

from typing import get_args

import pytest

from openmla import LatentCache
from openmla.formats import ELEMENT_BITS, FORMATS, FormatName, RowFormat, RowLayout

WIDTHS = {name: format.widths or ((512, 64), (40, 8), (24, 0)) for name, format in FORMATS.items()}
LAYOUTS = [FORMATS[name].layout(*widths) for name, several in WIDTHS.items() for widths in several]
NAMES = [f"{layout.format.name} {layout.latent}+{layout.rope}" for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_every_byte_of_a_row_belongs_to_one_field(layout: RowLayout):
    for tensor in ("data", "scales"):
        fields = [field for field in layout.fields if field.tensor == tensor]
        ends = [0, *(field.end for field in fields)]
        assert [field.offset for field in fields] == ends[:-1]
        for field in fields:
            assert field.offset * 8 % ELEMENT_BITS[field.dtype] == 0, "aligned rows stay so"
    columns = sum(field.count for field in layout.fields if field.role in ("columns", "tail"))
    assert columns == layout.width
    assert sorted(layout.scale_places) == [*range(layout.blocks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_the_cache_is_as_large_as_the_description_says(layout: RowLayout):
    cache = LatentCache.allocate(
        num_pages=3, page_size=2, latent=layout.latent, rope=layout.rope, format=layout.format.name
    )
    assert cache.nbytes == 6 * layout.row_bytes
    assert (cache.scales is None) == (layout.scale_columns == 0)
    for name in ("e4m3", "e2m1", "bf16", "columns", "scales", "tail"):
        field, view = layout.field(name), cache.field(name)
        assert (field is None) == (view is None)
        if field is not None and view is not None:
            tensor = cache.data if field.tensor == "data" else cache.scales
            assert tensor is not None
            assert view.data_ptr() - tensor.data_ptr() == field.offset
            held = 2 if field.dtype == "e2m1" else 1  # columns of an element
            assert tuple(view.shape) == (3, 2, field.count // held)
            assert view.element_size() * 8 == ELEMENT_BITS[field.dtype] * held


def test_widths_that_a_format_exists_in():
    some = RowFormat("some", "e4m3", "fp32", widths=((512, 64), (128, 0)))
    assert some.takes(128, 0) and not some.takes(512, 0)
    assert RowFormat("any", "bf16").takes(3, 1)


def test_types_list_every_format():
    assert get_args(FormatName) == tuple(FORMATS)
