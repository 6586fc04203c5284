// Checksums of blocks and of headers: XXH3-64 throughout (xxhash.h of the distribution).
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "storage/base/bytes.h"

namespace kvferry {

inline constexpr uint64_t kChecksumTile = 16 * kKiB;

// XXH3-64 over the little-endian XXH3-64 values of the block's 16 KiB tiles (the last one may be short), so that
// threads and a GPU can share the work. An empty block has the checksum of no tiles.
uint64_t BlockChecksum(ByteView block);

// The same of a block that lies in pieces of any sizes.
uint64_t BlockChecksum(absl::Span<const ByteView> pieces);

// Plain XXH3-64, for headers.
uint64_t HeaderChecksum(ByteView bytes);

}  // namespace kvferry
