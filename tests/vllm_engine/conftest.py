"""These tests need vLLM: `make test-vllm` installs it and runs them, `make test` passes them by."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
