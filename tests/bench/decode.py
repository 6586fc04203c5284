"""Tokens a second of SmolLM2 after 1,024 tokens of context, with each cache.

One loop for all: one forward pass of one token and an argmax, as greedy `generate` does it without its bookkeeping, so
that what differs is the cache. The model reads the context once, into the DynamicCache, and the others are filled with
its keys and values; then every round lets each decode a few tokens, in turning order. A ratio is the median over the
rounds of one round's two times, so that a machine that drifts does so for both.
"""

import statistics
import time

import smollm2
import torch
from transformers import DynamicCache, StaticCache

import kvferry

CONTEXT = 1024
RESIDENT_LAYERS = 2
LIMITS = {"embedded": 0.9, "grpc-unix": 0.55, "all-resident": 0.98}


class Contestant:
    """A cache, the token it is at and the seconds of its rounds."""

    def __init__(self, name: str, model, cache):
        self.name, self.model, self.cache = name, model, cache
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=ids, cache=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def fill_from(self, other: "Contestant") -> None:
        """Takes over the context of a DynamicCache."""
        for index, layer in enumerate(other.cache.layers):
            self.cache.update(layer.keys, layer.values, index)
        self.next = other.next

    def round(self, tokens: int, counts: bool) -> None:
        start = time.monotonic()
        for _ in range(tokens):
            self.tokens.append(int(self.next))
            self.next = self.step(self.next)
        if counts:
            self.seconds.append((time.monotonic() - start) / tokens)


def run(url: str, quick: bool) -> list[dict]:
    rounds, tokens = (23, 1) if quick else (20, 12)
    tokenizer, model = smollm2.load()
    ids = tokenizer(smollm2.licence(tokenizer, CONTEXT + 100), return_tensors="pt")["input_ids"][:, :CONTEXT]
    print(f"decode: SmolLM2-135M float32, {CONTEXT} tokens of context, {torch.get_num_threads()} threads; "
          f"{RESIDENT_LAYERS} of {model.config.num_hidden_layers} layers resident where layers leave\n",
          flush=True)  # fmt: skip
    with kvferry.connect("embedded://", memory="512MiB") as embedded, kvferry.connect(url) as grpc:
        caches = {
            "DynamicCache": DynamicCache(config=model.config),
            "StaticCache": StaticCache(config=model.config, max_cache_len=CONTEXT + (rounds + 1) * tokens),
            "embedded": _ours(model, embedded, RESIDENT_LAYERS),
            "grpc-unix": _ours(model, grpc, RESIDENT_LAYERS),
            "all-resident": _ours(model, embedded, None),
        }
        contestants = [Contestant(name, model, cache) for name, cache in caches.items()]
        reference, *others = contestants
        reference.next = reference.step(ids)
        for contestant in others:
            contestant.fill_from(reference)
        before = {name: cache.stats() for name, cache in caches.items() if name in LIMITS}
        for number in range(-1, rounds):  # the first round warms up
            for turn in range(len(contestants)):
                contestants[(number + turn) % len(contestants)].round(tokens, counts=number >= 0)
        costs = {name: _costs(before[name], caches[name].stats(), (rounds + 1) * tokens) for name in before}
    for contestant in contestants:
        if contestant.name in LIMITS and contestant.tokens != reference.tokens:
            raise SystemExit(f"decode: {contestant.name} wrote other tokens than DynamicCache")
    _show(contestants, costs)
    return [
        {
            "name": f"decode/smollm2/{c.name}/{CONTEXT}", "value": round(1 / statistics.median(c.seconds), 2),
            "unit": "tokens/s", "against": "DynamicCache", "limit": LIMITS[c.name],
            "ratio": round(_ratio(c, reference), 3),
        }
        for c in contestants if c.name in LIMITS
    ]  # fmt: skip


def _ours(model, store, resident_layers):
    return kvferry.OffloadedCache(config=model.config, store=store, resident_layers=resident_layers)


def _ratio(contestant: Contestant, reference: Contestant) -> float:
    return statistics.median(theirs / ours for ours, theirs in zip(contestant.seconds, reference.seconds, strict=True))


def _costs(before, after, tokens: int) -> tuple[float, float, float]:
    """Milliseconds a token copying and waiting, and KiB a token read back."""
    return (1e3 * (after.seconds_copying - before.seconds_copying) / tokens,
            1e3 * (after.seconds_waited - before.seconds_waited) / tokens,
            (after.bytes_got - before.bytes_got) / 1024 / tokens)  # fmt: skip


def _show(contestants: list[Contestant], costs: dict) -> None:
    print(f"  {'':<14}{'ms/token':>10}{'tokens/s':>10}{'ratio':>8}{'limit':>7}"
          f"{'copying':>11}{'waiting':>11}{'the rest':>11}{'read back':>13}")  # fmt: skip
    for c in contestants:
        ms = 1e3 * statistics.median(c.seconds)
        line = f"  {c.name:<14}{ms:>10.1f}{1e3 / ms:>10.1f}{_ratio(c, contestants[0]):>8.2f}"
        if c.name in costs:
            copying, waiting, kib = costs[c.name]
            line += (f"{LIMITS[c.name]:>7.2f}{copying:>8.2f} ms{waiting:>8.2f} ms{ms - copying - waiting:>8.2f} ms"
                     f"{kib:>9.0f} KiB")  # fmt: skip
        print(line)
    print("\n  copying and waiting are the cache's own time a token; DynamicCache's copying is in its ms/token\n")
