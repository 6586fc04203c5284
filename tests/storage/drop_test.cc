// The end of namespaces: readers find nothing at once, sessions keep what they hold, and a purge leaves no byte.
#include <algorithm>

#include "storage/disk/aligned_buffer.h"
#include "tests/storage/disk_store_fixture.h"

namespace kvferry {
namespace {

class DropTest : public DiskStoreFixture {
 protected:
  void Begin(uint64_t chunks) {
    OpenTiers(BigSpec(), chunks);
    Enter();
  }
  void Enter() {
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
    other_ = Namespace(session_, SmallSpec(2, 4, 64, 16, "another/model"));
  }
  absl::StatusOr<DropReport> Drop(const NamespaceId& ns, bool purge) {
    return Await<absl::StatusOr<DropReport>>([&](auto done) { store_->Drop(ns, purge, std::move(done)); });
  }
  static uint64_t Image() { return ChunkLayout::For(BigSpec(), 0).image_bytes; }
  // Of chunk `seed`, layer 0: anywhere on disk.
  bool IsOnDisk(uint64_t seed) {
    std::vector<uint8_t> start(64);
    for (size_t at = 0; at < start.size(); ++at) start[at] = ByteAt(seed, 0, at);
    SimScheduler scheduler(1);
    const std::unique_ptr<Folder> folder = disk_.Open(&scheduler);
    for (const std::string& name : disk_.Names()) {
      AlignedBuffer bytes(disk_.SizeOf(name));
      EXPECT_TRUE((*folder->Open(name))->ReadNow(0, bytes.view()).ok());
      if (std::search(bytes.view().begin(), bytes.view().end(), start.begin(), start.end()) != bytes.view().end()) {
        return true;
      }
    }
    return false;
  }

  SessionId session_ = 0;
  NamespaceId ns_{}, other_{};
};

TEST_F(DropTest, ReadersFindNothingAtOnce) {
  Begin(4);
  for (uint64_t id = 1; id <= 200; ++id) PublishedOne(session_, ns_, id, id - 1);
  PublishedOne(session_, other_, 1);
  bool answered = false;
  store_->Drop(ns_, false, [&](absl::StatusOr<DropReport> report) {
    answered = true;
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->chunks, 200u);
    EXPECT_EQ(report->bytes, 200 * Image());
    EXPECT_EQ(report->bytes_kept, 0u);
  });
  EXPECT_FALSE(answered);
  for (uint64_t id = 1; id <= 200; ++id) EXPECT_EQ(Lookup(session_, {Prefix(ns_, id)}, true), 0);
  PublishedOne(session_, ns_, 7);  // the name is free, while others are still being taken away
  Settle();
  EXPECT_TRUE(answered);
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 7), 7));
  EXPECT_TRUE(Holds(session_, Prefix(other_, 1), 1));
  EXPECT_EQ(store_->Stats().chunks_published, 2u);
  ASSERT_TRUE(Flush().ok());
  Close(/*power=*/true);
  OpenAgain();
  Enter();
  for (uint64_t id = 1; id <= 200; ++id) EXPECT_EQ(Holds(session_, Prefix(ns_, id), id), id == 7) << id;
  EXPECT_TRUE(Holds(session_, Prefix(other_, 1), 1));
  EXPECT_EQ(Drop({5, 5}, false).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->CheckInvariants(), absl::OkStatus());
}

TEST_F(DropTest, IsDurableOnceItIsAnswered) {
  Begin(4);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  ASSERT_TRUE(Drop(ns_, false).ok());
  Close(/*power=*/true);
  OpenAgain();
  Enter();
  for (uint64_t id = 1; id <= 10; ++id) EXPECT_FALSE(Holds(session_, Prefix(ns_, id), id)) << id;
}

TEST_F(DropTest, WhatIsHeldStays) {
  Begin(8);
  PublishedOne(session_, ns_, 1);
  PublishedOne(session_, ns_, 2);
  ASSERT_EQ(Lookup(session_, {Prefix(ns_, 1)}, true), 1);
  const ChunkKey live = LiveOne(session_, ns_, 3);
  ASSERT_TRUE(Publish(session_, live, 3).ok());
  const absl::StatusOr<DropReport> report = Drop(ns_, true);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->chunks, 3u);
  EXPECT_EQ(report->bytes_kept, 2 * Image());
  EXPECT_EQ(report->memory_bytes_purged, Image());
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 1), 1)) << "by the lease";
  EXPECT_TRUE(Holds(session_, live, 3));
  const SessionId stranger = Session();
  EXPECT_FALSE(Holds(stranger, Prefix(ns_, 1), 1));
  EXPECT_FALSE(Holds(stranger, Prefix(ns_, 3), 3));
  ASSERT_TRUE(Publish(session_, live, 3).ok()) << "anew";
  EXPECT_TRUE(Holds(stranger, Prefix(ns_, 3), 3));
}

TEST_F(DropTest, APurgeLeavesNoByte) {
  Begin(4);
  for (uint64_t id = 1; id <= 10; ++id) PublishedOne(session_, ns_, id);
  ASSERT_TRUE(Flush().ok());
  ASSERT_TRUE(IsOnDisk(5));
  EXPECT_TRUE(Holds(session_, Prefix(ns_, 10), 10));  // is in memory too
  const absl::StatusOr<DropReport> report = Drop(ns_, true);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->disk_bytes_purged, 10 * Image());
  EXPECT_GE(report->memory_bytes_purged, Image());
  EXPECT_EQ(report->memory_bytes_purged % Image(), 0u);
  EXPECT_EQ(report->bytes_kept, 0u);
  for (uint64_t id = 1; id <= 10; ++id) EXPECT_FALSE(IsOnDisk(id)) << id;
}

TEST_F(DropTest, APurgeOverwritesMemory) {
  OpenFor(BigSpec(), 8, PolicyKind::kLru);
  Enter();
  Published(session_, ns_, 1);
  const uint8_t* const bytes = Get(session_, Prefix(ns_, 1))->pieces()[0].data();  // the view is gone
  ASSERT_EQ(bytes[5], ByteAt(1, 0, 5));
  const absl::StatusOr<BlockView> reader = Get(session_, Published(session_, ns_, 2));
  absl::StatusOr<DropReport> report;
  store_->Drop(ns_, true, [&](absl::StatusOr<DropReport> r) { report = std::move(r); });
  executor_.Run();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->memory_bytes_purged, Image());
  EXPECT_EQ(report->bytes_kept, Image()) << "it is being read";
  ExpectBytes(*reader, 2);
}

}  // namespace
}  // namespace kvferry
