"""Kernels ready to be launched again at other addresses, without Triton's argument binding.

Binding works out types, alignments and constexprs of every argument of every launch, and encodes
every descriptor anew: hundreds of microseconds for a kernel with six descriptors. All of it but
addresses is the same for calls with one key of openmla.cached, so the arguments are kept as one
flat list, as Triton's launcher in C takes it. Which tensor of a call an argument points into, the
kernel's host code declares (`Call.sources`); how far into it, the first launch shows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from triton import knobs
from triton.runtime import driver

from openmla.kernels.call import (
    COPY,
    COUNTER,
    WORKSPACE,
    Call,
    Extent,
    LaunchNumbers,
    counter_of_stream,
)
from openmla.kernels.triton_version import TRITON
from openmla.operands import extent

MOST_ENCODED = 64  # addresses for which a descriptor is kept
SPACE_STEP = 256  # bytes: parts of a workspace begin at multiples, as tensors do
# What is read of Triton here is private to it: in versions without a check, nothing is prepared.
CHECKED_TRITONS = ((3, 6), (3, 7), (3, 8), (3, 9))
OWN = (COUNTER, WORKSPACE, COPY)  # memory that belongs to no argument of the operator
Launch = Callable[[int, int, list[Any]], None]


class NotPrepared(Exception):
    """A launch cannot be kept; it goes the long way every time."""


def prepare(
    made: Sequence[tuple[Call, Any]], names: Sequence[str], args: Sequence[Any]
) -> CachedLaunch:
    """The launch of what was just run (calls and compiled kernels) for these arguments of an
    operator."""
    space = _Space(names, args)
    try:
        kernels = [_Kernel(call, launcher(compiled), compiled, space) for call, compiled in made]
    except (ImportError, AttributeError, KeyError) as error:  # another Triton than those below
        raise NotPrepared from error
    return CachedLaunch(kernels, names.index("out"), args, space.sizes)


class OutputForm(NamedTuple):
    """An output that a call makes, without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(output: Tensor | None) -> OutputForm | None:
        """The form of an output; None for one that is not wanted."""
        if output is None:
            return None
        return OutputForm(tuple(output.shape), output.stride(), output.dtype)

    def with_rows(self, rows: int) -> OutputForm:
        """The form with another first dimension."""
        return self._replace(shape=(rows, *self.shape[1:]))


class CachedLaunch:
    """All kernels of a call."""

    def __init__(
        self, kernels: list[_Kernel], first: int, args: Sequence[Any], sizes: dict[str, int]
    ) -> None:
        self._kernels, self._first, self._sizes = kernels, first, sizes
        self._device: torch.device = args[0].device
        self._index = self._device.index
        self._spans: list[int] = []
        self._inputs = sum(isinstance(x, Tensor) for x in args[:first])
        self._outputs = [OutputForm.of(x) for x in args[first:]]

    def run(self, args: Sequence[Any], addresses: list[int]) -> list[Any] | None:
        """The outputs, made where there are none; None if this must go the long way."""
        index, first = self._index, self._first
        if (
            torch.cuda.current_device() != index
            or torch.cuda.is_current_stream_capturing()
            or hooked()
            or (type(args[first]) is Tensor and not self._apart(args, addresses))
        ):
            return None
        stream, held = driver.active.get_current_stream(index), []
        outputs = [
            x if x is None or form is None or type(x) is Tensor else self._made(form)
            for x, form in zip(args[first:], self._outputs, strict=True)
        ]
        addresses[self._inputs :] = [x.data_ptr() for x in outputs if x is not None]
        for kind, size in self._sizes.items():
            held.append(_allocate(kind, size, self._device, stream))
            addresses.append(held[-1].data_ptr())
        for kernel in self._kernels:
            kernel.run(stream, addresses)
        if type(args[first]) is Tensor:  # torch does not see what is written by address
            increment_version([x for x in args[first:] if type(x) is Tensor])
        # What is held is freed here, and given away by torch only behind these launches.
        return outputs

    def _made(self, form: OutputForm) -> Tensor:
        """An uninitialized output; faster than torch.empty."""
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=self._device)

    def resized(self, rows: int, numbers: Sequence[LaunchNumbers]) -> CachedLaunch:
        """These kernels for other token counts, with so many rows of output."""
        found = object.__new__(CachedLaunch)
        found.__dict__ = {**self.__dict__, "_spans": []}
        found._outputs = [form and form.with_rows(rows) for form in self._outputs]
        found._sizes = self._sizes_for(numbers)
        found._kernels = [
            kernel.resized(own) for kernel, own in zip(self._kernels, numbers, strict=True)
        ]
        return found

    def has(self, numbers: Sequence[LaunchNumbers]) -> bool:
        """Whether these are the numbers of its kernels."""
        if len(numbers) != len(self._kernels) or self._sizes_for(numbers) != self._sizes:
            return False
        pairs = zip(self._kernels, numbers, strict=True)
        return all(kernel.has(own) for kernel, own in pairs)

    def _sizes_for(self, numbers: Sequence[LaunchNumbers]) -> dict[str, int]:
        """Bytes of memory of its own."""
        changed = {kind: size for own in numbers for kind, size in own.memory.items()}
        return {k: stepped(changed[k]) if k in changed else n for k, n in self._sizes.items()}

    def _apart(self, args: Sequence[Any], addresses: list[int]) -> bool:
        """Whether an `out` that was given shares no memory with an input."""
        if not self._spans:
            self._spans = [extent(x) for x in args if type(x) is Tensor]
        out = addresses[self._inputs]
        last = out + self._spans[self._inputs]
        inputs = zip(addresses[: self._inputs], self._spans, strict=False)
        return all(start >= last or out >= start + span for start, span in inputs)


def stepped(size: int) -> int:
    """Bytes that a part of so many takes."""
    return -(-size // SPACE_STEP) * SPACE_STEP


def _allocate(kind: str, size: int, device: torch.device, stream: int) -> Tensor:
    if kind == COUNTER:
        return counter_of_stream(device, stream)
    return torch.empty(size, dtype=torch.uint8, device=device)


class _Space:
    """Where the tensors of a call lie: (which of its addresses, how many bytes behind it)."""

    def __init__(self, names: Sequence[str], args: Sequence[Any]) -> None:
        given = [(n, x) for n, x in zip(names, args, strict=True) if isinstance(x, Tensor)]
        self._tensors = {name: (i, x) for i, (name, x) in enumerate(given)}
        self._storages: dict[int, tuple[int, int]] = {}
        self.sizes: dict[str, int] = {}

    def find(self, x: Tensor, source: Any) -> tuple[int, int]:
        """A copy of an operand is found nowhere: it would have to be made again."""
        start = x.untyped_storage().data_ptr()
        if start not in self._storages:
            names = (source,) if isinstance(source, str) else source
            for index, tensor in (self._tensors[name] for name in names if name in self._tensors):
                if tensor.untyped_storage().data_ptr() == start:
                    return index, x.data_ptr() - tensor.data_ptr()
            if names[-1] not in OWN:
                raise NotPrepared
            self._add(names[-1], x)
        index, at = self._storages[start]
        return index, at + x.data_ptr() - start

    def _add(self, kind: str, x: Tensor) -> None:
        """Room for all of a tensor's memory behind what there is of its kind."""
        storage, size = x.untyped_storage(), self.sizes.setdefault(kind, 0)
        place = len(self._tensors) + list(self.sizes).index(kind)
        self._storages[storage.data_ptr()] = place, size
        self.sizes[kind] = size + stepped(storage.nbytes())


class _Kernel:
    """One compiled kernel; `run` fills in addresses."""

    def __init__(self, call: Call, launch: Launch, compiled: Any, space: _Space) -> None:
        self._launch, self._programs = launch, call.programs
        self._flat: list[Any] = []
        self._last: tuple[list[int], list[Any]] = [], []
        self._places: dict[str, int] = {}
        self._pointers: list[tuple[int, int, int]] = []
        self._descriptors: list[tuple[int, int, int, _Descriptor]] = []
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for name in call.kernel.arg_names:
            value: Any = call.arguments.get(name)
            place = self._places[name] = len(self._flat)
            described = getattr(value, "base", None) if hasattr(value, "block_shape") else value
            if not isinstance(described, Tensor):
                self._flat.append(value)
                continue
            where = place, *space.find(described, call.sources.get(name, ""))
            if described is value:
                self._pointers.append(where)
                self._flat.append(None)
            else:
                self._descriptors.append((*where, _Descriptor.of(value, next(metas, None))))
                self._flat += [None, *value.shape, *value.strides]

    def run(self, stream: int, addresses: list[int]) -> None:
        """Launch; tensors often lie where they lay the last time."""
        known, flat = self._last
        if known != addresses:
            flat = self._filled(addresses)
            self._last = addresses.copy(), flat
        self._launch(self._programs, stream, flat)

    def _filled(self, addresses: list[int]) -> list[Any]:
        flat = self._flat.copy()
        for place, index, offset in self._pointers:
            flat[place] = addresses[index] + offset
        for place, index, offset, descriptor in self._descriptors:
            address = addresses[index] + offset
            flat[place] = descriptor.encoded.get(address) or descriptor.encode(address)
        return flat

    def resized(self, numbers: LaunchNumbers) -> _Kernel:
        """This kernel with other numbers, where it has arguments of these names."""
        found = object.__new__(_Kernel)
        found.__dict__ = {**self.__dict__, "_programs": numbers.programs}
        found._flat, found._descriptors, found._last = self._flat.copy(), [], ([], [])
        changed = {
            self._places[name]: number
            for name, number in numbers.arguments.items()
            if name in self._places
        }
        for place, number in changed.items():
            if not isinstance(number, Extent):
                found._flat[place] = number
        for place, index, offset, descriptor in self._descriptors:
            extent = changed.get(place)
            if isinstance(extent, Extent):
                found._flat[place + 1 + extent.dimension] = extent.size
                descriptor = descriptor.resized(extent)
            found._descriptors.append((place, index, offset, descriptor))
        return found

    def has(self, numbers: LaunchNumbers) -> bool:
        """Whether these are its numbers."""
        same = self.resized(numbers)
        return (same._programs, same._flat) == (self._programs, self._flat)


class _Descriptor:
    """One descriptor: encoded for an address, and kept."""

    def __init__(self, encode: Any, form: tuple[Any, ...], shape: list[int], rest: Any) -> None:
        self._given = encode, form, rest
        self._shape = shape
        self.encoded: dict[int, Any] = {}

    @staticmethod
    def of(value: Any, meta: Any) -> _Descriptor:
        """A descriptor of Triton's, prepared with what the compiler says about it."""
        unusual = getattr(value, "round_f32_to_tf32", False)
        if meta is None or unusual or meta.get("fp4_padded") or meta.get("is_im2col"):
            raise NotPrepared
        kind = tma_dtypes()[meta["elem_type"]]
        form = meta["swizzle"], meta["elem_size"], kind, meta["block_size"]
        rest = list(value.strides), int(value.padding == "nan")
        return _Descriptor(encoder(), form, list(value.shape), rest)

    def encode(self, address: int) -> Any:
        """For a tensor at this address."""
        encode, form, rest = self._given
        found = encode(address, *form, self._shape, *rest)
        if len(self.encoded) >= MOST_ENCODED:
            self.encoded.clear()
        self.encoded[address] = found
        return found

    def resized(self, extent: Extent) -> _Descriptor:
        """The descriptor of a tensor with another size."""
        encode, form, rest = self._given
        shape = self._shape.copy()
        shape[extent.dimension] = extent.size
        return _Descriptor(encode, form, shape, rest)


def hooked() -> bool:
    """Whether Triton's launch hooks are set, as a profiler sets them."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def launcher(compiled: Any) -> Launch:
    """(programs, stream, flat arguments) -> a launch, in a Triton whose own way is known."""
    outer: Any = getattr(compiled, "run", None)
    raw = getattr(outer, "launch", None)
    if TRITON not in CHECKED_TRITONS or type(outer).__name__ != "CudaLauncher":
        raise NotPrepared
    if inspect.isfunction(raw):  # around it: the encoding of descriptors
        raw = inspect.getclosurevars(raw).nonlocals.get("launcher")
    scratch = any(getattr(outer, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
    if raw is None or scratch or getattr(outer, "gsan_enabled", False):
        raise NotPrepared
    function, packed = compiled.function, compiled.packed_metadata
    flags = (outer.launch_cooperative_grid, outer.launch_pdl)
    if TRITON >= (3, 7):  # one function launches every kernel
        kinds = (outer.arg_annotations, outer.kernel_signature)

        def launch_listed(programs: int, stream: int, flat: list[Any]) -> None:
            raw(
                programs,
                1,
                1,
                stream,
                function,
                *flags,
                packed,
                None,
                None,
                None,
                None,
                None,
                *kinds,
                tuple(flat),
            )

        return launch_listed

    def launch(programs: int, stream: int, flat: list[Any]) -> None:
        raw(programs, 1, 1, stream, function, *flags, None, None, packed, None, None, None, *flat)

    return launch


def encoder() -> Callable[..., Any]:
    """What makes a descriptor, in C; from Triton 3.7 on there are several kinds."""
    utils = driver.active.utils
    found: Callable[..., Any] = getattr(utils, "fill_tma_descriptor", None) or (
        utils.fill_tma_descriptor_tiled
    )
    return found


def tma_dtypes() -> Mapping[int, int]:
    """The driver's numbers of element types, by the compiler's."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    found: Mapping[int, int] = TMA_DTYPE_DEVICE_TO_HOST
    return found
