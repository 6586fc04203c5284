"""Connections: URLs and options, errors, the default store, forks, exits, and a daemon that comes and goes."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import kvferry
from kvferry import errors


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own, which must end by itself."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_connects_and_tells_about_itself(store):
    assert not store.closed
    assert store.url in repr(store)
    store.flush()
    stats = store.stats()
    assert stats.checksum_errors == 0
    assert "bytes_put" in str(stats)


def test_a_closed_store_says_so():
    with kvferry.connect("embedded://", memory=2**25) as store:
        capsule = store._capsule()
    assert store.closed and "closed" in repr(store)
    for call in (store.flush, store._capsule, store.__enter__):
        with pytest.raises(kvferry.UnavailableError, match="closed"):
            call()
    store.close()
    del capsule


@pytest.mark.parametrize(
    "url", ["", "embedded", "http://host:1", "unix://relative/path", "grpc://host", "grpc://host:port"]
)
def test_a_url_of_another_form_is_refused_by_name(url, monkeypatch):
    with pytest.raises(kvferry.MismatchError) as caught:
        kvferry.connect(url)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert f'"{url}"' in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_unknown_options_are_refused_by_name():
    with pytest.raises(TypeError, match="'memroy'"):
        kvferry.connect("embedded://", memroy="1GiB")
    with pytest.raises(TypeError, match="'memory'"):
        kvferry.connect("grpc://localhost:7400", memory="1GiB")
    with pytest.raises(ValueError, match="memory"):
        kvferry.connect("embedded://", memory="plenty")
    with pytest.raises(kvferry.MismatchError, match=f"memory is {900 << 40} bytes; expected no more than"):
        kvferry.connect("embedded://", memory="900TiB")
    with pytest.raises(kvferry.MismatchError, match="disk_bytes is not given"):
        kvferry.connect("embedded://", disk="/nowhere")
    with pytest.raises(ValueError, match="disk_bytes"):
        kvferry.connect("embedded://", disk="/nowhere", disk_bytes="plenty")
    with pytest.raises(TypeError, match="PathLike"):
        kvferry.connect("embedded://", disk=7, disk_bytes="1GiB")
    with pytest.raises(kvferry.UnavailableError, match="/nowhere/at/all"):
        kvferry.connect("embedded://", disk="/nowhere/at/all", disk_bytes="1GiB")
    with pytest.raises(kvferry.MismatchError, match="heartbeat"):
        kvferry.connect("grpc://localhost:7400", heartbeat=0)
    with pytest.raises(TypeError, match="int"):
        kvferry.connect(7400)


def test_nobody_there_is_unavailable_and_says_what_to_do(tmp_path):
    url = f"unix://{tmp_path}/kvferry.sock"
    with pytest.raises(kvferry.UnavailableError) as caught:
        kvferry.connect(url, connect_timeout=0.3)
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.code == "UNAVAILABLE"
    assert url in str(caught.value)
    assert caught.value.hint == "Start kvferryd there, or correct the URL."
    assert any(caught.value.hint in note for note in caught.value.__notes__), "a traceback shows it"


def test_the_environment_names_the_store(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_URL", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(kvferry.UnavailableError, match="nobody.sock"):
        kvferry.connect(connect_timeout=0.2)
    monkeypatch.delenv("KVFERRY_URL")
    with kvferry.connect() as store:
        assert store.url == "embedded://"


@pytest.mark.parametrize(
    "code, kind, builtin",
    [
        (14, kvferry.UnavailableError, ConnectionError),
        (4, kvferry.DeadlineError, TimeoutError),
        (3, kvferry.MismatchError, ValueError),
        (9, kvferry.MismatchError, ValueError),
        (8, kvferry.FullError, MemoryError),
        (15, kvferry.DataLossError, Exception),
        (5, kvferry.DataLossError, Exception),
        (13, kvferry.Error, Exception),
        (99, kvferry.Error, Exception),
    ],
)
def test_every_status_has_its_exception(code, kind, builtin):
    error = errors.from_status(code, "store x: went wrong")
    assert type(error) is kind and isinstance(error, builtin) and isinstance(error, kvferry.Error)
    assert str(error) == "store x: went wrong"
    assert error.hint
    again = errors.from_status(error.code, "twice")
    assert type(again) is kind and again.code == error.code
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), copied.code, copied.hint, str(copied)) == (kind, error.code, error.hint, str(error))


def test_the_default_store(monkeypatch):
    monkeypatch.delenv("KVFERRY_URL", raising=False)
    kvferry.set_default_store(None)
    first = kvferry.get_default_store()
    assert first.url == "embedded://" and kvferry.get_default_store() is first
    first.close()
    assert kvferry.get_default_store() is not first, "one that we made and that was closed is made anew"
    with kvferry.connect("embedded://", memory=2**25) as mine:
        kvferry.set_default_store(mine)
        assert kvferry.get_default_store() is mine
        with pytest.raises(TypeError, match="str"):
            kvferry.set_default_store("embedded://")
    kvferry.set_default_store(None)


def test_stores_alone_need_no_torch():
    done = run(
        """
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None  # as if they were not installed
        import kvferry
        with kvferry.connect("embedded://", memory="64MiB") as store:
            store.flush()
        try:
            kvferry.OffloadedCache
        except ImportError as error:
            assert "torch" in str(error), error
        else:
            raise AssertionError("no error")
        try:
            kvferry.Nonsense
        except AttributeError:
            print("fine")
        """
    )
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr


def test_a_process_ends_with_open_stores(kvferryd):
    """Threads of gRPC left running hang interpreters at their end."""
    code = """
        import sys, kvferry
        stores = [kvferry.connect(url) for url in sys.argv[1:] or [URL, "embedded://"]]
        stores[0].flush()
        capsules = [store._capsule() for store in stores]
        """
    done = run(code.replace("URL", repr(kvferryd.url)))
    assert done.returncode == 0, done.stderr


def test_a_waiting_call_lets_other_threads_run(kvferryd):
    with kvferry.connect(kvferryd.url, heartbeat=3600) as store:
        kvferryd.signal(signal.SIGSTOP)
        with pytest.raises(kvferry.DeadlineError) as caught:
            store.flush(timeout=0.2)
        assert isinstance(caught.value, TimeoutError) and kvferryd.url in str(caught.value)

        outcome = []
        thread = threading.Thread(target=lambda: outcome.append(store.flush(timeout=60)))
        thread.start()
        for _ in range(100):  # if it held the GIL, this thread would come no further before its deadline
            time.sleep(0.001)
        assert thread.is_alive()
        kvferryd.signal(signal.SIGCONT)
        thread.join()
        assert outcome == [None]


def test_a_store_that_restarts_is_found_again(kvferryd):
    with kvferry.connect(kvferryd.url) as store:
        epoch = store.epoch
        kvferryd.kill()
        with pytest.raises(kvferry.UnavailableError, match="kvferry.sock"):
            store.flush()
        kvferryd.start()
        store.flush()
        assert store.epoch != epoch
        assert store.stats().reconnects == 1


def test_a_forked_child_is_told_and_the_parent_goes_on(kvferryd):
    """B17: never a hang."""
    code = """
        import os, warnings, kvferry
        warnings.simplefilter("ignore")
        with kvferry.connect(URL) as store, kvferry.connect("embedded://", memory="64MiB") as local:
            default = kvferry.get_default_store()
            child = os.fork()
            if child == 0:
                told = 0
                for which in (store, local):
                    try:
                        which.flush()
                    except kvferry.MismatchError as error:
                        told += error.code == "FAILED_PRECONDITION" and "fork" in str(error)
                try:
                    kvferry.connect(URL)
                except kvferry.MismatchError as error:
                    told += "fork" in str(error)
                mine = kvferry.get_default_store()
                mine.flush()
                told += mine is not default
                for which in (store, local, mine):
                    which.close()
                os._exit(told)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 4, status
            store.flush()
            local.flush()
            default.flush()
        """
    done = run(code.replace("URL", repr(kvferryd.url)), KVFERRY_URL="")
    assert done.returncode == 0, done.stderr


def test_a_forked_child_that_returns_ends_too(kvferryd):
    code = """
        import os, warnings, kvferry
        warnings.simplefilter("ignore")
        store = kvferry.connect(URL)
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            assert status == 0, status
            store.flush()
        """
    done = run(code.replace("URL", repr(kvferryd.url)))
    assert done.returncode == 0, done.stderr
