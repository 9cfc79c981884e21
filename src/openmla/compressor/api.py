"""`compress_rows`: check, pool, round once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from openmla.checks import describe
from openmla.errors import InvalidArgument

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Tokens(NamedTuple):
    """Values and gates of consecutive tokens, [..., tokens, width] each."""

    kv: Tensor
    gate: Tensor


def compress_rows(
    kv: Tensor,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ratio: int,
    overlap: bool = False,
    previous: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One row for every `ratio` tokens: [..., tokens, width] -> [..., tokens / ratio, width].

    Column c of row j is the sum over the row's tokens of softmax(gate + bias)[c] * kv[c], the
    softmax being over these tokens. A softmax in float32, rounded once to the type of kv (float64
    stays float64). Ratio 1 without a gate returns kv.

    With `overlap`, kv and gate are [..., tokens, 2 * width]: the first half of a token's columns
    goes into the next row, the second half into its own, and a row is made of 2 * ratio tokens.

    Args:
        kv: [..., tokens, width], fp32, bf16, fp16 or fp64, values of the tokens; tokens are a
            multiple of ratio. With overlap, 2 * width columns.
        gate: floats, of the shape of kv; None only at ratio 1, without overlap and bias.
        bias: [ratio, width], with overlap [ratio, 2 * width], added to the gates by places within a
            row; None without one.
        ratio: tokens per row.
        overlap: whether a row is also made of the tokens of the row before.
        previous: kv and gate [..., ratio, width or 2 * width] of the `ratio` tokens before these,
            of which the first `width` columns are read; only with overlap. None: the first row is
            made of its own tokens alone.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.

    >>> kv = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    >>> compress_rows(kv, torch.zeros(4, 1), ratio=2).tolist()
    [[2.0], [6.0]]
    >>> both = torch.cat([kv, kv + 100], dim=1)             # into the next row, into its own
    >>> compress_rows(both, torch.zeros(4, 2), ratio=2, overlap=True).tolist()
    [[102.0], [54.0]]
    """
    _check(kv, gate, bias, ratio, overlap, previous)
    if gate is None:
        return kv
    rows, width = kv.shape[-2] // ratio, kv.shape[-1] // (2 if overlap else 1)
    if not rows:
        return kv.new_empty(*kv.shape[:-2], 0, width)
    exact = torch.float64 if kv.dtype == torch.float64 else torch.float32
    by_row = *kv.shape[:-2], rows, ratio, kv.shape[-1]
    values, gates = (x.to(exact).reshape(by_row) for x in (kv, gate))
    if bias is not None:
        gates = gates + bias.to(exact)
    if overlap:
        before = None
        if previous is not None:
            old = (x[..., :width].to(exact) for x in previous)
            before = Tokens(*old)
            if bias is not None:
                before = before._replace(gate=before.gate + bias[:, :width].to(exact))
        values = _both(values, width, None if before is None else before.kv, 0.0)
        gates = _both(gates, width, None if before is None else before.gate, -torch.inf)
    return (values * gates.softmax(-2)).sum(-2).to(kv.dtype)


def _both(x: Tensor, width: int, before: Tensor | None, none: float) -> Tensor:
    """[..., rows, ratio, 2 * width] -> [..., rows, 2 * ratio, width]: the row before, then this."""
    first = x[..., :-1, :, :width]
    if before is None:
        first = pad(first, (0, 0, 0, 0, 1, 0), value=none)
    else:
        first = torch.cat([before.unsqueeze(-3), first], dim=-3)
    return torch.cat([first, x[..., width:]], dim=-2)


def _check(
    kv: Tensor,
    gate: Tensor | None,
    bias: Tensor | None,
    ratio: int,
    overlap: bool,
    previous: tuple[Tensor, Tensor] | None,
) -> None:
    if not isinstance(ratio, int) or isinstance(ratio, bool) or ratio < 1:
        raise InvalidArgument("ratio", "an int of at least 1", describe(ratio))
    if not isinstance(kv, Tensor) or kv.dim() < 2 or kv.dtype not in FLOATS:
        raise InvalidArgument("kv", "floats [..., tokens, width]", describe(kv))
    *_, tokens, width = kv.shape
    if tokens % ratio:
        raise InvalidArgument("kv", f"a multiple of {ratio} tokens", tokens)
    if overlap and width % 2:
        raise InvalidArgument("kv", "an even number of columns, with overlap", width)
    if gate is None:
        if ratio > 1 or overlap or bias is not None or previous is not None:
            raise InvalidArgument("gate", f"floats as kv has them, at ratio {ratio}", "None")
        return
    if not isinstance(gate, Tensor) or gate.shape != kv.shape or gate.device != kv.device:
        raise InvalidArgument("gate", f"{list(kv.shape)} on {kv.device}, as kv", describe(gate))
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (ratio, width)):
        raise InvalidArgument("bias", f"[{ratio}, {width}]", describe(bias))
    if previous is None:
        return
    if not overlap:
        raise InvalidArgument("previous", "None without overlap", describe(previous))
    before = (*kv.shape[:-2], ratio)
    for name, x in zip(("previous[0]", "previous[1]"), previous, strict=True):
        if x.shape[:-1] != before or x.shape[-1] not in (width // 2, width):
            raise InvalidArgument(name, f"{[*before, width // 2]}", describe(x))
