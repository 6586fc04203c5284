// Faults of the store over both tiers that the simulation has found, each by itself.
#include "tests/storage/disk_store_fixture.h"

namespace kvferry {
namespace {

class StoreRestart : public DiskStoreFixture {
 protected:
  void Begin(uint64_t chunks = 8, uint64_t on_disk = 1000) {
    OpenTiers(BigSpec(), chunks, on_disk);
    Enter();
  }
  void Enter() {
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
  }
  void Restart(bool power = true) {
    Close(power);
    OpenAgain();
    Enter();
  }
  // Its process has been killed: nothing more reaches the disk.
  void Kill() {
    disk_.faults.crash_after = disk_.operations();
    Close();
    OpenAgain();
    Enter();
  }
  bool Finds(uint64_t id) { return Lookup(session_, {Prefix(ns_, id)}, false) == 1; }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

// B82: what a start finds is in every gauge before anything is asked of the store.
TEST_F(StoreRestart, GaugesAreThereAtOnce) {
  Begin(4);
  for (uint64_t id = 1; id <= 20; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  ASSERT_TRUE(EraseAndWait(session_, Prefix(ns_, 3)).ok());
  Settle();
  const StoreStats before = store_->Stats();
  Close();
  OpenAgain();
  const StoreStats after = store_->Stats();
  EXPECT_EQ(after.chunks_on_disk, 19u);
  EXPECT_EQ(after.chunks_published, 19u);
  EXPECT_EQ(after.disk_live_bytes, before.disk_live_bytes);
  EXPECT_EQ(after.disk_budget_bytes, before.disk_budget_bytes);
  EXPECT_EQ(after.chunks_found, 19u);
  EXPECT_GE(after.metadata_bytes, 19 * kRecordBytes);
  uint64_t segments = 0;
  for (const std::string& name : disk_.Names()) {
    if (name.rfind("segment-", 0) == 0) segments += disk_.AllocatedBytes(name);
  }
  EXPECT_EQ(after.disk_used_bytes, segments);
}

TEST_F(StoreRestart, AnOpenThatFailsReturns) {
  Begin();
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  Close();
  for (int operations = 0;; ++operations) {
    disk_.faults.crash_after = disk_.operations() + operations;
    scheduler_ = std::make_unique<SimScheduler>(1);
    absl::StatusOr<std::unique_ptr<Store>> opened = OpenStore(options_, &executor_, disk_.Open(scheduler_.get()));
    disk_.faults.crash_after = -1;
    if (!opened.ok()) continue;
    store_ = *std::move(opened);
    break;
  }
  Close();
  OpenAgain();
  Enter();
  for (uint64_t id = 1; id <= 10; ++id) EXPECT_TRUE(Holds(session_, Prefix(ns_, id), id)) << id;
}

TEST_F(StoreRestart, WhatWasErasedStaysErased) {
  Begin();
  const ChunkKey read = PublishedOne(session_, ns_, 1);
  PublishedOne(session_, ns_, 2);
  ASSERT_TRUE(Flush().ok());
  ASSERT_EQ(Lookup(session_, {read}, true), 1);  // so that its image is not given back before the crash
  ASSERT_TRUE(EraseAndWait(session_, read).ok());
  // Younger than the erasure, so that it is forgotten at the next start. In the same segment, which stays for it.
  ASSERT_TRUE(EraseAndWait(session_, Prefix(ns_, 2)).ok());
  PublishedOne(session_, ns_, 3);
  ASSERT_TRUE(Flush().ok());
  Close();
  OpenAgain();
  Enter();
  for (int restarts = 0; restarts < 3; ++restarts) {
    EXPECT_FALSE(Finds(1)) << restarts;
    EXPECT_FALSE(Finds(2)) << restarts;
    EXPECT_TRUE(Finds(3)) << restarts;
    Restart();
  }
}

TEST_F(StoreRestart, ASegmentWhoseNumberIsGivenAnewHasNoPast) {
  Begin();
  for (uint64_t id = 1; id <= 3; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  for (uint64_t id = 1; id <= 3; ++id) ASSERT_TRUE(EraseAndWait(session_, Prefix(ns_, id)).ok());
  ASSERT_TRUE(Flush().ok());
  for (int restarts = 0; restarts < 3; ++restarts) {
    Restart();
    for (uint64_t id = 1; id <= 3; ++id) PublishedOne(session_, ns_, 10 + id);
    ASSERT_TRUE(Flush().ok());
    Restart();
    for (uint64_t id = 1; id <= 3; ++id) {
      EXPECT_TRUE(Holds(session_, Prefix(ns_, 10 + id), 10 + id)) << restarts;
      ASSERT_TRUE(EraseAndWait(session_, Prefix(ns_, 10 + id)).ok());
    }
    ASSERT_TRUE(Flush().ok());
  }
}

TEST_F(StoreRestart, ANameExpiresThoughTheProcessWasKilled) {
  Begin();
  const ChunkKey live = LiveOne(session_, ns_, 1);
  ASSERT_TRUE(store_->Publish(session_, live, {{0, 1}, {}, kDefaultPriority, absl::Seconds(50)}).ok());
  store_->Release(session_, {live});
  ASSERT_TRUE(Flush().ok());
  Kill();
  EXPECT_TRUE(Finds(1));
  executor_.Advance(absl::Seconds(51));
  EXPECT_FALSE(Finds(1));
}

TEST_F(StoreRestart, ANameGivenAnewWhileItsImageIsWrittenLasts) {
  Begin();
  const ChunkKey live = LiveOne(session_, ns_, 1);
  ASSERT_TRUE(Publish(session_, live, 1).ok());
  absl::Status flushed = absl::UnknownError(""), erased = flushed;
  store_->Flush([&flushed](absl::Status status) { flushed = std::move(status); });  // under way
  store_->Erase(session_, Prefix(ns_, 1), [&erased](absl::Status status) { erased = std::move(status); });
  ASSERT_TRUE(Publish(session_, live, 1).ok());
  Settle();
  ASSERT_TRUE(flushed.ok() && erased.ok() && Flush().ok());
  Restart();
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 1), 1));
}

TEST_F(StoreRestart, AnExpiredNameIsInNobodysWay) {
  Begin();
  const ChunkKey live = LiveOne(session_, ns_, 1);
  for (const uint64_t id : {1, 1, 2}) {
    ASSERT_TRUE(store_->Publish(session_, live, {{0, id}, {}, kDefaultPriority, absl::Seconds(1)}).ok());
    EXPECT_TRUE(Finds(id));
    executor_.Set(executor_.Now() + absl::Seconds(2));  // and the timer has not run
  }
}

TEST_F(StoreRestart, AFullDiskCostsNoLiveChunk) {
  Begin(6, 1);  // 1 MiB and one image
  std::vector<ChunkKey> live;
  for (uint64_t id = 1; id <= 60; ++id) {
    const absl::StatusOr<Writers> writers = ReserveAndWait(session_, ns_);
    if (!writers.ok()) break;
    Seal(*(*writers)[0], id);
    live.push_back((*writers)[0]->key());
  }
  EXPECT_GT(live.size(), 6u);
  EXPECT_LT(live.size(), 60u);
  EXPECT_EQ(store_->CheckInvariants(), absl::OkStatus());
  for (uint64_t id = 1; id <= live.size(); ++id) {
    absl::Status status = absl::UnknownError("not answered");
    store_->Get(session_, BlockKey{live[id - 1], 0},
                [&status](const absl::StatusOr<BlockView>& view) { status = view.status(); });
    Settle();
    executor_.Advance(options_.load_patience);
    Settle();
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << id << ": " << status;
  }
}

TEST_F(StoreRestart, AWrongChecksumCostsItsOwnChunkAlone) {
  Begin(4);
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ASSERT_TRUE(writers.ok());
  for (int layer = 0; layer < 2; ++layer) {
    (*writers)[0]->Commit(layer, 12345, [](const absl::Status& status) { EXPECT_TRUE(status.ok()); });
  }
  const ChunkKey bad = (*writers)[0]->key();
  writers->clear();
  std::vector<ChunkKey> live;
  for (uint64_t id = 1; id <= 20; ++id) live.push_back(LiveOne(session_, ns_, id));
  EXPECT_EQ(store_->Stats().corruptions, 1u);
  EXPECT_TRUE(absl::IsNotFound(Fetch(session_, bad).status()));
  EXPECT_EQ(store_->CheckInvariants(), absl::OkStatus());
  for (uint64_t id = 1; id <= 20; ++id) EXPECT_TRUE(Holds(session_, live[id - 1], id)) << id;
}

TEST_F(StoreRestart, ASyncThatFailedIsNotBelieved) {
  for (int failing = 0; failing < 40; ++failing) {
    disk_ = SimDisk(7);
    options_.disk_keep_free_bytes = 0;
    Begin(8);
    for (uint64_t id = 1; id <= 6; ++id) PublishedOne(session_, ns_, id);
    // While the first segment is sealed, and while a Flush syncs it.
    disk_.faults.fail_at = disk_.operations() + failing;
    bool flushed = false;
    for (int attempt = 0; attempt < 3 && !flushed; ++attempt) {
      flushed = Flush().ok();
      executor_.Advance(absl::Seconds(2));
    }
    disk_.faults.fail_at = -1;
    Restart();
    for (uint64_t id = 1; id <= 6 && flushed; ++id) EXPECT_TRUE(Holds(session_, Prefix(ns_, id), id)) << failing;
    Close();
  }
}

}  // namespace
}  // namespace kvferry
