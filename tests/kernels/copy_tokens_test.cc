#include "kernels/copy_tokens.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/copy_tokens_cases.h"

namespace kvferry {
namespace {

// The whole target is compared, so a byte written beside the tokens is seen too.
TEST(CopyTokensTest, EqualsReferenceForRandomStrides_B76) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    CopyCase c = RandomCopyCase(random);
    std::vector<uint8_t> expected = c.target;
    CopyTokensRef(c.From(c.source.data()), c.To(expected.data()), c.extent);
    CopyTokens(c.From(c.source.data()), c.To(c.target.data()), c.extent);
    ASSERT_EQ(c.target, expected) << "case " << i;
  }
}

TEST(CopyTokensTest, ReferenceTransposes) {
  // [tokens 2, heads 2, dim 2] to [heads 2, tokens 2, dim 2].
  const std::vector<uint8_t> source = {0, 1, 10, 11, 20, 21, 30, 31};
  std::vector<uint8_t> target(8);
  CopyTokensRef({source.data(), 2, 4}, {target.data(), 4, 2}, {2, 2, 2});
  EXPECT_THAT(target, testing::ElementsAre(0, 1, 20, 21, 10, 11, 30, 31));
}

TEST(CopyTokensTest, NothingToCopyTouchesNothing) {
  CopyTokens({nullptr, 0, 0}, {nullptr, 0, 0}, {3, 0, 16});
  CopyTokens({nullptr, 0, 0}, {nullptr, 0, 0}, {0, 3, 16});
  CopyTokens({nullptr, 0, 0}, {nullptr, 0, 0}, {3, 3, 0});
}

}  // namespace
}  // namespace kvferry
