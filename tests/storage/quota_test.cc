// What tenants and namespaces may hold.
#include <atomic>
#include <random>
#include <thread>

#include "storage/executor.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvferry {
namespace {

class QuotaTest : public DiskStoreFixture {
 protected:
  void SetUp() override { OpenFor(BigSpec(), 64, PolicyKind::kLru); }
  static uint64_t Image() { return ChunkLayout::For(BigSpec(), 0).image_bytes; }
  void Limit(const std::string& tenant, uint64_t chunks, QuotaMode mode, std::optional<NamespaceId> ns = {}) {
    store_->SetQuota(tenant, ns, Quota{chunks * Image(), mode});
  }
  QuotaInfo Info(const std::string& tenant, std::optional<NamespaceId> ns = {}) {
    for (const QuotaInfo& info : store_->ListQuotas()) {
      if (info.tenant == tenant && info.ns == ns) return info;
    }
    return {};
  }
  void TearDown() override {
    if (store_ == nullptr) return;
    EXPECT_EQ(store_->CheckInvariants(), absl::OkStatus());
  }
};

TEST_F(QuotaTest, RejectRefusesWhatWouldGoBeyondAndNoMore) {
  Limit("small", 3, QuotaMode::kReject);
  const SessionId small = Session("small"), other = Session("other");
  const NamespaceId ns = Namespace(small, BigSpec()), others = Namespace(other, BigSpec());
  for (uint64_t id = 1; id <= 2; ++id) Published(small, ns, id);
  const absl::Status refused = Reserve(small, ns, 2).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), testing::HasSubstr("quota of tenant \"small\" (reject)"));
  EXPECT_TRUE(Has(small, Prefix(ns, 1), 1)) << "nothing of it was evicted";
  {
    const absl::StatusOr<Writers> last = Reserve(small, ns, 1);
    EXPECT_TRUE(last.ok()) << last.status();
    EXPECT_FALSE(Reserve(small, ns, 1).ok()) << "what is reserved counts";
  }
  EXPECT_TRUE(Reserve(small, ns, 1).ok()) << "it was given up";
  EXPECT_TRUE(Reserve(other, others, 20).ok());
  EXPECT_EQ(Info("small").used_bytes, 2 * Image());
  EXPECT_EQ(Info("small").refusals, 2u);
  ASSERT_TRUE(Erase(small, Prefix(ns, 1)).ok());
  EXPECT_TRUE(Reserve(small, ns, 2).ok());
  store_->SetQuota("small", std::nullopt, std::nullopt);
  EXPECT_TRUE(Reserve(small, ns, 20).ok());
}

TEST_F(QuotaTest, EvictOwnMakesRoomAmongItsOwnAlone) {
  const SessionId small = Session("small"), other = Session("other");
  const NamespaceId ns = Namespace(small, BigSpec()), others = Namespace(other, BigSpec());
  Published(other, others, 1);  // the oldest of all
  for (uint64_t id = 1; id <= 3; ++id) Published(small, ns, id, id - 1);
  Limit("small", 3, QuotaMode::kEvictOwn);  // over chunks that are there already
  Published(small, ns, 10);
  EXPECT_FALSE(Has(small, Prefix(ns, 3), 3)) << "the end of the chain goes first";
  EXPECT_TRUE(Has(small, Prefix(ns, 1), 1));
  EXPECT_TRUE(Has(small, Prefix(ns, 2), 2));
  EXPECT_TRUE(Has(other, Prefix(others, 1), 1));
  EXPECT_EQ(Info("small").used_bytes, 3 * Image());
  EXPECT_EQ(Info("small").evictions, 1u);
  Limit("small", 1, QuotaMode::kEvictOwn);  // less than there is: it comes down with the next one
  EXPECT_EQ(Info("small").used_bytes, 3 * Image());
  Published(small, ns, 11);
  EXPECT_EQ(Info("small").used_bytes, Image());
  EXPECT_TRUE(Has(small, Prefix(ns, 11), 11));
}

TEST_F(QuotaTest, WhatSomebodyHoldsIsNotEvictedAndNothingIsInVain) {
  Limit("small", 4, QuotaMode::kEvictOwn);
  const SessionId small = Session("small");
  const NamespaceId ns = Namespace(small, BigSpec());
  for (uint64_t id = 1; id <= 2; ++id) Published(small, ns, id);
  ASSERT_EQ(Lookup(small, {Prefix(ns, 1)}, true), 1);
  const ChunkKey live = Live(small, ns, 3);
  EXPECT_FALSE(Reserve(small, ns, 3).ok()) << "a leased one, a live one and three would be five";
  EXPECT_TRUE(Has(small, Prefix(ns, 2), 2)) << "it would have been of no use";
  EXPECT_TRUE(Reserve(small, ns, 2).ok());
  EXPECT_FALSE(Has(small, Prefix(ns, 2), 2));
  EXPECT_TRUE(Has(small, Prefix(ns, 1), 1));
  EXPECT_TRUE(Has(small, live, 3));
}

TEST_F(QuotaTest, ANamespaceMayHaveOneOfItsOwn) {
  const SessionId session = Session("tenant");
  const NamespaceId first = Namespace(session, BigSpec()), second = Namespace(session, SmallSpec(2, 4, 64, 32));
  Limit("tenant", 10, QuotaMode::kReject);
  Limit("tenant", 2, QuotaMode::kEvictOwn, first);
  for (uint64_t id = 1; id <= 5; ++id) Published(session, first, id);
  EXPECT_EQ(Info("tenant", first).used_bytes, 2 * Image());
  EXPECT_EQ(Info("tenant").used_bytes, 2 * Image());
  uint64_t granted = 0;
  while (Reserve(session, second, 1).ok() && granted < 100) {
    Published(session, second, 100 + granted);
    ++granted;
  }
  EXPECT_EQ(granted, 8 * Image() / ChunkLayout::For(SmallSpec(2, 4, 64, 32), 0).image_bytes);
  EXPECT_TRUE(Has(session, Prefix(first, 5), 5));
}

TEST_F(QuotaTest, WaitersAreToldOfTheQuota) {
  const SessionId small = Session("small"), other = Session("other");
  const NamespaceId ns = Namespace(small, BigSpec()), others = Namespace(other, BigSpec());
  absl::StatusOr<Writers> all = Reserve(other, others, 63);
  ASSERT_TRUE(all.ok());
  const Answer answer = Ask(small, ns, 2, absl::Seconds(10));
  ASSERT_FALSE(answer->has_value());
  Limit("small", 1, QuotaMode::kReject);
  all->clear();
  executor_.Run();
  ASSERT_TRUE(answer->has_value());
  EXPECT_THAT((*answer)->status().message(), testing::HasSubstr("quota"));
}

// A chunk counts once, wherever it lies, and is counted again after a restart.
TEST_F(QuotaTest, MemoryAndDiskCountTogether) {
  store_ = nullptr;
  OpenTiers(BigSpec(), 4);
  SessionId session = Session("small");
  const NamespaceId ns = Namespace(session, BigSpec());
  for (uint64_t id = 1; id <= 12; ++id) PublishedOne(session, ns, id);
  for (uint64_t id = 1; id <= 12; ++id) EXPECT_TRUE(Holds(session, Prefix(ns, id), id));
  EXPECT_EQ(Info("small").used_bytes, 12 * Image());
  ASSERT_TRUE(Flush().ok());
  Close();
  OpenAgain();
  EXPECT_EQ(Info("small").used_bytes, 12 * Image());
  Limit("small", 12, QuotaMode::kEvictOwn);
  session = Session("small");
  ASSERT_EQ(Namespace(session, BigSpec()), ns);
  PublishedOne(session, ns, 13);
  EXPECT_EQ(Info("small").used_bytes, 12 * Image());
  EXPECT_EQ(store_->Stats().chunks_published, 12u);
  EXPECT_TRUE(Holds(session, Prefix(ns, 13), 13));
}

TEST_F(QuotaTest, PinnedChunksStay) {
  const SessionId session = Session("small");
  const NamespaceId ns = Namespace(session, BigSpec());
  Limit("small", 2, QuotaMode::kEvictOwn);
  Published(session, ns, 1);
  ASSERT_TRUE(store_->SetPinned(Prefix(ns, 1), true).ok());
  for (uint64_t id = 2; id <= 5; ++id) Published(session, ns, id);
  EXPECT_TRUE(Has(session, Prefix(ns, 1), 1));
  ASSERT_TRUE(store_->SetPinned(Prefix(ns, 1), false).ok());
  for (uint64_t id = 6; id <= 8; ++id) Published(session, ns, id);
  EXPECT_FALSE(Has(session, Prefix(ns, 1), 1));
  EXPECT_EQ(store_->SetPinned(Prefix(ns, 1), true).code(), absl::StatusCode::kNotFound);
}

// Exact under concurrency: no moment at which a tenant holds more than its quota, nor is refused while it has room.
TEST(QuotaThreads, NeverAByteBeyond) {
  const auto executor = NewThreadExecutor();
  StoreOptions options;
  options.memory_bytes = 64 * kMiB;
  const auto store = *OpenStore(options, executor.get());
  const NamespaceSpec spec = SmallSpec(2, 4, 64, 16);
  const uint64_t image = ChunkLayout::For(spec, 0).image_bytes;
  constexpr uint64_t kChunks = 20;
  store->SetQuota("tenant", std::nullopt, Quota{kChunks * image, QuotaMode::kReject});
  std::atomic<int64_t> held{0};
  std::atomic<uint64_t> refused{0};
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      const SessionId session = *store->OpenSession("tenant");
      const NamespaceId ns = *store->OpenNamespace(session, spec);
      std::vector<std::unique_ptr<ChunkWriter>> mine;
      for (int i = 0; i < 3000; ++i) {
        if (random() % 2 == 0 && !mine.empty()) {
          --held;  // counted after it is there and until it goes: never more than the store counts
          mine.pop_back();
          continue;
        }
        store->Reserve(session, ns, ReserveOptions(),
                       [&](absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> got) {
                         if (!got.ok()) {
                           ++refused;
                           return;
                         }
                         EXPECT_LE(++held, static_cast<int64_t>(kChunks));
                         mine.push_back(std::move(got->front()));
                       });
        for (const QuotaInfo& info : store->ListQuotas()) EXPECT_LE(info.used_bytes, kChunks * image);
      }
      held -= static_cast<int64_t>(mine.size());
      mine.clear();
      store->EndSession(session);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(refused.load(), 0u);
  EXPECT_EQ(store->ListQuotas()[0].used_bytes, 0u);
  EXPECT_EQ(store->CheckInvariants(), absl::OkStatus());
}

}  // namespace
}  // namespace kvferry
