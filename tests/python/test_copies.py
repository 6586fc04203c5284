"""Caches cropped to nothing, made of others, copied, pickled; and what no cache can be made of."""

import contextlib
import copy
import pickle

import pytest
import torch
from test_layers import kv, new, state
from test_operations import config_of
from transformers import DynamicCache

import kvferry
from kvferry import OffloadedCache


def test_a_cache_cropped_to_nothing_goes_wherever_others_go(store):
    """Copied, pickled, cropped again, read and assigned."""
    cache = new(store, "full_attention", "sliding_attention", "hybrid", "indexed_attention")
    for layer in range(4):
        cache.update(*kv(5, batch=2), layer)
    cache.crop(-5)
    cache.crop(-1)
    for each in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        for layer in each.layers:
            assert layer.keys.shape == (2, 2, 0, 4)
            layer.keys, layer.values = layer.keys, layer.values
        for layer in range(4):
            each.update(*kv(3, batch=1), layer)
        assert each.get_seq_length() == 3


@pytest.mark.parametrize("of", [list, lambda cache: cache], ids=["data", "a cache"])
def test_windows_of_unlike_sizes_are_what_a_cache_begins_with(store, of):
    oracle = DynamicCache([(*kv(1), torch.tensor(3)), (*kv(1), torch.tensor(5)), kv(1)])
    for layer in range(3):
        oracle.update(*kv(8), layer)
    cache = OffloadedCache(of(oracle), store=store)
    for each in (cache, oracle):
        assert each.get_seq_length() == 9
    for layer in range(3):
        for ours, theirs in zip(cache.update(*kv(1), layer), oracle.update(*kv(1), layer)):
            assert torch.equal(ours, theirs)

    def gather(pair):  # as torch's data parallelism does it
        return tuple(None if part[0] is None else torch.cat([torch.atleast_1d(t) for t in part]) for part in zip(*pair))

    joined = OffloadedCache(map(gather, zip(cache, copy.deepcopy(cache))), store=store)
    assert joined.get_seq_length() == joined.get_seq_length(2) == 10


def test_a_window_that_holds_too_little_is_refused(store):
    with pytest.raises(kvferry.MismatchError, match="window of 5 tokens holds 3, expected 4 of 9"):
        OffloadedCache([(*kv(3), 5), kv(9)], store=store)


def test_a_refused_crop_sets_nothing_more_aside(store):
    cache = new(store, "full_attention", "hybrid")
    for layer in range(2):
        if layer == 1:
            state(cache, 1, 1)
        cache.update(*kv(9), layer)
    before = cache.stats().device_bytes
    for _ in range(3):
        with pytest.raises(kvferry.MismatchError):
            cache.crop(-2)
    assert cache.stats().device_bytes == before


@pytest.mark.parametrize("kind", ["sliding_attention", "indexed_attention", "hybrid"])
def test_a_cache_within_its_bound_can_be_loaded_from_its_pickle(store, kind):
    """Loading allocates nothing that the cache did not hold."""
    bound = 60_000
    cache = new(store, kind, "full_attention", device_memory=bound, window=64)
    with contextlib.suppress(kvferry.FullError):
        while True:
            last = pickle.dumps(cache)
            if kind == "hybrid":
                state(cache, 0, 1)
            cache.update(*kv(5), 0)
            if kind == "indexed_attention":
                cache.update_indexer(torch.ones(1, 5, 9), 0)
            cache.update(*kv(5), 1)
            if cache.get_seq_length() > 3000:
                break
    cache = pickle.loads(last)
    assert cache.get_seq_length() > 100 and cache.stats().device_bytes_peak <= bound


def wrapped():
    from torch.testing._internal.two_tensor import TwoTensor

    plain = torch.ones(1, 2, 3, 4)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(1, 2, 3, 4)
    return [TwoTensor(plain, plain), fake, torch.nested.nested_tensor([plain[0]])]


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_tensors_without_memory_of_their_own_are_refused(store, kind):
    """They would be read by an address that is none."""
    cache = new(store, kind)
    for tensor in wrapped():
        with pytest.raises(kvferry.Error, match="expected"):
            cache.update(tensor, tensor, 0)
        assert cache.get_seq_length() == 0
    with pytest.raises(kvferry.Error, match="without memory of its own"):
        torch.func.vmap(lambda k: cache.update(k, k, 0)[0])(torch.ones(2, 1, 2, 3, 4))
    cache.update(torch.nn.Parameter(torch.ones(1, 2, 3, 4)), torch.ones(1, 2, 3, 4), 0)


def test_copies_of_empty_layers_are_layers_too(store):
    """Models append such (Dory's loops)."""
    kinds = ["full_attention"] * 2
    cache, oracle = new(store, *kinds), DynamicCache(config=config_of(kinds, 4))
    for each in (cache, oracle):
        each.layers += [copy.deepcopy(layer) for layer in each.layers]
    for tokens in (5, 1):
        for layer in range(4):
            ours, theirs = (each.update(*kv(tokens, seed=layer), layer) for each in (cache, oracle))
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert cache.stats().blocks_put > 0
    with pytest.raises(NotImplementedError, match="holds 6 tokens"):
        copy.deepcopy(cache.layers[0])
    assert [layer.get_seq_length() for layer in pickle.loads(pickle.dumps(cache)).layers] == [6] * 4
