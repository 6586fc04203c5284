#include "client/retry.h"

#include <random>

#include "gtest/gtest.h"

namespace kvferry {
namespace {

TEST(BackoffTest, GrowsToTheLongestAndStartsAnew) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Backoff backoff({absl::Milliseconds(100), absl::Seconds(2)}, seed);
  absl::Duration full = absl::Milliseconds(100);
  for (int i = 0; i < 100; ++i) {
    const absl::Duration delay = backoff.Next();
    EXPECT_GE(delay, full / 2) << i;
    EXPECT_LE(delay, full) << i;
    full = std::min(full * 2, absl::Seconds(2));
  }
  backoff.Reset();
  EXPECT_LE(backoff.Next(), absl::Milliseconds(100));
}

TEST(BackoffTest, ClientsDoNotComeBackAllAtOnce) {
  Backoff a({}, 1), b({}, 2);
  EXPECT_NE(a.Next(), b.Next());
}

}  // namespace
}  // namespace kvferry
