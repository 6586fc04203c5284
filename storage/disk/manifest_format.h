// The bytes of a manifest: what segments do not say themselves, in frames of whole blocks. Appended to, read whole at
// start, then written anew. storage/README.md gives every offset.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/segment_format.h"

namespace kvferry {

inline constexpr uint16_t kManifestVersion = 1;
inline constexpr uint64_t kMostFrameBytes = 64 * kMiB;

// Whose KV a namespace holds, and in which format.
struct NamespaceEntry {
  NamespaceId id{};
  std::string tenant;
  std::string spec;  // Canonical(spec)
};
// Images of this key with a smaller seq are dead, wherever they lie.
struct ErasedEntry {
  ChunkKey key;
  uint64_t seq = 0;
};
// All images of the namespace with a smaller seq are dead.
struct DroppedEntry {
  NamespaceId ns{};
  uint64_t seq = 0;
};
// An image that was written under a live name has been published.
struct PublishedEntry {
  DiskPlace place;
  ChunkKey key;
  Id128 parent{};
  uint64_t seq = 0;
  Lifetime lifetime;
};
// The image there is dead.
struct FreedEntry {
  DiskPlace place;
};
using ManifestEntry = std::variant<NamespaceEntry, ErasedEntry, DroppedEntry, PublishedEntry, FreedEntry>;

struct ManifestFrame {
  DiskStoreId store{};
  uint64_t number = 0;  // ascending from 0 in a file: what follows a torn frame cannot be taken for its successor
  std::vector<ManifestEntry> entries;
};

// Whole blocks. REQUIRES: the entries take less than kMostFrameBytes.
AlignedBuffer EncodeFrame(const ManifestFrame& frame);
// Bytes an entry takes in a frame.
uint64_t EncodedBytes(const ManifestEntry& entry);

// The frame at the start of `bytes`, and how many of them it has. DATA_LOSS if they are none, are cut or do not have
// their checksum; FAILED_PRECONDITION for another version.
struct DecodedFrame {
  ManifestFrame frame;
  uint64_t bytes = 0;
};
absl::StatusOr<DecodedFrame> DecodeFrame(ByteView bytes);

}  // namespace kvferry
