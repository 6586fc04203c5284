"""Faults that users of comparable caches reported (B..: tests/cases.md), on the client's side."""

import copy
import multiprocessing
import pickle

import pytest
import torch
from models import LAYERS, greedy, prompt, tiny
from transformers import DynamicCache, EncoderDecoderCache

import kvferry
from kvferry import OffloadedCache


def new(store, **options):
    return OffloadedCache(store=store, **(dict(block_tokens=2, resident_layers=1) | options))


def kv(tokens, batch=1, seed=0, dim=4):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 2, tokens, dim, generator=generator) for _ in range(2))


def fill(cache, tokens, batch=1, layers=3):
    """Two passes: in the first one a cache without a config learns its layers, and nothing leaves the device."""
    for part in (slice(0, 1), slice(1, tokens)):
        for layer in range(layers):
            k, v = kv(tokens, batch, seed=layer)
            cache.update(k[:, :, part], v[:, :, part], layer)
    return cache


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


def test_B01_crop(store):
    """The rule of transformers 5.24: crop(0) keeps all, crop(-n) drops n, more than held empties, n > 0 is refused."""
    cache = fill(new(store), 3)
    cache.crop(0)
    assert lengths(cache) == [3] * 3
    cache.crop(-2)
    assert lengths(cache) == [1] * 3
    cache.crop(-5)
    assert lengths(cache) == [0] * 3
    with pytest.raises(ValueError, match="10"):
        cache.crop(10)
    k, v = kv(1, seed=9)
    for layer in range(3):
        ours = cache.update(k, v, layer)
        assert torch.equal(ours[0], k) and torch.equal(ours[1], v)
    assert lengths(cache) == [1] * 3
    cache.crop(-1)
    assert lengths(cache) == [0] * 3 and cache.stats().stored_bytes == 0


@pytest.mark.parametrize("resident_layers", [0, 1, LAYERS, None])
def test_B05_second_question_on_one_context(store, resident_layers):
    """Question A, back to the context, question B: as B on a fresh cache; dtype and length unchanged."""
    model = tiny("llama", torch.bfloat16)
    context, a, b = prompt(21), prompt(7, seed=1), prompt(6, seed=2)
    cache = OffloadedCache(config=model.config, store=store, block_tokens=4, resident_layers=resident_layers)

    def ask(cache, question):
        ids = torch.cat([context, question], dim=1)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=9, do_sample=False,
                             output_logits=True, return_dict_in_generate=True)  # fmt: skip
        return out.sequences, torch.stack(out.logits)

    with torch.no_grad():
        model(context, cache=cache)
    ask(cache, a)
    cache.crop(-(cache.get_seq_length() - 21))
    assert lengths(cache) == [21] * LAYERS and cache.layers[0].keys.dtype == torch.bfloat16
    again, fresh = DynamicCache(config=model.config), ask
    with torch.no_grad():
        model(context, cache=again)
    for ours, theirs in zip(ask(cache, b), fresh(again, b), strict=True):
        assert torch.equal(ours, theirs)


def test_B11_reorder_reaches_every_part(store):
    """Tails, resident layers, blocks in the store, keys and values: all follow the index; the index may be anywhere."""
    cache, oracle = fill(new(store), 7, batch=3), fill(DynamicCache(), 7, batch=3)
    for index in (torch.tensor([2, 0, 0]), torch.tensor([1, 1, 2], dtype=torch.int32)):
        cache.reorder_cache(index)
        oracle.reorder_cache(index)
        for (k, v, _), theirs in zip(cache, oracle.layers, strict=True):
            assert torch.equal(k, theirs.keys) and torch.equal(v, theirs.values)
    with pytest.raises(kvferry.MismatchError, match="3"):
        cache.reorder_cache(torch.tensor([0, 3, 1]))
    assert lengths(cache) == [7] * 3


def test_B11_a_layer_alone_is_refused_by_name(store):
    cache = fill(new(store), 3)
    layer = cache.layers[1]
    for call in (lambda: layer.reorder_cache(torch.tensor([0])), lambda: layer.crop(-1), layer.reset,
                 lambda: layer.batch_repeat_interleave(2),
                 lambda: layer.batch_select_indices(torch.tensor([0]))):  # fmt: skip
        with pytest.raises(NotImplementedError, match="cache"):
            call()


def test_what_is_assigned_is_held(store):
    """As in transformers' layers: the layer goes on with what it was given, and follows every later operation."""
    cache, oracle = fill(new(store), 7, batch=2), fill(DynamicCache(), 7, batch=2)
    k, v = kv(7, batch=2, seed=33)
    for held in (cache, oracle):
        held.layers[1].keys, held.layers[1].values = k, v
        held.layers[2].values = held.layers[2].values * 2
    assert cache.stats().plain_layers == 2

    def check():
        for (ours_k, ours_v, _), theirs in zip(cache, oracle.layers, strict=True):
            assert torch.equal(ours_k, theirs.keys) and torch.equal(ours_v, theirs.values)

    check()
    for held in (cache, oracle):
        held.crop(-2)
        held.reorder_cache(torch.tensor([1, 1]))
        for layer in range(3):
            held.update(*kv(5, batch=2, seed=50 + layer), layer)
    check()
    forks = copy.deepcopy(cache), copy.deepcopy(oracle)
    for held in forks:
        held.batch_select_indices(torch.tensor([0]))
    check()
    cache, oracle = forks
    check()


def test_all_layers_assigned_anew(store):
    """Layer by layer another length and dtype, as who moves or converts a whole cache does."""
    cache, oracle = fill(new(store), 7, batch=2), fill(DynamicCache(), 7, batch=2)
    for held in (cache, oracle):
        for layer in held.layers:
            layer.keys = layer.keys[:, :, :4].double()
            layer.values = layer.values[:, :, :4].double()
        for layer in range(3):
            held.update(*(t.double() for t in kv(2, batch=2, seed=layer)), layer)
    for (k, v, _), theirs in zip(cache, oracle.layers, strict=True):
        assert k.dtype == torch.float64 and torch.equal(k, theirs.keys) and torch.equal(v, theirs.values)
    cache.reset()
    fill(cache, 3)
    assert cache.stats().plain_layers == 0 and cache.layers[0].keys.dtype == torch.float32


def test_assigning_what_is_held_changes_nothing(store):
    """As PEFT does with layer.keys.to(device): the layer stays offloaded, and no block is lost."""
    cache = fill(new(store, resident_layers=0), 5)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to("cpu"), layer.values.clone()
    assert cache.stats().plain_layers == 0


def test_half_an_assignment_is_not_used(store):
    """Keys of one length and values of another are no layer; who goes on is told so, and the other half mends it."""
    cache = fill(new(store), 5)
    cache.layers[1].keys = cache.layers[1].keys[:, :, :3]
    for use in (lambda: cache.update(*kv(1), 0), lambda: cache.crop(-1), lambda: list(cache), cache.layers[0].read):
        with pytest.raises(kvferry.MismatchError, match=r"keys \[1, 2, 3, 4\].*values \[1, 2, 5, 4\]"):
            use()
    assert cache.layers[1].values.shape[2] == 5
    cache.layers[1].values = cache.layers[1].values[:, :, :3]
    cache.layers[1].keys = cache.layers[1].keys
    for wrong, error in ((None, TypeError), (torch.zeros(3, 2), kvferry.MismatchError)):
        with pytest.raises(error):
            cache.layers[0].keys = wrong
    with pytest.raises(kvferry.MismatchError, match="layer 1|interrupted"):
        cache.update(*kv(1), 0)  # now this layer is out of step with the others


@pytest.mark.parametrize("first, second", [("keys", "values"), ("values", "keys")])
def test_keys_and_values_are_never_those_of_before(store, first, second):
    """The two are built together (see test_counts): what is kept for the second one must not outlive a change."""
    cache = fill(new(store), 5, batch=2)
    layer = cache.layers[1]
    expected = dict(zip(("keys", "values"), kv(5, batch=2, seed=1)))
    more = dict(zip(("keys", "values"), kv(1, batch=2, seed=9)))

    def after(change):
        """What `second` is after a change, for somebody who took and holds `first` before it."""
        held = getattr(layer, first)
        change()
        assert held is not None
        return getattr(layer, second)

    def append():
        for index in range(3):
            cache.update(*more.values(), index)

    assert torch.equal(after(append), torch.cat([expected[second], more[second]], dim=2))
    assert torch.equal(after(lambda: cache.crop(-3)), expected[second][:, :, :3])
    swapped = expected[second][[1, 0], :, :3]
    assert torch.equal(after(lambda: cache.reorder_cache(torch.tensor([1, 0]))), swapped)
    held = getattr(layer, first)
    getattr(layer, second).zero_()  # the caller's: nobody else gets it
    assert torch.equal(getattr(layer, second), swapped)
    assert torch.equal(held, expected[first][[1, 0], :, :3])
    assert after(cache.reset) is None


def test_B14_from_tensors(store):
    pairs = [kv(5, batch=2, seed=layer) for layer in range(4)]
    for data in (pairs, [(k, v, None) for k, v in pairs], [torch.stack(pair) for pair in pairs], iter(pairs)):
        cache = OffloadedCache(data, store=store, block_tokens=2, resident_layers=1)
        assert len(cache) == 4 and lengths(cache) == [5] * 4
        k, v = kv(1, batch=2, seed=9)
        for layer in range(4):
            ours = cache.update(k, v, layer)
            assert torch.equal(ours[0], torch.cat([pairs[layer][0], k], dim=2))
        assert cache.get_seq_length() == 6


def test_B14_from_two_caches_as_data_parallelism_gathers_them(store):
    caches = [fill(new(store), 5), fill(new(store), 5)]
    caches[1].reorder_cache(torch.tensor([0, 0]))  # other rows than the first one's
    joined = type(caches[0])(
        map(
            lambda entries: tuple(
                None if entries[0][i] is None else torch.cat([e[i] for e in entries]) for i in range(3)
            ),
            zip(*caches),
        )
    )
    assert len(joined) == 3 and lengths(joined) == [5] * 3
    for layer, (k, v, _) in enumerate(joined):
        for tensor, one in zip((k, v), kv(5, seed=layer)):
            assert torch.equal(tensor, one.repeat(3, 1, 1, 1))


def test_B14_skipped_layers_count_as_empty(store):
    cache = new(store)
    cache.update(*kv(3), 2)
    assert len(cache) == 3 and lengths(cache) == [0, 0, 3]
    assert cache.get_seq_length() == 0 and cache.get_seq_length(2) == 3 and cache.get_seq_length(7) == 0
    assert [entry[0] is None for entry in cache] == [True, True, False]
    cache.update(*kv(3), 0)
    assert lengths(cache) == [3, 0, 3]


def test_B16_the_callers_object_grows(store):
    model = tiny("llama")
    cache, oracle = new(store, config=model.config), DynamicCache(config=model.config)
    ids = prompt(9)
    with torch.no_grad():
        for step in range(30):
            out = model(ids, cache=cache)
            assert torch.equal(out.logits, model(ids, cache=oracle).logits)
            assert out.cache is cache and cache.get_seq_length() == 9 + step
            ids = out.logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_B16_a_copy_is_independent(store, copier):
    model = tiny("llama")
    prefix = new(store, config=model.config)
    with torch.no_grad():
        model(prompt(21), cache=prefix)
    held = [(k.clone(), v.clone()) for k, v, _ in prefix]
    for seed in (1, 2):
        branch, oracle = copier(prefix), DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt(21), cache=oracle)
            for step in range(5):
                ids = prompt(3, seed=10 * seed + step)
                assert torch.equal(model(ids, cache=branch).logits, model(ids, cache=oracle).logits)
        branch.reset()
        del branch
    assert prefix.get_seq_length() == 21
    for (k, v, _), (old_k, old_v) in zip(prefix, held, strict=True):
        assert torch.equal(k, old_k) and torch.equal(v, old_v)


def test_B16_a_copy_outlives_its_origin(store):
    prefix = fill(new(store), 9)
    held = [k.clone() for k, _, _ in prefix]
    branch = copy.deepcopy(prefix)
    prefix.reset()
    del prefix
    assert all(torch.equal(k, old) for (k, _, _), old in zip(branch, held, strict=True))


def _use_in_child(cache, queue):
    """In a forked child: the parent's cache is refused at once; a cache of one's own works."""
    try:
        cache.update(*kv(1), 0)
        queue.put("used the parent's cache")
    except kvferry.Error as error:
        queue.put(f"{error} {cache!r}")
    mine = fill(OffloadedCache(block_tokens=2, resident_layers=0), 5)
    mine.flush()
    queue.put((lengths(mine), mine.stats().blocks_put))


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_B17_forked_child(store):
    cache = fill(new(store, resident_layers=0), 6)
    cache.flush()
    held = [k.clone() for k, _, _ in cache]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use_in_child, args=(cache, queue))
    child.start()
    told = queue.get(timeout=90)
    assert "fork" in told and "(3 layers, of another process)" in told
    assert queue.get(timeout=90) == ([5] * 3, 2 * 3)
    child.join(90)
    assert child.exitcode == 0
    # The parent is unaffected, and the child's end gave nothing of it back.
    assert all(torch.equal(k, old) for (k, _, _), old in zip(cache, held, strict=True))
    cache.update(*kv(1), 0)
    assert torch.equal(cache.layers[0].keys[:, :, :6], held[0])


def test_pickle_ships_the_tensors(store):
    cache = fill(new(store), 7, batch=2)
    copied = pickle.loads(pickle.dumps(cache))
    assert type(copied) is OffloadedCache and lengths(copied) == [7] * 3
    for (k, v, _), (old_k, old_v, _) in zip(copied, cache, strict=True):
        assert torch.equal(k, old_k) and torch.equal(v, old_v)
    copied.update(*kv(1, batch=2), 0)
    assert lengths(cache) == [7] * 3


def test_gradients_reach_a_prefix(store):
    """Prefix tuning trains through the cache: such layers stay on the device and are right."""
    prefix = [tuple(t.requires_grad_() for t in kv(5, seed=layer)) for layer in range(2)]
    cache = OffloadedCache(prefix, store=store, block_tokens=2, resident_layers=0)
    total = sum(sum(t.sum() for t in cache.update(*kv(2, seed=9), layer)) for layer in range(2))
    total.backward()
    for k, v in prefix:
        assert torch.equal(k.grad, torch.ones_like(k)) and torch.equal(v.grad, torch.ones_like(v))
    assert cache.stats().plain_layers == 2 and cache.stats().blocks_put == 0


def test_a_second_update_in_one_pass_is_refused(store):
    """What an encoder-decoder model does to a cache that is not wrapped."""
    cache = fill(new(store), 3)
    cache.get_mask_sizes(1, 0)
    cache.update(*kv(1), 0)
    with pytest.raises(TypeError, match="EncoderDecoderCache"):
        cache.update(*kv(9), 0)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("cross", ["ours", "DynamicCache"])
def test_B12_encoder_decoder(store, name, beams, cross):
    """Both parts may be ours; the cross part is read by every step and grows only once."""
    model = tiny(name)
    ids = prompt(37, rows=2)
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0

    def generate(cache):
        out = model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=20, num_beams=beams, do_sample=False,
                             output_logits=True, return_dict_in_generate=True)  # fmt: skip
        return out.sequences, torch.stack(out.logits)

    decoder = new(store, config=model.config, block_tokens=4)
    encoder = new(store, config=model.config, block_tokens=4) if cross == "ours" else DynamicCache()
    for ours, theirs in zip(
        generate(EncoderDecoderCache(decoder, encoder)), generate(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    ):
        assert torch.equal(ours, theirs)
    assert decoder.get_seq_length() == 20 and encoder.get_seq_length() == 37
    assert decoder.stats().blocks_put > 0 and (cross != "ours" or encoder.stats().blocks_put > 0)


def test_an_encoder_decoder_model_is_told_to_wrap_the_cache(store):
    model = tiny("bart")
    with pytest.raises(TypeError, match=r"EncoderDecoderCache\(OffloadedCache"):
        model.generate(prompt(9), cache=new(store, config=model.config), max_new_tokens=4)


def test_generate_again_after_reset(store):
    model = tiny("gpt2")
    cache = new(store, config=model.config)
    first = greedy(model, cache)[0]
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats().stored_bytes == 0
    assert torch.equal(greedy(model, cache)[0], first)
