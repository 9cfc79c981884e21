"""Calls recorded from vLLM's engine, run again through openmla's backends on any device.

`calls.pt` holds `weight`, kv_b_proj's of one layer, and `steps`, prefills of that layer: one of
four fresh requests, one of three requests with context and a fresh one. It was made by
tests/vllm_engine/recording.py with vLLM 0.32 on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import formula
from integrations.vllm import fake_vllm

CALLS = Path(__file__).with_name("calls.pt")
HEADS, LATENT, NOPE, ROPE, V = 4, 512, 128, 64, 128
NAMES = ("fresh", "context")


def recorded(name: str, device: str = "cpu") -> tuple[dict[str, Any], Tensor]:
    """A step, and the layer's weight."""
    calls = torch.load(CALLS, weights_only=True, map_location=device)
    return calls["steps"][NAMES.index(name)], calls["weight"]


def lengths(offsets: Tensor) -> list[int]:
    """Lengths of the sequences between offsets."""
    return offsets.diff().tolist()


def layer(weight: Tensor, scale: float, kv_cache_dtype: str = "auto") -> Any:
    """An OpenMLAImpl with that weight."""
    with fake_vllm.installed():
        from openmla.integrations.vllm.attention import OpenMLAImpl

        def kv_b_proj(rows: Tensor) -> tuple[Tensor]:
            return (rows @ weight.T,)

        kv_b_proj.weight = weight  # type: ignore[attr-defined]
        dims = {
            "num_heads": HEADS,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": V,
            "kv_cache_dtype": kv_cache_dtype,
        }
        made = OpenMLAImpl(**dims, scale=scale, kv_b_proj=kv_b_proj)
        made.process_weights_after_loading(weight.dtype)
        return made


def metadata(step: dict[str, Any]) -> Any:
    """What forward_mha reads of vLLM's metadata."""
    context = SimpleNamespace(context_lens=step["lengths"]) if "lengths" in step else None
    prefill = SimpleNamespace(
        query_start_loc=step["offsets"],
        max_query_len=max(lengths(step["offsets"])),
        chunked_context=context,
        block_table=step.get("block_table"),
    )
    return SimpleNamespace(prefill=prefill)


def run_layer(
    step: dict[str, Any],
    weight: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
) -> Tensor:
    """The step's output [tokens, heads, d_v], by OpenMLAImpl.forward_mha."""
    output = torch.full_like(step["output"], torch.nan)
    new = step["q"], step["kv_c"], step["k_pe"]
    layer(weight, step["scale"], kv_cache_dtype).forward_mha(
        *new, step.get("pages"), metadata(step), k_scale, output
    )
    return output.view(-1, HEADS, V)


def run_backend(call: dict[str, Any], scale: float) -> Any:
    """One attention inside a step, by OpenMLAPrefillBackend: out, or out and lse."""
    with fake_vllm.installed():
        from openmla.integrations.vllm.prefill import OpenMLAPrefillBackend

        backend = OpenMLAPrefillBackend(scale=scale, qk_nope_head_dim=NOPE)
    q, k, v = call["q"], call["k"], call["v"]
    if call["causal"]:
        backend.prepare_metadata(SimpleNamespace(query_start_loc=call["offsets_q"]))
        return backend.run_prefill_new_tokens(q, k, v, call["lse"] is not None)
    chunk = SimpleNamespace(query_start_loc=call["offsets_q"], cu_seq_lens=call["offsets_k"])
    return backend.run_prefill_context_chunk(chunk, q, k, v)


def exact_step(step: dict[str, Any], weight: Tensor) -> Tensor:
    """The step in float64, from the latent rows on: context and new tokens in one attention."""
    q_lens, rows = lengths(step["offsets"]), []
    contexts = step["lengths"].tolist() if "lengths" in step else [0] * len(q_lens)
    new = torch.cat([step["kv_c"], step["k_pe"][:, 0]], dim=-1).split(q_lens)
    for request, context in enumerate(contexts):
        if context:
            pages = step["pages"][step["block_table"][request].long()]
            rows.append(pages.flatten(0, 1)[:context])
        rows.append(new[request])
    keys = torch.cat(rows).double()
    kv = (keys[:, :LATENT] @ weight.double().T).view(-1, HEADS, NOPE + V)
    rope = keys[:, None, LATENT:].expand(-1, HEADS, -1)
    k_lens = [q + c for q, c in zip(q_lens, contexts, strict=True)]
    k = torch.cat([kv[..., :NOPE], rope], dim=-1)
    return formula.ragged(step["q"], k, kv[..., NOPE:], q_lens, k_lens, step["scale"]).out


def exact_call(call: dict[str, Any], scale: float) -> formula.Expected:
    """One attention in float64."""
    q_lens, k_lens = lengths(call["offsets_q"]), lengths(call["offsets_k"])
    return formula.ragged(
        call["q"], call["k"], call["v"], q_lens, k_lens, scale, causal=call["causal"]
    )


def error(got: Tensor, want: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((got.double() - want).norm() / want.norm())
