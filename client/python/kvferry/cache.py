"""kvferry.OffloadedCache: a transformers cache whose layers lie in a store."""

import copy
import functools
import logging
import operator
from collections.abc import Iterable, Iterator

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from . import errors
from . import store as stores
from .cache_pass import has_four_dimensions
from .cache_states import StateMethods
from .copies import fork_layer, held_bytes, packed, snapshot, unpacked
from .device_layers import bytes_of, rows_of
from .generation import HeldLength, starts_through_a_pair
from .handles import handle_ttl
from .layer import Ferry, OffloadedLayer
from .layer_kinds import (
    LayerKind,
    changes_on_device,
    contents_of,
    device_class,
    holds_something,
    kinds_of_config,
    note,
    read_data,
    takes_part,
)
from .passes import Way
from .sizes import parse_integer, parse_seconds, parse_size
from .stats import CacheStats

_log = logging.getLogger("kvferry")

_UPDATE = Way("update")

_MAX_ROWS = 1 << 20  # far beyond any batch; more is an error of the caller's

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class OffloadedCache(StateMethods, DynamicCache):
    """Drop-in for transformers' DynamicCache that keeps the layers of full attention in a kvferry store.

        with kvferry.connect("unix:///run/kvferry/kvferry.sock") as store:
            cache = kvferry.OffloadedCache(config=model.config, store=store)
            model.generate(**inputs, cache=cache)

    The text is the one DynamicCache gives, bit for bit. Every full block of `block_tokens` tokens is put into the store
    once; the tokens after the last full block stay on the device, as do the first `resident_layers` layers. By default
    nothing leaves the device until `device_memory` makes it. Layers with a window (sliding, chunked) and states (linear
    attention) are bounded by themselves and stay on the device, within `device_memory`.

    An encoder-decoder model takes transformers.EncoderDecoderCache(OffloadedCache(...), OffloadedCache(...)).

    Args:
        ddp_cache_data: What to begin with: for each layer (keys, values) or (keys, values, window) or one stacked
            tensor [2, batch, heads, tokens, dim], as torch's data parallelism and PEFT bring them; or another cache.
            Read once, so a generator will do. Give a model's config by name, not here.
        config: The model's config, which tells the kinds of layers. Without it the layers are learnt as they are
            updated, and all are taken for full attention; so that nothing can leave the device in the first forward
            pass, which is logged once.
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

    Gradients: a layer whose keys or values require them stays on the device, whole and differentiable, from then on.

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
        **transformers_only: object,
    ):
        if transformers_only:
            raise TypeError(
                f"OffloadedCache: {', '.join(transformers_only)} is no argument of it. A model that makes its"
                " cross-attention cache anew (T5Gemma) would lose the store and the bound: give it"
                " EncoderDecoderCache(OffloadedCache(...), DynamicCache())"
            )
        if isinstance(ddp_cache_data, (PreTrainedConfig, torch.nn.Module, stores.Store, str)):
            raise TypeError(
                f"OffloadedCache: the first argument is a {type(ddp_cache_data).__name__}, expected layers of (keys,"
                " values); give a config by name: OffloadedCache(config=model.config)"
            )
        if store is not None and not isinstance(store, stores.Store):
            raise TypeError(
                f"OffloadedCache: store is a {type(store).__name__}, expected what kvferry.connect() returns, or None"
            )
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"OffloadedCache: config is a {type(config).__name__}, expected a transformers config")
        if on_full not in ("raise", "device"):
            raise errors.MismatchError(f"on_full is {on_full!r}, expected 'raise' or 'device'")
        if ddp_cache_data is not None and not isinstance(ddp_cache_data, (Iterable, Cache)):
            raise TypeError(f"OffloadedCache: ddp_cache_data is a {type(ddp_cache_data).__name__}, expected layers")
        data = read_data(ddp_cache_data)
        kinds = None if data is None else [layer.kind for layer in data]
        if config is not None:
            kinds = kinds_of_config(config)
        if data is not None and len(data) > len(kinds):
            raise errors.LayerIndexError(
                f"ddp_cache_data has {len(data)} layers, expected at most {len(kinds)} as the config"
            )
        numbers = [number for number, kind in enumerate(kinds or []) if kind.offloaded]
        self._options = dict(
            block_tokens=parse_integer(block_tokens, "block_tokens"),
            layers=len(numbers) or None,
            layer_numbers=numbers,
            resident_layers=parse_integer(resident_layers, "resident_layers", optional=True),
            prefetch_depth=parse_integer(prefetch_depth, "prefetch_depth", optional=True),
            device_memory=None if device_memory == "auto" else parse_size(device_memory, "device_memory"),
            on_full=on_full,
            full_timeout=parse_seconds(full_timeout, "full_timeout"),
            fetch_timeout=parse_seconds(fetch_timeout, "fetch_timeout"),
            model="",
        )
        self._store = store
        self._ferry = Ferry(functools.partial(_capsule, store), self._options)
        self._learning = not kinds  # layers appear as they are updated
        self._encoder_decoder = config is not None and config.is_encoder_decoder
        self._logged: set[str] = set()  # what is logged once a cache
        self._begin()
        Cache.__init__(self, layers=[])
        for number, kind in enumerate(kinds or []):
            self.layers.append(kind.make(self._ferry, numbers.index(number) if kind.offloaded else -1, number))
        if data:
            self._begin_with(data)

    def _begin_with(self, data: list) -> None:
        """Fills the empty cache with what read_data gave, and takes it for what one forward pass left."""
        for number, layer in enumerate(data):
            if layer.keys is not None and layer.keys.shape[-2:-1] != (0,):
                self._append(self._layer(number), layer.keys, layer.values)
        tokens = max(self._lengths(), default=0)
        device = next((layer.keys.device for layer in data if layer.keys is not None), None)
        for number, layer in enumerate(data):
            layer.finish(self.layers[number], tokens, device)
        self._passes.fill(self._used())

    def _used(self) -> list[int]:
        """The layers that hold something and take part in every forward pass."""
        return [number for number, layer in enumerate(self.layers) if takes_part(layer) and holds_something(layer)]

    # What models and generate call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [batch, heads, new, dim] to a layer; returns all its keys and values, [batch, heads, all, dim].

        The tensors returned are for this layer's attention: once nobody holds them, a later layer's may take their
        memory. Raises kvferry.Error; a dtype or shape other than the layer's first is a MismatchError.
        """
        layer_idx = self._checked_index(layer_idx)
        layer = self._layer(layer_idx)
        several = len(self.layers) > 1 or self._learning or self._encoder_decoder
        if several and self._passes.again(layer_idx, _UPDATE):
            # Cross-attention of an encoder-decoder model: it would append the encoder's keys to the decoder's.
            raise TypeError(
                f"OffloadedCache: layer {layer_idx} was updated twice in one forward pass; an encoder-decoder model"
                " needs transformers.EncoderDecoderCache(OffloadedCache(...), OffloadedCache(...)), a model of one"
                " layer OffloadedCache(config=model.config)"
            )
        self._prompt_starts = False
        with self._using(layer_idx, _UPDATE, key_states):
            return self._append(layer, key_states, value_states, *args, **kwargs)

    def _layer(self, layer_idx: int) -> object:
        while self._learning and len(self.layers) <= layer_idx:
            self._log_once(
                "OffloadedCache: no config was given, so the layers are learnt from the first forward pass and none"
                " leaves the device until that is over; give OffloadedCache(config=model.config)"
            )
            number = len(self.layers)
            self.layers.append(LayerKind().make(self._ferry, self._ferry.new_index(), number))
        layer = self.layers[layer_idx]
        if not isinstance(layer, CacheLayerMixin):
            kind = type(layer).__name__
            raise ValueError(f"layer_idx is {layer_idx}, a {kind}, expected a layer with keys and values")
        return layer

    def _append(
        self, layer: object, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = isinstance(layer, OffloadedLayer) and not layer.is_initialized
        if not takes_part(layer):
            return self._append_apart(layer, key_states, value_states)
        if has_four_dimensions(key_states) and has_four_dimensions(value_states):
            self._plan_pass(layer, key_states, value_states)  # else the layer says what is wrong
        both = layer.update(key_states, value_states, *args, **kwargs)
        if first and self.stats().relearned:
            self._log_once(
                "OffloadedCache: layer %d has another shape than the first layer, or is one more than there were, so no"
                " layer leaves the device until this forward pass is over",
                self.layers.index(layer),
            )
        return both

    def _append_apart(
        self, layer: object, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = held_bytes(layer)
        self._add_aside(before + bytes_of(key_states, value_states))
        try:
            return layer.update(key_states, value_states)
        finally:  # what was there before is there no more
            self._add_aside(held_bytes(layer) - 2 * before - bytes_of(key_states, value_states))

    def _checked_index(self, layer_idx: int) -> int:
        try:
            index = operator.index(layer_idx)
        except TypeError:
            raise TypeError(f"layer_idx is a {type(layer_idx).__name__}, expected an int") from None
        most = 4096 if self._learning else len(self.layers)
        if not 0 <= index < most:
            raise errors.LayerIndexError(f"layer_idx is {index}, expected 0 to {most - 1}")
        return index

    def _log_once(self, message: str, *arguments: object) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _log.warning(message, *arguments)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._passes.look(mask=True)
        self._prompt_starts = False
        return super().get_mask_sizes(query_length, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the layer has seen. Local, never a call to the store."""
        self._passes.look(mask=False)
        length = super().get_seq_length(layer_idx)
        if length and starts_through_a_pair():
            self._prompt_starts = True
        if not self._prompt_starts or length == 0:
            return length
        held = HeldLength(length)
        held.cache = self
        return held

    @property
    def _is_user_defined(self) -> bool:
        """Set by generate() on a cache that it was given, before it compares its length with the prompt's."""
        return self.__dict__.get("_user_defined", False)

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._user_defined = self._prompt_starts = value

    def activate_past_recording(self) -> None:
        """As transformers': windows and convolutions keep what crop may need to go back to."""
        if self._prompt_starts and self._used():
            raise errors.MismatchError(
                f"the cache holds {max(self._lengths(), default='some')} tokens, and assisted generation and prompt"
                " lookup feed the whole prompt, behind what is held",
                hint="Give them an empty cache (cache.reset()), or generate without an assistant.",
            )
        super().activate_past_recording()

    def _take_prompt(self) -> bool:
        """True once for each generate(), before its first forward pass."""
        starts, self._prompt_starts = self._prompt_starts, False
        return starts

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens the cache can hold; -1: no maximum."""
        return super().get_max_length(layer_idx) if self.layers else -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return any(layer.is_initialized for layer in self.layers if hasattr(layer, "is_initialized"))

    # Operations on the whole cache: of offloaded layers tables change and no KV moves. All layers change, or none.

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens (0 or negative, as in transformers 5.24); more than are held
        empties the cache. A positive number is a ValueError. MismatchError where a window or a state cannot go back:
        for windows and convolutions call activate_past_recording() before."""
        n = -_integer(tokens_to_remove, "OffloadedCache.crop: tokens_to_remove")
        if n < 0:
            raise ValueError(
                f"OffloadedCache.crop: tokens_to_remove is {-n}, expected 0 or a negative number: crop(-n) removes the"
                " last n tokens"
            )
        attend = (layer for layer in self.layers if isinstance(layer, CacheLayerMixin) and takes_part(layer))
        lengths = [layer.get_seq_length() for layer in attend]
        if n > 0 and lengths and n >= max(lengths):
            self._ferry.check()
            self._clear("emptied")
            return
        self._change("crop", -n, core=lambda: self._ferry.crop(n))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i becomes what row beam_idx[i] was. Sends no byte of KV."""
        if not isinstance(beam_idx, torch.Tensor) or beam_idx.dim() != 1 or beam_idx.dtype not in _INTEGERS:
            got = list(beam_idx.shape) if isinstance(beam_idx, torch.Tensor) else type(beam_idx).__name__
            raise TypeError(
                f"OffloadedCache.reorder_cache: beam_idx is {got}, expected a tensor [batch] of row numbers"
            )
        rows = self._checked_rows(beam_idx.tolist())
        beam_idx = beam_idx.to(torch.int64)  # which is what torch selects by
        self._change("reorder_cache", beam_idx, core=lambda: self._ferry.select_rows(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times. Sends no byte of KV."""
        repeats = _integer(repeats, "OffloadedCache.batch_repeat_interleave: repeats")
        if repeats < 1:
            raise ValueError(f"OffloadedCache.batch_repeat_interleave: repeats is {repeats}, expected 1 or more")
        if repeats * self._rows() > _MAX_ROWS:
            raise errors.MismatchError(
                f"OffloadedCache.batch_repeat_interleave: repeats is {repeats}, expected at most"
                f" {_MAX_ROWS // self._rows()}, which makes {_MAX_ROWS} rows"
            )
        rows = [row for row in range(self._rows()) for _ in range(repeats)]
        self._change("batch_repeat_interleave", repeats, core=lambda: self._ferry.select_rows(rows), growth=repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows that `indices` (numbers, a mask, a slice) selects, in their order. Sends no byte of KV."""
        batch = self._rows()
        if batch == 0:
            return
        chosen = indices.cpu() if isinstance(indices, torch.Tensor) else indices
        try:
            rows = torch.arange(batch)[chosen, ...]
        except (IndexError, TypeError) as error:
            raise errors.MismatchError(
                f"OffloadedCache.batch_select_indices: indices is {indices}, expected 0 to {batch - 1}, a mask"
                f" of {batch} rows or a slice: {error}"
            ) from error
        if rows.dim() != 1 or rows.numel() == 0:
            raise errors.MismatchError(
                f"OffloadedCache.batch_select_indices: indices is {indices}, expected to select 1 row or more"
            )
        rows = rows.tolist()
        growth = len(rows) / batch
        self._change("batch_select_indices", indices, core=lambda: self._ferry.select_rows(rows), growth=growth)

    def _checked_rows(self, rows: list[int]) -> list[int]:
        batch = self._rows()
        for row in rows if batch else ():
            if not 0 <= row < batch:
                raise errors.MismatchError(f"row index is {row}, expected 0 to {batch - 1} (the batch held is {batch})")
        return rows

    def _rows(self) -> int:
        """The batch held; 0 if nothing is."""
        if self._ferry.core.batch:
            return self._ferry.core.batch
        return next((rows for rows in map(rows_of, self.layers) if rows), 0)

    def _change(self, method: str, argument: object, core, growth: float = 1) -> None:
        self._settle()
        self._prompt_starts = False
        layers = [layer for layer in self.layers if changes_on_device(layer)]
        for layer in layers:
            if not hasattr(device_class(layer), method):
                kind, number = type(layer).__name__, self.layers.index(layer)
                raise NotImplementedError(f"OffloadedCache.{method}: layer {number} is a {kind}, which has no {method}")
        held = self._held_beside()
        aside = self._aside
        if held:  # until all have changed, what they were is held beside what they become
            self._set_aside(max(aside, held + int(held * max(growth, 1))), self._planned)
        before = [snapshot(layer) for layer in layers]
        try:
            for layer in layers:
                getattr(device_class(layer), method)(layer, argument)
            core()
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt may have come when the core had changed already
                self._ferry.tear(errors.MismatchError(f"OffloadedCache.{method} was interrupted"))
            for restore in before:
                restore()
            if held:
                self._set_aside(aside, self._planned)
            raise
        del before
        if held:
            self._planned = 0  # the next pass plans anew, for other rows or fewer tokens
            self._set_aside(self._held_beside(), 0)

    def reset(self) -> None:
        """Empties the cache and releases its blocks. Mends a cache in which a forward pass broke off."""
        self._clear("forget")

    # Copies and contents.

    def __deepcopy__(self, memo: dict) -> "OffloadedCache":
        """A cache of its own with the same contents: blocks in the store are shared, no byte is sent."""
        self._settle()
        fork = type(self).__new__(type(self))
        memo[id(self)] = fork
        options = copy.deepcopy(self._options)
        ferry = self._ferry.fork(options)
        for name, value in self.__dict__.items():
            if name in ("_ferry", "_options"):
                setattr(fork, name, ferry if name == "_ferry" else options)
            elif name == "_store":
                fork._store = value  # a connection: shared, not copied
            elif name == "layers":
                fork.layers = [fork_layer(layer, ferry, memo) for layer in value]
            else:
                setattr(fork, name, copy.deepcopy(value, memo))
        fork._prompt_starts = False
        ferry.core.make_room(0, self._aside)
        return fork

    def __copy__(self) -> "OffloadedCache":
        """As deepcopy: two caches that shared their layers would corrupt one another."""
        return copy.deepcopy(self)

    def __reduce__(self):
        """Pickles the tensors themselves, so a file, a broadcast and another host are all right. The copy uses the
        default store of the process that loads it. Within kvferry.pickle_handles() see there."""
        self._ferry.check()
        if len(self._lengths()) > 1:
            raise errors.MismatchError(
                f"OffloadedCache: layers hold {sorted(self._lengths())} tokens, expected the same number: pickle it"
                " between forward passes"
            )
        self._settle()
        state = {k: v for k, v in self.__dict__.items() if k not in ("_ferry", "_store", "_passes", "layers")}
        shared = self._ferry.share(handle_ttl())
        return _unpickle, (type(self), state, [packed(layer, shared is None) for layer in self.layers], shared)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """(keys, values, window) of each layer, tensors that are the caller's; the window, a tensor of one number, is
        None where attention is full. A layer without keys gives None for both. A cache that is made of such
        iterators, type(cache)(map(gather, zip(*caches))), has true lengths and the states too; one that is made of a
        list of them has what the list holds."""
        self._settle()
        for number, layer in enumerate(self.layers):
            keys, values = contents_of(layer)
            note(number, layer, keys)
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    def __repr__(self) -> str:
        try:
            tokens = f"{max(self._lengths(), default=0)} tokens"
        except errors.Error:
            tokens = "of another process"
        return f"{type(self).__name__}({len(self.layers)} layers, {tokens})"

    # What is ours alone.

    def stats(self) -> CacheStats:
        """What the cache holds and has done, of its offloaded layers. Any thread may ask."""
        return CacheStats(**self._ferry.core.stats())

    def flush(self, timeout: float = 30.0) -> None:
        """Waits up to `timeout` seconds until the store has acknowledged every full block; else DeadlineError."""
        self._ferry.core.flush(parse_seconds(timeout, "timeout"))


def _capsule(store: "stores.Store | None") -> object:
    """The capsule of the store's transport; called when the first block leaves the device."""
    return (stores.default_store() if store is None else store)._capsule()


def _integer(value: object, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}), expected an int") from None


def _unpickle(cls: type, state: dict, layers: list, shared: dict | None) -> OffloadedCache:
    store = None if shared is None else stores.store_at(shared["url"])
    cache = cls.__new__(cls)
    cache.__dict__.update(state, _store=store, layers=[])
    cache._begin()
    cache._ferry = Ferry(functools.partial(_capsule, store), cache._options)
    if shared is not None:
        cache._ferry.core.adopt(shared)
    cache.layers.extend(unpacked(entry, cache._ferry) for entry in layers)
    # What is beside the offloaded layers is here already, so that nothing is to be planned for.
    cache._set_aside(cache._held_beside(), 0)
    for layer, entry in zip(cache.layers, layers):
        if isinstance(entry, tuple) and layer._empty is None and entry[3][0] is not None:
            layer.update(*entry[3])
    cache._passes.fill(cache._used())
    return cache
