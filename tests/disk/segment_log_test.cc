// A log of segments against a plain map, on a disk that fails, lies and loses its power at any moment.
#include "storage/disk/segment_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "storage/base/checksum.h"
#include "storage/base/log.h"
#include "storage/disk/posix_folder.h"
#include "tests/base/specs.h"
#include "tests/support/disk_folder.h"
#include "tests/support/seeds.h"
#include "tests/support/sim_disk.h"

namespace kvferry {
namespace {

using testing::HasSubstr;

// Images of two sizes, whose bytes follow from their number.
class Images {
 public:
  Images() : small_(ChunkLayout::For(SmallSpec(2, 2, 8, 4), 0)), large_(ChunkLayout::For(SmallSpec(3, 4, 32, 16), 0)) {}

  static ChunkKey KeyOf(uint64_t number) { return {{number % 2, 77}, {number, 5}, 0, 0}; }
  const ChunkLayout* LayoutOf(const ChunkKey& key) const {
    if (key.ns[1] != 77) return nullptr;
    return key.ns[0] == 0 ? &small_ : &large_;
  }

  AlignedBuffer Make(uint64_t number) const {
    const ChunkLayout& layout = *LayoutOf(KeyOf(number));
    AlignedBuffer image(layout.image_bytes);  // padding, which nothing vouches for, is zero
    ChunkHeader header;
    header.seq = number;
    header.key = KeyOf(number);
    header.parent = {number, 6};
    header.tokens = layout.tokens;
    header.image_bytes = layout.image_bytes;
    for (const ChunkLayout::Slot& slot : layout.slots) {
      const AlignedBuffer bytes = RandomBytes(slot.size, number * 100 + slot.offset);
      std::copy_n(bytes.view().begin(), slot.size, image.view().begin() + static_cast<int64_t>(slot.offset));
      header.checksums.push_back(BlockChecksum(image.view().subspan(slot.offset, slot.size)));
    }
    EncodeHeader(header, image.view());
    return image;
  }
  static ImageEntry EntryOf(uint64_t number) {
    ImageEntry entry;
    entry.key = KeyOf(number);
    entry.parent = {number, 6};
    entry.seq = number;
    return entry;
  }

 private:
  ChunkLayout small_, large_;
};

class SegmentLogTest : public testing::Test {
 protected:
  static SegmentLogOptions Options() {
    SegmentLogOptions options;
    options.store = {1, 2};
    options.bytes = 2 * kMiB;
    options.segment_bytes = 128 * kKiB;
    options.keep_free_bytes = 0;
    return options;
  }

  absl::Status Open(uint64_t seed = 1, const SegmentLogOptions& options = Options()) {
    scheduler_ = std::make_unique<SimScheduler>(seed);
    folder_ = disk_.Open(scheduler_.get());
    log_ = std::make_unique<SegmentLog>(options, folder_.get());
    found_.clear();
    return log_->Recover([this](const ChunkKey& key) { return images_.LayoutOf(key); },
                         [this](const ImageEntry& image, DiskPlace place) {
                           if (!keep_.empty() && !keep_.contains(image.seq)) return false;
                           EXPECT_EQ(image.key, Images::KeyOf(image.seq));
                           EXPECT_EQ(image.parent, (Id128{image.seq, 6}));
                           EXPECT_TRUE(found_.emplace(image.seq, place).second) << "twice: " << image.seq;
                           return true;
                         });
  }
  void Close() {
    bool closed = false;
    log_->Close([&closed] { closed = true; });
    scheduler_->RunAll();
    EXPECT_TRUE(closed);
    log_ = nullptr;
    folder_ = nullptr;
  }
  // The process dies and, if it is so, the power with it.
  void Kill(bool power) {
    disk_.faults.crash_after = disk_.operations();
    scheduler_->RunAll();
    log_ = nullptr;
    folder_ = nullptr;
    disk_.faults.crash_after = -1;
    if (power) disk_.Crash();
  }

  absl::StatusOr<DiskPlace> Append(uint64_t number) {
    const AlignedBuffer image = images_.Make(number);
    absl::StatusOr<DiskPlace> result;
    log_->Append({image.view()}, Images::EntryOf(number), [&](absl::StatusOr<DiskPlace> place) { result = place; });
    scheduler_->RunAll();
    return result;
  }
  absl::Status Sync() {
    absl::Status result = absl::InternalError("not answered");
    log_->Sync([&](absl::Status status) { result = std::move(status); });
    scheduler_->RunAll();
    return result;
  }
  // Whether the bytes at the place are the image's.
  bool Reads(uint64_t number, DiskPlace place) {
    const AlignedBuffer image = images_.Make(number);
    AlignedBuffer read(image.size());
    absl::Status result;
    log_->Read(place, 0, read.view(), [&](absl::Status status) { result = std::move(status); });
    scheduler_->RunAll();
    return result.ok() && read == image;
  }
  uint64_t Bytes(uint64_t number) const { return images_.LayoutOf(Images::KeyOf(number))->image_bytes; }

  Images images_;
  SimDisk disk_{1};
  std::unique_ptr<SimScheduler> scheduler_;
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<SegmentLog> log_;
  std::map<uint64_t, DiskPlace> found_;  // by the last Open
  std::set<uint64_t> keep_;              // what it keeps; empty: all
};

TEST_F(SegmentLogTest, WhatIsAppendedIsReadAndFoundAgain) {
  ASSERT_EQ(Open(), absl::OkStatus());
  std::map<uint64_t, DiskPlace> places;
  for (uint64_t number = 1; number <= 40; ++number) {
    const auto place = Append(number);
    ASSERT_TRUE(place.ok()) << place.status();
    places[number] = *place;
  }
  EXPECT_GT(log_->usage().segments, 2u);
  for (const auto& [number, place] : places) EXPECT_TRUE(Reads(number, place)) << number;
  EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_EQ(found_.size(), 40u);
  for (const auto& [number, place] : found_) {
    EXPECT_EQ(place, places[number]);
    EXPECT_TRUE(Reads(number, place)) << number;
  }
  EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
  Close();
}

TEST_F(SegmentLogTest, AKilledProcessLosesNothing) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t number = 1; number <= 20; ++number) ASSERT_TRUE(Append(number).ok());
  Kill(/*power=*/false);
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_EQ(found_.size(), 20u);
  for (const auto& [number, place] : found_) EXPECT_TRUE(Reads(number, place)) << number;
  EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
  Close();
}

TEST_F(SegmentLogTest, RoomComesBack) {
  ASSERT_EQ(Open(), absl::OkStatus());
  std::map<uint64_t, DiskPlace> places;
  for (uint64_t number = 1; number <= 60; ++number) places[number] = *Append(number);
  const uint64_t before = log_->usage().bytes;
  for (const auto& [number, place] : places) {
    if (number % 3 != 0) log_->Free(place, Bytes(number));
  }
  scheduler_->RunAll();
  EXPECT_LT(log_->usage().bytes, before * 2 / 3);
  EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
  for (const auto& [number, place] : places) EXPECT_EQ(Reads(number, place), number % 3 == 0) << number;
  for (const auto& [number, place] : places) {
    if (number % 3 == 0) log_->Free(place, Bytes(number));
  }
  scheduler_->RunAll();
  EXPECT_EQ(log_->usage().live_bytes, 0u);
  EXPECT_EQ(log_->usage().segments, 1u) << "the one that is appended to";
  Close();
  EXPECT_EQ(disk_.AllocatedBytes(), 0u);
}

TEST_F(SegmentLogTest, BoundsAreHard) {
  ASSERT_EQ(Open(), absl::OkStatus());
  uint64_t number = 1;
  std::map<uint64_t, DiskPlace> places;
  for (;; ++number) {
    const bool room = log_->HasRoom(Bytes(number));
    const auto place = Append(number);
    EXPECT_EQ(place.ok(), room);
    EXPECT_LE(log_->usage().bytes, Options().bytes);
    EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
    if (!place.ok()) {
      EXPECT_EQ(place.status().code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(place.status().message()), HasSubstr("bound 2097152"));
      break;
    }
    places[number] = *place;
  }
  EXPECT_GT(log_->usage().live_bytes, Options().bytes * 3 / 4);
  for (const auto& [freed, place] : places) log_->Free(place, Bytes(freed));
  scheduler_->RunAll();
  EXPECT_TRUE(Append(number).ok());
  Close();
}

TEST_F(SegmentLogTest, AFullVolumeIsLeftItsShare) {
  SegmentLogOptions options = Options();
  options.keep_free_bytes = kMiB;
  disk_.faults.free_bytes = kMiB + 100 * kKiB;
  ASSERT_EQ(Open(1, options), absl::OkStatus());
  const auto place = Append(1);
  EXPECT_EQ(place.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(place.status().message()), HasSubstr("the volume has 1150976 bytes left, expected at least"));
  disk_.faults.free_bytes = 2 * kMiB;
  EXPECT_TRUE(Append(1).ok());
  Close();
}

TEST_F(SegmentLogTest, AnImageLargerThanASegment) {
  SegmentLogOptions options = Options();
  options.segment_bytes = 2 * kDiskAlignment;
  ASSERT_EQ(Open(1, options), absl::OkStatus());
  for (uint64_t number = 1; number < 8; ++number) {
    const auto place = Append(number);
    ASSERT_TRUE(place.ok()) << place.status();
    EXPECT_TRUE(Reads(number, *place));
  }
  Close();
  ASSERT_EQ(Open(1, options), absl::OkStatus());
  EXPECT_EQ(found_.size(), 7u);
  Close();
}

TEST_F(SegmentLogTest, WhatIsNotKeptGivesItsRoomBack) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t number = 1; number <= 30; ++number) ASSERT_TRUE(Append(number).ok());
  for (const bool footers : {true, false}) {
    footers ? Close() : Kill(false);
    keep_ = {3, 4, 20};
    ASSERT_EQ(Open(), absl::OkStatus());
    EXPECT_EQ(found_.size(), 3u);
    for (const auto& [number, place] : found_) EXPECT_TRUE(Reads(number, place));
    EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
    EXPECT_EQ(log_->usage().live_bytes, Bytes(3) + Bytes(4) + Bytes(20));
    EXPECT_LT(log_->usage().bytes, log_->usage().live_bytes + 6 * kDiskAlignment + 3 * FooterBytes(40));
  }
  Close();
}

TEST_F(SegmentLogTest, SegmentsOfAnotherStoreAreRefused) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_TRUE(Append(1).ok());
  Close();
  SegmentLogOptions other = Options();
  other.store = {3, 4};
  const absl::Status status = Open(1, other);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("segment-00000001: the segment belongs to another store"));
  EXPECT_EQ(disk_.Names().size(), 1u) << "and stay as they are";
}

TEST_F(SegmentLogTest, ASyncThatFailedIsNotForgotten) {
  ASSERT_EQ(Open(), absl::OkStatus());
  const auto first = Append(1), second = Append(3);
  disk_.faults.syncs_to_fail = 1;
  EXPECT_FALSE(Sync().ok());
  EXPECT_FALSE(Sync().ok()) << "the kernel drops what it could not write: a second sync would know nothing of it";
  const auto third = Append(5);
  EXPECT_NE(third->segment, second->segment);
  log_->Free(*first, Bytes(1));
  EXPECT_FALSE(Sync().ok());
  log_->Free(*second, Bytes(3));
  EXPECT_EQ(Sync(), absl::OkStatus());
  EXPECT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
  Close();
}

TEST_F(SegmentLogTest, OfTwoSyncsAtATimeNoneHidesThatTheOtherFailed) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_TRUE(Append(1).ok());
  disk_.faults.syncs_to_fail = 1;
  int failed = 0;
  for (int i = 0; i < 3; ++i) log_->Sync([&failed](const absl::Status& status) { failed += status.ok() ? 0 : 1; });
  scheduler_->RunAll();
  EXPECT_EQ(failed, 3);
  Close();
}

TEST_F(SegmentLogTest, RefusalsComeFromElsewhere) {
  SegmentLogOptions options = Options();
  options.bytes = 0;
  ASSERT_EQ(Open(1, options), absl::OkStatus());
  const AlignedBuffer image = images_.Make(1);
  bool answered = false;
  log_->Append({image.view()}, Images::EntryOf(1), [&](const absl::StatusOr<DiskPlace>&) { answered = true; });
  EXPECT_FALSE(answered) << "not inside the call";
  scheduler_->RunAll();
  EXPECT_TRUE(answered);
  Close();
}

// What a run of random operations keeps count of.
struct Model {
  std::map<uint64_t, DiskPlace> live;  // answered
  std::set<uint64_t> durable;          // of them, those that a sync was answered for
  std::set<uint64_t> freed;            // ever: they may come back, with their bytes or with zeros in their place
  uint64_t next = 1;
};

TEST_F(SegmentLogTest, AgreesWithAMapThroughCrashes) {
  const Seeds seeds(300);
  SetLogLevel(LogLevel::kNone);
  for (uint64_t seed = seeds.first; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "KVFERRY_TEST_SEED=" << seed);
    std::mt19937_64 random(seed);
    disk_ = SimDisk(seed);
    Model model;
    for (int life = 0; life < 4 && !HasFailure(); ++life) {
      ASSERT_EQ(Open(random()), absl::OkStatus());
      for (const uint64_t number : model.durable) ASSERT_TRUE(found_.contains(number)) << "lost: " << number;
      for (const auto& [number, place] : found_) {
        ASSERT_LT(number, model.next);
        ASSERT_TRUE(model.freed.contains(number) || Reads(number, place)) << "wrong bytes: " << number;
      }
      std::erase_if(found_, [&](const auto& entry) {
        if (!model.freed.contains(entry.first)) return false;
        log_->Free(entry.second, Bytes(entry.first));
        return true;
      });
      scheduler_->RunAll();
      ASSERT_EQ(log_->usage().bytes, disk_.AllocatedBytes());
      model.live = found_;
      model.durable.clear();
      for (const auto& [number, place] : found_) model.durable.insert(number);
      const bool faulty = random() % 3 == 0;
      disk_.faults.out_of = faulty ? 40 : 0;
      disk_.faults.crash_after = random() % 2 == 0 ? disk_.operations() + static_cast<int>(random() % 300) : -1;
      std::vector<AlignedBuffer> kept;  // lent to appends
      for (int step = 0; step < 80; ++step) {
        switch (random() % 6) {
          case 0:
          case 1: {
            const uint64_t number = model.next++;
            kept.push_back(images_.Make(number));
            log_->Append({kept.back().view()}, Images::EntryOf(number), [&model, number](absl::StatusOr<DiskPlace> at) {
              if (at.ok()) model.live[number] = *at;
            });
            break;
          }
          case 2: {
            if (model.live.empty()) break;
            auto it = std::next(model.live.begin(), static_cast<int64_t>(random() % model.live.size()));
            log_->Free(it->second, Bytes(it->first));
            model.freed.insert(it->first);
            model.durable.erase(it->first);
            model.live.erase(it);
            break;
          }
          case 3: {
            std::set<uint64_t> before;
            for (const auto& [number, place] : model.live) before.insert(number);
            log_->Sync([&model, before = std::move(before)](const absl::Status& status) {
              if (!status.ok()) return;
              for (const uint64_t number : before) {
                if (model.live.contains(number)) model.durable.insert(number);
              }
            });
            break;
          }
          case 4: {
            if (model.live.empty() || faulty || disk_.faults.crash_after >= 0) break;
            auto it = std::next(model.live.begin(), static_cast<int64_t>(random() % model.live.size()));
            ASSERT_TRUE(Reads(it->first, it->second)) << it->first;
            break;
          }
          default:
            for (uint64_t i = random() % 20; i > 0 && scheduler_->RunOne(); --i) {
            }
        }
        ASSERT_LE(log_->usage().bytes, Options().bytes);
      }
      disk_.faults.out_of = 0;
      switch (random() % 3) {
        case 0:
          disk_.faults.crash_after = -1;
          Close();
          if (!faulty) {
            for (const auto& [number, place] : model.live) model.durable.insert(number);
          }
          break;
        case 1:
          Kill(/*power=*/false);
          break;
        default:
          Kill(/*power=*/true);
      }
    }
  }
  SetLogLevel(LogLevel::kInfo);
}

}  // namespace
}  // namespace kvferry
