"""Layers of an OffloadedCache on their way into another cache, and back to what they were."""

import copy
from collections.abc import Callable

import torch

from .device_layers import bytes_of, tensors_of
from .layer import Ferry, OffloadedLayer
from .layer_kinds import device_class, is_ours


def held_bytes(layer: object) -> int:
    """Memory that a layer's tensors take on the device."""
    cls = device_class(layer)
    return cls.held_bytes(layer) if hasattr(cls, "held_bytes") else bytes_of(*tensors_of(layer))


def snapshot(layer: object) -> Callable[[], None]:
    """What makes a layer what it is now again: its attributes, not the contents of its tensors."""
    before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}

    def restore() -> None:
        vars(layer).clear()
        vars(layer).update(before)

    return restore


def contents_mark(layer: object) -> list[object]:
    """What differs once something was appended to the layer or changed in it."""
    tensors = tensors_of(layer)
    mark: list[object] = [(id(tensor), None if tensor.is_inference() else tensor._version) for tensor in tensors]
    return mark + [layer.get_seq_length()] if hasattr(layer, "get_seq_length") else mark


def _device_state(layer: object) -> dict[str, object]:
    """The attributes of a layer but those that tie it to its cache."""
    return {k: v for k, v in vars(layer).items() if k not in ("_ferry", "_index")}


def _cloned(value: object, memo: dict) -> object:
    if isinstance(value, torch.Tensor):  # a clone, since deepcopy refuses tensors that gradients flow through
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def fork_layer(layer: object, ferry: Ferry, memo: dict) -> object:
    """A copy of a layer in a fork of its cache, whose ferry is `ferry`."""
    if not is_ours(layer):  # transformers' own or a model's: it knows better
        return copy.deepcopy(layer, memo)
    fork = type(layer).__new__(type(layer))
    vars(fork).update(_cloned(_device_state(layer), memo))
    if isinstance(layer, OffloadedLayer):
        fork._ferry, fork._index = ferry, layer._index
    return fork


def packed(layer: object, contents: bool) -> object:
    """A layer as it is pickled: an offloaded one by its contents, if they are not shared otherwise."""
    if not isinstance(layer, OffloadedLayer):
        return layer
    return type(layer), layer._index, _device_state(layer), layer.read() if contents else (None, None)


def unpacked(entry: object, ferry: Ferry) -> object:
    """The layer of what `packed` gave, without its contents."""
    if not isinstance(entry, tuple):
        return entry
    cls, index, attributes, _ = entry
    layer = cls.__new__(cls)
    vars(layer).update(attributes, _ferry=ferry, _index=index)
    return layer
