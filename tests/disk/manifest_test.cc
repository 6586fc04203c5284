// What a manifest was told survives whatever comes after the answer.
#include "storage/disk/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "storage/base/log.h"
#include "tests/support/seeds.h"
#include "tests/support/sim_disk.h"

namespace kvferry {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ChunkKey KeyOf(uint64_t number) { return {{number % 3 + 1, 7}, {number, 5}, 0, 0}; }

ImageEntry ImageOf(uint64_t number, uint64_t seq) {
  ImageEntry image;
  image.key = KeyOf(number);
  image.seq = seq;
  return image;
}

class ManifestTest : public testing::Test {
 protected:
  absl::Status Open(uint64_t seed = 1) {
    scheduler_ = std::make_unique<SimScheduler>(seed);
    folder_ = disk_.Open(scheduler_.get());
    absl::StatusOr<std::unique_ptr<Manifest>> manifest = Manifest::Open(folder_.get(), {seed, 99});
    if (manifest.ok()) manifest_ = *std::move(manifest);
    return manifest.status();
  }
  void Close() {
    scheduler_->RunAll();
    manifest_ = nullptr;
    folder_ = nullptr;
  }
  absl::Status Append(std::vector<ManifestEntry> entries) {
    absl::Status result = absl::InternalError("not answered");
    manifest_->Append(std::move(entries), [&](absl::Status status) { result = std::move(status); });
    scheduler_->RunAll();
    return result;
  }
  bool Lives(DiskPlace place, uint64_t number, uint64_t seq) {
    ImageEntry image = ImageOf(number, seq);
    return manifest_->Resolve(place, &image);
  }

  SimDisk disk_{1};
  std::unique_ptr<SimScheduler> scheduler_;
  std::unique_ptr<Folder> folder_;
  std::unique_ptr<Manifest> manifest_;
};

TEST_F(ManifestTest, AFolderKeepsItsStoreAndWhatWasSaid) {
  ASSERT_EQ(Open(5), absl::OkStatus());
  EXPECT_EQ(manifest_->store(), (DiskStoreId{5, 99}));
  EXPECT_EQ(Append({NamespaceEntry{{1, 7}, "tenant", "spec"}, ErasedEntry{KeyOf(1), 10}, DroppedEntry{{3, 7}, 20}}),
            absl::OkStatus());
  EXPECT_EQ(Append({PublishedEntry{{4, 6}, KeyOf(8), {1, 2}, 30, {70, 8}}, FreedEntry{{4, 9}}}), absl::OkStatus());
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(manifest_->store(), (DiskStoreId{5, 99}));
    ASSERT_NE(manifest_->Find({1, 7}), nullptr);
    EXPECT_EQ(manifest_->Find({1, 7})->tenant, "tenant");
    EXPECT_EQ(manifest_->Find({1, 7})->spec, "spec");
    EXPECT_EQ(manifest_->Find({2, 7}), nullptr);
    EXPECT_FALSE(Lives({1, 1}, 1, 9));
    EXPECT_TRUE(Lives({1, 1}, 1, 10)) << "written anew since";
    EXPECT_FALSE(Lives({1, 1}, 2, 19)) << "its namespace was dropped";
    EXPECT_TRUE(Lives({1, 1}, 2, 20));
    EXPECT_FALSE(Lives({4, 9}, 4, 5));
    ImageEntry image = ImageOf(3, 1);
    EXPECT_TRUE(manifest_->Resolve({4, 6}, &image));
    EXPECT_EQ(image.key, KeyOf(8));
    EXPECT_EQ(image.parent, (Id128{1, 2}));
    EXPECT_EQ(image.seq, 30u);
    EXPECT_EQ(image.lifetime, (Lifetime{70, 8}));
    Close();
    EXPECT_EQ(disk_.Names().size(), 1u);
    ASSERT_EQ(Open(6), absl::OkStatus());
  }
  manifest_->Forget(4);
  EXPECT_TRUE(Lives({4, 9}, 4, 5));
  EXPECT_EQ(manifest_->Compact(15, {1}), absl::OkStatus());
  EXPECT_TRUE(Lives({1, 1}, 1, 9)) << "no image is as old";
  EXPECT_FALSE(Lives({1, 1}, 2, 19));
  Close();
}

TEST_F(ManifestTest, AFileThatHasGrownIsWrittenAnew) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t seq = 1; seq < 1500; ++seq) {
    ASSERT_EQ(Append({ErasedEntry{KeyOf(1), seq}}), absl::OkStatus());
    ASSERT_LT(disk_.AllocatedBytes(), 4 * kMiB + 4 * kDiskAlignment);
  }
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_FALSE(Lives({1, 1}, 1, 1498));
  EXPECT_TRUE(Lives({1, 1}, 1, 1499));
  Close();
}

TEST_F(ManifestTest, AFolderWithSegmentsAndNoManifestIsRefused) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_TRUE(folder_->Create("segment-00000001", kDiskAlignment).ok());
  Close();
  disk_.Flip(disk_.Names()[0], 77);
  const absl::Status status = Open();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has segments, and nobody can say whose: manifest-00000001"));
}

TEST_F(ManifestTest, AFrameThatTheDiskHasLostCostsNoOther) {
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t number = 1; number <= 5; ++number)
    ASSERT_EQ(Append({ErasedEntry{KeyOf(number), 10}}), absl::OkStatus());
  Close();
  disk_.Flip(disk_.Names()[0], 8 * (3 * kDiskAlignment + 60));
  ASSERT_EQ(Open(), absl::OkStatus());
  for (uint64_t number = 1; number <= 5; ++number) EXPECT_EQ(Lives({1, 1}, number, 5), number == 3) << number;
  Close();
}

TEST_F(ManifestTest, AFileThatFailedIsReplaced) {
  ASSERT_EQ(Open(), absl::OkStatus());
  ASSERT_EQ(Append({ErasedEntry{KeyOf(1), 10}}), absl::OkStatus());
  disk_.faults.crash_after = disk_.operations();
  EXPECT_FALSE(Append({ErasedEntry{KeyOf(2), 10}}).ok());
  disk_.faults.crash_after = -1;
  EXPECT_EQ(Append({ErasedEntry{KeyOf(3), 10}}), absl::OkStatus());
  Close();
  ASSERT_EQ(Open(), absl::OkStatus());
  EXPECT_FALSE(Lives({1, 1}, 1, 5));
  EXPECT_FALSE(Lives({1, 1}, 3, 5));
  Close();
}

TEST_F(ManifestTest, AnswersHoldThroughCrashes) {
  const Seeds seeds(500);
  SetLogLevel(LogLevel::kNone);
  for (uint64_t seed = seeds.first; seed < seeds.end && !HasFailure(); ++seed) {
    SCOPED_TRACE(testing::Message() << "KVFERRY_TEST_SEED=" << seed);
    std::mt19937_64 random(seed);
    disk_ = SimDisk(seed);
    std::map<uint64_t, uint64_t> erased;  // by number of the key: the seq that was answered for
    uint64_t seq = 1;
    DiskStoreId store{};
    for (int life = 0; life < 5 && !HasFailure(); ++life) {
      ASSERT_EQ(Open(seed), absl::OkStatus());
      ASSERT_TRUE(life == 0 || manifest_->store() == store);
      store = manifest_->store();
      for (const auto& [number, before] : erased) ASSERT_FALSE(Lives({1, 1}, number, before - 1)) << number;
      disk_.faults.out_of = random() % 3 == 0 ? 10 : 0;
      disk_.faults.crash_after = random() % 2 == 0 ? disk_.operations() + static_cast<int>(random() % 60) : -1;
      for (int step = 0; step < 40; ++step) {
        if (random() % 2 == 0) {
          const uint64_t number = random() % 50, now = ++seq;
          manifest_->Append({ErasedEntry{KeyOf(number), now}}, [&erased, number, now](const absl::Status& status) {
            if (status.ok()) erased[number] = std::max(erased[number], now);
          });
        } else if (random() % 4 == 0) {
          manifest_->Note(FreedEntry{{static_cast<uint32_t>(random() % 9), static_cast<uint32_t>(random() % 9 + 100)}});
        } else {
          scheduler_->RunOne();
        }
      }
      disk_.faults.out_of = 0;
      const bool power = random() % 2 == 0;
      if (random() % 2 == 0) disk_.faults.crash_after = disk_.operations();
      Close();
      disk_.faults.crash_after = -1;
      if (power) disk_.Crash();
    }
  }
  SetLogLevel(LogLevel::kInfo);
}

}  // namespace
}  // namespace kvferry
