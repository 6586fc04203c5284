#include "storage/base/key.h"

#include <gtest/gtest.h>

#include "absl/container/flat_hash_set.h"
#include "storage/base/sha256.h"

namespace kvferry {
namespace {

TEST(Key, Sha256IdReadsTheFirstHalfBigEndian) {
  // FIPS 180-2: SHA-256("abc") = ba7816bf 8f01cfea 414140de 5dae2223 ...
  EXPECT_EQ(Sha256Id("abc"), (Id128{0xba7816bf8f01cfea, 0x414140de5dae2223}));
}

TEST(Key, PrintsAsHex) {
  const ChunkKey key{{1, 2}, {0xabcdef0000000000, 7}, 3, 4};
  EXPECT_EQ(ToString(key.id), "abcdef00000000000000000000000007");
  EXPECT_EQ(ToString(key), "00000000000000010000000000000002/abcdef00000000000000000000000007/3.4");
  EXPECT_EQ(ToString(BlockKey{key, 9}),
            "00000000000000010000000000000002/abcdef00000000000000000000000007/3.4/layer 9");
}

TEST(Key, TheHighestBitTellsLiveFromPrefix) {
  EXPECT_TRUE((ChunkKey{{}, {kLiveBit | 5, 1}, 0, 0}).IsLive());
  EXPECT_FALSE((ChunkKey{{}, {kLiveBit - 1, ~uint64_t{0}}, 0, 0}).IsLive());
}

// B27: every field takes part, in comparison and in the hash.
TEST(Key, EveryFieldDistinguishes) {
  const ChunkKey base{{1, 2}, {3, 4}, 5, 6};
  absl::flat_hash_set<ChunkKey> keys = {base};
  for (ChunkKey other :
       {ChunkKey{{9, 2}, {3, 4}, 5, 6}, ChunkKey{{1, 9}, {3, 4}, 5, 6}, ChunkKey{{1, 2}, {9, 4}, 5, 6},
        ChunkKey{{1, 2}, {3, 9}, 5, 6}, ChunkKey{{1, 2}, {3, 4}, 9, 6}, ChunkKey{{1, 2}, {3, 4}, 5, 9}}) {
    EXPECT_NE(other, base);
    EXPECT_TRUE(keys.insert(other).second);
  }
}

}  // namespace
}  // namespace kvferry
