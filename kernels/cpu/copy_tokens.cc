#include "kernels/copy_tokens.h"

#include <cstring>

namespace kvferry {

void CopyTokens(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent) {
  const auto bytes = static_cast<size_t>(extent.token_bytes);
  if (bytes == 0 || extent.tokens <= 0) return;
  const bool runs = from.token_stride == extent.token_bytes && to.token_stride == extent.token_bytes;
  for (int64_t h = 0; h < extent.heads; ++h) {
    const uint8_t* source = from.data + h * from.head_stride;
    uint8_t* target = to.data + h * to.head_stride;
    if (runs) {
      std::memcpy(target, source, bytes * static_cast<size_t>(extent.tokens));
      continue;
    }
    for (int64_t t = 0; t < extent.tokens; ++t) {
      std::memcpy(target, source, bytes);
      source += from.token_stride;
      target += to.token_stride;
    }
  }
}

}  // namespace kvferry
