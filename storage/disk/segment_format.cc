#include "storage/disk/segment_format.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian and written as they lie in memory");

constexpr uint32_t kHeaderMagic = 0x5346564b;   // "KVFS"
constexpr uint32_t kTrailerMagic = 0x5446564b;  // "KVFT"

struct FixedHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t zero;
  uint64_t store[2];
  uint32_t number;
  uint32_t zero2;
  uint64_t checksum;  // of what is before
};
static_assert(sizeof(FixedHeader) == 40 && std::is_trivially_copyable_v<FixedHeader>);

struct FixedEntry {
  uint64_t ns[2];
  uint64_t id[2];
  uint64_t parent[2];
  uint64_t seq;
  uint32_t block;
  uint32_t blocks;
  uint32_t expires;
  uint16_t group;
  uint16_t shard;
  uint8_t priority;
  uint8_t zero[7];
};
static_assert(sizeof(FixedEntry) == 80 && std::is_trivially_copyable_v<FixedEntry>);

struct FixedTrailer {
  uint32_t magic;
  uint16_t version;
  uint16_t zero;
  uint32_t number;
  uint32_t count;
  uint32_t block;
  uint32_t zero2;
  uint64_t footer_checksum;  // of the entries
  uint64_t checksum;         // of what is before
};
static_assert(sizeof(FixedTrailer) == 40 && std::is_trivially_copyable_v<FixedTrailer>);

absl::Status Bad(absl::string_view what, uint64_t value, absl::string_view expected) {
  return absl::DataLossError(absl::StrCat("segment ", what, " is ", value, ", expected ", expected));
}

// A header and a trailer are alike in what they begin with, magic and version, and in their end: the checksum of what
// is before.
template <typename Fixed>
uint64_t ChecksumOf(const Fixed& fixed) {
  static_assert(offsetof(Fixed, checksum) + sizeof(fixed.checksum) == sizeof(Fixed));
  return HeaderChecksum({reinterpret_cast<const uint8_t*>(&fixed), offsetof(Fixed, checksum)});
}

template <typename Fixed>
void Put(Fixed fixed, uint32_t magic, uint8_t* to) {
  fixed.magic = magic;
  fixed.version = kSegmentVersion;
  fixed.checksum = ChecksumOf(fixed);
  std::memcpy(to, &fixed, sizeof(fixed));
}

template <typename Fixed>
absl::StatusOr<Fixed> Take(ByteView from, uint32_t magic, absl::string_view what) {
  Fixed fixed;
  if (from.size() < sizeof(fixed)) {
    return Bad(absl::StrCat(what, " size"), from.size(), absl::StrCat("at least ", sizeof(fixed)));
  }
  std::memcpy(&fixed, from.data(), sizeof(fixed));
  if (fixed.magic != magic) return Bad(absl::StrCat(what, " magic"), fixed.magic, absl::StrCat(magic));
  if (const uint64_t found = ChecksumOf(fixed); found != fixed.checksum) {
    return Bad(absl::StrCat(what, " checksum"), found, absl::StrCat(fixed.checksum));
  }
  if (fixed.version == kSegmentVersion) return fixed;
  return absl::FailedPreconditionError(
      absl::StrCat("segment: version is ", fixed.version, ", this build reads ", kSegmentVersion));
}

}  // namespace

void EncodeSegmentHeader(const SegmentHeader& header, MutableByteView block) {
  FixedHeader fixed = {};
  fixed.store[0] = header.store[0];
  fixed.store[1] = header.store[1];
  fixed.number = header.number;
  std::memset(block.data(), 0, block.size());
  Put(fixed, kHeaderMagic, block.data());
}

absl::StatusOr<SegmentHeader> DecodeSegmentHeader(ByteView block) {
  KVFERRY_ASSIGN_OR_RETURN(const FixedHeader fixed, Take<FixedHeader>(block, kHeaderMagic, "header"));
  if (fixed.number == 0) return Bad("number", 0, "1 or more");
  return SegmentHeader{{fixed.store[0], fixed.store[1]}, fixed.number};
}

uint64_t FooterBytes(size_t images) {
  return RoundUp(images * sizeof(FixedEntry) + sizeof(FixedTrailer), kDiskAlignment);
}

void EncodeFooter(uint32_t number, uint32_t block, absl::Span<const ImageEntry> images, MutableByteView to) {
  std::memset(to.data(), 0, to.size());
  uint8_t* at = to.data();
  for (const ImageEntry& image : images) {
    FixedEntry fixed = {};
    for (int i = 0; i < 2; ++i) {
      fixed.ns[i] = image.key.ns[i];
      fixed.id[i] = image.key.id[i];
      fixed.parent[i] = image.parent[i];
    }
    fixed.seq = image.seq;
    fixed.block = image.block;
    fixed.blocks = image.blocks;
    fixed.expires = image.lifetime.expires;
    fixed.group = image.key.group;
    fixed.shard = image.key.shard;
    fixed.priority = image.lifetime.priority;
    std::memcpy(at, &fixed, sizeof(fixed));
    at += sizeof(fixed);
  }
  FixedTrailer trailer = {};
  trailer.number = number;
  trailer.count = static_cast<uint32_t>(images.size());
  trailer.block = block;
  trailer.footer_checksum = HeaderChecksum(to.subspan(0, images.size() * sizeof(FixedEntry)));
  Put(trailer, kTrailerMagic, to.data() + to.size() - sizeof(trailer));
}

absl::StatusOr<FooterPlace> DecodeTrailer(ByteView last_block, uint64_t file_bytes) {
  if (last_block.size() > sizeof(FixedTrailer)) last_block.remove_prefix(last_block.size() - sizeof(FixedTrailer));
  KVFERRY_ASSIGN_OR_RETURN(const FixedTrailer trailer, Take<FixedTrailer>(last_block, kTrailerMagic, "trailer"));
  const FooterPlace place = {trailer.number, trailer.count, trailer.block, trailer.footer_checksum};
  if (place.offset() + FooterBytes(place.count) != file_bytes) {  // both have 32 bits and less: no overflow
    return Bad("footer end", place.offset() + FooterBytes(place.count), absl::StrCat("the file's, ", file_bytes));
  }
  return place;
}

absl::StatusOr<std::vector<ImageEntry>> DecodeFooter(const FooterPlace& place, ByteView footer) {
  const uint64_t bytes = uint64_t{place.count} * sizeof(FixedEntry);
  if (footer.size() < bytes) return Bad("footer size", footer.size(), absl::StrCat("at least ", bytes));
  if (const uint64_t found = HeaderChecksum(footer.subspan(0, bytes)); found != place.checksum) {
    return Bad("footer checksum", found, absl::StrCat(place.checksum));
  }
  std::vector<ImageEntry> images;
  images.reserve(place.count);
  uint64_t end = 1;  // the header has the first block
  for (uint32_t i = 0; i < place.count; ++i) {
    FixedEntry fixed;
    std::memcpy(&fixed, footer.data() + i * sizeof(fixed), sizeof(fixed));
    if (fixed.block < end || fixed.blocks == 0 || uint64_t{fixed.block} + fixed.blocks > place.block) {
      return Bad("image's block", fixed.block, absl::StrCat(end, " or more, and its end ", place.block, " at most"));
    }
    if (fixed.priority > 100) return Bad("image's priority", fixed.priority, "0 to 100");
    end = uint64_t{fixed.block} + fixed.blocks;
    ImageEntry& image = images.emplace_back();
    image.key = {{fixed.ns[0], fixed.ns[1]}, {fixed.id[0], fixed.id[1]}, fixed.group, fixed.shard};
    image.parent = {fixed.parent[0], fixed.parent[1]};
    image.seq = fixed.seq;
    image.block = fixed.block;
    image.blocks = fixed.blocks;
    image.lifetime = {fixed.priority, fixed.expires};
  }
  return images;
}

}  // namespace kvferry
