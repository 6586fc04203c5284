// The disk tier against a plain map: what was flushed is found again, what was erased is not, whatever happens between.
#include "storage/disk/disk_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "storage/base/checksum.h"
#include "storage/base/log.h"
#include "tests/base/specs.h"
#include "tests/support/disk_folder.h"
#include "tests/support/seeds.h"
#include "tests/support/sim_disk.h"

namespace kvferry {
namespace {

using testing::HasSubstr;

constexpr char kTenant[] = "tenant";

class DiskTierTest : public testing::Test {
 protected:
  DiskTierTest() : spec_(SmallSpec(2, 2, 8, 4)), layout_(ChunkLayout::For(spec_, 0)) {
    ns_ = HashNamespace(kTenant, spec_);
  }

  absl::Status Open(uint64_t seed = 1, absl::Time now = absl::UnixEpoch()) {
    scheduler_ = std::make_unique<SimScheduler>(seed);
    DiskTierOptions options;
    options.bytes = kMiB;
    options.keep_free_bytes = 0;
    found_.clear();
    auto opened = DiskTier::Open(options, disk_.Open(scheduler_.get()), now, [this](const DiskTier::Found& found) {
      EXPECT_EQ(found.ns->tenant, kTenant);
      EXPECT_TRUE(found_.emplace(found.image.key.id[0], found).second);
    });
    if (!opened.ok()) return opened.status();
    tier_ = std::move(opened->tier);
    seq_ = opened->next_seq;
    tier_->AddNamespace(ns_, kTenant, spec_);
    return absl::OkStatus();
  }
  // As a process that ends, or one that is killed: what is under way fails.
  void Close(bool killed = false, bool power = false) {
    if (killed) disk_.faults.crash_after = disk_.operations();
    tier_->Close([] {});
    scheduler_->RunAll();
    tier_ = nullptr;
    disk_.faults.crash_after = -1;
    if (power) disk_.Crash();
  }

  ChunkKey KeyOf(uint64_t number) const { return {ns_, {number, 5}, 0, 0}; }
  ImageEntry EntryOf(uint64_t number, uint64_t seq) const {
    ImageEntry entry;
    entry.key = KeyOf(number);
    entry.parent = {number / 2, 5};
    entry.seq = seq;
    return entry;
  }
  AlignedBuffer ImageOf(const ImageEntry& entry) const {
    AlignedBuffer image(layout_.image_bytes);
    ChunkHeader header;
    header.seq = entry.seq;
    header.key = entry.key;
    header.parent = entry.parent;
    header.tokens = layout_.tokens;
    header.image_bytes = layout_.image_bytes;
    for (const ChunkLayout::Slot& slot : layout_.slots) {
      const AlignedBuffer bytes = RandomBytes(slot.size, entry.key.id[0] * 10 + slot.offset);
      std::copy_n(bytes.view().begin(), slot.size, image.view().begin() + static_cast<int64_t>(slot.offset));
      header.checksums.push_back(BlockChecksum(image.view().subspan(slot.offset, slot.size)));
    }
    EncodeHeader(header, image.view());
    return image;
  }

  absl::StatusOr<DiskPlace> Write(const ImageEntry& entry) {
    const AlignedBuffer image = ImageOf(entry);
    absl::StatusOr<DiskPlace> result;
    tier_->Write({image.view()}, entry, [&](absl::StatusOr<DiskPlace> place) { result = std::move(place); });
    scheduler_->RunAll();
    return result;
  }
  absl::Status Flush() {
    return Now([this](IoDone done) { tier_->Flush(std::move(done)); });
  }
  template <typename Start>
  absl::Status Now(Start start) {
    absl::Status result = absl::InternalError("not answered");
    start([&](absl::Status status) { result = std::move(status); });
    scheduler_->RunAll();
    return result;
  }
  bool Reads(uint64_t number, DiskPlace place) {
    AlignedBuffer read(layout_.image_bytes);
    const absl::Status status = Now([&](IoDone done) { tier_->Read(place, 0, read.view(), std::move(done)); });
    const auto header = DecodeHeader(read.view());
    const AlignedBuffer expected = ImageOf(EntryOf(number, 0));
    return status.ok() && header.ok() &&
           read.view().subspan(layout_.header_bytes) == expected.view().subspan(layout_.header_bytes);
  }

  const NamespaceSpec spec_;
  const ChunkLayout layout_;
  NamespaceId ns_{};
  SimDisk disk_{1};
  std::unique_ptr<SimScheduler> scheduler_;
  std::unique_ptr<DiskTier> tier_;
  std::map<uint64_t, DiskTier::Found> found_;  // by the last Open
  uint64_t seq_ = 1;
};

TEST_F(DiskTierTest, ARestartFindsWhatWasWritten) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t number = 1; number <= 30; ++number) ASSERT_TRUE(Write(EntryOf(number, seq_++)).ok());
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_EQ(found_.size(), 30u);
  EXPECT_GE(seq_, 31u);
  for (const auto& [number, found] : found_) {
    EXPECT_TRUE(Reads(number, found.place));
    EXPECT_EQ(found.image.parent, (Id128{number / 2, 5}));
  }
  Close();
}

TEST_F(DiskTierTest, WhatIsErasedStaysErased) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t number = 1; number <= 9; ++number) ASSERT_TRUE(Write(EntryOf(number, seq_++)).ok());
  ASSERT_EQ(Flush(), absl::OkStatus());
  ASSERT_EQ(Now([&](IoDone done) { tier_->Erase({KeyOf(3), KeyOf(4)}, seq_++, std::move(done)); }), absl::OkStatus());
  ASSERT_TRUE(Write(EntryOf(4, seq_++)).ok()) << "and given anew";
  ASSERT_EQ(Flush(), absl::OkStatus());
  for (int again = 0; again < 2; ++again) {
    Close(/*killed=*/true, /*power=*/true);
    ASSERT_EQ(Open(), absl::OkStatus());
    EXPECT_EQ(found_.size(), 8u);
    EXPECT_FALSE(found_.contains(3));
    ASSERT_TRUE(found_.contains(4));
    EXPECT_TRUE(Reads(4, found_[4].place));
  }
  ASSERT_EQ(Now([&](IoDone done) { tier_->Drop(ns_, seq_++, std::move(done)); }), absl::OkStatus());
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_TRUE(found_.empty());
  EXPECT_EQ(tier_->usage().bytes, 0u);
  Close();
}

TEST_F(DiskTierTest, ALiveChunkIsFoundOnlyOnceItIsPublished) {
  ASSERT_EQ(Open(), absl::OkStatus());
  std::map<uint64_t, DiskPlace> places;
  for (uint64_t number = 1; number <= 4; ++number) {
    ImageEntry live = EntryOf(number, seq_++);
    live.key.id[0] |= kLiveBit;
    places[number] = *Write(live);
  }
  ImageEntry published = EntryOf(2, seq_++);
  published.lifetime = {80, 1000};
  tier_->Publish(places[2], published);
  ASSERT_EQ(Flush(), absl::OkStatus());
  tier_->Publish(places[3], EntryOf(3, seq_++));  // and not flushed
  Close(/*killed=*/true, /*power=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(found_.at(2).image.lifetime, (Lifetime{80, 1000}));
  EXPECT_EQ(found_.at(2).image.seq, published.seq);
  Close();
  ASSERT_EQ(Open(1, absl::FromUnixSeconds(1000)), absl::OkStatus());
  EXPECT_TRUE(found_.empty()) << "it has expired";
  Close();
}

TEST_F(DiskTierTest, OfTwoImagesTheYoungerCounts) {
  ASSERT_EQ(Open(), absl::OkStatus());
  const auto first = Write(EntryOf(1, seq_++)), second = Write(EntryOf(1, seq_++));
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close(/*killed=*/true);
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(found_.size(), 1u);
  EXPECT_EQ(found_[1].place, *second);
  scheduler_->RunAll();
  EXPECT_EQ(tier_->usage().live_bytes, layout_.image_bytes);
  Close();
}

// A footer names its images for ever; what was erased stays so even when nobody remembers the erasure.
TEST_F(DiskTierTest, WhatIsErasedStaysErasedInASealedSegment) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_TRUE(Write(EntryOf(1, seq_++)).ok());
  ASSERT_TRUE(Write(EntryOf(2, seq_++)).ok());
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Now([&](IoDone done) { tier_->Erase({KeyOf(1)}, seq_++, std::move(done)); }), absl::OkStatus());
  tier_->Free(found_[2].place, layout_.image_bytes);
  ASSERT_TRUE(Write(EntryOf(2, seq_++)).ok());  // younger than the erasure
  ASSERT_TRUE(Write(EntryOf(3, seq_++)).ok());
  ASSERT_EQ(Flush(), absl::OkStatus());
  for (int again = 0; again < 3; ++again) {
    Close(/*killed=*/true);
    ASSERT_EQ(Open(), absl::OkStatus());
    EXPECT_EQ(found_.size(), 2u);
    EXPECT_FALSE(found_.contains(1));
  }
  Close();
}

// A segment that has gone leaves its number to another, but not what was said of its images.
TEST_F(DiskTierTest, ASegmentsNumberMayComeAgain) {
  ASSERT_EQ(Open(), absl::OkStatus());
  const auto first = Write(EntryOf(1, seq_++));
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  tier_->Free(*first, layout_.image_bytes);
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  const auto second = Write(EntryOf(2, seq_++));
  EXPECT_EQ(*second, *first);
  ASSERT_EQ(Flush(), absl::OkStatus());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_TRUE(found_.contains(2) && Reads(2, found_[2].place));
  Close();
}

TEST_F(DiskTierTest, ANamespaceOfAnotherLayoutIsNotFound) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ImageEntry other = EntryOf(1, seq_++);
  other.key.shard = 1;  // of one
  ASSERT_TRUE(Write(other).ok());
  other = EntryOf(2, seq_++);
  other.key.ns = {7, 7};
  ASSERT_TRUE(Write(other).ok());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_TRUE(found_.empty());
  Close();
}

TEST_F(DiskTierTest, AgreesWithAMapThroughCrashes) {
  const Seeds seeds(200);
  SetLogLevel(LogLevel::kNone);
  for (uint64_t seed = seeds.first; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "KVFERRY_TEST_SEED=" << seed);
    std::mt19937_64 random(seed);
    disk_ = SimDisk(seed);
    std::map<uint64_t, DiskPlace> live;  // answered, and neither freed nor erased
    std::set<uint64_t> durable, erased;  // flushed; or erased for good, by the last answer
    for (int life = 0; life < 4 && !HasFailure(); ++life) {
      ASSERT_EQ(Open(random()), absl::OkStatus());
      for (const uint64_t number : durable) ASSERT_TRUE(found_.contains(number)) << "lost: " << number;
      for (const uint64_t number : erased) ASSERT_FALSE(found_.contains(number)) << "came back: " << number;
      live.clear();
      durable.clear();
      for (const auto& [number, found] : found_) {
        if (!Reads(number, found.place)) continue;  // freed once: zeros, which are a miss
        live[number] = found.place;
        durable.insert(number);
      }
      disk_.faults.out_of = random() % 3 == 0 ? 60 : 0;
      disk_.faults.crash_after = random() % 2 == 0 ? disk_.operations() + static_cast<int>(random() % 300) : -1;
      std::vector<AlignedBuffer> kept;
      std::set<uint64_t> writing;
      for (int step = 0; step < 60; ++step) {
        const uint64_t number = 1 + random() % 40;
        switch (random() % 6) {
          case 0:
          case 1: {
            if (live.contains(number) || writing.contains(number)) break;
            const ImageEntry entry = EntryOf(number, seq_++);
            kept.push_back(ImageOf(entry));
            writing.insert(number);
            erased.erase(number);  // it may be there from now on
            tier_->Write({kept.back().view()}, entry, [&, number](absl::StatusOr<DiskPlace> place) {
              writing.erase(number);
              if (place.ok()) live[number] = *place;
            });
            break;
          }
          case 2:
            if (!live.contains(number)) break;
            tier_->Free(live[number], layout_.image_bytes);
            live.erase(number);
            durable.erase(number);
            break;
          case 3: {
            if (!live.contains(number)) break;
            tier_->Free(live[number], layout_.image_bytes);
            live.erase(number);
            durable.erase(number);
            tier_->Erase({KeyOf(number)}, seq_++, [&, number](const absl::Status& status) {
              if (status.ok() && !live.contains(number) && !writing.contains(number)) erased.insert(number);
            });
            break;
          }
          case 4: {
            std::map<uint64_t, DiskPlace> before = live;
            tier_->Flush([&, before = std::move(before)](const absl::Status& status) {
              if (!status.ok()) return;
              for (const auto& [flushed, place] : before) {
                const auto it = live.find(flushed);
                if (it != live.end() && it->second == place) durable.insert(flushed);
              }
            });
            break;
          }
          default:
            for (uint64_t i = random() % 20; i > 0 && scheduler_->RunOne(); --i) {
            }
        }
      }
      disk_.faults.out_of = 0;
      const bool killed = random() % 2 == 0;
      Close(killed, random() % 2 == 0);
    }
  }
  SetLogLevel(LogLevel::kInfo);
}

}  // namespace
}  // namespace kvferry
