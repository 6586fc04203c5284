// The bytes of a segment file: a header, images one behind the other, and once it is full a footer that lists them and
// a trailer that tells where that is. storage/README.md gives every offset. Nothing is trusted that is read: decoding
// checks every size before it is used.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/disk/file.h"

namespace kvferry {

inline constexpr uint16_t kSegmentVersion = 1;

// Random, made once for a folder: files that were copied there from another one are not taken for its own.
using DiskStoreId = std::array<uint64_t, 2>;

// Where an image lies.
struct DiskPlace {
  uint32_t segment = 0;  // its number; 0: nowhere
  uint32_t block = 0;    // in units of kDiskAlignment from the start of the file

  explicit operator bool() const { return segment != 0; }
  uint64_t offset() const { return uint64_t{block} * kDiskAlignment; }
  friend bool operator==(const DiskPlace& a, const DiskPlace& b) {
    return a.segment == b.segment && a.block == b.block;
  }
};

// What is known of an image without reading it.
struct ImageEntry {
  ChunkKey key;
  Id128 parent{};
  uint64_t seq = 0;
  uint32_t block = 0;   // where it begins
  uint32_t blocks = 0;  // how long it is
  Lifetime lifetime;
};

struct SegmentHeader {
  DiskStoreId store{};
  uint32_t number = 0;
};

// One block, all of it written. REQUIRES: block.size() == kDiskAlignment.
void EncodeSegmentHeader(const SegmentHeader& header, MutableByteView block);
// DATA_LOSS if the block is no header or does not have its checksum; FAILED_PRECONDITION for another version.
absl::StatusOr<SegmentHeader> DecodeSegmentHeader(ByteView block);

// What a trailer says.
struct FooterPlace {
  uint32_t number = 0;  // of the segment
  uint32_t count = 0;   // of images
  uint32_t block = 0;   // where the footer begins
  uint64_t checksum = 0;

  uint64_t offset() const { return uint64_t{block} * kDiskAlignment; }
};

// Bytes of a footer and its trailer, whole blocks.
uint64_t FooterBytes(size_t images);
// Footer and trailer, to be written from `block` on, where the last image ends and the file ends behind.
// REQUIRES: to.size() == FooterBytes(images.size()).
void EncodeFooter(uint32_t number, uint32_t block, absl::Span<const ImageEntry> images, MutableByteView to);
// From the last block of a file of `file_bytes`. DATA_LOSS: there is no trailer, so the segment was not sealed.
absl::StatusOr<FooterPlace> DecodeTrailer(ByteView last_block, uint64_t file_bytes);
// From FooterBytes(place.count) bytes at place.offset(). DATA_LOSS unless the images lie within the file, in order.
absl::StatusOr<std::vector<ImageEntry>> DecodeFooter(const FooterPlace& place, ByteView footer);

}  // namespace kvferry
