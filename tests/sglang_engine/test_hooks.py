"""OPENMLA_SGLANG=scores,attention: SGLang's own functions answer with openmla's results.

In a process of its own, where SGLang's plug-ins were loaded: what SGLang imports is global.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.arg_groups import choices
from openmla.integrations.sglang.registration import LISTS
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

assert "openmla" in ATTENTION_BACKENDS
assert all(getattr(choices, name).count("openmla") == 1 for name in LISTS)
from sglang.srt.layers.attention.dsa import dsa_indexer, utils
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Backend
from openmla import IndexCache
from openmla.compat import deep_gemm

# The indexer had the functions before, or imported them since: both are openmla's.
for module in (utils, dsa_indexer):
    assert module.resolve_fp8_mqa_logits_fn() is deep_gemm.fp8_mqa_logits
    assert module.resolve_fp8_paged_mqa_logits_fn() is deep_gemm.fp8_paged_mqa_logits
    assert module.resolve_paged_mqa_logits_metadata_fn() is deep_gemm.get_paged_mqa_logits_metadata

torch.manual_seed(0)
e4m3 = torch.float8_e4m3fn
q, w = torch.randn(33, 64, 128).to(e4m3), torch.rand(33, 64)
k, s = torch.randn(201, 128).to(e4m3), torch.rand(201)
starts, ends = torch.zeros(33, dtype=torch.int32), torch.arange(169, 202, dtype=torch.int32)
ours = utils.resolve_fp8_mqa_logits_fn()(q, (k, s), w, starts, ends, clean_logits=False)
theirs = utils._fp8_mqa_logits_torch(q, (k, s), w, starts, ends)
sees = torch.arange(201) < ends[:, None]
dots = torch.relu(torch.einsum("mhd,nd->mhn", q.double(), k.double()))
exact = (dots * w[..., None].double()).sum(1) * s.double()
off = [((x.double() - exact).abs() / exact.abs().clamp_min(1))[sees].max() for x in (ours, theirs)]
print("scores", [float(x) for x in off])
assert off[0] < 1e-6 < off[1]
assert ours.stride(0) % 4 == 0  # SGLang's selection reads four scores at once

cache = IndexCache.allocate(num_pages=8, page_size=64)
cache.append(torch.randn(512, 128), torch.arange(512))
table, lengths = torch.arange(8).view(2, 4).int(), torch.tensor([[200], [65]]).int()
q, w = torch.randn(2, 1, 64, 128).to(e4m3), torch.rand(2, 64)
pages = cache.data.view(8, 64, 1, 132)
plan = utils.resolve_paged_mqa_logits_metadata_fn()(lengths, 64, 132)
ours = utils.resolve_fp8_paged_mqa_logits_fn()(q, pages, w, lengths, table, plan, 256)
theirs = utils._fp8_paged_mqa_logits_torch(q, pages, w, lengths, table, plan, 256)
sees = torch.arange(256) < lengths
off = ((ours - theirs).abs() / theirs.abs().clamp_min(1))[sees].max()
print("paged scores", float(off))
assert off < 1e-2

q, rows = torch.randn(5, 6, 576).bfloat16(), torch.randn(300, 1, 576).bfloat16()
named = torch.randint(0, 300, (5, 64)).int()
named[2, 40:] = -1
for function in (Backend._forward_flashmla_sparse, Backend._forward_triton_sparse_mla):
    out = function(None, q_all=q, kv_cache=rows, v_head_dim=512, page_table_1=named, sm_scale=0.05,
        topk_length=torch.tensor([64, 64, 40, 64, 64]).int())
    for t in range(5):
        keys = rows[named[t][named[t] >= 0].long(), 0].double()
        p = torch.softmax(q[t].double() @ keys.T * 0.05, -1)
        assert (out[t].double() - p @ keys[:, :512]).abs().max() < 2**-7
print("fine")
"""


def test_scores_and_attention_are_openmlas():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).with_name("stubs")),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OPENMLA_SGLANG": "scores,attention",
        },
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    print(done.stdout)
    assert "fine" in done.stdout and "openmla: " not in done.stderr
