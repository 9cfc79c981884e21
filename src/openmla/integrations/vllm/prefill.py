"""`-ac.mla_prefill_backend=OPENMLA`: vLLM's prefill with openmla's dense kernel.

vLLM gathers the context, projects it chunk by chunk, puts K together per head, and merges; only the
attention is openmla's. `attention` is the backend that needs none of this.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from openmla import Unsupported, mla_prefill
from openmla.integrations.vllm.registration import name_of


class OpenMLAPrefillBackend(MLAPrefillBackend):
    """Dense prefill, and context chunks, by `openmla.mla_prefill`."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        """The backend's name on the command line."""
        return name_of("prefill")

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Whatever Triton multiplies bf16 matrices on; a CPU has no capability."""
        return device_capability is None or device_capability.major >= 8

    def supports_out(self) -> bool:
        """Results go where the caller wants them."""
        return True

    def supports_quant_output(self, quant_key: Any) -> bool:
        """No: vLLM then quantizes what is written, and hands over no `output_scale`."""
        return False

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """The new tokens among themselves, causal."""
        if output_scale is not None:
            raise Unsupported("openmla does not quantize its output", nearest="output_scale=None")
        offsets = self._prefill_metadata.query_start_loc
        return self._attend(q, k, v, (offsets, offsets), True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> Any:
        """New tokens to a chunk of their requests' context."""
        offsets = (chunk.query_start_loc, chunk.cu_seq_lens)
        return self._attend(q, k, v, offsets, False, True, out)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: tuple[Tensor, Tensor],
        causal: bool,
        return_lse: bool,
        out: Tensor | None,
    ) -> Any:
        # Every head holds the same rope columns, so one head's stand for all and are read once.
        d_nope = self.qk_nope_head_dim
        rope = k[:, 0, d_nope:] if k.shape[2] > d_nope else None
        result = mla_prefill(
            q,
            k[..., :d_nope],
            rope,
            v,
            cu_seqlens_q=offsets[0],
            cu_seqlens_k=offsets[1],
            scale=self.scale,
            causal=causal,
            return_lse=return_lse,
            out=out,
        )
        if not return_lse:
            return result
        # vLLM's lse is [heads, tokens], and its CUDA merge takes it for contiguous.
        return result[0], result[1].T.contiguous()
