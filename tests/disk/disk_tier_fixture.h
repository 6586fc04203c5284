// A disk tier on a simulated disk, and images whose bytes follow from their numbers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "storage/base/checksum.h"
#include "storage/disk/disk_tier.h"
#include "tests/base/specs.h"
#include "tests/support/disk_folder.h"
#include "tests/support/sim_disk.h"

namespace kvferry {

inline constexpr char kTenant[] = "tenant";

class DiskTierTest : public testing::Test {
 protected:
  DiskTierTest() : spec_(SmallSpec(2, 2, 8, 4)), layout_(ChunkLayout::For(spec_, 0)) {
    ns_ = HashNamespace(kTenant, spec_);
  }

  void TearDown() override {
    if (tier_ != nullptr) Close();  // a test that failed
  }

  absl::Status Open(uint64_t seed = 1, absl::Time now = absl::UnixEpoch()) {
    scheduler_ = std::make_unique<SimScheduler>(seed);
    DiskTierOptions options;
    options.bytes = kMiB;
    options.keep_free_bytes = 0;
    options.moved = [this](const ImageEntry& image, uint64_t header_seq, DiskPlace from,
                           const absl::StatusOr<DiskPlace>& there) {
      const DiskPlace to = there.value_or(DiskPlace{});
      moved_({image, header_seq, from, to});
    };
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

  // What the tier has told of an image.
  struct Move {
    ImageEntry image;
    uint64_t header_seq;
    DiskPlace from, to;
    uint64_t number() const { return image.key.id[0] & ~kLiveBit; }
  };

  const NamespaceSpec spec_;
  const ChunkLayout layout_;
  NamespaceId ns_{};
  SimDisk disk_{1};
  std::unique_ptr<SimScheduler> scheduler_;
  std::unique_ptr<DiskTier> tier_;
  std::function<void(Move)> moved_ = [](const Move&) {};
  std::map<uint64_t, DiskTier::Found> found_;  // by the last Open
  uint64_t seq_ = 1;
};

}  // namespace kvferry
