"""SGLang on openmla: found through the entry point `sglang.srt.plugins`.

    sglang serve MODEL --attention-backend openmla           DeepSeek-V3, Kimi-K2: MLA without DSA
    OPENMLA_SGLANG=latent sglang serve ...                   one form for all batches: `attention`
    OPENMLA_SGLANG=scores,attention sglang serve ...         DeepSeek-V3.2, GLM-5: `selection`
    OPENMLA_RANGE_KEYS=512 sglang serve ...                  decoding of few requests: `attention`

Written for SGLang 0.5.23. `attention` is loaded once the backend is chosen; the rest of openmla
never imports SGLang.
"""

from openmla.integrations.sglang.registration import register

__all__ = ["register"]
