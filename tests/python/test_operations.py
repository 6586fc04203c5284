"""Random operations on OffloadedCache and on DynamicCache side by side: lengths, contents, what update returns.

A failure prints its seed; KVFERRY_SEED=n repeats that one, KVFERRY_SEQUENCES=n runs so many for each data plane.
"""

import copy
import os
import pickle
import random
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

import kvferry
from kvferry import OffloadedCache

SEQUENCES = int(os.environ.get("KVFERRY_SEQUENCES", 120))  # for each data plane
SHAPES = [(2, 5), (1, 8), (3, 4)]  # heads and dim of each layer; values are two wider than keys
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
STATES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
KERNEL = 3


def config_of(kinds: list[str], window: int) -> LlamaConfig:
    config = LlamaConfig(num_hidden_layers=len(kinds))
    config.layer_types = kinds
    config.sliding_window, config.attention_chunk_size = window, window + 1
    return config


class Pair:
    """Our cache, the oracle and the calls both get."""

    def __init__(self, store, chance: random.Random):
        self.chance = chance
        self.tensors = torch.Generator().manual_seed(chance.randrange(2**31))
        self.dtype = chance.choice([torch.float32, torch.bfloat16])
        settings = dict(
            block_tokens=chance.choice([1, 2, 4, 8]),
            resident_layers=chance.choice([None, 0, 1, 2, len(SHAPES)]),
            prefetch_depth=chance.choice([None, 0, 1, 2]),
        )
        # Half of them as every model has it; the others mixed, also with what no model mixes.
        self.kinds = ["full_attention"] * len(SHAPES)
        self.config = None
        if chance.random() < 0.6:
            kinds = ATTENTION if chance.random() < 0.5 else ATTENTION + STATES
            self.kinds = ["full_attention"] + [chance.choice(kinds) for _ in SHAPES[1:]]
            chance.shuffle(self.kinds)
            self.config = config_of(self.kinds, chance.choice([2, 3, 5, 9, 40]))
        self.history = [f"{settings} {self.kinds} window={getattr(self.config, 'sliding_window', None)}"]
        self.ours = OffloadedCache(store=store, config=self.config, **settings)
        self.oracle = DynamicCache(config=self.config)
        self.batch = chance.randint(1, 3)
        self.recording = False

    def length(self) -> int:
        return max((layer.get_seq_length() for layer in self.attention(self.oracle)), default=0)

    def attention(self, cache) -> list:
        return [layer for layer, kind in zip(cache.layers, self.kinds) if kind not in ("linear_attention", "conv")]

    def forward(self, tokens: int) -> None:
        self.history.append(f"forward {tokens}")
        for layer, (heads, dim) in enumerate(SHAPES):
            kind = self.kinds[layer]
            if kind in STATES:
                self.state(layer, tokens, heads, dim)
            if kind in ("linear_attention", "conv"):
                continue
            # As models bring them: views of [batch, tokens, heads, dim].
            shape = (self.batch, tokens, heads)
            k = torch.randn(*shape, dim, generator=self.tensors).to(self.dtype).transpose(1, 2)
            v = torch.randn(*shape, dim + 2, generator=self.tensors).to(self.dtype).transpose(1, 2)
            assert self.ours.get_mask_sizes(tokens, layer) == self.oracle.get_mask_sizes(tokens, layer)
            ours, theirs = self.ours.update(k, v, layer), self.oracle.update(k, v, layer)
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]), f"update of layer {layer}"
            if kind == "indexed_attention":
                index = torch.randn(self.batch, tokens, dim, generator=self.tensors)
                assert torch.equal(self.ours.update_indexer(index, layer), self.oracle.update_indexer(index, layer))

    def state(self, layer: int, tokens: int, heads: int, dim: int) -> None:
        if self.kinds[layer] != "conv":
            recurrent = torch.randn(self.batch, heads, dim, dim, generator=self.tensors)
            ours, theirs = (c.update_recurrent_state(recurrent, layer) for c in (self.ours, self.oracle))
            assert torch.equal(ours, theirs)
        columns = torch.randn(self.batch, heads, tokens, generator=self.tensors).to(self.dtype)
        ours, theirs = (c.update_conv_state(columns, layer, conv_kernel_size=KERNEL) for c in (self.ours, self.oracle))
        assert torch.equal(ours, theirs)

    def record(self) -> None:
        self.history.append("record")
        self.recording = True
        self.ours.activate_past_recording()
        self.oracle.activate_past_recording()

    def crop(self, tokens: int) -> None:
        """Where transformers' layers refuse or would be wrong, ours refuse, and nothing has changed."""
        self.history.append(f"crop {tokens}")
        if tokens >= self.length():  # transformers' windows and states cannot be emptied this way
            self.ours.crop(-tokens)
            self.new_oracle()
            return
        with self.unchanged_if_refused():
            self.ours.crop(-tokens)
            if any(kind == "conv" or kind in STATES for kind in self.kinds) and not self.recording:
                assert tokens == 0
                return
            if tokens == 0 and not self.recording:  # raised by transformers past the window
                return
            self.oracle.crop(-tokens)

    @contextmanager
    def unchanged_if_refused(self):
        try:
            yield
        except kvferry.MismatchError as error:
            assert "crop" in str(error)
            self.history.append("refused")
            assert any(kind != "full_attention" for kind in self.kinds)
            self.check()

    def new_oracle(self) -> None:
        """What reset stands for: transformers' states keep the old batch."""
        self.oracle = DynamicCache(config=self.config)
        if self.recording:
            self.ours.reset()  # an emptied cache still records; a new one does not
            self.recording = False

    def select(self, method: str, argument) -> None:
        self.history.append(f"{method} {argument}")
        getattr(self.ours, method)(argument)
        for layer in self.oracle.layers:
            if hasattr(layer, method):
                getattr(layer, method)(argument)
            if isinstance(layer, LinearAttentionLayer) and method != "reorder_cache":  # which transformers' have not
                for states in (layer.conv_states, layer.recurrent_states):
                    for index, state in states.items():
                        if state is not None and method == "batch_repeat_interleave":
                            states[index] = state.repeat_interleave(argument, dim=0)
                        elif state is not None:
                            states[index] = state[argument]
        self.batch = self.attention(self.oracle)[0].keys.shape[0]

    def fork(self) -> None:
        """Goes on with one of the two and lets the other diverge first."""
        self.history.append("fork")
        fork, oracle = copy.deepcopy(self.ours), copy.deepcopy(self.oracle)
        if self.chance.random() < 0.5:
            (self.ours, fork), (self.oracle, oracle) = (fork, self.ours), (oracle, self.oracle)
        batch, recording = self.batch, self.recording
        self.ours, fork, self.oracle, oracle = fork, self.ours, oracle, self.oracle
        self.step(forks=False)
        self.check()
        self.ours, fork, self.oracle, oracle = fork, self.ours, oracle, self.oracle
        self.batch, self.recording = batch, recording

    def save(self) -> None:
        self.history.append("save and load")
        self.ours, self.oracle = (pickle.loads(pickle.dumps(cache)) for cache in (self.ours, self.oracle))

    def reset(self) -> None:
        self.history.append("reset")
        self.ours.reset()
        self.recording = False
        self.new_oracle()
        self.batch = self.chance.randint(1, 3)

    def step(self, forks: bool = True) -> None:
        chance, batch = self.chance, self.batch
        kind = chance.choices(
            ["forward", "crop", "reorder", "repeat", "select", "fork", "reset", "save", "record"],
            [10, 3, 2, 1, 1.5, 1.5 * forks, 0.4, 0.3, 0.5],
        )[0]
        empty = self.length() == 0  # of which transformers' cannot select rows
        if kind == "forward" or (empty and kind in ("reorder", "repeat", "select")):
            self.forward(chance.choice([1, 1, 1, 2, 3, 5, 13]))
        elif kind == "crop":
            self.crop(chance.choice([0, 1, 1, 2, 3, 7, max(self.length() - 1, 0), self.length(), self.length() + 5]))
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
        elif kind == "save":
            self.save()
        elif kind == "record" and self.config is not None:
            self.record()

    def check(self) -> None:
        if self.length() == 0:
            return
        entries = list(self.ours)
        for number, (ours, theirs) in enumerate(zip(self.ours.layers, self.oracle.layers, strict=True)):
            keys, values, window = entries[number]
            if self.kinds[number] not in ("linear_attention", "conv"):
                assert ours.get_seq_length() == theirs.get_seq_length()
                assert (window is not None) == isinstance(theirs, DynamicSlidingWindowLayer)
                assert torch.equal(keys, theirs.keys) and torch.equal(values, theirs.values), f"layer {number}"
            for name in ("conv_states", "recurrent_states"):
                for index, state in getattr(theirs, name, {}).items():
                    held = getattr(ours, name)[index]
                    assert (held is None) == (state is None) and (held is None or torch.equal(held, state)), name
            if self.kinds[number] == "indexed_attention":
                assert torch.equal(ours.indexer_keys, theirs.indexer_keys)


@pytest.mark.timeout(7200 if "KVFERRY_SEQUENCES" in os.environ else 300)
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
