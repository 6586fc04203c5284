"""What goes wrong, as Python exceptions: each also is the builtin that fits, and says what to do next."""

_CODES = {
    1: "CANCELLED",
    2: "UNKNOWN",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    15: "DATA_LOSS",
    16: "UNAUTHENTICATED",
}


class Error(Exception):
    """Any error of kvferry.

    Attributes:
        code: What kind, as gRPC and Abseil name it: "UNAVAILABLE".
        hint: The next thing to do. A traceback shows it under the message.
    """

    default_code = "UNKNOWN"
    default_hint = "This should not happen: please report it with this message."

    def __init__(self, message: str = "", *, code: str | None = None, hint: str | None = None):
        super().__init__(message)
        self.code = code or self.default_code
        self.hint = hint or self.default_hint

    @property
    def hint(self) -> str:
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = hint
        self.__notes__ = [f"hint: {hint}"]


class UnavailableError(Error, ConnectionError):
    """The store cannot be reached, is stopping, or has restarted and lost the blocks of live sequences."""

    default_code = "UNAVAILABLE"
    default_hint = (
        "Check that kvferryd runs at this URL. The connection is made again by itself: call cache.reset() and generate"
        " again from the first token."
    )


class DeadlineError(Error, TimeoutError):
    """The store did not answer in time."""

    default_code = "DEADLINE_EXCEEDED"
    default_hint = "Check that kvferryd is not stopped or overloaded; allow more time, or cache.reset() and recompute."


class MismatchError(Error, ValueError):
    """What was asked for does not fit: an argument, a model of another shape, a version, or a use at the wrong time."""

    default_code = "INVALID_ARGUMENT"
    default_hint = "Correct what the message names; nothing was changed."


class LayerIndexError(MismatchError, IndexError):
    """A layer that the cache does not have."""


class FullError(Error, MemoryError):
    """There is no room for more blocks, and what is stored is in use."""

    default_code = "RESOURCE_EXHAUSTED"
    default_hint = (
        "Raise device_memory if the message names it. Else free caches that are no longer used (cache.reset()), or give"
        " the store more memory: kvferryd --memory=..., or kvferry.connect('embedded://', memory='8GiB'). Nothing was"
        " changed: the same call may be tried again."
    )


class DataLossError(Error):
    """Blocks are gone or damaged. Their bytes were not used."""

    default_code = "DATA_LOSS"
    default_hint = "Call cache.reset() and generate again from the first token; look into the log of kvferryd."


# A miss (NOT_FOUND) reaches Python only where blocks of a live sequence should have been there: they are lost.
_CLASSES = {
    "CANCELLED": UnavailableError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "INVALID_ARGUMENT": MismatchError,
    "FAILED_PRECONDITION": MismatchError,
    "OUT_OF_RANGE": MismatchError,
    "ALREADY_EXISTS": MismatchError,
    "RESOURCE_EXHAUSTED": FullError,
    "DATA_LOSS": DataLossError,
    "NOT_FOUND": DataLossError,
}

_HINTS = {
    "UNAUTHENTICATED": "Give this client the credentials that the store asks for.",
    "PERMISSION_DENIED": "Ask who runs the store for access, or use another store.",
    "UNIMPLEMENTED": "Update the older of the two, kvferry or kvferryd.",
}


def from_status(code: int | str, message: str) -> Error:
    """The exception for a status of the C++ library, to be raised by the caller."""
    name = _CODES.get(code, "UNKNOWN") if isinstance(code, int) else code
    return _CLASSES.get(name, Error)(message, code=name, hint=_HINTS.get(name))
