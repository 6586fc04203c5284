"""The text with OffloadedCache is the text with DynamicCache: token ids identical, logits equal bit for bit."""

import matrix
import pytest
import torch
from matrix import check_traffic, compare, stock
from models import FULL_ATTENTION, LAYERS, WAYS, tiny

from kvferry import OffloadedCache

# (block_tokens, resident_layers). No resident_layers: nothing leaves the device.
SETTINGS = [(tokens, resident) for tokens in (4, 16, 64) for resident in (0, 1, LAYERS, None)]
SOME_SETTINGS = [(16, LAYERS), (64, 0), (16, None)]  # small blocks: test_matrix.py


def _settings(name, dtype, some):
    """All of them for one model, some for the others: the suite has to end within minutes."""
    return SETTINGS if (name, dtype) == ("llama", torch.float32) else some


class BoundedCache(OffloadedCache):
    """Asserts after every update that no more layers than allowed have full blocks on the device."""

    updates = 0

    def update(self, *args, **kwargs):
        out = super().update(*args, **kwargs)
        self.updates += 1
        stats = self.stats()
        resident = self._options["resident_layers"]
        if resident is not None and not stats.refused:
            assert stats.layers_on_device <= min(resident + stats.prefetch_depth + 1, LAYERS)
        return out


def check(name, dtype, way, store, block_tokens, resident_layers, **options):
    options |= dict(store=store, block_tokens=block_tokens, resident_layers=resident_layers)
    cache = matrix.check(name, dtype, way, BoundedCache, **options)
    assert cache.updates, options
    return cache


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_embedded(embedded_store, name, dtype, way):
    for block_tokens, resident_layers in _settings(name, dtype, SOME_SETTINGS):
        cache = check(name, dtype, way, embedded_store, block_tokens, resident_layers)
        check_traffic(cache, resident_layers)
        if resident_layers == 1:
            assert cache.stats().blocks_got > 0, block_tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_grpc(grpc_store, name, dtype, way):
    for block_tokens, resident_layers in _settings(name, dtype, [(64, 1)]):
        check_traffic(check(name, dtype, way, grpc_store, block_tokens, resident_layers), resident_layers)


@pytest.mark.parametrize("way", WAYS)
def test_learns_the_layers_without_a_config(store, way):
    model = tiny("llama")
    cache = OffloadedCache(store=store, block_tokens=4, resident_layers=1)
    compare("llama", WAYS[way](model, cache), stock("llama", torch.float32, way))
    assert len(cache) == LAYERS and cache.stats().blocks_put > 0


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_prefetch_depth(store, depth):
    for way in ("greedy", "beams", "lookup"):
        cache = check("llama", torch.float32, way, store, 4, 0, prefetch_depth=depth)
        assert cache.stats().prefetch_depth == depth


@pytest.mark.parametrize("way", WAYS)
def test_device_memory_is_a_hard_bound(store, way):
    """Between what two layers need and what all four do, so some leave; the peak stays below."""
    model = tiny("llama")
    free = BoundedCache(config=model.config, store=store, block_tokens=4)
    WAYS[way](model, free)
    bound = free.stats().device_bytes_peak * 3 // 4
    cache = check("llama", torch.float32, way, store, 4, None, device_memory=bound)
    stats = cache.stats()
    assert stats.device_bytes_peak <= bound
    assert stats.blocks_put > 0 and stats.resident_layers < LAYERS


def test_default_store_is_asked_for_when_the_first_block_leaves(monkeypatch):
    """Nothing leaves an unbounded device, so no store is made."""
    asked = []
    import kvferry.store as stores

    default = stores.default_store
    monkeypatch.setattr(stores, "default_store", lambda: asked.append(1) or default())
    check("llama", torch.float32, "greedy", None, 4, None)
    assert not asked
    check("llama", torch.float32, "greedy", None, 4, 0)
    assert asked
