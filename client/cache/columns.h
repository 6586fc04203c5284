// Moving columns (tokens) of [B, H, S, D] tensors between one another and packed blocks. All copies of the cache happen
// here: on a CPU they run on the model's own intra-op threads, elsewhere through the tensor library.
#pragma once

#include <cstdint>
#include <vector>

#include "ATen/core/TensorBody.h"
#include "storage/base/block_view.h"
#include "storage/base/bytes.h"
#include "storage/base/checksum.h"

namespace kvferry {

// Keys and values of one layer, [B, H, S, Dk] and [B, H, S, Dv].
struct KeysValues {
  at::Tensor k, v;
  bool defined() const { return k.defined(); }
};

// A tensor without gradient history and outside inference mode, whatever the caller is in.
at::Tensor EmptyLike(const at::Tensor& like, at::IntArrayRef sizes);

// Copies columns [from_column, from_column + n) of `from` to columns starting at `to_column` of `to`; all rows and
// heads.
void CopyColumns(const at::Tensor& from, int64_t from_column, const at::Tensor& to, int64_t to_column, int64_t n);

// One block to pack: T columns of `row` from `column` on, K then V, each [H, T, D]. `sum` is the result.
struct PackJob {
  int64_t row = 0;
  int64_t column = 0;
  MutableByteView block;
  BlockSum sum;
};
void PackBlocks(const KeysValues& from, int64_t block_tokens, std::vector<PackJob>& jobs);

// One block to unpack: its first `tokens` of `block_tokens` to the columns from `column` on of `row`.
struct UnpackJob {
  int64_t row = 0;
  int64_t column = 0;
  int64_t tokens = 0;
  const BlockView* block = nullptr;
};
void UnpackBlocks(const std::vector<UnpackJob>& jobs, int64_t block_tokens, const KeysValues& to);

// Sets columns [column, column + n) of `row` to zero.
void ZeroColumns(const KeysValues& to, int64_t row, int64_t column, int64_t n);

// Copies columns of one row.
void CopyRowColumns(const KeysValues& from, int64_t from_column, const KeysValues& to, int64_t to_column, int64_t row,
                    int64_t n);

}  // namespace kvferry
