"""What the host decides about portable launches and the interpreter cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openmla.cache import LatentCache
from openmla.kernels.portable import arguments, quantize
from openmla.kernels.portable.formats import row_constants

pytest.importorskip("triton")


class Recorded:
    """Stands where a kernel does, and keeps what it is launched with."""

    arguments: dict[str, Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: setattr(self, "arguments", arguments)


@pytest.mark.parametrize("heads", [1, 5, 128])
@pytest.mark.parametrize("width", [1, 64, 576])
def test_quantize_has_a_number_of_warps_that_a_block_can_have(
    heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Recorded()
    monkeypatch.setattr(quantize, "quantize_kernel", kernel)
    x = torch.zeros(2, heads, width)
    quantize.quantize(x, None, [torch.empty(x.shape, dtype=torch.float8_e4m3fn)], torch.empty(2))
    warps = kernel.arguments["num_warps"]
    assert 1 <= warps <= quantize.MOST_WARPS and warps & (warps - 1) == 0


def test_only_nvidia_gpus_convert_to_e4m3_by_nvidia_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 5))
    assert not quantize._native(torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert quantize._native(torch.device("cuda"))


def test_rows_at_one_address_are_not_copied_in_bulk() -> None:
    x = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    assert arguments._bulk_copied(x)
    assert not arguments._bulk_copied(x[:, :1].expand(x.shape))


@pytest.mark.parametrize(
    ("page", "row", "first", "unaligned"),
    [
        (4 * 656, 656, 0, False),
        (4 * 656 + 2, 656, 0, True),
        (4 * 658, 658, 0, True),
        (4 * 656, 656, 2, True),
    ],
    ids=["words", "pages", "rows", "the pool"],
)
def test_rows_are_read_by_words_where_all_of_them_lie_at_words(
    page: int, row: int, first: int, unaligned: bool
) -> None:
    raw = torch.zeros(3 * page + 8, dtype=torch.uint8)
    data = raw[first:].as_strided((3, 4, 656), (page, row, 1))
    cache = LatentCache(data, None, 512, 64, "fp8_656")
    assert row_constants(cache).is_unaligned == unaligned
