"""Tiny random models of the architectures whose layers are all full attention, and the ways text is generated."""

import functools

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

LAYERS = 4
VOCABULARY = 96
_GROUPED = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=None,
    pad_token_id=0,
)  # fmt: skip
_BUILDERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=24)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=LAYERS, n_head=3, n_positions=512, initializer_range=0.2,
                   bos_token_id=1, eos_token_id=None, pad_token_id=0)
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=LAYERS, n_head=4, initializer_range=0.2,
                    bos_token_id=1, eos_token_id=None, pad_token_id=0)
    ),
}  # fmt: skip
MODELS = tuple(_BUILDERS)
_SPECIAL = dict(
    vocab_size=VOCABULARY, d_model=48, bos_token_id=1, eos_token_id=None, pad_token_id=0, decoder_start_token_id=2
)
_BUILDERS |= {  # encoder-decoder models
    "bart": lambda: BartForConditionalGeneration(
        BartConfig(**_SPECIAL, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
                   encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=256, init_std=0.3,
                   forced_eos_token_id=None)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(**_SPECIAL, d_kv=12, d_ff=64, num_layers=3, num_decoder_layers=3, num_heads=4)
    ),
}  # fmt: skip


@functools.cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model, the same in every run."""
    torch.manual_seed(7)
    return _BUILDERS[name]().to(dtype).eval()


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


WAYS = {f.__name__: f for f in (greedy, sampling, beams, padded, chunked, lookup, chat)}
