"""The parts of SGLang 0.5.23 that the integration touches, where SGLang is not installed.

Names, signatures and shapes are SGLang's, the bodies are not: `make test-sglang` runs the real
thing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from integrations import stand_in

SPECULATION = SimpleNamespace(speculative_num_draft_tokens=None, speculative_eagle_topk=None)
PARALLEL = SimpleNamespace(attn_dcp_size=1)
DETERMINISTIC = SimpleNamespace(enable_deterministic_inference=False)
Method = Enum("Method", ["MHA", "MLA"])
Kind = Enum("Kind", ["REPLACE", "AROUND"])


class Mode(Enum):
    """ForwardMode."""

    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, DLLM_EXTEND = range(7)

    def is_idle(self) -> bool:
        return self is Mode.IDLE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is Mode.DRAFT_EXTEND_V2

    def is_dllm_extend(self) -> bool:
        return self is Mode.DLLM_EXTEND


class AttentionBackend:
    """The base class: eager batches are prepared as captured ones, unless a backend overrides."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)  # type: ignore[attr-defined]
        self.init_forward_metadata_in_graph(forward_batch)  # type: ignore[attr-defined]


class KVWriteLoc:
    """Where the rows of a batch's tokens go."""

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc

    @classmethod
    def for_batch(cls, forward_batch: Any) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc)


class Pool:
    """MLATokenToKVPool of one layer."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.dtype = rows, rows.dtype

    def set_kv_buffer(self, layer: Any, where: KVWriteLoc, k: Tensor, v: Tensor | None) -> None:
        self.rows[where.loc] = k

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.rows


class Forms:
    """AttentionBackendRegistry."""

    handlers: dict[str, Callable[..., Any]]

    @classmethod
    def register(cls, name: str, handler: Callable[..., Any]) -> None:
        cls.handlers[name] = handler

    @classmethod
    def get_handler(cls, name: str) -> Callable[..., Any]:
        return cls.handlers.get(name, cls.handlers["triton"])


def modules() -> stand_in.Contents:
    """What each module holds."""
    backends: dict[str, Any] = {"triton": None}

    def register_attention_backend(name: str) -> Callable[..., Any]:
        def add(create: Any) -> Any:
            backends[name] = create
            return create

        return add

    lists: dict[str, Any] = {}
    for name, add in (
        ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
        ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "add_deterministic_attention_backend_choices"),
        (
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
            "add_radix_supported_deterministic_attention_backend_choices",
        ),
    ):
        lists[name] = ["triton"]
        lists[add] = lists[name].extend

    class Hooks:
        """HookRegistry: nothing is replaced here, only noted."""

        hooks: ClassVar[defaultdict[str, list[Any]]] = defaultdict(list)

        @classmethod
        def register(cls, target: str, hook: Any, kind: Any) -> None:
            cls.hooks[target].append((kind, hook))

    forms = type("Forms", (Forms,), {"handlers": {"triton": lambda layer, batch: Method.MHA}})
    common = "sglang.srt.models.deepseek_common"
    return {
        "sglang.srt.arg_groups.choices": lists,
        "sglang.srt.layers.attention.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": register_attention_backend,
        },
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: PARALLEL,
            "get_spec": lambda: SPECULATION,
            "get_exec": lambda: SimpleNamespace(deterministic=DETERMINISTIC),
        },
        "sglang.srt.plugins.hook_registry": {"HookRegistry": Hooks, "HookType": Kind},
        f"{common}.attention_backend_handler": {"AttentionBackendRegistry": forms},
        f"{common}.attention_forward_methods.forward_methods": {"AttnForwardMethod": Method},
    }


@contextmanager
def installed(without: tuple[str, ...] = ()) -> Iterator[stand_in.Contents]:
    """These modules as `sglang`; `without` names modules, or module:attribute, that are missing."""
    ours = ("openmla.integrations.sglang.attention",)
    with stand_in.installed("sglang", modules(), ours, without) as contents:
        yield contents


def runner(rows: Tensor, slots: Tensor, page_size: int, **changes: Any) -> Any:
    """A ModelRunner of DeepSeek-V3's widths, with a pool of one layer."""
    config = SimpleNamespace(
        qk_nope_head_dim=128, kv_lora_rank=512, v_head_dim=128, hf_config=SimpleNamespace()
    )
    made = SimpleNamespace(
        use_mla_backend=True,
        dtype=torch.bfloat16,
        page_size=page_size,
        token_to_kv_pool=Pool(rows),
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        model_config=config,
        is_draft_worker=False,
    )
    vars(made).update(changes)
    return made
