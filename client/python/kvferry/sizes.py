"""Sizes in bytes as people write and read them."""

import re

from .errors import MismatchError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes from a number of them or from text such as "512MiB", "2 GiB", "1.5GB" or "4g" (a bare letter is binary).

    `name` is what a ValueError calls it.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"{name} is a {type(size).__name__}, expected bytes (int) or text such as '512MiB'")
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{name} is {size!r}, expected bytes (int) or text such as '512MiB' or '2GiB'")
        size = int(float(match[1]) * _UNITS[match[2]])
    if not 0 <= size < 2**63:
        raise ValueError(f"{name} is {size}, expected 0 bytes or more, below 2**63")
    return size


def parse_integer(value: int | None, name: str, optional: bool = False) -> int | None:
    """An int that a C int can hold; None too if `optional`. `name` is what an error calls it."""
    if value is None and optional:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}), expected an int{' or None' * optional}")
    value = value.__index__()
    if not -(2**31) <= value < 2**31:
        raise MismatchError(f"{name} is {value}, expected {-(2**31)} to {2**31 - 1}")
    return value


def parse_seconds(value: float, name: str) -> float:
    """Seconds as a float; whether they make sense is for who uses them to say."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__} ({value!r}), expected seconds")
    return float(value)


def format_size(size: float) -> str:
    """Bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
