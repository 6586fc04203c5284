"""States and indexers as models bring them, and what cannot be right."""

import pytest
import torch
from test_layers import contents, kv, new, state

import kvferry


@pytest.mark.parametrize("bad, why", [
    (lambda cache: cache.update_conv_state(torch.ones(2, 6, 5), 0, conv_kernel_size=0), "conv_kernel_size.*is 0"),
    (lambda cache: cache.update_conv_state(torch.ones(2, 6, 5), 0, conv_kernel_size=-1), "conv_kernel_size.*is -1"),
    (lambda cache: cache.update_conv_state(torch.ones(2, 6, 5).to_sparse(), 0), "sparse_coo"),
    (lambda cache: cache.update_conv_state(torch.ones(2, 6, 5, device="meta"), 0), "meta"),
    (lambda cache: cache.update_conv_state(torch.ones(2), 0), r"\[batch, ...\]"),
    (lambda cache: cache.update_recurrent_state(torch.ones(2, 0), 0), "at least 1"),
    (lambda cache: cache.update_recurrent_state(torch.ones(2, 3, device="meta"), 0), "meta"),
    (lambda cache: cache.update_indexer(torch.ones(2, 0, 4), 1), r"\[2, 0, 4\]"),
    (lambda cache: cache.update_indexer(torch.ones(2, 5, 4, device="meta"), 1), "meta"),
    (lambda cache: cache.update_indexer(torch.nested.nested_tensor([torch.ones(2, 4)] * 2), 1), "Tensor"),
])  # fmt: skip
def test_bad_states_change_nothing(store, bad, why):
    cache = new(store, "linear_attention", "indexed_attention")
    with pytest.raises(kvferry.MismatchError, match=why):
        bad(cache)
    assert cache.stats().device_bytes == 0 and not cache.has_previous_state(0)
    state(cache, 0, 2)
    assert cache.update_indexer(torch.ones(2, 3, 4), 1).shape == (2, 3, 4)
    held = contents(cache)
    with pytest.raises(kvferry.MismatchError, match=why):
        bad(cache)
    assert contents(cache) == held


def test_states_of_another_dtype(store):
    """Among floating-point ones transformers keeps the first one's; the keys of an indexer become another."""
    cache = new(store, "linear_attention", "indexed_attention")
    state(cache, 0, 2)
    cache.update_indexer(torch.ones(2, 3, 4), 1)
    cache.update(*kv(3, batch=2), 1)
    assert cache.update_recurrent_state(torch.ones(2, 2, 4, 4).double(), 0).dtype == torch.float32
    cache.update_conv_state(torch.ones(2, 5, 1).double(), 0)
    assert cache.layers[0].conv_states[0].dtype == torch.float32
    with pytest.raises(kvferry.MismatchError, match="torch.float64.*expected torch.float32"):
        cache.update_indexer(torch.ones(2, 1, 4).double(), 1)
    cache = new(store, "linear_attention")
    state(cache, 0, 2)
    with pytest.raises(kvferry.MismatchError, match="torch.int32.*expected torch.float32"):
        cache.update_recurrent_state(torch.ones(2, 2, 4, 4).int(), 0)


def test_what_a_model_keeps_beside_is_no_batch(store):
    """qwen4_exp: token ids as a state of two dimensions, and positions [3, batch, tokens] before any update."""
    cache = new(store, "linear_attention", "indexed_attention")
    cache.layers[1].indexer_position_ids = torch.zeros(3, 1, 5)
    assert cache.update_conv_state(torch.ones(1, 5), 0).shape == (1, 5)
    assert cache.update_indexer(torch.ones(1, 5, 4), 1).shape == (1, 5, 4)
    with pytest.raises(kvferry.MismatchError, match="has batch 3, expected 1"):
        cache.update_recurrent_state(torch.ones(3, 2), 0)


def test_an_indexer_keeps_in_step_with_its_keys(store):
    cache = new(store, "indexed_attention")
    cache.update_indexer(torch.ones(1, 2, 4), 0)
    with pytest.raises(kvferry.MismatchError, match="key_states has 1 tokens, expected 2"):
        cache.update(*kv(1), 0)
    cache = new(store, "indexed_attention")
    cache.update(*kv(3), 0)
    with pytest.raises(kvferry.MismatchError, match="indexer_key_states has 2 tokens, expected 3"):
        cache.update_indexer(torch.ones(1, 2, 4), 0)
