"""vLLM on openmla: three backends, found through the entry point `vllm.general_plugins`.

    vllm serve MODEL -ac.mla_prefill_backend=OPENMLA      vLLM's prefill, openmla's kernel
    vllm serve MODEL --attention-backend OPENMLA          K not put together, see `attention`
    vllm serve MODEL --attention-backend OPENMLA_SPARSE   DeepSeek-V3.2, GLM-5

On a CPU, the environment variable OPENMLA_VLLM_CPU says which: prefill, attention or sparse. On a
GPU, OPENMLA_VLLM_INDEXER=1 puts openmla's indexer into DSA models, and OPENMLA_VLLM_FLASHMLA=1
answers what vLLM's layers ask of FlashMLA, DeepSeek-V4's among them.

Written for vLLM 0.32. `prefill`, `attention`, `sparse`, `indexer` and `cpu` are loaded by vLLM, by
name, once one of them is chosen; the rest of openmla never imports vLLM.
"""

from openmla.integrations.vllm.registration import platform, register

__all__ = ["platform", "register"]
