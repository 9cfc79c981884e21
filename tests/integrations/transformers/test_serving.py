"""Continuous batching in Transformers' own engine, from a paged cache of latent rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from integrations.transformers import served
from integrations.transformers.tiny import kinds, selects_keys, set_attention, tiny
from openmla.errors import Unsupported
from openmla.integrations.transformers import optimize, paged, restore, scheduled
from openmla.integrations.transformers.paged import (
    Batch,
    Pages,
    _batch,
    _part,
    _split,
    share_rows,
)
from openmla.integrations.transformers.scheduled import Request
from openmla.planning import NEWEST_TRITON, cached_plan, target_by_name
from openmla.planning.form import LayerDims, choose_form
from openmla.problem import Problem

NEW = 4
PAGE = 16
SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
REFUSED = {
    "bailing_hybrid": "1 layers that are not MLA",
    "kimi_linear": "1 layers that are not MLA",
    "kimi_k25": "the language model inside a",
}
REFUSED = {kind: why for kind, why in REFUSED.items() if kind in kinds()}
SERVED = [kind for kind in kinds() if not selects_keys(kind) and kind not in REFUSED]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def prompts() -> list[list[int]]:
    """Short and long ones, with the first token and the last that there are; the last two begin
    with the same 32 tokens, two pages."""
    draw = torch.Generator().manual_seed(1)
    found = [torch.randint(2, 128, (n,), generator=draw).tolist() for n in (21, 3, 70)]
    found[1][:2] = 0, 127
    return [*found, [*found[2][:32], 7, 8, 9]]


def engine(**settings: Any) -> ContinuousBatchingConfig:
    """Chunks of 48 tokens over pages of 16."""
    return ContinuousBatchingConfig(
        **{SIZE: PAGE, "num_blocks": 24, "max_batch_tokens": 48} | settings
    )


def greedy(new: int | None = NEW) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def serve(model: PreTrainedModel, inputs: list[list[int]], **settings: Any) -> list[Any]:
    """Results of `generate_batch`, in the order of the prompts."""
    found = model.generate_batch(
        inputs=inputs,
        generation_config=greedy(),
        continuous_batching_config=engine(**settings),
        warmup=False,
    )
    return list(found.values())


def alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Tokens of `generate`, which knows nothing of pages."""
    ids = torch.tensor([prompt])
    whole = model.generate(ids, generation_config=greedy(), attention_mask=torch.ones_like(ids))
    return whole[0, len(prompt) :].tolist()


@pytest.fixture
def v3() -> Iterator[PreTrainedModel]:
    model = tiny("deepseek_v3")
    set_attention(model, "sdpa")
    yield optimize(model)
    restore(model)


@pytest.mark.parametrize(
    "kind", [SERVED[0], *(pytest.param(kind, marks=pytest.mark.long) for kind in SERVED[1:])]
)
def test_tokens_are_those_of_each_request_alone(kind: str):
    """Chunks, shared prefixes, prompts beside requests that decode; float32."""
    model = tiny(kind)
    expected = [alone(model, prompt) for prompt in prompts()]
    try:
        found = serve(optimize(model), prompts())
    finally:
        restore(model)
    assert [(r.generated_tokens, r.error) for r in found] == [(e, None) for e in expected]


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_the_engine_cannot_hold_are_refused(kind: str):
    model = optimize(tiny(kind))
    try:
        with pytest.raises(Unsupported, match=f"continuous batching of {REFUSED[kind]}"):
            serve(model, prompts())
    finally:
        restore(model)


def test_models_that_select_keys_are_refused():
    model = optimize(tiny("deepseek_v32"))
    try:
        with pytest.raises(Unsupported, match="layers that select keys"):
            serve(model, prompts())
    finally:
        restore(model)


def test_without_optimize_the_engine_fails():
    """Its cache is as wide as head_dim. docs/transformers.md says so: change it if this fails."""
    model = tiny("deepseek_v3")
    set_attention(model, "sdpa")
    found = serve(model, prompts()[:1])
    assert [r.generated_tokens for r in found] == [[]] and found[0].error


def test_a_request_that_fails_harms_no_other(v3: PreTrainedModel):
    good = prompts()[:2]
    expected = [r.generated_tokens for r in serve(v3, good)]
    too_long = [5] * (24 * PAGE)
    found = serve(v3, [[2, 128], good[0], too_long, good[1], [-1]])
    assert [r.generated_tokens for r in found] == [[], expected[0], [], expected[1], []]
    errors = [r.error for r in found if r.error]
    assert [e.split("got ")[1] for e in errors] == ["128", str(24 * PAGE + NEW), "-1"]


def test_several_batches_from_one_engine(v3: PreTrainedModel):
    """Requests added later, one without a limit but the cache, prefixes kept from before."""
    first, second = prompts()[2:]
    expected = alone(v3, second)
    settings = {"generation_config": greedy(None), "continuous_batching_config": engine()}
    with v3.continuous_batching_context_manager(**settings, warmup=False) as manager:
        cache = None
        for prompt, new in ((first, NEW), (second, NEW), ([4] * (24 * PAGE - 9), None)):
            manager.add_request(prompt, max_new_tokens=new)
            result = manager.get_result(timeout=120)
            assert result is not None and result.is_finished()
            assert len(result.generated_tokens) == (new or 9) and result.error is None
            if prompt is second:
                assert result.generated_tokens == expected
            cache = manager.batch_processor.cache
        with pytest.raises(Unsupported, match="a forward pass of a model that continuous batching"):
            v3(torch.tensor([[3, 4]]))
    held = [cache.cache_tensor] if hasattr(cache, "cache_tensor") else cache.openmla_rows
    rows = (24 + 2) * PAGE * 2  # two pages that belong to nobody; two layers
    assert sum(x.nbytes for x in held) == rows * (64 + 16) * 4


def test_64_requests_at_once_have_the_tokens_of_each_alone(v3: PreTrainedModel):
    """From two engines: one has one request at a time, the other all of them from the start."""
    draw = torch.Generator().manual_seed(4)
    short = [torch.randint(2, 128, (n % 13 + 1,), generator=draw).tolist() for n in range(64)]
    settings = {"generation_config": greedy(), "continuous_batching_config": engine(num_blocks=128)}
    with v3.continuous_batching_context_manager(**settings, warmup=False) as manager:
        alone_in_it = []
        for prompt in short:
            manager.add_request(prompt, max_new_tokens=NEW)
            alone_in_it.append(manager.get_result(timeout=120).generated_tokens)
    together = [r.generated_tokens for r in serve(v3, short, num_blocks=128, max_batch_tokens=256)]
    assert together == alone_in_it and {len(tokens) for tokens in together} == {NEW}


def tensors_held() -> tuple[int, int]:
    """How many tensors Python knows of, and their bytes."""
    gc.collect()
    # Subclasses are what torch traces with, which other tests leave behind, and have no bytes.
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    sizes = [x.nbytes for x in found if x.layout == torch.strided]  # others have no such size
    return len(sizes), sum(sizes)


def test_a_server_that_has_run_long_holds_no_more_and_answers_the_same(v3: PreTrainedModel):
    """One engine, the same requests again and again, bad ones among them."""
    asked = [*prompts(), [2, 128], [5] * (24 * PAGE), *prompts()[:1]]
    settings = {"generation_config": greedy(), "continuous_batching_config": engine()}
    answers, held = [], []
    with v3.continuous_batching_context_manager(**settings, warmup=False) as manager:
        for _ in range(4):
            names = [manager.add_request(prompt, max_new_tokens=NEW) for prompt in asked]
            found = {}
            while len(found) < len(names):
                result = manager.get_result(timeout=120)
                found[result.request_id] = result
            answers.append([(found[n].generated_tokens, found[n].error) for n in names])
            held.append(tensors_held())
        assert not manager.batch_processor.scheduler.active_requests
    assert [len(tokens) for tokens, _ in answers[0]] == [NEW] * 4 + [0, 0, NEW]
    assert [bool(error) for _, error in answers[0]] == [False] * 4 + [True, True, False]
    assert all(again == answers[0] for again in answers)
    counts, sizes = zip(*held[1:], strict=True)
    assert len(set(counts)) == 1, held
    # A step's numbers are as long as its batch, and which requests share the last step is up to
    # the engine's thread: some bytes for each token, less than a page of rows of one layer.
    assert max(sizes) - min(sizes) < PAGE * (64 + 16) * 4, held


HOUR, ROUNDS = 360, 6
"""One request every ten seconds of an hour, but as fast as they are served."""


def an_hours_requests(families: list[list[int]]) -> Iterator[tuple[list[int], str]]:
    """Prompts that begin alike, bad ones, and what is done with each: served, refused, cancelled.

    The same for every call.
    """
    draw = torch.Generator().manual_seed(7)
    for number in range(HOUR // ROUNDS):
        family, cut = (int(torch.randint(n, (), generator=draw)) for n in (len(families), 3))
        prompt = families[family][: len(families[family]) - 8 * cut]
        if number % 12 == 5:
            bad = ([], [2, 128], [5] * (12 * PAGE), [-1])
            yield bad[number // 12 % len(bad)], "refused"
        else:
            yield prompt, "cancelled" if number % 9 == 4 else "served"


@pytest.mark.long
def test_an_hours_requests_leave_nothing_behind_and_no_bit_changed(v3: PreTrainedModel):
    """Over so few pages that requests wait, are put back and prefilled again, and that prefixes are
    evicted; some fail, some are cancelled while they are served."""
    draw = torch.Generator().manual_seed(6)
    families = [torch.randint(2, 128, (n,), generator=draw).tolist() for n in (90, 25, 61, 40, 33)]
    families += [[*families[0][:48], *families[1]], [*families[2][:32], 5, 6, 7, *families[3]]]
    right: dict[tuple[int, ...], list[int]] = {}
    settings = {"generation_config": greedy(), "continuous_batching_config": engine(num_blocks=12)}
    held, served = [], 0
    with v3.continuous_batching_context_manager(**settings, warmup=False) as manager:
        for _ in range(ROUNDS):
            asked, found = {}, {}
            for prompt, fate in an_hours_requests(families):
                name = manager.add_request(prompt, max_new_tokens=NEW)
                asked[name] = prompt, fate
                if fate == "cancelled":
                    manager.cancel_request(name)
            while {name for name, (_, fate) in asked.items() if fate != "cancelled"} - set(found):
                result = manager.get_result(timeout=300)
                assert result is not None
                found[result.request_id] = result
            for name, result in found.items():
                prompt, fate = asked[name]
                assert bool(result.error) == (fate == "refused"), result.error
                if result.error:
                    assert result.generated_tokens == []
                    continue
                served += 1
                expected = right.setdefault(tuple(prompt), result.generated_tokens)
                assert result.generated_tokens == expected
            processor = manager.batch_processor
            scheduler, cache = processor.scheduler, processor.cache
            assert not scheduler.active_requests and not scheduler.waiting_requests
            cache_of = getattr(cache, "cache_allocators", None)
            owners = cache.group_cache_managers if cache_of is None else cache_of.values()
            assert not any(owner.block_table for owner in owners)
            held.append(tensors_held())
    assert served >= HOUR * 3 // 4
    counts, sizes = zip(*held[1:], strict=True)
    # The tensors of the last batch differ: which requests were in it depends on when they came.
    assert len(set(counts)) == 1 and max(sizes) - min(sizes) < 1024, held
    for prompt, tokens in right.items():
        assert alone(v3, list(prompt)) == tokens


def test_the_model_is_left_as_it_was(v3: PreTrainedModel):
    before, sizes = alone(v3, prompts()[0]), (v3.config.head_dim, v3.config.num_key_value_heads)
    serve(v3, prompts()[:1])
    assert v3.config._attn_implementation == "openmla"
    assert (v3.config.head_dim, v3.config.num_key_value_heads) == sizes
    assert alone(v3, prompts()[0]) == before
    restore(v3)
    assert "init_continuous_batching" not in vars(v3)


@pytest.mark.parametrize(
    "wish",
    [
        *("use_cuda_graph", "use_async_batching", "default_compile_level"),
        *("varlen_compile_config", "decode_compile_config", "max_blocks_per_request"),
    ],
)
def test_what_was_never_run_is_refused(v3: PreTrainedModel, wish: str):
    with pytest.raises(Unsupported, match=f"continuous batching with {wish}"):
        serve(v3, prompts(), **{wish: True})
    assert v3.config._attn_implementation == "openmla"


def test_mixed_batches_are_split_by_form(v3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    """Every request has the form of its own lengths, whatever its neighbors' are."""
    seen: list[Batch] = []
    plain = Batch.of

    def noted(*args: Any) -> Batch:
        seen.append(plain(*args))
        return seen[-1]

    monkeypatch.setattr(Batch, "of", staticmethod(noted))
    serve(v3, prompts())
    dims = LayerDims(latent=64, nope=32, rope=16, v=24)
    for batch in seen:
        for part in batch.parts:
            new = (part.cu_q[1:] - part.cu_q[:-1]).tolist()
            for n, keys in zip(new, part.lengths.tolist(), strict=True):
                assert part.form == choose_form(dims, [n], [keys]).form
    assert any(len(batch.parts) == 2 for batch in seen)


def test_lengths_and_blocks_are_those_that_the_engine_hands_to_a_forward_pass(
    v3: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    """The host's notes against the tensors; no row is listed to be read, whatever the context."""
    seen: list[tuple[Any, dict[str, Any], Batch, Pages]] = []
    plain = Batch.of

    def noted(pages: Pages, options: dict[str, Any], *more: Any) -> Batch:
        batch = plain(pages, options, *more)
        seen.append((scheduled.of(options["cache"]), dict(options), batch, pages))
        now, given = seen[-1][0], options["cu_seq_lens_k"]
        given = given["full_attention"] if isinstance(given, dict) else given
        assert given.diff().tolist() == [r.keys for r in now.requests]
        assert options["cu_seq_lens_q"].diff().tolist() == [r.new for r in now.requests]
        assert [x.numel() for x in options["read_index"]] == [0]
        rows = {r.first_query: r for r in now.requests}
        starts = options["cu_seq_lens_q"][:-1].tolist()
        written = batch.written.split(options["cu_seq_lens_q"].diff().tolist())
        for start, mine in zip(starts, written, strict=True):  # behind the request's context
            request = rows[start]
            whole = _part("latent", [request], 1, pages).rows
            assert whole[request.keys - request.new :].tolist() == mine.tolist()
        return batch

    monkeypatch.setattr(Batch, "of", staticmethod(noted))
    assert not any(r.error for r in serve(v3, prompts()))
    assert any(r.keys > r.new > 1 for now, *_ in seen for r in now.requests)  # chunks
    batches = {id(now): batch for now, _, batch, _ in seen}
    assert all(batches[id(now)] is batch for now, _, batch, _ in seen)  # one for all layers


def test_tables_have_each_requests_pages_in_order():
    """Blocks of two layers lie two pages apart; widths come in steps of 16 pages."""
    pages = Pages(torch.zeros(64, 4, 8), stride=8, step=2)
    requests = [Request(0, 1, 9, [7, 3, 5, 1]), Request(1, 2, 2, [4])]
    part = _part("latent", requests, 3, pages)
    assert part.table.shape == (2, 16)
    assert part.table[0].tolist() == [14, 6, 10, *[0] * 13]
    assert part.rows.tolist() == [56, 57, 58, 59, 24, 25, 26, 27, 40, 32, 33]
    assert part.queries is not None and part.queries.tolist() == [0, 1, 2]
    assert (part.lengths.tolist(), part.cu_q.tolist()) == ([9, 2], [0, 1, 3])


@pytest.mark.parametrize("chip", ["h200", "b200", "mi355x", "a100"])
def test_a_requests_kernel_does_not_follow_from_its_neighbors(
    chip: str, monkeypatch: pytest.MonkeyPatch
):
    """A table is as wide as its longest request, and kernels that split none have narrow ones."""
    target = target_by_name(chip)
    monkeypatch.setattr(paged, "device_target", lambda device: target)
    pages = Pages(torch.zeros(200, 64, 576), 64, 1)
    short, long = Request(0, 1, 100, [3, 1]), Request(1, 1, 12_000, list(range(200)))
    backends = set()
    for requests in ([short], [short, long]):
        options = {"write_index": [torch.arange(len(requests))]}
        batch = _batch(pages, requests, options, "latent", LayerDims(512, 128, 64, 128), 128)
        (part,) = batch.parts
        problem = Problem(
            form="latent",
            heads=128,
            d_nope=512,
            d_rope=64,
            d_v=512,
            page_size=64,
            batch=len(requests),
            total_q=len(requests),
            total_k=200 * 64,
            table_keys=part.table.shape[1] * 64,
        )
        backends.add(cached_plan(problem, target, "auto", NEWEST_TRITON).backend)
    assert len(backends) == 1


def test_tables_do_not_depend_on_torchs_default_device():
    pages = Pages(torch.zeros(20, PAGE, 6), PAGE, 1)
    requests = [Request(0, 2, 40, [3, 1, 4]), Request(2, 1, 16, [5]), Request(3, 1, 3, [9])]
    chosen = requests[:2]
    want = _part("latent", chosen, len(requests), pages)
    with torch.device("meta"):
        got = _part("latent", chosen, len(requests), pages)
    names = ("queries", "table", "lengths", "cu_q", "cu_k", "rows")
    assert all(torch.equal(getattr(got, name), getattr(want, name)) for name in names)


def test_a_cache_that_somebody_else_made_is_refused():
    with pytest.raises(Unsupported, match="a cache that openmla did not make"):
        scheduled.of(SimpleNamespace())


def test_latent_form_in_bf16_is_the_same_in_other_chunks():
    """Pages are read by mla_prefill_latent, in which it does not matter where a chunk ends."""
    model = tiny("deepseek_v3", torch.bfloat16)
    optimize(model, "latent")
    try:
        small, large = (serve(model, prompts(), max_batch_tokens=n) for n in (24, 300))
    finally:
        restore(model)
    assert [r.generated_tokens for r in small] == [r.generated_tokens for r in large]
    assert all(len(r.generated_tokens) == NEW for r in small)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [6, 40], ids=["requests wait for others' pages", "forks"])
def test_tokens_where_pages_are_scarce_or_shared(blocks: int):
    """Six pages hold one of the prompts and a bit; forked requests begin with the same pages."""
    model = tiny("deepseek_v3")
    expected = [alone(model, prompt) for prompt in prompts()]
    first = greedy()
    if blocks == 40:  # two answers each, equal since only the likeliest token is drawn
        first.num_return_sequences, first.do_sample, first.top_k = 2, True, 1
    try:
        found = optimize(model).generate_batch(
            inputs=prompts(),
            generation_config=first,
            continuous_batching_config=engine(num_blocks=blocks),
            warmup=False,
        )
    finally:
        restore(model)
    for name, answer in found.items():
        number = int(name.split("__")[0].removeprefix("req_"))
        assert (answer.generated_tokens, answer.error) == (expected[number], None)
    assert len(found) >= len(expected)


def test_attention_of_every_layer_is_float64s_in_bf16():
    model = optimize(tiny("deepseek_v3", torch.bfloat16))
    try:
        served.check(model)
    finally:
        restore(model)


def test_expanded_requests_share_calls_of_bounded_size():
    """Eight fresh prompts of 40 tokens over at most 100 keys a call; 120 alone are not expanded."""
    dims = LayerDims(latent=64, nope=32, rope=16, v=24)
    requests = [Request(i * 40, 40, 40, [i]) for i in range(8)]
    assert [(f, len(p)) for f, p in _split(requests, "auto", dims, 100)] == [("expanded", 2)] * 4
    long = [Request(0, 120, 120, [0])]
    assert [f for f, _ in _split(long, "auto", dims, 100)] == ["latent"]
    assert [f for f, _ in _split(long, "expanded", dims, 100)] == ["expanded"]


def test_keys_and_values_of_the_older_cache_are_halves_of_rows():
    """As Transformers 5.17 has it: a tensor of keys and one of values for every layer."""
    cache = SimpleNamespace(
        key_cache=[torch.zeros(12, 1, 3) for _ in range(2)],
        value_cache=[torch.ones(12, 1, 3) for _ in range(2)],
        block_size=4,
        layer_index_to_group_indices={0: (0, 0), 1: (0, 1)},
    )
    share_rows(cache)
    pages = Pages.of(cache, 1)
    assert pages.rows.shape == (3, 4, 6)
    pages.flat()[pages.physical(torch.tensor([5]))] = torch.arange(6.0)
    assert cache.key_cache[1][5].tolist() == [[0, 1, 2]]
    assert cache.value_cache[1].view(3, 4, 1, 3)[1, 1].tolist() == [[3, 4, 5]]  # as forks copy
    assert not Pages.of(cache, 0).rows[..., :3].any()
