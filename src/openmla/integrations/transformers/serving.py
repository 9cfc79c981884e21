"""Continuous batching, `model.generate_batch`, of MLA models from a paged cache of latent rows.

Transformers makes that cache as wide as `config.head_dim` says, which for an MLA model is not the
width of what it caches, and its first forward pass fails. After `optimize`, the model's
`init_continuous_batching`, which `generate_batch` and the context manager call as well, makes a
manager whose cache is sized for rows, one for all heads: to the engine, half of a row is a key and
half a value. Scheduling, chunks, shared prefixes and forks are the engine's.

A request that cannot be served fails alone, when it is added: an error in a forward pass, or a
cache that is too small for one request, would end the engine and every other request.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from openmla.errors import InvalidArgument, Unsupported
from openmla.integrations.transformers import scheduled, seam
from openmla.integrations.transformers.paged import share_rows

_MISSING = object()
_CHECKED = "openmla_checked"


def install(model: Any) -> None:
    """Let continuous batching of a model that has it start here."""
    if hasattr(type(model), "init_continuous_batching"):
        seam.override(model, "init_continuous_batching", _start)


def why_not(model: Any) -> str:
    """Why continuous batching cannot serve a model; "" when it can."""
    config, layers = model.config, seam.layers(model)
    if config.get_text_config() is not config:
        return f"the language model inside a {type(model).__name__}"
    if len(layers) < config.num_hidden_layers:
        return f"{config.num_hidden_layers - len(layers)} layers that are not MLA"
    if any(getattr(layer, "indexer", None) is not None for layer in layers):
        return "layers that select keys: the engine has no place for what their indexers cache"
    if {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        return "layers of several kinds"
    if getattr(config, "sliding_window", None) is not None:
        return "a sliding window"
    if len({_width(layer) for layer in layers}) > 1 or _width(layers[0]) % 2:
        return "rows of several widths, or of an odd one"
    if any(seam.installed(layer).group is not None for layer in layers):
        return "a group of ranks that share sequences"
    if getattr(model, "_device_mesh", None) is not None:
        return "a model split over several devices"
    return ""


def _start(
    self: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    **more: Any,
) -> Any:
    """`init_continuous_batching` of an optimized model."""
    own = type(self).init_continuous_batching
    if not seam.runs_on_openmla(seam.layers(self)[0].config):
        return own(self, generation_config, continuous_batching_config, **more)
    why = why_not(self)
    if why:
        raise Unsupported(f"continuous batching of {why}", nearest="model.generate")
    configs = [self.config, *(layer.config for layer in seam.layers(self))]
    _rename(configs, seam.SERVING[not _has_allocators()])
    try:
        asked = _without_graphs(continuous_batching_config)
        manager = own(self, generation_config, asked, **more)
    except BaseException:
        _rename(configs, seam.NAME)
        raise
    # Put back by the manager's stop, which is also how it leaves other implementations.
    manager._original_attn_impl = seam.NAME
    manager._create_batch_processor = partial(_created, manager)
    return manager


def _created(manager: Any) -> Any:
    """The manager's `_create_batch_processor`, with a cache of rows and requests that are checked.

    The model's own configuration is left as it is but for the time that the cache is made: rotary
    embeddings may read `head_dim` whenever they run.
    """
    model = manager.model
    width = _width(seam.layers(model)[0])
    with _set(model.config, head_dim=width // 2, num_key_value_heads=1):
        processor = type(manager)._create_batch_processor(manager)
    if not hasattr(processor, _CHECKED):  # a manager that is used again returns the same
        share_rows(processor.cache)
        scheduled.watch(processor)
        scheduler = processor.scheduler
        rows = processor.cache.num_blocks * _page_size(manager.continuous_batching_config)
        vocabulary = model.get_input_embeddings().num_embeddings
        scheduler.add_waiting_request = partial(
            _add, scheduler.add_waiting_request, vocabulary, rows
        )
        setattr(processor, _CHECKED, True)
    return processor


def _add(add: Any, vocabulary: int, rows: int, state: Any) -> Any:
    """The scheduler's `add_waiting_request`: what is raised here fails this request alone."""
    prompt = state.initial_tokens
    if not prompt:
        raise InvalidArgument("inputs", "at least one token", "none")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise InvalidArgument("inputs", f"tokens of 0 to {vocabulary - 1}", wrong)
    room = rows - len(prompt)
    wanted = 1 if state.max_new_tokens is None else state.max_new_tokens
    if wanted > room:
        expected = f"at most {rows} tokens with the new ones: the cache has as many rows"
        raise InvalidArgument("inputs", expected, len(prompt) + wanted)
    if state.max_new_tokens is None:  # which the engine has noted as a limit by now
        state.max_new_tokens = state._new_tokens_limit = room
    return add(state)


def _without_graphs(asked: Any) -> Any:
    """The engine's configuration with graphs and compilation off, which were never run here, and
    without the tables of blocks that other kernels read."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = ContinuousBatchingConfig() if asked is None else copy.copy(asked)
    graphs = config.use_cuda_graph
    wishes = {
        "use_cuda_graph": any(graphs) if isinstance(graphs, tuple) else graphs,
        "use_async_batching": config.use_async_batching,
        "varlen_compile_config": config.varlen_compile_config,
        "decode_compile_config": config.decode_compile_config,
        "default_compile_level": config.default_compile_level,
        "cpu_offload_space": config.cpu_offload_space and not _has_allocators(),
        "max_blocks_per_request": config.max_blocks_per_request,
    }
    for name, wish in wishes.items():
        if wish:
            raise Unsupported(f"continuous batching with {name}", nearest=f"{name} left as it is")
    config.use_cuda_graph = False
    # The engine's tables of blocks are for FlashAttention's kernels. Where these are installed, it
    # would fill them, and no list of rows, for all implementations with "flash" in their names.
    config.max_blocks_per_request = 0
    return config


def _has_allocators() -> bool:
    """Whether the cache is of Transformers 5.22's kind: one tensor, given out by allocators."""
    from transformers.generation.continuous_batching import cache

    return hasattr(cache, "ATTN_TYPE_TO_ALLOCATOR")


def _page_size(config: Any) -> int:
    size: int = config.page_size if hasattr(config, "page_size") else config.block_size
    return size


def _width(layer: Any) -> int:
    width: int = layer.kv_lora_rank + layer.qk_rope_head_dim
    return width


def _rename(configs: list[Any], name: str) -> None:
    for config in configs:
        config._attn_implementation = name


@contextmanager
def _set(config: Any, **values: Any) -> Iterator[None]:
    """Attributes of a configuration, for a while."""
    before = {name: getattr(config, name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(config, name)
            else:
                setattr(config, name, value)
