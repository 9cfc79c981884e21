"""A server under load: Transformers' continuous batching of an MLA model, on an H200.

    PYTHONPATH=src timeout 150 python benchmarks/device/serve_h200.py RESULT.json [COMMIT]

Four random layers of DeepSeek-V3's widths, 128 heads, hidden 2048, bf16. All requests are there
from the start, greedy, and none ends before its last token. "openmla" is `optimize(model)`: a paged
cache of latent rows. "expanded" is the same engine with K and V of every head in its cache (V
padded to K's width: the engine has one), attended to by torch's SDPA with a mask, as Transformers
does it.

- loads: tokens/s, the time to the first token and between tokens, the cache's bytes and the most
  bytes that torch held beyond the model's
- again: the same load a second time: equal tokens, and no more memory
- failures: requests that are too long or name unknown tokens, beside good ones
- neighbors: requests alone and together; matrix products in blocks of 64 rows there, since
  cuBLAS chooses its kernels by the number of rows

The result is written after every step, so that what was measured survives what comes after; steps
that would not end within --seconds are named in it and not run. docs/performance.md has a table of
the newest benchmarks/results/serve-h200-*.json. `--tiny` is a check of this program on a CPU, and
measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from openmla.integrations.transformers import optimize
from openmla.lab.bench.provenance import provenance

PAGE = 32
PAGE_OPTION = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
EXPANDED = "sdpa" if PAGE_OPTION == "page_size" else "paged|sdpa"
"""What Transformers 5.22, and 5.17 before it, call their SDPA over pages."""
VOCABULARY = 1024
BAR_SPEED, BAR_CACHE = 1.5, 1 / 20
aten = torch.ops.aten


@dataclass(frozen=True)
class Load:
    """Requests, all there from the start."""

    name: str
    prompts: list[list[int]]
    new_tokens: int
    batch_tokens: int

    @property
    def rows(self) -> int:
        """Rows of a cache that holds all of them at once."""
        return sum(-(-(len(p) + self.new_tokens) // PAGE) * PAGE for p in self.prompts)


def load(
    name: str, count: int, shortest: int, longest: int, new_tokens: int, batch_tokens: int
) -> Load:
    """Prompts of random tokens, their lengths spread evenly over orders of magnitude."""
    draw = torch.Generator().manual_seed(count + longest)
    share = torch.rand(count, generator=draw)
    lengths = (shortest * (longest / shortest) ** share).long().tolist()
    prompts = [torch.randint(5, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    return Load(name, prompts, new_tokens, batch_tokens)


def make_model(layers: int, heads: int, hidden: int, device: str) -> PreTrainedModel:
    """Random layers; dense, so that attention is not a small part of the work."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=hidden // 2,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=16384,
        initializer_range=0.05,
    )
    with torch.device(device):
        model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval()


def expand(model: PreTrainedModel) -> None:
    """Let the engine cache and attend to K and V of every head."""
    own = AttentionInterface()[EXPANDED]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
    ) -> tuple[Tensor, None]:
        wide = torch.nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
        out, _ = own(module, query, key, wide, mask, **more)
        return out[..., : module.v_head_dim], None

    AttentionInterface.register(EXPANDED, attention)
    model.config.head_dim = model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
    model.set_attn_implementation(EXPANDED)


def row_bytes(model: PreTrainedModel, name: str) -> int:
    """Bytes that a token has in the engine's cache."""
    config = model.config
    wide = config.kv_lora_rank + config.qk_rope_head_dim
    if name == "expanded":
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        wide = 2 * config.num_attention_heads * head
    return 2 * wide * config.num_hidden_layers


def serve(model: PreTrainedModel, asked: Load, rows: int = 0) -> tuple[list[Any], float, float]:
    """Results in the order of the prompts, when it began, and the seconds it took."""
    config = ContinuousBatchingConfig(
        **{PAGE_OPTION: PAGE},
        num_blocks=(rows or asked.rows) // PAGE,
        max_batch_tokens=asked.batch_tokens,
        use_cuda_graph=False,
    )
    greedy = GenerationConfig(
        max_new_tokens=asked.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    start = perf_counter()
    found = model.generate_batch(
        inputs=asked.prompts,
        generation_config=greedy,
        continuous_batching_config=config,
        record_timestamps=True,
        progress_bar=False,
        warmup=False,
    )
    took = perf_counter() - start
    by_number = sorted(found.values(), key=lambda r: int(r.request_id.rsplit("_", 1)[-1]))
    return by_number, start, took


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99, in milliseconds; NaN where no request got that far."""
    seconds = seconds or [float("nan")]
    found = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99]).double())
    return {"p50_ms": 1e3 * found[0].item(), "p99_ms": 1e3 * found[1].item()}


def measured(model: PreTrainedModel, name: str, asked: Load) -> tuple[dict[str, Any], list[Any]]:
    """One load, served by one contestant: figures, and the tokens."""
    held = memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    results, start, took = serve(model, asked)
    peak = torch.cuda.max_memory_allocated() - held if torch.cuda.is_available() else 0
    new = sum(len(r.generated_tokens) for r in results)
    first = [r.timestamps[0] - start for r in results if r.timestamps]
    between = [b - a for r in results for a, b in zip(r.timestamps, r.timestamps[1:], strict=False)]
    figures = {
        "load": asked.name,
        "contestant": name,
        "requests": len(results),
        "prompt_tokens": sum(len(p) for p in asked.prompts),
        "longest_prompt": max(len(p) for p in asked.prompts),
        "new_tokens": new,
        "failed": sum(r.error is not None for r in results),
        "seconds": took,
        "new_tokens_per_s": new / took,
        "tokens_per_s": (new + sum(len(p) for p in asked.prompts)) / took,
        "first_token": percentiles(first),
        "between_tokens": percentiles(between),
        "cache_rows": asked.rows,
        "cache_bytes": asked.rows * row_bytes(model, name),
        "peak_bytes": peak,
    }
    return figures, [r.generated_tokens for r in results]


def memory() -> int:
    """Bytes that torch holds on the GPU."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def failures(model: PreTrainedModel, good: Load) -> dict[str, Any]:
    """Bad requests between good ones."""
    rows = 2 * good.rows
    alone = [r.generated_tokens for r in serve(model, good, rows)[0]]
    bad = [[5] * (rows + 1), [VOCABULARY], [-1]]
    mixed = [bad[0], *good.prompts[:2], bad[1], *good.prompts[2:], bad[2]]
    found = serve(model, Load("mixed", mixed, good.new_tokens, good.batch_tokens), rows)[0]
    served = [r.generated_tokens for r in found if r.error is None]
    return {
        "failed": sum(r.error is not None for r in found),
        "bad": len(bad),
        "same": served == alone,
    }


class Blocks(TorchDispatchMode):
    """Matrix products in blocks of 64 rows: a row's bits do not depend on how many there are."""

    ROWS = 64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """mm, addmm and bmm by blocks; the rest as it is."""
        kwargs = kwargs or {}
        if func is aten.mm.default:
            return self._by_blocks(func, args[0], 0, lambda part: (part, args[1]))
        if func is aten.addmm.default and not kwargs and args[0].dim() == 1:
            return self._by_blocks(func, args[1], 0, lambda part: (args[0], part, args[2]))
        if func is aten.bmm.default:
            return self._by_blocks(func, args[0], 1, lambda part: (part, args[1]))
        return func(*args, **kwargs)

    def _by_blocks(self, func: Any, rows: Tensor, dim: int, rest: Any) -> Tensor:
        count = rows.shape[dim]
        short = -count % self.ROWS
        shape = list(rows.shape)
        shape[dim] = short
        padded = torch.cat([rows, rows.new_zeros(shape)], dim) if short else rows
        parts = [func(*rest(part.contiguous())) for part in padded.split(self.ROWS, dim)]
        return torch.cat(parts, dim).narrow(dim, 0, count)


@contextmanager
def in_blocks(model: PreTrainedModel) -> Iterator[None]:
    """The model's forward pass under `Blocks`, in whichever thread the engine calls it."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Blocks():
            return own(*args, **kwargs)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def neighbors(model: PreTrainedModel, asked: Load) -> dict[str, Any]:
    """Tokens of every request alone and in the batch."""
    found: dict[str, Any] = {}
    for name, blocks in (("blocks of 64 rows", True), ("cuBLAS as it likes", False)):
        with in_blocks(model) if blocks else torch.no_grad():
            together = [r.generated_tokens for r in serve(model, asked)[0]]
            alone = [
                serve(model, Load("one", [p], asked.new_tokens, asked.batch_tokens))[0][0]
                for p in asked.prompts
            ]
        pairs = zip(together, (r.generated_tokens for r in alone), strict=True)
        found[name] = {"requests": len(together), "same": sum(a == b for a, b in pairs)}
    return found


class Report:
    """The result, written after every step; steps that do not fit the time are named, not run."""

    def __init__(self, path: Path, about: dict[str, Any], seconds: float) -> None:
        self.path, self.ends = path, perf_counter() + seconds
        self.found: dict[str, Any] = {**about, "loads": [], "skipped": []}

    def left(self, name: str, needs: float) -> bool:
        """Whether a step that needs so many seconds still fits."""
        fits = perf_counter() + needs < self.ends
        if not fits:
            self.found["skipped"].append(name)
        return fits

    def write(self) -> None:
        """Now."""
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def add(self, figures: dict[str, Any]) -> None:
        """A load's figures."""
        self.found["loads"].append(figures)
        self.write()
        shown = f"{figures['load']} {figures['contestant']}: {figures['seconds']:.2f} s,"
        shown += f" {figures['new_tokens_per_s']:.0f} new tokens/s, first {figures['first_token']},"
        shown += f" between {figures['between_tokens']}, {figures['cache_bytes'] / 2**30:.2f} GiB"
        print(shown, flush=True)


def bars(found: dict[str, Any]) -> dict[str, Any]:
    """The even load: openmla over expanded."""
    even = {f["contestant"]: f for f in found["loads"] if f["load"] == "even"}
    if set(even) != {"openmla", "expanded"}:
        return {}
    ours, theirs = even["openmla"], even["expanded"]
    return {
        "speed": ours["new_tokens_per_s"] / theirs["new_tokens_per_s"],
        "speed_bar": BAR_SPEED,
        "cache": ours["cache_bytes"] / theirs["cache_bytes"],
        "cache_bar": BAR_CACHE,
        "first_token_p50": ours["first_token"]["p50_ms"] / theirs["first_token"]["p50_ms"],
    }


def race(
    report: Report,
    shape: tuple[int, int, int],
    device: str,
    warm: Load,
    asked: Load,
    answers: dict[str, list[Any]],
) -> None:
    """The other contestant, with weights of its own: the same, drawn again."""
    model = make_model(*shape, device)
    own = AttentionInterface()[EXPANDED]
    expand(model)
    try:
        serve(model, Load("warm", warm.prompts[:2], 3, warm.batch_tokens))
        figures, tokens = measured(model, "expanded", asked)
    finally:
        AttentionInterface.register(EXPANDED, own)
    pairs = zip(tokens, answers[asked.name], strict=True)
    figures["requests_with_openmlas_tokens"] = sum(a == b for a, b in pairs)
    report.add(figures)
    report.found["bars"] = bars(report.found)
    report.write()
    del model
    memory()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("commit", nargs="?", default="")
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    if options.tiny:
        warm = load("warm", 3, 40, 90, 3, 64)
        loads = [load("even", 4, 64, 64, 4, 96), load("mixed", 6, 8, 128, 6, 96)]
        few = load("few", 4, 8, 100, 4, 96)
        shape = (2, 4, 128)
    else:
        warm = load("warm", 6, 128, 4096, 8, 4096)
        loads = [
            load("even", 32, 2048, 2048, 64, 4096),
            load("mixed", 64, 128, 8192, 128, 4096),
            load("mixed 256", 256, 128, 8192, 128, 4096),
        ]
        few = load("few", 6, 128, 2048, 16, 4096)
        shape = (4, 128, 2048)
    about = {
        "provenance": provenance(
            "python benchmarks/device/serve_h200.py RESULT.json",
            gpu=not options.tiny,
            commit=options.commit,
        ),
        "transformers": transformers.__version__,
    }
    report = Report(options.result, about, options.seconds)
    model = optimize(make_model(*shape, device))
    serve(model, warm)  # compiles
    serve(model, few)
    print(f"compiled, {report.ends - perf_counter():.0f} s left", flush=True)
    answers: dict[str, list[Any]] = {}
    for asked in loads[:2]:
        figures, answers[asked.name] = measured(model, "openmla", asked)
        report.add(figures)
    before = memory()
    if report.left("again", 8):
        _, tokens = measured(model, "openmla", loads[1])
        same = tokens == answers[loads[1].name]
        report.found["again"] = {"same": same, "bytes_more": memory() - before}
    if report.left("failures", 5):
        report.found["failures"] = failures(model, few)
    report.write()
    if report.left("even, expanded", 25):
        race(report, shape, device, warm, loads[0], answers)
    if report.left("neighbors", 12):
        report.found["neighbors"] = neighbors(model, few)
    report.write()
    print({name: report.found.get(name) for name in ("again", "failures", "neighbors")}, flush=True)
    for asked in loads[2:]:
        if report.left(asked.name, 20):
            report.add(measured(model, "openmla", asked)[0])
    del model
    memory()
    if report.left("mixed, expanded", 60):
        race(report, shape, device, warm, loads[1], answers)
    report.write()
    print(report.found.get("bars"), "skipped", report.found["skipped"], flush=True)


if __name__ == "__main__":
    main()
