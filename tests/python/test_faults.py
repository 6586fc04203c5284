"""The store dies, stops, comes back or is full: an error that says what to do, or the right text. Never a hang."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from daemon import Kvferryd, store_with
from models import LAYERS, greedy, prompt, tiny
from transformers import DynamicCache, LogitsProcessor

import kvferry
from kvferry import OffloadedCache

pytestmark = pytest.mark.timeout(180)  # far from what they take: only a hang gets there


def cache_for(model, store, **options):
    options = dict(block_tokens=4, resident_layers=1, fetch_timeout=3, full_timeout=1) | options
    return OffloadedCache(config=model.config, store=store, **options)


class AtStep(LogitsProcessor):
    """Calls `action` once, after the given step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def __call__(self, input_ids, scores):
        self.step -= 1
        if self.step == 0:
            self.action()
        return scores


def generate(model, cache, *processors):
    ids = prompt(60)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=24, do_sample=False,
        logits_processor=list(processors),
    )  # fmt: skip


@pytest.fixture
def model():
    return tiny("llama")


@pytest.fixture
def expected(model):
    return generate(model, DynamicCache(config=model.config))


def test_killed_mid_generation_then_restarted(kvferryd, model, expected):
    with kvferry.connect(kvferryd.url) as store:
        cache = cache_for(model, store)
        with pytest.raises(kvferry.UnavailableError) as caught:
            generate(model, cache, AtStep(7, kvferryd.kill))
        error = caught.value
        assert isinstance(error, ConnectionError) and error.code == "UNAVAILABLE"
        assert kvferryd.url in str(error), error
        # The prompt and six tokens were in the cache; of the seventh, the resident layer at least.
        assert re.findall(r"(\d+) tokens", str(error)) == ["67"], error
        assert "reset()" in error.hint and "run again" in error.hint

        # Half a pass is in the cache: nothing may be made of it.
        assert {layer.get_seq_length() for layer in cache.layers} == {66, 67}
        with pytest.raises(kvferry.UnavailableError, match="incomplete"):
            generate(model, cache)

        # The same Python process, store and cache work again.
        kvferryd.start()
        cache.reset()
        assert torch.equal(generate(model, cache), expected)
        assert cache.stats().blocks_put > 0
        assert torch.equal(generate(model, cache_for(model, store)), expected)


def test_a_pass_that_others_interrupt(store, model, expected):
    """Ctrl-C between two layers: the cache refuses to go on with layers of unlike lengths."""
    cache = cache_for(model, store)
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache)
    hook.remove()
    with pytest.raises(kvferry.MismatchError, match="interrupted") as caught:
        generate(model, cache)
    assert "reset()" in caught.value.hint
    with pytest.raises(kvferry.MismatchError, match="interrupted"):
        cache.crop(-1)
    cache.reset()
    assert torch.equal(generate(model, cache), expected)


def test_restarted_between_two_steps(kvferryd, model, expected):
    """The new daemon answers, but the blocks are gone: never another's bytes."""
    with kvferry.connect(kvferryd.url) as store:
        cache = cache_for(model, store)
        epoch = store.epoch
        with pytest.raises(kvferry.UnavailableError) as caught:
            generate(model, cache, AtStep(7, kvferryd.restart))
        assert kvferryd.url in str(caught.value) and "reset()" in caught.value.hint
        cache.reset()
        assert torch.equal(generate(model, cache), expected)
        assert store.epoch != epoch


def test_killed_while_all_layers_are_resident(kvferryd, model, expected):
    """What is on the device is enough to go on. A new daemon gets all of it, and flush says what is there."""
    with kvferry.connect(kvferryd.url) as store:
        cache = cache_for(model, store, resident_layers=LAYERS)
        assert torch.equal(generate(model, cache, AtStep(7, kvferryd.kill)), expected)
        with pytest.raises(kvferry.UnavailableError, match="kvferry.sock"):
            cache.flush()
        kvferryd.start()
        store.flush()  # connected again
        with torch.no_grad():
            model(prompt(5), cache=cache)
        cache.flush()
        blocks = LAYERS * (cache.get_seq_length() // 4)
        assert cache.stats().stored_bytes == blocks * 2 * 2 * 4 * 16 * 4  # K and V, 2 heads, 4 tokens, 16 wide, float32


@pytest.mark.parametrize("resident_layers", [LAYERS, 0])
def test_flush_after_a_restart(kvferryd, model, resident_layers):
    """Flush puts anew what the device has, and says what the old daemon took with it."""
    with kvferry.connect(kvferryd.url) as store:
        cache = cache_for(model, store, resident_layers=resident_layers)
        with torch.no_grad():
            model(prompt(30), cache=cache)
            cache.flush()
            held = cache.stats()
            kvferryd.restart()
            store.flush()  # connected again
            if resident_layers == 0:
                with pytest.raises(kvferry.UnavailableError, match="30 tokens must be recomputed"):
                    cache.flush()
                with pytest.raises(kvferry.UnavailableError, match="30 tokens must be recomputed"):
                    model(prompt(1), cache=cache)
            else:
                cache.flush()  # what is on the device is put anew
                assert cache.stats().stored_bytes == held.stored_bytes
            cache.reset()
            cache.flush()
            model(prompt(30), cache=cache)
        cache.flush()
        stats = cache.stats()
        assert (
            stats.stored_bytes == held.stored_bytes > 0
            and stats.blocks_put == (3 if resident_layers else 2) * held.blocks_put
        )


def test_a_store_out_of_reach_is_not_missed(monkeypatch, tmp_path, model, expected):
    """All layers fit: the text comes without a store, and nothing of the failed attempts is left over."""
    attempts = []

    def connect():
        attempts.append(1)
        return kvferry.connect(connect_timeout=0.05)

    monkeypatch.setenv("KVFERRY_URL", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setattr(kvferry.store, "connect", connect)
    kvferry.set_default_store(None)
    cache = cache_for(model, None, resident_layers=LAYERS)
    assert torch.equal(generate(model, cache), expected)
    assert cache.stats().blocks_put == 0
    assert 0 < len(attempts) <= 1 + expected.shape[1] // 4, "one a block, not one a token"

    # An error of now is its own, not that of an attempt before.
    with pytest.raises(kvferry.MismatchError, match="key_states"):
        cache.update(torch.ones(1, 2, 3, 5), torch.ones(1, 2, 3, 5), 0)
    cache.crop(-30)
    cache.reorder_cache(torch.tensor([0]))
    assert cache.get_seq_length() == expected.shape[1] - 1 - 30
    with pytest.raises(kvferry.UnavailableError, match="nobody.sock") as caught:
        generate(model, cache_for(model, None, resident_layers=LAYERS - 1))
    assert "kvferryd" in caught.value.hint


def test_killed_before_the_first_block(kvferryd, model, expected):
    with kvferry.connect(kvferryd.url, connect_timeout=1) as store:
        kvferryd.kill()
        cache = cache_for(model, store)
        with pytest.raises(kvferry.UnavailableError) as caught:
            generate(model, cache)
        assert kvferryd.url in str(caught.value)
        kvferryd.start()
        cache.reset()
        assert torch.equal(generate(model, cache), expected)


def test_stopped_daemon_is_a_deadline_not_a_hang(kvferryd, model, expected):
    with kvferry.connect(kvferryd.url) as store:
        cache = cache_for(model, store)
        with pytest.raises(kvferry.DeadlineError) as caught:
            generate(model, cache, AtStep(7, lambda: kvferryd.signal(signal.SIGSTOP)))
        assert kvferryd.url in str(caught.value) and "reset()" in caught.value.hint
        kvferryd.signal(signal.SIGCONT)
        cache.reset()
        assert torch.equal(generate(model, cache), expected)


_STOPPED = """
import sys
sys.path.insert(0, {here!r})
import torch, kvferry
from test_faults import AtStep, cache_for, generate
from models import tiny
torch.set_num_threads(1)
store = kvferry.connect({url!r}, heartbeat=0.2)
cache = cache_for(tiny("llama"), store, fetch_timeout=20)
def stopped():
    print("ready", flush=True)
    sys.stdin.readline()  # by the time this comes the process has been stopped and woken
print(generate(tiny("llama"), cache, AtStep(7, stopped)).tolist(), flush=True)
print(cache.stats().blocks_got, flush=True)
"""


def test_stopped_model_process_loses_nothing(tmp_path, expected):
    """Silent until the service takes it for lost: the session is resumed, no block is lost."""
    with Kvferryd(tmp_path, "--heartbeat=100ms") as daemon:
        script = _STOPPED.format(here=str(Path(__file__).parent), url=daemon.url)
        command = [sys.executable, "-c", script]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert child.stdout.readline() == "ready\n"
            child.send_signal(signal.SIGSTOP)
            while not daemon.values()["sessions_silent"]:
                time.sleep(0.05)
            child.send_signal(signal.SIGCONT)
            out, _ = child.communicate("\n", timeout=120)
        finally:
            child.kill()
        assert child.returncode == 0
        text, got = out.splitlines()
        assert text == str(expected.tolist()) and int(got) > 0


@pytest.fixture(params=["embedded", "grpc"])
def full_store(request, tmp_path):
    """A store that holds less than a prompt of 60 tokens takes."""
    with store_with("64KiB", request.param, tmp_path) as store:
        yield store


def test_full_store(full_store, model, expected):
    """FullError before anything was allocated or changed; the cache stays usable."""
    cache = cache_for(model, full_store, full_timeout=0.2)
    held = cache.stats()
    with pytest.raises(kvferry.FullError) as caught:
        generate(model, cache)
    error = caught.value
    assert isinstance(error, MemoryError) and error.code == "RESOURCE_EXHAUSTED" and error.hint
    assert full_store.url in str(error)
    assert cache.get_seq_length() == 0
    assert cache.stats().device_bytes == held.device_bytes == 0
    assert cache.stats().device_bytes_peak == 0, "allocated before it was refused"
    assert cache.stats().refused > 0

    # Fewer tokens go in; then it is full again, in the middle of a text, and a crop makes room.
    ids = prompt(6)
    reference = DynamicCache(config=model.config)
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=reference).logits)
    with torch.no_grad(), pytest.raises(kvferry.FullError):
        for step in range(200):
            model(prompt(1, seed=step), cache=cache)
            model(prompt(1, seed=step), cache=reference)
    assert {layer.get_seq_length() for layer in cache.layers} == {reference.get_seq_length()}
    for (k, v, _), theirs in zip(cache, reference.layers, strict=True):
        assert torch.equal(k, theirs.keys) and torch.equal(v, theirs.values)
    cache.crop(-9)
    reference.crop(-9)
    with torch.no_grad():
        assert torch.equal(model(prompt(3), cache=cache).logits, model(prompt(3), cache=reference).logits)
    cache.reset()
    with torch.no_grad():
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_full_store_and_on_full_device(full_store, model, expected):
    cache = cache_for(model, full_store, full_timeout=0.1, on_full="device")
    assert torch.equal(generate(model, cache), expected)
    assert cache.stats().refused > 0


def test_full_store_gets_room_when_another_cache_goes(full_store, model):
    first = cache_for(model, full_store, full_timeout=0.2)
    with torch.no_grad(), pytest.raises(kvferry.FullError):
        for step in range(200):
            model(prompt(1, seed=step), cache=first)
    second = cache_for(model, full_store, full_timeout=5)
    with torch.no_grad():
        with pytest.raises(kvferry.FullError):
            model(prompt(12), cache=cache_for(model, full_store, full_timeout=0.2))
        del first
        assert torch.equal(model(prompt(12), cache=second).logits, model(prompt(12)).logits)


def test_device_memory_that_holds_nothing_is_refused_whole(embedded_store, model):
    cache = cache_for(model, embedded_store, resident_layers=None, device_memory="4KiB")
    with pytest.raises(kvferry.FullError) as caught:
        greedy(model, cache)
    assert "device_memory" in str(caught.value)
    assert cache.get_seq_length() == 0 and cache.stats().device_bytes_peak == 0


def test_closed_store(kvferryd, model):
    store = kvferry.connect(kvferryd.url)
    cache = cache_for(model, store)
    with torch.no_grad():
        model(prompt(12), cache=cache)
        cache.flush()  # what the store has not acknowledged is here still
        store.close()
        with pytest.raises(kvferry.UnavailableError, match="closed"):
            model(prompt(1), cache=cache)
