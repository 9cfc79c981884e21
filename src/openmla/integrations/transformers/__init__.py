"""The MLA models of Hugging Face Transformers on openmla: `pip install 'openmla[transformers]'`.

    from openmla.integrations.transformers import optimize, register, restore

    register()                              # attn_implementation="openmla" is now a name
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="openmla")
    model = optimize(model)                 # and K is never concatenated per head
    restore(model)                          # as it was
    model = optimize(model, group=group)    # its sequences over several ranks: see ranks.py
    model.generate_batch(inputs=prompts)    # continuous batching, from latent rows: see serving.py

Every model whose attention has an `expand_kv` method is served: DeepSeek-V2, V3 and V3.2, Kimi,
GLM-5, and their relatives; they train as well, with adapters around projections or without. So is
DeepSeek-V4, without gradients, from its window and compressed rows: see compressed.py. What
openmla cannot do (dropout, in inference 4-D masks that are more than causal) goes to torch's SDPA
with one warning; what SDPA cannot do either raises.
"""

from openmla.errors import MissingExtra

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        "openmla.integrations.transformers",
        "Transformers 5.17 or later",
        "transformers",
        str(error),
    ) from error

from openmla.integrations.transformers.model import optimize, register, restore
from openmla.integrations.transformers.ranks import gather_cache

__all__ = ["gather_cache", "optimize", "register", "restore"]
