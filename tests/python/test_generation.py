"""A generation loop of one's own, and generate() on a cache that holds some of the prompt."""

import pytest
import torch
from models import greedy, prompt, tiny
from transformers import DynamicCache, EncoderDecoderCache

import kvferry
from kvferry import OffloadedCache


def new(store, config=None):
    return OffloadedCache(config=config, store=store, block_tokens=4, resident_layers=0)


def pad_to_multiple(rows: list[torch.Tensor], multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left pads: token ids and mask [batch, tokens]."""
    tokens = -(-max(len(row) for row in rows) // multiple) * multiple
    ids, mask = torch.zeros(2, len(rows), tokens, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, tokens - len(row) :], mask[i, tokens - len(row) :] = row, 1
    return ids, mask


def own_loop(model, cache, ids, mask, new_tokens):
    """The loop of the README; returns ids [batch, new_tokens] and logits."""
    out, logits = [], []
    with torch.inference_mode():
        for _ in range(new_tokens):
            mask = kvferry.attention_mask(cache, mask, ids)
            positions = kvferry.position_ids(cache, mask, ids)
            step = model(ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1).logits[:, -1]
            ids = step.argmax(-1, keepdim=True)
            logits.append(step)
            out.append(ids)
    return torch.cat(out, dim=1), logits


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_loop_of_the_readme_gives_what_generate_gives(store, multiple):
    model = tiny("llama")
    ids, mask = pad_to_multiple([prompt(n)[0] for n in (13, 5, 9)], multiple)
    expected = model.generate(ids, attention_mask=mask, cache=DynamicCache(config=model.config), max_new_tokens=12,
                              do_sample=False, output_logits=True, return_dict_in_generate=True)  # fmt: skip
    out, logits = own_loop(model, new(store, model.config), ids, mask, 12)
    assert torch.equal(out, expected.sequences[:, ids.shape[1] :])
    assert all(torch.equal(a, b) for a, b in zip(logits, expected.logits, strict=True))


def test_positions_do_not_depend_on_padding(store):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    cache = new(store)
    assert kvferry.position_ids(cache, mask, 5).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    cache.update(*torch.ones(2, 3, 2, 3, 4), 0)
    assert kvferry.position_ids(cache, mask.bool(), torch.ones(3, 2)).tolist() == [[1, 2], [3, 4], [0, 0]]
    for wrong, message in (
        (mask[:, :3], "3 columns, expected 5"), (mask[:1], "1 rows, expected 3"), (-1e9 * mask.float(), "values from"),
    ):  # fmt: skip
        with pytest.raises(kvferry.MismatchError, match=message):
            kvferry.position_ids(cache, wrong, torch.ones(3, 2))
    with pytest.raises(kvferry.MismatchError, match="1 rows, expected 3 as held"):
        kvferry.attention_mask(cache, mask[:1], 2)


def test_masks_of_another_length_are_refused_with_both_numbers(store):
    """Models take a mask that is too short without a word, and their logits are wrong."""
    cache = new(store)
    for layer in range(2):
        cache.update(*torch.ones(2, 3, 2, 5, 4), layer)
    ids = torch.ones(3, 2, dtype=torch.long)
    assert kvferry.attention_mask(cache, None, ids).shape == (3, 7)
    held = torch.tensor([[0, 1, 1, 1, 1]] * 3)
    assert kvferry.attention_mask(cache, held, ids).tolist() == [[0, 1, 1, 1, 1, 1, 1]] * 3
    assert kvferry.attention_mask(cache, held, 1).shape == (3, 6)
    whole = torch.ones(3, 7)
    assert kvferry.attention_mask(cache, whole, ids) is whole
    for columns in (1, 2, 4, 6, 8):
        with pytest.raises(kvferry.MismatchError, match=rf"{columns} columns, expected 5 .* or 7"):
            kvferry.attention_mask(cache, torch.ones(3, columns), ids)
    for mask, more, message in [
        (torch.ones(2, 7), ids, "2 rows, expected 3"), (torch.ones(7), ids, r"shape \[7\]"), (None, 2, "mask is None"),
        (held, 0, "new is 0, expected 1"), (held, ids[0], r"new has shape \[2\]"),
    ]:  # fmt: skip
        with pytest.raises(kvferry.MismatchError, match=message):
            kvferry.attention_mask(cache, mask, more)
    for mask, more in (([1], ids), (held, 1.5), (held, True)):
        with pytest.raises(TypeError, match="expected"):
            kvferry.attention_mask(cache, mask, more)


def generate(model, ids, cache, **options):
    options = dict(max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True) | options
    out = model.generate(ids, cache=cache, **options)
    return out.sequences, out.logits


def prefilled(model, ids, cache):
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("options", [{}, dict(prefill_chunk_size=4), dict(use_mask=True)], ids=str)
def test_a_cache_that_covers_the_prompt_gives_up_its_last_token(store, name, options):
    """transformers would feed the whole prompt again, behind itself, and go on from that without a word."""
    model, ids = tiny(name), prompt(12)
    options = dict(options)
    if options.pop("use_mask", False):
        options["attention_mask"] = torch.ones_like(ids)
    expected = generate(model, ids, DynamicCache(config=model.config))
    cache = prefilled(model, ids, new(store, model.config))
    for _ in range(2):  # the second time on what a first generate left of it
        sequences, logits = generate(model, ids, cache, **options)
        assert torch.equal(sequences, expected[0])
        torch.testing.assert_close(torch.stack(logits), torch.stack(expected[1]))
        assert cache.get_seq_length() == 12 + 8 - 1
        cache.activate_past_recording()
        cache.reset() if name == "mistral" else cache.crop(-7)
        if name == "mistral":
            prefilled(model, ids, cache)


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("held_more", [0, 2])
def test_an_encoder_decoder_cache_that_covers_the_decoders_prompt(store, name, held_more):
    model, ids, decoder_ids = tiny(name), prompt(7), prompt(9)

    def pair(make):
        return EncoderDecoderCache(make(), make())

    def stock():
        return DynamicCache()

    def ours():
        return new(store, model.config.get_text_config(decoder=True))

    options = dict(decoder_input_ids=decoder_ids, max_new_tokens=4)
    oracle, cache = pair(stock), pair(ours)
    expected = generate(model, ids, oracle, **options)
    sequences, logits = generate(model, ids, cache, **options)
    assert torch.equal(torch.stack(logits), torch.stack(expected[1]))
    length = cache.get_seq_length()
    covered = sequences[:, : length - held_more]  # all of them, as the mask says; without one they would be new tokens
    covered = options | dict(decoder_input_ids=covered, decoder_attention_mask=torch.ones_like(covered))
    if held_more:
        with pytest.raises(kvferry.MismatchError, match=f"holds {length} tokens, more than the {length - held_more}"):
            generate(model, ids, cache, **covered)
        return
    oracle.crop(-1)
    expected = generate(model, ids, oracle, **covered)
    sequences, logits = generate(model, ids, cache, **covered)
    assert torch.equal(sequences, expected[0])
    assert torch.equal(torch.stack(logits), torch.stack(expected[1]))
    assert cache.get_seq_length() == length + 3
    assert type(cache.get_seq_length()) is int


def test_new_tokens_alone_are_not_taken_for_the_prompt(store):
    """As many new tokens as are held, with a mask over all: nothing is given up."""
    model, ids = tiny("llama"), prompt(12)
    expected = generate(model, ids, DynamicCache(config=model.config))[1]
    cache = prefilled(model, ids[:, :6], new(store, model.config))
    sequences, logits = generate(model, ids[:, 6:], cache, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected))
    assert cache.get_seq_length() == 12 + 7


def test_a_cache_that_holds_more_than_the_prompt(store):
    model, ids = tiny("llama"), prompt(12)
    cache = prefilled(model, ids, new(store, model.config))
    with pytest.raises(kvferry.MismatchError, match="holds 12 tokens, more than the 9 of the prompt"):
        generate(model, ids[:, :9], cache)
    assert cache.get_seq_length() == 12
    cache.crop(-3)
    assert torch.equal(
        generate(model, ids[:, :9], cache)[0], generate(model, ids[:, :9], DynamicCache(config=model.config))[0]
    )


def test_lengths_are_plain_numbers_elsewhere(store):
    model = tiny("llama")
    cache = new(store, model.config)
    greedy(model, cache)
    length = cache.get_seq_length()
    assert type(length) is int and length - cache.get_seq_length() == 0 and cache.get_seq_length() == length
