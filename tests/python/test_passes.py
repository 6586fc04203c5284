"""A forward pass that breaks off between two layers: the same tokens, tried once more, never give other logits."""

import contextlib

import pytest
import torch
from models import draft, prompt, tiny
from test_operations import config_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    EncoderDecoderCache,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import MllamaForCausalLM

import kvferry
from kvferry import OffloadedCache

WINDOWS = ["mistral", "gemma2", "gemma3", "llama4"]
STATES = ["jamba", "qwen3_next", "lfm2", "zamba2"]


class Broken(Exception):
    pass


@contextlib.contextmanager
def broken_before(layer):
    """A model that stops there, as an interrupt or an error of its own would make it."""

    def stop(*_):
        raise Broken

    hook = layer.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()


def new(store, model, **options):
    return OffloadedCache(config=model.config, store=store, **dict(block_tokens=4, resident_layers=0) | options)


@pytest.mark.parametrize("passes", [0, 1, 3], ids="after {} passes".format)
@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("name", ["llama", *WINDOWS, *STATES])
def test_the_same_once_more(embedded_store, name, tokens, passes):
    model = tiny(name)
    with torch.no_grad():
        for broken in model.model.layers:
            cache, oracle = new(embedded_store, model), DynamicCache(config=model.config)
            for step in range(passes):
                ids = prompt(9 if step == 0 else 1, seed=step)
                for each in (cache, oracle):
                    model(ids, cache=each)
            ids = prompt(tokens, seed=9)
            with broken_before(broken), pytest.raises(Broken):
                model(ids, cache=cache)
            expected = model(ids, cache=oracle).logits
            try:
                logits = model(ids, cache=cache).logits
            except kvferry.MismatchError as error:
                assert "interrupted" in str(error) and "reset" in error.hint
                with pytest.raises(kvferry.MismatchError, match="incomplete"):
                    model(ids, cache=cache)
            else:
                assert broken is model.model.layers[0] and torch.equal(logits, expected)
            cache.reset()
            expected = model(ids, cache=DynamicCache(config=model.config)).logits
            assert torch.equal(model(ids, cache=cache).logits, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", *STATES])
def test_no_room_in_the_middle_of_a_pass(name):
    """The hint may say that the same call may be tried again only where that is so."""
    model = tiny(name)
    with kvferry.connect("embedded://", memory="128KiB") as store, torch.no_grad():
        cache, oracle = new(store, model, full_timeout=0), DynamicCache(config=model.config)
        for each in (cache, oracle):
            model(prompt(11), cache=each)
        for step in range(400):
            ids = prompt(1, seed=step)
            try:
                logits = model(ids, cache=cache).logits
            except kvferry.FullError:
                break
            assert torch.equal(logits, model(ids, cache=oracle).logits)
        else:
            assert name == "mistral"  # windows need no store
            return
        other = new(store, model, full_timeout=0)
        held = cache.get_seq_length()
        with contextlib.suppress(kvferry.Error):
            logits = model(ids, cache=cache).logits
        cache.reset()
        assert held > 11 and other.get_seq_length() == 0
        assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=DynamicCache(config=model.config)).logits)


def test_a_retry_after_room_was_made(store):
    """Full after a state has moved on: the retry is refused, whatever room there is by then."""
    model = tiny("jamba")
    with kvferry.connect("embedded://", memory="128KiB") as small, torch.no_grad():
        cache, hog = new(small, model, full_timeout=0), new(small, tiny("llama"), full_timeout=0)
        model(prompt(11), cache=cache)
        with pytest.raises(kvferry.FullError):
            tiny("llama")(prompt(400), cache=hog)
        with contextlib.suppress(kvferry.FullError):
            for step in range(400):
                tiny("llama")(prompt(4, seed=step), cache=hog)
        with pytest.raises(kvferry.FullError) as caught:
            for step in range(400):
                model(prompt(1, seed=step), cache=cache)
        assert "reset()" in caught.value.hint
        hog.reset()
        with pytest.raises(kvferry.Error, match="incomplete"):
            model(prompt(1), cache=cache)


def test_reading_a_state_counts_as_its_use(store):
    model = tiny("jamba")
    cache = new(store, model)
    with torch.no_grad():
        model(prompt(5), cache=cache)
        assert cache.layers[0].conv_states[0] is not None  # this does not
        model(prompt(1), cache=cache)
        assert cache.get_conv_state(0) is not None
        with pytest.raises(kvferry.MismatchError, match="interrupted"):
            model(prompt(1), cache=cache)


def test_masks_of_ones_own_between_passes(store):
    """One attention layer, a mask in the first pass and none of ours in the second: no sign of two updates in one."""
    model = tiny("jamba")
    config = type(model.config)(**model.config.to_dict() | dict(num_hidden_layers=2))
    torch.manual_seed(0)
    model = type(model)(config).eval()
    cache, oracle = new(store, model), DynamicCache(config=config)
    mask = torch.zeros(1, 1, 1, 10)
    with torch.no_grad():
        for each in (cache, oracle):
            model(prompt(9), cache=each)
        ours, theirs = (model(prompt(1), attention_mask=mask, cache=each).logits for each in (cache, oracle))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("config", [True, False], ids=["config", "no config"])
def test_masks_of_ones_own_and_one_layer(store, config):
    model = tiny("llama")
    model = type(model)(type(model.config)(**model.config.to_dict() | dict(num_hidden_layers=1))).eval()
    cache = OffloadedCache(config=model.config if config else None, store=store)
    oracle = DynamicCache(config=model.config)
    with torch.no_grad():
        for ids, mask in ((prompt(9), None), (prompt(1), torch.zeros(1, 1, 1, 10))):
            ours, theirs = (model(ids, attention_mask=mask, cache=each).logits for each in (cache, oracle))
            assert torch.equal(ours, theirs)


def looped(model_type, **options):
    """A model that comes back to its first layers, whose keys are those of other layers then."""
    common = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.2, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    if model_type == "inkling2_loop_text":
        del common["intermediate_size"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **common, **options)).eval()


LOOPED = [
    ("dory", dict(
        sliding_window=16, n_input_layers=1, n_output_layers=1, n_recurrent_loops=2, layer_types=["full_attention"] * 4,
    )),
    ("inkling2_loop_text", dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, unpadded_vocab_size=96,
        swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16, sliding_window_size=16, rel_extent=32,
        d_rel=4, n_layers_per_attn_res_block=1, loop_layer_index_start=1, loop_layer_index_end=3, loop_num_passes=2,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
    )),
]  # fmt: skip


@pytest.mark.parametrize("model_type, options", LOOPED, ids=["dory", "inkling2_loop"])
def test_layers_that_are_not_used_in_the_order_of_their_numbers(store, model_type, options):
    model = looped(model_type, **options)
    cache, oracle = new(store, model), DynamicCache(config=model.config)
    ours, theirs = (
        model.generate(prompt(20), cache=each, max_new_tokens=6, do_sample=False) for each in (cache, oracle)
    )
    assert torch.equal(ours, theirs)
    with torch.no_grad(), broken_before(model.model.layers[2]), pytest.raises(Broken):
        model(prompt(1), cache=cache)
    with torch.no_grad(), pytest.raises(kvferry.MismatchError, match="interrupted"):
        model(prompt(1), cache=cache)


def test_layers_filled_by_hand(store):
    """In any order, and parts of a layer apart; but what comes in pieces could be a pass that broke off."""
    cache = OffloadedCache(config=config_of(["hybrid", "full_attention", "full_attention"], 4), store=store)
    k = torch.ones(1, 2, 5, 4)
    for layer in (2, 0, 1):
        cache.update(k, k, layer)
    cache.update_recurrent_state(torch.ones(1, 3), 0)
    cache.update_conv_state(torch.ones(1, 3, 5), 0)
    assert [layer.get_seq_length() for layer in cache.layers] == [5] * 3
    cache = OffloadedCache(config=config_of(["full_attention"] * 2, 4), store=store)
    for _ in range(2):
        cache.update(k, k, 0)
    with pytest.raises(kvferry.MismatchError, match="layer 1 comes in late.*give all its tokens"):
        cache.update(k, k, 1)


def test_the_last_layer_by_hand_after_a_pass(store):
    """No second update in one pass, which would mean an encoder-decoder model."""
    model = tiny("llama")
    cache, k = new(store, model), torch.ones(1, 2, 1, 16)
    with torch.no_grad():
        model(prompt(9), cache=cache)
    for layer in reversed(range(len(cache.layers))):
        cache.update(k, k, layer)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("held", [9, 11, 12])
@pytest.mark.parametrize("how", ["lookup", "assisted"])
def test_assisted_generation_on_a_cache_that_holds_some_of_the_prompt(store, how, held):
    """transformers feeds the whole prompt again, behind what is held, and the text is another."""
    model, ids = tiny("llama"), prompt(12)
    options = dict(prompt_lookup_num_tokens=3) if how == "lookup" else dict(assistant_model=draft(model))
    options |= dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    cache = new(store, model)
    with torch.no_grad():
        model(ids[:, :held], cache=cache)
    with pytest.raises(kvferry.MismatchError, match=f"holds {held} tokens"):
        model.generate(ids, cache=cache, **options)
    assert cache.get_seq_length() == held
    cache.reset()
    expected = model.generate(ids, cache=DynamicCache(config=model.config), **options)
    assert torch.equal(model.generate(ids, cache=cache, **options), expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_bare_cache_for_an_encoder_decoder_model_is_refused(store, layers):
    torch.manual_seed(0)
    config = tiny("bart").config
    model = type(tiny("bart"))(type(config)(**config.to_dict() | dict(decoder_layers=layers))).eval()
    for cache in (OffloadedCache(store=store), OffloadedCache(config=model.config, store=store)):
        with pytest.raises(TypeError, match=r"EncoderDecoderCache\(OffloadedCache"), torch.no_grad():
            encoded = model.get_encoder()(prompt(7))
            model(encoder_outputs=encoded, decoder_input_ids=prompt(3), cache=cache)


def mllama(make):
    """Logits of an image's first pass and of three tokens behind it."""
    config = MllamaTextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, cross_attention_layers=[1, 3], max_position_embeddings=512, pad_token_id=0,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0), bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model, image = MllamaForCausalLM(config).eval(), torch.randn(1, 20, 64)
    with torch.no_grad():
        for gate in (p for name, p in model.named_parameters() if "gate" in name and p.numel() == 1):
            gate.fill_(1.0)
        cache = make(config)
        logits = [model(prompt(9), cross_attention_states=image, cache=cache).logits]
        for step in range(3):
            logits.append(model(prompt(1, seed=step), cache=cache).logits)
        cache.reorder_cache(torch.tensor([0]))
        cache.crop(-2)
        logits.append(model(prompt(2, seed=7), cache=cache).logits if make is not DynamicCache else None)
    return logits, cache


def test_cross_attention_between_the_layers_of_a_decoder(store):
    """Its keys are as many as the image has, and come once."""
    ours, cache = mllama(lambda config: OffloadedCache(config=config, store=store, block_tokens=4, resident_layers=0))
    theirs, _ = mllama(lambda config: DynamicCache(config=config))
    for a, b in list(zip(ours, theirs))[:4]:
        assert torch.equal(a, b)
    assert cache.layers[1].keys.shape[2] == 20 and cache.get_seq_length() == 12
    assert cache.stats().blocks_put > 0
    held = cache.stats().device_bytes
    assert held >= cache.layers[1].held_bytes() + cache.layers[3].held_bytes() > 0
    cache.reset()
    assert cache.layers[1].keys is None


def t5gemma(cross):
    """Logits of the decoder, whose cross-attention cache is made by `cross`, and of one that has none of ours."""
    part = dict(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=16, initializer_range=0.2,
    )  # fmt: skip
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=2)
    config = T5GemmaConfig(encoder=part, decoder=dict(part), vocab_size=96, is_encoder_decoder=True, **tokens)
    torch.manual_seed(3)
    model, ids = T5GemmaForConditionalGeneration(config).eval(), prompt(30)
    model.generation_config.update(**tokens)
    options = dict(max_new_tokens=20, do_sample=False, output_logits=True, return_dict_in_generate=True)
    caches = [None, EncoderDecoderCache(OffloadedCache(config=config, block_tokens=4, resident_layers=0), cross())]
    return [torch.stack(model.generate(ids, cache=cache, **options).logits) for cache in caches]


def test_a_cross_attention_cache_that_a_model_makes_anew(store):
    """T5Gemma makes one of the class it finds: of ours, store and bound would be lost."""
    with pytest.raises(TypeError, match=r"EncoderDecoderCache\(OffloadedCache\(...\), DynamicCache\(\)\)"):
        t5gemma(lambda: OffloadedCache(store=store))
    theirs, ours = t5gemma(DynamicCache)
    assert torch.equal(theirs, ours)
