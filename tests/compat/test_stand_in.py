"""A module that engines import as `flash_mla`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from openmla.compat import flash_mla, stand_in
from openmla.errors import Unsupported


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    stand_in.remove()


def test_engines_import_openmlas_calls() -> None:
    assert importlib.util.find_spec("flash_mla") is None
    package = stand_in.install()
    assert stand_in.install() is package is importlib.import_module("flash_mla")
    interface = importlib.import_module("flash_mla.flash_mla_interface")
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    assert flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert get_mla_metadata is flash_mla.get_mla_metadata
    assert interface.flash_mla_sparse_fwd is flash_mla.flash_mla_sparse_fwd
    assert package.flash_mla_interface is interface
    assert importlib.util.find_spec("flash_mla") is not None
    stand_in.remove()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_mla")
    stand_in.remove()  # again: nothing to do


def test_a_name_that_is_not_there() -> None:
    package = stand_in.install()
    assert not hasattr(package, "flash_attn_varlen_func")
    with pytest.raises(AttributeError, match="openmla stands in for flash_mla, and has no 'mega'"):
        _ = package.mega
    with pytest.raises(ImportError, match="mega"):
        from flash_mla import mega  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_mla.cuda")


def test_what_sglang_imports_on_every_chip() -> None:
    """`sglang.kernels.ops.attention.flash_mla_interface` of 0.5.23 imports the submodule that is
    fused for Blackwell as well; calling it is another matter."""
    package = stand_in.install()
    from flash_mla import fused_norm_rope_attn_rope_cast as mega
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    assert package.fused_norm_rope_attn_rope_cast is mega
    with pytest.raises(Unsupported, match=r"fused_norm_rope_attn_rope_cast.decode, whose result"):
        mega.decode(q=None, rms_norm_eps=1e-6)
    with pytest.raises(AttributeError, match="it has prefill, decode"):
        _ = mega.permute_q_b_proj
    stand_in.remove()
    assert "flash_mla.fused_norm_rope_attn_rope_cast" not in sys.modules
    # DeepSeek-V4.1's backend puts a schedule of its own into what get_mla_metadata returned.
    schedule, _ = flash_mla.get_mla_metadata()
    schedule.tile_scheduler_metadata = torch.zeros(1)
    assert isinstance(schedule, FlashMLASchedMeta)


def test_schedules_as_tensors_fit_into_buffers_of_graphs() -> None:
    """SGLang's `flashmla` backend allocates them for its largest batch, and copies those of each
    batch into the beginning; the call gets them inside of a FlashMLASchedMeta."""
    package = stand_in.install()
    most = package.get_mla_decoding_metadata(torch.ones(8, dtype=torch.int32), 16, 1)
    fewer = package.get_mla_decoding_metadata(
        torch.ones(3, dtype=torch.int32), 16, 1, None, True, None, use_legacy=True
    )
    for buffer, one in zip(most, fewer, strict=True):
        assert one.dtype == torch.int32 and len(one) <= len(buffer)
        buffer[: len(one)].copy_(one)
    assert [len(splits) for _, splits in (most, fewer)] == [9, 4]
    schedule = package.FlashMLASchedMeta(tile_scheduler_metadata=fewer[0], num_splits=fewer[1])
    arguments = {
        "q": torch.ones(3, 1, 2, 12, dtype=torch.bfloat16),
        "k_cache": torch.ones(1, 4, 1, 12, dtype=torch.bfloat16),
        "block_table": torch.zeros(3, 1, dtype=torch.int32),
        "cache_seqlens": torch.ones(3, dtype=torch.int32),
        "head_dim_v": 8,
        "causal": True,
    }
    out, _ = package.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=schedule)
    assert bool((out == 1).all())


def test_the_package_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    with pytest.raises(Unsupported, match="flash_mla was imported before"):
        stand_in.install()
    stand_in.remove()
    assert "flash_mla" in sys.modules
