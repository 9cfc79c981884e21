"""Argument checks. They look at metadata only: no values of device tensors, so no host sync.

They run on every call, also under torch.compile, before anything is launched. The three functions
that read values say "CPU only" and are called for CPU tensors alone, where that is free. Every
failure is an InvalidArgument that names the argument, what was expected and what came.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openmla.cache import (
    AUTOGRAD,
    NO_TRANSFORMS,
    LatentCache,
    plain_memory,
    refuse_derivatives,
    refuse_tangent,
    refuse_traced_transforms,
    refuse_wrapped,
)
from openmla.errors import InvalidArgument, Unsupported
from openmla.operands import AttendOperands, Operands, Results, SparseOperands, extent
from openmla.problem import MAX_HEADS, RANGES_TAKEN, is_range
from openmla.sequences import first_key_of, paged_spans
from openmla.sources import Listed, Source, Span, TurnBack

# Kernels multiply by the scale in float32: a larger number would be infinite there.
LARGEST_SCALE = torch.finfo(torch.float32).max
LARGEST_WINDOW = torch.iinfo(torch.int32).max
Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
# With FP8 queries, rope and V may stay in a wider type (rope is then stored divided by the scales).
WIDE_BESIDE_FP8 = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)
MOST_SOURCES = 2


def out_dtype(q_dtype: torch.dtype) -> torch.dtype:
    """Outputs have the dtype of the queries; FP8 queries give bf16."""
    return torch.bfloat16 if q_dtype == torch.float8_e4m3fn else q_dtype


def describe(value: object) -> str:
    """A tensor as "dtype [shape] on device", another array by its type and shape, anything else by
    its type and value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    if isinstance(getattr(value, "shape", None), tuple):
        kind = type(value)
        return f"{kind.__module__}.{kind.__qualname__} {list(value.shape)}"  # type: ignore[attr-defined]
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def tensor(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> Tensor:
    """`value` must be a tensor of that shape (a name in it is a free size), dtype and device."""
    # The message is put together only on failure: torch.compile traces this function.
    if not isinstance(value, Tensor):
        raise InvalidArgument(name, f"a tensor, {_spelled(shape, dtypes)}", describe(value))
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise InvalidArgument(name, f"a strided tensor, {_spelled(shape, dtypes)}", kind)
    if value.dim() != len(shape) or value.dtype not in dtypes:
        raise InvalidArgument(name, _spelled(shape, dtypes), describe(value))
    for got, size in zip(value.shape, shape, strict=True):
        if not isinstance(size, str) and got != size:
            raise InvalidArgument(name, _spelled(shape, dtypes), describe(value))
    if device is not None and value.device != device:
        raise InvalidArgument(name, f"a tensor on {device}, where q is", describe(value))
    refuse_wrapped(name, value)
    # Operators resolve torch's negative bit in tensors of every other type; FP8 cannot be negated.
    if value.dtype == torch.float8_e4m3fn:
        plain_memory(name, value)
    return value


def parts(
    name: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> list[Tensor]:
    """One or more tensors of one shape, dtype and device: stacked in one, or a list or tuple."""
    if isinstance(value, Tensor):
        found = list(tensor(name, value, ("parts", *shape), dtypes, device).unbind(0))
    elif isinstance(value, list | tuple):
        found = []
        for i, part in enumerate(value):
            found.append(tensor(f"{name}[{i}]", part, shape, dtypes, device))
            shape, dtypes, device = found[0].shape, (found[0].dtype,), found[0].device
    else:
        expected = f"a list of tensors or a tensor, {_spelled(('parts', *shape), dtypes)}"
        raise InvalidArgument(name, expected, describe(value))
    if not found:
        raise InvalidArgument(name, "at least one part", describe(value))
    return found


def _spelled(shape: Sequence[int | str], dtypes: Sequence[torch.dtype]) -> str:
    return f"{' or '.join(str(d) for d in dtypes)} [{', '.join(str(s) for s in shape)}]"


def last_dim_contiguous(name: str, value: Tensor) -> None:
    """Rows may be strided, elements of a row may not."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        got = f"stride {value.stride(-1)} there"
        raise InvalidArgument(name, "a contiguous last dimension", got)


def queries(q: object) -> Tensor:
    """q: [total_q, heads, width], a supported dtype, 1 to 128 heads, rows contiguous."""
    checked = tensor("q", q, ("total_q", "heads", "d_qk"), Q_DTYPES)
    if not 1 <= checked.shape[1] <= MAX_HEADS:
        raise InvalidArgument("q", f"1 to {MAX_HEADS} heads in dimension 1", checked.shape[1])
    if checked.shape[2] == 0:
        raise InvalidArgument("q", "a width above 0 in dimension 2", checked.shape[2])
    last_dim_contiguous("q", checked)
    return checked


def scale(value: object, required_for: str = "", name: str = "scale") -> float | None:
    """A finite number. `required_for` names the call that has no default."""
    if value is None:
        if required_for:
            expected = (
                f"a number ({required_for} has no default; DeepSeek-V3's is 192**-0.5, from the "
                "128 + 64 columns of a head before absorption, not from the latent row)"
            )
            raise InvalidArgument(name, expected, "None")
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise InvalidArgument(name, "a finite number", describe(value))
    # Written so that NaN, which compares false with everything, fails too.
    if not -LARGEST_SCALE <= value <= LARGEST_SCALE:
        raise InvalidArgument(name, "a finite number that float32 can hold", describe(value))
    return value  # type: ignore[return-value]  # an int or a traced float will do


def flag(name: str, value: object) -> bool:
    """True or False, nothing that merely counts as one."""
    if not isinstance(value, bool):
        raise InvalidArgument(name, "True or False", describe(value))
    return value


def window(value: object, causal: bool) -> int:
    """How many keys a query sees at most, 0 for no window, which is None to a caller.

    The last `window` keys up to a query are defined where "up to" is: without causal there is no
    last one, and what other libraries call a window there differs.
    """
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_WINDOW:
        expected = f"None, or 1 to {LARGEST_WINDOW} keys"
        raise InvalidArgument("window", expected, describe(value))
    if not causal:
        raise InvalidArgument("window", "None unless causal=True", f"{value} with causal=False")
    return value


def range_keys(value: object) -> int:
    """Keys of a range, 0 where the plan decides, which is None to a caller."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not is_range(value):
        raise InvalidArgument("range_keys", f"None, or {RANGES_TAKEN}", describe(value))
    return value


def backend(value: object, known: Sequence[str]) -> str:
    """One of the known backends."""
    if not isinstance(value, str) or value not in known:
        raise InvalidArgument("backend", "one of " + ", ".join(known), repr(value))
    return value


def cu_seqlens(name: str, value: object, device: torch.device) -> Tensor:
    """int32 [batch+1] with at least one entry."""
    checked = tensor(name, value, ("batch+1",), (torch.int32,), device)
    if checked.shape[0] < 1:
        raise InvalidArgument(name, "at least one entry (batch+1)", describe(checked))
    return checked


def per_token_scale(name: str, value: object, tokens: int, device: torch.device) -> Tensor | None:
    """float32 [tokens] or [tokens, 1] -> [tokens]."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 1:
        value = value[:, 0]
    return tensor(name, value, (tokens,), (torch.float32,), device)


def sink(value: object, heads: int, device: torch.device, name: str = "sink") -> Tensor | None:
    """float32 [heads] or nothing."""
    return None if value is None else tensor(name, value, (heads,), (torch.float32,), device)


def output(value: object, q: Tensor, d_v: int) -> Tensor | None:
    """`out=`: [total_q, heads, d_v] in the output dtype or in fp32, rows contiguous."""
    if value is None:
        return None
    shape = (q.shape[0], q.shape[1], d_v)
    dtypes = tuple(dict.fromkeys((out_dtype(q.dtype), torch.float32)))
    checked = tensor("out", value, shape, dtypes, q.device)
    last_dim_contiguous("out", checked)
    plain_memory("out", checked)
    return checked


def no_gradients(**tensors: Tensor | LatentCache | None) -> None:
    """Refuse derivatives of these arguments: neither gradients nor tangents of forward mode are
    computed."""
    if torch.compiler.is_compiling():
        refuse_traced_transforms()
    for name, value in tensors.items():
        if isinstance(value, LatentCache):
            no_gradients(**{name: value.data, f"{name}.scales": value.scales})
        elif value is not None and (value.requires_grad or forward_ad._current_level >= 0):
            refuse_derivatives(name, value, "openmla computes the forward pass of this call only")


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether autograd is to compute a gradient of one of them."""
    if torch.compiler.is_compiling():
        refuse_traced_transforms()
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def plain_for_gradients(out: object, **given: object) -> None:
    """Refuse what a call that needs gradients must not have: arguments without a backward pass, and
    a transform of torch.func around it."""
    no_transforms()
    if out is not None:
        raise Unsupported(
            "out is given, and a call that needs gradients does not write into an argument",
            "the same call without out, or under torch.no_grad()",
        )
    for name, value in given.items():
        if value is not None:
            what = "a LatentCache" if isinstance(value, LatentCache) else "given"
            raise Unsupported(
                f"{name} is {what}, and such a call has no backward pass",
                f"the same call without {name}, or under torch.no_grad()",
            )


def can_be_kept(**tensors: Tensor | None) -> None:
    """Refuse what autograd does not keep for a backward pass, before there is a forward pass."""
    if torch.compiler.is_compiling():  # which keeps inference tensors apart itself
        return
    for name, value in tensors.items():
        if value is not None and value.is_inference():
            raise Unsupported(
                f"{name} was made under torch.inference_mode(), and a call that needs gradients "
                "keeps it for its backward pass",
                f"{name}.clone(), or torch.no_grad() instead of inference_mode() where it is made",
            )


def no_transforms() -> None:
    """torch.func differentiates no operator of a library, and says so by words about
    autograd.Function."""
    level = torch._C._functorch.maybe_current_level
    if not torch.compiler.is_compiling() and level() is not None:
        raise Unsupported(NO_TRANSFORMS, AUTOGRAD)


def no_tangents(**tensors: Tensor | None) -> None:
    """openmla computes no tangents, those of forward-mode differentiation."""
    if forward_ad._current_level >= 0:
        for name, value in tensors.items():
            if value is not None:
                refuse_tangent(name, value, "openmla computes gradients of reverse mode only")


def keys_and_values(q: Tensor, k_nope: object, v: object) -> tuple[Tensor, Tensor]:
    """k_nope [total_k, heads, d_nope] in q's dtype; v [total_k, heads, d_v]. Both have as many
    heads as q, or a divisor of that."""
    k = tensor("k_nope", k_nope, ("total_k", "heads", "d_nope"), (q.dtype,), q.device)
    heads = k.shape[1]
    if heads == 0 or q.shape[1] % heads:
        expected = f"{q.shape[1]} heads, as q has, or a number that divides it, in dimension 1"
        raise InvalidArgument("k_nope", expected, heads)
    v_dtypes = WIDE_BESIDE_FP8 if q.dtype == torch.float8_e4m3fn else (q.dtype,)
    values = tensor("v", v, (k.shape[0], heads, "d_v"), v_dtypes, q.device)
    for name, value in (("k_nope", k), ("v", values)):
        if value.shape[2] == 0:
            raise InvalidArgument(name, "a width above 0 in dimension 2", describe(value))
        last_dim_contiguous(name, value)
    if k.shape[2] > q.shape[2]:
        raise InvalidArgument(
            "k_nope", f"d_nope of at most q's width {q.shape[2]}", f"d_nope {k.shape[2]}"
        )
    return k, values


def rope_tensor(value: object, q: Tensor, k_nope: Tensor) -> Tensor | None:
    """k_rope as [total_k, d_rope] (shared) or [total_k, heads of k_nope, d_rope]; None when there
    is no rope."""
    total_k, heads, d_nope = k_nope.shape
    d_rope = q.shape[2] - d_nope
    if value is None:
        if d_rope:
            expected = f"{d_rope} columns (q has {q.shape[2]}, k_nope {d_nope})"
            raise InvalidArgument("k_rope", expected, "None")
        return None
    dtypes = WIDE_BESIDE_FP8 if q.dtype == torch.float8_e4m3fn else (q.dtype,)
    if isinstance(value, Tensor) and value.dim() in (2, 3) and value.shape[-1] != d_rope:
        # The mistake may as well be in q or k_nope: say where the width comes from.
        shape = _spelled((total_k, d_rope), dtypes)
        expected = f"{shape}, because q has {q.shape[2]} columns and k_nope {d_nope}"
        raise InvalidArgument("k_rope", expected, describe(value))
    if isinstance(value, Tensor) and value.dim() == 3:
        if value.shape[1] == 1 != q.shape[1]:
            value = value[:, 0]
        else:
            checked = tensor("k_rope", value, (total_k, heads, d_rope), dtypes, q.device)
            last_dim_contiguous("k_rope", checked)
            return checked if d_rope else None
    checked = tensor("k_rope", value, (total_k, d_rope), dtypes, q.device)
    last_dim_contiguous("k_rope", checked)
    return checked if d_rope else None


def rope_cache(cache: LatentCache, q: Tensor, d_nope: int) -> None:
    """A cache given as k_rope must hold rope columns of the width that q leaves for them."""
    d_rope = q.shape[2] - d_nope
    if cache.rope != d_rope:
        expected = f"a cache with {d_rope} rope columns (q has {q.shape[2]}, k_nope {d_nope})"
        raise InvalidArgument("k_rope", expected, f"{cache.rope}")
    on_device("k_rope", cache, q.device)


def on_device(name: str, cache: LatentCache, device: torch.device) -> None:
    """A cache must live where q does."""
    if cache.device != device:
        raise InvalidArgument(name, f"a cache on {device}, where q is", f"one on {cache.device}")


def paging(block_table: object, cache_lengths: object, batch: int, device: torch.device) -> None:
    """block_table int32 [batch, max_pages], cache_lengths int32 [batch]; both are needed."""
    tensor("block_table", block_table, (batch, "max_pages"), (torch.int32,), device)
    tensor("cache_lengths", cache_lengths, (batch,), (torch.int32,), device)


def key_mask(value: object, total_q: int, device: torch.device) -> Tensor | None:
    """int32 [total_q, words] with contiguous words, or nothing."""
    if value is None:
        return None
    checked = tensor("key_mask", value, (total_q, "words"), (torch.int32,), device)
    last_dim_contiguous("key_mask", checked)
    return checked


def mask_values(words: int, cu_seqlens_k: Tensor) -> None:
    """CPU only: every key of every sequence must have a bit."""
    lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).tolist()
    if max([0, *lengths]) > 32 * words:
        longest = max(lengths)
        expected = f"{-(-longest // 32)} words of 32 bits, one for each of {longest} keys"
        raise InvalidArgument("key_mask", expected, words)


def latent_rows(name: str, value: object, d_v: object, dims: int) -> tuple[object, int]:
    """Rows in latent form: a cache (which knows its latent width) or a plain tensor and d_v."""
    if d_v is not None and (isinstance(d_v, bool) or not isinstance(d_v, int) or d_v < 1):
        raise InvalidArgument("d_v", "a positive int", describe(d_v))
    if isinstance(value, LatentCache):
        if d_v is not None and d_v > value.latent:
            raise InvalidArgument("d_v", f"at most the latent width {value.latent}", d_v)
        return value, value.latent if d_v is None else d_v
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        expected = "a LatentCache, which says what the bytes of a row are"
        raise InvalidArgument(name, expected, describe(value))
    shape = ("rows", "width") if dims == 2 else ("pages", "page_size", "width")
    rows = tensor(name, value, shape, (*Q_DTYPES,))
    last_dim_contiguous(name, rows)
    width = 512 if d_v is None else d_v
    if width > rows.shape[-1]:
        raise InvalidArgument("d_v", f"at most the row width {rows.shape[-1]}", width)
    return rows, width


def index_lists(
    indices: object, topk_lengths: object, total_q: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """indices int32 [total_q, topk]; topk_lengths int32 [total_q] or nothing."""
    checked = tensor("indices", indices, (total_q, "topk"), (torch.int32,), device)
    if topk_lengths is None:
        return checked, None
    return checked, tensor("topk_lengths", topk_lengths, (total_q,), (torch.int32,), device)


def row_sources(value: object, q: Tensor, d_v: object) -> tuple[tuple[Source, ...], int]:
    """The sources of `mla_attend`, one or two, and the width of V."""
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_SOURCES:
        expected = f"1 to {MOST_SOURCES} of Listed and Span, in a list or tuple"
        count = f" of {len(value)}" if isinstance(value, list | tuple) else ""
        raise InvalidArgument("sources", expected, f"{type(value).__name__}{count}")
    latent = 0
    for i, source in enumerate(value):
        name = f"sources[{i}]"
        if isinstance(source, Listed):
            _listed(name, source, q)
        elif isinstance(source, Span):
            _span(name, source, q)
        else:
            raise InvalidArgument(name, "a Listed or a Span", describe(source))
        if isinstance(source.rows, LatentCache):
            if latent and source.rows.latent != latent:
                expected = f"latent width {latent}, as the other source has"
                raise InvalidArgument(name, expected, source.rows.latent)
            latent = source.rows.latent
    if d_v is not None and (isinstance(d_v, bool) or not isinstance(d_v, int) or d_v < 1):
        raise InvalidArgument("d_v", "a positive int", describe(d_v))
    most = latent or q.shape[2]
    width = d_v if d_v is not None else latent or 512
    if width > most:
        raise InvalidArgument("d_v", f"at most the latent width {most}", width)
    return tuple(value), width


def _listed(name: str, source: Listed, q: Tensor) -> None:
    if isinstance(source.rows, LatentCache):
        _cache_of(f"{name}.rows", source.rows, q)
    else:
        rows = tensor(f"{name}.rows", source.rows, ("rows", q.shape[2]), (q.dtype,), q.device)
        last_dim_contiguous(f"{name}.rows", rows)
    tensor(f"{name}.indices", source.indices, (q.shape[0], "n"), (torch.int32,), q.device)
    if source.lengths is not None:
        tensor(f"{name}.lengths", source.lengths, (q.shape[0],), (torch.int32,), q.device)


def _span(name: str, source: Span, q: Tensor) -> None:
    if not isinstance(source.cache, LatentCache):
        raise InvalidArgument(f"{name}.cache", "a LatentCache", describe(source.cache))
    _cache_of(f"{name}.cache", source.cache, q)
    shape = ("requests", "pages")
    tensor(f"{name}.block_table", source.block_table, shape, (torch.int32,), q.device)
    for field in ("request", "begin", "end"):
        value = getattr(source, field)
        tensor(f"{name}.{field}", value, (q.shape[0],), (torch.int32,), q.device)


def turn_back(value: object, q: Tensor, d_v: int) -> TurnBack | None:
    """A TurnBack with a position for each query and no more columns than V, or None."""
    if value is None:
        return None
    if not isinstance(value, TurnBack):
        raise InvalidArgument("turn_back", "a TurnBack or None", describe(value))
    name, shape = "turn_back.table", ("positions", "n")
    table = tensor(name, value.table, shape, (torch.float32,), q.device)
    last_dim_contiguous(name, table)
    columns = table.shape[1]
    if columns % 2 or not 2 <= columns <= d_v:
        expected = f"an even number of columns, 2 to {d_v}: a cosine and a sine for each pair"
        raise InvalidArgument(name, expected, columns)
    integers = (torch.int32, torch.int64)
    tensor("turn_back.positions", value.positions, (q.shape[0],), integers, q.device)
    return value


def _cache_of(name: str, cache: LatentCache, q: Tensor) -> None:
    """A cache where q is, with rows of its width."""
    on_device(name, cache, q.device)
    row_width(name, cache.width, q)


def row_width(name: str, width: int, q: Tensor) -> None:
    """Rows must be as wide as queries, which are absorbed where these are compared with rows."""
    if width != q.shape[2]:
        expected = f"rows of {q.shape[2]} values, as q has (absorbed queries: latent + rope)"
        raise InvalidArgument(name, expected, f"{width}")


def ragged_values(name: str, offsets: Tensor, total: int, rows_of: str) -> None:
    """CPU only: offsets start at 0, never fall, and end inside the tensor."""
    values = offsets.tolist()
    if values[0] != 0:
        raise InvalidArgument(name, "0 as its first entry", values[0])
    for i in range(1, len(values)):
        if values[i] < values[i - 1]:
            got = f"{values[i - 1]} then {values[i]} at entry {i}"
            raise InvalidArgument(name, "offsets that never fall", got)
    if values[-1] > total:
        expected = f"a last entry of at most {total} (rows of {rows_of})"
        raise InvalidArgument(name, expected, values[-1])


def shared_values(k_start: Tensor, cu_seqlens_k: Tensor, total: int) -> None:
    """CPU only: the keys of every sequence, from where they begin, lie inside the tensor."""
    ragged_values("cu_seqlens_k", cu_seqlens_k, torch.iinfo(torch.int32).max, "int32 numbers")
    counts = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).tolist()
    for b, (first, count) in enumerate(zip(k_start.tolist(), counts, strict=True)):
        if not 0 <= first <= total - count:
            expected = f"0 to {total - count} for sequence {b}: {count} of {total} rows of the keys"
            raise InvalidArgument("k_start", expected, first)


def first_keys(cu_seqlens_q: Tensor, cache_lengths: Tensor, window: int) -> list[int]:
    """CPU only: the first key of every sequence that any of its queries sees."""
    return [first_key_of(span, window) for span in paged_spans(cu_seqlens_q, cache_lengths)]


def paged_values(
    cache: LatentCache, block_table: Tensor, cache_lengths: Tensor, first_keys: Sequence[int]
) -> None:
    """CPU only: every key of every sequence, from the first that is seen on, must have a page
    inside the pool."""
    page_size, max_pages = cache.page_size, block_table.shape[1]
    for b, (length, first) in enumerate(zip(cache_lengths.tolist(), first_keys, strict=True)):
        if not 0 <= length <= max_pages * page_size:
            limit = f"{max_pages} pages x {page_size} rows = {max_pages * page_size}"
            raise InvalidArgument("cache_lengths", f"0 to {limit}", f"{length} for sequence {b}")
        before = first // page_size
        used = block_table[b, before : -(-length // page_size)]
        wrong = (used < 0) | (used >= cache.num_pages)
        if bool(wrong.any()):
            p = int(wrong.nonzero()[0])
            got = f"page {int(used[p])} for sequence {b}, entry {before + p}"
            raise InvalidArgument("block_table", f"pages 0 to {cache.num_pages - 1}", got)


def equal_lengths(cache_lengths: Tensor, cu_seqlens_k: Tensor) -> None:
    """CPU only: with rope in a cache, both descriptions of the key counts must agree."""
    ragged = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).tolist()
    for b, (length, rows) in enumerate(zip(cache_lengths.tolist(), ragged, strict=True)):
        if length != rows:
            expected = f"{rows} keys for sequence {b}, as cu_seqlens_k says"
            raise InvalidArgument("cache_lengths", expected, length)


def separate_outputs(operands: Operands, results: Results) -> None:
    """Writing `out` while reading an input in the same memory would give a wrong result.

    Host pointers only, no sync. The ranges from first to last byte must be apart; an `out` that is
    interleaved with an input is refused too, even where no byte is shared.
    """
    out = results.out
    if not out.numel():
        return
    if not (out.is_contiguous() or _elements_apart(out)):
        got = f"strides {list(out.stride())} for shape {list(out.shape)}"
        raise InvalidArgument("out", "memory of its own for every element", got)
    first = out.data_ptr()
    last = first + extent(out)
    for name, value in _inputs(operands):
        start = value.data_ptr()
        if start < last and value.numel() and first < start + extent(value):
            raise InvalidArgument("out", f"memory of its own, apart from {name}", "an overlap")


def _inputs(operands: Operands) -> list[tuple[str, Tensor]]:
    """Every tensor a kernel reads, under the name its caller knows it by."""
    named = {**vars(operands), **vars(operands.weights)}
    if isinstance(operands, SparseOperands):
        named["kv"] = named.pop("cache")
    if isinstance(operands, AttendOperands):
        for i, source in enumerate(named.pop("sources")):
            named |= {f"sources[{i}].{name}": value for name, value in vars(source).items()}
        turn = named.pop("turn_back")
        if turn is not None:
            named |= {f"turn_back.{name}": value for name, value in vars(turn).items()}
    inputs = []
    for name, value in named.items():
        if value is None:
            continue
        if isinstance(value, LatentCache):
            inputs.append((name, value.data))
            value = value.scales
        if isinstance(value, Tensor):
            inputs.append((name, value))
    return inputs


def _elements_apart(t: Tensor) -> bool:
    """Whether no two elements share memory: each stride steps over all that lies inside it."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
