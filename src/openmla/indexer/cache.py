"""`IndexCache`: the paged key cache of the indexer, one e4m3 row of 128 and one scale per token.

A page of S rows is S * 132 bytes, as DeepGEMM, vLLM and SGLang have it: the values of all rows,
then the fp32 scales of all rows.

    bytes of a page    0 … 128 S - 1       128 S … 132 S - 1
                       S rows of 128 e4m3  S fp32 scales

The key is value * scale, with scale = max(amax, 1e-4) / 448 ("fp32"), or that rounded up to a power
of two ("ue8m0"). Both are stored as fp32; readers need not care, writers must not mix them. A row
with NaN or Inf gets a NaN scale: its scores are NaN, which every number comes before.

With scales="mxfp4" a row is 68 bytes, as DeepSeek-V4.1's: 64 of e2m1, two columns to a byte, the
even one in its low half; then, behind all rows, 4 exponents of a row, one for every 32 columns.

A slot is a physical row: page * page_size + offset. A negative one is a padded token and skipped.

>>> cache = IndexCache.allocate(num_pages=2, page_size=4, scales="ue8m0")
>>> cache.append(torch.full((1, 128), 3.0), torch.tensor([5]))
>>> values, scales = cache.gather(torch.tensor([5]))
>>> float(values[0, 0].float() * scales[0]), float(scales[0])
(3.0, 0.0078125)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from openmla.block_scaling import E4M3_MAX, e2m1_codes, pack, unpack
from openmla.cache import (
    APPEND_DTYPES,
    check_rows,
    plain_memory,
    refuse_derivatives,
    refuse_wrapped,
    require_operators,
)
from openmla.errors import InvalidArgument
from openmla.formats import LARGEST
from openmla.indexer.problem import DIM

ROW_BYTES = DIM + 4
ScaleName = Literal["ue8m0", "fp32", "mxfp4"]
MXFP4: Literal["mxfp4"] = "mxfp4"
MXFP4_BLOCK = 32  # columns that share an exponent
MXFP4_BYTES = DIM // 2 + DIM // MXFP4_BLOCK
SCALE_FORMATS = get_args(ScaleName)
LEAST_AMAX = 1e-4  # of a row of keys: what DeepSeek, vLLM and SGLang clamp at
LEAST_AMAX_FP4 = LARGEST["e2m1"] * 2.0**-126  # of 32 columns: exponents stay above 0


@dataclass(frozen=True, eq=False)
class IndexCache:
    """Paged keys. Build one with `allocate`, or wrap a pool of pages you already have."""

    data: Tensor
    """uint8 [pages, page_size * 132]; of FP4 keys, [pages, page_size * 68]."""
    page_size: int
    scales: str = "ue8m0"
    """How `append` makes scales: "ue8m0" or "fp32" of e4m3 keys; "mxfp4": the keys are FP4."""

    def __post_init__(self) -> None:
        require_operators("openmla.indexer.ops")
        _check_layout(self)

    def __repr__(self) -> str:
        """One line, without the keys.

        >>> IndexCache.allocate(num_pages=4)
        IndexCache(ue8m0, 4 pages of 64 keys, cpu)
        """
        where = f"{self.num_pages} pages of {self.page_size} keys, {self.device}"
        return f"IndexCache({self.scales}, {where})"

    @staticmethod
    def allocate(
        *,
        num_pages: int,
        page_size: int = 64,
        scales: ScaleName = "ue8m0",
        device: torch.device | str = "cpu",
    ) -> IndexCache:
        """A zeroed cache of num_pages * page_size rows.

        Args:
            num_pages: pages in the pool.
            page_size: rows per page.
            scales: "ue8m0" rounds a row's scale up to a power of two, "fp32" keeps it;
                "mxfp4" makes FP4 keys with an exponent for 32 columns.
            device: where the rows live.

        Raises:
            InvalidArgument: a number is wrong, or there are no such scales.
        """
        for name, value, least in (("num_pages", num_pages, 0), ("page_size", page_size, 1)):
            if type(value) is not int or value < least:
                raise InvalidArgument(name, f"an int of at least {least}", repr(value))
        shape = (num_pages, page_size * (MXFP4_BYTES if scales == MXFP4 else ROW_BYTES))
        return IndexCache(torch.zeros(shape, dtype=torch.uint8, device=device), page_size, scales)

    @staticmethod
    def of_pages(data: Tensor, page_size: int) -> IndexCache:
        """A pool by its bytes alone, for readers: they tell e4m3 keys from FP4 ones."""
        is_fp4 = data.shape[1] == page_size * MXFP4_BYTES
        return IndexCache(data, page_size, MXFP4 if is_fp4 else "ue8m0")

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.data.shape[0]

    @property
    def key_dtype(self) -> str:
        """Element type of the keys: "e4m3" or "e2m1"."""
        return "e2m1" if self.scales == MXFP4 else "e4m3"

    @property
    def rows(self) -> int:
        """Rows in the pool: num_pages * page_size."""
        return self.num_pages * self.page_size

    @property
    def device(self) -> torch.device:
        """Where the pages live."""
        return self.data.device

    @property
    def values_view(self) -> Tensor:
        """The e4m3 values in place: [pages, page_size, 128]."""
        values = self.data[:, : self.page_size * DIM].view(torch.float8_e4m3fn)
        shape = (self.num_pages, self.page_size, DIM)
        return values.as_strided(shape, (self.data.stride(0), DIM, 1))

    @property
    def scales_view(self) -> Tensor:
        """The fp32 scales in place: [pages, page_size]."""
        return self.data[:, self.page_size * DIM : self.page_size * ROW_BYTES].view(torch.float32)

    @property
    def codes_view(self) -> Tensor:
        """The e2m1 codes of FP4 keys in place: uint8 [pages, page_size, 64]."""
        codes = self.data[:, : self.page_size * DIM // 2]
        shape = (self.num_pages, self.page_size, DIM // 2)
        return codes.as_strided(shape, (self.data.stride(0), DIM // 2, 1))

    @property
    def exponents_view(self) -> Tensor:
        """The exponents of FP4 keys in place: uint8 [pages, page_size, 4]."""
        first, blocks = self.page_size * DIM // 2, DIM // MXFP4_BLOCK
        exponents = self.data[:, first : self.page_size * MXFP4_BYTES]
        shape = (self.num_pages, self.page_size, blocks)
        return exponents.as_strided(shape, (self.data.stride(0), blocks, 1))

    def append(self, k: Tensor, slot_mapping: Tensor) -> None:
        """Quantize token i's key k[i] (128 columns) and write it to row slot_mapping[i].

        Negative slots are skipped. One past the pool raises on the CPU and is skipped on a GPU,
        where looking would mean waiting. Slots must differ.

        Args:
            k: [tokens, 128].
            slot_mapping: int64 or int32 [tokens], physical rows: page * page_size + offset.

        Raises:
            InvalidArgument: a shape, a dtype, or on the CPU a slot is wrong; nothing is written.
        """
        _check_append(self, k, slot_mapping)
        slots = slot_mapping.to(self.device)
        # Traced as one operator: torch.compile cannot write through the views of a page's parts.
        if self.device.type == "cuda" or torch.compiler.is_compiling():
            torch.ops.openmla.index_append(self.data, self.page_size, self.scales, k, slots)
        else:
            self.write(k, slots)

    def write(self, k: Tensor, slots: Tensor) -> None:
        """`append` without checks, in torch; reads which slots are negative."""
        used = slots >= 0
        slots = slots[used].long()
        page, offset = slots // self.page_size, slots % self.page_size
        if self.scales == MXFP4:
            codes, exponents = quantize_fp4(k[used])
            self.codes_view[page, offset], self.exponents_view[page, offset] = codes, exponents
            return
        values, scales = quantize(k[used], self.scales)
        # Plain bytes: indexed writes of float8 tensors are not implemented everywhere.
        self.values_view.view(torch.uint8)[page, offset] = values.view(torch.uint8)
        self.scales_view[page, offset] = scales

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Values e4m3 [n, 128] and scales fp32 [n] of physical rows; of FP4 keys, values fp32.

        A row outside the pool raises on the CPU and reads as zeros on a GPU.
        """
        check_rows("slots", slots, self.rows)
        if slots.device != self.device:
            raise InvalidArgument("slots", f"a tensor on {self.device}", f"one on {slots.device}")
        if not self.rows:  # a GPU's slots, none of which can be inside
            zeros = torch.zeros(slots.shape[0], DIM, dtype=torch.uint8, device=self.device)
            return zeros.view(torch.float8_e4m3fn), zeros[:, 0].float()
        inside = (slots >= 0) & (slots < self.rows)
        values, scales = self.read(torch.where(inside, slots, 0).long())
        # Plain bytes: not every operation is implemented for float8.
        values = (values.view(torch.uint8) * inside[:, None].to(torch.uint8)).view(values.dtype)
        return values, torch.where(inside, scales, 0.0)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """`gather` without checks, for rows inside the pool."""
        page, offset = slots // self.page_size, slots % self.page_size
        if self.scales == MXFP4:
            keys = dequantize_fp4(self.codes_view[page, offset], self.exponents_view[page, offset])
            return keys, torch.ones(len(keys), device=keys.device)
        values = self.values_view.view(torch.uint8)[page, offset].view(torch.float8_e4m3fn)
        return values, self.scales_view[page, offset]


def quantize(k: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """Keys [n, 128] -> e4m3 [n, 128] and fp32 scales [n].

    >>> values, scale = quantize(torch.full((1, 128), 448.0), "ue8m0")
    >>> float(values[0, 0].float()), float(scale[0])
    (448.0, 1.0)
    """
    x = k.float()
    amax = x.abs().amax(-1).clamp_min(LEAST_AMAX)
    scale = amax / E4M3_MAX
    if scales == "ue8m0":
        mantissa, exponent = torch.frexp(scale)  # in [0.5, 1): exact, where log2 is not
        power = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), power)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    values = (x / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn), scale


def quantize_fp4(k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, 128] -> codes uint8 [n, 64] and exponents uint8 [n, 4].

    The least power of two that brings 32 columns within 6, then the nearest e2m1, ties to the even
    code. A block with NaN or Inf gets the exponent 255, which is NaN, and codes 0.

    >>> codes, exponents = quantize_fp4(torch.tensor([[12.0, -1.0] + [0.0] * 126]))
    >>> int(codes[0, 0]), exponents.tolist()    # 6 and -0.5, times 2
    (151, [[128, 1, 1, 1]])
    """
    blocks = k.float().reshape(len(k), DIM // MXFP4_BLOCK, MXFP4_BLOCK)
    amax = blocks.abs().amax(-1)
    known = amax.isfinite()
    mantissa, exponent = torch.frexp(amax.clamp_min(LEAST_AMAX_FP4) / LARGEST["e2m1"])
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    stored = torch.where(known, power + 127, 255).to(torch.uint8)
    scaled = torch.ldexp(blocks, -power[..., None])
    scaled = torch.where(known[..., None], scaled, 0.0)
    return pack(e2m1_codes(scaled.flatten(1))), stored


def dequantize_fp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """fp32 [n, 128] of what `quantize_fp4` wrote; exact."""
    power = exponents.to(torch.int32) - 127
    scale = torch.ldexp(torch.ones(power.shape, device=codes.device, dtype=torch.float32), power)
    scale = torch.where(exponents == 255, torch.nan, scale)
    return unpack(codes) * scale.repeat_interleave(MXFP4_BLOCK, dim=1)


def _check_layout(cache: IndexCache) -> None:
    data, size = cache.data, cache.page_size
    if cache.scales not in SCALE_FORMATS:
        raise InvalidArgument("scales", "one of " + ", ".join(SCALE_FORMATS), repr(cache.scales))
    if type(size) is not int or size < 1:
        raise InvalidArgument("page_size", "an int of at least 1", repr(size))
    width = size * (MXFP4_BYTES if cache.scales == MXFP4 else ROW_BYTES)
    expected = f"a tensor, torch.uint8 [pages, {width}]"
    if not isinstance(data, Tensor):
        raise InvalidArgument("data", expected, type(data).__name__)
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != width:
        raise InvalidArgument("data", expected, f"{data.dtype} {list(data.shape)}")
    plain_memory("data", data)
    if data.numel() and (data.stride(1) != 1 or data.stride(0) % 4 or data.storage_offset() % 4):
        got = f"strides {list(data.stride())}, storage offset {data.storage_offset()}"
        raise InvalidArgument("data", "contiguous pages whose fp32 scales are aligned", got)


def _check_append(cache: IndexCache, k: Tensor, slot_mapping: Tensor) -> None:
    if not isinstance(k, Tensor) or k.dim() != 2 or k.shape[1] != DIM:
        got = list(k.shape) if isinstance(k, Tensor) else type(k).__name__
        raise InvalidArgument("k", f"a tensor [tokens, {DIM}]", got)
    if k.dtype not in APPEND_DTYPES:
        expected = "one of " + ", ".join(str(dtype) for dtype in APPEND_DTYPES)
        raise InvalidArgument("k", expected, k.dtype)
    if k.device != cache.device:
        raise InvalidArgument("k", f"a tensor on {cache.device}", f"one on {k.device}")
    refuse_wrapped("k", k)
    refuse_derivatives("k", k, "a cache does not carry one")
    if isinstance(slot_mapping, Tensor) and slot_mapping.dim() == 1:
        refuse_wrapped("slot_mapping", slot_mapping)
        host = slot_mapping.device.type == "cpu"
        # Negative slots are padding: only those past the pool are wrong.
        check_rows("slot_mapping", slot_mapping.clamp_min(0) if host else slot_mapping, cache.rows)
        if slot_mapping.shape[0] != k.shape[0]:
            expected = f"{k.shape[0]} slots, as k has tokens"
            raise InvalidArgument("slot_mapping", expected, slot_mapping.shape[0])
        return
    got = list(slot_mapping.shape) if isinstance(slot_mapping, Tensor) else slot_mapping
    raise InvalidArgument("slot_mapping", "int64 [tokens], physical rows", got)
