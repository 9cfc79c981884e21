"""Malformed calls inside one graph of torch.compile: the error still says what is wrong."""

from __future__ import annotations

import pytest
import torch

from malformed.arguments import CALLS, Malformed, arguments_of
from malformed.table import ENTRIES

TRACED = (
    "mla_prefill",
    "mla_prefill+cache",
    "mla_prefill_latent",
    "mla_prefill_sparse",
    "mla_prefill_sparse+cache",
    "merge_states",
    "merge_many",
    "flash_mla",
    "flash_attn",
)


def traceable(entry: Malformed) -> bool:
    """Whether Dynamo comes as far as openmla's check: it takes no sparse tensor at all."""
    return entry.call in TRACED and "torch.sparse" not in entry.got


# One entry for each argument of each call: a graph takes its time.
CHOSEN = {(entry.call, entry.argument): entry for entry in ENTRIES if traceable(entry)}


@pytest.mark.parametrize("entry", CHOSEN.values(), ids=str)
def test_the_message_names_argument_expectation_and_value(entry: Malformed) -> None:
    function, arguments = CALLS[entry.call][0], arguments_of(entry)
    torch.compiler.reset()
    compiled = torch.compile(lambda given: function(**given), fullgraph=True, backend="eager")
    with pytest.raises((entry.error, torch._dynamo.exc.Unsupported)) as raised:
        compiled(arguments)
    text = str(raised.value)
    assert [part for part in (entry.argument, entry.expected, entry.got) if part not in text] == []
    if type(raised.value) is not entry.error:
        assert f"raised exception {entry.error.__name__}(" in str(raised.value.__cause__)
