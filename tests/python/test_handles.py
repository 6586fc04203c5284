"""Caches that go to another process: by value, and as handles whose blocks stay in kvferryd."""

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from daemon import Kvferryd
from models import prompt, tiny
from test_layers import contents, new

import kvferry
from kvferry import OffloadedCache

_CHILD = """
import pickle, sys, torch
sys.path.insert(0, {here!r})
from models import prompt, tiny
torch.set_num_threads(1)
cache = pickle.load(open({file!r}, "rb"))
with torch.no_grad():
    logits = tiny("llama")(prompt(3, seed=9), cache=cache).logits
torch.save((logits, cache._store and cache._store.url, [(k, v) for k, v, _ in cache]), {out!r})
"""


def prefilled(store, tokens=61, **options):
    cache = OffloadedCache(config=tiny("llama").config, store=store,
                           **(dict(block_tokens=4, resident_layers=1) | options))  # fmt: skip
    with torch.no_grad():
        tiny("llama")(prompt(tokens), cache=cache)
    return cache


def in_another_process(data: bytes, folder):
    file, out = folder / "cache", folder / "out"
    file.write_bytes(data)
    script = _CHILD.format(here=str(Path(__file__).parent), file=str(file), out=str(out))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.mark.parametrize("handles", [False, True])
def test_another_process_goes_on_with_the_same_logits(tmp_path, kvferryd, handles):
    """The handle's reader takes its blocks from the store, and the writer's end does not matter to it."""
    with kvferry.connect(kvferryd.url) as store:
        cache = prefilled(store)
        if handles:
            with kvferry.pickle_handles():
                data = pickle.dumps(cache)
        else:
            data = pickle.dumps(cache)
        with torch.no_grad():
            expected = tiny("llama")(prompt(3, seed=9), cache=cache).logits
        held = [(k, v) for k, v, _ in cache]
    logits, url, entries = in_another_process(data, tmp_path)
    assert torch.equal(logits, expected)
    assert all(torch.equal(a, b) for one, two in zip(entries, held, strict=True) for a, b in zip(one, two))
    assert url == (kvferryd.url if handles else None)


def test_a_handle_is_small(kvferryd):
    with kvferry.connect(kvferryd.url) as store:
        cache = prefilled(store, tokens=400)
        whole = len(pickle.dumps(cache))
        with kvferry.pickle_handles():
            assert len(pickle.dumps(cache)) < whole / 10


def test_copies_of_a_handle_go_their_own_ways(kvferryd):
    with kvferry.connect(kvferryd.url) as store:
        origin = prefilled(store)
        with kvferry.pickle_handles(ttl=60):
            data = pickle.dumps(origin)
        held = contents(origin)
        one, two = pickle.loads(data), pickle.loads(data)
        one.crop(-30)
        two.batch_repeat_interleave(2)
        origin.reset()
        with torch.no_grad():
            tiny("llama")(prompt(5), cache=one)
        assert one.get_seq_length() == 36 and two.layers[0].keys.shape[0] == 2
        assert contents(pickle.loads(data)) == held
        two.batch_select_indices(torch.tensor([1]))
        assert contents(two) == held
        two.reset()
        one.reset()


def test_a_handle_ends_with_its_time(kvferryd):
    with kvferry.connect(kvferryd.url) as store:
        cache = prefilled(store)
        with kvferry.pickle_handles(ttl=0.05):
            data = pickle.dumps(cache)
        held = contents(cache)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until it is over, however long the service takes to see to it
            try:
                pickle.loads(data)
            except kvferry.DataLossError as error:
                assert "ticket" in str(error) and kvferryd.url in str(error)
                break
        else:
            pytest.fail("the ticket did not end")
        assert contents(cache) == held


@pytest.mark.parametrize("case", ["embedded", "no full block", "plain layer", "all resident"])
def test_where_there_can_be_no_handle_the_bytes_go(embedded_store, kvferryd, case):
    with kvferry.connect(kvferryd.url) as daemon:
        store = embedded_store if case == "embedded" else daemon
        cache = prefilled(store, tokens=3 if case == "no full block" else 30,
                          resident_layers=None if case == "all resident" else 0)  # fmt: skip
        if case == "plain layer":
            cache.layers[2].keys = cache.layers[2].keys + 1
        with kvferry.pickle_handles():
            data = pickle.dumps(cache)
        held = contents(cache)
        if case == "all resident":  # is put for it
            assert cache.stats().blocks_put > 0
        cache.reset()
        assert contents(pickle.loads(data)) == held


def test_windows_and_states_go_along(kvferryd):
    with kvferry.connect(kvferryd.url) as store:
        cache = new(store, "sliding_attention", "full_attention", "hybrid", window=4)
        for layer in range(3):
            cache.update(*torch.randn(2, 2, 2, 9, 4), layer)
        cache.update_conv_state(torch.randn(2, 5, 9), 2, conv_kernel_size=3)
        cache.update_recurrent_state(torch.randn(2, 2, 4, 4), 2)
        with kvferry.pickle_handles():
            loaded = pickle.loads(pickle.dumps(cache))
        assert contents(loaded) == contents(cache)
        assert loaded.get_seq_length() == 9 and loaded.stats().blocks_got > 0


def test_bad_times():
    for ttl, error in ((0, kvferry.MismatchError), (-1, kvferry.MismatchError), (10**6, kvferry.MismatchError),
                       (float("nan"), kvferry.MismatchError), ("60", TypeError), (True, TypeError)):  # fmt: skip
        with pytest.raises(error, match="ttl is"):
            with kvferry.pickle_handles(ttl=ttl):
                pass


def test_the_daemon_restarted_meanwhile(tmp_path):
    with Kvferryd(tmp_path) as daemon, kvferry.connect(daemon.url) as store:
        cache = prefilled(store)
        with kvferry.pickle_handles():
            data = pickle.dumps(cache)
        daemon.restart()
        with pytest.raises((kvferry.DataLossError, kvferry.UnavailableError), match=daemon.url):
            pickle.loads(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(start=-1), "begins at -1"),
        (dict(start=62), "begins at 62"),
        (dict(start=8), "has 15 chunks of 4 tokens, expected all within its 61 columns"),
        (dict(more=1), "has 16 chunks"),
        (dict(place=99), "chunk 99 of a row"),
    ],
    ids=str,
)
def test_a_table_that_is_not_its_own(kvferryd, change, message):
    """What was pickled is taken for no more than it says."""
    with kvferry.connect(kvferryd.url) as store:
        cache = prefilled(store)
        shared = cache._ferry.core.share(10.0)
        (start, places), *_ = shared["rows"]
        places = [*places, *places[: change.get("more", 0)]]
        places[0] = change.get("place", places[0])
        shared["rows"] = [(change.get("start", start), places)]
        other = kvferry.OffloadedCache(config=tiny("llama").config, store=store, block_tokens=4)
        with pytest.raises(kvferry.MismatchError, match=message):
            other._ferry.core.adopt(shared)
        assert other.get_seq_length() == 0
