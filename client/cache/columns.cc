#include "client/cache/columns.h"

#include <cstring>

#include "ATen/Parallel.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "kernels/copy_tokens.h"
#include "storage/base/checksum.h"

namespace kvferry {
namespace {

// Below this, waking the other threads costs more than the copy.
constexpr int64_t kSerialBytes = 128 * 1024;

// The tokens of one row as bytes.
TokenRows RowsOf(const at::Tensor& t, int64_t row, int64_t column) {
  const int64_t size = t.element_size();
  auto* base = static_cast<uint8_t*>(const_cast<void*>(t.const_data_ptr()));
  return {base + (row * t.stride(0) + column * t.stride(2)) * size, t.stride(1) * size, t.stride(2) * size};
}

ConstTokenRows ConstRowsOf(const at::Tensor& t, int64_t row, int64_t column) {
  const TokenRows rows = RowsOf(t, row, column);
  return {rows.data, rows.head_stride, rows.token_stride};
}

Elements ElementsOf(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case c10::kBFloat16:
      return Elements::kBfloat16;
    case c10::kHalf:
      return Elements::kFloat16;
    case c10::kFloat:
      return Elements::kFloat32;
    case c10::kDouble:
      return Elements::kFloat64;
    case c10::kFloat8_e4m3fn:
      return Elements::kFloat8E4m3fn;
    case c10::kFloat8_e5m2:
      return Elements::kFloat8E5m2;
    default:
      return Elements::kOther;
  }
}

int64_t TokenBytes(const at::Tensor& t) { return t.size(3) * t.element_size(); }

// Copies by address need the elements of a token side by side in this process's memory.
bool Addressable(const at::Tensor& t) { return t.device().is_cpu() && (t.size(3) <= 1 || t.stride(3) == 1); }

// Runs fn(i) for i in [0, n), on all intra-op threads if there are `bytes` enough to be worth it.
template <typename Fn>
void ForEach(int64_t n, int64_t bytes, const Fn& fn) {
  if (n <= 1 || bytes < kSerialBytes) {
    for (int64_t i = 0; i < n; ++i) fn(i);
    return;
  }
  at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fn(i);
  });
}

// The part of a block that starts at `bytes`, as a tensor [1, H, T, D] shaped as rows of `like`.
at::Tensor BlockTensor(uint8_t* bytes, const at::Tensor& like, int64_t block_tokens) {
  return at::from_blob(bytes, {1, like.size(1), block_tokens, like.size(3)},
                       like.options().device(c10::kCPU).requires_grad(false));
}

void PackPart(const at::Tensor& from, const PackJob& job, int64_t block_tokens, uint8_t* block) {
  if (Addressable(from)) {
    const int64_t token = TokenBytes(from);
    CopyTokens(ConstRowsOf(from, job.row, job.column), {block, token * block_tokens, token},
               {from.size(1), block_tokens, token});
    return;
  }
  BlockTensor(block, from, block_tokens).copy_(from.narrow(0, job.row, 1).narrow(2, job.column, block_tokens));
}

// Unpacks one head of one part; `offset` is where the part starts in the block.
void UnpackHead(const UnpackJob& job, int64_t block_tokens, int64_t offset, const at::Tensor& to, int64_t head) {
  const int64_t token = TokenBytes(to);
  const TokenRows rows = RowsOf(to, job.row, job.column);
  uint8_t* target = rows.data + head * rows.head_stride;
  const int64_t source = offset + head * block_tokens * token;
  if (rows.token_stride == token) {
    job.block->CopyTo(static_cast<uint64_t>(source), static_cast<uint64_t>(job.tokens * token), target);
    return;
  }
  for (int64_t t = 0; t < job.tokens; ++t) {
    job.block->CopyTo(static_cast<uint64_t>(source + t * token), static_cast<uint64_t>(token),
                      target + t * rows.token_stride);
  }
}

void UnpackOffDevice(const UnpackJob& job, int64_t block_tokens, int64_t offset, const at::Tensor& to) {
  const int64_t bytes = to.size(1) * block_tokens * TokenBytes(to);
  const at::Tensor staged = at::empty({1, to.size(1), block_tokens, to.size(3)}, to.options().device(c10::kCPU));
  job.block->CopyTo(static_cast<uint64_t>(offset), static_cast<uint64_t>(bytes),
                    static_cast<uint8_t*>(staged.data_ptr()));
  to.narrow(0, job.row, 1).narrow(2, job.column, job.tokens).copy_(staged.narrow(2, 0, job.tokens));
}

// What every copy runs under: plain tensors, no gradient history.
struct PlainTensors {
  c10::InferenceMode no_inference{false};
  c10::AutoGradMode no_grad{false};
};

}  // namespace

at::Tensor EmptyLike(const at::Tensor& like, at::IntArrayRef sizes) {
  const PlainTensors plain;
  return at::empty(sizes, like.options().requires_grad(false).memory_format(c10::MemoryFormat::Contiguous));
}

void CopyColumns(const at::Tensor& from, int64_t from_column, const at::Tensor& to, int64_t to_column, int64_t n) {
  if (n <= 0) return;
  const PlainTensors plain;
  if (!Addressable(from) || !Addressable(to)) {
    to.narrow(2, to_column, n).copy_(from.narrow(2, from_column, n));
    return;
  }
  const int64_t heads = from.size(1);
  const int64_t token = TokenBytes(from);
  ForEach(from.size(0) * heads, from.size(0) * heads * n * token, [&](int64_t i) {
    const int64_t row = i / heads, head = i % heads;
    ConstTokenRows source = ConstRowsOf(from, row, from_column);
    TokenRows target = RowsOf(to, row, to_column);
    source.data += head * source.head_stride;
    target.data += head * target.head_stride;
    CopyTokens(source, target, {1, n, token});
  });
}

void PackBlocks(const KeysValues& from, int64_t block_tokens, std::vector<PackJob>& jobs) {
  const PlainTensors plain;
  const int64_t k_bytes = from.k.size(1) * block_tokens * TokenBytes(from.k);
  const auto v_bytes = static_cast<uint64_t>(from.v.size(1) * block_tokens * TokenBytes(from.v));
  const ElementRun runs[] = {{static_cast<uint64_t>(k_bytes), ElementsOf(from.k)}, {v_bytes, ElementsOf(from.v)}};
  const auto pack = [&](int64_t i) {
    PackJob& job = jobs[static_cast<size_t>(i)];
    PackPart(from.k, job, block_tokens, job.block.data());
    PackPart(from.v, job, block_tokens, job.block.data() + k_bytes);
    job.sum = SumBlock(job.block, runs);
  };
  const auto n = static_cast<int64_t>(jobs.size());
  if (!Addressable(from.k) || !Addressable(from.v)) {  // the tensor library has threads of its own
    for (int64_t i = 0; i < n; ++i) pack(i);
    return;
  }
  ForEach(n, jobs.empty() ? 0 : n * static_cast<int64_t>(jobs[0].block.size()), pack);
}

void UnpackBlocks(const std::vector<UnpackJob>& jobs, int64_t block_tokens, const KeysValues& to) {
  const PlainTensors plain;
  const int64_t k_heads = to.k.size(1), heads = k_heads + to.v.size(1);
  const int64_t k_bytes = k_heads * block_tokens * TokenBytes(to.k);
  if (!to.k.device().is_cpu()) {
    for (const UnpackJob& job : jobs) {
      UnpackOffDevice(job, block_tokens, 0, to.k);
      UnpackOffDevice(job, block_tokens, k_bytes, to.v);
    }
    return;
  }
  const auto n = static_cast<int64_t>(jobs.size());
  const int64_t bytes = jobs.empty() ? 0 : n * static_cast<int64_t>(jobs[0].block->size());
  ForEach(n * heads, bytes, [&](int64_t i) {
    const UnpackJob& job = jobs[static_cast<size_t>(i / heads)];
    const int64_t head = i % heads;
    if (head < k_heads) {
      UnpackHead(job, block_tokens, 0, to.k, head);
    } else {
      UnpackHead(job, block_tokens, k_bytes, to.v, head - k_heads);
    }
  });
}

void ZeroColumns(const KeysValues& to, int64_t row, int64_t column, int64_t n) {
  if (n <= 0) return;
  const PlainTensors plain;
  for (const at::Tensor& t : {to.k, to.v}) t.narrow(0, row, 1).narrow(2, column, n).zero_();
}

void CopyRowColumns(const KeysValues& from, int64_t from_column, const KeysValues& to, int64_t to_column, int64_t row,
                    int64_t n) {
  if (n <= 0) return;
  CopyColumns(from.k.narrow(0, row, 1), from_column, to.k.narrow(0, row, 1), to_column, n);
  CopyColumns(from.v.narrow(0, row, 1), from_column, to.v.narrow(0, row, 1), to_column, n);
}

}  // namespace kvferry
