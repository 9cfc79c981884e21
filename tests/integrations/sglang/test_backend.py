"""Batches of SGLang's engine, replayed through openmla's backend, and batches made from them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import formula
from integrations.sglang import fake_sglang, replay
from integrations.sglang.fake_sglang import Mode
from openmla import InvalidArgument, Unsupported, mla_prefill_latent

BF16 = 2.0**-8
CALLS = replay.recorded()
every_call = pytest.mark.parametrize(
    "call", CALLS, ids=[f"{c.mode.name} {i}" for i, c in enumerate(CALLS)]
)


def attend(call: replay.Recorded, backend: Any, batch: Any) -> Any:
    q, k = call.q.flatten(1), call.new_rows()
    out = backend.forward_extend(q, k, k[..., : call.d_v], call.layer(), batch)
    return out.view(len(q), -1, call.d_v)


def test_the_recording_has_what_it_should():
    assert sorted({c.mode.name for c in CALLS}) == ["DECODE", "EXTEND"]
    assert all(len(c.seq_lens) >= 3 for c in CALLS)
    assert any((c.seq_lens > c.new_tokens).any() for c in CALLS if c.mode is Mode.EXTEND)
    assert replay.CALLS.stat().st_size < 3_000_000


@every_call
def test_a_recorded_batch_gives_what_the_engine_got(call: replay.Recorded):
    backend, batch = call.backend(), call.batch()
    backend.init_forward_metadata(batch)
    out = attend(call, backend, batch)
    assert formula.same_bits(out, call.out)
    formula.assert_close(out, call.exact(), bound=BF16)


@every_call
def test_a_captured_batch_gives_the_same(call: replay.Recorded):
    """Prepared as in a graph: a table of the whole context, and not a value read by the host."""
    backend, batch = call.backend(), call.batch()
    backend.init_cuda_graph_state(8, 64)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    batch.seq_lens_cpu = None
    backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata.block_table.shape[1] * backend.page_size == call.slots.shape[1]
    assert formula.same_bits(attend(call, backend, batch), call.out)


@pytest.mark.parametrize("page_size", [1, 4, 8])
@every_call
def test_pages_of_other_sizes_hold_the_same_rows(
    call: replay.Recorded, page_size: int, monkeypatch: pytest.MonkeyPatch
):
    """SGLang's default are pages of one slot; slots of larger ones are those of several smaller."""
    monkeypatch.setenv("OPENMLA_SGLANG", "latent")
    outs = []
    for size in (page_size, call.pages.shape[1]):
        backend, batch = call.backend(), call.batch()
        backend.page_size = size
        backend.init_forward_metadata(batch)
        outs.append(attend(call, backend, batch))
    assert formula.same_bits(*outs)
    formula.assert_close(outs[0], call.exact(), bound=BF16)


def bits_do_not_depend_on_the_cut(backend_of: Any) -> None:
    """Batches of a recorded step: all new tokens at once, or its last ones as another batch has."""
    call = next(c for c in CALLS if c.mode is Mode.EXTEND and (c.new_tokens > 2).sum() > 1)
    whole = attend_all(call, backend_of(call))
    for most in (1, 2):
        fewer = call.new_tokens.clamp_max(most)
        ends = call.new_tokens.cumsum(0).tolist()
        kept = [torch.arange(e - n, e) for e, n in zip(ends, fewer.tolist(), strict=True)]
        tokens = torch.cat(kept)
        last = replace(call, q=call.q[tokens], new_tokens=fewer)
        assert formula.same_bits(attend_all(last, backend_of(last)), whole[tokens])


def attend_all(call: replay.Recorded, backend: Any) -> torch.Tensor:
    batch = call.batch()
    backend.init_forward_metadata(batch)
    out: torch.Tensor = attend(call, backend, batch)
    formula.assert_close(out, call.exact(), bound=BF16)
    return out


def test_deterministic_batches_have_bits_of_their_own_tokens(monkeypatch: pytest.MonkeyPatch):
    """By SGLang's option and by OPENMLA_SGLANG=latent; other backends are not asked for it."""
    assert not CALLS[0].backend().invariant
    with monkeypatch.context() as patch:
        patch.setattr(fake_sglang.DETERMINISTIC, "enable_deterministic_inference", True)
        assert CALLS[0].backend().invariant
        bits_do_not_depend_on_the_cut(lambda call: call.backend())
    monkeypatch.setenv("OPENMLA_SGLANG", "scores,latent")
    assert CALLS[0].backend().invariant


def test_ranges_are_as_long_as_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    """In batches of few tokens, and in all that have bits of their own tokens."""
    monkeypatch.setenv("OPENMLA_RANGE_KEYS", "512")
    asked: list[int | None] = []
    module = "openmla.integrations.sglang.forward.mla_prefill_latent"

    def watched(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(options["range_keys"])
        out: torch.Tensor = mla_prefill_latent(*args, **options)
        return out

    monkeypatch.setattr(module, watched)
    for wish, extending in (("", None), ("latent", 512)):
        monkeypatch.setenv("OPENMLA_SGLANG", wish)
        for mode, keys in ((Mode.EXTEND, extending), (Mode.DECODE, 512)):
            call = next(c for c in CALLS if c.mode is mode)
            attend_all(call, call.backend())
            assert asked.pop() == keys


@pytest.mark.parametrize("wrong", ["0", "64", "500", "-512", "many", "512.0"])
def test_lengths_that_no_range_has_are_refused_at_the_start(
    wrong: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENMLA_RANGE_KEYS", wrong)
    with pytest.raises(InvalidArgument, match="OPENMLA_RANGE_KEYS: expected a power of two"):
        CALLS[0].backend()
    monkeypatch.setenv("OPENMLA_RANGE_KEYS", "")
    assert CALLS[0].backend().range_keys is None


def test_a_replayed_graph_serves_a_batch_that_it_was_not_captured_with():
    """SGLang captures with its buffers filled up, and writes a batch into them before a replay.

    What is recorded is run again here, on the same tensors; requests that fill the graph up stay.
    """
    call = next(c for c in CALLS if c.mode is Mode.DECODE)
    backend, real, size = call.backend(), call.batch(), len(call.seq_lens) + 2
    fill = backend.get_cuda_graph_seq_len_fill_value()
    buffers = SimpleNamespace(
        forward_mode=Mode.DECODE,
        seq_lens=torch.full((size,), fill),
        seq_lens_cpu=None,
        req_pool_indices=torch.zeros(size, dtype=torch.int64),
        out_cache_loc=torch.zeros(size, dtype=torch.int64),
    )
    q = call.q.new_zeros(size, call.q[0].numel())
    k = call.q.new_zeros(size, 1, call.q.shape[2])

    def recorded() -> torch.Tensor:
        backend.init_forward_metadata_in_graph(buffers)
        out = backend.forward_decode(q, k, k, call.layer(), buffers)
        return out.view(size, -1, call.d_v)

    backend.init_cuda_graph_state(size, size)
    backend.init_forward_metadata_out_graph(buffers, in_capture=True)
    assert not recorded().any()
    count = len(call.seq_lens)
    for name in ("seq_lens", "req_pool_indices", "out_cache_loc"):
        getattr(buffers, name)[:count] = getattr(real, name)
    q[:count], k[:count] = call.q.flatten(1), call.new_rows()
    backend.init_forward_metadata_out_graph(buffers)
    assert formula.same_bits(recorded()[:count], call.out)


def test_speculated_tokens_are_checked_as_a_chunk(monkeypatch: pytest.MonkeyPatch):
    """TARGET_VERIFY: the drafted tokens are not in the lengths yet, the same number everywhere."""
    drafted = 4
    monkeypatch.setattr(fake_sglang.SPECULATION, "speculative_num_draft_tokens", drafted)
    call = next(c for c in CALLS if c.mode is Mode.DECODE)
    heads, width = call.q.shape[1:]
    torch.manual_seed(0)
    chunk = replace(
        call,
        mode=Mode.EXTEND,
        q=torch.randn(drafted * len(call.seq_lens), heads, width).bfloat16(),
        new_tokens=torch.full_like(call.seq_lens, drafted),
    )
    backend, batch = chunk.backend(), chunk.batch()
    backend.init_forward_metadata(batch)
    want = attend(chunk, backend, batch)
    formula.assert_close(want, chunk.exact(), bound=BF16)
    batch.forward_mode, batch.extend_seq_lens = Mode.TARGET_VERIFY, None
    batch.seq_lens = chunk.seq_lens - drafted
    batch.seq_lens_cpu = batch.seq_lens
    batch.spec_info = SimpleNamespace(ragged_verify_layout=None, draft_token_num=drafted)
    for prepare in (backend.init_forward_metadata, backend.init_forward_metadata_in_graph):
        prepare(batch)
        assert formula.same_bits(attend(chunk, backend, batch), want)


@pytest.mark.parametrize(
    "drafts",
    [
        SimpleNamespace(ragged_verify_layout=object(), draft_token_num=4),
        SimpleNamespace(ragged_verify_layout=None, draft_token_num=5),
    ],
    ids=["of several lengths", "of another length"],
)
@pytest.mark.parametrize("way", ["init_forward_metadata", "init_forward_metadata_in_graph"])
def test_drafts_of_other_lengths_are_refused(
    drafts: SimpleNamespace, way: str, monkeypatch: pytest.MonkeyPatch
):
    """As many tokens of each request were taken for granted: rows of others would be answers."""
    monkeypatch.setattr(fake_sglang.SPECULATION, "speculative_num_draft_tokens", 4)
    backend, batch = CALLS[0].backend(), CALLS[0].batch()
    batch.forward_mode, batch.spec_info = Mode.TARGET_VERIFY, drafts
    with pytest.raises(Unsupported, match="drafts that are not 4 tokens of each request"):
        getattr(backend, way)(batch)


@pytest.mark.parametrize("rope", [0, 64])
def test_fresh_prompts_in_expanded_form(rope: int):
    call = CALLS[0]
    lengths, heads, width = [5, 1, 17], 4, 128 + rope
    torch.manual_seed(0)
    q = torch.randn(sum(lengths) + 2, heads, width).bfloat16()  # two rows fill up the batch
    k = torch.randn(len(q), heads, width).bfloat16()
    k[..., 128:] = k[:, :1, 128:]
    v = torch.randn(len(q), heads, 128).bfloat16()
    batch = SimpleNamespace(
        forward_mode=Mode.EXTEND,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.tensor([0, 0, 0]),
    )
    layer = SimpleNamespace(
        tp_q_head_num=heads, head_dim=width, v_head_dim=128, layer_id=0, scaling=0.1, logit_cap=0.0
    )
    backend = call.backend()
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(
        q.flatten(1), k, v, layer, batch, save_kv_cache=False, key_value_num_tokens=None
    )
    out = out.view(len(q), heads, 128)
    real = sum(lengths)
    want = formula.ragged(q[:real], k[:real], v[:real], lengths, lengths, 0.1).out
    formula.assert_close(out[:real], want, bound=BF16)
    assert not out[real:].any()


def test_an_idle_rank_prepares_nothing():
    backend = CALLS[0].backend()
    batch = SimpleNamespace(forward_mode=Mode.IDLE)
    backend.init_forward_metadata(batch)
    backend.init_forward_metadata_in_graph(batch)
    assert not hasattr(backend, "forward_metadata")


@pytest.mark.parametrize("mode", [Mode.DRAFT_EXTEND_V2, Mode.DLLM_EXTEND])
def test_other_batches_are_refused(mode: Mode):
    backend, batch = CALLS[0].backend(), CALLS[0].batch()
    batch.forward_mode = mode
    with pytest.raises(Unsupported, match=mode.name):
        backend.init_forward_metadata(batch)


@pytest.mark.parametrize("more", [{"topk_indices": torch.zeros(1)}, {"q_rope": torch.zeros(1)}])
def test_what_a_layer_asks_for_and_nobody_serves_is_refused(more: dict[str, Any]):
    call = CALLS[0]
    backend, batch = call.backend(), call.batch()
    k = call.new_rows()
    with pytest.raises(Unsupported, match=next(iter(more))):
        backend.forward_extend(call.q, k, k, call.layer(), batch, **more)
    capped = call.layer()
    capped.logit_cap = 30.0
    with pytest.raises(Unsupported, match="capped scores"):
        backend.forward_extend(call.q, k, k, capped, batch)


WIDE = SimpleNamespace(
    qk_nope_head_dim=128, kv_lora_rank=512, v_head_dim=512, hf_config=SimpleNamespace()
)
SELECTS = SimpleNamespace(
    qk_nope_head_dim=128,
    kv_lora_rank=512,
    v_head_dim=128,
    hf_config=SimpleNamespace(index_topk=2048),
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla_backend": False}, "a model without MLA"),
        ({"dtype": torch.float16}, "torch.float16"),
        ({"token_to_kv_pool": fake_sglang.Pool(torch.zeros(64, 1, 576).half())}, "torch.float16"),
        ({"model_config": SELECTS}, "a model that selects keys"),
        ({"model_config": WIDE}, "heads as wide as latent rows"),
        ({"is_draft_worker": True}, "the draft model"),
    ],
)
def test_what_has_no_kernel_is_refused_when_the_engine_starts(changes: dict[str, Any], reason: str):
    with pytest.raises(Unsupported, match=reason):
        CALLS[0].backend(**changes)


def test_ranks_and_trees_are_refused_when_the_engine_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_sglang.PARALLEL, "attn_dcp_size", 2)
    with pytest.raises(Unsupported, match="decode context parallelism"):
        CALLS[0].backend()
    monkeypatch.setattr(fake_sglang.PARALLEL, "attn_dcp_size", 1)
    monkeypatch.setattr(fake_sglang.SPECULATION, "speculative_eagle_topk", 4)
    with pytest.raises(Unsupported, match="trees of speculated tokens"):
        CALLS[0].backend()


def test_the_checks_of_the_engine_take_the_arguments_that_the_backend_passes():
    """`make test-sglang` puts them around both functions; it does not run with every change."""
    from openmla.integrations.sglang import forward

    path = Path(__file__).parents[2] / "sglang_engine/stubs/openmla_checks.py"
    spec = importlib.util.spec_from_file_location("openmla_checks", path)
    assert spec is not None and spec.loader is not None
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    for check, function in (("latent", forward.attend_latent), ("fresh", forward.attend_fresh)):
        around = list(signature(getattr(checks.Checks, check)).parameters)
        assert around == ["self", "original", *signature(function).parameters]
