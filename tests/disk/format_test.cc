// What is written is read; what was changed, cut or made up is refused, and never read beyond its end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <vector>

#include "storage/base/checksum.h"
#include "storage/disk/manifest_format.h"
#include "storage/disk/segment_format.h"

namespace kvferry {
namespace {

using testing::HasSubstr;

std::vector<ImageEntry> SomeImages(size_t count) {
  std::vector<ImageEntry> images;
  uint32_t block = 1;
  for (uint64_t i = 0; i < count; ++i) {
    ImageEntry& image = images.emplace_back();
    image.key = {{1, 2}, {3, 4 + i}, static_cast<uint16_t>(i % 3), 7};
    image.parent = {i, 9};
    image.seq = 1000 + i;
    image.block = block + static_cast<uint32_t>(i % 2);  // a hole before every other one
    image.blocks = 1 + static_cast<uint32_t>(i);
    image.lifetime = {static_cast<uint8_t>(i % 101), static_cast<uint32_t>(i * 3)};
    block = image.block + image.blocks;
  }
  return images;
}

bool Same(const ImageEntry& a, const ImageEntry& b) {
  return a.key == b.key && a.parent == b.parent && a.seq == b.seq && a.block == b.block && a.blocks == b.blocks &&
         a.lifetime == b.lifetime;
}

uint32_t EndOf(const std::vector<ImageEntry>& images) {
  return images.empty() ? 1 : images.back().block + images.back().blocks;
}

// The bytes of a file from its footer on, as a reader finds them.
struct Sealed {
  explicit Sealed(const std::vector<ImageEntry>& images) : block(EndOf(images)), footer(FooterBytes(images.size())) {
    EncodeFooter(5, block, images, footer.view());
  }
  uint64_t file_bytes() const { return uint64_t{block} * kDiskAlignment + footer.size(); }
  absl::StatusOr<std::vector<ImageEntry>> Decode() const {
    absl::StatusOr<FooterPlace> place =
        DecodeTrailer(footer.view().subspan(footer.size() - kDiskAlignment), file_bytes());
    if (!place.ok()) return place.status();
    EXPECT_EQ(place->number, 5u);
    EXPECT_EQ(place->block, block);
    return DecodeFooter(*place, footer.view());
  }
  uint32_t block;
  AlignedBuffer footer;
};

TEST(SegmentFormat, FootersOfAnySize) {
  for (const size_t count : {0, 1, 2, 50, 51, 52, 1000}) {
    const std::vector<ImageEntry> images = SomeImages(count);
    const auto read = Sealed(images).Decode();
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(read->size(), count);
    for (size_t i = 0; i < count; ++i) EXPECT_TRUE(Same((*read)[i], images[i])) << i;
  }
}

TEST(SegmentFormat, AFooterOfAnotherLengthOfFileIsNone) {
  Sealed sealed(SomeImages(3));
  const ByteView last = sealed.footer.view();
  EXPECT_TRUE(DecodeTrailer(last, sealed.file_bytes()).ok());
  EXPECT_EQ(DecodeTrailer(last, sealed.file_bytes() + kDiskAlignment).status().code(), absl::StatusCode::kDataLoss);
}

TEST(SegmentFormat, EveryBitOfAFooterCounts) {
  Sealed sealed(SomeImages(3));
  const MutableByteView bytes = sealed.footer.view();
  const size_t entries = 3 * 80, trailer = bytes.size() - 40;
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    if (bit / 8 >= entries && bit / 8 < trailer) continue;  // padding
    bytes[bit / 8] ^= 1 << bit % 8;
    EXPECT_FALSE(sealed.Decode().ok()) << "bit " << bit;
    bytes[bit / 8] ^= 1 << bit % 8;
  }
  EXPECT_TRUE(sealed.Decode().ok());
}

TEST(SegmentFormat, ImagesThatOverlapOrLieOutsideAreRefused) {
  for (const auto& [which, change] : std::vector<std::pair<int, int>>{{1, -2}, {2, 100}, {0, -1}}) {
    std::vector<ImageEntry> images = SomeImages(3);
    const uint32_t block = EndOf(images);
    images[which].block += change;
    AlignedBuffer footer(FooterBytes(3));
    EncodeFooter(5, block, images, footer.view());
    const auto place = DecodeTrailer(footer.view(), uint64_t{block} * kDiskAlignment + footer.size());
    ASSERT_TRUE(place.ok()) << place.status();
    EXPECT_EQ(DecodeFooter(*place, footer.view()).status().code(), absl::StatusCode::kDataLoss) << which;
  }
}

TEST(SegmentFormat, Headers) {
  AlignedBuffer block(kDiskAlignment);
  EncodeSegmentHeader({{11, 12}, 77}, block.view());
  const auto header = DecodeSegmentHeader(block.view());
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->number, 77u);
  EXPECT_EQ(header->store, (DiskStoreId{11, 12}));
  for (size_t bit = 0; bit < 40 * 8; ++bit) {
    block.view()[bit / 8] ^= 1 << bit % 8;
    EXPECT_FALSE(DecodeSegmentHeader(block.view()).ok()) << "bit " << bit;
    block.view()[bit / 8] ^= 1 << bit % 8;
  }
  for (size_t size = 0; size < 40; ++size) {
    EXPECT_EQ(DecodeSegmentHeader(block.view().subspan(0, size)).status().code(), absl::StatusCode::kDataLoss);
  }
}

// A version of the future, with its right checksum.
template <typename Bytes>
void MakeVersion(uint16_t version, size_t at, size_t covered, Bytes bytes) {
  std::memcpy(bytes.data() + at, &version, sizeof(version));
  const uint64_t checksum = HeaderChecksum(bytes.subspan(0, covered));
  std::memcpy(bytes.data() + covered, &checksum, sizeof(checksum));
}

TEST(SegmentFormat, AnotherVersionIsNamed) {
  AlignedBuffer block(kDiskAlignment);
  EncodeSegmentHeader({{11, 12}, 77}, block.view());
  MakeVersion(9, 4, 32, block.view());
  const absl::Status header = DecodeSegmentHeader(block.view()).status();
  EXPECT_EQ(header.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(header.message()), HasSubstr("version is 9, this build reads 1"));
  Sealed sealed(SomeImages(1));
  MakeVersion(9, 4, 32, sealed.footer.view().subspan(sealed.footer.size() - 40));
  EXPECT_EQ(sealed.Decode().status().code(), absl::StatusCode::kFailedPrecondition);
}

// The bytes of version 1: a file that this build cannot read any more shows here.
TEST(SegmentFormat, GoldenBytes) {
  AlignedBuffer block(kDiskAlignment);
  EncodeSegmentHeader({{0x0102030405060708, 0x1112131415161718}, 3}, block.view());
  const std::vector<uint8_t> expected = {0x4b, 0x56, 0x46, 0x53, 1,    0,    0,    0,    8, 7, 6, 5, 4, 3, 2, 1,
                                         0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 3, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(block.view().subspan(0, 32), ByteView(expected));
  ImageEntry image;
  image.key = {{1, 2}, {3, 4}, 5, 6};
  image.parent = {7, 8};
  image.seq = 9;
  image.block = 1;
  image.blocks = 2;
  image.lifetime = {10, 11};
  AlignedBuffer footer(FooterBytes(1));
  EncodeFooter(3, 3, {image}, footer.view());
  const std::vector<uint64_t> words = {
      1, 2, 3, 4, 7, 8, 9, uint64_t{2} << 32 | 1, uint64_t{6} << 48 | uint64_t{5} << 32 | 11, 10};
  EXPECT_EQ(footer.view().subspan(0, 80), ByteView(reinterpret_cast<const uint8_t*>(words.data()), 80));
}

ManifestFrame SomeFrame(std::mt19937_64& random) {
  ManifestFrame frame;
  frame.store = {random(), random()};
  frame.number = random();
  for (uint64_t i = random() % 20; i > 0; --i) {
    const ChunkKey key = {
        {random(), random()}, {random(), random()}, static_cast<uint16_t>(random()), static_cast<uint16_t>(random())};
    const DiskPlace place = {static_cast<uint32_t>(random()), static_cast<uint32_t>(random())};
    switch (random() % 5) {
      case 0:
        frame.entries.push_back(
            NamespaceEntry{key.ns, std::string(random() % 9, 't'), std::string(random() % 999, 's')});
        break;
      case 1:
        frame.entries.push_back(ErasedEntry{key, random()});
        break;
      case 2:
        frame.entries.push_back(DroppedEntry{key.ns, random()});
        break;
      case 3:
        frame.entries.push_back(
            PublishedEntry{place, key, key.id, random(), {static_cast<uint8_t>(random() % 101), 7}});
        break;
      default:
        frame.entries.push_back(FreedEntry{place});
    }
  }
  return frame;
}

// Fields of all kinds, in an order, as text.
std::string Text(const ManifestFrame& frame) {
  const AlignedBuffer bytes = EncodeFrame(frame);  // which the test of single fields vouches for
  return std::string(reinterpret_cast<const char*>(bytes.view().data()), bytes.size());
}

TEST(ManifestFormat, FramesAreReadAsWritten) {
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const ManifestFrame frame = SomeFrame(random);
    const AlignedBuffer bytes = EncodeFrame(frame);
    const auto decoded = DecodeFrame(bytes.view());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->bytes, bytes.size());
    EXPECT_EQ(Text(decoded->frame), Text(frame));
  }
}

TEST(ManifestFormat, EveryField) {
  const ChunkKey key = {{1, 2}, {3, 4}, 5, 6};
  ManifestFrame frame;
  frame.store = {21, 22};
  frame.number = 23;
  frame.entries = {NamespaceEntry{{1, 2}, "tenant", "spec"}, ErasedEntry{key, 9}, DroppedEntry{{1, 2}, 10},
                   PublishedEntry{{11, 12}, key, {13, 14}, 15, {16, 17}}, FreedEntry{{18, 19}}};
  const auto decoded = DecodeFrame(EncodeFrame(frame).view());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->frame.store, frame.store);
  EXPECT_EQ(decoded->frame.number, 23u);
  ASSERT_EQ(decoded->frame.entries.size(), 5u);
  const auto& entries = decoded->frame.entries;
  EXPECT_EQ(std::get<NamespaceEntry>(entries[0]).tenant, "tenant");
  EXPECT_EQ(std::get<NamespaceEntry>(entries[0]).spec, "spec");
  EXPECT_EQ(std::get<NamespaceEntry>(entries[0]).id, (NamespaceId{1, 2}));
  EXPECT_EQ(std::get<ErasedEntry>(entries[1]).key, key);
  EXPECT_EQ(std::get<ErasedEntry>(entries[1]).seq, 9u);
  EXPECT_EQ(std::get<DroppedEntry>(entries[2]).ns, (NamespaceId{1, 2}));
  EXPECT_EQ(std::get<DroppedEntry>(entries[2]).seq, 10u);
  const auto& published = std::get<PublishedEntry>(entries[3]);
  EXPECT_EQ(published.place, (DiskPlace{11, 12}));
  EXPECT_EQ(published.key, key);
  EXPECT_EQ(published.parent, (Id128{13, 14}));
  EXPECT_EQ(published.seq, 15u);
  EXPECT_EQ(published.lifetime, (Lifetime{16, 17}));
  EXPECT_EQ(std::get<FreedEntry>(entries[4]).place, (DiskPlace{18, 19}));
  uint64_t bytes = 40 + 8;
  for (const ManifestEntry& entry : frame.entries) bytes += EncodedBytes(entry);
  EXPECT_EQ(decoded->bytes, RoundUp(bytes, kDiskAlignment));
}

TEST(ManifestFormat, EveryBitCountsAndEveryCutIsSeen) {
  std::mt19937_64 random(1);
  ManifestFrame frame = SomeFrame(random);
  frame.entries.resize(3, FreedEntry{});
  AlignedBuffer bytes = EncodeFrame(frame);
  uint64_t used = 40 + 8;
  for (const ManifestEntry& entry : frame.entries) used += EncodedBytes(entry);
  for (size_t bit = 0; bit < used * 8; ++bit) {
    bytes.view()[bit / 8] ^= 1 << bit % 8;
    EXPECT_FALSE(DecodeFrame(bytes.view()).ok()) << "bit " << bit;
    bytes.view()[bit / 8] ^= 1 << bit % 8;
  }
  for (size_t size = 0; size < used; ++size) EXPECT_FALSE(DecodeFrame(bytes.view().subspan(0, size)).ok()) << size;
  EXPECT_TRUE(DecodeFrame(bytes.view().subspan(0, used)).ok());
}

}  // namespace
}  // namespace kvferry
