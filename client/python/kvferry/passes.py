"""Forward passes as a cache sees them, and how one that broke off is told from one that did not."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch


class Way(NamedTuple):
    """A way to use a layer."""

    name: str
    number: int = 0  # of the state
    step: int = 1  # a state is read (0), and perhaps changed in place, or updated (1), or both one after the other

    @property
    def part(self) -> str:
        """The part of the layer that is used so."""
        return f"{self.name}[{self.number}]"


class Read:
    """A state that the model has read, and may change in place. torch counts the changes, but not of tensors that were
    made under inference_mode."""

    def __init__(self, part: str, state: torch.Tensor):
        self._state, self._version = weakref.ref(state), _version(state)
        self.kind = part, state.shape, state.device  # what other layers have too

    def changed(self) -> bool | None:
        """Whether it was; None if that cannot be told."""
        state = self._state()
        return None if state is None or self._version is None else _version(state) != self._version


def _version(state: torch.Tensor) -> int | None:
    return None if state.is_inference() else state._version


@dataclass(frozen=True)
class Habits:
    """What passes that came through have done with a layer: the parts used in any way, those updated, and those
    changed in place without an update."""

    used: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()


@dataclass
class Passes:
    """Which layers each forward pass of a sequence has used.

    Whatever breaks a pass off between two layers (an error of ours, an exception in the model, an interrupt), the
    layers before have moved on and cannot go back. If the same tokens came once more, what follows would be wrong
    without a word. Lengths tell it of layers that have one; a recurrent state has none, and models change it in place.

    So passes are counted. A pass uses each layer once, in an order of the model's own, and each part of a layer once: a
    state may be read before it is updated. What comes again begins the next pass. A layer that takes part in passes
    takes part in all of them, and so does each of its parts. The first pass may be a cache filled by hand.

    What breaks a pass off after its last layer has moved on cannot be told from a pass that came through.
    """

    number: int = 0  # of the pass that began last
    layer: int = -1  # that it used last
    masked: bool = False  # the pass made a mask before it used a layer
    mask_made: bool = False  # one was made since, for a pass to come or a layer to come
    looked: bool = False  # the model made a mask or asked for a length since the last use
    ways: dict[int, frozenset[Way]] = field(default_factory=dict)  # of the pass, by layer
    reads: dict[int, dict[str, Read]] = field(default_factory=dict)  # and by part
    several: frozenset[int] = frozenset()  # got more than one token, which no model adds to a state in place
    habits: dict[int, Habits] = field(default_factory=dict)  # by layer: of the passes that came through

    def look(self, mask: bool) -> None:
        """The model asked for the size of a mask, or else for a length."""
        self.looked = True
        self.mask_made = self.mask_made or mask

    def again(self, layer: int, way: Way) -> bool:
        """Whether a pass that made a mask does the same twice with its first layer, and nothing between."""
        return self.ways == {layer: {way}} and self.masked and not self.looked

    def problem(self, layer: int, way: Way, in_step: Callable[[], bool]) -> str | None:
        """What shows that an earlier pass broke off, if `layer` is used now. `in_step` tells whether it will have as
        many tokens as the others."""
        if self._begins(layer, way):
            return self.unfinished()
        if self.number <= 1:
            return None
        known = self.habits.get(layer)
        if known is None and layer not in self.ways:
            return None if in_step() else f"layer {layer} comes in late (to fill a layer by hand, give all its tokens)"
        late = known is not None and known.used and way.part not in known.used
        return f"{way.part} of layer {layer} comes in late" if late else None

    def unfinished(self) -> str | None:
        """What shows that the pass that began last has not come through."""
        if left_out := self.habits.keys() - self.ways.keys():
            return f"layer {min(left_out)} was left out of the last one"
        moved = self._moved()
        for layer in self.ways:
            if missing := self._missing(layer, moved):
                return f"{min(missing)} of layer {layer} was left out of the last one"
        return None

    def settle(self) -> None:
        """The pass that began last has come through: states may be others from here on. REQUIRES: not unfinished()."""
        self._learn()
        self.ways, self.reads, self.several = dict.fromkeys(self.ways, frozenset()), {}, frozenset()

    def untouched(self, layer: int, way: Way) -> bool:
        """Whether the pass that `layer` is used in, if it is used now, has changed nothing so far."""
        if self._begins(layer, way):
            return True
        only_read = all(was.step == 0 for ways in self.ways.values() for was in ways)
        return only_read and all(read.changed() is False for reads in self.reads.values() for read in reads.values())

    def copy(self) -> "Passes":
        """What to go back to if a use did not happen."""
        return replace(self, ways=dict(self.ways), reads={layer: dict(reads) for layer, reads in self.reads.items()})

    def use(self, layer: int, way: Way, tokens: int = 1, state: torch.Tensor | None = None) -> None:
        """Notes a use, by which `tokens` come or `state` is read. REQUIRES: there is no problem()."""
        if self._begins(layer, way):
            self._learn()
            self.number += 1
            self.ways, self.reads, self.several = {}, {}, frozenset()
            self.masked, self.mask_made = self.mask_made, False
        self.layer, self.looked = layer, False
        self.ways[layer] = self.ways.get(layer, frozenset()) | {way}
        if tokens > 1 and layer not in self.several:
            self.several = self.several | {layer}
        if state is not None:
            self.reads.setdefault(layer, {})[way.part] = Read(way.part, state)

    def fill(self, layers: list[int]) -> None:
        """The contents of `layers` came otherwise than by a forward pass, and count as one."""
        vars(self).update(vars(Passes(number=int(bool(layers)), ways=dict.fromkeys(layers, frozenset()))))

    def _begins(self, layer: int, way: Way) -> bool:
        ways = self.ways.get(layer)
        if not ways:
            return self.number == 0 or ways is not None
        same = (was for was in ways if was.part == way.part)
        return any(layer != self.layer or was.step >= way.step for was in same)

    def _only_read(self, layer: int) -> dict[str, Read]:
        """The parts of the layer that the pass has read and not updated."""
        updated = self._updated(layer)
        return {part: read for part, read in self.reads.get(layer, {}).items() if part not in updated}

    def _updated(self, layer: int) -> frozenset[str]:
        return frozenset(was.part for was in self.ways[layer] if was.step == 1)

    def _moved(self) -> set[tuple]:
        """The kinds of states that the pass has updated, or changed in place, in some layer."""
        reads = [(layer, part, read) for layer, parts in self.reads.items() for part, read in parts.items()]
        return {read.kind for layer, part, read in reads if part in self._updated(layer) or read.changed()}

    def _missing(self, layer: int, moved: set[tuple]) -> frozenset[str]:
        """The parts of the layer that the pass has not come to. `moved`: what it has done in other layers."""
        before = self.habits.get(layer, Habits())
        missing = before.used - {was.part for was in self.ways[layer]} if self.ways[layer] else set()
        only_read = self._only_read(layer)
        unchanged = {
            part
            for part, read in only_read.items()
            if (part in before.in_place or read.kind in moved) and read.changed() is False
        }
        several = only_read.keys() & before.updated if layer in self.several else set()
        return frozenset(missing | unchanged | several)

    def _learn(self) -> None:
        self.habits = self.habits | {layer: self._habits(layer) for layer in self.ways}

    def _habits(self, layer: int) -> Habits:
        """Of the layer, if the pass has come through it."""
        before = self.habits.get(layer, Habits())
        in_place = {part for part, read in self._only_read(layer).items() if read.changed()}
        return Habits(
            before.used | {was.part for was in self.ways[layer]},
            before.updated | self._updated(layer),
            before.in_place | in_place,
        )
