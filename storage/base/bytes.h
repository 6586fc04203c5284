// Byte ranges and sizes. A view borrows: whoever hands it out says how long it lives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace kvferry {

using ByteView = absl::Span<const uint8_t>;
using MutableByteView = absl::Span<uint8_t>;

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;
inline constexpr uint64_t kGiB = 1024 * kMiB;

// Smallest multiple of `unit` (a power of two) that is not below `n`.
constexpr uint64_t RoundUp(uint64_t n, uint64_t unit) { return (n + unit - 1) & ~(unit - 1); }

}  // namespace kvferry
