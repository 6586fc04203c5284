// Checksums of blocks and of headers: XXH3-64 throughout (xxhash.h of the distribution). And what is found out about a
// block while its bytes are at hand anyway.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "storage/base/bytes.h"

namespace kvferry {

inline constexpr uint64_t kChecksumTile = 16 * kKiB;

// XXH3-64 over the little-endian XXH3-64 values of the block's 16 KiB tiles (the last one may be short), so that
// threads and a GPU can share the work. An empty block has the checksum of no tiles.
uint64_t BlockChecksum(ByteView block);

// The same of a block that lies in pieces of any sizes.
uint64_t BlockChecksum(absl::Span<const ByteView> pieces);

// What an element of a block is, as far as it can be no number.
enum class Elements : uint8_t { kOther, kBfloat16, kFloat16, kFloat32, kFloat64, kFloat8E4m3fn, kFloat8E5m2 };
// By the name that PyTorch gives its type; kOther for those that cannot, or that we do not know.
Elements ElementsOf(absl::string_view dtype);

// A part of a block, all of whose elements are alike.
struct ElementRun {
  uint64_t bytes = 0;
  Elements elements = Elements::kOther;
};

// What is known of a block's bytes.
struct BlockSum {
  // Implicit: a checksum alone says nothing of the elements.
  BlockSum(uint64_t sum = 0, bool finite = true) : checksum(sum), is_finite(finite) {}  // NOLINT(*-explicit-*)

  uint64_t checksum = 0;
  bool is_finite = true;  // no element is known to be NaN or infinite
};
// Both in one pass over the bytes. REQUIRES: the runs are as long as the block, in order.
BlockSum SumBlock(ByteView block, absl::Span<const ElementRun> runs);

// Plain XXH3-64, for headers.
uint64_t HeaderChecksum(ByteView bytes);

}  // namespace kvferry
