"""What every use of an OffloadedCache by a forward pass begins with: it is counted, and room is made for it."""

import contextlib
from collections.abc import Iterator

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer

from . import errors
from .copies import contents_mark, held_bytes, snapshot
from .device_layers import WindowLayer, bytes_of_column
from .layer import Ferry, OffloadedLayer
from .layer_kinds import device_class, takes_part
from .passes import Passes, Way


class PassMethods(DynamicCache):
    """Forward passes are counted, and those that break off noticed. What is held on the device beside the offloaded
    layers is set aside from device_memory before it is allocated."""

    _ferry: Ferry
    _learning: bool  # layers appear as they are updated

    def _begin(self) -> None:
        """What is known of the forward passes of a sequence: nothing yet."""
        self._passes = Passes()
        self._planned = 0  # tokens that there is room for beside the offloaded layers
        self._aside = 0  # bytes of device_memory set aside for what is beside them
        self._assumed = 0  # bytes of a token of all rows, by which the pass was planned
        self._prompt_starts = False  # generate() was called and has not looked at the prompt yet

    @contextlib.contextmanager
    def _using(
        self,
        layer_idx: int,
        way: Way,
        key_states: torch.Tensor | None = None,
        columns: torch.Tensor | None = None,
        state: torch.Tensor | None = None,
    ) -> Iterator[None]:
        """Notes that a forward pass uses a layer, to which `key_states` or the `columns` of a convolution come, or
        whose `state` is read. Raises, before anything changes, if an earlier pass broke off. If this one does, the
        cache is torn, or empty as it was where there was no room for it, or as it was where nothing had changed. An
        interrupt may have come at any point, so it tears in any case."""
        self._ferry.check()
        if not takes_part(self.layers[layer_idx]):
            yield
            return

        def in_step() -> bool:
            return has_four_dimensions(key_states) and key_states.shape[-2] == max(self._lengths(), default=0)

        if problem := self._passes.problem(layer_idx, way, in_step):
            error = errors.MismatchError(f"OffloadedCache: an earlier forward pass was interrupted: {problem}")
            self._ferry.tear(error)
            raise error
        layer = self.layers[layer_idx]
        before = None
        if self._passes.untouched(layer_idx, way):
            before, held, restore = self._passes.copy(), contents_mark(layer), snapshot(layer)
        try:
            self._passes.use(layer_idx, way, 1 if columns is None else columns.shape[-1], state)
            yield
        except Exception as error:
            if before is not None:
                restore()
                if contents_mark(layer) == held:
                    self._passes = before
                    raise
            first = self._passes.number == 1
            if first and isinstance(error, errors.FullError) and self._beside():
                self._clear("forget")
            elif self._ferry.torn is None:
                self._ferry.tear(error if isinstance(error, errors.Error) else _interrupted(layer_idx, error))
            raise
        except BaseException as interrupt:
            self._ferry.tear(_interrupted(layer_idx, interrupt))
            raise

    def _settle(self) -> None:
        """Before the contents are copied or come to be others: they must be those of whole passes."""
        self._ferry.check()
        if problem := self._passes.unfinished():
            raise errors.MismatchError(
                f"OffloadedCache: in the middle of a forward pass, or one was interrupted: {problem}",
                hint="Between forward passes all is well; after one that was interrupted call cache.reset().",
            )
        self._passes.settle()

    def _clear(self, method: str) -> None:
        """Empties all layers, by that method of them."""
        self._ferry.core.check()
        # If this is interrupted some are empty and others are not: a reset that comes through mends it.
        self._ferry.tear(errors.MismatchError("OffloadedCache: emptying the cache was interrupted"))
        for layer in self.layers:
            getattr(layer, method, layer.reset)()
        self._begin()
        self._ferry.reset()

    def _beside(self) -> bool:
        """Whether there are layers that the core knows nothing of."""
        return any(device_class(layer) not in (None, DummyLayer) for layer in self.layers)

    def _lengths(self) -> set[int]:
        """Tokens that our layers have seen, those that are in use."""
        kinds = (OffloadedLayer, WindowLayer)
        return {layer.get_seq_length() for layer in self.layers if isinstance(layer, kinds)} - {0}

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
                more = sum(layer.room(new, own)) - sum(layer.room(new, self._assumed))
                self._set_aside(self._aside + more, after)
            return
        if not self._beside():
            self._planned = after
            return  # the core plans for itself
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

    def _add_aside(self, new: int) -> None:
        self._set_aside(self._aside + new, self._planned)


def _interrupted(layer_idx: int, error: BaseException) -> errors.MismatchError:
    return errors.MismatchError(f"OffloadedCache: layer {layer_idx} was interrupted by {type(error).__name__}: {error}")


def has_four_dimensions(states: object) -> bool:
    """Whether these can be keys or values."""
    return isinstance(states, torch.Tensor) and not states.is_nested and states.dim() == 4
