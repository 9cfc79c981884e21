"""The indexer of DSA models in vLLM, without DeepGEMM: `SparseAttnIndexer` as an out-of-tree op.

vLLM's own writes keys, scores and selects by kernels for SM90, SM100 and SM120, from metadata that
a Triton kernel prepares. This one needs what every attention layer needs, where queries begin, how
long requests are, which blocks they have, and calls `openmla.index_topk` once for prefills and
decodes together. Pages are vLLM's: 128 bytes of e4m3 and one scale for each row.

On a CPU it comes with OPENMLA_VLLM_CPU=sparse; on a GPU with OPENMLA_VLLM_INDEXER=1, in models that
run as they are written: neither compiled nor captured. Before SM89, where vLLM's kernel for the
queries does not compile, theirs is `queries.rotate_and_quantize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)

from openmla import IndexCache, Unsupported, index_topk
from openmla.integrations.vllm.queries import rotate_and_quantize
from openmla.integrations.vllm.registration import MODEL

ROW_BYTES = 132
FUSED = "fused_indexer_q_rope_quant"
"""The model's Triton kernel for queries."""


@dataclass(frozen=True, eq=False)
class IndexMetadata:
    """One batch, as every layer of the model sees it."""

    query_start_loc: Tensor
    seq_lens: Tensor
    """Keys of each request, new tokens included."""
    block_table: Tensor
    slot_mapping: Tensor
    max_seq_len: int
    tokens: int
    """Without those that fill up the batch."""


class OpenMLAIndexMetadataBuilder(AttentionMetadataBuilder[IndexMetadata]):
    """What vLLM knows of a batch, passed on."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # vLLM's is abstract

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> IndexMetadata:
        """The metadata of one batch."""
        batch = common_attn_metadata
        return IndexMetadata(
            batch.query_start_loc[: batch.num_reqs + 1],
            batch.seq_lens[: batch.num_reqs],
            batch.block_table_tensor[: batch.num_reqs],
            batch.slot_mapping,
            batch.max_seq_len,
            batch.num_actual_tokens,
        )


class OpenMLAIndexBackend(AttentionBackend):
    """How vLLM prepares batches for the indexer's cache; nothing attends to it."""

    @staticmethod
    def get_name() -> str:
        """In vLLM's log."""
        return "OPENMLA_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        """None: the op is not an attention layer."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        """The class that prepares a batch."""
        return OpenMLAIndexMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Rows per page."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Bytes of a row."""
        return [ROW_BYTES]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A selection is a function of its query's scores, and they of its own request's keys."""
        return True


class OpenMLAIndexer(SparseAttnIndexer):
    """Keys into the paged cache, scores, and each query's selection into vLLM's buffer."""

    def __init__(self, k_cache: Any, *args: Any, **kwargs: Any) -> None:
        with _without_vllms_kernels():
            super().__init__(k_cache, *args, **kwargs)
        why = why_not(self)
        if why:
            raise Unsupported(f"openmla's indexer in vLLM: {why}", nearest="vLLM's own")
        if current_platform.is_cuda():
            _prepare_gpu()
        k_cache.get_attn_backend = lambda: OpenMLAIndexBackend

    def select(self, hidden_states: Tensor, q_quant: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """int32 [tokens, topk], positions in each token's request in ascending order, then -1.

        q_quant are e4m3 [tokens, heads, 128], their scales in weights [tokens, heads] already.
        """
        metadata = get_forward_context().attn_metadata
        buffer: Tensor = self.topk_indices_buffer
        if not isinstance(metadata, dict):  # a run that only measures memory
            return buffer
        batch: IndexMetadata = metadata[self.k_cache.prefix]
        cache, n = self._cache(), batch.tokens
        if not self.skip_k_cache_insert:
            cache.append(k[:n], batch.slot_mapping[:n])
        used = -(-batch.max_seq_len // cache.page_size)
        index_topk(
            q_quant[:n],
            cache,
            weights[:n].float(),
            self.topk_tokens,
            rows="relative",
            cu_seqlens_q=batch.query_start_loc.int(),
            block_table=batch.block_table[:, :used].int().contiguous(),
            cache_lengths=batch.seq_lens.int(),
            out=buffer[:n],
        )
        return buffer

    forward_native = forward_cpu = forward_cuda = forward_hip = forward_oot = select

    def _cache(self) -> IndexCache:
        """vLLM's pages, which may lie further apart than they are long."""
        pages = self.k_cache.kv_cache
        count, size = pages.shape[:2]
        data = pages.as_strided((count, size * ROW_BYTES), (pages.stride(0), 1))
        return IndexCache(data, size, "ue8m0" if self.scale_fmt == "ue8m0" else "fp32")


@contextmanager
def _without_vllms_kernels() -> Iterator[None]:
    """Let vLLM's op be made where its kernels are missing or do not compile: none is launched.

    On CUDA it is not made without DeepGEMM. It also names Triton kernels that vLLM compiles before
    it serves, for e4m3, which Triton does not have before SM89: the engine would not start.
    """
    op: Any = import_module("vllm.model_executor.layers.sparse_attn_indexer")
    kernels = get_current_vllm_config().kernel_config
    before = op.has_deep_gemm, kernels.enable_jit_warmup
    op.has_deep_gemm, kernels.enable_jit_warmup = lambda: True, False
    try:
        yield
    finally:
        op.has_deep_gemm, kernels.enable_jit_warmup = before


def _prepare_gpu() -> None:
    """Called for every layer of a model that is being made."""
    if not get_current_vllm_config().model_config.enforce_eager:
        # In a graph, the metadata of the batch that was captured would serve all others.
        raise Unsupported("openmla's indexer in vLLM: CUDA graphs", nearest="--enforce-eager")
    capability = current_platform.get_device_capability()
    if (capability.major, capability.minor) < (8, 9):
        model = import_module(MODEL)
        if not hasattr(model, FUSED):
            raise Unsupported(f"a vLLM whose {MODEL} has no {FUSED}", nearest="vLLM 0.32")
        setattr(model, FUSED, rotate_and_quantize)


def why_not(op: Any) -> str:
    """What of a model's indexer is not served here; "" if nothing.

    vLLM builds the same op for models whose selection is another: they would get DSA's.
    """
    if op.use_fp4_cache:
        return "index keys of MXFP4"
    if op.compress_ratio != 1:
        return "one key for several tokens, as in DeepSeek-V4"
    if op.candidate_blocks is not None:
        return "candidate blocks, as in DeepSeek-V4.1"
    if op.dcp_world_size > 1:
        return "decode context parallelism"
    if op.use_pcp:
        return "prefill context parallelism"
    return ""
