#include "storage/base/chunk_image.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/escaping.h"
#include "storage/base/checksum.h"
#include "tests/base/specs.h"

namespace kvferry {
namespace {

ChunkHeader SomeHeader() {
  ChunkHeader header;
  header.lifetime = {7, 0x0a0b0c0d};
  header.is_finite = false;
  header.seq = 0x0807060504030201;
  header.key = {{0x11, 0x12}, {0x13, 0x14}, 0x15, 0x16};
  header.parent = {0x17, 0x18};
  header.tokens = 64;
  header.image_bytes = 8192;
  header.checksums = {0xaa, 0xbb};
  return header;
}

std::vector<uint8_t> Encoded(const ChunkHeader& header) {
  std::vector<uint8_t> bytes(EncodedHeaderSize(header.checksums.size()));
  EncodeHeader(header, absl::MakeSpan(bytes));
  return bytes;
}

// Every byte of version 2, as storage/README.md tables them. They are on disks: never change them.
TEST(ChunkImage, HeaderGolden) {
  const std::vector<uint8_t> bytes = Encoded(SomeHeader());
  ASSERT_EQ(bytes.size(), 112u);
  const std::string hex =
      absl::BytesToHexString(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size() - 8));
  EXPECT_EQ(hex,
            "4b564643"
            "0200"
            "0780"
            "0102030405060708"  // magic, version, flags, seq
            "1100000000000000"
            "1200000000000000"  // namespace
            "1300000000000000"
            "1400000000000000"  // key
            "1700000000000000"
            "1800000000000000"  // parent
            "1500"
            "1600"
            "40000000"
            "02000000"
            "0d0c0b0a"          // group, shard, tokens, slots, expires
            "0020000000000000"  // image bytes
            "aa00000000000000"
            "bb00000000000000");  // checksums
  uint64_t checksum = 0;
  for (int i = 7; i >= 0; --i) checksum = checksum << 8 | bytes[104 + i];
  EXPECT_EQ(checksum, HeaderChecksum(ByteView(bytes).subspan(0, 104)));
  EXPECT_EQ(checksum, 0xe613131a81e6600au);
}

TEST(ChunkImage, HeaderComesBack) {
  const ChunkHeader header = SomeHeader();
  std::vector<uint8_t> bytes = Encoded(header);
  bytes.resize(8192, 0x5a);  // what follows is not the header's
  const absl::StatusOr<ChunkHeader> decoded = DecodeHeader(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->lifetime, header.lifetime);
  EXPECT_EQ(decoded->is_finite, header.is_finite);
  EXPECT_EQ(decoded->seq, header.seq);
  EXPECT_EQ(decoded->key, header.key);
  EXPECT_EQ(decoded->parent, header.parent);
  EXPECT_EQ(decoded->tokens, header.tokens);
  EXPECT_EQ(decoded->image_bytes, header.image_bytes);
  EXPECT_EQ(decoded->checksums, header.checksums);
}

// As the first version wrote it: flags and what is the expiry now were zero.
std::vector<uint8_t> FirstVersion(uint8_t flags = 0) {
  std::vector<uint8_t> bytes = Encoded(SomeHeader());
  bytes[4] = 1;
  bytes[6] = flags;
  bytes[7] = 0;
  std::fill_n(bytes.begin() + 76, 4, uint8_t{0});
  const uint64_t checksum = HeaderChecksum(ByteView(bytes).subspan(0, 104));
  std::memcpy(bytes.data() + 104, &checksum, sizeof(checksum));
  return bytes;
}

TEST(ChunkImage, TheVersionBeforeIsRead) {
  const absl::StatusOr<ChunkHeader> decoded = DecodeHeader(FirstVersion());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->lifetime, (Lifetime{kDefaultPriority, 0}));
  EXPECT_TRUE(decoded->is_finite);
  EXPECT_EQ(decoded->key, SomeHeader().key);
  EXPECT_EQ(decoded->checksums, SomeHeader().checksums);
  EXPECT_EQ(DecodeHeader(FirstVersion(3)).status().code(), absl::StatusCode::kDataLoss) << "it had no flags";
}

TEST(ChunkImage, EveryCutIsRefused) {
  const std::vector<uint8_t> bytes = Encoded(SomeHeader());
  for (size_t n = 0; n < bytes.size(); ++n) {
    const std::vector<uint8_t> cut(bytes.begin(), bytes.begin() + n);  // its own memory: reading beyond is caught
    EXPECT_EQ(DecodeHeader(cut).status().code(), absl::StatusCode::kDataLoss) << n;
  }
}

TEST(ChunkImage, EveryBitFlipIsRefused) {
  std::vector<uint8_t> bytes = Encoded(SomeHeader());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= 1 << (bit % 8);
    const bool in_version = bit / 16 == 2;
    EXPECT_EQ(DecodeHeader(bytes).status().code(),
              in_version ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kDataLoss)
        << "bit " << bit;
    bytes[bit / 8] ^= 1 << (bit % 8);
  }
}

TEST(ChunkImage, AHeaderThatLiesWithARightChecksumIsRefused) {
  ChunkHeader header = SomeHeader();
  header.image_bytes = 8193;
  EXPECT_EQ(DecodeHeader(Encoded(header)).status().code(), absl::StatusCode::kDataLoss);
  header.image_bytes = 8192;
  header.lifetime.priority = 101;
  EXPECT_EQ(DecodeHeader(Encoded(header)).status().code(), absl::StatusCode::kDataLoss);
  header.lifetime.priority = 100;
  EXPECT_TRUE(DecodeHeader(Encoded(header)).ok());
  header.image_bytes = 0;
  EXPECT_EQ(DecodeHeader(Encoded(header)).status().code(), absl::StatusCode::kDataLoss);
}

void ExpectSound(const NamespaceSpec& spec, int group) {
  const ChunkLayout layout = ChunkLayout::For(spec, group);
  const size_t layers = spec.groups[group].layers.size();
  ASSERT_EQ(layout.slots.size(), layers);
  EXPECT_EQ(layout.tokens, spec.block_tokens);
  EXPECT_EQ(layout.image_bytes % kImageAlignment, 0u);
  EXPECT_GE(layout.header_bytes, EncodedHeaderSize(layers));
  uint64_t end = layout.header_bytes;
  for (size_t layer = 0; layer < layers; ++layer) {
    EXPECT_EQ(layout.slots[layer].size, spec.BlockBytes(group, static_cast<int>(layer)));
    EXPECT_GE(layout.slots[layer].offset, end);
    EXPECT_EQ(layout.slots[layer].offset % 64, 0u);
    end = layout.slots[layer].offset + layout.slots[layer].size;
  }
  EXPECT_GE(layout.image_bytes, end);
  EXPECT_LT(layout.image_bytes - end, 2 * kImageAlignment);
}

TEST(ChunkLayout, SmallSlotsLieOnCacheLines) {
  const NamespaceSpec spec = SmallSpec(3, 1, 5, 1);  // blocks of 40 bytes
  ExpectSound(spec, 0);
  const ChunkLayout layout = ChunkLayout::For(spec, 0);
  EXPECT_EQ(layout.header_bytes, 128u);  // 96 + 3 * 8, rounded
  EXPECT_EQ(layout.slots[1].offset, 192u);
  EXPECT_EQ(layout.image_bytes, 4096u);
}

TEST(ChunkLayout, LargeSlotsLieOnPages) {
  const NamespaceSpec spec = SmallSpec(2, 8, 64, 9);  // blocks of 36 KiB
  ExpectSound(spec, 0);
  const ChunkLayout layout = ChunkLayout::For(spec, 0);
  EXPECT_EQ(layout.header_bytes, 4096u);
  EXPECT_EQ(layout.slots[0].offset, 4096u);
  EXPECT_EQ(layout.slots[1].offset, 4096u + 36864);
}

TEST(ChunkLayout, OneSmallSlotPutsAllOnCacheLines) {
  NamespaceSpec spec = SmallSpec(2, 8, 64, 8);  // exactly 32 KiB
  EXPECT_EQ(ChunkLayout::For(spec, 0).header_bytes, 4096u);
  spec.groups[0].layers[1].parts[1].dim = 63;
  ExpectSound(spec, 0);
  EXPECT_EQ(ChunkLayout::For(spec, 0).header_bytes, 128u);
}

TEST(ChunkLayout, B78_LayersOfAnyShapes) {
  ExpectSound(MixedSpec(), 0);
  ExpectSound(MixedSpec(), 1);
}

}  // namespace
}  // namespace kvferry
