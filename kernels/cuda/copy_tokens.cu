#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/cuda/copy_tokens.h"

namespace kvferry {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 4096;  // a grid-stride loop covers the rest

// One Word at a time; consecutive threads take consecutive words of a token, so accesses coalesce.
template <typename Word>
__global__ void CopyTokensKernel(ConstTokenRows from, TokenRows to, TokenExtent extent) {
  const int64_t words = extent.token_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t total = extent.heads * extent.tokens * words;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += step) {
    const int64_t word = i % words;
    const int64_t token = i / words % extent.tokens;
    const int64_t head = i / words / extent.tokens;
    const uint8_t* source = from.data + head * from.head_stride + token * from.token_stride;
    uint8_t* target = to.data + head * to.head_stride + token * to.token_stride;
    reinterpret_cast<Word*>(target)[word] = reinterpret_cast<const Word*>(source)[word];
  }
}

// True if every token of both sides starts at a multiple of `unit` bytes and is a multiple of it long.
bool Aligned(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent, int64_t unit) {
  const auto source = static_cast<int64_t>(reinterpret_cast<uintptr_t>(from.data));
  const auto target = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to.data));
  const int64_t values[] = {source,         target,          from.head_stride,  from.token_stride,
                            to.head_stride, to.token_stride, extent.token_bytes};
  return std::all_of(std::begin(values), std::end(values), [unit](int64_t v) { return v % unit == 0; });
}

template <typename Word>
cudaError_t Launch(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent, cudaStream_t stream) {
  const int64_t total = extent.heads * extent.tokens * (extent.token_bytes / static_cast<int64_t>(sizeof(Word)));
  const int64_t blocks = std::min<int64_t>((total + kThreads - 1) / kThreads, kMaxBlocks);
  CopyTokensKernel<Word><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(from, to, extent);
  return cudaGetLastError();
}

}  // namespace

cudaError_t CopyTokensCuda(const ConstTokenRows& from, const TokenRows& to, const TokenExtent& extent,
                           cudaStream_t stream) {
  if (extent.heads <= 0 || extent.tokens <= 0 || extent.token_bytes <= 0) return cudaSuccess;
  if (Aligned(from, to, extent, sizeof(uint4))) return Launch<uint4>(from, to, extent, stream);
  if (Aligned(from, to, extent, sizeof(uint32_t))) return Launch<uint32_t>(from, to, extent, stream);
  return Launch<uint8_t>(from, to, extent, stream);
}

}  // namespace kvferry
