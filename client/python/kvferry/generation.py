"""What a generation loop needs beside the cache: masks, positions, and how much of a prompt is held already."""

import sys

import torch
from transformers import Cache, EncoderDecoderCache

from . import errors

_LENGTH_OF_A_PAIR = EncoderDecoderCache.get_seq_length.__code__


def attention_mask(cache: Cache, mask: torch.Tensor | None, new: int | torch.Tensor) -> torch.Tensor:
    """The mask for a forward pass: [batch, held + new], 1 where a token is attended to and 0 where it is padding.

        mask = kvferry.attention_mask(cache, mask, ids)
        model(ids, attention_mask=mask, position_ids=kvferry.position_ids(cache, mask, ids), cache=cache)

    Args:
        cache: Any cache of transformers. `held` is its get_seq_length().
        mask: Of the tokens held, [batch, held]: the new tokens are then attended to, all of them; or of all tokens,
            [batch, held + new], which is checked and returned. None: nothing is padding.
        new: The new tokens' ids [batch, new], or how many there are (then `mask` must be given).

    A mask of another length is a MismatchError that says both numbers: models take what there is of a mask that is too
    short, and their logits are wrong without a word.
    """
    held, tokens = _held(cache), _count(new)
    if mask is None:
        if not isinstance(new, torch.Tensor):
            raise errors.MismatchError("mask is None and new is a number, expected one of the two to tell the batch")
        return torch.ones(new.shape[0], held + tokens, dtype=torch.long, device=new.device)
    _check_mask(cache, mask, new)
    if mask.shape[1] == held + tokens:
        return mask
    if mask.shape[1] != held:
        raise errors.MismatchError(
            f"mask has {mask.shape[1]} columns, expected {held} (tokens held) or {held + tokens} (held and new)"
        )
    return torch.cat([mask, mask.new_ones(mask.shape[0], tokens)], dim=1)


def position_ids(cache: Cache, mask: torch.Tensor, new: int | torch.Tensor) -> torch.Tensor:
    """Positions [batch, new] of the new tokens, the last columns of `mask` [batch, held + new], as attention_mask gives
    it: padding does not count, and is at 0. A mask of another length is a MismatchError."""
    held, tokens = _held(cache), _count(new)
    _check_mask(cache, mask, new)
    if mask.shape[1] != held + tokens:
        raise errors.MismatchError(f"mask has {mask.shape[1]} columns, expected {held + tokens} (tokens held and new)")
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    return positions[:, held:]


def _held(cache: Cache) -> int:
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}, expected a cache of transformers")
    return int(cache.get_seq_length())


def _check_mask(cache: Cache, mask: torch.Tensor, new: int | torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask is a {type(mask).__name__}, expected a tensor [batch, tokens]")
    if mask.dim() != 2:
        raise errors.MismatchError(f"mask has shape {list(mask.shape)}, expected [batch, tokens]")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise errors.MismatchError(f"mask has values from {mask.min()} to {mask.max()}, expected 0 and 1 alone")
    rows = new.shape[0] if isinstance(new, torch.Tensor) else mask.shape[0]
    if rows != mask.shape[0]:
        raise errors.MismatchError(f"mask has {mask.shape[0]} rows, expected {rows} as the new tokens")
    held = cache._rows() if hasattr(cache, "_rows") else 0  # of ours
    if held and held != mask.shape[0]:
        raise errors.MismatchError(f"mask has {mask.shape[0]} rows, expected {held} as held by the cache")


def _count(new: int | torch.Tensor) -> int:
    if isinstance(new, torch.Tensor):
        if new.dim() != 2:
            raise errors.MismatchError(f"new has shape {list(new.shape)}, expected token ids [batch, tokens]")
        return new.shape[1]
    if isinstance(new, bool) or not isinstance(new, int):
        raise TypeError(f"new is a {type(new).__name__}, expected token ids [batch, tokens] or their number")
    if new < 1:
        raise errors.MismatchError(f"new is {new}, expected 1 token or more")
    return new


def starts_through_a_pair() -> bool:
    """Whether the caller's caller is an EncoderDecoderCache that generate() asks for its length, before its first
    forward pass. It tells such a cache alone, and not the one for the decoder in it, that it was given by the user."""
    pair = sys._getframe(2)
    generate = pair.f_back
    return (
        pair.f_code is _LENGTH_OF_A_PAIR
        and generate is not None
        and generate.f_code.co_name == "_prefill"
        and generate.f_locals.get("is_first_iteration", False)
    )


class HeldLength(int):
    """The number of tokens a cache holds, as generate() sees it before its first forward pass.

    generate() takes `prompt length - held` tokens from the prompt's end, and where that is nothing it takes all: a
    cache that covers the whole prompt would be fed all of it again. So at that subtraction the cache gives up its last
    token, which is then computed once more. Holding more than the prompt is an error: it cannot be told what of it
    belongs to the prompt.
    """

    cache: object

    def __reduce__(self):
        return int, (int(self),)

    def __rsub__(self, prompt: int) -> int:
        held = int(self)
        asks = sys._getframe(1).f_code.co_name  # where generate() subtracts, and nobody else
        if asks != "_prefill" or not isinstance(prompt, int) or not self.cache._take_prompt():
            return prompt - held
        self.cache._ferry.check()
        if prompt < held:
            raise errors.MismatchError(
                f"the cache holds {held} tokens, more than the {prompt} of the prompt",
                hint="Remove what is not of this prompt with cache.crop(-n), or start from an empty cache.",
            )
        if prompt == held:
            try:
                self.cache.crop(-1)
            except errors.MismatchError as error:
                error.hint = (
                    "The cache holds the whole prompt and a layer of it cannot go back by a token: fill the cache with"
                    " all but the last token, or call cache.reset()."
                )
                raise
            return 1
        return prompt - held
