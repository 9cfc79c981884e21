"""A server under load: Transformers' continuous batching of an MLA model, on an H200.

    PYTHONPATH=src timeout 280 python benchmarks/device/serve_h200.py RESULT.json [COMMIT]

Four random layers of DeepSeek-V3's widths, 128 heads, hidden 2048, bf16. All requests of a load are
there from the start, greedy, and none ends before its last token. "openmla" is `optimize(model)`: a
paged cache of latent rows. "expanded" is the same engine with K and V of every head in its cache (V
padded to K's width: the engine has one), attended to by torch's SDPA with a mask, as Transformers
does it.

- warm-up, in no figure: kernels are compiled side by side (serving_kernels.py), then openmla serves
  each load once with few new tokens, so that every kernel has been launched; "expanded", which
  compiles nothing, serves eight of its prompts
- loads: "even", 64 prompts of 2048 tokens, then "mixed" and "mixed 256", 64 and 256 prompts of 128
  to 8192 tokens with up to 256 new ones. Tokens/s, the time to the first token (the engine and its
  cache stand by then) and between tokens, the cache's bytes and the most bytes that torch held
  beyond the model's, and how many kernels a load met for the first time
- again: the mixed load a second time: equal tokens, and no more memory
- failures: requests that are too long or name unknown tokens, beside good ones
- neighbors: requests alone and together; matrix products in blocks of 64 rows there, since
  cuBLAS chooses its kernels by the number of rows

Every load has so many seconds, and is cut when they are over: its figures then count what it did.
The result is written after every step; steps that would not end within --seconds are named in it
and not run. docs/performance.md has a table of the newest benchmarks/results/serve-h200-*.json.
`--tiny` is a check of this program on a CPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
import triton
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

PAGE = 64
PAGE_OPTION = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
EXPANDED = "sdpa" if PAGE_OPTION == "page_size" else "paged|sdpa"
"""What Transformers 5.22, and 5.17 before it, call their SDPA over pages."""
VOCABULARY = 1024
BAR_SPEED, BAR_CACHE, BAR_FIRST = 1.5, 1 / 20, 1.0
EXPANDED_BYTES = 56 << 30
"""Most bytes of the expanded cache: the engine gathers what it reads beside it, and copies that."""
aten = torch.ops.aten


@dataclass(frozen=True)
class Load:
    """Requests, all there from the start."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]
    """How many tokens every request asks for."""
    batch_tokens: int

    @property
    def rows(self) -> int:
        """Rows of a cache that holds all of them at once."""
        pairs = zip(self.prompts, self.new_tokens, strict=True)
        return sum(-(-(len(p) + n) // PAGE) * PAGE for p, n in pairs)

    def first(self, count: int, new_tokens: int) -> Load:
        """Some of the prompts, with as many new tokens each."""
        prompts = self.prompts[:count]
        return replace(self, prompts=prompts, new_tokens=[new_tokens] * len(prompts))


def load(
    name: str,
    count: int,
    prompt: tuple[int, int],
    new: tuple[int, int],
    batch_tokens: int,
) -> Load:
    """Prompts of random tokens, their lengths spread evenly over orders of magnitude; numbers of
    new tokens spread evenly."""
    (shortest, longest), (fewest, most) = prompt, new
    draw = torch.Generator().manual_seed(count + longest)
    share = torch.rand(count, generator=draw)
    lengths = (shortest * (longest / shortest) ** share).long().tolist()
    prompts = [torch.randint(5, VOCABULARY, (n,), generator=draw).tolist() for n in lengths]
    new_tokens = torch.randint(fewest, most + 1, (count,), generator=draw).tolist()
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


@dataclass(frozen=True)
class Answer:
    """What a request has got."""

    tokens: list[int]
    times: list[float]
    """When each of them came."""
    error: str | None = None
    is_finished: bool = True


@dataclass(frozen=True)
class Served:
    """One load, served: its answers in the order of the prompts."""

    answers: list[Answer]
    start: float
    seconds: float
    is_cut: bool

    @property
    def tokens(self) -> list[list[int]]:
        """What every request got."""
        return [a.tokens for a in self.answers]


def serve(model: PreTrainedModel, asked: Load, rows: int = 0, seconds: float = math.inf) -> Served:
    """A load, from an engine that stands before its first request comes."""
    config = ContinuousBatchingConfig(
        **{PAGE_OPTION: PAGE},
        num_blocks=(rows or asked.rows) // PAGE,
        max_batch_tokens=asked.batch_tokens,
        use_cuda_graph=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(greedy, config)
    manager.warmup()  # makes the cache; there are no graphs to be captured
    names = [str(i) for i in range(len(asked.prompts))]
    for name, prompt, new in zip(names, asked.prompts, asked.new_tokens, strict=True):
        manager.add_request(prompt, request_id=name, max_new_tokens=new, record_timestamps=True)
    found: dict[str, Answer] = {}
    start = perf_counter()
    manager.start()
    while len(found) < len(names) and perf_counter() < start + seconds:
        result = manager.get_result(timeout=0.2)
        if result is not None and result.is_finished():
            found[result.request_id] = Answer(
                result.generated_tokens, result.timestamps or [], result.error
            )
        elif result is None and not manager.is_running():
            raise RuntimeError(f"the engine ended with {len(found)} of {len(names)} requests")
    took = perf_counter() - start
    is_cut = len(found) < len(names)
    if is_cut:
        for name, state in list(manager.batch_processor.scheduler.active_requests.items()):
            times = list(state.timestamps or [])
            found.setdefault(name, Answer(state.generated_tokens[: len(times)], times, None, False))
    manager.stop(block=True, hard_stop=is_cut)
    manager.destroy()
    nothing = Answer([], [], None, False)
    return Served([found.get(name, nothing) for name in names], start, took, is_cut)


class Compiled:
    """Counts kernels that Triton compiles, or takes from its disk cache, in this process."""

    def __init__(self) -> None:
        self.count = 0
        triton.knobs.compilation.listener = self._note

    def _note(self, **compilation: Any) -> None:
        self.count += 1


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99, in milliseconds; NaN where no request got that far."""
    seconds = seconds or [float("nan")]
    found = torch.tensor(seconds, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99]).double())
    return {"p50_ms": 1e3 * found[0].item(), "p99_ms": 1e3 * found[1].item()}


def measured(
    model: PreTrainedModel, name: str, asked: Load, seconds: float, compiled: Compiled
) -> tuple[dict[str, Any], Served]:
    """One load, served by one contestant: figures, and the answers."""
    held, known = memory(), compiled.count
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    row = row_bytes(model, name)
    rows = min(asked.rows, EXPANDED_BYTES // row // PAGE * PAGE)
    served = serve(model, asked, rows, seconds)
    peak = torch.cuda.max_memory_allocated() - held if torch.cuda.is_available() else 0
    answers = served.answers
    new = sum(len(a.tokens) for a in answers)
    read = sum(len(p) for p, a in zip(asked.prompts, answers, strict=True) if a.tokens)
    first = [a.times[0] - served.start for a in answers if a.times]
    between = [y - x for a in answers for x, y in zip(a.times, a.times[1:], strict=False)]
    figures = {
        "load": asked.name,
        "contestant": name,
        "requests": len(answers),
        "finished": sum(a.is_finished and a.error is None for a in answers),
        "began": len(first),
        "failed": sum(a.error is not None for a in answers),
        "prompt_tokens": sum(len(p) for p in asked.prompts),
        "longest_prompt": max(len(p) for p in asked.prompts),
        "new_tokens": new,
        "asked_new_tokens": sum(asked.new_tokens),
        "seconds": served.seconds,
        "is_cut": served.is_cut,
        "new_tokens_per_s": new / served.seconds,
        "tokens_per_s": (new + read) / served.seconds,
        "first_token": percentiles(first),
        "between_tokens": percentiles(between),
        "cache_rows": rows,
        "cache_rows_wanted": asked.rows,
        "cache_bytes": rows * row,
        "peak_bytes": peak,
        "kernels_met_first": compiled.count - known,
    }
    return figures, served


def memory() -> int:
    """Bytes that torch holds on the GPU, but for workspaces that it keeps for every stream."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def failures(model: PreTrainedModel, good: Load) -> dict[str, Any]:
    """Bad requests between good ones."""
    rows = 2 * good.rows
    alone = serve(model, good, rows).tokens
    bad = [[5] * (rows + 1), [VOCABULARY], [-1]]
    mixed = [bad[0], *good.prompts[:2], bad[1], *good.prompts[2:], bad[2]]
    new = [4, *good.new_tokens[:2], 4, *good.new_tokens[2:], 4]
    found = serve(model, Load("beside bad ones", mixed, new, good.batch_tokens), rows).answers
    served = [a.tokens for a in found if a.error is None]
    return {
        "failed": sum(a.error is not None for a in found),
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
            together = serve(model, asked).tokens
            alone = [
                serve(model, Load("one", [prompt], [new], asked.batch_tokens)).tokens[0]
                for prompt, new in zip(asked.prompts, asked.new_tokens, strict=True)
            ]
        same = sum(a == b for a, b in zip(together, alone, strict=True))
        found[name] = {"requests": len(together), "same": same}
    return found


class Report:
    """The result, written after every step; steps that do not fit the time are named, not run."""

    def __init__(self, path: Path, about: dict[str, Any], seconds: float) -> None:
        self.path, self.start = path, perf_counter()
        self.ends = self.start + seconds
        self.found: dict[str, Any] = {**about, "loads": [], "skipped": []}

    @property
    def left(self) -> float:
        """Seconds that are left for all of it."""
        return self.ends - perf_counter()

    def step(self, name: str, needs: float, run: Callable[[], dict[str, Any]]) -> None:
        """Run a step if it fits, and note what it found, or how it failed, under its name."""
        if self.left < needs:
            self.found["skipped"].append(name)
            self.write()
            return
        try:
            self.found[name] = run()
        except Exception as error:  # the other steps are worth having
            self.found[name] = {"error": f"{type(error).__name__}: {error}"}
        self.write()
        print(f"{name}: {self.found[name]}, {self.left:.0f} s left", flush=True)

    def write(self) -> None:
        """Now."""
        self.found["seconds"] = perf_counter() - self.start
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def add(self, figures: dict[str, Any]) -> None:
        """A load's figures."""
        self.found["loads"].append(figures)
        self.found["bars"] = bars(self.found)
        self.write()
        shown = f"{figures['load']} {figures['contestant']}: {figures['seconds']:.2f} s,"
        shown += " cut," if figures["is_cut"] else ""
        shown += f" {figures['new_tokens_per_s']:.0f} new tokens/s, first {figures['first_token']},"
        shown += f" between {figures['between_tokens']}, {figures['cache_bytes'] / 2**30:.2f} GiB,"
        shown += f" {figures['kernels_met_first']} kernels met first, {self.left:.0f} s left"
        print(shown, flush=True)


def bars(found: dict[str, Any]) -> dict[str, Any]:
    """The even load: openmla over expanded."""
    even = {f["contestant"]: f for f in found["loads"] if f["load"] == "even" and f["new_tokens"]}
    if set(even) != {"openmla", "expanded"}:
        return {}
    ours, theirs = even["openmla"], even["expanded"]
    return {
        "speed": ours["new_tokens_per_s"] / theirs["new_tokens_per_s"],
        "speed_bar": BAR_SPEED,
        "cache": ours["cache_bytes"] / theirs["cache_bytes"],
        "cache_bar": BAR_CACHE,
        "first_token_p50": ours["first_token"]["p50_ms"] / theirs["first_token"]["p50_ms"],
        "first_token_p99": ours["first_token"]["p99_ms"] / theirs["first_token"]["p99_ms"],
        "first_token_bar": BAR_FIRST,
    }


class Contest:
    """Both models, with the same weights, and what openmla answered.

    The garbage collector is told that what stands by then stays: an engine collects when it stops.
    """

    WARM_PROMPTS, WARM_TOKENS = 8, 4

    def __init__(self, report: Report, shape: tuple[int, int, int], device: str) -> None:
        self.report, self.compiled = report, Compiled()
        self.ours = optimize(make_model(*shape, device))
        self.theirs = make_model(*shape, device)
        self.answers: dict[str, Served] = {}
        gc.collect()
        gc.freeze()

    def warm(self, asked: Load, seconds: float) -> None:
        """Launch every kernel of a load; whatever this takes is in no figure."""
        serve(self.ours, asked.first(len(asked.prompts), self.WARM_TOKENS), seconds=seconds)

    def race(self, asked: Load, seconds: float, needs: float) -> None:
        """openmla, then the expanded cache, with so many seconds for each."""
        for name, run in (("openmla", self._ours), ("expanded", self._theirs)):
            if self.report.left < needs:
                self.report.found["skipped"].append(f"{asked.name}, {name}")
                continue
            try:
                run(asked, min(seconds, self.report.left))
            except Exception as error:  # as memory that ends: the other one is worth having
                reason = f"{type(error).__name__}: {error}"
                self.report.found["skipped"].append(f"{asked.name}, {name} ({reason})")
                print(reason, flush=True)
            self.report.write()

    def _ours(self, asked: Load, seconds: float) -> None:
        figures, served = measured(self.ours, "openmla", asked, seconds, self.compiled)
        self.answers[asked.name] = served
        self.report.add(figures)

    def _theirs(self, asked: Load, seconds: float) -> None:
        own = AttentionInterface()[EXPANDED]
        expand(self.theirs)
        try:
            serve(self.theirs, asked.first(self.WARM_PROMPTS, self.WARM_TOKENS), seconds=seconds)
            figures, served = measured(self.theirs, "expanded", asked, seconds, self.compiled)
        finally:
            AttentionInterface.register(EXPANDED, own)
        ours = self.answers.get(asked.name)
        if ours is not None and not served.is_cut:
            pairs = zip(served.tokens, ours.tokens, strict=True)
            figures["requests_with_openmlas_tokens"] = sum(a == b for a, b in pairs)
        self.report.add(figures)

    def again(self, asked: Load) -> dict[str, Any]:
        """A load a second time: whether the tokens are the same, and what else is held."""
        before = memory()
        served = serve(self.ours, asked)
        same = served.tokens == self.answers[asked.name].tokens
        return {"load": asked.name, "same": same, "bytes_more": memory() - before}


def loads_of(tiny: bool) -> tuple[list[Load], Load]:
    """The loads, and a few requests for the checks."""
    if tiny:
        sizes = [(4, (64, 64), (4, 4)), (6, (8, 128), (2, 6)), (9, (8, 128), (2, 6))]
        few, batch = load("few", 4, (8, 100), (4, 4), 96), 96
    else:
        sizes = [
            (64, (2048, 2048), (64, 64)),
            (64, (128, 8192), (16, 256)),
            (256, (128, 8192), (16, 256)),
        ]
        few, batch = load("few", 6, (128, 2048), (16, 16), 4096), 4096
    names = ("even", "mixed", "mixed 256")
    return [load(name, *size, batch) for name, size in zip(names, sizes, strict=True)], few


def compile_kernels(seconds: float) -> str:
    """What serving_kernels.py says at its end."""
    path = Path(__file__).with_name("serving_kernels.py")
    command = [sys.executable, str(path), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("commit", nargs="?", default="")
    parser.add_argument("--seconds", type=float, default=230)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    about = {
        "provenance": provenance(
            "python benchmarks/device/serve_h200.py RESULT.json",
            gpu=not options.tiny,
            commit=options.commit,
        ),
        "transformers": transformers.__version__,
    }
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # answers have errors
    report = Report(options.result, about, options.seconds)
    (even, mixed, many), few = loads_of(options.tiny)
    report.found["compiling"] = "nothing" if options.tiny else compile_kernels(60)
    print(f"{report.found['compiling']}; {report.left:.0f} s left", flush=True)
    shape = (2, 4, 128) if options.tiny else (4, 128, 2048)
    contest = Contest(report, shape, "cpu" if options.tiny else "cuda")
    for asked in (few, even, mixed):
        contest.warm(asked, 30)
    report.found["warm_after_s"] = perf_counter() - report.start
    report.write()
    print(f"warm; {report.left:.0f} s left", flush=True)
    contest.race(even, seconds=90, needs=6)
    report.step("failures", 4, lambda: failures(contest.ours, few))
    report.step("neighbors", 8, lambda: neighbors(contest.ours, few))
    contest.race(mixed, seconds=25, needs=8)
    if mixed.name in contest.answers and not contest.answers[mixed.name].is_cut:
        report.step("again", 8, lambda: contest.again(mixed))
    contest.race(many, seconds=30, needs=8)
    report.write()
    print(report.found.get("bars"), "skipped", report.found["skipped"], flush=True)


if __name__ == "__main__":
    main()
