// Images that are moved out of segments which are to go: none is lost by it, and nobody waits for ever.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_format.h"
#include "storage/base/log.h"
#include "storage/disk/posix_folder.h"
#include "storage/disk/relocator.h"
#include "tests/disk/disk_tier_fixture.h"
#include "tests/support/faulty_engine.h"
#include "tests/support/seeds.h"

namespace kvferry {
namespace {

// Its owner takes every move over at once, unless a test says otherwise.
class RelocationTest : public DiskTierTest {
 protected:
  RelocationTest() {
    SetLogLevel(LogLevel::kNone);
    moved_ = [this](const Move& move) { Answer(move); };
  }
  ~RelocationTest() override { SetLogLevel(LogLevel::kInfo); }

  void Answer(const Move& move) {
    moves_.push_back(move);
    const auto it = places_.find(move.number());
    const bool ours = it != places_.end() && it->second == move.from;
    if (ours && move.to) it->second = move.to;
    if (ours && !move.to) places_.erase(it);
    if (ours || move.to) tier_->Free(ours ? move.from : move.to, layout_.image_bytes);
  }
  void WriteSome(uint64_t first, uint64_t last) {
    for (uint64_t number = first; number <= last; ++number) {
      const auto place = Write(EntryOf(number, seq_++));
      ASSERT_TRUE(place.ok()) << place.status();
      places_[number] = *place;
    }
  }
  void FreeOne(uint64_t number) {
    tier_->Free(places_.at(number), layout_.image_bytes);
    places_.erase(number);
  }
  // Each image lies where it is thought to be, and nothing else takes room.
  void ExpectAllThere() {
    for (const auto& [number, place] : places_) EXPECT_TRUE(Reads(number, place)) << number;
    EXPECT_EQ(tier_->usage().live_bytes, places_.size() * layout_.image_bytes);
    EXPECT_EQ(tier_->usage().bytes, SegmentBytes());
  }
  uint64_t SegmentBytes() const {
    uint64_t manifests = 0;
    for (const std::string& name : disk_.Names()) manifests += name[0] == 'm' ? disk_.SizeOf(name) : 0;
    return disk_.AllocatedBytes() - manifests;
  }
  // Fails the sync of what was written last.
  void FailASync() {
    disk_.faults.syncs_to_fail = 1;
    EXPECT_FALSE(Flush().ok());
  }

  std::map<uint64_t, DiskPlace> places_;
  std::vector<Move> moves_;
};

TEST_F(RelocationTest, ASparseSegmentGoesWhereThereAreNoHoles) {
  disk_.faults.holes = false;
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 90);
  ASSERT_EQ(Flush(), absl::OkStatus());
  EXPECT_GE(tier_->usage().segments, 3u);
  for (uint64_t number = 1; number <= 90; ++number) {
    if (number % 9 != 0) FreeOne(number);
  }
  scheduler_->RunAll();
  EXPECT_GE(moves_.size(), 6u);
  EXPECT_LE(tier_->usage().segments, 2u);
  ExpectAllThere();
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_EQ(found_.size(), 10u) << "although nobody has flushed since";
  for (const auto& [number, found] : found_) EXPECT_TRUE(Reads(number, found.place));
  Close();
}

TEST_F(RelocationTest, WhereThereAreHolesASparseSegmentStays) {
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 90);
  for (uint64_t number = 1; number <= 90; ++number) {
    if (number % 9 != 0) FreeOne(number);
  }
  ASSERT_EQ(Flush(), absl::OkStatus());
  EXPECT_TRUE(moves_.empty());
  ExpectAllThere();
  Close();
}

TEST_F(RelocationTest, ASparseSegmentOfThePastGoesOnceTheOwnerIsThere) {
  disk_.faults.holes = false;
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 20);
  for (uint64_t number = 1; number < 20; ++number) FreeOne(number);
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  scheduler_->RunAll();
  EXPECT_TRUE(moves_.empty()) << "it may not know yet what there is";
  places_ = {{20, found_.at(20).place}};
  ASSERT_EQ(Flush(), absl::OkStatus());
  ASSERT_EQ(moves_.size(), 1u);
  EXPECT_EQ(places_.at(20), moves_.at(0).to);
  ExpectAllThere();
  Close();
}

TEST_F(RelocationTest, AfterASyncThatFailedFlushSucceedsAgain) {
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 10);
  ASSERT_EQ(Flush(), absl::OkStatus());
  WriteSome(11, 20);
  const uint32_t segment = places_[20].segment;
  FailASync();
  WriteSome(21, 22);
  EXPECT_NE(places_[21].segment, segment) << "nothing more is appended there";
  EXPECT_EQ(Flush(), absl::OkStatus());
  EXPECT_GE(moves_.size(), 10u);
  for (const auto& [number, place] : places_) EXPECT_NE(place.segment, segment) << number;
  ExpectAllThere();
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_EQ(found_.size(), 22u);
  for (const auto& [number, found] : found_) EXPECT_TRUE(Reads(number, found.place));
  Close();
}

TEST_F(RelocationTest, ASealThatCannotSyncIsASyncThatFailed) {
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 5);
  ASSERT_EQ(Flush(), absl::OkStatus());
  const uint32_t segment = places_[1].segment;
  disk_.faults.syncs_to_fail = 1;
  for (uint64_t number = 6; places_.rbegin()->second.segment == segment; ++number) WriteSome(number, number);
  EXPECT_GE(moves_.size(), 5u);
  ASSERT_EQ(Flush(), absl::OkStatus());
  const auto written = places_;
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  for (const auto& [number, place] : written) EXPECT_TRUE(found_.contains(number)) << number;
  Close();
}

TEST_F(RelocationTest, ADiskWhoseSyncsAllFailIsNotPlagued) {
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 10);
  disk_.faults.syncs_to_fail = 1000;
  for (int i = 0; i < 5; ++i) {
    const int before = disk_.operations();
    EXPECT_FALSE(Flush().ok());
    EXPECT_LT(disk_.operations() - before, 100) << "one attempt a call";
  }
  EXPECT_TRUE(moves_.empty());
  ExpectAllThere();
  disk_.faults.syncs_to_fail = 0;
  EXPECT_FALSE(Flush().ok()) << "which has them moved";
  EXPECT_EQ(Flush(), absl::OkStatus());
  ExpectAllThere();
  Close();
}

TEST_F(RelocationTest, WhatIsNotWholeIsLost) {
  ASSERT_EQ(Open(), absl::OkStatus());
  WriteSome(1, 6);
  const DiskPlace broken = places_[3];
  disk_.Flip(absl::StrFormat("segment-%08x", broken.segment), 8 * (broken.offset() + layout_.slots[1].offset) + 5);
  FailASync();
  EXPECT_EQ(Flush(), absl::OkStatus());
  ASSERT_EQ(moves_.size(), 6u);
  for (const Move& move : moves_) {
    EXPECT_EQ(!move.to, move.number() == 3);
    EXPECT_EQ(move.header_seq, move.number() == 3 ? 0 : move.image.seq);
    EXPECT_EQ(move.from.segment, broken.segment);
  }
  EXPECT_FALSE(places_.contains(3));
  ExpectAllThere();
  Close();
}

TEST_F(RelocationTest, WhatWasSaidOfAnImageHoldsForItsCopy) {
  ASSERT_EQ(Open(), absl::OkStatus());
  std::map<uint64_t, uint64_t> header_seq;
  for (uint64_t number = 1; number <= 4; ++number) {
    ImageEntry live = EntryOf(number, seq_++);
    live.key.id[0] |= kLiveBit;
    header_seq[number] = live.seq;
    places_[number] = *Write(live);
  }
  const auto publish = [this](uint64_t number) {
    ImageEntry published = EntryOf(number, seq_++);
    published.lifetime = {static_cast<uint8_t>(70 + number), 1000};
    tier_->Publish(places_[number], published);
  };
  publish(1);
  std::vector<Move> told;
  moved_ = [&told](const Move& move) { told.push_back(move); };
  FailASync();
  ASSERT_EQ(told.size(), 4u);
  EXPECT_FALSE(Flush().ok()) << "the owner has not answered";
  for (const Move& move : told) {
    EXPECT_EQ(move.image.key.IsLive(), move.number() != 1);
    EXPECT_EQ(move.header_seq, header_seq[move.number()]);
    EXPECT_TRUE(Reads(move.number(), move.from));
    EXPECT_TRUE(Reads(move.number(), move.to));
  }
  publish(2);
  for (const Move& move : told) Answer(move);
  publish(3);
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_EQ(found_.size(), 3u);
  for (const auto& [number, found] : found_) {
    EXPECT_EQ(found.image.lifetime, (Lifetime{static_cast<uint8_t>(70 + number), 1000}));
    EXPECT_EQ(found.image.parent, (Id128{number / 2, 5}));
    EXPECT_EQ(found.header_seq, header_seq[number]);
    EXPECT_TRUE(Reads(number, found.place));
  }
  Close();
}

TEST_F(RelocationTest, WhatWasFreedMeanwhileIsOfNoUse) {
  for (int steps = 0; steps < 60; ++steps) {
    disk_ = SimDisk(1);
    places_.clear();
    ASSERT_EQ(Open(static_cast<uint64_t>(steps)), absl::OkStatus());
    WriteSome(1, 6);
    disk_.faults.syncs_to_fail = 1;
    tier_->Flush([](const absl::Status&) {});
    for (int i = 0; i < steps; ++i) scheduler_->RunOne();
    for (const uint64_t number : {2, 5}) FreeOne(number);
    (void)Flush();  // may be the one that fails
    EXPECT_EQ(Flush(), absl::OkStatus());
    ExpectAllThere();
    Close();
  }
}

TEST_F(RelocationTest, WithoutRoomItWaits) {
  disk_.faults.holes = false;
  ASSERT_EQ(Open(), absl::OkStatus());
  uint64_t number = 1;
  for (; tier_->HasRoom(layout_.image_bytes); ++number) WriteSome(number, number);
  std::map<uint32_t, uint64_t> last;  // image of each segment
  for (const auto& [image, place] : places_) last[place.segment] = image;
  std::set<uint64_t> kept;
  for (const auto& [segment, image] : last) kept.insert(image);
  for (uint64_t image = 1; image < number; ++image) {
    if (!kept.contains(image)) FreeOne(image);
  }
  scheduler_->RunAll();  // which ends
  EXPECT_TRUE(moves_.empty());
  EXPECT_FALSE(tier_->HasRoom(layout_.image_bytes));
  FreeOne(*kept.begin());  // a segment goes
  scheduler_->RunAll();
  ASSERT_EQ(Flush(), absl::OkStatus());
  EXPECT_GE(moves_.size(), 5u);
  EXPECT_LE(tier_->usage().segments, 2u);
  ExpectAllThere();
  Close();
}

TEST_F(RelocationTest, ItEndsWithTheTier) {
  const Seeds seeds(150);
  for (uint64_t seed = seeds.first; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "KVFERRY_TEST_SEED=" << seed);
    disk_ = SimDisk(seed);
    disk_.faults.holes = seed % 2 == 0;
    places_.clear();
    ASSERT_EQ(Open(seed), absl::OkStatus());
    WriteSome(1, 40);
    ASSERT_EQ(Flush(), absl::OkStatus());
    for (uint64_t number = 1; number <= 33; ++number) FreeOne(number);
    tier_->Flush([](const absl::Status&) {});
    disk_.faults.syncs_to_fail = seed % 3 == 0 ? 1 : 0;
    for (uint64_t i = seed % 50; i > 0; --i) scheduler_->RunOne();
    disk_.faults.syncs_to_fail = 0;
    bool closed = false;
    moved_ = [&](const Move& move) {
      EXPECT_FALSE(closed);
      Answer(move);
    };
    tier_->Close([&closed] { closed = true; });
    scheduler_->RunAll();
    EXPECT_TRUE(closed);
    tier_ = nullptr;
    const auto kept = places_;
    ASSERT_EQ(Open(seed), absl::OkStatus());
    for (const auto& [number, place] : kept) {
      ASSERT_TRUE(found_.contains(number)) << number;
      EXPECT_TRUE(Reads(number, found_[number].place)) << number;
    }
    Close();
  }
}

// The same by threads, on a real folder whose syncs fail now and then.
class RelocationThreadsTest : public RelocationTest {};

TEST_F(RelocationThreadsTest, NothingIsLost) {
  TempFolder temp;
  std::atomic<bool> faulty{false};
  PosixCalls calls;
  calls.engine = std::make_unique<FaultyEngine>(NewThreadEngine(4), [&faulty](int number, const IoRequest& request) {
    return faulty && request.kind == IoRequest::kSync && number % 3 == 0 ? -EIO : 0;
  });
  PosixFolderOptions where;
  where.path = temp.path();
  DiskTierOptions options;
  options.bytes = 16 * kMiB;
  options.keep_free_bytes = 0;
  Mutex mu;
  std::map<uint64_t, DiskPlace> places;
  int moves = 0;
  options.moved = [&](const ImageEntry& image, uint64_t, DiskPlace from, const absl::StatusOr<DiskPlace>& there) {
    const DiskPlace to = there.value_or(DiskPlace{});
    bool ours = false;
    {
      MutexLock lock(&mu);
      ++moves;
      const auto it = places.find(image.key.id[0]);
      ours = it != places.end() && it->second == from;
      if (ours) it->second = to;
    }
    ASSERT_TRUE(to);
    tier_->Free(ours ? from : to, layout_.image_bytes);
  };
  auto opened = DiskTier::Open(options, *OpenPosixFolder(where, std::move(calls)), absl::UnixEpoch(),
                               [](const DiskTier::Found&) {});
  ASSERT_TRUE(opened.ok()) << opened.status();
  tier_ = std::move(opened->tier);
  tier_->AddNamespace(ns_, kTenant, spec_);
  faulty = true;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t i = 0; i < 100; ++i) {
        const uint64_t number = 1 + thread * 1000 + i;
        const ImageEntry entry = EntryOf(number, number);
        const AlignedBuffer image = ImageOf(entry);
        EXPECT_EQ(Await([&](IoDone done) {
                    tier_->Write({image.view()}, entry,
                                 [&, done = std::move(done)](absl::StatusOr<DiskPlace> place) mutable {
                                   if (place.ok()) {
                                     MutexLock lock(&mu);
                                     places[number] = *place;
                                   }
                                   std::move(done)(place.status());
                                 });
                  }),
                  absl::OkStatus());
        if (i % 2 == 0) {
          DiskPlace place;
          {
            MutexLock lock(&mu);
            place = places.at(number);
            places.erase(number);
          }
          tier_->Free(place, layout_.image_bytes);
        }
        if (i % 10 == 0) (void)Await([&](IoDone done) { tier_->Flush(std::move(done)); });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  faulty = false;
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!Await([&](IoDone done) { tier_->Flush(std::move(done)); }).ok()) ASSERT_LT(absl::Now(), deadline);
  EXPECT_GT(moves, 0);
  const auto kept = [&] {
    MutexLock lock(&mu);
    return places;
  }();
  EXPECT_EQ(kept.size(), 150u);
  for (const auto& [number, place] : kept) {
    AlignedBuffer read(layout_.image_bytes);
    EXPECT_EQ(Await([&, from = place](IoDone done) { tier_->Read(from, 0, read.view(), std::move(done)); }),
              absl::OkStatus());
    EXPECT_EQ(read, ImageOf(EntryOf(number, number)));
  }
  tier_ = nullptr;
}

}  // namespace
}  // namespace kvferry
