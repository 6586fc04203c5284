#include "storage/arena.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "storage/base/bytes.h"

namespace kvferry {
namespace {

constexpr uint64_t kOverhead = 500;

TEST(Arena, ExtentsDoNotOverlapAndKeepTheirBytes) {
  Arena arena(4 * kMiB, 256 * kKiB);
  arena.SetActive("a", true);
  std::vector<Extent> extents;
  while (std::optional<Extent> extent = arena.Allocate("a", 40 * kKiB, kOverhead)) {
    std::memset(extent->data(), static_cast<int>(extents.size()), extent->bytes);
    extents.push_back(*extent);
  }
  EXPECT_GT(extents.size(), 90u);
  EXPECT_LE(extents.size(), 4 * kMiB / (40 * kKiB));
  for (size_t i = 0; i < extents.size(); ++i) {
    for (uint64_t at = 0; at < extents[i].bytes; ++at) ASSERT_EQ(extents[i].data()[at], static_cast<uint8_t>(i));
  }
  EXPECT_TRUE(arena.CheckInvariants().ok()) << arena.CheckInvariants();
}

TEST(Arena, NoSegmentIsOfTwoTenants) {
  Arena arena(4 * kMiB, kMiB);
  const std::optional<Extent> a = arena.Allocate("a", 4096, 0), b = arena.Allocate("b", 4096, 0);
  ASSERT_TRUE(a && b);
  EXPECT_NE(a->segment, b->segment);
  EXPECT_EQ(a->segment->tenant(), "a");
}

TEST(Arena, AFreeSegmentOfAnotherTenantMakesRoom) {
  Arena arena(kMiB, kMiB);
  arena.SetActive("a", true);
  arena.SetActive("b", true);
  std::vector<Extent> extents;
  while (std::optional<Extent> extent = arena.Allocate("a", 64 * kKiB, 0)) extents.push_back(*extent);
  EXPECT_FALSE(arena.Allocate("b", 64 * kKiB, 0));
  for (const Extent& extent : extents) arena.Free(extent);
  for (size_t i = 0; i < extents.size(); ++i) EXPECT_TRUE(arena.Allocate("b", 64 * kKiB, 0)) << i;
  EXPECT_TRUE(arena.CheckInvariants().ok()) << arena.CheckInvariants();
}

// B44: neighbours merge in whatever order they are freed.
TEST(Arena, B44_HolesMerge) {
  Arena arena(8 * kMiB, kMiB);
  arena.SetActive("a", true);
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<Extent> extents;
    while (std::optional<Extent> extent = arena.Allocate("a", 4096, kOverhead)) extents.push_back(*extent);
    std::shuffle(extents.begin(), extents.end(), random);
    for (const Extent& extent : extents) arena.Free(extent);
    const std::optional<Extent> large = arena.Allocate("a", 7 * kMiB, kOverhead);
    ASSERT_TRUE(large) << "after everything was freed";
    arena.Free(*large);
    ASSERT_TRUE(arena.CheckInvariants().ok()) << arena.CheckInvariants();
  }
}

TEST(Arena, BookkeepingIsChargedAndLimited) {
  Arena arena(kMiB, kMiB);
  EXPECT_TRUE(arena.TryCharge(kMiB));
  EXPECT_FALSE(arena.TryCharge(1));
  EXPECT_FALSE(arena.Allocate("a", 4096, 0));
  arena.Uncharge(kMiB);
  std::vector<Extent> extents;
  while (std::optional<Extent> extent = arena.Allocate("a", 4096, kOverhead)) extents.push_back(*extent);
  EXPECT_TRUE(arena.TryCharge(kMiB / 64)) << "a share is kept from chunks";
  EXPECT_LE(arena.usage().used(), kMiB);
}

// B36, scaled to seconds: operations of mixed sizes by three tenants; the books agree at every step that is checked.
TEST(Arena, B36_ManyOperations) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  constexpr uint64_t kBudget = 16 * kMiB;
  Arena arena(kBudget, kMiB);
  const std::string tenants[] = {"a", "b", "c"};
  const uint64_t sizes[] = {4096, 8192, 20480, 69632, 262144, 1048576};
  for (const std::string& tenant : tenants) arena.SetActive(tenant, true);
  std::vector<Extent> held;
  uint64_t bytes = 0, refused = 0;
  for (int op = 0; op < 500000; ++op) {
    if (random() % 2 == 0 || held.empty()) {
      const uint64_t size = sizes[random() % 6];
      const std::optional<Extent> extent = arena.Allocate(tenants[random() % 3], size, kOverhead);
      if (extent) {
        held.push_back(*extent);
        bytes += size;
      } else {
        ++refused;
      }
    }
    // Drifts between full and empty, so that both ends are met.
    if (!held.empty() && (random() % 2 == 0 || (op / 10000) % 2 == 1)) {
      std::swap(held[random() % held.size()], held.back());
      bytes -= held.back().bytes;
      arena.Free(held.back());
      held.pop_back();
    }
    if (op % 1000 == 0) {
      ASSERT_TRUE(arena.CheckInvariants().ok()) << "op " << op << ": " << arena.CheckInvariants();
      const Arena::Usage usage = arena.usage();
      ASSERT_EQ(usage.extents, bytes) << "op " << op;
      ASSERT_LE(usage.used() + usage.free, kBudget) << "op " << op;
    }
  }
  EXPECT_GT(refused, 0u);
  for (const Extent& extent : held) arena.Free(extent);
  for (const std::string& tenant : tenants) arena.SetActive(tenant, false);
  const Arena::Usage usage = arena.usage();
  EXPECT_EQ(usage.used(), 0u);
  EXPECT_EQ(usage.free, 0u);
  EXPECT_EQ(usage.segments, 0u);
}

TEST(Arena, WhatIsRetiredIsBuriedLater) {
  struct Count : FreedListener {
    void OnMemoryFreed() override { ++calls; }
    int calls = 0;
  };
  auto count = std::make_shared<Count>();
  Arena arena(4 * kMiB, kMiB);
  arena.SetListener(count);
  arena.Free(*arena.Allocate("a", 4096, 0));
  EXPECT_EQ(count->calls, 1);
  EXPECT_TRUE(arena.HasRetired());
  arena.Bury();
  EXPECT_FALSE(arena.HasRetired());
  arena.PutBack(*arena.Allocate("a", 4096, 0));
  EXPECT_EQ(count->calls, 1) << "tells nobody";
}

}  // namespace
}  // namespace kvferry
