#include "client/release_queue.h"

#include "gmock/gmock.h"

namespace kvferry {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

ChunkKey Live(uint64_t n) { return {{1, 2}, {kLiveBit | 5, n}, 0, 0}; }
ChunkKey Published(uint64_t n) { return {{1, 2}, {5, n}, 0, 0}; }

TEST(ReleaseQueueTest, GivesKeysOutOnceInOrderAndInBatches) {
  ReleaseQueue queue;
  queue.Push({Live(1), Published(2), Live(3)});
  EXPECT_THAT(queue.Take(2), ElementsAre(Live(1), Published(2)));
  EXPECT_FALSE(queue.empty());
  EXPECT_THAT(queue.Take(2), ElementsAre(Live(3)));
  EXPECT_TRUE(queue.empty());
  EXPECT_THAT(queue.Take(2), IsEmpty());
}

TEST(ReleaseQueueTest, WhatWasNotConfirmedGoesOutAgainWithoutLeases) {
  ReleaseQueue queue;
  queue.Push({Live(1), Published(2)});
  queue.Take(10);
  queue.HeartbeatSent();
  queue.Push({Live(3), Published(4)});
  queue.Take(10);
  queue.HeartbeatSent();
  queue.Push({Live(5)});
  queue.Take(10);
  queue.HeartbeatAnswered();  // the first: 1 and 2 have arrived
  queue.Resumed();
  EXPECT_THAT(queue.Take(10), ElementsAre(Live(3), Live(5)));
}

TEST(ReleaseQueueTest, ALostSessionNeedsNothingBack) {
  ReleaseQueue queue;
  queue.Push({Live(1), Live(2)});
  queue.Take(1);
  queue.SessionLost();
  EXPECT_TRUE(queue.empty());
  queue.Resumed();
  EXPECT_TRUE(queue.empty());
  queue.HeartbeatAnswered();  // a late one
}

}  // namespace
}  // namespace kvferry
