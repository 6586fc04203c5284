#include "kernels/copy_tokens.h"

namespace kvferry {

void CopyTokensRef(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent) {
  for (int64_t h = 0; h < extent.heads; ++h) {
    for (int64_t t = 0; t < extent.tokens; ++t) {
      for (int64_t i = 0; i < extent.token_bytes; ++i) {
        to.data[h * to.head_stride + t * to.token_stride + i] =
            from.data[h * from.head_stride + t * from.token_stride + i];
      }
    }
  }
}

}  // namespace kvferry
