"""Where the rows of each query are listed, as kernels take it: a list, or a span of a table."""

from typing import Any

from openmla.kernels.call import vector
from openmla.planning.latent_split import MOST_ROWS
from openmla.sources import Listed, Source

NO_SPANS: dict[str, Any] = {"request_ptr": None, "begin_ptr": None, "requests": None}


def places_of(source: Source) -> dict[str, Any]:
    """The list of every token, or its span of a line of the block table."""
    entries = source.indices if isinstance(source, Listed) else source.block_table
    entries = entries if entries.stride(1) == 1 else entries.contiguous()
    found = {
        "indices_ptr": entries,
        "indices_stride": entries.stride(0),
        "rows": min(source.count, MOST_ROWS),
    }
    if isinstance(source, Listed):
        return {**found, "lengths_ptr": vector(source.lengths), "topk": entries.shape[1]}
    return {
        **found,
        "request_ptr": vector(source.request),
        "begin_ptr": vector(source.begin),
        "lengths_ptr": vector(source.end),
        "topk": source.table_keys,
        "requests": entries.shape[0],
    }
