"""Connections to a store, and the one that a process uses by default."""

import atexit
import os
import threading
import weakref
from dataclasses import dataclass

from . import _core, errors
from .sizes import format_size, parse_seconds, parse_size

_EMBEDDED = "embedded://"
_OPTIONS = {
    _EMBEDDED: ("memory", "disk", "disk_bytes"),
    "unix://": ("connect_timeout", "heartbeat"),
    "grpc://": ("connect_timeout", "heartbeat"),
}


@dataclass(frozen=True)
class StoreStats:
    """Figures of one connection since it was made."""

    blocks_put: int  #: acknowledged by the store
    bytes_put: int
    blocks_got: int
    bytes_got: int
    get_misses: int
    puts_failed: int
    reconnects: int  #: times the connection had to be made again
    checksum_errors: int  #: blocks that arrived damaged; they were not used
    bytes_in_flight: int  #: memory of this process: sent and not acknowledged, or received and not yet used

    def __str__(self) -> str:
        rows = [(name, format_size(n) if "bytes" in name else f"{n:,}") for name, n in self.__dict__.items()]
        return "\n".join(f"{name:<16}{value:>14}" for name, value in rows)


class Store:
    """A connection to a store, from `connect`. A context manager that closes it.

    Caches keep it alive; closing it makes the blocks of its caches unreadable. Threads: any. A forked child makes a
    connection of its own.
    """

    def __init__(self, core: "_core.Store"):
        self._core = core
        self._closed = False
        _open.add(self)

    @property
    def url(self) -> str:
        return self._core.url

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def epoch(self) -> int:
        """Changes when the store has lost the live sequences of this process, as by a restart."""
        return self._core.epoch

    def stats(self) -> StoreStats:
        return StoreStats(**self._core.stats())

    def flush(self, timeout: float = 30.0) -> None:
        """Waits up to `timeout` seconds until all that the store has acknowledged is as durable as it can make it."""
        self._check()
        self._core.flush(parse_seconds(timeout, "timeout"))

    def close(self) -> None:
        """Ends the session: the store frees what only this process could read, after its grace period if it cannot be
        told. Closing twice is closing once."""
        self._closed = True
        _open.discard(self)
        self._core.close()

    def __enter__(self) -> "Store":
        self._check()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvferry.Store {self.url}{' (closed)' if self._closed else ''}>"

    def _capsule(self) -> object:
        """The transport for the C++ of another extension module."""
        self._check()
        return self._core._capsule()

    def _check(self) -> None:
        if self._closed:
            raise errors.UnavailableError(f"store {self.url}: closed", hint="Connect again: kvferry.connect(...).")


def connect(url: str | None = None, **options) -> Store:
    """Connects to a store.

        embedded://            a store in this process; option memory: its budget, bytes or text such as "2GiB";
                               disk, disk_bytes: a folder of its own for what memory cannot hold, and its bound
        unix:///path.sock      kvferryd on this machine; options connect_timeout (10) and heartbeat (5), in seconds
        grpc://host:port       kvferryd anywhere; the same options

    Without a URL the environment's KVFERRY_URL is taken, else embedded://. An unknown option is a TypeError; a URL of
    another form is a MismatchError; UnavailableError if nobody answers within connect_timeout.
    """
    if url is None:
        url = os.environ.get("KVFERRY_URL") or _EMBEDDED
    if not isinstance(url, str):
        raise TypeError(
            f"connect: url is a {type(url).__name__}, expected text such as 'unix:///run/kvferry/kvferry.sock'"
        )
    known = next((names for scheme, names in _OPTIONS.items() if url.startswith(scheme)), None)
    for name in options:
        if known is not None and name not in known:
            raise TypeError(f"connect: {url} has no option {name!r}, expected {' or '.join(known)}")
    if known is None:
        options = {}  # the URL is refused by name below
    for name in ("memory", "disk_bytes"):
        if name in options:
            options[name] = parse_size(options[name], name)
    if "disk" in options:
        options["disk"] = os.fsdecode(options["disk"])
    for name in ("connect_timeout", "heartbeat"):
        if name in options:
            options[name] = parse_seconds(options[name], name)
    try:
        return Store(_core.connect(url, **options))
    except errors.UnavailableError as error:
        error.hint = "Start kvferryd there, or correct the URL."
        raise


_open: "weakref.WeakSet[Store]" = weakref.WeakSet()
_lock = threading.Lock()
_default: Store | None = None
_default_is_ours = False
_by_url: dict[str, Store] = {}


def set_default_store(store: Store | None) -> None:
    """Sets the store of every cache that is given none; None: an embedded one is made when it is needed."""
    global _default, _default_is_ours
    if store is not None and not isinstance(store, Store):
        raise TypeError(f"set_default_store: a {type(store).__name__}, expected a kvferry.Store or None")
    with _lock:
        _default, _default_is_ours = store, False


def default_store() -> Store:
    """The process's default store: the one that was set, else one by KVFERRY_URL or embedded, made when asked for."""
    global _default, _default_is_ours
    with _lock:
        if _default is None or (_default_is_ours and _default.closed):
            _default, _default_is_ours = connect(), True
        return _default


def store_at(url: str) -> Store:
    """The process's default store if it is the one at `url`, else one that all who ask for this URL share."""
    with _lock:
        store = _default if _default is not None and _default.url == url else _by_url.get(url)
    if store is not None and not store.closed:
        return store
    store = connect(url)  # takes its time, so outside the lock; the first of two stays
    with _lock:
        first = _by_url.get(url)
        if first is None or first.closed:
            first = _by_url[url] = store
    if first is not store:
        store.close()
    return first


@atexit.register
def _close_all() -> None:
    """Joins the threads of all transports before the interpreter goes."""
    for store in list(_open):
        store.close()


def _after_fork() -> None:
    """The child of a fork gets a default store of its own, and a lock that nobody holds."""
    global _lock, _default, _default_is_ours
    _lock = threading.Lock()
    _by_url.clear()
    if _default_is_ours:
        _default, _default_is_ours = None, False


os.register_at_fork(after_in_child=_after_fork)
