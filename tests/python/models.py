"""Tiny random models with every kind of cache layer, and the ways text is generated."""

import copy
import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, EncoderDecoderCache

LAYERS = 4
VOCABULARY = 96
_TOKENS = dict(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=None, pad_token_id=0)
_GROUPED = _TOKENS | dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, initializer_range=0.2,
)  # fmt: skip
_GEMMA = _GROUPED | dict(head_dim=24, query_pre_attn_scalar=24, sliding_window=16)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
_LATENT = dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=20,
    n_routed_experts=4, num_experts_per_tok=2, topk_group=1, moe_intermediate_size=48,
)  # fmt: skip
_UNTIED = dict(tie_word_embeddings=False)  # or they say the last token again for ever
# By the model_type of transformers, or a name of ours. All windows but one are far shorter than the prompts.
_CONFIGS = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | dict(head_dim=24),
    "gpt2": _TOKENS | dict(n_embd=48, n_layer=LAYERS, n_head=3, n_positions=512, initializer_range=0.2),
    "bloom": _TOKENS | _UNTIED | dict(hidden_size=48, n_layer=LAYERS, n_head=4, initializer_range=0.2),
    "qwen3_moe": _GROUPED | _EXPERTS | dict(head_dim=24, moe_intermediate_size=48, initializer_range=0.3),
    "deepseek_v3": _GROUPED | _LATENT | dict(n_group=2, first_k_dense_replace=1, num_mtp_layers=0),
    "glm_moe_dsa": _GROUPED | _LATENT | dict(n_group=1, index_topk=16, index_head_dim=16, index_n_heads=2),
    "mistral": _GROUPED | dict(sliding_window=16),
    "mistral_wide": _GROUPED | dict(model_type="mistral", sliding_window=400),
    "gemma2": _GEMMA | _UNTIED,
    "gemma3": _GEMMA | _UNTIED | dict(model_type="gemma3_text", num_hidden_layers=6, sliding_window_pattern=3),
    "gemma3n": _GROUPED | _UNTIED | dict(
        model_type="gemma3n_text", num_hidden_layers=5, sliding_window=16, num_kv_shared_layers=2, head_dim=24,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding", "full")], laurel_rank=8,
        hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY, altup_num_inputs=2,
    ),
    "llama4": _GROUPED | dict(
        model_type="llama4_text", head_dim=24, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
        attention_chunk_size=16, no_rope_layers=[1, 0] * 2, moe_layers=[1, 3],
    ),
    "gpt_oss": _GROUPED | dict(
        head_dim=24, sliding_window=16, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters=dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, beta_fast=32.0, beta_slow=1.0,
                             truncate=False, original_max_position_embeddings=128),
    ),
    "jamba": _GROUPED | _EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4),
    "zamba2": _GROUPED | dict(
        num_key_value_heads=4, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8, n_mamba_heads=4,
        chunk_size=8, num_mem_blocks=2, use_mem_rope=True, use_shared_attention_adapter=True, adapter_rank=4,
    ),
    "qwen3_next": _GROUPED | _EXPERTS | dict(
        head_dim=24, moe_intermediate_size=48, shared_expert_intermediate_size=48, full_attention_interval=2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    "lfm2": _GROUPED | _UNTIED | dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    "mamba": _TOKENS | _UNTIED | dict(
        hidden_size=48, state_size=8, num_hidden_layers=LAYERS, time_step_rank=4, initializer_range=0.3
    ),
    "bart": _TOKENS | dict(
        d_model=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=256, max_position_embeddings=256, init_std=1.2, decoder_start_token_id=2,
        forced_eos_token_id=None,
    ),
    "t5": _TOKENS | dict(
        d_model=48, d_kv=16, d_ff=64, num_layers=3, num_decoder_layers=3, num_heads=4, initializer_factor=2.0,
        decoder_start_token_id=2, feed_forward_proj="gated-gelu",
    ),
}  # fmt: skip
MODELS = tuple(_CONFIGS)
FULL_ATTENTION = MODELS[:5]  # every layer of these is offloaded


@functools.cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model, the same in every run."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(**dict(model_type=name) | _CONFIGS[name])
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config).to(dtype).eval()


@functools.cache
def draft(model: torch.nn.Module) -> torch.nn.Module:
    """An assistant that is right some of the time: the model with a little noise."""
    assistant, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in assistant.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += 0.1 * weight.float().std(correction=0) * noise
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # else it is adapted from run to run
    return assistant


def halves(cache) -> list:
    """The caches that a cache is made of: two for an encoder-decoder model."""
    pair = isinstance(cache, EncoderDecoderCache)
    return [cache.self_attention_cache, cache.cross_attention_cache] if pair else [cache]


def cache_for(model: torch.nn.Module, make, **options):
    """What the model's generate takes: a cache of the kind `make`, or a pair of them."""
    caches = [make(config=model.config, **options) for _ in range(1 + model.config.is_encoder_decoder)]
    return EncoderDecoderCache(*caches) if len(caches) == 2 else caches[0]


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """Token ids [rows, tokens] without the pad token."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)


def _generate(model, cache, ids, new, **options):
    options = dict(max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True) | options
    mask = options.pop("attention_mask", torch.ones_like(ids))
    out = model.generate(ids, attention_mask=mask, cache=cache, **options)
    return out.sequences, out.logits


def greedy(model, cache):
    return _generate(model, cache, prompt(60), 24)


def sampling(model, cache):
    torch.manual_seed(11)
    return _generate(model, cache, prompt(59), 20, do_sample=True, temperature=1.3)


def beams(model, cache):
    return _generate(model, cache, prompt(58, rows=2), 20, num_beams=3)


def padded(model, cache):
    """Four rows of unlike lengths, padded on the left."""
    ids, mask = prompt(62, rows=4), torch.ones(4, 62, dtype=torch.long)
    for row, pads in enumerate((0, 3, 33, 61)):
        ids[row, :pads] = 0
        mask[row, :pads] = 0
    return _generate(model, cache, ids, 20, attention_mask=mask)


def chunked(model, cache):
    """A prompt that is fed in pieces which are no multiple of a block."""
    return _generate(model, cache, prompt(77), 12, prefill_chunk_size=10)


def lookup(model, cache):
    """Drafts from the prompt: several tokens a step, and a crop after each."""
    ids = prompt(9).repeat(1, 7)
    return _generate(model, cache, ids, 24, prompt_lookup_num_tokens=5)


def chat(model, cache):
    """Three turns on one cache, each with the whole conversation."""
    ids, logits = prompt(45), []
    for turn in range(3):
        ids, more = _generate(model, cache, ids, 9)
        logits += more
        ids = torch.cat([ids, prompt(5, seed=turn + 1)], dim=1)
    return ids, tuple(logits)


def assisted(model, cache):
    """Drafts from another model: as lookup, but nearly every step takes some back."""
    return _generate(model, cache, prompt(57), 12, assistant_model=draft(model))


WAYS = {f.__name__: f for f in (greedy, sampling, beams, padded, chunked, lookup, chat, assisted)}
