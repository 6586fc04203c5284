#include "client/block_pool.h"

#include <cstring>
#include <thread>
#include <vector>

#include "client/suspension.h"
#include "gtest/gtest.h"

namespace kvferry {
namespace {

TEST(BlockPoolTest, BuffersAreAlignedAndUsedAgain) {
  auto pool = BlockPool::Create(kMiB);
  auto buffer = pool->Take(1001);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.get()) % BlockPool::kAlignment, 0u);
  std::memset(buffer.get(), 1, 1001);
  const uint8_t* const first = buffer.get();
  EXPECT_EQ(pool->kept_bytes(), 0u);
  auto share = buffer;
  buffer = nullptr;
  EXPECT_EQ(pool->kept_bytes(), 0u) << "still shared";
  share = nullptr;
  EXPECT_EQ(pool->kept_bytes(), 1024u);
  EXPECT_NE(pool->Take(5000).get(), first) << "another size";
  EXPECT_EQ(pool->Take(1000).get(), first) << "the same after rounding";
}

TEST(BlockPoolTest, KeepsNoMoreThanItsBound) {
  auto pool = BlockPool::Create(10 * kKiB);
  std::vector<std::shared_ptr<uint8_t[]>> buffers;
  for (int i = 0; i < 8; ++i) buffers.push_back(pool->Take(3 * kKiB));
  buffers.clear();
  EXPECT_EQ(pool->kept_bytes(), 9 * kKiB);
}

TEST(BlockPoolTest, ThreadsShareItAndBuffersOutliveIt) {
  auto pool = BlockPool::Create(64 * kKiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([pool, t] {
      for (int i = 0; i < 1000; ++i) {
        auto buffer = pool->Take(kKiB * static_cast<uint64_t>(1 + i % 3));
        std::memset(buffer.get(), t, kKiB);
        for (uint64_t j = 0; j < kKiB; ++j) ASSERT_EQ(buffer[static_cast<ptrdiff_t>(j)], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  auto last = pool->Take(100);
  pool = nullptr;
  last[0] = 1;
}

TEST(SuspensionMeterTest, CountsGapsThatTicksDoNotExplain) {
  const absl::Time start = absl::UnixEpoch();
  SuspensionMeter meter(absl::Seconds(1), start);
  meter.Tick(start + absl::Seconds(1));
  meter.Tick(start + absl::Seconds(3));
  EXPECT_EQ(meter.Total(start + absl::Seconds(4)), absl::ZeroDuration());
  EXPECT_EQ(meter.Total(start + absl::Seconds(63)), absl::Seconds(59)) << "before the tick that tells";
  meter.Tick(start + absl::Seconds(63));
  EXPECT_EQ(meter.Total(start + absl::Seconds(64)), absl::Seconds(59)) << "and after it";
}

}  // namespace
}  // namespace kvferry
