#include "storage/index.h"

#include <gtest/gtest.h>

#include <list>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/base/specs.h"

namespace kvferry {
namespace {

class IndexTest : public testing::Test {
 protected:
  static Index::Options OptionsOf(PolicyKind policy) {
    return {policy, /*has_disk=*/false, [](const Record&) {}};
  }
  Record* Sealed(uint64_t counter) { return Sealed(&index_, counter); }
  Record* Sealed(Index* index, uint64_t counter) {
    const ChunkLayout& layout = ns_->layouts[0];
    const std::optional<Extent> extent = arena_->Allocate("tenant", layout.image_bytes, ChunkOverhead(layout));
    Record* record =
        index->AddLive(std::make_shared<Chunk>(arena_, *extent, ns_, ChunkKey{ns_->id, {kLiveBit, counter}, 0, 0}));
    index->Seal(record);
    return record;
  }
  Record* Ordinary(uint64_t id, uint64_t parent = 0) {
    Record* record = Sealed(id);
    EXPECT_TRUE(index_.Publish(record, {0, id}, {0, parent}).ok());
    index_.DropLive(record);
    return record;
  }
  uint64_t VictimId() { return index_.Ranked() == nullptr ? 0 : index_.Ranked()->id[1]; }

  std::shared_ptr<Arena> arena_ = std::make_shared<Arena>(64 * kMiB, kMiB);
  std::shared_ptr<const Namespace> ns_ = std::make_shared<Namespace>("tenant", SmallSpec());
  Index index_{OptionsOf(PolicyKind::kLru)};
};

TEST_F(IndexTest, OnlyWhatMayGoIsQueued) {
  Record* const record = Sealed(1);
  EXPECT_EQ(VictimId(), 0u);
  ASSERT_TRUE(index_.Publish(record, {0, 1}, {}).ok());
  EXPECT_EQ(VictimId(), 0u) << "its session holds it";
  index_.DropLive(record);
  EXPECT_EQ(VictimId(), 1u);
  index_.Lease(record, 2);
  EXPECT_EQ(VictimId(), 0u) << "leased";
  index_.Unlease(record, 1);
  EXPECT_EQ(VictimId(), 0u);
  index_.Unlease(record, 1);
  EXPECT_EQ(VictimId(), 1u);
  Record* const child = Ordinary(2, 1);
  EXPECT_EQ(VictimId(), 2u) << "the parent waits for its child";
  index_.Unpublish(child);
  EXPECT_EQ(VictimId(), 1u);
  index_.Unpublish(record);
  EXPECT_EQ(VictimId(), 0u);
  EXPECT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
}

TEST_F(IndexTest, PinnedChunksStayAndLowPrioritiesGoFirst) {
  Record *const first = Ordinary(1), *const low = Sealed(3);
  Ordinary(2);
  ASSERT_TRUE(index_.Publish(low, {0, 3}, {}, /*priority=*/0).ok());
  index_.DropLive(low);
  index_.Touch(low);
  EXPECT_EQ(VictimId(), 3u);
  index_.SetPinned(low, true);
  index_.SetPinned(first, true);
  EXPECT_EQ(VictimId(), 2u);
  EXPECT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
  index_.SetPinned(first, false);
  EXPECT_EQ(VictimId(), 1u) << "it is the older one still";
  index_.Unpublish(low);  // by its name alone
  EXPECT_EQ(index_.counts().published, 2u);
}

TEST_F(IndexTest, ADeferredVictimComesAgainBehindTheOthers) {
  for (const PolicyKind kind : kPolicies) {
    Index index(OptionsOf(kind));
    std::vector<Record*> records;
    for (uint64_t id = 1; id <= 5; ++id) {
      records.push_back(Sealed(&index, id));
      ASSERT_TRUE(index.Publish(records.back(), {0, id}, {}).ok());
      index.DropLive(records.back());
    }
    std::set<uint64_t> seen;
    for (size_t step = 0; step < 3 * records.size(); ++step) {
      seen.insert(index.Ranked()->id[1]);
      index.Defer(index.Ranked());
    }
    EXPECT_EQ(seen.size(), records.size()) << PolicyName(kind);
    EXPECT_TRUE(index.CheckInvariants().ok()) << index.CheckInvariants();
    for (Record* record : records) index.Unpublish(record);
  }
}

TEST_F(IndexTest, AChildMayComeBeforeItsParent) {
  Record* const child = Ordinary(2, 1);
  Ordinary(1);
  EXPECT_EQ(VictimId(), 2u);
  index_.Unpublish(child);
  EXPECT_EQ(VictimId(), 1u);
}

// B35: agrees with a reference simulation, and remembers nothing of what is gone.
TEST_F(IndexTest, B35_LruAgreesWithASimulation) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  constexpr size_t kCapacity = 4;
  std::map<uint64_t, Record*> here;
  std::list<uint64_t> order;  // least recent first
  for (uint64_t id = 1; id <= 10000; ++id) {
    if (here.size() == kCapacity) {
      ASSERT_EQ(VictimId(), order.front());
      index_.Unpublish(index_.Ranked());
      here.erase(order.front());
      order.pop_front();
    }
    here[id] = Ordinary(id);
    order.push_back(id);
    for (int reads = random() % 3; reads > 0; --reads) {
      const auto it = std::next(here.begin(), random() % here.size());
      index_.Touch(it->second);
      order.remove(it->first);
      order.push_back(it->first);
    }
    ASSERT_LE(index_.queued(), kCapacity);
  }
  EXPECT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
  EXPECT_EQ(arena_->usage().extents, kCapacity * ns_->layouts[0].image_bytes);
}

TEST_F(IndexTest, RandomTreesKeepTheBooks) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<Record*> records;  // published
  uint64_t next = 1, refused = 0;
  for (int op = 0; op < 20000; ++op) {
    switch (random() % 5) {
      case 0:
      case 1:
        records.push_back(Sealed(next));
        // A parent that is here, gone, still to come, or none; itself or a ring is refused.
        if (!index_.Publish(records.back(), {0, next}, {0, random() % (next + 2)}).ok()) {
          ++refused;
          EXPECT_TRUE(index_.Publish(records.back(), {0, next}, {}).ok());
        }
        index_.DropLive(records.back());
        ++next;
        break;
      case 2:
        if (Record* victim = index_.Ranked()) {
          records.erase(std::find(records.begin(), records.end(), victim));
          index_.Unpublish(victim, /*evicted=*/true);
        }
        break;
      case 3:
        if (!records.empty()) index_.Lease(records[random() % records.size()], 1);
        break;
      case 4:
        if (!records.empty()) {
          Record* record = records[random() % records.size()];
          if (record->leases != 0) index_.Unlease(record, 1);
          index_.Touch(record);
        }
        break;
    }
    if (op % 500 != 0) continue;
    ASSERT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
  }
  EXPECT_GT(refused, 0u);
  EXPECT_TRUE(index_.CheckInvariants().ok()) << index_.CheckInvariants();
  while (Record* victim = index_.Ranked()) index_.Unpublish(victim);
  for (Record* record : records) {
    if (record->leases != 0) index_.Unlease(record, record->leases);
  }
  while (Record* victim = index_.Ranked()) index_.Unpublish(victim);
  EXPECT_EQ(index_.counts().published, 0u) << "every tree can be evicted to its root";
}

}  // namespace
}  // namespace kvferry
