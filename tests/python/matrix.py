"""Which tiny models, generated in which ways, give with OffloadedCache the text they give with DynamicCache.

Prints the table, or with --write puts it into client/README.md:
env PYTHONPATH=build/release/python PATH=build/release/bin:$PATH .venv/bin/python tests/python/matrix.py --write
"""

import argparse
import functools
import itertools
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

import torch
import transformers
from daemon import Kvferryd
from models import MODELS, WAYS, cache_for, halves, tiny
from transformers import DynamicCache

import kvferry
from kvferry import OffloadedCache
from kvferry.layer import OffloadedLayer

README = Path(__file__).parents[2] / "client" / "README.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- /matrix -->\n"
EQUAL, ALIKE, DIFFERENT, REFUSED = "bit-equal", "ids equal", "different", "not in stock"
# By how much a model's logits may differ from stock's, and why.
TOLERANCES: dict[str, tuple[float, str]] = {}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@functools.cache
def stock(name: str, dtype: torch.dtype, way: str):
    """(ids, logits) with DynamicCache, or how transformers refuse this model in this way."""
    model = tiny(name, dtype)
    try:
        return WAYS[way](model, cache_for(model, DynamicCache))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same_bits(ours, theirs) -> bool:
    return all(torch.equal(a.view(_BITS[a.dtype]), b.view(_BITS[b.dtype])) for a, b in zip(ours, theirs, strict=True))


def distance(ours, theirs) -> float:
    """By how much the logits differ at most; infinite if a NaN is among them."""
    gaps = ((a.double() - b.double()).abs().max() for a, b in zip(ours, theirs, strict=True))
    return max(gap.nan_to_num(float("inf")).item() for gap in gaps)


def compare(name: str, text, expected, where: object = "") -> str:
    """EQUAL or ALIKE; anything else is an AssertionError."""
    (ids, logits), (expected_ids, expected_logits) = text, expected
    assert torch.equal(ids, expected_ids), f"{where} ids are {ids.tolist()}, expected {expected_ids.tolist()}"
    if same_bits(logits, expected_logits):
        return EQUAL
    step = next(i for i, both in enumerate(zip(logits, expected_logits)) if not same_bits(*zip(both)))
    off = distance(logits, expected_logits)
    assert off <= TOLERANCES.get(name, (-1,))[0], f"{where} logits differ from step {step} on, by up to {off}"
    return ALIKE


def kind(layer) -> str:
    """What becomes of a layer: it is offloaded, it keeps a window, a state or an index, or it shares another's KV."""
    if isinstance(layer, transformers.cache_utils.DummyLayer):
        return "shared"
    parts = ["offloaded"] if isinstance(layer, OffloadedLayer) else []
    parts += ["window"] if getattr(layer, "is_sliding", False) else []
    parts += ["state"] if hasattr(layer, "update_conv_state") else []
    parts += ["index"] if hasattr(layer, "update_indexer") else []
    return " + ".join(parts) or type(layer).__name__


def kinds(name: str) -> Counter:
    """How many of each kind of layer there are in a model's (self-attention) cache."""
    return Counter(kind(layer) for layer in halves(cache_for(tiny(name), OffloadedCache))[0].layers)


def run(name: str, dtype: torch.dtype, way: str, make=OffloadedCache, **options):
    """The text with our cache, and the cache."""
    model = tiny(name, dtype)
    cache = cache_for(model, make, **options)
    return WAYS[way](model, cache), cache


def check(name: str, dtype: torch.dtype, way: str, make=OffloadedCache, **options):
    """Asserts that the text with our cache is stock's; returns the cache."""
    text, cache = run(name, dtype, way, make, **options)
    compare(name, text, stock(name, dtype, way), options)
    return cache


def check_traffic(cache, resident_layers: int | None) -> None:
    """Asserts that blocks went to the store and came back if layers had to leave, and only then."""
    for half in halves(cache):
        offloaded = sum(isinstance(layer, OffloadedLayer) for layer in half.layers)
        leaving = 0 if resident_layers is None else max(offloaded - resident_layers, 0)
        half.flush()
        stats = half.stats()
        assert (stats.blocks_put > 0) == (resident_layers is not None and offloaded > 0), stats
        if leaving == 0:
            assert stats.blocks_got == 0, stats
        elif leaving == offloaded:
            assert stats.blocks_got > 0, stats


# The table.

# (data plane, block_tokens, resident_layers): every way of every model runs in the first and in one of the others.
SETTINGS = [("embedded", 4, 0), ("embedded", 8, 1), ("grpc", 8, 0), ("embedded", 8, None), ("grpc", 4, 1)]


def cell(stores: dict, name: str, way: str, number: int) -> str:
    """What the table says of a model in a way: the worst of its runs."""
    outcomes = set()
    for turn, dtype in enumerate((torch.float32, torch.bfloat16)):
        expected = stock(name, dtype, way)
        if isinstance(expected, str):
            return f"{REFUSED}: {expected}"
        other = SETTINGS[1 + (number + number // len(WAYS) + turn) % 4]
        for plane, block_tokens, resident_layers in [SETTINGS[0], other]:
            options = dict(store=stores[plane], block_tokens=block_tokens, resident_layers=resident_layers)
            try:
                text, cache = run(name, dtype, way, **options)
                check_traffic(cache, resident_layers)
                outcomes.add(compare(name, text, expected))
            except Exception as error:
                print(f"{name} {way} {dtype} {plane} {block_tokens=} {resident_layers=}: {error!r}", file=sys.stderr)
                outcomes.add(DIFFERENT)
    return next(outcome for outcome in (DIFFERENT, ALIKE, EQUAL) if outcome in outcomes)


def markdown(cells: dict[tuple[str, str], str]) -> str:
    """The table, with the refusals below it."""
    refusals: dict[str, int] = {}
    rows = [["model", "layers", *WAYS], ["---"] * (2 + len(WAYS))]
    for name in MODELS:
        rows.append([name, ", ".join(f"{count} {kind}" for kind, count in kinds(name).items())])
        for way in WAYS:
            outcome, _, refusal = cells[name, way].partition(": ")
            if refusal:
                refusal = textwrap.shorten(refusal.replace("`", "").replace(type(tiny(name)).__name__, "..."), 120)
                outcome += f" ({refusals.setdefault(refusal, 1 + len(refusals))})"
            rows[-1].append(outcome)
    lines = [f"| {' | '.join(row)} |" for row in rows] + [""]
    return "\n".join(lines + [f"{number}. {refusal}" for refusal, number in refusals.items()]) + "\n"


def published() -> dict[tuple[str, str], str]:
    """The cells of the README's table, by (model, way)."""
    text = README.read_text().split(BEGIN)[1].split(END)[0]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines() if "|" in line
    )
    return {(row[0], way): outcome for row in rows for way, outcome in zip(head[2:], row[2:], strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into client/README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, Kvferryd(Path(folder)) as daemon:
        stores = {"embedded": kvferry.connect("embedded://", memory="256MiB"), "grpc": kvferry.connect(daemon.url)}
        pairs = itertools.product(MODELS, WAYS)
        cells = {pair: cell(stores, *pair, number) for number, pair in enumerate(pairs)}
        for store in stores.values():
            store.close()
    table = markdown(cells)
    if arguments.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + table + END + rest.split(END)[1])
    else:
        print(table, end="")
    sys.exit(DIFFERENT in cells.values())


if __name__ == "__main__":
    main()
