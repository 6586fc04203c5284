// The store over both tiers: what leaves memory, what comes back, and what a restart finds.
#include "storage/disk/aligned_buffer.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvferry {
namespace {

class StoreDisk : public DiskStoreFixture {
 protected:
  void Begin() {
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
  }
  void Begin(uint64_t chunks, uint64_t on_disk = 1000) {
    OpenTiers(BigSpec(), chunks, on_disk);
    Begin();
  }
  StoreStats Stats() { return store_->Stats(); }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(StoreDisk, WhatMemoryCannotHoldIsOnDisk) {
  Begin(4);
  for (uint64_t id = 1; id <= 30; ++id) PublishedOne(session_, ns_, id, id - 1);
  EXPECT_EQ(Stats().evictions, 0u);
  EXPECT_GE(Stats().disk_writes, 26u);
  std::vector<ChunkKey> keys;
  for (uint64_t id = 1; id <= 30; ++id) keys.push_back(Prefix(ns_, id));
  EXPECT_EQ(Lookup(session_, keys, false), 30);
  for (uint64_t id = 1; id <= 30; ++id) EXPECT_TRUE(Holds(session_, Prefix(ns_, id), id)) << id;
  EXPECT_GE(Stats().disk_reads, 26u);
  EXPECT_EQ(Stats().corruptions, 0u);
  EXPECT_LE(Stats().memory_used_bytes + Stats().memory_free_in_segments_bytes, Stats().memory_budget_bytes);
}

TEST_F(StoreDisk, LiveChunksAreSpilledNeverLost) {
  Begin(4);
  std::vector<ChunkKey> live;
  for (uint64_t id = 1; id <= 20; ++id) live.push_back(LiveOne(session_, ns_, id));
  for (uint64_t id = 1; id <= 20; ++id) EXPECT_TRUE(Holds(session_, live[id - 1], id)) << id;
  EXPECT_EQ(Stats().chunks_live, 20u);
  // Published from disk: a second name, no byte moves.
  const uint64_t written = Stats().disk_writes;
  ASSERT_TRUE(Publish(session_, live[0], 100).ok());
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 100), 1));
  EXPECT_EQ(Stats().disk_writes, written);
  store_->EndSession(session_);
  Settle();
  EXPECT_EQ(Stats().chunks_live, 0u);
  EXPECT_EQ(Stats().chunks_on_disk, 1u);
  Begin();
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 100), 1));
}

TEST_F(StoreDisk, ARestartFindsWhatWasFlushed) {
  Begin(8);
  for (uint64_t id = 1; id <= 20; ++id) PublishedOne(session_, ns_, id, id - 1);
  const ChunkKey live = LiveOne(session_, ns_, 50);
  ASSERT_TRUE(Flush().ok());
  PublishedOne(session_, ns_, 21, 20);
  ASSERT_TRUE(EraseAndWait(session_, Prefix(ns_, 7)).ok());
  Close(/*power=*/true);
  OpenAgain();
  const SessionId other = Session();
  EXPECT_EQ(Namespace(other, BigSpec()), ns_);
  for (uint64_t id = 1; id <= 20; ++id) EXPECT_EQ(Holds(other, Prefix(ns_, id), id), id != 7) << id;
  EXPECT_EQ(Lookup(other, {live}, false), 0) << "live chunks end with the daemon";
  const SessionId stranger = Session("another tenant");
  EXPECT_FALSE(Holds(stranger, Prefix(ns_, 1), 1));
}

TEST_F(StoreDisk, APublishAfterTheSpillIsFoundAfterARestart) {
  Begin(2);
  std::vector<ChunkKey> live;
  for (uint64_t id = 1; id <= 6; ++id) live.push_back(LiveOne(session_, ns_, id));
  for (uint64_t id = 1; id <= 6; ++id) ASSERT_TRUE(Publish(session_, live[id - 1], id).ok());
  ASSERT_TRUE(Flush().ok());
  Close(/*power=*/true);
  OpenAgain();
  Begin();
  for (uint64_t id = 1; id <= 6; ++id) EXPECT_TRUE(Holds(session_, Prefix(ns_, id), id)) << id;
}

// Never taken from a client: what the store knows itself, joined to the slots when a chunk leaves memory.
TEST_F(StoreDisk, TheStoreWritesTheHeader) {
  Begin(4);
  const ChunkKey live = LiveOne(session_, ns_, 5);
  PublishOptions options;
  options.prefix_key = {0, 7};
  options.parent = {0, 6};
  options.priority = 9;
  options.ttl = absl::Hours(1);
  ASSERT_TRUE(store_->Publish(session_, live, options).ok());
  ASSERT_TRUE(Flush().ok());
  const ChunkLayout layout = ChunkLayout::For(BigSpec(), 0);
  AlignedBuffer image(layout.image_bytes);
  const std::unique_ptr<Folder> folder = disk_.Open(scheduler_.get());
  ASSERT_TRUE((*folder->Open("segment-00000001"))->ReadNow(kDiskAlignment, image.view()).ok());
  const absl::StatusOr<ChunkHeader> header = DecodeHeader(image.view());
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->key, Prefix(ns_, 7));
  EXPECT_EQ(header->parent, options.parent);
  EXPECT_EQ(header->tokens, 16u);
  EXPECT_EQ(header->image_bytes, layout.image_bytes);
  EXPECT_EQ(header->lifetime.priority, 9);
  EXPECT_EQ(header->lifetime.expires, absl::ToUnixSeconds(executor_.Now() + absl::Hours(1)));
  ASSERT_EQ(header->checksums.size(), 2u);
  for (int layer = 0; layer < 2; ++layer) {
    const ByteView slot = image.view().subspan(layout.slots[layer].offset, layout.slots[layer].size);
    EXPECT_EQ(header->checksums[layer], BlockChecksum(slot));
    EXPECT_EQ(slot[3], ByteAt(5, layer, 3));
  }
}

TEST_F(StoreDisk, AFullDiskGivesUpItsOldest) {
  Begin(4, 20);
  for (uint64_t id = 1; id <= 100; ++id) PublishedOne(session_, ns_, id);
  EXPECT_GT(Stats().disk_evictions, 0u);
  EXPECT_LE(Stats().disk_used_bytes, Stats().disk_budget_bytes);
  uint64_t found = 0;
  for (uint64_t id = 1; id <= 100; ++id) found += Holds(session_, Prefix(ns_, id), id) ? 1 : 0;
  EXPECT_GE(found, 15u);
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 100), 100));
  EXPECT_EQ(Stats().disk_writes_failed, 0u);
}

TEST_F(StoreDisk, OneReadServesAllWhoWait) {
  Begin(3);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  const uint64_t reads = Stats().disk_reads;
  int answers = 0;
  for (int i = 0; i < 50; ++i) {
    store_->Get(session_, BlockKey{Prefix(ns_, 1), static_cast<uint16_t>(i % 2)},
                [&answers, i](const absl::StatusOr<BlockView>& view) {
                  ++answers;
                  ASSERT_TRUE(view.ok()) << view.status();
                  ExpectBytes(*view, 1, i % 2);
                });
  }
  EXPECT_EQ(answers, 0);
  Settle();
  EXPECT_EQ(answers, 50);
  EXPECT_EQ(Stats().disk_reads, reads + 1);
}

TEST_F(StoreDisk, HintsBringChunksIntoMemoryWithoutDrivingOthersOut) {
  Begin(8);
  for (uint64_t id = 1; id <= 20; ++id) PublishedOne(session_, ns_, id);
  store_->Prefetch(session_, {Prefix(ns_, 1), Prefix(ns_, 2), Prefix(ns_, 99)});
  Settle();
  EXPECT_EQ(Stats().prefetches, 2u);
  const uint64_t reads = Stats().disk_reads;
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1)) << "at once";
  EXPECT_TRUE(Has(session_, Prefix(ns_, 2), 2)) << "at once";
  EXPECT_EQ(Stats().disk_reads, reads);
}

TEST_F(StoreDisk, ALostByteIsAMissAndCounted) {
  Begin(3);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  for (const std::string& name : disk_.Names()) {
    if (name.rfind("segment-", 0) != 0) continue;
    for (uint64_t at = 4096 + 2000; at < disk_.SizeOf(name); at += 65536) disk_.Flip(name, at * 8);
  }
  uint64_t lost = 0;
  for (uint64_t id = 1; id <= 10; ++id) lost += Holds(session_, Prefix(ns_, id), id) ? 0 : 1;
  EXPECT_GT(lost, 0u);
  EXPECT_EQ(Stats().corruptions, lost);
  for (uint64_t id = 1; id <= 10; ++id) {
    if (!Holds(session_, Prefix(ns_, id), id)) PublishedOne(session_, ns_, id);
    EXPECT_TRUE(Holds(session_, Prefix(ns_, id), id));
  }
}

// The room of an image is given back at once; that it was is known after a kill only if something was flushed since.
TEST_F(StoreDisk, WhatWasGivenUpBeforeAKillIsAMissAndNoCorruption) {
  Begin(12);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  Close();
  OpenAgain();
  Begin();
  const uint64_t before = disk_.AllocatedBytes();
  for (uint64_t id = 1; id <= 9; ++id) store_->Erase(session_, Prefix(ns_, id), [](const absl::Status&) {});
  while (disk_.AllocatedBytes() >= before) ASSERT_TRUE(scheduler_->RunOne());
  disk_.faults.crash_after = disk_.operations();
  Close();
  OpenAgain();
  Begin();
  EXPECT_GT(Stats().chunks_found, 1u) << "the kill came before any erasure was on disk";
  uint64_t held = 0;
  for (uint64_t id = 1; id <= 10; ++id) held += Holds(session_, Prefix(ns_, id), id) ? 1 : 0;
  EXPECT_LT(held, 10u);
  EXPECT_EQ(Stats().corruptions + Stats().disk_reads_failed, 0u);
  EXPECT_EQ(Stats().chunks_published, held);
}

// Free memory in pieces is of no use to a chunk that is larger than each of them: more is spilled.
TEST_F(StoreDisk, FreeMemoryInPiecesKeepsNobodyWaiting) {
  Begin(16);
  const NamespaceId small = Namespace(session_, SmallSpec(2, 4, 64, 4));
  std::vector<ChunkKey> live;
  while (Stats().memory_used_bytes < Stats().memory_budget_bytes / 10 * 9) live.push_back(LiveOne(session_, small, 1));
  ASSERT_EQ(Stats().disk_writes, 0u);
  std::vector<ChunkKey> every_third;
  for (size_t i = 0; i < live.size(); i += 3) every_third.push_back(live[i]);
  store_->Release(session_, every_third);
  Settle();
  for (uint64_t id = 1; id <= 12; ++id) LiveOne(session_, ns_, id);
}

TEST_F(StoreDisk, ADiskThatFailsIsNoDisk) {
  Begin(4);
  disk_.faults.out_of = 1;
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  EXPECT_GT(Stats().evictions, 0u) << "as without a disk";
  EXPECT_FALSE(Flush().ok());
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 10), 10));
  disk_.faults.out_of = 0;
  executor_.Advance(absl::Seconds(2));
  EXPECT_TRUE(Flush().ok());
}

TEST_F(StoreDisk, WriteThroughWritesAtOnce) {
  options_.write_policy = WritePolicy::kWriteThrough;
  Begin(100);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  EXPECT_EQ(Stats().disk_writes, 10u);
}

TEST_F(StoreDisk, OnSecondHitWritesWhatCameAgain) {
  options_.write_policy = WritePolicy::kOnSecondHit;
  Begin(4);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  EXPECT_EQ(Stats().disk_writes, 0u);
  EXPECT_FALSE(Holds(session_, Prefix(ns_, 1), 1));
  PublishedOne(session_, ns_, 1);  // for the second time
  for (uint64_t id = 11; id <= 20; ++id) PublishedOne(session_, ns_, id);
  EXPECT_EQ(Stats().disk_writes, 1u);
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 1), 1));
}

}  // namespace
}  // namespace kvferry
