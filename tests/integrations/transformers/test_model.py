"""`optimize` and `restore`: what they refuse, and that nothing of them stays behind."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from api.docstrings import arguments, described, members, raised_by
from integrations.transformers.tiny import kinds, logits, set_attention, tiny
from openmla.errors import InvalidArgument, Unsupported
from openmla.integrations.transformers import optimize, restore
from openmla.integrations.transformers.seam import PLAIN_NORMS, installed


class Quantized(nn.Linear):
    """Stands for a layer whose weight is not what it multiplies by."""


@pytest.fixture
def v3() -> PreTrainedModel:
    model = copy.deepcopy(tiny("deepseek_v3"))
    set_attention(model, "sdpa")
    return model


def prompt() -> torch.Tensor:
    return torch.randint(2, 128, (1, 30))


def test_a_model_without_the_seam_is_named():
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    for call in (optimize, restore):
        with pytest.raises(Unsupported, match="LlamaForCausalLM has no attention module with"):
            call(LlamaForCausalLM(config))


def test_the_model_itself_comes_back(v3: PreTrainedModel):
    assert optimize(v3) is v3
    assert optimize(v3, "latent") is v3


@pytest.mark.parametrize("there", ["none", "another", "old"])
def test_without_transformers_the_error_names_the_extra(there: str, tmp_path: Path):
    """None at all, one that cannot be imported, and one without what is needed."""
    if there != "none":
        text = "raise ImportError('no tokenizers')" if there == "another" else "__version__ = '4.0'"
        (tmp_path / "transformers.py").write_text(text)
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
if {there == "none"}:
    sys.modules["transformers"] = None
try:
    from openmla.integrations.transformers import optimize
except ImportError as error:
    from openmla.errors import MissingExtra, OpenMLAError
    assert type(error) is MissingExtra and isinstance(error, OpenMLAError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("openmla.integrations.transformers needs Transformers 5.17 or later (")
    command = "pip install 'openmla[transformers]', or in a clone: pip install '.[transformers]'"
    assert line.endswith(f"): {command}")
    assert there != "another" or "no tokenizers" in line


def test_an_unknown_form_is_refused(v3: PreTrainedModel):
    with pytest.raises(InvalidArgument, match="auto, expanded, latent, got 'absorbed'"):
        optimize(v3, "absorbed")
    assert v3.config._attn_implementation == "sdpa"


def test_selected_keys_have_no_expanded_form():
    model = tiny("glm_moe_dsa")
    with pytest.raises(Unsupported, match="GlmMoeDsaAttention selects keys"):
        optimize(model, "expanded")


def test_restore_leaves_nothing_behind(v3: PreTrainedModel):
    layer = v3.model.layers[1].self_attn
    before = dict(layer.__dict__)
    optimize(v3)
    optimize(v3, "latent")
    assert v3.config._attn_implementation == "openmla" and installed(layer).form == "latent"
    restore(v3)
    restore(v3)
    assert v3.config._attn_implementation == "sdpa"
    assert layer.__dict__.keys() == before.keys()


def test_a_method_that_somebody_else_overrode_stays(v3: PreTrainedModel):
    """Who moves weights to where they are needed does so in `forward` of a module."""
    layer = v3.model.layers[1].self_attn
    norm = layer.q_a_layernorm
    norm.forward = moving = lambda x: type(norm).forward(norm, x)
    optimize(v3)
    assert norm.forward is moving and "forward" in vars(v3.model.norm)
    restore(v3)
    assert norm.forward is moving and "forward" not in vars(v3.model.norm)
    layer.expand_kv = layer.expand_kv
    with pytest.raises(Unsupported, match="expand_kv of a DeepseekV3Attention is overridden"):
        optimize(v3)


@pytest.mark.parametrize("kind", [k for k in kinds() if k != "kimi_k25"])
def test_norms_are_the_models_own_in_one_operation(kind: str):
    model = copy.deepcopy(tiny(kind))
    norms = [m for m in model.modules() if type(m).__name__ in PLAIN_NORMS]
    inputs = [torch.randn(5, norm.weight.shape[0]) for norm in norms]
    for norm in norms:
        nn.init.normal_(norm.weight)
    expected = [norm(x) for norm, x in zip(norms, inputs, strict=True)]
    optimize(model)
    assert norms and all("forward" in vars(norm) for norm in norms)
    for norm, x, want in zip(norms, inputs, expected, strict=True):
        assert torch.allclose(norm(x), want, atol=1e-6)
        assert norm(x.bfloat16()).dtype == torch.float32  # as the model's, with its weights


def test_another_attention_chosen_afterwards_gets_what_it_expects(v3: PreTrainedModel):
    ids = prompt()
    expected = logits(v3, ids)
    optimize(v3)
    set_attention(v3, "sdpa")
    assert torch.equal(logits(v3, ids), expected)


def test_a_copy_is_optimized_by_itself(v3: PreTrainedModel):
    ids = prompt()
    optimize(v3)
    expected = logits(v3, ids)
    other = copy.deepcopy(v3)
    for weight in v3.parameters():
        weight.data.zero_()
    assert torch.equal(logits(other, ids), expected)


def test_a_layer_that_is_not_plain_has_no_latent_form(v3: PreTrainedModel):
    ids = prompt()
    expected = logits(v3, ids, (29, 1))
    for layer in v3.model.layers:
        plain = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = Quantized(plain.in_features, plain.out_features, bias=False)
        layer.self_attn.kv_b_proj.load_state_dict(plain.state_dict())
    with pytest.raises(Unsupported, match="kv_b_proj is a Quantized, not a plain"):
        optimize(v3, "latent")
    optimize(v3)  # expands, calling the layer as it is
    assert (logits(v3, ids, (29, 1)) - expected).abs().max() <= 2e-6


@pytest.mark.parametrize("name", ["gather_cache", "optimize", "register", "restore"])
def test_every_argument_is_described(name: str):
    public = members("integrations.transformers")
    call = public.pop(f"integrations.transformers.{name}")
    assert len(public) == 3
    assert described(call.__doc__) == arguments(call)
    assert raised_by(call) <= {*described(call.__doc__, "Raises")}
