// The disk tier against a plain map: what was flushed is found again, what was erased is not, whatever happens between.
#include "storage/disk/disk_tier.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "absl/strings/str_format.h"
#include "storage/base/log.h"
#include "tests/disk/disk_tier_fixture.h"
#include "tests/support/seeds.h"

namespace kvferry {
namespace {

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
    EXPECT_EQ(found.header_seq, found.image.seq);
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
  std::map<uint64_t, uint64_t> written;  // the seq in its header
  for (uint64_t number = 1; number <= 4; ++number) {
    ImageEntry live = EntryOf(number, seq_++);
    live.key.id[0] |= kLiveBit;
    places[number] = *Write(live);
    written[number] = live.seq;
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
  EXPECT_EQ(found_.at(2).header_seq, written[2]);
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

TEST_F(DiskTierTest, OfTwoCopiesOneThatIsWholeCounts) {
  for (const size_t broken : {0, 1}) {
    disk_ = SimDisk(1);
    ASSERT_EQ(Open(), absl::OkStatus());
    const ImageEntry entry = EntryOf(1, seq_++);
    const DiskPlace places[] = {*Write(entry), *Write(entry)};  // as when one was moved, and the other not yet freed
    ASSERT_EQ(Flush(), absl::OkStatus());
    disk_.Flip(absl::StrFormat("segment-%08x", places[broken].segment), 8 * places[broken].offset() + 100);
    Close();
    ASSERT_EQ(Open(), absl::OkStatus());
    ASSERT_EQ(found_.size(), 1u);
    EXPECT_EQ(found_[1].place, places[1 - broken]);
    EXPECT_TRUE(Reads(1, found_[1].place));
    Close();
  }
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

TEST_F(DiskTierTest, WhatWasErasedBeforeItsNeighboursStaysErased) {
  for (const bool holes : {true, false}) {
    disk_ = SimDisk(1);
    disk_.faults.holes = holes;
    ASSERT_EQ(Open(), absl::OkStatus());
    ASSERT_TRUE(Write(EntryOf(1, seq_++)).ok());
    ASSERT_EQ(Now([&](IoDone done) { tier_->Erase({KeyOf(1)}, seq_++, std::move(done)); }), absl::OkStatus());
    ASSERT_TRUE(Write(EntryOf(2, seq_++)).ok());
    for (int again = 0; again < 3; ++again) {
      Close();
      ASSERT_EQ(Open(), absl::OkStatus());
      EXPECT_EQ(found_.size(), 1u);
      EXPECT_FALSE(found_.contains(1)) << "the segment lists it, and nothing younger is there to be compared with";
    }
    Close();
  }
}

TEST_F(DiskTierTest, ASegmentsNumberIsGivenAgain) {
  ASSERT_EQ(Open(), absl::OkStatus());
  std::set<uint32_t> numbers;
  for (int life = 0; life < 2; ++life) {
    std::vector<DiskPlace> places;
    for (uint64_t number = 1; number <= 3; ++number) places.push_back(*Write(EntryOf(number, seq_++)));
    ASSERT_EQ(Flush(), absl::OkStatus());
    Close(/*killed=*/true, /*power=*/true);
    ASSERT_EQ(Open(), absl::OkStatus());
    EXPECT_EQ(found_.size(), 3u) << "what was said of the first one is not of the second";
    for (const auto& [number, found] : found_) tier_->Free(found.place, layout_.image_bytes);
    ASSERT_EQ(Flush(), absl::OkStatus());
    Close();
    EXPECT_EQ(disk_.Names().size(), 1u) << "the manifest";
    ASSERT_EQ(Open(), absl::OkStatus());
    numbers.insert(places[0].segment);
  }
  EXPECT_EQ(numbers.size(), 1u);
  Close();
}

TEST_F(DiskTierTest, AgreesWithAMapThroughCrashes) {
  const Seeds seeds(200);
  SetLogLevel(LogLevel::kNone);
  int moves = 0;
  for (uint64_t seed = seeds.first; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "KVFERRY_TEST_SEED=" << seed);
    std::mt19937_64 random(seed);
    disk_ = SimDisk(seed);
    disk_.faults.holes = seed % 2 == 0;
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
      std::vector<Move> told;
      moved_ = [&told](const Move& move) { told.push_back(move); };
      const auto answer = [&](const Move& move) {
        ++moves;
        const auto it = live.find(move.number());
        const bool ours = it != live.end() && it->second == move.from;
        if (ours && move.to) {
          it->second = move.to;
        } else if (ours) {  // lost
          live.erase(it);
          durable.erase(move.number());
        }
        if (ours || move.to) tier_->Free(ours ? move.from : move.to, layout_.image_bytes);
      };
      for (int step = 0; step < 80; ++step) {
        const uint64_t number = 1 + random() % 40;
        switch (random() % 8) {
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
          case 5:
            for (const Move& move : std::exchange(told, {})) answer(move);
            disk_.faults.syncs_to_fail = random() % 8 == 0 ? 1 + static_cast<int>(random() % 3) : 0;
            break;
          default:
            for (uint64_t i = random() % 20; i > 0 && scheduler_->RunOne(); --i) {
            }
        }
      }
      moved_ = [&answer](const Move& move) { answer(move); };
      disk_.faults.out_of = 0;
      disk_.faults.syncs_to_fail = 0;
      const bool killed = random() % 2 == 0;
      Close(killed, random() % 2 == 0);
    }
  }
  SetLogLevel(LogLevel::kInfo);
  EXPECT_TRUE(moves > 0 || seeds.end - seeds.first < 10);
}

}  // namespace
}  // namespace kvferry
