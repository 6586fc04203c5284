"""Which layer of an OffloadedCache is of which class: from a model's config, from data, from other caches."""

import threading
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from . import errors
from .device_layers import (
    CrossLayer,
    OffloadedIndexedLayer,
    OffloadedStateLayer,
    StateLayer,
    WindowLayer,
    WindowStateLayer,
    tensors_of,
)
from .layer import Ferry, OffloadedLayer

_WITHOUT_DOUBLE = (CrossLayer,)  # ours that stand for none of transformers' alone

# Ours for each of transformers'. Any other class (one that a model brings along) is used as it is, on the device.
_OURS = {
    DynamicLayer: OffloadedLayer,
    DynamicIndexedLayer: OffloadedIndexedLayer,
    DynamicSlidingWindowLayer: WindowLayer,
    LinearAttentionLayer: StateLayer,
    LinearAttentionAndFullAttentionLayer: OffloadedStateLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: WindowStateLayer,
}


@dataclass(frozen=True)
class LayerKind:
    """A class of layers and what its constructor gets."""

    cls: type = OffloadedLayer
    arguments: dict = field(default_factory=dict)

    @property
    def offloaded(self) -> bool:
        return issubclass(self.cls, OffloadedLayer)

    def make(self, ferry: Ferry, index: int, number: int) -> object:
        """Layer `number` of the model; `index` is among the offloaded ones."""
        if self.offloaded:
            return self.cls(ferry, index, number=number, **self.arguments)
        if self.cls in _OURS.values() or self.cls in _WITHOUT_DOUBLE:
            return self.cls(number=number, **self.arguments)
        return self.cls(**self.arguments)


def kinds_of_config(config: PreTrainedConfig) -> list[LayerKind]:
    """The layers of the model's decoder."""
    text = config.get_text_config(decoder=True)
    types, arguments = get_layer_types_and_kwargs(text)
    # The decoder's number of layers, where it has one of its own: num_hidden_layers is the encoder's in some models.
    decoder_layers = getattr(text, "num_decoder_layers", None) if config.is_encoder_decoder else None
    if decoder_layers is not None and decoder_layers != len(types) and len(set(types)) == 1:
        types, arguments = types[:1] * decoder_layers, arguments[:1] * decoder_layers
    classes = [DYNAMIC_LAYER_TYPE_MAPPING[kind] for kind in types]
    kinds = [LayerKind(_OURS.get(cls, cls), dict(kwargs)) for cls, kwargs in zip(classes, arguments)]
    for number in getattr(text, "cross_attention_layers", None) or ():  # between others, in the same cache (Mllama)
        kinds[number] = LayerKind(CrossLayer)
    return kinds


def kind_of_layer(layer: object) -> LayerKind:
    """The kind of a layer that exists, ours or transformers'; MismatchError for one whose contents we do not know."""
    cls = _OURS.get(type(layer), type(layer))
    if cls is not DummyLayer and cls not in _OURS.values() and cls not in _WITHOUT_DOUBLE:
        raise errors.MismatchError(
            f"ddp_cache_data: a layer is a {cls.__name__}, expected one of transformers' dynamic caches"
        )
    names = ("sliding_window", "number_of_states")
    return LayerKind(cls, {name: getattr(layer, name) for name in names if hasattr(layer, name)})


def is_ours(layer: object) -> bool:
    """Whether the layer is of a class of kvferry's."""
    return type(layer) in _OURS.values() or type(layer) in _WITHOUT_DOUBLE


def takes_part(layer: object) -> bool:
    """Whether every forward pass that uses any layers uses this one, or none does."""
    return not isinstance(layer, (DummyLayer, CrossLayer))


def changes_on_device(layer: object) -> bool:
    """Whether an operation on the whole cache is to be done to the layer, by its device_class: ours know what to do
    before their first update, those that a model brings need not."""
    cls = device_class(layer)
    if cls is None or cls is DummyLayer:
        return False
    return is_ours(layer) or getattr(layer, "is_initialized", True)


def holds_something(layer: object) -> bool:
    """Whether a forward pass has left something in the layer."""
    if isinstance(layer, LinearAttentionLayer) and any(layer.has_previous_state.values()):
        return True
    if isinstance(layer, OffloadedLayer):
        return layer.is_initialized
    if isinstance(layer, DynamicSlidingWindowLayer):
        return layer.cumulative_length > 0
    return not isinstance(layer, LinearAttentionLayer) and any(tensor.numel() for tensor in tensors_of(layer))


def contents_of(layer: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Keys and values that are the caller's; None for both where there are none."""
    if isinstance(layer, OffloadedLayer):
        return layer.read()
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return (None, None) if keys is None else (keys.clone(), values.clone())


def device_class(layer: object) -> type | None:
    """The class whose methods do what is to be done to the layer on the device; None: nothing is."""
    return getattr(layer, "device_class", type(layer))


@dataclass
class Replica:
    """What a layer holds besides what an entry (keys, values, window) of its cache's iterator tells."""

    kind: LayerKind
    keys: torch.Tensor | None  # as in the entry
    length: int | None  # tokens a window has seen
    states: dict[tuple[str, int], torch.Tensor]  # by attribute and number; of an indexer: and dimension of the rows


def replica_of(layer: object, keys: torch.Tensor | None) -> Replica:
    states = {}
    if isinstance(layer, LinearAttentionLayer):
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(layer, name).items():
                if state is None or not layer.has_previous_state[index]:
                    continue
                if name == "conv_states":  # just the kernel's columns, whatever was recorded
                    kernel = layer.conv_kernel_size[index]
                    state = torch.nn.functional.pad(state[..., -kernel:], (max(kernel - state.shape[-1], 0), 0))
                states[name, index] = state
    for dim, name in enumerate(("indexer_keys", "indexer_position_ids")):
        if getattr(layer, name, None) is not None:
            states[name, dim] = getattr(layer, name)
    length = layer.cumulative_length if isinstance(layer, DynamicSlidingWindowLayer) else None
    return Replica(kind_of_layer(layer), keys, length, states)


class _Gathering(threading.local):
    replicas: dict[int, list[Replica]] | None = None


_gathering = _Gathering()


@contextmanager
def gathering():
    """While caches are read to make one of them: yields what note() is told, by layer, in the order of the caches.

    torch's data parallelism makes a cache of several by `type(cache)(map(gather, zip(*caches)))`: their iterators run
    inside the constructor. So what an entry (keys, values, window) cannot carry comes along this way.
    """
    before, _gathering.replicas = _gathering.replicas, {}
    try:
        yield _gathering.replicas
    finally:
        _gathering.replicas = before


def note(number: int, layer: object, keys: torch.Tensor | None) -> None:
    """Tells whoever gathers on this thread what layer `number` of one cache holds."""
    if _gathering.replicas is not None and (type(layer) is DummyLayer or is_ours(layer)):
        _gathering.replicas.setdefault(number, []).append(replica_of(layer, keys))


@dataclass
class LayerData:
    """One layer's data to begin with."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    kind: LayerKind
    replicas: list[Replica] = field(default_factory=list)

    def finish(self, layer: object, tokens: int, device: torch.device | None) -> None:
        """After the keys and values of all layers were appended: true lengths, states. `tokens`: of the longest."""
        lengths = {replica.length for replica in self.replicas} - {None}
        if isinstance(layer, WindowLayer):
            self._finish_window(layer, lengths or {tokens})
        if len(lengths) > 1:
            raise errors.MismatchError(
                f"ddp_cache_data: replicas of a window have seen {sorted(lengths)} tokens, expected the same number"
            )
        if lengths and not isinstance(layer, WindowLayer) and lengths != {layer.get_seq_length()}:
            raise errors.MismatchError(
                f"ddp_cache_data: a window that has seen {lengths.pop()} tokens and holds {layer.get_seq_length()},"
                f" expected all of them for the config's {type(layer).__name__}"
            )
        for name, index in self.replicas[0].states if self.replicas else ():
            held = [replica.states.get((name, index)) for replica in self.replicas]
            if any(state is None for state in held):
                raise errors.MismatchError(
                    f"ddp_cache_data: {name} of a layer is missing in some replicas, expected in all"
                )
            held = [state.to(device or held[0].device) for state in held]
            if name.startswith("indexer"):
                setattr(layer, name, torch.cat(held, dim=index))
                layer.is_indexer_initialized = True
                layer.indexer_dtype, layer.indexer_device = held[0].dtype, held[0].device
            else:
                getattr(layer, name)[index] = torch.cat(held)
                _mark_initialized(layer, name, index, getattr(layer, name)[index])

    def _finish_window(self, layer: WindowLayer, lengths: set[int]) -> None:
        length = max(lengths)
        if self.keys is None or layer.cumulative_length == length:
            return
        kept = self.keys.shape[-2]
        if kept != min(layer.sliding_window - 1, length):
            raise errors.MismatchError(
                f"ddp_cache_data: a window of {layer.sliding_window} tokens holds {kept}, expected"
                f" {min(layer.sliding_window - 1, length)} of {length}"
            )
        if layer.cumulative_length == 0:  # a window of one: it has seen tokens and holds none
            layer.lazy_initialization(self.keys, self.values)
            layer.keys, layer.values = self.keys.clone(), self.values.clone()
        layer.cumulative_length = length


def _mark_initialized(layer: LinearAttentionLayer, name: str, index: int, state: torch.Tensor) -> None:
    layer.has_previous_state[index] = True
    if name == "conv_states":
        layer.is_conv_states_initialized[index] = True
        layer.conv_kernel_size[index] = state.shape[-1]
        layer.dtype, layer.device = state.dtype, state.device
    else:
        layer.is_recurrent_states_initialized[index] = True
        layer.device = state.device if layer.device is None else layer.device


def read_data(data: Iterable | None) -> list[LayerData] | None:
    """Layers of (keys, values), (keys, values, window) or stacked [2, B, H, S, D]; another cache; None."""
    if data is None:
        return None
    if isinstance(data, Cache):
        if not hasattr(data, "layers"):
            raise errors.MismatchError(
                f"ddp_cache_data is a {type(data).__name__}, expected a cache with layers: one of its halves"
            )
        entries = [(layer, *contents_of(layer)) for layer in data.layers]
        return [LayerData(k, v, kind_of_layer(layer), [replica_of(layer, k)]) for layer, k, v in entries]
    with gathering() as replicas:
        entries = [_checked_entry(number, entry) for number, entry in enumerate(data)]
    if replicas and all(_is_joined(keys, replicas.get(n, [])) for n, (keys, *_) in enumerate(entries)):
        return [LayerData(k, v, replicas[n][0].kind, replicas[n]) for n, (k, v, _) in enumerate(entries)]
    if any(replica.states for of_layer in replicas.values() for replica in of_layer):
        raise errors.MismatchError(
            "ddp_cache_data: keys of a cache with states were changed on the way, and its states cannot follow",
            hint="Change the new cache instead, by batch_select_indices, crop or an assignment to layer.keys.",
        )
    return [_plain_data(number, *entry) for number, entry in enumerate(entries)]


def _is_joined(keys: torch.Tensor | None, replicas: list[Replica]) -> bool:
    """Whether `keys` are those of the replicas, one below the other, bit for bit: then what they hold besides fits."""
    if not replicas or keys is None:
        return bool(replicas) and all(replica.keys is None for replica in replicas)
    parts = [replica.keys for replica in replicas]
    if any(part is None or part.shape[1:] != keys.shape[1:] or part.dtype != keys.dtype for part in parts):
        return False
    if sum(part.shape[0] for part in parts) != keys.shape[0]:
        return False
    whole = keys.detach().split([part.shape[0] for part in parts])
    return all(
        torch.equal(one.contiguous().view(torch.uint8), part.detach().to(one.device).contiguous().view(torch.uint8))
        for one, part in zip(whole, parts)
    )


def _checked_entry(number: int, entry: object) -> tuple:
    expected = "expected (keys, values), (keys, values, window) or a tensor [2, batch, heads, tokens, dim]"
    if not isinstance(entry, (tuple, list, torch.Tensor)):
        raise TypeError(f"ddp_cache_data: layer {number} is a {type(entry).__name__}, {expected}")
    if len(entry) not in (2, 3):
        raise errors.MismatchError(f"ddp_cache_data: layer {number} has {len(entry)} parts, {expected}")
    keys, values = entry[:2]
    if (keys is None) != (values is None):
        raise errors.MismatchError(f"ddp_cache_data: layer {number} has only one of keys and values, {expected}")
    return keys, values, entry[2] if len(entry) == 3 else None


def _plain_data(number: int, keys: torch.Tensor | None, values: torch.Tensor | None, window: object) -> LayerData:
    if window is None:
        return LayerData(keys, values, LayerKind())
    sizes = set(torch.as_tensor(window).reshape(-1).tolist()) if isinstance(window, (int, torch.Tensor)) else {window}
    if not all(isinstance(size, int) for size in sizes):
        raise TypeError(
            f"ddp_cache_data: layer {number} has window {window!r}, expected a whole number or a tensor of it"
        )
    if len(sizes) != 1:
        raise errors.MismatchError(f"ddp_cache_data: layer {number} has windows {sorted(sizes)}, expected one size")
    return LayerData(keys, values, LayerKind(WindowLayer, {"sliding_window": int(sizes.pop())}))
