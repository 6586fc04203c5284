"""Every tiny model in every way that transformers allows; matrix.py runs more of them and makes the README's table."""

import copy

import pytest
import torch
from matrix import DIFFERENT, REFUSED, check, check_traffic, kinds, published, stock
from models import MODELS, WAYS, cache_for, halves, prompt, tiny
from transformers import DynamicCache

from kvferry import OffloadedCache

PAIRS = [(name, way) for name in MODELS for way in WAYS]
# Each of these has a run of every ninth pair, which is another way for every model.
SETTINGS = [(torch.bfloat16, "embedded", 8, 1), (torch.float32, "grpc", 8, 0), (torch.bfloat16, "embedded", 4, 0)]
OTHERS = [(*pair, *setting) for turn, setting in enumerate(SETTINGS) for pair in PAIRS[3 * turn :: 9]]


class CroppedCache(OffloadedCache):
    """Counts the tokens that are taken back."""

    taken_back = 0

    def crop(self, tokens_to_remove):
        self.taken_back -= tokens_to_remove
        super().crop(tokens_to_remove)


def in_stock(name, dtype, way):
    """Whether transformers allow it, which is found out by trying; the README must know."""
    refused = isinstance(stock(name, dtype, way), str)
    assert refused == published()[name, way].startswith(REFUSED), stock(name, dtype, way)
    return not refused


@pytest.mark.parametrize("name, way", PAIRS)
def test_float32(embedded_store, name, way):
    if in_stock(name, torch.float32, way):
        options = dict(store=embedded_store, block_tokens=4, resident_layers=0)
        cache = check(name, torch.float32, way, CroppedCache, **options)
        check_traffic(cache, 0)
        assert (halves(cache)[0].taken_back > 0) == (way in ("lookup", "assisted"))


@pytest.mark.parametrize("name, way, dtype, plane, block_tokens, resident_layers", OTHERS, ids=str)
def test_other_settings(request, name, way, dtype, plane, block_tokens, resident_layers):
    if in_stock(name, dtype, way):
        store = request.getfixturevalue(f"{plane}_store")
        cache = check(name, dtype, way, store=store, block_tokens=block_tokens, resident_layers=resident_layers)
        check_traffic(cache, resident_layers)


@pytest.mark.parametrize("way", ["padded", "beams"])
@pytest.mark.parametrize("name", MODELS)
def test_eager_attention(embedded_store, name, way):
    """Its matrix products give other bits for tensors that lie otherwise."""
    if not in_stock(name, torch.float32, way):
        return
    model = copy.deepcopy(tiny(name))
    model.set_attn_implementation("eager")
    options = dict(store=embedded_store, block_tokens=4, resident_layers=1)
    caches = cache_for(model, DynamicCache), cache_for(model, OffloadedCache, **options)
    theirs, ours = (WAYS[way](model, cache) for cache in caches)
    assert torch.equal(theirs[0], ours[0])
    assert all(torch.equal(a, b) for a, b in zip(theirs[1], ours[1], strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_models_say_something(name):
    """Equal texts prove little if a model repeats one token, or forgets what it read."""
    model, ids = tiny(name), prompt(60)
    text, _ = stock(name, torch.float32, "greedy")
    assert len(text[0, -24:].unique()) >= 6
    ids[:, 20:24] = prompt(4, seed=1)
    starts = dict(decoder_input_ids=prompt(4)) if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        before, after = (model(tokens, **starts).logits[:, -1] for tokens in (prompt(60), ids))
    assert (before - after).abs().max() > 0.05


def test_every_kind_of_layer_is_there():
    expected = {"offloaded", "offloaded + state", "offloaded + index", "window", "state", "shared"}
    assert set().union(*map(kinds, MODELS)) == expected


def test_the_readme_has_every_model_and_way():
    cells = published()
    assert set(cells) == set(PAIRS), "run tests/python/matrix.py --write"
    assert DIFFERENT not in cells.values()
