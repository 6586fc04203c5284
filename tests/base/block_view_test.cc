#include "storage/base/block_view.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "storage/base/checksum.h"

namespace kvferry {
namespace {

const std::vector<uint8_t> kBytes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};

BlockView Pieced(uint64_t checksum) {
  const ByteView all(kBytes);
  return BlockView({all.subspan(0, 3), all.subspan(3, 0), all.subspan(3, 1), all.subspan(4)}, checksum, nullptr);
}

TEST(BlockView, CopiesAnyRangeOverPieces) {
  const BlockView view = Pieced(0);
  ASSERT_EQ(view.size(), kBytes.size());
  for (uint64_t from = 0; from <= kBytes.size(); ++from) {
    for (uint64_t n = 0; from + n <= kBytes.size(); ++n) {
      std::vector<uint8_t> out(n + 2, 0xee);
      view.CopyTo(from, n, out.data() + 1);
      EXPECT_EQ(out.front(), 0xee);
      EXPECT_EQ(out.back(), 0xee);  // B74: bytes past what was asked are untouched
      EXPECT_TRUE(std::equal(out.begin() + 1, out.end() - 1, kBytes.begin() + from)) << from << "+" << n;
    }
  }
}

TEST(BlockView, VerifiesAgainstTheWritersChecksum) {
  EXPECT_TRUE(Pieced(BlockChecksum(ByteView(kBytes))).Verify().ok());
  EXPECT_EQ(Pieced(1).Verify().code(), absl::StatusCode::kDataLoss);
}

TEST(BlockView, PinsWhileAnyCopyLives) {
  auto pin = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = pin;
  BlockView view({ByteView(kBytes)}, 0, std::move(pin));
  BlockView copy = view;
  view = BlockView();
  EXPECT_FALSE(watch.expired());
  copy = BlockView();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace kvferry
