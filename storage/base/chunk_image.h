// The one layout of a chunk: in memory, on disk and in an export the bytes are the same. It follows from the namespace
// spec alone:
//
//   header: magic, version, flags, seq, ns, key, parent, group, shard, tokens, slots, bytes, checksum[slots],
//           checksum of the header
//   slot l at header + sum of the rounded sizes of the slots before it
//           (rounded to 4096 if every slot is >= 32 KiB, else to 64)
//   image padded to 4096
//
// Integers are little-endian. storage/README.md gives every offset.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

inline constexpr uint32_t kChunkImageMagic = 0x4346564b;  // "KVFC"
inline constexpr uint16_t kChunkImageVersion = 1;
inline constexpr uint64_t kImageAlignment = 4096;

// Where the slots of a chunk lie in its image.
struct ChunkLayout {
  struct Slot {
    uint64_t offset = 0;
    uint64_t size = 0;  // of the block, not rounded
  };
  uint64_t header_bytes = 0;  // reserved for the header, rounded as the slots are
  uint64_t image_bytes = 0;
  uint32_t tokens = 0;
  std::vector<Slot> slots;

  // REQUIRES: Validate(spec) is OK and group < spec.groups.size().
  static ChunkLayout For(const NamespaceSpec& spec, int group);
};

// What a header says. Written by the service when the chunk is sealed or published, never taken from a client.
struct ChunkHeader {
  uint16_t flags = 0;
  uint64_t seq = 0;
  ChunkKey key;
  Id128 parent{};
  uint32_t expires = 0;  // the chunk's prefix name: seconds since 1970; 0: never
  uint32_t tokens = 0;
  uint64_t image_bytes = 0;
  std::vector<uint64_t> checksums;  // one a slot, BlockChecksum of its bytes
};

// Bytes that EncodeHeader writes for this many slots.
uint64_t EncodedHeaderSize(size_t slots);

// Writes `header` to the start of `image`. REQUIRES: image.size() >= EncodedHeaderSize(header.checksums.size()).
void EncodeHeader(const ChunkHeader& header, MutableByteView image);

// DATA_LOSS if the bytes are no header, are cut, or do not have their checksum; FAILED_PRECONDITION for another
// version.
absl::StatusOr<ChunkHeader> DecodeHeader(ByteView image);

}  // namespace kvferry
