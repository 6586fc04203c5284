#include "client/cache/budget.h"

#include "gtest/gtest.h"

namespace kvferry {
namespace {

BudgetInput Uniform(int layers, uint64_t column_bytes, int64_t columns) {
  BudgetInput input;
  input.column_bytes.assign(static_cast<size_t>(layers), column_bytes);
  input.batch = 1;
  input.columns = columns;
  input.tail_columns = 64;
  return input;
}

TEST(BudgetTest, AllResidentNeedsNoRingAndNoTails) {
  // 4 layers and one buffer that is replaced by a larger one, of 1000 + 256 columns of 8 bytes.
  EXPECT_EQ(DeviceBytesNeeded(Uniform(4, 8, 1000), 4), 5u * 1256 * 8);
}

TEST(BudgetTest, CountsRingTailsAndFlight) {
  BudgetInput input = Uniform(4, 8, 1000);
  // One resident, its replacement, the ring; three tails and one that is replaced.
  EXPECT_EQ(DeviceBytesNeeded(input, 1), 3u * 1256 * 8 + 4u * 64 * 8);
  input.in_flight = 2;
  EXPECT_EQ(DeviceBytesNeeded(input, 1), 3u * 1256 * 8 + 4u * 64 * 8 + 2u * 1000 * 8);
  input.batch = 3;
  EXPECT_EQ(DeviceBytesNeeded(input, 1), 3 * (3u * 1256 * 8 + 4u * 64 * 8 + 2u * 1000 * 8));
}

TEST(BudgetTest, WidestLayerDecidesTheRing) {
  BudgetInput input = Uniform(2, 8, 1000);
  input.column_bytes[1] = 80;
  EXPECT_EQ(DeviceBytesNeeded(input, 0), 1256u * 80 + 64u * (8 + 80 + 80));
}

TEST(BudgetTest, FindsTheMostLayersThatFit) {
  const BudgetInput input = Uniform(30, 1536, 1024);
  for (int resident = 0; resident < 29; ++resident) {
    const uint64_t need = DeviceBytesNeeded(input, resident);
    EXPECT_EQ(LayersWithin(input, 29, need), resident);
    EXPECT_EQ(LayersWithin(input, 29, need - 1), resident - 1);
  }
  EXPECT_EQ(LayersWithin(input, 5, DeviceBytesNeeded(input, 20)), 5) << "never more than the limit";
}

TEST(BudgetTest, ShortSequencesHaveSmallTails) {
  BudgetInput input = Uniform(1, 1, 10);
  input.tail_columns = 4096;
  EXPECT_EQ(TailCapacity(4096, 10), 266);
  EXPECT_EQ(DeviceBytesNeeded(input, 0), 266u + 2 * 266);
}

}  // namespace
}  // namespace kvferry
