"""What goes over the wire: rows are reordered, selected, forked without a byte of KV; a crop reads one block."""

import copy

import pytest
import torch

from kvferry import OffloadedCache

LAYERS, T = 3, 4


def forward(cache, tokens, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for layer in range(LAYERS):
        k, v = (torch.randn(batch, 2, tokens, 8, generator=generator) for _ in range(2))
        cache.update(k, v, layer)


def filled(store, tokens, batch=3, resident_layers=0):
    cache = OffloadedCache(store=store, block_tokens=T, resident_layers=resident_layers, prefetch_depth=0)
    forward(cache, 1, batch)  # learns the layers: nothing leaves before they are known
    forward(cache, tokens - 1, batch)
    cache.flush()
    return cache


def moved(store, call):
    """(blocks put, blocks got) of the whole connection while `call` runs."""
    before = store.stats()
    call()
    after = store.stats()
    return after.blocks_put - before.blocks_put, after.blocks_got - before.blocks_got


@pytest.mark.parametrize(
    "operation",
    [
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.batch_repeat_interleave(3),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: copy.deepcopy(cache),
        lambda cache: copy.copy(cache),
        lambda cache: cache.crop(-3),
        lambda cache: cache.reset(),
    ],
    ids=["reorder", "repeat", "select", "deepcopy", "copy", "crop", "reset"],
)
@pytest.mark.parametrize("resident_layers", [0, 1, LAYERS])
def test_no_payload_byte_is_sent(store, operation, resident_layers):
    cache = filled(store, 11, resident_layers=resident_layers)
    assert cache.stats().blocks_put == 2 * 3 * LAYERS
    kept = []
    assert moved(store, lambda: kept.append(operation(cache))) == (0, 0)


def test_every_full_block_is_put_once(store):
    cache = filled(store, 3)
    assert moved(store, lambda: (forward(cache, 1), cache.flush()))[0] == 3 * LAYERS
    for _ in range(3):
        assert moved(store, lambda: (forward(cache, 1), cache.flush()))[0] == 0
    assert moved(store, lambda: (forward(cache, 1), cache.flush()))[0] == 3 * LAYERS
    # Blocks of K and V, 2 heads, 8 wide, float32.
    assert cache.stats().stored_bytes == 2 * 3 * LAYERS * 2 * 2 * T * 8 * 4


def test_crop_over_an_edge_reads_one_partial_block_a_row_and_layer(store):
    """11 tokens are two blocks and three; after crop(-5) one block and half of another, which returns as the tail."""
    cache = filled(store, 11)
    held = [(k.clone(), v.clone()) for k, v, _ in cache]
    assert moved(store, lambda: cache.crop(-5)) == (0, 0)
    put, got = moved(store, lambda: forward(cache, 1, seed=1))
    assert put == 0
    assert got == 3 * LAYERS * (1 + 1)  # the whole block that is left, and the partial one
    assert moved(store, lambda: forward(cache, 1, seed=2))[1] == 3 * LAYERS * (1 + 0)
    for (k, v, _), (old_k, old_v) in zip(cache, held, strict=True):
        assert torch.equal(k[:, :, :6], old_k[:, :, :6]) and torch.equal(v[:, :, :6], old_v[:, :, :6])


def test_crop_within_the_tail_reads_nothing_of_it(store):
    cache = filled(store, 11)
    cache.crop(-2)
    assert moved(store, lambda: forward(cache, 1))[1] == 3 * LAYERS * 2


def test_beams_share_the_blocks_of_their_history(store):
    cache = filled(store, 9, batch=1)
    cache.batch_repeat_interleave(4)
    before = cache.stats().stored_bytes
    assert moved(store, lambda: forward(cache, 1, batch=4))[1] == 2 * LAYERS
    cache.reorder_cache(torch.tensor([3, 3, 1, 0]))
    assert moved(store, lambda: forward(cache, 1, batch=4, seed=1))[1] == 2 * LAYERS
    assert cache.stats().stored_bytes == before


@pytest.mark.parametrize("first, second", [("keys", "values"), ("values", "keys")])
def test_keys_and_values_are_read_together(store, first, second):
    layer = filled(store, 11).layers[1]
    held = []
    assert moved(store, lambda: held.extend([getattr(layer, first), getattr(layer, second)]))[1] == 3 * 2
    # Both are given away now, or the one is gone: nothing of the layer is kept.
    assert moved(store, lambda: getattr(layer, second))[1] == 3 * 2
    assert moved(store, lambda: getattr(layer, first))[1] == 3 * 2


def test_resident_layers_read_nothing(store):
    cache = filled(store, 11, resident_layers=2)
    assert moved(store, lambda: forward(cache, 1))[1] == 3 * 2  # the third layer's two blocks a row
