"""DeepSeek-V4's layers of vLLM get openmla's calls where FlashMLA's would be."""

from __future__ import annotations

import os
import subprocess
import sys

ASKED_FOR = """
from unittest import mock
import vllm.platforms
from openmla.compat import flash_mla
from openmla.integrations.vllm import registration
with mock.patch.object(type(vllm.platforms.current_platform), "is_cuda", return_value=True):
    registration._answer_flash_mla("1")
from vllm.models.deepseek_v4.nvidia import flashmla as v4
from vllm.models.deepseek_v41.nvidia import flashmla as v41
for layer in (v4, v41):
    assert layer.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert layer.flash_mla_sparse_fwd is flash_mla.flash_mla_sparse_fwd
calls = registration.sys.modules[registration.FLASH_MLA]
for name in registration.FLASH_MLA_CALLS:  # as if the layer had been imported first
    setattr(calls, name, print)
    setattr(v4, name, print)
try:
    with mock.patch.object(type(vllm.platforms.current_platform), "is_cuda", return_value=True):
        registration._answer_flash_mla("1")
except registration.Refused as refused:
    print("refused:", refused)
"""


def test_layers_import_openmlas_calls_if_asked_for_in_time():
    done = subprocess.run(
        [sys.executable, "-c", ASKED_FOR],
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()[-1]
    expected = "refused: vllm.models.deepseek_v4.nvidia.flashmla was imported before, with"
    assert said.startswith(expected)
