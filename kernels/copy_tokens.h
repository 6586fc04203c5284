// Copying runs of tokens between attention layout [heads, tokens, dim] with any strides and the contiguous layout of a
// block: packing, unpacking, appending and cutting are all this one operation.
#pragma once

#include <cstdint>

namespace kvferry {

// Token t of head h starts at data + h * head_stride + t * token_stride; strides are in bytes and may be anything, also
// zero or negative. The elements of one token are contiguous.
struct ConstTokenRows {
  const uint8_t* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};
struct TokenRows {
  uint8_t* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

struct TokenExtent {
  int64_t heads = 0;
  int64_t tokens = 0;
  int64_t token_bytes = 0;  // dim * element size
};

// Copies extent.heads x extent.tokens tokens. The two must not overlap. Runs on the calling thread.
void CopyTokens(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent);

// The contract: plain loops, byte by byte.
void CopyTokensRef(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent);

}  // namespace kvferry
