#include "storage/base/chunk_image.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"

namespace kvferry {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the image is little-endian and written as it lies in memory");

// What lies before the checksums. The table of offsets is in storage/README.md; a change here is a new version.
struct FixedHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;
  uint64_t seq;
  uint64_t ns[2];
  uint64_t id[2];
  uint64_t parent[2];
  uint16_t group;
  uint16_t shard;
  uint32_t tokens;
  uint32_t slots;
  uint32_t expires;
  uint64_t image_bytes;
};
static_assert(sizeof(FixedHeader) == 88 && std::is_trivially_copyable_v<FixedHeader>);
static_assert(offsetof(FixedHeader, seq) == 8 && offsetof(FixedHeader, group) == 64);
static_assert(offsetof(FixedHeader, slots) == 72 && offsetof(FixedHeader, image_bytes) == 80);

constexpr uint64_t kSmallSlotAlignment = 64;    // a cache line
constexpr uint64_t kLargeSlotAlignment = 4096;  // a page: a slot can be read from disk directly
constexpr uint64_t kLargeSlot = 32 * kKiB;

absl::Status Bad(absl::string_view what, uint64_t value, absl::string_view expected) {
  return absl::DataLossError(absl::StrCat("chunk header: ", what, " is ", value, ", expected ", expected));
}

}  // namespace

ChunkLayout ChunkLayout::For(const NamespaceSpec& spec, int group) {
  ChunkLayout layout;
  layout.tokens = spec.block_tokens;
  const int layers = static_cast<int>(spec.groups[group].layers.size());
  bool all_large = true;
  for (int layer = 0; layer < layers; ++layer) {
    layout.slots.push_back({0, spec.BlockBytes(group, layer)});
    all_large = all_large && layout.slots.back().size >= kLargeSlot;
  }
  const uint64_t unit = all_large ? kLargeSlotAlignment : kSmallSlotAlignment;
  layout.header_bytes = RoundUp(EncodedHeaderSize(layers), unit);
  uint64_t offset = layout.header_bytes;
  for (Slot& slot : layout.slots) {
    slot.offset = offset;
    offset += RoundUp(slot.size, unit);
  }
  layout.image_bytes = RoundUp(offset, kImageAlignment);
  return layout;
}

uint64_t EncodedHeaderSize(size_t slots) { return sizeof(FixedHeader) + slots * sizeof(uint64_t) + sizeof(uint64_t); }

void EncodeHeader(const ChunkHeader& header, MutableByteView image) {
  FixedHeader fixed = {};
  fixed.magic = kChunkImageMagic;
  fixed.version = kChunkImageVersion;
  fixed.flags = header.flags;
  fixed.seq = header.seq;
  for (int i = 0; i < 2; ++i) {
    fixed.ns[i] = header.key.ns[i];
    fixed.id[i] = header.key.id[i];
    fixed.parent[i] = header.parent[i];
  }
  fixed.group = header.key.group;
  fixed.shard = header.key.shard;
  fixed.expires = header.expires;
  fixed.tokens = header.tokens;
  fixed.slots = static_cast<uint32_t>(header.checksums.size());
  fixed.image_bytes = header.image_bytes;

  const uint64_t table = header.checksums.size() * sizeof(uint64_t);
  std::memcpy(image.data(), &fixed, sizeof(fixed));
  if (table != 0) std::memcpy(image.data() + sizeof(fixed), header.checksums.data(), table);
  const uint64_t checksum = HeaderChecksum(image.subspan(0, sizeof(fixed) + table));
  std::memcpy(image.data() + sizeof(fixed) + table, &checksum, sizeof(checksum));
}

absl::StatusOr<ChunkHeader> DecodeHeader(ByteView image) {
  FixedHeader fixed;
  if (image.size() < sizeof(fixed)) return Bad("size", image.size(), absl::StrCat("at least ", sizeof(fixed)));
  std::memcpy(&fixed, image.data(), sizeof(fixed));
  if (fixed.magic != kChunkImageMagic) return Bad("magic", fixed.magic, absl::StrCat(kChunkImageMagic));
  if (fixed.version != kChunkImageVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("chunk header: version is ", fixed.version, ", this build reads ", kChunkImageVersion));
  }
  const uint64_t size = EncodedHeaderSize(fixed.slots);  // slots has 32 bits: no overflow
  if (image.size() < size) return Bad("size", image.size(), absl::StrCat(size, " for ", fixed.slots, " slots"));
  uint64_t checksum;
  const uint64_t covered = size - sizeof(checksum);
  std::memcpy(&checksum, image.data() + covered, sizeof(checksum));
  if (const uint64_t found = HeaderChecksum(image.subspan(0, covered)); found != checksum) {
    return Bad("checksum", found, absl::StrCat(checksum));
  }
  // What follows can only be a writer's mistake, but nothing that is read is trusted further than it must be.
  if (fixed.image_bytes % kImageAlignment != 0 || fixed.image_bytes < size) {
    return Bad("image size", fixed.image_bytes, absl::StrCat("a multiple of ", kImageAlignment, " above ", size));
  }

  ChunkHeader header;
  header.flags = fixed.flags;
  header.seq = fixed.seq;
  header.key.ns = {fixed.ns[0], fixed.ns[1]};
  header.key.id = {fixed.id[0], fixed.id[1]};
  header.key.group = fixed.group;
  header.key.shard = fixed.shard;
  header.parent = {fixed.parent[0], fixed.parent[1]};
  header.expires = fixed.expires;
  header.tokens = fixed.tokens;
  header.image_bytes = fixed.image_bytes;
  header.checksums.resize(fixed.slots);
  if (fixed.slots != 0)
    std::memcpy(header.checksums.data(), image.data() + sizeof(fixed), fixed.slots * sizeof(uint64_t));
  return header;
}

}  // namespace kvferry
