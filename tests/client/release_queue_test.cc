#include "client/release_queue.h"

#include "gmock/gmock.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::Optional;

constexpr uint64_t kEpoch = 1;

ChunkKey Live(uint64_t n) { return {{1, 2}, {kLiveBit | 5, n}, 0, 0}; }
ChunkKey Published(uint64_t n) { return {{1, 2}, {5, n}, 0, 0}; }

template <typename... Keys>
auto IsBatch(uint64_t seq, Keys... keys) {
  return Optional(
      AllOf(Field(&ReleaseQueue::Batch::seq, seq), Field(&ReleaseQueue::Batch::keys, ElementsAre(keys...))));
}

TEST(ReleaseQueueTest, GivesKeysOutOnceInOrderAndInBatches) {
  ReleaseQueue queue;
  queue.SessionLost(kEpoch);  // as a transport begins
  queue.Push({Live(1), Published(2), Live(3)}, kEpoch);
  EXPECT_THAT(queue.Next(2), IsBatch(1, Live(1), Published(2)));
  EXPECT_THAT(queue.Next(2), IsBatch(2, Live(3)));
  EXPECT_EQ(queue.Next(2), std::nullopt);
}

TEST(ReleaseQueueTest, WhatTheStoreHasNotHadGoesOutAgainUnderItsNumber) {
  ReleaseQueue queue;
  queue.SessionLost(kEpoch);  // as a transport begins
  for (uint64_t n = 1; n <= 4; ++n) {
    queue.Push({Live(n), Published(n)}, kEpoch);
    if (n < 4) queue.Next(10);
  }
  queue.Confirmed(1);
  queue.Resumed(2);  // the answer to the second was lost
  EXPECT_THAT(queue.Next(1), IsBatch(3, Live(3), Published(3)));
  EXPECT_THAT(queue.Next(10), IsBatch(4, Live(4), Published(4)));
  EXPECT_EQ(queue.Next(10), std::nullopt);
  queue.Confirmed(4);
  queue.Resumed(4);
  EXPECT_EQ(queue.Next(10), std::nullopt);
}

TEST(ReleaseQueueTest, ALostSessionNeedsNothingBackAndTheNextCountsAnew) {
  ReleaseQueue queue;
  queue.SessionLost(kEpoch);  // as a transport begins
  queue.Push({Live(1), Live(2)}, kEpoch);
  queue.Next(1);
  queue.SessionLost(kEpoch + 1);
  EXPECT_EQ(queue.Next(10), std::nullopt);
  queue.Confirmed(1);             // a late one
  queue.Push({Live(3)}, kEpoch);  // this one too
  EXPECT_EQ(queue.Next(10), std::nullopt);
  queue.Push({Live(3)}, kEpoch + 1);
  EXPECT_THAT(queue.Next(10), IsBatch(1, Live(3)));
}

TEST(ReleaseQueueTest, AChunkWaitsForItsBlocks) {
  ReleaseQueue queue;
  queue.SessionLost(kEpoch);  // as a transport begins
  queue.PutStarted(Live(1));
  queue.PutStarted(Live(1));
  queue.Push({Live(1), Live(2)}, kEpoch);
  EXPECT_THAT(queue.Next(10), IsBatch(1, Live(2)));
  EXPECT_FALSE(queue.PutDone(Live(1)));
  EXPECT_EQ(queue.Next(10), std::nullopt);
  EXPECT_TRUE(queue.PutDone(Live(1)));
  EXPECT_THAT(queue.Next(10), IsBatch(2, Live(1)));
  queue.PutStarted(Live(3));
  EXPECT_FALSE(queue.PutDone(Live(3)));  // nobody has released it
  EXPECT_EQ(queue.Next(10), std::nullopt);
}

TEST(ReleaseQueueTest, BlocksMayOutliveTheirSession) {
  ReleaseQueue queue;
  queue.SessionLost(kEpoch);  // as a transport begins
  queue.PutStarted(Live(1));
  queue.Push({Live(1)}, kEpoch);
  queue.SessionLost(kEpoch + 1);
  EXPECT_FALSE(queue.PutDone(Live(1)));
  EXPECT_EQ(queue.Next(10), std::nullopt);
}

}  // namespace
}  // namespace kvferry
