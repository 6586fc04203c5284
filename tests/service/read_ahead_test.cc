// Streams of gets from a store whose chunks lie on disk.
#include "storage/read_ahead.h"

#include "gmock/gmock.h"
#include "service/read_session.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ReadAhead, HintsEachChunkOnceAndAFewAhead) {
  std::vector<ChunkKey> chunks(20);
  for (uint64_t i = 0; i < chunks.size(); ++i) chunks[i].id = {1, i};
  // Two layers of each chunk, one after the other; the third block has no key.
  const auto chunk_of = [&](size_t i) { return i == 2 ? nullptr : &chunks[i / 2 % chunks.size()]; };
  ReadAhead ahead(80);
  const std::vector<ChunkKey> first = ahead.Reach(0, chunk_of);
  ASSERT_EQ(first.size(), ReadAhead::kMostChunks);
  EXPECT_EQ(first.front(), chunks[1]);
  EXPECT_EQ(first.back(), chunks[8]);
  EXPECT_THAT(ahead.Reach(1, chunk_of), IsEmpty());
  EXPECT_THAT(ahead.Reach(3, chunk_of), ElementsAre(chunks[9]));
  EXPECT_THAT(ahead.Reach(6, chunk_of), ElementsAre(chunks[10], chunks[11]));
  EXPECT_EQ(ahead.Reach(39, chunk_of).size(), 0u) << "the second time round nothing is new";
  EXPECT_THAT(ReadAhead(0).Reach(0, chunk_of), IsEmpty());
}

class ReadAheadTest : public DiskStoreFixture {
 protected:
  // `n` published chunks, most of them on disk alone.
  void Begin(uint64_t in_memory, uint64_t n) {
    OpenTiers(BigSpec(), in_memory);
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
    for (uint64_t id = 1; id <= n; ++id) PublishedOne(session_, ns_, id);
  }
  // Of chunks [from, to], each with its two layers.
  std::shared_ptr<ReadSession> Read(uint64_t from, uint64_t to, uint64_t window) {
    std::vector<absl::StatusOr<BlockKey>> keys;
    for (uint64_t id = from; id <= to; ++id) {
      for (const uint16_t layer : {0, 1}) keys.push_back(BlockKey{Prefix(ns_, id), layer});
    }
    return std::make_shared<ReadSession>(store_.get(), session_, std::move(keys), window, &stats_, [] {});
  }
  StoreStats Stats() { return store_->Stats(); }

  ServiceStats stats_;
  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(ReadAheadTest, WhatComesBehindTheWindowIsReadAhead) {
  Begin(12, 30);
  const uint64_t reads = Stats().disk_reads;
  const auto read = Read(1, 10, 1);  // one block at a time
  read->Start();
  Settle();
  EXPECT_EQ(Stats().disk_reads, reads + 1 + Stats().prefetches);
  EXPECT_GE(Stats().prefetches, 4u);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 3), 3)) << "at once";
  uint64_t blocks = 0;
  while (!read->done()) {
    for (const GetPiece& piece : read->Next(kMiB)) {
      ASSERT_TRUE(piece.status.ok()) << piece.status;
      ExpectBytes(piece.view, 1 + piece.index / 2, piece.index % 2);
      ++blocks;
      read->Consumed(piece.size);
    }
    Settle();
  }
  EXPECT_EQ(blocks, 20u);
  EXPECT_EQ(Stats().disk_reads, reads + 10) << "each chunk once";
}

// Blocks that are in memory already must not keep it from the one before them, which is waited for.
TEST_F(ReadAheadTest, AWindowLargerThanMemoryMoves) {
  Begin(4, 20);
  for (const uint64_t id : {2, 3, 4, 5}) EXPECT_TRUE(Holds(session_, Prefix(ns_, id), id));
  const auto read = Read(1, 12, 64 * kMiB);
  read->Start();
  uint64_t blocks = 0;
  for (int turn = 0; turn < 100 && !read->done(); ++turn) {
    Settle();
    for (const GetPiece& piece : read->Next(kMiB)) {
      ASSERT_TRUE(piece.status.ok()) << piece.status;
      ExpectBytes(piece.view, 1 + piece.index / 2, piece.index % 2);
      ++blocks;
      read->Consumed(piece.size);
    }
  }
  EXPECT_EQ(blocks, 24u);
}

TEST_F(ReadAheadTest, ACancelledStreamHoldsNobodyBack) {
  Begin(4, 20);
  std::vector<absl::StatusOr<BlockView>> pins;  // all of the memory is being read
  for (uint64_t id = 1; id <= 4; ++id) pins.push_back(Fetch(session_, Prefix(ns_, id)));
  std::weak_ptr<ReadSession> gone;
  const uint64_t reads = Stats().disk_reads;
  {
    const auto read = Read(10, 17, 64 * kMiB);
    gone = read;
    read->Start();
    Settle();
    EXPECT_FALSE(gone.expired());
    EXPECT_TRUE(read->Next(kMiB).empty());
    read->Cancel();
  }
  pins.clear();
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 18), 18));
  EXPECT_EQ(Stats().disk_reads, reads + 1) << "nothing is read for those who have gone";
  EXPECT_TRUE(gone.expired()) << "and nothing stays";
}

}  // namespace
}  // namespace kvferry
