"""kvferry: the KV cache of a language model, its layers ferried between the model and a cache store.

with kvferry.connect("unix:///run/kvferry/kvferry.sock") as store:
    cache = kvferry.OffloadedCache(config=model.config, store=store)
    model.generate(**inputs, cache=cache)
"""

from .errors import DataLossError, DeadlineError, Error, FullError, MismatchError, UnavailableError
from .handles import pickle_handles
from .store import Store, StoreStats, connect, set_default_store
from .store import default_store as get_default_store

__all__ = [
    "CacheStats",
    "DataLossError",
    "DeadlineError",
    "Error",
    "FullError",
    "MismatchError",
    "OffloadedCache",
    "Store",
    "StoreStats",
    "UnavailableError",
    "attention_mask",
    "connect",
    "get_default_store",
    "pickle_handles",
    "position_ids",
    "set_default_store",
]

_NEEDS_TORCH = {
    "OffloadedCache": "cache",
    "CacheStats": "stats",
    "attention_mask": "generation",
    "position_ids": "generation",
}


def __getattr__(name: str):
    """The caches are imported when they are asked for: stores alone need neither torch nor transformers."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    import importlib

    try:
        module = importlib.import_module(f".{_NEEDS_TORCH[name]}", __name__)
    except ImportError as error:
        raise ImportError(
            f"kvferry.{name} needs torch, transformers and kvferry's extension module _torch: {error}. Install them"
            " with `pip install torch==2.15.0 transformers==5.24.0` and build with -DKVFERRY_TORCH=ON, the default"
        ) from error
    value = getattr(module, name)
    globals()[name] = value
    return value
