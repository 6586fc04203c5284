"""Layers, and parts of layers, that an OffloadedCache keeps on the device: windows, states, indexers.

They are bounded however long the sequence is (an indexer is not, but small), so offloading them would cost more than it
frees. All behave as transformers' own layers of the same kind, but where those are wrong: see the comments.

Shapes: B rows, H heads, S tokens, D dim. Methods that the cache calls on every layer are transformers' own.
"""

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from . import _torch, errors
from .layer import Ferry, OffloadedLayer


def bytes_of(*tensors: torch.Tensor | None) -> int:
    """Memory that the tensors keep alive."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def bytes_of_column(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Bytes of one token of all rows, [B, H, S, D] each."""
    return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in (keys, values))


def tensors_of(layer: object) -> list[torch.Tensor]:
    """The tensors among a layer's attributes, in dictionaries and lists too."""
    found, values = [], list(vars(layer).values())
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, (list, tuple)):
            values.extend(value)
    return found


def rows_of(layer: object) -> int:
    """The batch that a layer holds on the device; 0 if it holds nothing, or nothing of which that is known."""
    own = vars(layer)
    held = [own.get("keys"), own.get("indexer_keys")]
    for name in ("conv_states", "recurrent_states"):
        held += own.get(name, {}).values()
    return next((tensor.shape[0] for tensor in held if isinstance(tensor, torch.Tensor) and tensor.dim() > 1), 0)


def check_state(layer_idx: int, tensor: object, name: str, held: torch.Tensor | None, rows: int) -> None:
    """Refuses by name what cannot take the place of, or follow, the state `held` of layer `layer_idx`. `rows` are held
    by the cache, 0: none."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, expected a torch.Tensor")
    _check_dense(tensor, name, layer_idx)
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise errors.MismatchError(f"{name} has shape {list(tensor.shape)}, expected [batch, ...], at least 1 of each")
    _check_rows(tensor, name, layer_idx, rows)
    if held is not None and (held.device, held.is_floating_point()) != (tensor.device, tensor.is_floating_point()):
        raise errors.MismatchError(
            f"{name} of layer {layer_idx} is {tensor.dtype} on {tensor.device}, expected {held.dtype} on {held.device}"
            " as held by the cache"
        )


def check_indexer_keys(tensor: object, held: torch.Tensor | None, layer_idx: int, rows: int) -> None:
    """Refuses by name what cannot follow the indexer's keys `held` by layer `layer_idx`. `rows`: as check_state."""
    name = "indexer_key_states"
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.dim() != 3 or tensor.numel() == 0:
        nested = not isinstance(tensor, torch.Tensor) or tensor.is_nested
        got = type(tensor).__name__ if nested else list(tensor.shape)
        raise errors.MismatchError(f"{name} is {got}, expected a tensor [batch, tokens, dim], at least 1 of each")
    _check_dense(tensor, name, layer_idx)
    _check_rows(tensor, name, layer_idx, rows)
    if held is None:
        return
    if held.shape[2] != tensor.shape[2]:
        raise errors.MismatchError(
            f"{name} has shape {list(tensor.shape)}, expected [{held.shape[0]}, tokens, {held.shape[2]}] as held by"
            f" layer {layer_idx}"
        )
    if (held.dtype, held.device) != (tensor.dtype, tensor.device):
        raise errors.MismatchError(
            f"{name} of layer {layer_idx} is {tensor.dtype} on {tensor.device}, expected {held.dtype} on {held.device}"
            " as held by the cache"
        )


def _check_rows(tensor: torch.Tensor, name: str, layer_idx: int, rows: int) -> None:
    if rows and rows != tensor.shape[0]:
        raise errors.MismatchError(
            f"{name} of layer {layer_idx} has batch {tensor.shape[0]}, expected {rows} as held by the cache"
        )


def _check_dense(tensor: torch.Tensor, name: str, layer_idx: int) -> None:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise errors.MismatchError(
            f"{name} of layer {layer_idx} is {kind} on {tensor.device}, expected a dense tensor with data"
        )


class WindowLayer(DynamicSlidingWindowLayer):
    """Sliding or chunked attention: the last `sliding_window - 1` tokens.

    Other than in transformers' layer: what is kept does not keep the whole prompt's memory alive; a window of one token
    holds nothing (there: everything); crop keeps what the next pass needs or refuses, before the first update too;
    tensors that do not fit are refused by name before anything changes; reset ends the recording of the past.
    """

    def __init__(self, sliding_window: int, number: int = 0, **kwargs):
        if sliding_window < 1:
            raise errors.MismatchError(f"sliding_window of layer {number} is {sliding_window}, expected 1 or more")
        super().__init__(sliding_window=sliding_window)
        self.number = number  # of the layer in the model, for messages

    @property
    def device_class(self) -> type:
        return WindowLayer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends [B, H, new, D]; returns what these tokens attend to, [B, H, at most sliding_window - 1 + new, D]."""
        empty = self.cumulative_length == 0
        first = (None, None) if empty else (self.keys, self.values)
        _torch.check_update(key_states, value_states, *first, self.number)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, visible = key_states.shape[-2], self.sliding_window - 1 + key_states.shape[-2]
        if empty:  # contiguous as those of transformers: the products of others may differ in the last bit
            full = (key_states.contiguous(), value_states.contiguous())
        else:
            full = tuple(torch.cat(pair, dim=-2) for pair in zip(first, (key_states, value_states)))
        self.keys, self.values = (self._kept(tensor, fresh=not empty) for tensor in full)
        self.cumulative_length += new
        return tuple(tensor[:, :, -visible:] for tensor in full)

    def _kept(self, full: torch.Tensor, fresh: bool) -> torch.Tensor:
        """The last tokens of `full`, in memory of their own unless that is little larger anyhow."""
        tokens = full.shape[-2]
        keep = tokens if self.record_past else min(tokens, self.sliding_window - 1)
        kept = full[:, :, tokens - keep :]
        return kept if fresh and tokens - keep <= keep // 4 else kept.clone(memory_format=torch.contiguous_format)

    def room(self, new: int, column_bytes: int) -> tuple[int, int]:
        """Bytes the layer may hold after `new` more tokens, and while it appends them. `column_bytes`: of one token of
        all rows, as long as the layer holds none."""
        held = 0 if self.cumulative_length == 0 else self.keys.shape[-2]
        if held or self.cumulative_length:
            column_bytes = bytes_of_column(self.keys, self.values)
        keep = held + new if self.record_past else min(held + new, self.sliding_window - 1)
        return (keep + keep // 4) * column_bytes, (held + new) * column_bytes

    def held_bytes(self) -> int:
        """Memory held now."""
        return bytes_of(self.keys, self.values)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. MismatchError if tokens that the window needs then are gone:
        only activate_past_recording() keeps them."""
        n, held = -tokens_to_remove, 0 if self.cumulative_length == 0 else self.keys.shape[-2]
        if n >= self.cumulative_length:
            if self.cumulative_length:
                self.keys, self.values = (tensor[:, :, :0].clone() for tensor in (self.keys, self.values))
                self.cumulative_length = 0
            return
        keep = min(self.sliding_window - 1, self.cumulative_length - n)
        if held - n < keep and n > 0:
            raise errors.MismatchError(
                f"crop({tokens_to_remove}): layer {self.number} has a window of {self.sliding_window} tokens and holds"
                f" the last {held} of {self.cumulative_length}, expected {keep + n} to go back",
                hint="Call cache.activate_past_recording() before the tokens that may be removed; else cache.reset().",
            )
        start = held - n - keep
        if start == n == 0:
            return
        self.keys, self.values = (t[:, :, start : held - n].clone() for t in (self.keys, self.values))
        self.cumulative_length -= n

    def reset(self) -> None:
        super().reset()
        self.record_past = False

    def emptied(self) -> None:
        """The cache is cropped to nothing: keys and values are tensors without tokens then."""
        WindowLayer.crop(self, -self.cumulative_length)


class CrossLayer(DynamicLayer):
    """Cross-attention between a decoder's own layers (Mllama): the keys of an image, which come once, are as long as
    that is, and are not cropped with the tokens."""

    def __init__(self, number: int = 0, **kwargs):
        super().__init__()
        self.number = number

    def held_bytes(self) -> int:
        """Memory held now."""
        return bytes_of(self.keys, self.values)

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing: what is removed are tokens."""

    def reset(self) -> None:
        super().reset()
        self.keys = self.values = None
        self.is_initialized = False


class StateLayer(LinearAttentionLayer):
    """Linear attention (Mamba, gated delta nets, convolutions): states of constant size, one or more a layer.

    Other than in transformers' layer: rows can be selected and repeated; reset forgets the states, so that the next
    batch may be another; a state of another shape is refused, not broadcast; crop refuses what cannot be undone.
    """

    device_class: type  # below

    def __init__(self, number_of_states: int = 1, number: int = 0, **kwargs):
        super().__init__(number_of_states=number_of_states)
        self.number = number
        self._all_recorded: dict[int, bool] = {}  # whether conv_states holds every column since the first

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Appends [B, C, new]; returns the columns kept before followed by the new ones."""
        held = self.conv_states[state_idx] if self.has_previous_state[state_idx] else None
        if held is not None and held.shape[:-1] != conv_states.shape[:-1]:
            raise self._other_shape("conv_states", conv_states, [*held.shape[:-1], "new"])
        if held is None:
            self._all_recorded[state_idx] = self.record_past
        return super().update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs) -> torch.Tensor:
        """Replaces the state, of any shape that begins with B; returns it."""
        held = self.recurrent_states[state_idx]
        if held is not None and held.shape != recurrent_states.shape:
            raise self._other_shape("recurrent_states", recurrent_states, list(held.shape))
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def _other_shape(self, name: str, tensor: torch.Tensor, expected: list) -> errors.MismatchError:
        shape = ", ".join(map(str, expected))
        return errors.MismatchError(
            f"{name} of layer {self.number} has shape {list(tensor.shape)}, expected [{shape}] as held by the cache"
        )

    def _states(self) -> list[torch.Tensor]:
        return [t for states in (self.conv_states, self.recurrent_states) for t in states.values() if t is not None]

    def room(self, new: int, column_bytes: int) -> tuple[int, int]:
        """As WindowLayer.room. States do not grow, but for the columns of convolutions while the past is recorded."""
        held = StateLayer.held_bytes(self)
        if not self.record_past:
            return held, 0
        columns = [state for state in self.conv_states.values() if state is not None and state.shape[-1]]
        grown = [state.nbytes * (state.shape[-1] + new) // state.shape[-1] for state in columns]
        return held + sum(grown) - sum(state.nbytes for state in columns), max(grown, default=0)

    def held_bytes(self) -> int:
        """Memory held now."""
        return bytes_of(*self._states())

    def _on_rows(self, operation) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = operation(state)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._on_rows(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._on_rows(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._on_rows(lambda state: state[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens. MismatchError where that needs a state that is gone."""
        n = -tokens_to_remove
        if n == 0 and not self.record_past:
            return
        if n > 0 and any(state is not None for state in self.recurrent_states.values()):
            raise errors.MismatchError(
                f"crop({tokens_to_remove}): layer {self.number} holds a recurrent state, which cannot go back, expected"
                " crop(0)",
                hint="Keep a copy.deepcopy(cache) to go back to, or call cache.reset(). Nothing was changed.",
            )
        if n > 0 and self._held_from_the_first(n):
            StateLayer.emptied(self)
            return
        for index, state in self.conv_states.items():
            if state is None or not self.has_previous_state[index]:
                continue
            kernel, held = self.conv_kernel_size[index], state.shape[-1]
            if n > 0 and (held < n or held - n < kernel and not self._all_recorded.get(index)):
                raise errors.MismatchError(
                    f"crop({tokens_to_remove}): layer {self.number} holds {held} columns, expected {kernel + n} to go"
                    " back",
                    hint="Call cache.activate_past_recording() before the tokens that may be removed.",
                )
            if self.record_past:
                self.conv_states[index] = state[..., max(held - n - kernel, 0) : held - n].clone()
                self._all_recorded[index] = self._all_recorded.get(index, False) and held - n <= kernel

    def _held_from_the_first(self, tokens: int) -> bool:
        """Whether the convolutions hold every column there was, and no more than `tokens`."""
        states = {index: state for index, state in self.conv_states.items() if state is not None}
        return bool(states) and all(self._all_recorded.get(i) and s.shape[-1] <= tokens for i, s in states.items())

    def emptied(self) -> None:
        """The cache is cropped to nothing: convolutions have no columns then. The past goes on being recorded."""
        recording = self.record_past
        columns = {i: state[..., :0].clone() for i, state in self.conv_states.items() if state is not None}
        StateLayer.reset(self)
        self.record_past = recording
        self.conv_states.update(columns)

    def reset(self) -> None:
        number = self.number
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self.number, self._all_recorded = number, {}


StateLayer.device_class = StateLayer


class WindowStateLayer(StateLayer, WindowLayer):
    """A state and a window in one layer."""

    is_compileable = False

    def __init__(self, sliding_window: int, number_of_states: int = 1, number: int = 0, **kwargs):
        WindowLayer.__init__(self, sliding_window, number)
        StateLayer.__init__(self, number_of_states, number)

    def lazy_initialization(self, *args, **kwargs) -> None:
        (WindowLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)

    def room(self, new: int, column_bytes: int) -> tuple[int, int]:
        held, appending = WindowLayer.room(self, new, column_bytes)
        return held + StateLayer.held_bytes(self), appending

    def held_bytes(self) -> int:
        return StateLayer.held_bytes(self) + WindowLayer.held_bytes(self)

    def activate_past_recording(self) -> None:
        self.record_past = True

    @property
    def is_croppable(self) -> bool:
        return StateLayer.is_croppable.fget(self)

    def _both(self, method: str, *arguments) -> None:
        for part in (StateLayer, WindowLayer):
            getattr(part, method)(self, *arguments)

    def crop(self, tokens_to_remove: int) -> None:
        self._both("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._both("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._both("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._both("batch_select_indices", indices)

    def reset(self) -> None:
        self._both("reset")

    def emptied(self) -> None:
        self._both("emptied")

    def offload(self) -> None:
        """Nothing: the layer stays on the device."""

    def prefetch(self) -> None:
        """Nothing: the layer stays on the device."""


WindowStateLayer.device_class = WindowStateLayer


class OffloadedStateLayer(OffloadedLayer, StateLayer):
    """A state, which stays on the device, and full attention, which is offloaded, in one layer."""

    device_class = StateLayer
    is_compileable = False
    is_croppable = StateLayer.is_croppable

    def __init__(self, ferry: Ferry, index: int, number_of_states: int = 1, number: int = 0, **kwargs):
        StateLayer.__init__(self, number_of_states, number)
        OffloadedLayer.__init__(self, ferry, index)

    def lazy_initialization(self, *args, **kwargs) -> None:
        (OffloadedLayer if args else StateLayer).lazy_initialization(self, *args, **kwargs)


class Indexer:
    """The keys by which an indexed layer chooses what it attends to, [B, S, D]: one head, so small."""

    def __init__(self):
        self.indexer_keys: torch.Tensor | None = None
        self.indexer_position_ids: torch.Tensor | None = None  # [position dims, B, S]
        self.is_indexer_initialized = False

    lazy_initialization_indexer = DynamicIndexedLayer.lazy_initialization_indexer
    update_indexer = DynamicIndexedLayer.update_indexer

    def room(self, new: int, column_bytes: int) -> tuple[int, int]:
        """As WindowLayer.room."""
        held = self.held_bytes()
        tokens = 0 if self.indexer_keys is None else self.indexer_keys.shape[1]
        grown = held + new * held // tokens if tokens else 0
        return grown, grown

    def held_bytes(self) -> int:
        """Memory held now."""
        return bytes_of(self.indexer_keys, self.indexer_position_ids)

    def _on_rows(self, operation) -> None:
        if self.indexer_keys is not None:
            self.indexer_keys = operation(self.indexer_keys)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = operation(self.indexer_position_ids.transpose(0, 1)).transpose(0, 1)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._on_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._on_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._on_rows(lambda tensor: tensor[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :tokens_to_remove]
        if tokens_to_remove and self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :tokens_to_remove]

    def emptied(self) -> None:
        """The cache is cropped to nothing: the keys are a tensor without tokens then."""
        keys = self.indexer_keys
        Indexer.__init__(self)
        self.indexer_keys = keys if keys is None else keys[:, :0].clone()

    def reset(self) -> None:
        Indexer.__init__(self)


class OffloadedIndexedLayer(OffloadedLayer, Indexer):
    """Full attention, which is offloaded, with an indexer (sparse attention), which stays on the device."""

    device_class = Indexer

    def __init__(self, ferry: Ferry, index: int, **kwargs):
        Indexer.__init__(self)
        OffloadedLayer.__init__(self, ferry, index)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indexed = 0 if self.indexer_keys is None else self.indexer_keys.shape[1]
        if indexed:
            self._check_tokens("key_states", key_states, -2, indexed - self.get_seq_length(), "the indexer")
        return super().update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        indexed = 0 if self.indexer_keys is None else self.indexer_keys.shape[1]
        due = self.get_seq_length() - indexed
        self._check_tokens("indexer_key_states", indexer_key_states, 1, due, "the keys")
        return Indexer.update_indexer(self, indexer_key_states)

    def _check_tokens(self, name: str, tensor: torch.Tensor, dimension: int, due: int, other: str) -> None:
        """Of keys and indexer one is updated first; the other must follow with as many tokens, `due`."""
        if due > 0 and isinstance(tensor, torch.Tensor) and tensor.dim() > 2 and tensor.shape[dimension] != due:
            raise errors.MismatchError(
                f"{name} has {tensor.shape[dimension]} tokens, expected {due}, by which {other} of the layer are ahead"
            )
