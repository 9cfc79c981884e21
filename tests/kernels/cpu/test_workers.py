"""One parallel region per call: pieces, threads, and bits that know nothing of either."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import openmla
from openmla.kernels.cpu import workers
from openmla.kernels.cpu.workers import FLOPS_PER_THREAD, divide, one_thread, threads_for

PLENTY = 1000 * FLOPS_PER_THREAD
HELPERS = workers._helpers


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(workers, "_cores", lambda: 4)
    with ThreadPoolExecutor(4) as helpers:  # more than this machine may have cores
        monkeypatch.setattr(workers, "_helpers", lambda: helpers)
        yield
    torch.set_num_threads(before)


def test_every_item_is_worked_on_once_and_results_keep_their_order():
    assert divide(lambda work, i: i * i, range(100), PLENTY) == [i * i for i in range(100)]
    assert divide(lambda work, i: i, [], PLENTY) == []


def test_several_threads_share_large_work_and_each_has_one_thread_of_torch():
    together = threading.Barrier(4, timeout=20)

    def piece(work: object, i: int) -> tuple[int, int]:
        together.wait()  # breaks unless four threads are here at the same time
        return threading.get_ident(), torch.get_num_threads()

    seen = divide(piece, range(4), PLENTY)
    assert len({thread for thread, _ in seen}) == 4
    assert {threads for _, threads in seen} == {1}
    assert torch.get_num_threads() == 4


def test_small_work_stays_in_the_calling_thread():
    idents = divide(lambda work, i: threading.get_ident(), range(50), FLOPS_PER_THREAD / 2)
    assert set(idents) == {threading.get_ident()}


def test_no_more_threads_than_items_cores_or_torch_has(monkeypatch: pytest.MonkeyPatch):
    assert threads_for(3, PLENTY) == 3
    assert threads_for(100, PLENTY) == 4
    assert threads_for(100, 2 * FLOPS_PER_THREAD) == 2
    monkeypatch.setattr(workers, "_cores", lambda: 1)  # an engine has bound this thread
    assert threads_for(100, PLENTY) == 1


@pytest.mark.parametrize("bad", [0, 7])
def test_an_error_of_any_piece_reaches_the_caller_and_threads_are_restored(bad: int):
    def piece(work: object, i: int) -> None:
        if i == bad:
            raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        divide(piece, range(8), PLENTY)
    assert torch.get_num_threads() == 4


def test_pieces_are_in_the_callers_inference_mode():
    def modes() -> set[tuple[bool, bool]]:
        found = divide(
            lambda work, i: (torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
            range(16),
            PLENTY,
        )
        return set(found)

    assert modes() == {(False, False)}
    with torch.inference_mode():
        assert modes() == {(True, False)}


def test_one_thread_leaves_what_it_found():
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_helpers_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workers, "_helpers", HELPERS)
    divide(lambda work, i: i, range(8), PLENTY)
    child = os.fork()
    if child == 0:
        done = divide(lambda work, i: i, range(8), PLENTY) == list(range(8))
        os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _latent(q_len: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    cache = openmla.LatentCache.allocate(num_pages=keys // 64, page_size=64, latent=64, rope=8)
    cache.append(torch.randn(keys, 64), torch.randn(keys, 8), torch.arange(keys))
    return openmla.mla_prefill_latent(
        torch.randn(q_len, 16, 72),
        cache,
        torch.arange(keys // 64, dtype=torch.int32)[None],
        torch.tensor([keys], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, q_len], dtype=torch.int32),
        scale=0.1,
        sink=torch.randn(16),
        return_lse=True,
    )


def _sparse(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return openmla.mla_prefill_sparse(
        torch.randn(tokens, 16, 72),
        torch.randn(5000, 72),
        torch.randint(-1, 5000, (tokens, 5000), dtype=torch.int32),
        scale=0.1,
        d_v=64,
        return_lse=True,
    )


def _dense() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(300, 16, 40), torch.randn(300, 16, 32), torch.randn(300, 16, 32)
    cu = torch.tensor([0, 10, 300], dtype=torch.int32)
    rope = torch.randn(300, 8)
    return openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, return_lse=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda: _latent(1, 8192),
        lambda: _latent(80, 512),
        lambda: _sparse(2),
        lambda: _sparse(9),
        _dense,
    ],
    ids=["latent-ranges", "latent-tiles", "sparse-ranges", "sparse-tokens", "dense"],
)
def test_bits_do_not_depend_on_the_number_of_threads(call, monkeypatch: pytest.MonkeyPatch):
    """Ranges of keys and pieces are those of the request, whoever computes them."""
    monkeypatch.setattr(workers, "FLOPS_PER_THREAD", 1e4)
    four = call()
    torch.set_num_threads(1)
    one = call()
    torch.set_num_threads(3)
    three = call()
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(four, one, three, strict=True)
    )


def test_a_piece_that_fails_ends_the_call() -> None:
    done = []

    def piece(work: object, i: int) -> None:
        if i == 0:
            raise ValueError("the first")
        done.append(i)
        threading.Event().wait(0.01)

    with pytest.raises(ValueError, match="the first"):
        divide(piece, range(1000), PLENTY)
    assert len(done) < 100


class NoThreads:
    """A pool that cannot start a thread, as one at exit."""

    def submit(self, *_: object) -> None:
        raise RuntimeError("can't start new thread")


def test_without_helpers_the_caller_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_helpers", NoThreads)
    assert divide(lambda work, i: i + 1, range(7), PLENTY) == list(range(1, 8))
