"""kvferry.OffloadedCache: a transformers cache whose layers lie in a store."""

import copy
import functools
import logging
from collections.abc import Iterable, Iterator

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DummyLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from . import _torch, errors
from . import store as stores
from .layer import Ferry, OffloadedLayer
from .sizes import parse_size
from .stats import CacheStats

_log = logging.getLogger("kvferry")

# States of OffloadedCache._updated besides a layer's index.
_NO_MASK, _MASK_MADE = -2, -1


class OffloadedCache(DynamicCache):
    """Drop-in for transformers' DynamicCache that keeps the layers of full attention in a kvferry store.

        with kvferry.connect("unix:///run/kvferry/kvferry.sock") as store:
            cache = kvferry.OffloadedCache(config=model.config, store=store)
            model.generate(**inputs, cache=cache)

    The text is the one DynamicCache gives, bit for bit. Every full block of `block_tokens` tokens is put into the store
    once; the tokens after the last full block stay on the device, as do the first `resident_layers` layers. By default
    nothing leaves the device until `device_memory` makes it.

    Args:
        ddp_cache_data: What torch's data parallelism gathers: for each layer (keys, values) or (keys, values, window),
            or one stacked tensor [2, batch, heads, tokens, dim]. Give a model's config by name, not here.
        config: The model's config. Layers that are not full attention get transformers' own layers on the device.
            Without it the layers are learnt as they are updated, and all are taken for full attention; so that nothing
            can leave the device in the first forward pass, which is logged once.
        store: From kvferry.connect. None: the process's default store, which is asked for when the first block leaves
            the device. The cache keeps it alive; closing it makes the blocks in it unreadable.
        device_memory: Bytes this cache may hold on the device, a hard bound: an int, text such as "512MiB", or "auto":
            no bound on a CPU, what is free at the first update on an accelerator.
        resident_layers: For experts and tests: layers that stay, the others leave at once.
        prefetch_depth: For experts and tests: layers read ahead.
        block_tokens: Tokens of a block, a power of two.
        on_full: What to do if the store has no room: "raise" FullError, or "device": keep the blocks, beyond the bound.
        full_timeout: Seconds to wait for room in the store.
        fetch_timeout: Seconds that a layer may take to arrive.

    Threads: one forward pass at a time; other threads may call stats(). A forked child needs a cache of its own.

    Errors: all are kvferry.Error with `.code` and `.hint`. FullError (a MemoryError) is raised before anything was
    allocated or changed: crop, free or enlarge the store, and go on. UnavailableError, DeadlineError and DataLossError
    out of a forward pass name the store and the tokens to recompute; if the pass broke off between two layers, every
    further use raises until `reset()`. Never is a wrong byte returned.
    """

    def __init__(
        self,
        ddp_cache_data: Iterable[tuple[torch.Tensor | None, ...]] | None = None,
        config: PreTrainedConfig | None = None,
        *,
        store: "stores.Store | None" = None,
        device_memory: int | str = "auto",
        resident_layers: int | None = None,
        prefetch_depth: int | None = None,
        block_tokens: int = 64,
        on_full: str = "raise",
        full_timeout: float = 10.0,
        fetch_timeout: float = 30.0,
    ):
        if isinstance(ddp_cache_data, (PreTrainedConfig, torch.nn.Module, stores.Store, str)):
            raise TypeError(
                f"OffloadedCache: the first argument is a {type(ddp_cache_data).__name__}, expected layers of (keys,"
                " values); give a config by name: OffloadedCache(config=model.config)"
            )
        if store is not None and not isinstance(store, stores.Store):
            raise TypeError(
                f"OffloadedCache: store is a {type(store).__name__}, expected what kvferry.connect() returns, or None"
            )
        data = None if ddp_cache_data is None else list(ddp_cache_data)
        kinds = _layer_kinds(config, data)
        self._options = dict(
            block_tokens=block_tokens,
            layers=None if kinds is None else sum(kind is None for kind in kinds) or None,
            resident_layers=resident_layers,
            prefetch_depth=prefetch_depth,
            device_memory=None if device_memory == "auto" else parse_size(device_memory, "device_memory"),
            on_full=on_full,
            full_timeout=full_timeout,
            fetch_timeout=fetch_timeout,
            model="",
        )
        self._store = store
        self._ferry = Ferry(_torch.Cache(functools.partial(_capsule, store), **self._options))
        self._learning = kinds is None  # layers appear as they are updated
        self._logged: set[str] = set()  # what is logged once a cache
        self._updated = _NO_MASK  # the layer last updated in a forward pass that made a mask
        self._pass_length: int | None = None  # tokens that every offloaded layer has after that pass
        Cache.__init__(self, layers=[])
        for make_layer in kinds or []:
            self.layers.append(self._new_layer() if make_layer is None else make_layer())
        for index, layer in enumerate(data or []):
            keys, values = layer[:2]
            if keys is not None and values is not None:
                self.update(keys, values, index)

    def _new_layer(self) -> OffloadedLayer:
        return OffloadedLayer(self._ferry, sum(isinstance(layer, OffloadedLayer) for layer in self.layers))

    # What models and generate call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [batch, heads, new, dim] to a layer; returns all its keys and values, [batch, heads, all, dim].

        The tensors returned are for this layer's attention: once nobody holds them, a later layer's may take their
        memory. Raises kvferry.Error; a dtype or shape other than the layer's first is a MismatchError.
        """
        while self._learning and len(self.layers) <= layer_idx:
            self._log_once(
                "OffloadedCache: no config was given, so the layers are learnt from the first forward pass and none"
                " leaves the device until that is over; give OffloadedCache(config=model.config)"
            )
            self.layers.append(self._new_layer())
        layer, before = self.layers[layer_idx], self._updated
        if before == layer_idx and len(self.layers) > 1:
            # Cross-attention of an encoder-decoder model: it would append the encoder's keys to the decoder's.
            raise TypeError(
                f"OffloadedCache: layer {layer_idx} was updated twice in one forward pass; an encoder-decoder model "
                "needs transformers.EncoderDecoderCache(OffloadedCache(...), OffloadedCache(...))"
            )
        self._updated = _NO_MASK
        self._ferry.check()
        offloaded = isinstance(layer, OffloadedLayer)
        first = offloaded and not layer.is_initialized
        if offloaded and _NO_MASK < before < layer_idx:  # in a pass: the next one may come without a mask
            self._check_in_step(layer, layer_idx, key_states.shape[-2])
        try:
            both = layer.update(key_states, value_states, *args, **kwargs)
        except errors.Error as error:
            # Layers of transformers do not roll back, so the ones before this are ahead of it now.
            if any(not isinstance(other, (OffloadedLayer, DummyLayer)) for other in self.layers[:layer_idx]):
                self._ferry.tear(error)
            raise
        if first and self.stats().relearned:
            self._log_once(
                "OffloadedCache: layer %d has another shape than the first layer, or is one more than there were, so no"
                " layer leaves the device until this forward pass is over",
                layer_idx,
            )
        if _NO_MASK < before < layer_idx:
            self._updated = layer_idx
        return both

    def _log_once(self, message: str, *arguments: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _log.warning(message, *arguments)

    def _check_in_step(self, layer: OffloadedLayer, layer_idx: int, tokens: int) -> None:
        """Refuses to go on with layers of unlike lengths: what interrupted an earlier pass may not have been ours."""
        held = layer.get_seq_length()
        if self._pass_length is None:
            self._pass_length = held + tokens
        elif held + tokens != self._pass_length:
            error = errors.MismatchError(
                f"OffloadedCache: layer {layer_idx} holds {held} tokens, expected {self._pass_length - tokens} as the"
                " layers before it: an earlier forward pass was interrupted"
            )
            self._ferry.tear(error)
            raise error

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._updated, self._pass_length = _MASK_MADE, None
        return super().get_mask_sizes(query_length, layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens the cache can hold; -1: no maximum."""
        return super().get_max_length(layer_idx) if self.layers else -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return any(layer.is_initialized for layer in self.layers if hasattr(layer, "is_initialized"))

    # Operations on the whole cache: tables change, no KV moves.

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens (0 or negative, as in transformers 5.24); more than are held
        empties the cache. A positive number is a ValueError."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"OffloadedCache.crop: tokens_to_remove is {tokens_to_remove}, expected 0 or a negative number: "
                "crop(-n) removes the last n tokens"
            )
        self._ferry.check()
        for layer in self._other_layers():
            if getattr(layer, "is_initialized", True):
                layer.crop(tokens_to_remove)
        self._ferry.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was. Sends no byte of KV."""
        self._ferry.select_rows(beam_idx.tolist())
        for layer in self._other_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times. Sends no byte of KV."""
        self._ferry.select_rows([row for row in range(self._ferry.core.batch) for _ in range(repeats)])
        for layer in self._other_layers():
            _batch_method(layer, "batch_repeat_interleave")(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows that `indices` (numbers, a mask or a slice) selects. Sends no byte of KV."""
        chosen = indices.cpu() if isinstance(indices, torch.Tensor) else indices
        self._ferry.select_rows(torch.arange(self._ferry.core.batch)[chosen].tolist())
        for layer in self._other_layers():
            _batch_method(layer, "batch_select_indices")(indices)

    def reset(self) -> None:
        """Empties the cache and releases its blocks. Mends a cache in which a forward pass broke off."""
        self._ferry.reset()
        self._updated = _NO_MASK
        for layer in self._other_layers():
            layer.reset()

    def _other_layers(self) -> Iterator[object]:
        return (layer for layer in self.layers if not isinstance(layer, OffloadedLayer))

    # Copies and contents.

    def __deepcopy__(self, memo: dict) -> "OffloadedCache":
        """A cache of its own with the same contents: blocks in the store are shared, no byte is sent."""
        fork = type(self).__new__(type(self))
        memo[id(self)] = fork
        ferry = self._ferry.fork()
        for name, value in self.__dict__.items():
            if name == "_ferry":
                fork._ferry = ferry
            elif name == "_store":
                fork._store = value  # a connection: shared, not copied
            elif name == "layers":
                fork.layers = [_fork_layer(layer, ferry, memo) for layer in value]
            else:
                setattr(fork, name, copy.deepcopy(value, memo))
        return fork

    def __copy__(self) -> "OffloadedCache":
        """As deepcopy: two caches that shared their layers would corrupt one another."""
        return copy.deepcopy(self)

    def __reduce__(self):
        """Pickles the tensors themselves, so a file, a broadcast and another host are all right. The copy uses the
        default store of the process that loads it."""
        self._ferry.check()
        state = {k: v for k, v in self.__dict__.items() if k not in ("_ferry", "_store", "layers")}
        layers = [
            (layer.device, *layer.read()) if isinstance(layer, OffloadedLayer) else layer for layer in self.layers
        ]
        return _unpickle, (type(self), state, layers)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """(keys, values, window) of each layer, fresh tensors; the window is None where attention is full."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, OffloadedLayer):
                yield *layer.read(), None
            elif hasattr(layer, "keys"):
                yield layer.keys, layer.values, getattr(layer, "_sliding_window_tensor", None)
            else:
                kind = type(layer).__name__
                raise TypeError(f"OffloadedCache: layer {index} is a {kind}, which has no keys and values")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.layers)} layers, {self.get_seq_length() if self.layers else 0} tokens)"

    # What is ours alone.

    def stats(self) -> CacheStats:
        """What the cache holds and has done, of its offloaded layers. Any thread may ask."""
        return CacheStats(**self._ferry.core.stats())

    def flush(self, timeout: float = 30.0) -> None:
        """Waits up to `timeout` seconds until the store has acknowledged every full block; else DeadlineError."""
        self._ferry.core.flush(timeout)


def _capsule(store: "stores.Store | None") -> object:
    """The capsule of the store's transport; called when the first block leaves the device."""
    return (stores.default_store() if store is None else store)._capsule()


def _layer_kinds(config: PreTrainedConfig | None, data: list | None) -> list | None:
    """For each layer None if it is offloaded, else a callable that makes it; None if the layers are not known yet."""
    if config is not None:
        types, arguments = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        return [
            None if kind == "full_attention" else functools.partial(DYNAMIC_LAYER_TYPE_MAPPING[kind], **kwargs)
            for kind, kwargs in zip(types, arguments)
        ]
    if data is None:
        return None
    windows = [layer[2] if len(layer) == 3 else None for layer in data]
    return [
        None if window is None else functools.partial(DynamicSlidingWindowLayer, sliding_window=int(window))
        for window in windows
    ]


def _batch_method(layer: object, name: str):
    if not hasattr(layer, name):
        raise NotImplementedError(f"OffloadedCache.{name}: transformers' {type(layer).__name__} has no {name}")
    return getattr(layer, name)


def _fork_layer(layer: object, ferry: Ferry, memo: dict) -> object:
    if not isinstance(layer, OffloadedLayer):
        return copy.deepcopy(layer, memo)
    fork = OffloadedLayer(ferry, layer._index)
    fork.device = layer.device
    return fork


def _unpickle(cls: type, state: dict, layers: list) -> OffloadedCache:
    cache = cls.__new__(cls)
    cache.__dict__.update(state, _store=None, layers=[], _updated=_NO_MASK)
    cache._ferry = Ferry(_torch.Cache(functools.partial(_capsule, None), **state["_options"]))
    for entry in layers:
        cache.layers.append(cache._new_layer() if isinstance(entry, tuple) else entry)
    for index, entry in enumerate(layers):
        if isinstance(entry, tuple) and entry[1] is not None:
            cache.update(entry[1], entry[2], index)
    return cache
