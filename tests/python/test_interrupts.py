"""What an interrupt or an error of somebody else leaves behind: either what was there before, or a cache that refuses
to go on until it is reset."""

import contextlib
import copy
import os
import pickle
import signal
import threading

import pytest
import torch
from models import prompt, tiny
from test_operations import config_of
from test_passes import Broken, broken_before, new
from transformers import DynamicCache

import kvferry
from kvferry import OffloadedCache
from kvferry.device_layers import StateLayer, WindowLayer
from kvferry.passes import Passes


@contextlib.contextmanager
def replaced(owner, name, function):
    before = getattr(owner, name)
    setattr(owner, name, function(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def then(error):
    """Makes of a function one that does the same and raises `error` instead of returning."""

    def failing(real):
        def fail(*args, **kwargs):
            real(*args, **kwargs)
            raise error

        return fail

    return failing


def refuses(model, cache):
    with pytest.raises(kvferry.MismatchError, match="interrupted|incomplete") as caught:
        model(prompt(1), cache=cache)
    assert "reset()" in caught.value.hint
    cache.reset()
    oracle = DynamicCache(config=model.config)
    for ids in (prompt(3), prompt(1)):
        assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=oracle).logits)


@pytest.mark.parametrize("passes", [1, 2, 4])
@pytest.mark.parametrize("method, name", [
    ("update_conv_state", "mamba"), ("update_conv_state", "zamba2"), ("update_indexer", "glm_moe_dsa"),
])  # fmt: skip
@torch.no_grad()
def test_between_two_parts_of_the_last_layer(embedded_store, name, method, passes):
    """All layers were used, the last one in part."""
    model = tiny(name)
    cache, last = new(embedded_store, model), model.config.num_hidden_layers - 1
    for step in range(passes):
        model(prompt(9 if step == 0 else 1, seed=step), cache=cache)

    def stop(update):
        def stopped(states, layer_idx, **kwargs):
            if layer_idx == last and method == "update_indexer":
                raise Broken
            states = update(states, layer_idx, **kwargs)
            if layer_idx == last:
                raise Broken
            return states

        return stopped

    with replaced(cache, method, stop), pytest.raises(Broken):
        model(prompt(3), cache=cache)
    refuses(model, cache)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("read", ["conv", "recurrent"])
@pytest.mark.parametrize("name", ["mamba", "zamba2"])
@torch.no_grad()
def test_before_the_last_layer_changes_what_it_read(embedded_store, name, read, tokens, passes):
    """One token is added to the states in place, so that the cache sees only that they are read."""
    model = tiny(name)
    cache, oracle = new(embedded_store, model), DynamicCache(config=model.config)
    for step in range(passes):
        for each in (cache, oracle):
            model(prompt(9 if step == 0 else 1, seed=step), cache=each)
    last = len(cache.layers) - 1
    assert isinstance(cache.layers[last], StateLayer)

    def stop(get):
        def stopped(layer_idx, **kwargs):
            state = get(layer_idx, **kwargs)
            if layer_idx == last:
                raise Broken
            return state

        return stopped

    with replaced(cache, f"get_{read}_state", stop), pytest.raises(Broken):
        model(prompt(tokens, seed=5), cache=cache)
    refuses(model, cache)


@pytest.mark.parametrize("name", ["mamba", "jamba"])
@pytest.mark.parametrize("use", [
    copy.deepcopy,
    pickle.dumps,
    list,
    lambda cache: cache.reorder_cache(torch.tensor([0])),
    lambda cache: cache.batch_repeat_interleave(2),
    lambda cache: cache.batch_select_indices(torch.tensor([0])),
    lambda cache: cache.crop(0),
], ids=["deepcopy", "pickle", "iterate", "reorder", "repeat", "select", "crop"])  # fmt: skip
@torch.no_grad()
def test_what_half_a_pass_left_is_not_copied(embedded_store, name, use):
    """A copy would not know of it, and what the layers read cannot be told once their states are others."""
    model = tiny(name)
    layers = (model.backbone if hasattr(model, "backbone") else model.model).layers
    cache = new(embedded_store, model)
    for step in range(3):
        model(prompt(9 if step == 0 else 1, seed=step), cache=cache)
    with broken_before(layers[1]), pytest.raises(Broken):
        model(prompt(1, seed=5), cache=cache)
    with pytest.raises(kvferry.MismatchError, match="left out of the last one") as caught:
        use(cache)
    assert "reset()" in caught.value.hint
    refuses(model, cache)


@torch.no_grad()
def test_copies_between_passes_are_told_of_whole_ones(embedded_store):
    model = tiny("mamba")
    cache, oracle = new(embedded_store, model), DynamicCache(config=model.config)
    for step in range(5):
        ids = prompt(9 if step == 0 else 1, rows=2, seed=step)
        assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=oracle).logits)
        cache.reorder_cache(torch.tensor([1, 0]))
        oracle.reorder_cache(torch.tensor([1, 0]))
        cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))


@pytest.mark.parametrize("empty", [lambda cache: cache.reset(), lambda cache: cache.crop(-100)], ids=["reset", "crop"])
@pytest.mark.parametrize("name", ["gemma3", "jamba", "mistral"])
@torch.no_grad()
def test_while_the_cache_is_emptied(embedded_store, name, empty):
    model = tiny(name)
    cache = new(embedded_store, model)
    model(prompt(9), cache=cache)
    victim = [layer for layer in cache.layers if isinstance(layer, (WindowLayer, StateLayer))][1]

    def stop():
        raise KeyboardInterrupt

    victim.reset = victim.emptied = stop
    with pytest.raises(KeyboardInterrupt):
        empty(cache)
    del victim.reset, victim.emptied
    refuses(model, cache)


@pytest.mark.parametrize("owner, method", [(WindowLayer, "update"), (Passes, "use")], ids=["update", "use"])
@torch.no_grad()
def test_in_the_first_layer_of_a_pass(embedded_store, owner, method):
    """The layer has moved on and nobody has been told."""
    model = tiny("mistral")
    cache = new(embedded_store, model)
    model(prompt(7), cache=cache)

    with replaced(owner, method, then(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        model(prompt(1), cache=cache)
    refuses(model, cache)


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("name", ["mistral", "llama"])
@torch.no_grad()
def test_an_error_behind_the_change_of_the_first_layer(embedded_store, name, error):
    """As a signal handler of somebody's may raise it: what can be taken back is, else the cache refuses to go on."""
    model = tiny(name)
    cache, oracle = new(embedded_store, model), DynamicCache(config=model.config)
    for each in (cache, oracle):
        model(prompt(7), cache=each)

    with replaced(type(cache.layers[0]), "update", then(error)), pytest.raises(error):
        model(prompt(1, seed=9), cache=cache)
    if name == "mistral":
        for ids in (prompt(1, seed=9), prompt(1)):
            assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=oracle).logits)
    else:
        refuses(model, cache)


@pytest.mark.parametrize("name", ["mamba", "jamba", "zamba2"])
@torch.no_grad()
def test_an_error_in_the_second_part_of_the_first_layer(embedded_store, name):
    """The convolution has moved on, and would get the tokens twice."""
    model = tiny(name)
    cache = new(embedded_store, model)

    def fails(_):
        def failing(*args, **kwargs):
            raise torch.OutOfMemoryError("none left")

        return failing

    for tokens in (9, 3):
        with replaced(cache, "update_recurrent_state", fails), pytest.raises(torch.OutOfMemoryError):
            model(prompt(tokens), cache=cache)
        refuses(model, cache)


@torch.no_grad()
def test_no_room_behind_a_mere_read_changes_nothing(embedded_store):
    cache = OffloadedCache(
        config=config_of(["linear_attention", "full_attention"], 4), store=embedded_store, device_memory=100_000
    )
    cache.activate_past_recording()
    cache.update_conv_state(torch.ones(1, 5, 3), 0, conv_kernel_size=3)
    held = cache.layers[0].conv_states[0].clone()
    k = torch.ones(1, 2, 3, 4)
    cache.update(k, k, 1)
    cache.get_conv_state(0)
    with pytest.raises(kvferry.FullError):
        cache.update_conv_state(torch.ones(1, 5, 50_000), 0)
    assert torch.equal(cache.layers[0].conv_states[0], held)
    cache.update_conv_state(torch.ones(1, 5, 1), 0)
    cache.update(k[:, :, :1], k[:, :, :1], 1)
    assert cache.get_seq_length(1) == 4


def test_what_a_signal_handler_raises_while_a_store_is_asked_for(monkeypatch):
    """The cache can do without a store, but not without the error."""

    def provider(*_):
        raise TimeoutError("the handler's")

    monkeypatch.setattr(kvferry.store, "default_store", provider)
    cache = OffloadedCache(config=config_of(["full_attention"] * 2, 4), resident_layers=2)
    k = torch.ones(1, 2, 70, 4)
    with pytest.raises(TimeoutError, match="the handler's"):
        for layer in range(2):
            cache.update(k, k, layer)


@torch.no_grad()
def test_an_error_in_the_first_layer_of_a_pass_changes_nothing(embedded_store):
    """Other than an interrupt it comes from where nothing has changed yet."""
    cache = OffloadedCache(config=config_of(["linear_attention", "full_attention"], 4), store=embedded_store)
    first = torch.ones(2, 5, 3)

    with (
        replaced(StateLayer, "update_conv_state", then(RuntimeError("out of memory"))),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        cache.update_conv_state(first, 0, conv_kernel_size=3)
    assert not cache.has_previous_state(0) and cache.layers[0].conv_states[0] is None
    assert torch.equal(cache.update_conv_state(first, 0, conv_kernel_size=2), first)
    assert cache.layers[0].conv_kernel_size[0] == 2


@torch.no_grad()
def test_ctrl_c_breaks_a_wait_for_the_store_off(kvferryd):
    """The store is stopped and would be waited for for hours. If the interrupt did not come through, nor would the
    test."""
    model = tiny("llama")
    with kvferry.connect(kvferryd.url) as store:
        cache = new(store, model, fetch_timeout=9999)
        model(prompt(40), cache=cache)
        cache.flush()
        kvferryd.signal(signal.SIGSTOP)
        seen = threading.Event()
        before = signal.signal(signal.SIGINT, lambda *_: handler(seen, cache))
        interrupt_soon()
        try:
            with pytest.raises(KeyboardInterrupt):
                model(prompt(1), cache=cache)
        finally:
            signal.signal(signal.SIGINT, before)
            kvferryd.signal(signal.SIGCONT)
        assert seen.is_set()
        refuses(model, cache)


def handler(seen, cache):
    """A handler that uses the cache whose call it interrupts hears so, and does not hang."""
    try:
        cache.stats()
    except kvferry.Error as error:
        assert "signal handler" in str(error)
        seen.set()
        raise KeyboardInterrupt from None
    interrupt_soon()  # it came before the call, or between two of them


def interrupt_soon():
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


@torch.no_grad()
def test_ctrl_c_breaks_a_connect_off(tmp_path):
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        kvferry.connect(f"unix://{tmp_path}/nobody.sock", connect_timeout=9999)
