"""kvferry.OffloadedCache: a transformers cache whose layers lie in a store."""

import copy
import functools
import logging
import operator
from collections.abc import Iterable, Iterator

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from . import _torch, errors
from . import store as stores
from .copies import fork_layer, held_bytes, packed, unpacked
from .device_layers import WindowLayer, bytes_of_column, check_indexer_keys, check_state, tensors_of
from .generation import HeldLength
from .handles import handle_ttl
from .layer import Ferry, OffloadedLayer
from .layer_kinds import LayerKind, contents_of, device_class, kinds_of_config, note, read_data
from .sizes import parse_integer, parse_seconds, parse_size
from .stats import CacheStats

_log = logging.getLogger("kvferry")

# States of OffloadedCache._updated besides a layer's index.
_NO_MASK, _MASK_MADE = -2, -1

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


class OffloadedCache(DynamicCache):
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
        self._ferry = Ferry(_torch.Cache(functools.partial(_capsule, store), **self._options))
        self._learning = not kinds  # layers appear as they are updated
        self._encoder_decoder = config is not None and config.is_encoder_decoder
        self._logged: set[str] = set()  # what is logged once a cache
        self._begin()
        Cache.__init__(self, layers=[])
        for number, kind in enumerate(kinds or []):
            self.layers.append(kind.make(self._ferry, numbers.index(number) if kind.offloaded else -1, number))
        for number, layer in enumerate(data or []):
            if layer.keys is not None and layer.keys.shape[-2:-1] != (0,):
                self.update(layer.keys, layer.values, number)
        devices = [layer.keys.device for layer in data or [] if layer.keys is not None]
        for number, layer in enumerate(data or []):
            layer.finish(self.layers[number], devices[0] if devices else None)

    def _begin(self) -> None:
        """What is known of the forward passes of a sequence: nothing yet."""
        self._updated = _NO_MASK  # the layer last updated in a forward pass that made a mask
        self._pass_length: int | None = None  # tokens that every offloaded layer has after that pass
        self._planned = 0  # tokens that there is room for beside the offloaded layers
        self._aside = 0  # bytes of device_memory set aside for what is beside them
        self._assumed = 0  # bytes of a token of all rows, by which the pass was planned
        self._prompt_starts = False  # generate() was called and has not looked at the prompt yet
        self._first_pass = True
        # States that were updated since attention last was: one that is again shows that a pass broke off.
        self._advanced: set[tuple] = set()

    # What models and generate call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [batch, heads, new, dim] to a layer; returns all its keys and values, [batch, heads, all, dim].

        The tensors returned are for this layer's attention: once nobody holds them, a later layer's may take their
        memory. Raises kvferry.Error; a dtype or shape other than the layer's first is a MismatchError.
        """
        layer_idx = self._checked_index(layer_idx)
        while self._learning and len(self.layers) <= layer_idx:
            self._log_once(
                "OffloadedCache: no config was given, so the layers are learnt from the first forward pass and none"
                " leaves the device until that is over; give OffloadedCache(config=model.config)"
            )
            number = len(self.layers)
            self.layers.append(LayerKind().make(self._ferry, number, number))
        layer, before = self.layers[layer_idx], self._updated
        if before == layer_idx and (len(self.layers) > 1 or self._encoder_decoder):
            # Cross-attention of an encoder-decoder model: it would append the encoder's keys to the decoder's.
            raise TypeError(
                f"OffloadedCache: layer {layer_idx} was updated twice in one forward pass; an encoder-decoder model "
                "needs transformers.EncoderDecoderCache(OffloadedCache(...), OffloadedCache(...))"
            )
        self._updated, self._prompt_starts = _NO_MASK, False
        self._ferry.check()
        offloaded = isinstance(layer, OffloadedLayer)
        first = offloaded and not layer.is_initialized
        try:
            if all(isinstance(t, torch.Tensor) and t.dim() == 4 for t in (key_states, value_states)):
                # else the layer says what is wrong
                self._plan_pass(layer, key_states, value_states)
                if offloaded and _NO_MASK < before < layer_idx:  # in a pass: the next one may come without a mask
                    self._check_in_step(layer, layer_idx, key_states.shape[-2])
            both = layer.update(key_states, value_states, *args, **kwargs)
        except errors.Error as error:
            self._after_error(error, layer.get_seq_length())
            raise
        self._advanced.clear()
        if first and self.stats().relearned:
            self._log_once(
                "OffloadedCache: layer %d has another shape than the first layer, or is one more than there were, so no"
                " layer leaves the device until this forward pass is over",
                layer_idx,
            )
        if _NO_MASK < before < layer_idx:
            self._updated = layer_idx
        return both

    def _checked_index(self, layer_idx: int) -> int:
        try:
            index = operator.index(layer_idx)
        except TypeError:
            raise TypeError(f"layer_idx is a {type(layer_idx).__name__}, expected an int") from None
        most = 4096 if self._learning else len(self.layers)
        if not 0 <= index < most:
            raise errors.LayerIndexError(f"layer_idx is {index}, expected 0 to {most - 1}")
        return index

    def _after_error(self, error: errors.Error, length: int) -> None:
        """Windows and states do not roll back: where they are ahead of the layer that failed, which has `length`
        tokens, the cache is torn, or empty as it was if this was its first pass and there was no room for it."""
        beside = any(device_class(layer) not in (None, DummyLayer) for layer in self.layers)
        if not beside or not (self._advanced or self._lengths() - {length}):
            return
        if self._first_pass and isinstance(error, errors.FullError):
            self._clear("forget")
        elif self._ferry.torn is None:
            self._ferry.tear(error)

    def _lengths(self) -> set[int]:
        """Tokens that our layers have seen, those that are in use."""
        kinds = (OffloadedLayer, WindowLayer)
        return {layer.get_seq_length() for layer in self.layers if isinstance(layer, kinds)} - {0}

    def _begin_pass(self) -> None:
        """Before a forward pass: whatever broke off an earlier one between two layers, it is noticed here."""
        if len(self._lengths()) < 2:
            return
        error = errors.MismatchError(
            f"OffloadedCache: layers hold {' and '.join(map(str, sorted(self._lengths())))} tokens, expected the same"
            " number: an earlier forward pass was interrupted"
        )
        self._ferry.tear(error)
        raise error

    # What is held on the device beside the offloaded layers is set aside from device_memory before it is allocated.

    def _plan_pass(self, layer: object, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Before the first layer of a forward pass: makes room for all layers at once, or raises FullError."""
        new, own = key_states.shape[-2], bytes_of_column(key_states, value_states)
        after = layer.get_seq_length() + new
        rows = self._rows() if isinstance(layer, WindowLayer) else 0  # the core checks its own
        if rows and rows != key_states.shape[0]:
            raise errors.MismatchError(
                f"key_states has batch {key_states.shape[0]}, expected {rows} as held by the cache"
            )
        if after <= self._planned:
            if isinstance(layer, WindowLayer) and layer.cumulative_length == 0 and own > self._assumed:
                self._set_aside(self._aside + layer.room(new, own)[0] - layer.room(new, self._assumed)[0], after)
            return
        if all(device_class(other) in (None, DummyLayer) for other in self.layers):
            self._planned = after
            return  # the core plans for itself
        self._begin_pass()
        self._first_pass = self._planned == 0 and not self._lengths()
        self._assumed = assumed = own
        held = most = 0
        for other in self.layers:
            cls = device_class(other)
            if cls in (None, DummyLayer):
                continue
            keeps, appending = cls.room(other, new, assumed) if hasattr(cls, "room") else (held_bytes(other), 0)
            held, most = held + keeps, max(most, appending)
        self._set_aside(held + most, after)
        self._planned = after

    def _set_aside(self, aside: int, tokens: int) -> None:
        """Sets `aside` bytes aside instead of those before, while sequences have `tokens` tokens."""
        self._ferry.core.make_room(tokens, aside)
        self._aside = aside

    def _held_beside(self) -> int:
        return sum(held_bytes(layer) for layer in self.layers if device_class(layer) is not None)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs
    ) -> torch.Tensor:
        """As transformers': appends columns to a state of layer `layer_idx`, returns all that were kept and the new."""
        kernel = parse_integer(kwargs.get("conv_kernel_size"), "conv_kernel_size", optional=True)
        self._before_state(conv_states, layer_idx, "conv_states", state_idx, kernel)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs
    ) -> torch.Tensor:
        """As transformers': replaces a state of layer `layer_idx` and returns it."""
        self._before_state(recurrent_states, layer_idx, "recurrent_states", state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As transformers': appends [batch, tokens, dim] to the indexer's keys of layer `layer_idx`, returns all."""
        layer = self.layers[self._checked_index(layer_idx)]
        self._ferry.check()
        held = getattr(layer, "indexer_keys", None)
        check_indexer_keys(indexer_key_states, held, layer_idx)
        if held is None:  # not foreseen by the plan
            self._add_aside(indexer_key_states.numel() * indexer_key_states.element_size())
        return super().update_indexer(indexer_key_states, layer_idx)

    def _before_state(
        self, tensor: torch.Tensor, layer_idx: int, name: str, state_idx: int, columns: int | None = None
    ) -> None:
        """Checks what is appended, of which `columns` will be kept (None: all), and makes room for it."""
        if self._learning:
            raise ValueError("OffloadedCache: states need a config: OffloadedCache(config=model.config)")
        layer = self.layers[self._checked_index(layer_idx)]
        self._ferry.check()
        check_state(layer, layer_idx, tensor, name, state_idx, self._rows())
        if (layer_idx, name, state_idx) in self._advanced and self._lengths():
            error = errors.MismatchError(
                f"OffloadedCache: {name} {state_idx} of layer {layer_idx} is updated twice with no attention between:"
                " an earlier forward pass was interrupted"
            )
            self._ferry.tear(error)
            raise error
        held = getattr(layer, name)[state_idx]
        columns = columns if columns and not layer.record_past else tensor.shape[-1]
        new = tensor.numel() // tensor.shape[-1] * columns * tensor.element_size()
        if held is None:  # not foreseen by the plan
            self._add_aside(new)
        elif layer.record_past:
            self._add_aside(max(0, self._held_beside() + held.nbytes + new - self._aside))
        self._advanced.add((layer_idx, name, state_idx))

    def _add_aside(self, new: int) -> None:
        try:
            self._set_aside(self._aside + new, self._planned)
        except errors.Error as error:
            self._after_error(error, self._planned)
            raise

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
        self._updated, self._pass_length, self._prompt_starts = _MASK_MADE, None, False
        return super().get_mask_sizes(query_length, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the layer has seen. Local, never a call to the store."""
        length = super().get_seq_length(layer_idx)
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
        lengths = [layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)]
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
        self._change("reorder_cache", beam_idx, core=lambda: self._ferry.select_rows(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times. Sends no byte of KV."""
        repeats = _integer(repeats, "OffloadedCache.batch_repeat_interleave: repeats")
        if repeats < 1:
            raise ValueError(f"OffloadedCache.batch_repeat_interleave: repeats is {repeats}, expected 1 or more")
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
        tensors = (t for layer in self.layers if device_class(layer) is not None for t in tensors_of(layer))
        return next((tensor.shape[0] for tensor in tensors if tensor.dim() > 1), 0)

    def _change(self, method: str, argument: object, core, growth: float = 1) -> None:
        self._ferry.check()
        self._prompt_starts = False
        layers = [(layer, device_class(layer)) for layer in self.layers]
        layers = [(layer, cls) for layer, cls in layers if cls is not None]
        for number, layer in enumerate(self.layers):
            if device_class(layer) is not None and not hasattr(device_class(layer), method):
                kind = type(layer).__name__
                raise NotImplementedError(f"OffloadedCache.{method}: layer {number} is a {kind}, which has no {method}")
        held = self._held_beside()
        if held:  # until all have changed, what they were is held beside what they become
            self._set_aside(max(self._aside, held + int(held * max(growth, 1))), self._planned)
        before = [(layer, {k: _shallow(v) for k, v in vars(layer).items()}) for layer, _ in layers]
        try:
            for layer, cls in layers:
                if cls is not type(layer) or hasattr(cls, "held_bytes") or getattr(layer, "is_initialized", True):
                    getattr(cls, method)(layer, argument)
            core()
        except BaseException as error:
            for layer, attributes in before:
                vars(layer).clear()
                vars(layer).update(attributes)
            if not isinstance(error, Exception):  # an interrupt may have come when the core had changed already
                self._ferry.tear(errors.MismatchError(f"OffloadedCache.{method} was interrupted"))
            raise
        del before
        if held:
            self._planned = 0  # the next pass plans anew, for other rows or fewer tokens
            self._set_aside(self._held_beside(), 0)

    def reset(self) -> None:
        """Empties the cache and releases its blocks. Mends a cache in which a forward pass broke off."""
        self._clear("forget")

    def _clear(self, method: str) -> None:
        for layer in self.layers:
            getattr(layer, method, layer.reset)()
        self._ferry.reset()
        self._begin()

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
        state = {k: v for k, v in self.__dict__.items() if k not in ("_ferry", "_store", "layers")}
        shared = self._ferry.share(handle_ttl())
        return _unpickle, (type(self), state, [packed(layer, shared is None) for layer in self.layers], shared)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """(keys, values, window) of each layer, tensors that are the caller's; the window, a tensor of one number, is
        None where attention is full. A layer without keys gives None for both. A cache that is made of such
        iterators, type(cache)(map(gather, zip(*caches))), has true lengths and the states too; one that is made of a
        list of them has what the list holds."""
        self._ferry.check()
        for number, layer in enumerate(self.layers):
            keys, values = contents_of(layer)
            note(number, layer, keys)
            yield keys, values, getattr(layer, "_sliding_window_tensor", None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.layers)} layers, {max(self._lengths(), default=0)} tokens)"

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


def _shallow(value: object) -> object:
    return dict(value) if isinstance(value, dict) else value


def _unpickle(cls: type, state: dict, layers: list, shared: dict | None) -> OffloadedCache:
    store = None if shared is None else stores.store_at(shared["url"])
    cache = cls.__new__(cls)
    cache.__dict__.update(state, _store=store, layers=[])
    cache._begin()
    cache._ferry = Ferry(_torch.Cache(functools.partial(_capsule, store), **state["_options"]))
    if shared is not None:
        cache._ferry.core.adopt(shared)
    cache.layers.extend(unpacked(entry, cache._ferry) for entry in layers)
    for number, entry in enumerate(layers):
        if isinstance(entry, tuple) and entry[3][0] is not None:
            cache.update(*entry[3], number)
    cache._set_aside(cache._held_beside(), 0)
    return cache
