"""Prefix tuning by PEFT's own code: it builds the cache of what it trains, so gradients must pass through."""

import copy

import peft
import pytest
import torch
from models import prompt, tiny
from transformers import cache_utils

from kvferry import OffloadedCache

# PEFT passes the cache under its old name.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PREFIX = 5


def prefix_tuned(name):
    """A model of one's own with a fresh prefix, the same in every call."""
    base, options = copy.deepcopy(tiny(name)), {}
    if name == "t5":  # whose heads together are not as wide as the model, as PEFT takes for granted
        options = dict(token_dim=base.config.num_heads * base.config.d_kv)
    config = peft.PrefixTuningConfig(
        task_type="SEQ_2_SEQ_LM" if name == "t5" else "CAUSAL_LM", num_virtual_tokens=PREFIX, **options
    )
    torch.manual_seed(3)
    return peft.get_peft_model(base, config).train()


def trained(model, steps=3):
    """Of each step the loss, the gradients and what was learnt."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    ids, mask, seen = prompt(14, rows=3), torch.ones(3, 14, dtype=torch.long), []
    mask[1, :4] = 0
    torch.manual_seed(5)  # for dropout
    for _ in range(steps):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(p.grad.clone() for p in parameters), *(p.detach().clone() for p in parameters)]
    return seen


def make_peft_build_ours(monkeypatch, store):
    """The caches that PEFT makes from now on: ours, which would all leave the device if no gradient held them."""
    caches = []

    def make(*arguments, **options):
        caches.append(OffloadedCache(*arguments, **options, store=store, block_tokens=2, resident_layers=0))
        return caches[-1]

    monkeypatch.setattr(peft.peft_model, "DynamicCache", make)
    monkeypatch.setattr(cache_utils, "DynamicCache", make)  # for EncoderDecoderCache, which PEFT gives tuples
    return caches


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs))
    losses = [tensor.item() for tensor in ours if tensor.dim() == 0]
    assert len(set(losses)) == len(losses) == 3, "each step changed the loss"
    assert all(tensor.abs().sum() > 0 for tensor in ours)


@pytest.mark.parametrize("device_map", [False, True], ids=["", "device map"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2"])
def test_prefix_tuning(monkeypatch, store, name, device_map):
    """GPT-2 has as many heads of keys as of queries, the others fewer; Gemma 2 has windows, and PEFT fills its cache by
    update. With a device map PEFT assigns layer.keys and layer.values."""
    models = [prefix_tuned(name) for _ in range(2)]
    if device_map:
        for model in models:
            model.get_base_model().hf_device_map = {"": torch.device("cpu")}
    theirs = trained(models[0])
    built = make_peft_build_ours(monkeypatch, store)
    assert_equal(trained(models[1]), theirs)
    assert [type(cache) for cache in built] == [OffloadedCache] * 3
    assert all(cache.get_seq_length() == PREFIX + 14 for cache in built)


def test_prefix_tuning_of_an_encoder_decoder_model(monkeypatch, store):
    """PEFT puts an empty cache in place of the cross part, which the encoder then fills."""
    theirs = trained(prefix_tuned("t5"))
    built = make_peft_build_ours(monkeypatch, store)
    assert_equal(trained(prefix_tuned("t5")), theirs)
    assert [type(cache) for cache in built] == [OffloadedCache] * 3 * 3
