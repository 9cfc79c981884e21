"""Time two-layer models of Transformers on an H200: openmla against the models' own attention.

    PYTHONPATH=src python benchmarks/device/transformers_h200.py RESULT.json [COMMIT [PART ...]]

DeepSeek-V3 widths, 128 heads, hidden 2048, bf16. "prefill" is the whole model over a fresh prompt,
against SDPA. "dsa" is one attention module of DeepSeek-V3.2, its indexer's selection given, against
eager attention; "dsa model" is the whole model, in which Transformers' indexer takes most of the
memory, whoever attends.
Contestants take turns in one process. "gpu" is the time in which a kernel runs and "host" the time
that Python takes to launch them, both of one call by itself: the larger one is the bound.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    PreTrainedModel,
)

from openmla.integrations.transformers import optimize, register
from openmla.lab.bench.gpu_timing import race
from openmla.lab.bench.provenance import provenance

WIDTHS: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 16384,
}
PREFILL_BARS = {2048: 1.25, 8192: 1.15}
DSA_TOKENS, DSA_SPEED_BAR, DSA_MEMORY_BAR = 8192, 5.0, 0.1
ROUNDS = 12
Call = Callable[[], Tensor]


def built(model: Any, config: Any) -> PreTrainedModel:
    """With random weights, on the GPU."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        return model._from_config(config, dtype=torch.bfloat16).eval()


def with_attention(model: PreTrainedModel, name: str, form: str = "") -> PreTrainedModel:
    """A copy with another attention, optimized where a form is named."""
    other = copy.deepcopy(model)
    other.set_attn_implementation(name)
    if form:
        optimize(other, form)
    return other


def prefill() -> Iterator[dict[str, Any]]:
    """Whole models over fresh prompts."""
    sdpa = with_attention(built(DeepseekV3ForCausalLM, DeepseekV3Config(**WIDTHS)), "sdpa")
    models = {
        "sdpa": sdpa,
        "openmla": with_attention(sdpa, "openmla"),
        "openmla, optimized": with_attention(sdpa, "openmla", "auto"),
    }
    for tokens, bar in PREFILL_BARS.items():
        ids = torch.randint(0, 1024, (1, tokens), device="cuda")
        calls = {name: _prefill_of(model, ids) for name, model in models.items()}
        yield compared("prefill", tokens, calls, "sdpa", {"speed": bar})


def dsa() -> Iterator[dict[str, Any]]:
    """One attention module, then whole models, with keys selected per query."""
    config = DeepseekV32Config(**WIDTHS)
    eager = with_attention(built(DeepseekV32ForCausalLM, config), "eager")
    models = {"eager": eager, "openmla, optimized": with_attention(eager, "openmla", "auto")}
    ids = torch.randint(0, 1024, (1, DSA_TOKENS), device="cuda")
    hidden = torch.randn(1, DSA_TOKENS, 2048, device="cuda", dtype=torch.bfloat16)
    seen = torch.ones(DSA_TOKENS, DSA_TOKENS, dtype=torch.bool, device="cuda").tril()
    keys = _random_selection(seen, config.index_topk)
    masks = {"eager": _as_numbers(seen), "openmla, optimized": seen[None, None]}
    modules = {name: _module_of(model, hidden, masks[name], keys) for name, model in models.items()}
    bars = {"speed": DSA_SPEED_BAR, "memory": DSA_MEMORY_BAR}
    yield compared("dsa", DSA_TOKENS, modules, "eager", bars)
    del masks, modules
    calls = {name: _prefill_of(model, ids) for name, model in models.items()}
    yield compared("dsa model", DSA_TOKENS, calls, "eager", {})


def compared(
    what: str, tokens: int, calls: dict[str, Call], base: str, bars: dict[str, float]
) -> dict[str, Any]:
    """Times, peak memory and difference of every contestant, as shares of the base's."""
    expected = calls[base]().float()
    rows = {}
    for name, call in calls.items():
        off = (call().float() - expected).norm() / expected.norm()
        rows[name] = {"off_by": off.item(), "peak_bytes": _peak_bytes(call), **_bounds(call)}
    for name, timing in race(calls, ROUNDS).items():
        rows[name] |= asdict(timing)
    own = rows[base]
    for row in rows.values():
        row["speed"] = own["median"] / row["median"]
        row["speed_back_to_back"] = own["back_to_back"] / row["back_to_back"]
        row["memory"] = row["peak_bytes"] / own["peak_bytes"]
    return {"what": what, "tokens": tokens, "bars": bars, "rows": rows}


def _prefill_of(model: PreTrainedModel, ids: Tensor) -> Call:
    return lambda: model(ids, use_cache=True, logits_to_keep=1).logits


def _module_of(model: PreTrainedModel, hidden: Tensor, mask: Tensor, keys: Tensor) -> Call:
    """The first layer's attention with the indexer's answer given."""
    module = model.model.layers[0].self_attn
    positions = torch.arange(hidden.shape[1], device="cuda")[None]
    turned = model.model.rotary_emb(hidden, positions)

    def call() -> Tensor:
        module.indexer.forward = lambda *_, **__: keys
        out: Tensor = module(
            hidden, position_embeddings=turned, attention_mask=mask, position_ids=positions
        )[0]
        del module.indexer.forward
        return out

    return call


def _random_selection(seen: Tensor, topk: int) -> Tensor:
    """int32 [1, tokens, topk]: keys drawn for each query among those it sees."""
    scores = torch.rand(seen.shape, device="cuda").masked_fill_(~seen, -1.0)
    return scores.topk(topk, dim=-1).indices.to(torch.int32)[None]


def _as_numbers(seen: Tensor) -> Tensor:
    least = torch.finfo(torch.bfloat16).min
    numbers = torch.zeros(seen.shape, device="cuda", dtype=torch.bfloat16)
    return numbers.masked_fill_(~seen, least)[None, None]


def _peak_bytes(call: Call) -> int:
    """Most memory a call takes beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _bounds(call: Call) -> dict[str, float]:
    """Milliseconds of the host, least of some calls, and of the kernels of one call."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    busy = sum(event.time_range.elapsed_us() for event in kernels)
    return {"host": 1e3 * min(times), "gpu": busy / 1e3, "kernels": len(kernels)}


def line(result: dict[str, Any], name: str) -> str:
    """One contestant of the printed table."""
    row, base = result["rows"][name], next(iter(result["rows"]))
    bars = "" if name == base else "  ".join(f"{k} bar {v:g}" for k, v in result["bars"].items())
    return (
        f"{result['what']:10s} {result['tokens']:6d} {name:20s}"
        f" {row['median']:8.3f} ms x{row['speed']:5.2f}"
        f"   gpu {row['gpu']:7.3f} host {row['host']:6.3f} kernels {row['kernels']:4.0f}"
        f"   in a row {row['back_to_back']:8.3f} ms x{row['speed_back_to_back']:5.2f}"
        f"   {row['peak_bytes'] / 2**30:6.2f} GiB x{row['memory']:5.2f}"
        f"   off by {row['off_by']:.1e}   {bars}"
    )


PARTS = {"prefill": prefill, "dsa": dsa}


@torch.no_grad()
def main() -> None:
    path, commit = Path(sys.argv[1]), "".join(sys.argv[2:3])
    register()
    command = "python benchmarks/device/transformers_h200.py"
    record = provenance(command, gpu=True, commit=commit) | {
        "transformers": transformers.__version__,
        "widths": WIDTHS,
        "results": [],
    }
    for part in sys.argv[3:] or PARTS:
        for result in PARTS[part]():
            record["results"].append(result)
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(*(line(result, name) for name in result["rows"]), sep="\n", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
