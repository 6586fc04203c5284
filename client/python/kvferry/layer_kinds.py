"""Which layer of an OffloadedCache is of which class: from a model's config, from data, from other caches."""

import copy
import threading
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from . import errors
from .device_layers import OffloadedIndexedLayer, OffloadedStateLayer, StateLayer, WindowLayer, WindowStateLayer
from .layer import Ferry, OffloadedLayer

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
        if self.cls in _OURS.values():
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
    return [LayerKind(_OURS.get(cls, cls), dict(kwargs)) for cls, kwargs in zip(classes, arguments)]


def kind_of_layer(layer: object) -> LayerKind:
    """The kind of a layer that exists, ours or transformers'."""
    cls = _OURS.get(type(layer), type(layer))
    arguments = {}
    for name in ("sliding_window", "number_of_states"):
        if hasattr(layer, name):
            arguments[name] = getattr(layer, name)
    return LayerKind(cls, arguments)


def device_class(layer: object) -> type | None:
    """The class whose methods do what is to be done to the layer on the device; None: nothing is."""
    return getattr(layer, "device_class", type(layer))


@dataclass
class Replica:
    """What a layer holds besides what an entry (keys, values, window) of its cache's iterator tells."""

    kind: LayerKind
    rows: int | None  # of its keys
    length: int | None  # tokens a window has seen
    states: list[dict[int, torch.Tensor | None]] | None  # convolutional, recurrent


def replica_of(layer: object, keys: torch.Tensor | None) -> Replica:
    states = [layer.conv_states, layer.recurrent_states] if isinstance(layer, LinearAttentionLayer) else None
    length = layer.cumulative_length if isinstance(layer, DynamicSlidingWindowLayer) else None
    return Replica(kind_of_layer(layer), None if keys is None else keys.shape[0], length, states)


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
    if _gathering.replicas is not None:
        _gathering.replicas.setdefault(number, []).append(replica_of(layer, keys))


@dataclass
class LayerData:
    """One layer's data to begin with."""

    keys: torch.Tensor | None
    values: torch.Tensor | None
    kind: LayerKind
    replicas: list[Replica]

    def finish(self, layer: object, device: torch.device | None) -> None:
        """After the keys and values were appended: true lengths, states."""
        lengths = {replica.length for replica in self.replicas} - {None}
        if len(lengths) > 1:
            raise errors.MismatchError(
                f"ddp_cache_data: replicas of a window have seen {sorted(lengths)} tokens, expected the same number"
            )
        if lengths and isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = lengths.pop()
        if not isinstance(layer, LinearAttentionLayer):
            return
        for part, name in enumerate(("conv_states", "recurrent_states")):
            for index in range(layer.number_of_states):
                held = [r.states[part].get(index) for r in self.replicas if r.states is not None]
                held = [state for state in held if state is not None]
                if held:
                    joined = torch.cat([state.to(device or held[0].device) for state in held])
                    getattr(layer, name)[index] = joined
                    _mark_initialized(layer, name, index, joined)


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
        entries = []
        for layer in data.layers:
            keys, values = (layer.keys, layer.values) if hasattr(layer, "keys") else (None, None)
            entries.append(LayerData(keys, values, kind_of_layer(layer), [replica_of(layer, keys)]))
        return entries
    with gathering() as replicas:
        entries = list(data)
    return [_layer_data(number, entry, replicas.get(number, [])) for number, entry in enumerate(entries)]


def _layer_data(number: int, entry: object, replicas: list[Replica]) -> LayerData:
    expected = "expected (keys, values), (keys, values, window) or a tensor [2, batch, heads, tokens, dim]"
    if not isinstance(entry, (tuple, list, torch.Tensor)):
        raise TypeError(f"ddp_cache_data: layer {number} is a {type(entry).__name__}, {expected}")
    if len(entry) not in (2, 3):
        raise errors.MismatchError(f"ddp_cache_data: layer {number} has {len(entry)} parts, {expected}")
    keys, values = entry[:2]
    if (keys is None) != (values is None):
        raise errors.MismatchError(f"ddp_cache_data: layer {number} has only one of keys and values, {expected}")
    window = entry[2] if len(entry) == 3 else None
    rows = sum(replica.rows or 0 for replica in replicas)
    if replicas and (keys is None or rows == keys.shape[0]):
        return LayerData(keys, values, copy.copy(replicas[0].kind), replicas)
    if window is None:
        return LayerData(keys, values, LayerKind(), [])
    sizes = set(torch.as_tensor(window).reshape(-1).tolist())
    if len(sizes) != 1:
        raise errors.MismatchError(f"ddp_cache_data: layer {number} has windows {sorted(sizes)}, expected one size")
    return LayerData(keys, values, LayerKind(WindowLayer, {"sliding_window": int(sizes.pop())}), [])
