"""A real model: 64 tokens after at least a thousand, greedy, logits equal bit for bit in float32."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvferry import OffloadedCache

sys.path.insert(0, str(Path(__file__).parents[2] / "client" / "examples"))
import smollm2  # noqa: E402

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(2)
    yield smollm2.load()
    torch.set_num_threads(1)


def generate(model, cache):
    tokenizer, model = model
    ids = tokenizer(smollm2.licence(tokenizer, 1040), return_tensors="pt")["input_ids"]
    assert ids.shape[1] >= 1000
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), cache=cache, do_sample=False, max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, DynamicCache(config=model[1].config))


@pytest.mark.smollm2
@pytest.mark.timeout(600)
def test_smollm2(store, model, expected):
    cache = OffloadedCache(config=model[1].config, store=store, resident_layers=2)
    ids, logits = generate(model, cache)
    assert torch.equal(ids, expected[0])
    assert torch.equal(logits, expected[1])
    stats = cache.stats()
    blocks = cache.get_seq_length() // 64
    assert stats.blocks_put == 30 * blocks and stats.blocks_got > 0
    assert stats.device_bytes < stats.stored_bytes
