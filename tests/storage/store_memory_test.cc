// What is evicted when memory is needed, and what never is.
#include "tests/storage/store_fixture.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

class StoreMemory : public StoreFixture {
 protected:
  // A store with room for `chunks` chunks of BigSpec and nothing more.
  void SetUpFor(uint64_t chunks, PolicyKind policy = PolicyKind::kS3Fifo) {
    OpenFor(BigSpec(), chunks, policy);
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
  }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(StoreMemory, HoldsWhatTheBudgetSaysAndNoByteMore) {
  SetUpFor(4);
  for (uint64_t i = 0; i < 4; ++i) Live(session_, ns_, i);
  const StoreStats stats = store_->Stats();
  EXPECT_LE(stats.memory_used_bytes + stats.memory_free_in_segments_bytes, stats.memory_budget_bytes);
  const absl::Status refused = Reserve(session_, ns_).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  const std::string each = std::to_string(ChunkLayout::For(BigSpec(), 0).image_bytes);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("asked for 1 chunks of " + each));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("budget " + std::to_string(stats.memory_budget_bytes)));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("leases 0"));
  EXPECT_EQ(store_->Stats().reserves_refused, 1u);
}

TEST_F(StoreMemory, MoreThanTheBudgetIsRefusedAtOnce) {
  SetUpFor(4);
  const Answer answer = Ask(session_, ns_, 5, absl::Hours(1));
  ASSERT_TRUE(answer->has_value()) << "it could wait for ever";
  EXPECT_EQ((*answer)->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Reserve(session_, ns_, 65537).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StoreMemory, AllOrNone) {
  SetUpFor(4);
  Live(session_, ns_, 1);
  Live(session_, ns_, 2);
  const uint64_t used = store_->Stats().memory_used_bytes;
  EXPECT_EQ(Reserve(session_, ns_, 3).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->Stats().memory_used_bytes, used);
  EXPECT_EQ(store_->Stats().chunks_reserved, 0u);
  const absl::StatusOr<Writers> writers = Reserve(session_, ns_, 2);
  ASSERT_TRUE(writers.ok()) << writers.status();
  EXPECT_EQ(writers->size(), 2u);
  EXPECT_NE((*writers)[0]->key(), (*writers)[1]->key());
}

TEST_F(StoreMemory, TheLeastRecentlyUsedGoesFirst) {
  SetUpFor(4, PolicyKind::kLru);
  for (uint64_t i = 1; i <= 4; ++i) Published(session_, ns_, i);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1));  // a use
  Live(session_, ns_, 10);
  EXPECT_FALSE(Has(session_, Prefix(ns_, 2), 2));
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1));
  EXPECT_EQ(store_->Stats().evictions, 1u);
}

// B32: a probe neither holds a chunk nor keeps it young.
TEST_F(StoreMemory, B32_ProbesHoldNothing) {
  SetUpFor(4);
  std::vector<ChunkKey> keys;
  for (uint64_t i = 1; i <= 4; ++i) keys.push_back(Published(session_, ns_, i, i - 1));
  for (uint64_t i = 0; i < 20; ++i) {
    Lookup(session_, keys, false);
    EXPECT_EQ(store_->Stats().chunks_leased, 0u);
    store_->Release(session_, {Live(session_, ns_, 100 + i)});
  }
  EXPECT_EQ(Lookup(session_, keys, false), 3);
}

// B33: what a look-up promised is there, whatever is put meanwhile.
TEST_F(StoreMemory, B33_ALeasedPrefixStays) {
  SetUpFor(4);
  std::vector<ChunkKey> keys;
  for (uint64_t i = 1; i <= 3; ++i) keys.push_back(Published(session_, ns_, i, i - 1));
  Published(session_, ns_, 50);
  ASSERT_EQ(Lookup(session_, keys, true), 3);
  Live(session_, ns_, 10);  // evicts 50
  EXPECT_EQ(Reserve(session_, ns_).status().code(), absl::StatusCode::kResourceExhausted);
  for (uint64_t i = 1; i <= 3; ++i) EXPECT_TRUE(Has(session_, Prefix(ns_, i), i));
  store_->Release(session_, keys);
  EXPECT_TRUE(Reserve(session_, ns_).ok());
}

// B34: of {1, 2, x, y} with 2 oldest but named in the request, storing 3, 4, 5 evicts the others.
TEST_F(StoreMemory, B34_ChunksNamedInARequestAreProtected) {
  SetUpFor(4);
  for (uint64_t i : {2, 1, 8, 9}) Published(session_, ns_, i);
  ASSERT_EQ(Lookup(session_, {Prefix(ns_, 2)}, true), 1);
  for (uint64_t i : {3, 4, 5}) Published(session_, ns_, i);
  for (uint64_t i : {2, 3, 4, 5}) EXPECT_TRUE(Has(session_, Prefix(ns_, i), i)) << i;
  for (uint64_t i : {1, 8, 9}) EXPECT_FALSE(Has(session_, Prefix(ns_, i), i)) << i;
}

// B41: a chain goes from its end, so that what remains is always reachable from the start.
TEST_F(StoreMemory, B41_EvictionIsTailFirst) {
  SetUpFor(6);
  std::vector<ChunkKey> chain;
  for (uint64_t i = 1; i <= 6; ++i) chain.push_back(Published(session_, ns_, i, i - 1));
  for (int left = 5; left >= 1; --left) {
    Live(session_, ns_, 100 + left);
    EXPECT_EQ(Lookup(session_, chain, false), left);
    EXPECT_EQ(store_->Stats().chunks_published, static_cast<uint64_t>(left));
  }
}

// B41: a tail whose head is lost is evicted like any other, and is of use again when the head comes back.
TEST_F(StoreMemory, B41_ATailWithoutItsHead) {
  SetUpFor(4);
  std::vector<ChunkKey> chain;
  for (uint64_t i = 1; i <= 3; ++i) chain.push_back(Published(session_, ns_, i, i - 1));
  ASSERT_TRUE(Erase(session_, chain[0]).ok());
  EXPECT_EQ(Lookup(session_, chain, false), 0);
  Published(session_, ns_, 1);
  EXPECT_EQ(Lookup(session_, chain, false), 3);
  ASSERT_TRUE(Erase(session_, chain[0]).ok());
  for (uint64_t i = 0; i < 4; ++i) Live(session_, ns_, 100 + i);
  EXPECT_EQ(store_->Stats().chunks_published, 0u) << "unreachable, and reclaimed";
}

TEST_F(StoreMemory, AParentKeepsItsAgeWhenItsLastChildGoes) {
  SetUpFor(4, PolicyKind::kLru);
  Published(session_, ns_, 1);
  Published(session_, ns_, 2, 1);
  Published(session_, ns_, 8);
  Published(session_, ns_, 9);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1));  // the parent is the most recently used of all
  Live(session_, ns_, 100);                       // evicts 2, and 1 is a leaf now
  EXPECT_FALSE(Has(session_, Prefix(ns_, 2), 2));
  Live(session_, ns_, 101);
  Live(session_, ns_, 102);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1));
  EXPECT_FALSE(Has(session_, Prefix(ns_, 8), 8));
  EXPECT_FALSE(Has(session_, Prefix(ns_, 9), 9));
}

TEST_F(StoreMemory, AnOldParentGoesBeforeYoungerChunks) {
  SetUpFor(4);
  Published(session_, ns_, 1);
  Published(session_, ns_, 2, 1);
  Published(session_, ns_, 8);
  Published(session_, ns_, 9);
  Live(session_, ns_, 100);  // evicts 2, and 1 is a leaf now
  Live(session_, ns_, 101);
  EXPECT_FALSE(Has(session_, Prefix(ns_, 1), 1));
  EXPECT_TRUE(Has(session_, Prefix(ns_, 8), 8));
}

TEST_F(StoreMemory, LiveChunksAreNeverEvicted) {
  SetUpFor(3);
  const ChunkKey live = Live(session_, ns_, 1);
  const ChunkKey both = Live(session_, ns_, 2);
  ASSERT_TRUE(Publish(session_, both, 2).ok());  // published, but its session goes on with it
  Published(session_, ns_, 3);
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ASSERT_TRUE(writers.ok());
  EXPECT_EQ(Reserve(session_, ns_).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Has(session_, live, 1));
  EXPECT_TRUE(Has(session_, both, 2));
}

TEST_F(StoreMemory, NothingIsEvictedForWhatCannotBeServed) {
  SetUpFor(4);
  Live(session_, ns_, 1);
  for (uint64_t i = 2; i <= 4; ++i) Published(session_, ns_, i);
  EXPECT_EQ(Reserve(session_, ns_, 4).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->Stats().evictions, 0u);
}

// B69: a chunk that is being read is passed over, and if its name does go its bytes stay until the reader is done.
TEST_F(StoreMemory, B69_WhatIsBeingReadIsPassedOver) {
  SetUpFor(3);
  for (uint64_t i = 1; i <= 3; ++i) Published(session_, ns_, i);
  absl::StatusOr<BlockView> view = Get(session_, Prefix(ns_, 1));
  EXPECT_TRUE(Has(session_, Prefix(ns_, 2), 2) && Has(session_, Prefix(ns_, 3), 3));  // 1 is the oldest
  Live(session_, ns_, 10);
  Live(session_, ns_, 11);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1));
  EXPECT_EQ(Reserve(session_, ns_).status().code(), absl::StatusCode::kResourceExhausted);
  ExpectBytes(*view, 1);
  view = absl::CancelledError();
  EXPECT_TRUE(Reserve(session_, ns_).ok());
}

// B44: what small chunks filled holds a large one when they are gone, and while some stay a hole is made by eviction.
TEST_F(StoreMemory, B44_SmallThenLarge) {
  StoreOptions options;
  options.memory_bytes = 8 * kMiB;
  options.segment_bytes = kMiB;
  Open(options);
  session_ = Session();
  const NamespaceId small = Namespace(session_, SmallSpec());   // 4 KiB
  const NamespaceSpec large_spec = SmallSpec(2, 16, 256, 100);  // 2 x 3.1 MiB
  const NamespaceId large = Namespace(session_, large_spec);
  ASSERT_GT(ChunkLayout::For(large_spec, 0).image_bytes, 6 * kMiB);
  for (uint64_t i = 1; i <= 1000; ++i) Published(session_, small, i);
  ASSERT_TRUE(Reserve(session_, large).ok()) << "by eviction";
  for (uint64_t i = 1; i <= 1700; ++i) {
    const ChunkKey key = Published(session_, small, 10000 + i);
    if (i % 2 != 0) continue;  // every second small one is kept
    ASSERT_TRUE(Erase(session_, key).ok());
  }
  absl::StatusOr<Writers> writers = Reserve(session_, large);
  ASSERT_TRUE(writers.ok()) << writers.status();
  Seal(*(*writers)[0], 77);
  EXPECT_TRUE(Has(session_, (*writers)[0]->key(), 77, 1));
  const StoreStats stats = store_->Stats();
  EXPECT_LE(stats.memory_used_bytes + stats.memory_free_in_segments_bytes, stats.memory_budget_bytes);
}

// Memory of one tenant serves another only through the kernel, which zeroes it.
TEST_F(StoreMemory, AnotherTenantGetsZeroedMemory) {
  SetUpFor(4);
  for (uint64_t i = 1; i <= 4; ++i) Published(session_, ns_, i);
  const SessionId other = Session("other");
  const NamespaceId ns = Namespace(other, BigSpec());
  absl::StatusOr<Writers> writers = Reserve(other, ns, 4);
  ASSERT_TRUE(writers.ok()) << writers.status();
  EXPECT_EQ(store_->Stats().evictions, 4u);
  for (const auto& writer : *writers) {
    for (const uint8_t byte : writer->Layer(1)) ASSERT_EQ(byte, 0);
  }
}

TEST_F(StoreMemory, SegmentsGoBackWhole) {
  StoreOptions options;
  options.memory_bytes = 64 * kMiB;
  options.segment_bytes = kMiB;
  Open(options);
  session_ = Session();
  ns_ = Namespace(session_, BigSpec());
  std::vector<ChunkKey> keys;
  for (uint64_t i = 0; i < 400; ++i) keys.push_back(Live(session_, ns_, i));
  const uint64_t most = store_->Stats().segments;
  EXPECT_GT(most, 20u);
  store_->Release(session_, keys);
  EXPECT_LE(store_->Stats().segments, most / 2) << "an eighth of the budget is kept for an active tenant";
  store_->EndSession(session_);
  ExpectEmpty();
}

TEST_F(StoreMemory, BookkeepingIsInTheBudget) {
  OpenFor(BigSpec(), 4);
  std::vector<SessionId> sessions;
  absl::Status status;
  while (status.ok() && sessions.size() < 100000) {
    const absl::StatusOr<SessionId> session = store_->OpenSession("tenant");
    status = session.status();
    if (session.ok()) sessions.push_back(*session);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const StoreStats stats = store_->Stats();
  EXPECT_LE(stats.memory_used_bytes, stats.memory_budget_bytes);
  EXPECT_EQ(stats.metadata_bytes, stats.memory_used_bytes);
  for (const SessionId session : sessions) store_->EndSession(session);
  ExpectEmpty();
}

}  // namespace
}  // namespace kvferry
