#include "storage/base/checksum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace kvferry {
namespace {

std::vector<uint8_t> Pattern(size_t n) {
  std::vector<uint8_t> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(i * 131 + (i >> 8) * 7);
  return bytes;
}

// The definition, word for word.
uint64_t Reference(ByteView block) {
  std::vector<uint8_t> tiles;
  for (size_t at = 0; at < block.size(); at += kChecksumTile) {
    const ByteView tile = block.subspan(at, kChecksumTile);
    const uint64_t sum = XXH3_64bits(tile.data(), tile.size());
    for (int i = 0; i < 8; ++i) tiles.push_back(static_cast<uint8_t>(sum >> (8 * i)));
  }
  return XXH3_64bits(tiles.data(), tiles.size());
}

// What is on disk and what other processes computed must be found again: these values never change.
TEST(Checksum, Golden) {
  EXPECT_EQ(BlockChecksum(ByteView()), 0x2d06800538d394c2u);
  EXPECT_EQ(BlockChecksum(Pattern(1)), Reference(Pattern(1)));
  EXPECT_EQ(BlockChecksum(Pattern(16384)), 0x5cd7df28ce124c1eu);
  EXPECT_EQ(BlockChecksum(Pattern(40000)), 0xe5d3fe29f03d714cu);
  EXPECT_EQ(HeaderChecksum(Pattern(100)), 0x387363ce0e6084aau);
}

TEST(Checksum, IsXxh3OverTheSumsOfTiles) {
  for (size_t n : {0, 1, 7, 240, 241, 16383, 16384, 16385, 32768, 65537, 5 * 1024 * 1024 + 3}) {
    const std::vector<uint8_t> bytes = Pattern(n);
    EXPECT_EQ(BlockChecksum(bytes), Reference(bytes)) << n;
  }
}

TEST(Checksum, PiecesDoNotMatter) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const std::vector<uint8_t> bytes = Pattern(random() % 100000);
    std::vector<ByteView> pieces;
    for (size_t at = 0; at < bytes.size();) {
      const size_t n = std::min<size_t>(random() % 3 == 0 ? random() % 40000 : random() % 50, bytes.size() - at);
      pieces.push_back(ByteView(bytes).subspan(at, n));  // empty ones too
      at += n;
    }
    ASSERT_EQ(BlockChecksum(absl::MakeConstSpan(pieces)), Reference(bytes)) << bytes.size();
  }
}

TEST(Checksum, SeesEveryBitAndTheOrderOfTiles) {
  std::vector<uint8_t> bytes = Pattern(2 * kChecksumTile + 5);
  const uint64_t sum = BlockChecksum(bytes);
  for (size_t at : {size_t{0}, size_t{kChecksumTile - 1}, size_t{kChecksumTile}, bytes.size() - 1}) {
    bytes[at] ^= 0x10;
    EXPECT_NE(BlockChecksum(bytes), sum) << at;
    bytes[at] ^= 0x10;
  }
  std::swap_ranges(bytes.begin(), bytes.begin() + kChecksumTile, bytes.begin() + kChecksumTile);
  EXPECT_NE(BlockChecksum(bytes), sum);
}

}  // namespace
}  // namespace kvferry
