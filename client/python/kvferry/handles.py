"""Caches that are pickled as handles: their full blocks stay where they are."""

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager

from . import errors

_ttl: contextvars.ContextVar[float | None] = contextvars.ContextVar("kvferry_pickle_handles", default=None)


@contextmanager
def pickle_handles(ttl: float = 60.0) -> Iterator[None]:
    """Within it an OffloadedCache is pickled as a handle: a ticket for its full blocks, which stay in kvferryd, and the
    tokens after the last full block.

        with kvferry.pickle_handles(ttl=60):
            torch.distributed.broadcast_object_list([cache])

    The store keeps the blocks for `ttl` seconds, whatever becomes of this process; whoever loads the handle meanwhile,
    any number of times, has blocks of his own from then on, and UnavailableError or DataLossError after. He must reach
    the store by this process's URL. Outside of it, and where a handle cannot be (an embedded store, layers that stay on
    the device, no full block), the bytes themselves are pickled: right for files and other hosts.
    """
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)):
        raise TypeError(f"pickle_handles: ttl is a {type(ttl).__name__}, expected seconds")
    if not 0 < ttl <= 86400:
        raise errors.MismatchError(f"pickle_handles: ttl is {ttl} seconds, expected more than 0 and at most 86400")
    token = _ttl.set(float(ttl))
    try:
        yield
    finally:
        _ttl.reset(token)


def handle_ttl() -> float | None:
    """Seconds, within pickle_handles; else None."""
    return _ttl.get()
