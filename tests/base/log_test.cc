#include "storage/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

TEST(Log, WritesOneLineAndDropsWhatIsBelowTheLevel) {
  testing::internal::CaptureStderr();
  KVFERRY_LOG(kDebug, "unheard");
  KVFERRY_LOG(kWarning, "heard");
  const std::string out = testing::internal::GetCapturedStderr();
  EXPECT_THAT(out, MatchesRegex("W [0-9T:.-]+Z heard\n"));
}

TEST(Log, OnceIsOnceAPlace) {
  testing::internal::CaptureStderr();
  int evaluated = 0;
  for (int i = 0; i < 5; ++i) KVFERRY_LOG_ONCE(kInfo, std::to_string(++evaluated));
  const std::string out = testing::internal::GetCapturedStderr();
  EXPECT_EQ(evaluated, 1);
  EXPECT_THAT(out, HasSubstr(" 1\n"));
}

TEST(Log, AGateOpensAgainAfterItsInterval) {
  LogGate once(absl::InfiniteDuration());
  EXPECT_TRUE(once.Open());
  EXPECT_FALSE(once.Open());
  LogGate always(absl::ZeroDuration());
  EXPECT_TRUE(always.Open());
  EXPECT_TRUE(always.Open());
}

}  // namespace
}  // namespace kvferry
