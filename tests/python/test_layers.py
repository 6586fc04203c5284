"""Layers that stay on the device: windows, states, indexers; where transformers' own are wrong, ours are not."""

import copy
import pickle

import pytest
import torch
from models import prompt
from test_operations import config_of
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig, MistralForCausalLM, StaticCache

import kvferry
from kvferry import OffloadedCache
from kvferry.device_layers import StateLayer, WindowLayer


def new(store, *kinds, window=4, **options):
    return OffloadedCache(config=config_of(list(kinds), window), store=store,
                          **(dict(block_tokens=2, resident_layers=0) | options))  # fmt: skip


def kv(tokens, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, 2, tokens, 4, generator=generator) for _ in range(2))


def contents(cache):
    """Keys, values and states of every layer, bit for bit."""
    tensors = [tensor for k, v, _ in cache for tensor in (k, v)]
    for layer in cache.layers:
        tensors += [t for name in ("conv_states", "recurrent_states") for t in getattr(layer, name, {}).values()]
    return [None if t is None else (t.shape, t.contiguous().numpy().tobytes()) for t in tensors]


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_a_window_of_any_size_gives_what_no_cache_gives(store, window):
    """With a window of one transformers' layer keeps everything, and the logits are wrong."""
    torch.manual_seed(3)
    model = MistralForCausalLM(
        MistralConfig(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                      num_key_value_heads=2, sliding_window=window, initializer_range=0.2)
    ).eval()  # fmt: skip
    cache, ids = OffloadedCache(config=model.config, store=store), prompt(12)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        parts = [model(ids[:, a:b], cache=cache).logits for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 12))]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 12


def test_a_window_does_not_keep_the_prompt_alive(store):
    cache = new(store, "sliding_attention", window=8)
    cache.update(*kv(5000), 0)
    layer = cache.layers[0]
    assert layer.keys.untyped_storage().nbytes() == 7 * 2 * 4 * 4
    for step in range(50):
        cache.update(*kv(1 + step % 3, seed=step), 0)
        assert layer.keys.untyped_storage().nbytes() <= 10 * 2 * 4 * 4


def test_what_the_caller_does_to_his_tensors_does_not_matter(store):
    cache = new(store, "sliding_attention", "full_attention")
    k, v = kv(3)
    expected = k.clone()
    for layer in range(2):
        cache.update(k, v, layer)
    k.zero_()
    for layer in range(2):
        assert torch.equal(cache.layers[layer].keys, expected)


def state(cache, layer, batch, seed=0, tokens=3):
    generator = torch.Generator().manual_seed(seed)
    cache.update_conv_state(torch.randn(batch, 5, tokens, generator=generator), layer, conv_kernel_size=3)
    cache.update_recurrent_state(torch.randn(batch, 2, 4, 4, generator=generator), layer)


def states(cache, layer):
    return cache.layers[layer].conv_states[0], cache.layers[layer].recurrent_states[0]


def test_states_follow_their_rows(store):
    """transformers' have neither of the two operations."""
    cache = new(store, "linear_attention", "full_attention")
    state(cache, 0, 3)
    cache.update(*kv(3, batch=3), 1)
    held = [tensor.clone() for tensor in states(cache, 0)]
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    for tensor, before in zip(states(cache, 0), held):
        assert torch.equal(tensor, before[[2, 2, 0, 0]])
    assert torch.equal(cache.layers[1].keys, kv(3, batch=3)[0][[2, 2, 0, 0]])


def test_B13_another_batch_after_reset(store):
    """transformers' states stay at the old batch, and a new state of one row is broadcast over it."""
    cache = new(store, "linear_attention", "hybrid", "sliding_attention", "full_attention")
    for batch in (3, 1, 2):
        for layer in range(4):
            if layer < 2:
                state(cache, layer, batch, seed=batch)
            if layer > 0:
                cache.update(*kv(3, batch=batch), layer)
        assert states(cache, 0)[1].shape[0] == batch and cache.layers[2].keys.shape[0] == batch
        cache.reset()
        assert not cache.has_previous_state(0)


def test_a_state_of_another_shape_is_refused(store):
    cache = new(store, "linear_attention")
    state(cache, 0, 2)
    held = [tensor.clone() for tensor in states(cache, 0)]
    with pytest.raises(kvferry.MismatchError, match=r"recurrent_states of layer 0 has shape \[2, 1, 4, 4\].*\[2, 2, 4"):
        cache.update_recurrent_state(torch.zeros(2, 1, 4, 4), 0)
    with pytest.raises(kvferry.MismatchError, match=r"conv_states of layer 0 has shape \[2, 4, 3\].*\[2, 5, new\]"):
        cache.update_conv_state(torch.zeros(2, 4, 3), 0)
    for name in ("recurrent", "conv"):
        with pytest.raises(kvferry.MismatchError, match=f"{name}_states of layer 0 has batch 1, expected 2"):
            getattr(cache, f"update_{name}_state")(torch.zeros(1, 5, 4), 0)
    assert all(torch.equal(a, b) for a, b in zip(states(cache, 0), held))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_rows_of_any_integer_type(store, dtype):
    cache = new(store, "full_attention", "sliding_attention", "linear_attention", "indexed_attention")
    for layer in (0, 1, 3):
        cache.update(*kv(3, batch=2), layer)
    state(cache, 2, 2)
    cache.reorder_cache(torch.tensor([1, 0], dtype=dtype))
    assert all(torch.equal(cache.layers[layer].keys, kv(3, batch=2)[0][[1, 0]]) for layer in (0, 1, 3))


@pytest.mark.parametrize("repeats", [2**27, 2**40, 2**100])
def test_too_many_rows_are_refused_at_once(store, repeats):
    cache = new(store, "full_attention")
    cache.update(*kv(3), 0)
    with pytest.raises(kvferry.MismatchError, match=f"repeats is {repeats}, expected at most 1048576"):
        cache.batch_repeat_interleave(repeats)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("kind", ["sliding_attention", "linear_attention", "hybrid", "hybrid_sliding", "conv"])
def test_a_crop_that_cannot_be_is_refused_before_anything_changes(store, kind):
    """transformers' layers before the one that refuses have been cropped by then, and a recurrent state stays."""
    cache = new(store, "full_attention", "sliding_attention", kind, "full_attention", window=40)
    if "sliding" in kind:
        cache.layers[2] = type(cache.layers[2])(sliding_window=3, number=2)
    for layer in range(4):
        if layer == 2 and kind not in ("sliding_attention", "conv"):
            state(cache, 2, 1, tokens=9)
        if layer == 2 and kind == "conv":
            cache.update_conv_state(torch.ones(1, 5, 9), 2, conv_kernel_size=3)
        if layer != 2 or "sliding" in kind or kind == "hybrid":
            cache.update(*kv(9, seed=layer), layer)
    before = contents(cache)
    with pytest.raises(kvferry.MismatchError, match="layer 2"):
        cache.crop(-2)
    assert contents(cache) == before and cache.get_seq_length() == 9
    cache.crop(0)
    cache.crop(-9)
    assert cache.get_seq_length() == 0
    cache.update(*kv(2, seed=7), 0)
    assert torch.equal(cache.layers[0].keys, kv(2, seed=7)[0])


def test_a_convolution_goes_back_to_its_beginning(store):
    """If every column was recorded; transformers' model would take what is left for columns before the next ones."""
    cache = new(store, "conv")
    cache.activate_past_recording()
    first = torch.ones(1, 5, 9)
    cache.update_conv_state(first, 0, conv_kernel_size=3)
    cache.crop(-10)
    assert cache.layers[0].conv_states[0].shape == (1, 5, 0) and not cache.has_previous_state(0)
    cache.crop(-1)
    assert cache.layers[0].held_bytes() == 0
    again = cache.update_conv_state(2 * first, 0, conv_kernel_size=3)
    assert torch.equal(again, 2 * first)
    cache.crop(-1)
    cache.update_conv_state(first, 0, conv_kernel_size=3)
    with pytest.raises(kvferry.MismatchError, match="holds 12 columns"):
        cache.crop(-13)  # the first were let go by the crop before
    with pytest.raises(kvferry.MismatchError, match="holds 12 columns"):
        cache.crop(-12)


def test_crop_before_the_first_update(store):
    """transformers' window raises AttributeError here."""
    cache = new(store, "sliding_attention", "full_attention")
    cache.crop(0)
    cache.crop(-3)
    assert cache.get_seq_length() == 0


def test_what_is_left_of_a_cropped_cache(store):
    """As in transformers: tensors without tokens, and the next update may bring another batch."""
    cache = new(store, "full_attention", "sliding_attention", "hybrid", "indexed_attention")
    for layer in range(4):
        cache.update(*kv(5, batch=2), layer)
    cache.update_indexer(torch.ones(2, 5, 3), 3)
    cache.crop(-7)
    for layer in cache.layers:
        assert layer.keys.shape == (2, 2, 0, 4) and layer.values.dtype == torch.float32
    cache.crop(-1)
    assert cache.layers[3].indexer_keys.shape == (2, 0, 3)
    for layer in range(4):
        cache.update(*kv(5, batch=3), layer)
    assert cache.update_indexer(torch.ones(3, 5, 2), 3).shape == (3, 5, 2)
    assert cache.layers[0].keys.shape == (3, 2, 5, 4)
    cache.reset()
    assert cache.layers[0].keys is None


@pytest.mark.parametrize("rows", [(0, 2), [2, 1], torch.tensor([True, False, True]), slice(1, None), range(2)])
def test_rows_may_be_given_in_any_way_that_tensors_allow(store, rows):
    cache, oracle = new(store, "full_attention", "sliding_attention"), DynamicCache()
    for layer in range(2):
        for held in (cache, oracle):
            held.update(*kv(3, batch=3), layer)
    for held in (cache, oracle):
        held.batch_select_indices(rows)
    for layer in range(2):
        assert torch.equal(cache.layers[layer].keys, oracle.layers[layer].keys)


def bad_tensors():
    good = torch.zeros(2, 2, 1, 4)
    return [
        ("rank", torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), r"key_states has shape \[2, 1, 4\].*4 dimensions"),
        ("no tokens", good[:, :, :0], good[:, :, :0], r"shape \[2, 2, 0, 4\].*at least 1"),
        ("dtype", good.half(), good.half(), "dtype Half, expected Float"),
        ("device", good.to("meta"), good.to("meta"), "device meta, expected cpu"),
        ("two devices", good, good.to("meta"), "value_states has device meta"),
        ("batch", good[:1], good[:1], "batch 1, expected 2"),
        ("heads", good[:, :1], good[:, :1], "heads 1, expected 2"),
        ("dim", good[..., :3], good, "dim 3, expected 4"),
        ("tokens", good, good.repeat(1, 1, 2, 1), "same tokens"),
    ]


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "hybrid", "hybrid_sliding"])
@pytest.mark.parametrize("bad", bad_tensors(), ids=lambda bad: bad[0])
def test_bad_tensors_are_named_and_change_nothing(store, kind, bad):
    """Alike for every kind of layer, by the number that the model gives it; and the cache goes on."""
    cache = new(store, "sliding_attention", "full_attention", kind)
    for layer in range(3):
        cache.update(*kv(5, batch=2, seed=layer), layer)
    before = contents(cache)
    _, k, v, message = bad
    with pytest.raises(kvferry.MismatchError, match=message) as caught:
        cache.update(k, v, 2)
    if "as in the layer's first update" in str(caught.value):
        assert "layer 2" in str(caught.value)
    assert contents(cache) == before
    for layer in range(3):
        cache.update(*kv(1, batch=2, seed=9), layer)


def test_bad_layer_numbers(store):
    cache = new(store, "sliding_attention", "full_attention")
    for number, error in ((2, IndexError), (-1, IndexError), (2**64, IndexError), (1.5, TypeError), ("0", TypeError)):
        with pytest.raises(error, match=r"layer_idx is .*expected"):
            cache.update(*kv(1), number)
    with pytest.raises(TypeError, match="list, expected a torch.Tensor"):
        cache.update([1.0], *kv(1)[1:], 1)
    with pytest.raises(TypeError, match=r"tokens_to_remove is a float \(1.5\), expected an int"):
        cache.crop(1.5)
    with pytest.raises(ValueError, match="repeats is 0, expected 1 or more"):
        cache.batch_repeat_interleave(0)


def test_nan_and_infinity_are_carried_as_they_are(store):
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]).expand(1, 2, 5, 4)
    cache = new(store, "sliding_attention", "full_attention", window=40)
    for layer in range(2):
        cache.update(odd, odd, layer)
    for layer in range(2):
        k, v = cache.update(odd[:, :, :1], odd[:, :, :1], layer)
        assert torch.equal(
            k.contiguous().view(torch.int32), odd[:, :, :1].expand(1, 2, 6, 4).contiguous().view(torch.int32)
        )


def test_layers_of_unlike_dtypes(store):
    """Blocks of a namespace may have one dtype a layer, and one for keys and another for values."""
    cache, oracle = new(store, *["full_attention"] * 4), DynamicCache()
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    for tokens in (5, 1, 2):
        for layer, dtype in enumerate(dtypes):
            k, v = kv(tokens, seed=10 * tokens + layer)
            k, v = k.to(dtype), v.to(torch.float64 if layer == 3 else dtype)
            for ours, theirs in zip(cache.update(k, v, layer), oracle.update(k, v, layer)):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert cache.stats().blocks_got > 0


def test_copies_where_gradients_flow(store):
    """deepcopy refuses such tensors; ours are copied, and the gradient reaches the origin."""
    cache = new(store, "sliding_attention", "full_attention")
    k, v = (tensor.requires_grad_() for tensor in kv(3))
    for layer in range(2):
        cache.update(k, v, layer)
    fork = copy.deepcopy(cache)
    sum(t.sum() for layer in range(2) for t in fork.update(*kv(1), layer)).backward()
    assert torch.equal(k.grad, torch.full_like(k, 2.0)) and torch.equal(v.grad, torch.full_like(v, 2.0))


def test_from_another_cache(store):
    """Ours or transformers', with the true length of a window and the states."""
    config = config_of(["sliding_attention", "full_attention", "hybrid"], 3)
    origin = DynamicCache(config=config)
    for layer in range(3):
        origin.update(*kv(9, seed=layer), layer)
    state(origin, 2, 1)
    for source in (origin, OffloadedCache(origin, store=store)):
        cache = OffloadedCache(source, store=store, block_tokens=2)
        assert [cache.get_seq_length(layer) for layer in range(3)] == [9, 9, 9]
        assert cache.get_mask_sizes(1, 0) == origin.get_mask_sizes(1, 0)
        for layer in range(3):
            assert torch.equal(cache.layers[layer].keys, origin.layers[layer].keys)
        assert all(torch.equal(a, b) for a, b in zip(states(cache, 2), states(origin, 2)))
        assert isinstance(cache.layers[0], WindowLayer) and isinstance(cache.layers[2], StateLayer)


def test_bad_data_to_begin_with(store):
    k, v = kv(2)
    for data, error, message in [
        ([k], kvferry.MismatchError, "layer 0 has 1 parts"),
        ([5], TypeError, "layer 0 is a int"),
        ([(k, v), (k, None)], kvferry.MismatchError, "layer 1 has only one of keys and values"),
        ([(k, v, torch.tensor([3, 4]))], kvferry.MismatchError, r"layer 0 has windows \[3, 4\]"),
        ([(k, v, torch.tensor(0))], kvferry.MismatchError, "sliding_window of layer 0 is 0"),
    ]:
        with pytest.raises(error, match=message):
            OffloadedCache(data, store=store)
    with pytest.raises(IndexError, match="ddp_cache_data has 3 layers, expected at most 1"):
        OffloadedCache([(k, v)] * 3, config=config_of(["full_attention"], 4), store=store)


@pytest.mark.parametrize("kinds", [("sliding", "full"), ("full", "sliding"), ("sliding", "sliding")], ids=str)
@pytest.mark.parametrize("masks", [True, False])
def test_a_pass_that_broke_off_beside_a_window_is_noticed(store, kinds, masks):
    """What broke it off need not have been ours: an interrupt, an exception in the model."""
    cache = new(store, *[f"{kind}_attention" for kind in kinds])

    def forward(layers):
        if masks:
            cache.get_mask_sizes(2, 0)
        for layer in range(layers):
            cache.update(*kv(2), layer)

    forward(2)
    forward(1)
    with pytest.raises(kvferry.MismatchError, match="interrupted: layer 1 was left out"):
        forward(2)
    with pytest.raises(kvferry.MismatchError, match="incomplete"):
        list(cache)
    cache.reset()
    forward(2)


def test_a_pass_that_broke_off_after_a_state_is_noticed(store):
    cache = new(store, "linear_attention", "full_attention")
    for _ in range(2):
        state(cache, 0, 1)
        cache.update(*kv(3), 1)
    state(cache, 0, 1)
    with pytest.raises(kvferry.MismatchError, match="interrupted: layer 1 was left out"):
        state(cache, 0, 1)
    with pytest.raises(kvferry.MismatchError, match="incomplete"):
        cache.update(*kv(3), 1)


def test_no_room_after_a_state_advanced(store):
    """The state cannot go back, so the same pass must not be taken for the first try of it."""
    cache = new(store, "linear_attention", "full_attention", device_memory=60_000)
    state(cache, 0, 1)
    cache.update(*kv(3), 1)
    state(cache, 0, 1)
    with pytest.raises(kvferry.FullError, match="60000"):
        cache.update(*kv(4000), 1)
    with pytest.raises(kvferry.Error, match="incomplete"):
        state(cache, 0, 1)


@pytest.mark.parametrize("kinds, bound", [(("sliding", "full"), 300_000), (("linear", "full"), 60_000)], ids=str)
def test_a_first_pass_without_room_leaves_an_empty_cache(store, kinds, bound):
    cache = new(store, *[f"{kind}_attention" for kind in kinds], window=8, device_memory=bound)
    for tokens in (4000, 3):
        first = cache.update(*kv(tokens), 0) if kinds[0] == "sliding" else state(cache, 0, 1, tokens=tokens)
        if tokens == 4000:
            with pytest.raises(kvferry.FullError, match=str(bound)):
                cache.update(*kv(tokens), 1)
            assert cache.get_seq_length(1) == 0 and not contents(cache)[0]
        else:
            cache.update(*kv(tokens), 1)
            assert first is None or first[0].shape[2] == 3


def test_row_operations_set_aside_no_more_and_more(store):
    cache = new(store, "full_attention", "sliding_attention", "linear_attention")
    for layer in range(2):
        cache.update(*kv(3), layer)
    state(cache, 2, 1)
    before = cache.stats().device_bytes
    for _ in range(70):
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1]))
    assert cache.stats().device_bytes <= before


def test_every_width_is_counted(store):
    """A window wider than the layer that began the pass, and an indexer's first keys."""
    bound = 200_000
    cache = new(store, "full_attention", "sliding_attention", window=64, device_memory=bound, block_tokens=8)
    cache.update(*torch.zeros(2, 1, 1, 50, 4), 0)
    with pytest.raises(kvferry.FullError, match=str(bound)):
        cache.update(*torch.zeros(2, 1, 16, 50, 64), 1)
    cache = new(store, "indexed_attention", device_memory=bound, block_tokens=8)
    cache.update(*torch.zeros(2, 1, 1, 20, 4), 0)
    with pytest.raises(kvferry.FullError, match=str(bound)):
        cache.update_indexer(torch.zeros(1, 20, 4096), 0)


def test_an_assigned_view_counts_with_all_it_keeps_alive(store):
    cache = new(store, "full_attention", device_memory=300_000)
    cache.update(*kv(10), 0)
    with pytest.raises(kvferry.FullError, match="300000"):
        cache.layers[0].keys = torch.zeros(1, 2, 100_000, 4)[:, :, :10]
        cache.update(*kv(1), 0)


def test_a_copy_of_an_assigned_layer_is_its_own(store):
    cache = new(store, "full_attention")
    cache.update(*kv(3), 0)
    ones = torch.ones(1, 2, 3, 4)
    cache.layers[0].keys = ones
    fork = copy.deepcopy(cache)
    ones.zero_()
    assert fork.layers[0].keys.sum() == 24


def test_keys_of_all_layers_then_values_of_all(store):
    cache = new(store, "full_attention", "full_attention")
    for layer in range(2):
        cache.update(*kv(5), layer)
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :2]
    for layer in cache.layers:
        layer.values = layer.values[:, :, :2]
    assert cache.get_seq_length() == 2
    cache.update(*kv(1), 0)


def test_an_indexer_and_a_recorded_past_come_along(store):
    cache = new(store, "indexed_attention", "conv", "full_attention")
    cache.activate_past_recording()
    cache.update(*kv(9), 0)
    cache.update_indexer(torch.ones(1, 9, 5), 0)
    cache.update_conv_state(torch.ones(1, 5, 9), 1, conv_kernel_size=3)
    cache.update(*kv(9), 2)
    joined = OffloadedCache(cache, store=store)
    assert joined.update_indexer(torch.ones(1, 1, 5), 0).shape == (1, 10, 5)
    assert joined.layers[1].conv_kernel_size == {0: 3} and joined.layers[1].conv_states[0].shape[-1] == 3


def test_states_do_not_follow_what_they_cannot(store):
    """Rows that were exchanged on the way are refused beside a state; windows are what the data say."""
    cache = new(store, "hybrid", "full_attention")
    for layer in range(2):
        cache.update(*kv(3, batch=2), layer)
    state(cache, 0, 2)
    with pytest.raises(kvferry.MismatchError, match="states cannot follow"):
        OffloadedCache(((k[[1, 0]], v[[1, 0]], w) for k, v, w in cache), store=store)
    cache = new(store, "sliding_attention")
    cache.update(*kv(9), 0)
    shorter = OffloadedCache(((k[:, :, :2], v[:, :, :2], w) for k, v, w in cache), store=store)
    assert shorter.get_seq_length() == 2


def test_a_cache_of_unknown_layers_is_refused(store):
    static = StaticCache(config=config_of(["full_attention"], 4), max_cache_len=8)
    with pytest.raises(kvferry.MismatchError, match="StaticLayer"):
        OffloadedCache(static, store=store)
    with pytest.raises(kvferry.MismatchError, match="EncoderDecoderCache"):
        OffloadedCache(EncoderDecoderCache(DynamicCache(), DynamicCache()), store=store)
    for empty in ([], DynamicCache()):
        cache = OffloadedCache(empty, store=store)
        cache.update(*kv(1), 0)


def test_all_layers_have_one_batch(store):
    cache = new(store, "full_attention", "sliding_attention", "linear_attention")
    cache.update(*kv(3, batch=2), 0)
    with pytest.raises(kvferry.MismatchError, match="batch 3, expected 2"):
        cache.update(*kv(3, batch=3), 1)


def test_rows_where_no_layer_is_offloaded(store):
    cache = new(store, "sliding_attention", "linear_attention")
    cache.batch_select_indices(torch.tensor([0]))  # nothing is held: nothing to do
    assert "0 tokens" in repr(cache) and "0 tokens" in repr(new(store, "linear_attention"))
    cache.update(*kv(3, batch=3), 0)
    state(cache, 1, 3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(cache.layers[0].keys, kv(3, batch=3)[0][[2, 0]]) and states(cache, 1)[0].shape[0] == 2
    for rows, error in ((torch.tensor([7]), kvferry.MismatchError), (torch.tensor([]).long(), kvferry.MismatchError)):
        with pytest.raises(error, match="indices"):
            cache.batch_select_indices(rows)
    for beams in (torch.tensor([True, False]), torch.tensor([0.0]), [1, 0], None):
        with pytest.raises(TypeError, match="beam_idx"):
            cache.reorder_cache(beams)
    with pytest.raises(kvferry.MismatchError, match="row index is 2"):
        cache.reorder_cache(torch.tensor([2, 0]))


def test_a_cache_between_two_layers_is_not_pickled(store):
    cache = new(store, "full_attention", "sliding_attention")
    for layer in range(2):
        cache.update(*kv(3), layer)
    cache.update(*kv(1), 0)
    with pytest.raises(kvferry.MismatchError, match=r"\[3, 4\] tokens.*between forward passes"):
        pickle.dumps(cache)


def test_what_the_iterator_gives_is_the_callers(store):
    cache = new(store, "full_attention", "sliding_attention")
    for layer in range(2):
        cache.update(*kv(3), layer)
    before = contents(cache)
    for k, v, _ in cache:
        k.zero_(), v.zero_()
    assert contents(cache) == before


def test_bad_options():
    for options, error in [
        (dict(device_memory=2**70), ValueError), (dict(on_full=None), ValueError), (dict(full_timeout="1"), TypeError),
        (dict(fetch_timeout=None), TypeError), (dict(config={}), TypeError), (dict(block_tokens=2**64), ValueError),
        (dict(resident_layers=1.5), TypeError), (dict(ddp_cache_data=5), TypeError),
    ]:  # fmt: skip
        (name,) = options
        with pytest.raises(error, match=f"{name} is .*expected"):
            OffloadedCache(**options)
