"""The face of OffloadedCache: arguments, attributes and figures."""

import copy
import threading

import pytest
import torch
from models import LAYERS, greedy, prompt, tiny
from transformers import DynamicCache, GenerationConfig, MistralConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvferry
from kvferry import OffloadedCache
from kvferry.layer import OffloadedLayer
from kvferry.sizes import format_size, parse_size


def test_a_config_goes_by_name():
    config = tiny("llama").config
    with pytest.raises(TypeError, match=r"config=model\.config"):
        OffloadedCache(config)
    with pytest.raises(TypeError):
        OffloadedCache(tiny("llama"))
    assert len(OffloadedCache(config=config)) == LAYERS


@pytest.mark.parametrize(
    "options",
    [dict(block_tokens=3), dict(block_tokens=0), dict(resident_layers=-1), dict(prefetch_depth=-1),
     dict(on_full="later"), dict(device_memory="many"), dict(device_memory=-1)],
    ids=str,
)  # fmt: skip
def test_a_wrong_option_is_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=name) as caught:
        OffloadedCache(**options)
    assert f"{name} is {value!r}, expected" in str(caught.value)


def test_wrong_tensors_change_nothing(store):
    cache = OffloadedCache(store=store, block_tokens=2, resident_layers=0)
    good = torch.ones(2, 2, 5, 4)
    cache.update(good, good, 0)
    for bad in (good[0], good.bool(), good.half(), good[:1], good[:, :1], good[..., :3], good[:, :, :0]):
        with pytest.raises(kvferry.MismatchError, match="expected"):
            cache.update(bad, bad, 0)
    with pytest.raises(kvferry.MismatchError):
        cache.update(good, good[:, :, :2], 0)
    with pytest.raises(TypeError, match="torch.Tensor"):
        cache.update(good.numpy(), good, 0)
    assert cache.get_seq_length() == 5 and torch.equal(cache.layers[0].keys, good)


def test_attributes_that_generate_and_models_use(store):
    cache = OffloadedCache(config=tiny("llama").config, store=store)
    assert isinstance(cache, DynamicCache)
    assert not cache.is_compileable and cache.is_croppable and not cache.is_initialized
    assert cache.is_sliding == cache.is_linear == cache.is_dummy == [False] * LAYERS
    assert cache.get_max_length() == -1 and OffloadedCache().get_max_length() == -1
    assert cache.get_mask_sizes(7, 0) == (7, 0) and cache.get_query_offset() == 0
    assert not hasattr(cache, "to") and not hasattr(cache, "dtype")
    cache.activate_past_recording()
    cache._is_user_defined = True
    greedy(tiny("llama"), cache)
    assert cache.is_initialized and cache.get_mask_sizes(2, 0)[0] == cache.get_seq_length() + 2
    assert type(cache.get_seq_length()) is int


def test_tokens_appended_by_hand_after_a_models_pass(store):
    """A pass that makes no mask is no sign of one that broke off."""
    model = tiny("llama")
    caches = [OffloadedCache(config=model.config, store=store, block_tokens=4, resident_layers=1),
              DynamicCache(config=model.config)]  # fmt: skip
    for cache in caches:
        with torch.no_grad():
            model(prompt(9), cache=cache)
        for layer in range(LAYERS):
            cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), layer)
    with torch.no_grad():
        ours, theirs = (model(prompt(2), cache=cache).logits for cache in caches)
    assert torch.equal(ours, theirs)


def test_B08_windows_and_full_attention_in_turn(store):
    """The length is what was seen, whichever layer is asked; the windows are transformers' by their class."""
    config = MistralConfig(num_hidden_layers=4, sliding_window=4)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    cache = OffloadedCache(config=config, store=store, block_tokens=2, resident_layers=0)
    assert [isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers] == [True, False] * 2
    assert [isinstance(layer, OffloadedLayer) for layer in cache.layers] == [False, True] * 2
    oracle = DynamicCache(config=config)
    for tokens in (3, 1, 4, 1):
        for layer in range(4):
            k = torch.randn(1, 2, tokens, 4)
            for ours, theirs in zip(cache.update(k, k, layer), oracle.update(k, k, layer), strict=True):
                assert torch.equal(ours, theirs)
            assert cache.get_mask_sizes(2, layer) == oracle.get_mask_sizes(2, layer)
    assert [cache.get_seq_length(layer) for layer in range(4)] == [9] * 4


def test_stats_print_as_a_table(store):
    model = tiny("llama")
    cache = OffloadedCache(config=model.config, store=store, block_tokens=4, resident_layers=1)
    greedy(model, cache)
    cache.flush()
    stats = cache.stats()
    assert stats.blocks_put and stats.blocks_got and stats.stored_bytes and stats.device_bytes
    assert stats.device_bytes_peak >= stats.device_bytes
    lines = str(stats).splitlines()
    for name in ("bytes on the device", "bytes in the service", "blocks put", "blocks got", "seconds waited"):
        assert any(line.startswith(name) for line in lines), lines
    assert len({line.index(line[22:].lstrip()[0], 20) for line in lines if len(line) > 22}) == 1, "one column"
    with pytest.raises(AttributeError):
        stats.blocks_put = 0


def test_errors_say_what_to_do():
    for kind, base in [(kvferry.UnavailableError, ConnectionError), (kvferry.DeadlineError, TimeoutError),
                       (kvferry.MismatchError, ValueError), (kvferry.FullError, MemoryError)]:  # fmt: skip
        assert issubclass(kind, base) and issubclass(kind, kvferry.Error)
    with pytest.raises(kvferry.UnavailableError) as caught:
        kvferry.connect("unix:///nowhere/kvferry.sock", connect_timeout=0.2)
    assert "nowhere" in str(caught.value) and caught.value.code == "UNAVAILABLE" and caught.value.hint


def _pass(cache, dims):
    for layer, dim in enumerate(dims):
        cache.update(torch.ones(1, 2, 5, dim), torch.ones(1, 2, 5, dim), layer)


def test_layers_that_are_learnt_are_logged_once_a_cache(store, caplog):
    cache = OffloadedCache(store=store, block_tokens=2, resident_layers=0)
    assert not caplog.records
    for _ in range(2):
        _pass(cache, [4, 4, 4])
        _pass(copy.deepcopy(cache), [4, 4, 4])
        cache.reset()
    (record,) = caplog.records
    assert record.name == "kvferry" and record.levelname == "WARNING"
    assert "config=model.config" in record.getMessage()
    _pass(OffloadedCache(store=store), [4])
    assert len(caplog.records) == 2, "another cache says so of itself"


def test_layers_unlike_the_config_are_logged_once_a_cache(store, caplog):
    """The config tells how many layers there are, the first update their shape."""
    config = tiny("llama").config
    cache = OffloadedCache(config=config, store=store, block_tokens=2, resident_layers=0)
    _pass(cache, [4] * LAYERS)
    assert not caplog.records and cache.stats().relearned == 0
    cache.reset()
    for times in (1, 2):
        _pass(cache, [4, 4, 6, 4])
        assert cache.stats().relearned == times
        cache.reset()
    (record,) = caplog.records
    assert record.name == "kvferry" and record.levelname == "WARNING" and "layer 2 " in record.getMessage()


def test_two_threads_take_turns(store):
    """Statistics from another thread while a model generates; neither corrupts nor blocks the other."""
    model, done, seen = tiny("llama"), threading.Event(), []
    cache = OffloadedCache(config=model.config, store=store, block_tokens=4, resident_layers=0)

    def watch():
        while not done.wait(0.001):
            seen.append(cache.stats().blocks_put)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        ids = greedy(model, cache)[0]
    finally:
        done.set()
        thread.join(10)
    assert seen and seen == sorted(seen)
    assert torch.equal(ids, greedy(model, DynamicCache(config=model.config))[0])


def test_generation_config_does_not_replace_it(store):
    model = tiny("llama")
    cache = OffloadedCache(config=model.config, store=store, block_tokens=4, resident_layers=0)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, return_dict_in_generate=True,
                         generation_config=GenerationConfig(max_new_tokens=4, do_sample=False))  # fmt: skip
    assert out.cache is cache and cache.get_seq_length() == 8


def test_sizes():
    assert parse_size("512MiB") == parse_size("512m") == 512 * 2**20 == parse_size(512 * 2**20)
    assert parse_size("1.5 GB") == 1_500_000_000 and parse_size("7") == 7 and parse_size("2k") == 2048
    for wrong in ("", "MiB", "1 TBB", "-1", "1e3"):
        with pytest.raises(ValueError):
            parse_size(wrong)
    for wrong in (None, 1.5, True):
        with pytest.raises(TypeError):
            parse_size(wrong)
    assert format_size(0) == "0 B" and format_size(1536) == "1.5 KiB" and format_size(3 * 2**30) == "3.0 GiB"


def test_a_store_that_is_none_is_refused_at_once():
    with pytest.raises(TypeError, match="store is a str, expected what kvferry.connect"):
        OffloadedCache(store="embedded://")


def test_times_that_are_no_numbers_are_refused(store):
    for name in ("full_timeout", "fetch_timeout"):
        with pytest.raises(kvferry.MismatchError, match=f"{name} is nan"):
            OffloadedCache(store=store, **{name: float("nan")})
    with pytest.raises(kvferry.MismatchError, match="timeout is nan"):
        store.flush(float("nan"))
