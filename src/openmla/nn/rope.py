"""Rotary position embedding as MLA models use it: plain, or stretched by YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmla.errors import Unsupported
from openmla.kept import kept
from openmla.sources import TurnBack

MOST_KEPT = 64
"""Embeddings and devices: a model has a few."""


@dataclass(frozen=True)
class Yarn:
    """YaRN: slow rotations are slowed down by `factor`, fast ones stay, a ramp lies in between."""

    factor: float
    trained: int
    """Positions the model was trained on before it was stretched."""
    fast: float = 32.0
    slow: float = 1.0
    """Rotations within `trained` at the ends of the ramp."""
    truncate: bool = True

    def frequencies(self, plain: Tensor, theta: float) -> Tensor:
        """The stretched frequencies, from the plain ones."""
        pairs = plain.shape[0]

        def pair_with(rotations: float) -> float:
            """Which pair of columns turns so often within the trained positions."""
            return pairs * math.log(self.trained / (rotations * 2 * math.pi)) / math.log(theta)

        first, last = pair_with(self.fast), pair_with(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        pair = torch.arange(pairs, dtype=torch.float32, device="cpu")
        slowed = ((pair - first) / width).clamp(0, 1)
        return plain / self.factor * slowed + plain * (1 - slowed)


@dataclass(frozen=True)
class Rope:
    """Turns pairs of columns by an angle that grows with the position."""

    width: int
    """Columns that are turned; even."""
    theta: float
    """The base of the angles: pair i turns by position / theta^(2 i / width)."""
    interleaved: bool = True
    """Whether a pair is columns (0, 1), (2, 3), ...; otherwise (0, width/2), (1, width/2 + 1), ...

    The turned columns come out in halves either way: dot products do not depend on the order.
    """
    yarn: Yarn | None = None
    """How slow rotations are stretched; None: not at all."""
    amplitude: float = 1.0
    """Multiplies sine and cosine."""
    score_factor: float = 1.0
    """Multiplies the scale of the scores."""

    @staticmethod
    def of(width: int, config: Any, interleaved: bool | None = None) -> Rope:
        """The embedding that a Transformers configuration describes in `rope_parameters`.

        Args:
            width: columns that are turned.
            config: the configuration, or an object with the same attributes.
            interleaved: whether neighbors are pairs; None: as the configuration says, else True.

        Raises:
            Unsupported: the embedding is neither plain nor stretched by YaRN.
        """
        given = config.rope_parameters
        kind = given.get("rope_type", "default")
        theta, pairs = given["rope_theta"], interleaved
        if pairs is None:
            pairs = getattr(config, "rope_interleave", True)
        if kind == "default":
            return Rope(width, theta, bool(pairs))
        if kind != "yarn":
            raise Unsupported(f"rotary embedding {kind!r}", nearest="default or yarn")
        trained = given["original_max_position_embeddings"]
        factor = given.get("factor") or config.max_position_embeddings / trained
        yarn = Yarn(
            factor,
            trained,
            given.get("beta_fast") or 32.0,
            given.get("beta_slow") or 1.0,
            given.get("truncate", True),
        )
        one, all_dims = given.get("mscale"), given.get("mscale_all_dim")
        amplitude = given.get("attention_factor")
        if amplitude is None:
            both = one and all_dims
            amplitude = _m(factor, one) / _m(factor, all_dims) if both else _m(factor, 1.0)
        score = _m(factor, all_dims) ** 2 if all_dims else 1.0
        return Rope(width, theta, bool(pairs), yarn, amplitude, score)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every pair's angle, [tokens, width/2] each; computed in float32.

        Args:
            positions: int [tokens], each token's place in its sequence.
            dtype: that of the results.
        """
        angles = positions[:, None].float() * _frequencies(self, positions.device)
        return (angles.cos() * self.amplitude).to(dtype), (angles.sin() * self.amplitude).to(dtype)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All columns turned; the first of all pairs come out before the second.

        Args:
            x: [..., width].
            cos: what `cos_sin` gave; broadcasts against [..., width/2].
            sin: likewise.
        """
        half = self.width // 2
        a, b = (x[..., 0::2], x[..., 1::2]) if self.interleaved else (x[..., :half], x[..., half:])
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def turn_last(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """x [tokens, heads, columns] with its last `width` columns turned, each where it was.

        Rows of DeepSeek-V4 are K and V at once, so that attention's result is turned like V:
        `back=True` undoes it, at the query's own position. `mla_attend` does that itself, before it
        rounds, if it is given a `TurnBack`.

        Args:
            x: [tokens, heads, columns].
            positions: int [tokens], each token's place in its sequence.
            back: turn by the negative angle.

        >>> rope, x = Rope(4, 10000.0), torch.tensor([[[9.0, 1.0, 2.0, 3.0, 4.0]]])
        >>> there = rope.turn_last(x, torch.tensor([7]))
        >>> rope.turn_last(there, torch.tensor([7]), back=True).round(decimals=5).tolist()
        [[[9.0, 1.0, 2.0, 3.0, 4.0]]]
        """
        cos, sin = (t[:, None] for t in self.cos_sin(positions, x.dtype))
        return turn_tail(x, cos, -sin if back else sin)


@kept(MOST_KEPT)
def _frequencies(rope: Rope, device: torch.device) -> Tensor:
    """fp32 [width/2]: radians per position of every pair, computed on the CPU: the same bits on
    every device."""
    columns = torch.arange(0, rope.width, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / rope.theta ** (columns / rope.width)
    if rope.yarn is not None:
        frequencies = rope.yarn.frequencies(frequencies, rope.theta)
    return frequencies.to(device)


def turn_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its last columns turned, pairs (0, 1), (2, 3), ... of them, each where it was.

    cos and sin broadcast against [..., pairs] and say how many columns turn; with -sin, they turn
    back. That is how DeepSeek-V4 keeps rows that are K and V at once. In float32, rounded once.

    >>> quarter = torch.zeros(1), torch.ones(1)
    >>> turn_tail(torch.tensor([5.0, 1.0, 2.0]), *quarter).tolist()
    [5.0, -2.0, 1.0]
    """
    still = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., still::2].float(), x[..., still + 1 :: 2].float()
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :still], turned.to(x.dtype)], dim=-1)


def turns_back(cos: Tensor, sin: Tensor) -> TurnBack:
    """What turns results back that `turn_tail` would turn back by cos and -sin: for `mla_attend`.

    Args:
        cos: [..., pairs], a line for each query.
        sin: likewise.

    >>> turns_back(torch.zeros(3, 1), torch.ones(3, 1)).table.shape
    torch.Size([3, 2])
    """
    table = torch.cat([cos, sin], dim=-1).flatten(0, -2).float()
    return TurnBack(table, torch.arange(len(table), device=table.device))


def _m(factor: float, scale: float) -> float:
    """YaRN's correction for the sharpness that stretching takes from the scores."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
