"""One full-attention layer of an OffloadedCache, and the C++ cache that all of them share."""

import copy
import threading
from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.cache_utils import CacheLayerMixin

from . import _torch, errors

_TORN_HINT = "Call cache.reset() and run again from the first token; other caches and the store are not concerned."


class Ferry:
    """The C++ cache behind the offloaded layers of one OffloadedCache, and whether a forward pass broke off in it.

    Threads: calls of several threads follow one another; none holds the GIL while it waits or copies.
    """

    def __init__(self, provider: Callable, options: dict, core: "_torch.Cache | None" = None):
        self._provider = provider  # of the store's transport
        self.options = options  # of the core, which the cache owns
        self.core = _torch.Cache(provider, **options) if core is None else core
        self.torn: errors.Error | None = None  # what left some layers longer than others
        # Keys or values that somebody has taken and still holds: (layer, side, tensor) of what was built beside them.
        self._beside = WeakTensorKeyDictionary()
        self._beside_lock = threading.Lock()
        self._changes = 0
        self._indices = options["layers"] or 0  # given to layers so far
        # Keys and values of layers of which one was assigned and does not fit the other yet.
        self.assigned: dict[int, list[torch.Tensor]] = {}

    def new_index(self) -> int:
        """For one more offloaded layer. REQUIRES: the cache is empty, if it knows its layers."""
        self._indices += 1
        if self.options["layers"] is not None:
            self.options["layers"] += 1
            self.options["layer_numbers"].append(max(self.options["layer_numbers"], default=-1) + 1)
            self.core = _torch.Cache(self._provider, **self.options)
        return self._indices - 1

    def check_torn(self) -> None:
        """Raises what broke off a forward pass, as long as the layers are out of step."""
        if self.torn is not None:
            error = errors.from_status(self.torn.code, f"the cache is incomplete since: {self.torn}")
            raise _with_hint(error, _TORN_HINT)

    def check(self) -> None:
        """As check_torn; half of a layer may not have been assigned without the other; and the core may be used."""
        self.core.check()
        self.check_torn()
        for keys, values in self.assigned.values():
            raise errors.MismatchError(
                f"keys {list(keys.shape)} on {keys.device} and values {list(values.shape)} on {values.device} were"
                " assigned to a layer, expected the same batch, tokens and device",
                hint="Assign the other of the two as well, or call cache.reset().",
            )

    def update(self, keys: torch.Tensor, values: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends to layer `index` and returns all of its keys and values, [batch, heads, tokens, dim]."""
        self.check()
        self._changed()
        try:
            return self.core.update(keys, values, index)
        except errors.Error as error:
            lengths = {self.core.seq_length(i) for i in range(self.core.layers)} - {0}
            if lengths - {self.core.seq_length(index)}:
                self.tear(error)
            raise

    def read(self, index: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Fresh keys and values of layer `index`, which the caller owns; (None, None) before its first update."""
        self.check()
        return self.core.read(index)

    def read_side(self, index: int, side: int) -> torch.Tensor | None:
        """As read, of which 0 is the keys and 1 the values. The other of the two is kept for who asks for it next, as
        long as this one lives and the cache does not change."""
        if index in self.assigned:
            return self.assigned[index][side]
        self.check_torn()
        with self._beside_lock:
            changes = self._changes
            kept = [tensor for *which, tensor in self._beside.values() if which == [index, side]]
            self._beside.clear()
        if kept:
            return kept[0]
        both = self.core.read(index)
        with self._beside_lock:
            if both[side] is not None and changes == self._changes:
                self._beside[both[side]] = (index, 1 - side, both[1 - side])
        return both[side]

    def assign(self, index: int, side: int, tensor: torch.Tensor) -> None:
        """Makes `tensor` the keys (side 0) or values (1) of the layer. What is the same bit for bit changes nothing;
        else the layer stays on the device from now on."""
        self.check_torn()
        batch = self.core.batch or (tensor.shape[0] if tensor.dim() else 1)
        if tensor.layout != torch.strided or tensor.is_meta:
            raise errors.MismatchError(
                f"{('keys', 'values')[side]} is {tensor.layout} on {tensor.device}, expected a dense tensor with data"
            )
        if tensor.dim() != 4 or tensor.shape[0] != batch or tensor.numel() == 0:
            raise errors.MismatchError(
                f"{('keys', 'values')[side]} has shape {list(tensor.shape)}, expected [{batch}, heads, tokens, dim], at"
                " least 1 of each; cache.reset() empties all layers"
            )
        both = list(self.assigned.get(index) or self.core.read(index))
        if both[0] is None:
            both = [tensor[:, :, :0]] * 2  # as if both had been there without tokens
        elif index not in self.assigned and _same_bits(both[side], tensor):
            return
        self._changed()
        both[side] = tensor
        if all(a == b for a, b in zip(both[0].shape[:3:2], both[1].shape[:3:2])) and both[0].device == both[1].device:
            self.assigned.pop(index, None)  # if that fails the layer stays as it was before both
            self.core.assign(*both, index)
        else:
            self.assigned[index] = both

    def _changed(self) -> None:
        with self._beside_lock:
            self._changes += 1
            self._beside.clear()

    def tear(self, error: errors.Error) -> None:
        """Takes note that `error` left the layers out of step."""
        self.torn = _with_hint(error, _TORN_HINT)

    def fork(self, options: dict) -> "Ferry":
        """A ferry of its own with the same contents; no byte moves. `options`: a copy of this one's."""
        self.check()
        return Ferry(self._provider, options, self.core.fork())

    def share(self, ttl: float | None) -> dict | None:
        """What another process adopts to have the same contents, for `ttl` seconds; None without a `ttl` and where
        blocks cannot be shared."""
        if ttl is None:
            return None
        try:
            return self.core.share(ttl)
        except (errors.MismatchError, errors.FullError) as error:
            if error.code == "INVALID_ARGUMENT":
                raise
            return None

    def select_rows(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was."""
        self.check()
        self._changed()
        if self.core.batch:
            self.core.select_rows(rows)

    def crop(self, tokens: int) -> None:
        """Removes the last `tokens` tokens of every layer."""
        self.check()
        self._changed()
        self.core.crop(tokens)

    def reset(self) -> None:
        """Empties every layer."""
        self._changed()
        self.core.reset()
        self.core.make_room(0, 0)
        self.assigned.clear()
        self.torn = None


def _with_hint(error: errors.Error, hint: str) -> errors.Error:
    error.hint = hint
    return error


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.requires_grad or other.requires_grad:
        return False
    if one.dtype != other.dtype or one.device != other.device or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


class OffloadedLayer(CacheLayerMixin):
    """A full-attention layer whose blocks lie in a store; made by OffloadedCache alone.

    It has no tensors of its own: `keys` and `values` build fresh ones, [batch, heads, tokens, dim], which are the
    caller's. Assigned, they replace what is held, and the layer stays on the device from then on, since what was put is
    immutable. The layers of a cache are reordered, cropped and emptied together, so those methods are the cache's.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    device_class: type | None = None  # whose methods do what is to be done on the device; None: nothing is

    def __init__(self, ferry: Ferry, index: int, **kwargs):
        # Not super().__init__(): it assigns keys and values.
        self._ferry = ferry
        self._index = index  # among the offloaded layers
        self.device: torch.device | None = None  # of the first update
        self._shapes: list[tuple] | None = None  # heads, dim and dtype of keys and values, of the first update
        self._empty: list[torch.Tensor] | None = None  # keys and values after a crop that left none

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens)"

    def __deepcopy__(self, memo: dict) -> "OffloadedLayer":
        """Another layer of the same cache, for models that append such (Dory): as long as this one holds nothing."""
        if self.is_initialized or self._empty is not None:
            raise NotImplementedError(
                f"{type(self).__name__}.__deepcopy__: the layer holds {self.get_seq_length()} tokens, expected none:"
                " copy the cache"
            )
        layer = type(self).__new__(type(self))
        own = {name: value for name, value in vars(self).items() if name not in ("_ferry", "_index")}
        vars(layer).update(copy.deepcopy(own, memo), _ferry=self._ferry, _index=self._ferry.new_index())
        return layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self._shapes = [(t.shape[1], t.shape[3], t.dtype) for t in (key_states, value_states)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [batch, heads, new, dim] tensors of any strides and returns the layer's whole keys and values.

        What is returned is for this layer's attention: once nobody holds it, a later layer's may take its memory.
        Raises kvferry.Error; see OffloadedCache.
        """
        both = self._ferry.update(key_states, value_states, self._index)
        if self._shapes is None:
            self.lazy_initialization(key_states, value_states)
        self._empty = None
        return both

    def emptied(self) -> None:
        """The cache is cropped to nothing: as in transformers, keys and values are tensors without tokens then."""
        if self._empty is not None:
            return
        empty, rows, device = None, self._ferry.core.batch, self.device
        if self._shapes is not None:
            empty = [torch.empty(rows, heads, 0, dim, dtype=t, device=device) for heads, dim, t in self._shapes]
        if hasattr(self.device_class, "emptied"):
            self.device_class.emptied(self)
            self._forget_own()
        else:
            self.forget()
        self._empty = empty

    def forget(self) -> None:
        """The cache is reset: the next update may bring anything."""
        if self.device_class is not None:
            self.device_class.reset(self)
        self._forget_own()

    def _forget_own(self) -> None:
        self.device = self._shapes = self._empty = None

    def read(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Fresh tensors with all the layer holds, which the caller owns; (None, None) before the first update."""
        return self._ferry.read(self._index) if self._empty is None else tuple(self._empty)

    @property
    def keys(self) -> torch.Tensor | None:
        return self._empty[0] if self._empty is not None else self._ferry.read_side(self._index, 0)

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._assign(0, tensor, "keys")

    @property
    def values(self) -> torch.Tensor | None:
        return self._empty[1] if self._empty is not None else self._ferry.read_side(self._index, 1)

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._assign(1, tensor, "values")

    def _assign(self, side: int, tensor: torch.Tensor | None, name: str) -> None:
        if tensor is None and self.get_seq_length() == 0:
            return
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"OffloadedLayer.{name} is a {type(tensor).__name__}, expected a tensor [batch, heads, tokens, dim];"
                " cache.reset() empties all layers"
            )
        if self._empty is not None and tensor.shape == self._empty[side].shape:
            return  # nothing in nothing's place
        self._ferry.assign(self._index, side, tensor)
        self._empty = None
        if self._index not in self._ferry.assigned:
            self.lazy_initialization(*self._ferry.core.read(self._index))

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def get_seq_length(self) -> int:
        """Tokens held. A local number, never a call to the store."""
        return self._ferry.core.seq_length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask for `query_length` tokens that will be appended."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        """Nothing: the cache decides what leaves the device."""

    def prefetch(self) -> None:
        """Nothing: the cache reads ahead."""

    def reset(self) -> None:
        raise self._whole_cache("reset")

    def crop(self, tokens_to_remove: int) -> None:
        raise self._whole_cache("crop")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise self._whole_cache("reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise self._whole_cache("batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise self._whole_cache("batch_select_indices")

    def _whole_cache(self, method: str) -> NotImplementedError:
        return NotImplementedError(
            f"{type(self).__name__}.{method}: the layers of an OffloadedCache change together; call {method} of the"
            " cache"
        )
