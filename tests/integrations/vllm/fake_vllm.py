"""The parts of vLLM 0.32 that the integration touches, so that it runs where vLLM is not installed.

Names, signatures and shapes are vLLM's, the bodies are not: `make test-vllm` runs the real thing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from integrations import stand_in

T = TypeVar("T")
DEEP_GEMM = "vllm.utils.deep_gemm"
CONFIG = SimpleNamespace(
    attention_config=SimpleNamespace(
        sparse_mla_force_mqa=False, use_prefill_query_quantization=False
    ),
    model_config=SimpleNamespace(enforce_eager=True),
    kernel_config=SimpleNamespace(enable_jit_warmup=True),
)
WARMED_UP: list[str] = []
"""Kernels of vLLM's that its engine would compile before it serves."""


class Member:
    """A member of an enum of backends."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.own, self.override = name, path, ""

    def get_path(self) -> str:
        return self.override or self.own

    def is_overridden(self) -> bool:
        return bool(self.override)


class Registry:
    """An enum of backends: `X.__members__`, `X["NAME"]`."""

    def __init__(self, **paths: str) -> None:
        self.__members__ = {name: Member(name, path) for name, path in paths.items()}

    def __getitem__(self, name: str) -> Member:
        return self.__members__[name]

    def add(self, backend: Member | str, class_path: str | None = None) -> None:
        """register_backend and register_mla_prefill_backend."""
        if isinstance(backend, str):
            if backend in self.__members__:
                raise ValueError(f"Backend {backend} already exists.\nUse its member to override.")
            self.__members__[backend] = Member(backend, class_path or "")
            backend = self.__members__[backend]
        backend.override = class_path or ""


class MLAPrefillBackend:
    def __init__(self, **dims: Any) -> None:
        vars(self).update(dims)

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata

    def supports_quant_output(self, quant_key: Any) -> bool:
        """FlashAttention's does."""
        return True


class Impl:
    """MLACommonImpl: a layer's attention."""

    dcp_world_size, dcp_rank = 1, 0

    def __init__(self, **dims: Any) -> None:
        vars(self).update(dims)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        pass

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """vLLM's common code quantizes what a backend wrote, unless a prefill backend does."""
        return True

    def forward_mha(self, *args: Any) -> None:
        self.went_vllms_way = "forward_mha"

    def forward_mqa(self, *args: Any) -> tuple[Any, Any]:
        self.went_vllms_way = "forward_mqa"
        return None, None

    def _compute_prefill_context(
        self, q: Tensor, cache: Tensor, metadata: Any, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """vLLM's lse is [heads, tokens]."""
        self.went_vllms_way = "context"
        out = q.new_zeros(len(q), q.shape[1], self.v_head_dim)
        return out, torch.full((q.shape[1], len(q)), -torch.inf, device=q.device)


class Backend:
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_impl_cls() -> type:
        return Impl


class FlashMLA(Backend):
    """vLLM's choice on Hopper."""


class TritonMLA(Backend):
    """The one whose decoding is invariant, too."""


class SparseImpl(Impl, Generic[T]):
    index_group: Any = None


class SparseBuilder(Generic[T]):
    dcp_world_size = 1

    def _init_reorder_batch_threshold(self, threshold: int, supports_spec_as_decode: bool) -> None:
        self.reorder_batch_threshold = threshold


class CustomOp:
    """Ops that a plug-in may replace: `register_oot` refuses a name twice."""

    registry: ClassVar[dict[str, type]] = {}

    @classmethod
    def register_oot(cls, op: type, name: str) -> type:
        assert name not in cls.registry, f"Duplicate op name: {name}"
        cls.registry[name] = op
        return op


class Models:
    """ModelRegistry: architectures, and where their classes are."""

    def __init__(self) -> None:
        names = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
        self.models = {name: f"vllm.models.deepseek_v32:{name}" for name in names}

    def register_model(self, model_arch: str, model_cls: str) -> None:
        self.models[model_arch] = model_cls


class SparseAttnIndexer:
    """The indexer's op: vLLM's refuses a CPU when it runs, and a GPU without DeepGEMM."""

    skip_k_cache_insert = use_fp4_cache = use_pcp = False
    compress_ratio = dcp_world_size = 1
    candidate_blocks = None

    def __init__(
        self, k_cache: Any, scale_fmt: str, topk: int, buffer: Tensor, **more: Any
    ) -> None:
        here = sys.modules["vllm.model_executor.layers.sparse_attn_indexer"]
        if sys.modules["vllm.platforms"].current_platform.is_cuda() and not here.has_deep_gemm():
            raise RuntimeError("Sparse Attention Indexer CUDA op requires DeepGEMM support")
        if CONFIG.kernel_config.enable_jit_warmup:
            WARMED_UP.append("pack_seq of e4m3")
        self.k_cache, self.scale_fmt = k_cache, scale_fmt
        self.topk_tokens, self.topk_indices_buffer = topk, buffer
        vars(self).update(more)


class CpuPlatform:
    """vLLM's platform for CPUs, which knows no sparse attention and caches no prefixes of MLA."""

    @classmethod
    def get_attn_backend_cls(cls, selected: Any, config: Any, num_heads: Any = None) -> str:
        if config.use_sparse:
            raise NotImplementedError("Sparse Attention is not supported on CPU.")
        return "vllm.CPU_MLA"

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        config.cache_config.enable_prefix_caching = False
        config.cache_config.block_size = 128
        config.scheduler_config.enable_chunked_prefill = False
        config.scheduler_config.max_num_batched_tokens = 2048


class Platform:
    """`current_platform`: a CPU, or a GPU of some capability."""

    def __init__(self, capability: tuple[int, int] | None = None) -> None:
        self.capability = capability

    def is_cpu(self) -> bool:
        return self.capability is None

    def is_cuda(self) -> bool:
        return self.capability is not None

    def get_device_capability(self) -> Any:
        if self.capability is None:
            return None
        return SimpleNamespace(major=self.capability[0], minor=self.capability[1])

    def support_deep_gemm(self) -> bool:
        major, minor = self.capability or (0, 0)
        return (major, minor) == (9, 0) or major in (10, 12)


def deep_gemm() -> dict[str, Any]:
    """`vllm.utils.deep_gemm`: slots, and the wrappers that vLLM's indexer calls."""

    def slot(name: str) -> Any:
        found = getattr(sys.modules[DEEP_GEMM], name)
        if found is None:
            raise RuntimeError("DeepGEMM backend is unavailable in the current vLLM environment")
        return found

    def fp8_fp4_mqa_logits(
        q: Any, kv: Any, weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor, clean: bool
    ) -> Tensor:
        function = slot("_fp8_fp4_mqa_logits_impl")
        found: Tensor = function(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=clean)
        return found

    def fp8_fp4_paged_mqa_logits(
        q: Any,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        schedule_metadata: Tensor,
        max_model_len: int,
        clean: bool,
        indices: Tensor | None = None,
    ) -> Tensor:
        arguments = (q, kv_cache, weights, context_lens, block_tables, schedule_metadata)
        more = {} if indices is None else {"indices": indices}
        function = slot("_fp8_fp4_paged_mqa_logits_impl")
        found: Tensor = function(*arguments, max_model_len, clean_logits=clean, **more)
        return found

    def get_paged_mqa_logits_metadata(lens: Tensor, block_size: int, num_sms: int) -> Tensor:
        found: Tensor = slot("_get_paged_mqa_logits_metadata_impl")(lens, block_size, num_sms)
        return found

    return {
        "_fp8_gemm_nt_impl": None,
        "_fp8_fp4_mqa_logits_impl": None,
        "_fp8_fp4_paged_mqa_logits_impl": None,
        "_get_paged_mqa_logits_metadata_impl": None,
        "fp8_fp4_mqa_logits": fp8_fp4_mqa_logits,
        "fp8_fp4_paged_mqa_logits": fp8_fp4_paged_mqa_logits,
        "get_paged_mqa_logits_metadata": get_paged_mqa_logits_metadata,
    }


def split_kv_b_proj(
    kv_b_proj: Any, out_dtype: torch.dtype, latent: int, heads: int, d_nope: int, d_v: int
) -> Any:
    """W_UK [latent, heads, d_nope] and W_UV [latent, heads, d_v]."""
    weight = kv_b_proj.weight.to(out_dtype).T.view(latent, heads, d_nope + d_v)
    return weight.split([d_nope, d_v], dim=-1)


def flat_kv_row_view(cache: Tensor, block_size: int) -> tuple[Tensor, int]:
    """All rows from the first block to the last, others' in between, and rows between blocks."""
    blocks, _, width = cache.shape
    stride = cache.stride(0) // width
    return cache.as_strided(((blocks - 1) * stride + block_size, width), (width, 1)), stride


def modules(capability: tuple[int, int] | None = None) -> dict[str, dict[str, Any]]:
    """What each module holds, on a CPU or on a GPU of some capability."""
    prefill = Registry(CPU="vllm.CPU")
    attention = Registry(CPU_MLA="vllm.CPU_MLA")
    ops = type("CustomOp", (CustomOp,), {"registry": {}})
    backends, layers = "vllm.v1.attention.backends", "vllm.model_executor.layers.attention"
    return {
        f"{backends}.mla.prefill.registry": {
            "MLAPrefillBackendEnum": prefill,
            "register_mla_prefill_backend": prefill.add,
        },
        f"{backends}.registry": {
            "AttentionBackendEnum": attention,
            "register_backend": attention.add,
        },
        f"{backends}.mla.prefill.base": {"MLAPrefillBackend": MLAPrefillBackend},
        f"{backends}.mla.cpu_mla": {"CPUMLABackend": Backend},
        f"{backends}.mla.flashmla": {"FlashMLABackend": FlashMLA},
        f"{backends}.mla.triton_mla": {"TritonMLABackend": TritonMLA},
        "vllm.v1.attention.ops.flashmla": {
            "is_flashmla_dense_supported": lambda: (True, None),
            "flash_mla_with_kvcache": lambda **_: None,
            "flash_mla_sparse_fwd": lambda **_: None,
        },
        f"{backends}.mla.index_group": {"HiSparseMLAIndexGroup": SimpleNamespace},
        f"{backends}.mla.sparse_utils": {
            "align_blocks_to_rows": lambda spec: spec,
            "flat_kv_row_view": flat_kv_row_view,
        },
        "vllm.v1.attention.backend": {
            "AttentionBackend": Backend,
            "MultipleOf": int,
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform", NEVER="never"),
            "AttentionMetadataBuilder": SparseBuilder,
            "max_decode_query_len": lambda config: 1 + config.num_speculative_tokens,
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        DEEP_GEMM: deep_gemm(),
        "vllm.config": {"get_current_vllm_config": lambda: CONFIG},
        "vllm.forward_context": {
            "get_forward_context": lambda: SimpleNamespace(attn_metadata=None)
        },
        "vllm.model_executor.custom_op": {"CustomOp": ops, "op_registry_oot": ops.registry},
        "vllm.model_executor.layers.sparse_attn_indexer": {
            "SparseAttnIndexer": SparseAttnIndexer,
            "has_deep_gemm": lambda: False,
        },
        "vllm.model_executor.models.registry": {"ModelRegistry": Models()},
        "vllm.model_executor.models.deepseek_v2": {
            "per_token_group_quant_fp8": None,
            "fused_indexer_q_rope_quant": None,
        },
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
        f"{layers}.mla_attention": {"split_kv_b_proj": split_kv_b_proj},
        f"{layers}.sparse_mla_attention": {
            "SparseMLACommonImpl": SparseImpl,
            "SparseMLACommonMetadata": SimpleNamespace,
            "SparseMLACommonMetadataBuilder": SparseBuilder,
        },
        "vllm.platforms": {
            "current_platform": Platform(capability),
            "cpu_platform_plugin": lambda: "vllm.platforms.cpu.CpuPlatform",
        },
    }


@contextmanager
def installed(
    without: tuple[str, ...] = (), capability: tuple[int, int] | None = None
) -> Iterator[stand_in.Contents]:
    """These modules as `vllm`; `without` names modules, or module:attribute, that are missing."""
    loaded = ("prefill", "attention", "sparse", "indexer", "cpu")
    ours = tuple(f"openmla.integrations.vllm.{name}" for name in loaded)
    with stand_in.installed("vllm", modules(capability), ours, without) as contents:
        yield contents
