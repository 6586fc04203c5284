// Random copies between two buffers of random strides, for every implementation of CopyTokens.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/copy_tokens.h"

namespace kvferry {

// A copy and the buffers it works on. `source` is filled with random bytes, `target` with others.
struct CopyCase {
  TokenExtent extent;
  int64_t source_offset = 0, source_head = 0, source_token = 0;
  int64_t target_offset = 0, target_head = 0, target_token = 0;
  std::vector<uint8_t> source, target;

  ConstTokenRows From(const uint8_t* base) const { return {base + source_offset, source_head, source_token}; }
  TokenRows To(uint8_t* base) const { return {base + target_offset, target_head, target_token}; }
};

// Both sides are [heads, tokens, dim] or [tokens, heads, dim] with padding; sizes of case B76 of tests/cases.md among
// them.
inline CopyCase RandomCopyCase(std::mt19937_64& random) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  constexpr int64_t kTokenBytes[] = {1, 2, 3, 16, 64, 128, 256, 576, 656, 1023, 1024};
  CopyCase c;
  c.extent = {1 + below(5), 1 + below(20), kTokenBytes[below(std::size(kTokenBytes))]};
  const auto layout = [&](int64_t& offset, int64_t& head, int64_t& token) {
    const int64_t pad = below(3) * 16;
    if (below(2) == 0) {
      token = c.extent.token_bytes + pad;
      head = token * (c.extent.tokens + below(3));
    } else {
      head = c.extent.token_bytes + pad;
      token = head * (c.extent.heads + below(3));
    }
    offset = below(2) == 0 ? 0 : below(33);
    return offset + head * c.extent.heads + token * c.extent.tokens;
  };
  c.source.resize(static_cast<size_t>(layout(c.source_offset, c.source_head, c.source_token)));
  c.target.resize(static_cast<size_t>(layout(c.target_offset, c.target_head, c.target_token)));
  for (uint8_t& byte : c.source) byte = static_cast<uint8_t>(random());
  for (uint8_t& byte : c.target) byte = static_cast<uint8_t>(random());
  return c;
}

}  // namespace kvferry
