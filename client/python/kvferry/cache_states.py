"""The methods of OffloadedCache that models of linear and of indexed attention call."""

import torch
from transformers.cache_utils import LinearAttentionLayer

from . import errors
from .cache_pass import PassMethods
from .device_layers import check_indexer_keys, check_state
from .passes import Way
from .sizes import parse_integer


class StateMethods(PassMethods):
    """Updates of what stays on the device beside keys and values. Room for it is set aside before."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As transformers': the state, which the model may change in place, so that this counts as a forward pass's use
        of the layer. To look at a state between passes see `cache.layers[layer_idx].conv_states`."""
        return self._get_state("conv_states", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """As get_conv_state."""
        return self._get_state("recurrent_states", layer_idx, state_idx)

    def _get_state(self, name: str, layer_idx: int, state_idx: int) -> torch.Tensor | None:
        layer = self._states(layer_idx, state_idx)
        if not layer.has_previous_state[state_idx]:
            return None
        state = getattr(layer, name)[state_idx]
        with self._using(layer_idx, Way(name, state_idx, 0), state=state):
            return state

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs
    ) -> torch.Tensor:
        """As transformers': appends columns to a state of layer `layer_idx`, returns all that were kept and the new.
        What is kept has the dtype of the first ones."""
        kernel = parse_integer(kwargs.get("conv_kernel_size"), "conv_kernel_size", optional=True)
        layer = self._states(layer_idx, state_idx)
        if kernel is not None and kernel < 1:
            raise errors.MismatchError(f"conv_kernel_size of layer {layer_idx} is {kernel}, expected 1 or more")
        held = layer.conv_states[state_idx]
        check_state(layer_idx, conv_states, "conv_states", held, self._rows())
        with self._using(layer_idx, Way("conv_states", state_idx), columns=conv_states):
            self._make_room_for_state(layer, conv_states, held, kernel)
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs
    ) -> torch.Tensor:
        """As transformers': replaces a state of layer `layer_idx` and returns it, in the dtype of the first one."""
        layer = self._states(layer_idx, state_idx)
        held = layer.recurrent_states[state_idx]
        check_state(layer_idx, recurrent_states, "recurrent_states", held, self._rows())
        with self._using(layer_idx, Way("recurrent_states", state_idx)):
            self._make_room_for_state(layer, recurrent_states, held, None)
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As transformers': appends [batch, tokens, dim] to the indexer's keys of layer `layer_idx`, returns all."""
        layer = self.layers[self._checked_index(layer_idx)]
        held = layer.indexer_keys if getattr(layer, "is_indexer_initialized", False) else None
        check_indexer_keys(indexer_key_states, held, layer_idx, self._rows())
        with self._using(layer_idx, Way("indexer")):
            if held is None:  # not foreseen by the plan
                self._add_aside(indexer_key_states.numel() * indexer_key_states.element_size())
            return super().update_indexer(indexer_key_states, layer_idx)

    def _states(self, layer_idx: int, state_idx: int) -> LinearAttentionLayer:
        """The layer, if it has such a state."""
        if self._learning:
            raise ValueError("OffloadedCache: states need a config: OffloadedCache(config=model.config)")
        layer = self.layers[self._checked_index(layer_idx)]
        if not isinstance(layer, LinearAttentionLayer):
            kind = type(layer).__name__
            raise ValueError(f"layer_idx is {layer_idx}, a {kind}, expected a layer of linear attention")
        if state_idx not in layer.has_previous_state:
            raise errors.LayerIndexError(f"state_idx is {state_idx}, expected one of {list(layer.has_previous_state)}")
        return layer

    def _make_room_for_state(
        self, layer: LinearAttentionLayer, tensor: torch.Tensor, held: torch.Tensor | None, columns: int | None
    ) -> None:
        """Before `tensor`, of which `columns` will be kept (None: all), is appended to the state `held`."""
        columns = columns if columns and not layer.record_past else tensor.shape[-1]
        new = tensor.numel() // tensor.shape[-1] * columns * tensor.element_size()
        if held is None or held.numel() == 0:  # not foreseen by the plan
            self._add_aside(new)
        elif layer.record_past:
            self._add_aside(max(0, self._held_beside() + held.nbytes + new - self._aside))
