"""Random operations on OffloadedCache and on DynamicCache side by side: lengths, contents, what update returns.

A failure prints its seed; KVFERRY_SEED=n repeats that one.
"""

import copy
import os
import random

import pytest
import torch
from transformers import DynamicCache

from kvferry import OffloadedCache

LAYERS = 3
SEQUENCES = 120  # for each data plane
SHAPES = [(2, 5), (1, 8), (3, 4)]  # heads and dim of each layer; values are two wider than keys


class Pair:
    """Our cache, the oracle and the calls both get."""

    def __init__(self, store, chance: random.Random):
        self.chance = chance
        self.tensors = torch.Generator().manual_seed(chance.randrange(2**31))
        self.dtype = chance.choice([torch.float32, torch.bfloat16])
        settings = dict(
            block_tokens=chance.choice([1, 2, 4, 8]),
            resident_layers=chance.choice([None, 0, 1, 2, LAYERS]),
            prefetch_depth=chance.choice([None, 0, 1, 2]),
        )
        self.history = [str(settings)]
        self.ours, self.oracle = OffloadedCache(store=store, **settings), DynamicCache()
        self.batch = chance.randint(1, 3)

    def length(self) -> int:
        return self.oracle.get_seq_length()

    def forward(self, tokens: int) -> None:
        self.history.append(f"forward {tokens}")
        for layer, (heads, dim) in enumerate(SHAPES):
            # As models bring them: views of [batch, tokens, heads, dim].
            shape = (self.batch, tokens, heads)
            k = torch.randn(*shape, dim, generator=self.tensors).to(self.dtype).transpose(1, 2)
            v = torch.randn(*shape, dim + 2, generator=self.tensors).to(self.dtype).transpose(1, 2)
            assert self.ours.get_mask_sizes(tokens, layer) == self.oracle.get_mask_sizes(tokens, layer)
            ours, theirs = self.ours.update(k, v, layer), self.oracle.update(k, v, layer)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]), f"update of layer {layer}"

    def crop(self, tokens: int) -> None:
        self.history.append(f"crop {tokens}")
        self.ours.crop(-tokens)
        self.oracle.crop(-tokens)

    def select(self, method: str, argument) -> None:
        self.history.append(f"{method} {argument}")
        getattr(self.ours, method)(argument)
        getattr(self.oracle, method)(argument)
        self.batch = self.oracle.layers[0].keys.shape[0]

    def fork(self) -> None:
        """Goes on with one of the two and lets the other diverge first."""
        self.history.append("fork")
        fork, oracle = copy.deepcopy(self.ours), copy.deepcopy(self.oracle)
        if self.chance.random() < 0.5:
            (self.ours, fork), (self.oracle, oracle) = (fork, self.ours), (oracle, self.oracle)
        batch = self.batch
        self.ours, fork, self.oracle, oracle = fork, self.ours, oracle, self.oracle
        self.step(forks=False)
        self.check()
        self.ours, fork, self.oracle, oracle = fork, self.ours, oracle, self.oracle
        self.batch = batch

    def reset(self) -> None:
        self.history.append("reset")
        self.ours.reset()
        self.oracle.reset()
        self.batch = self.chance.randint(1, 3)

    def step(self, forks: bool = True) -> None:
        chance, batch = self.chance, self.batch
        kind = chance.choices(
            ["forward", "crop", "reorder", "repeat", "select", "fork", "reset"], [10, 3, 2, 1, 1.5, 1.5 * forks, 0.4]
        )[0]
        if self.length() == 0 or kind == "forward":
            self.forward(chance.choice([1, 1, 1, 2, 3, 5, 13]))
        elif kind == "crop":
            self.crop(chance.choice([0, 1, 1, 2, 3, 7, self.length() - 1, self.length(), self.length() + 5]))
        elif kind == "reorder":
            self.select("reorder_cache", torch.tensor([chance.randrange(batch) for _ in range(batch)]))
        elif kind == "repeat" and batch <= 3:
            self.select("batch_repeat_interleave", chance.randint(1, 2))
        elif kind == "select":
            rows = [chance.randrange(batch) for _ in range(chance.randint(1, batch))]
            mask = torch.tensor([row in rows for row in range(batch)])
            self.select("batch_select_indices", chance.choice([torch.tensor(rows), mask]))
        elif kind == "fork":
            self.fork()
        elif kind == "reset":
            self.reset()

    def check(self) -> None:
        for layer in range(LAYERS):
            assert self.ours.get_seq_length(layer) == self.oracle.get_seq_length(layer)
        if self.length() == 0:
            return
        for layer, ((k, v, window), theirs) in enumerate(zip(self.ours, self.oracle.layers, strict=True)):
            assert window is None
            assert torch.equal(k, theirs.keys) and torch.equal(v, theirs.values), f"contents of layer {layer}"


@pytest.mark.timeout(300)
def test_random_operations(store):
    first = int(os.environ.get("KVFERRY_SEED", random.SystemRandom().randrange(10**9)))
    print(f"seeds from {first}")
    for seed in [first] if "KVFERRY_SEED" in os.environ else range(first, first + SEQUENCES):
        pair = Pair(store, random.Random(seed))
        try:
            for _ in range(14):
                pair.step()
                if pair.chance.random() < 0.3:
                    pair.check()
            pair.check()
        except BaseException as error:
            raise AssertionError(f"KVFERRY_SEED={seed}: {'; '.join(pair.history)}") from error
