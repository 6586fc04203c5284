#include "client/cache/columns.h"

#include <omp.h>

#include <random>
#include <set>
#include <thread>

#include "ATen/Parallel.h"
#include "ATen/ops/empty.h"
#include "gtest/gtest.h"
#include "storage/base/checksum.h"
#include "storage/base/mutex.h"
#include "tests/cache/cache_oracle.h"

namespace kvferry {
namespace {

// Pack, then unpack in odd pieces: every token comes back in its place, for heads that equal tokens or dim and twins.
TEST(ColumnsTest, PackAndUnpackEveryShape_B77) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (const int64_t heads : {1, 2, 3, 4, 8}) {
    for (const int64_t t : {1, 2, 16}) {
      for (const int64_t dim : {t, 2 * heads, int64_t{7}}) {
        for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16, c10::kByte}) {
          const KeysValues from{RandomStates(random, 2, heads, 3 * t, dim, type),
                                RandomStates(random, 2, heads, 3 * t, dim + 3, type)};
          std::vector<uint8_t> bytes(static_cast<size_t>(heads * t * (dim + dim + 3) * from.k.element_size()));
          std::vector<PackJob> pack = {{1, t, absl::MakeSpan(bytes), 0}};
          PackBlocks(from, t, pack);
          ASSERT_EQ(pack[0].sum.checksum, BlockChecksum(bytes));
          const at::Tensor k = from.k[1].narrow(1, t, t).contiguous(), v = from.v[1].narrow(1, t, t).contiguous();
          ASSERT_EQ(std::memcmp(bytes.data(), k.const_data_ptr(), k.nbytes()), 0) << "K is [heads, T, dim]";
          ASSERT_EQ(std::memcmp(bytes.data() + k.nbytes(), v.const_data_ptr(), v.nbytes()), 0) << "then V";

          BlockView::Pieces pieces;
          for (size_t at = 0; at < bytes.size(); at += 5) {
            pieces.push_back(ByteView(bytes).subspan(at, std::min<size_t>(5, bytes.size() - at)));
          }
          const BlockView view(pieces, pack[0].sum.checksum, nullptr);
          const KeysValues to{RandomStates(random, 2, heads, 3 * t, dim, type),
                              RandomStates(random, 2, heads, 3 * t, dim + 3, type)};
          const at::Tensor before = to.k.clone();
          UnpackBlocks({{0, 2 * t, t, &view}}, t, to);
          ASSERT_TRUE(SameBits(to.k[0].narrow(1, 2 * t, t), k));
          ASSERT_TRUE(SameBits(to.v[0].narrow(1, 2 * t, t), v));
          ASSERT_TRUE(SameBits(to.k[1], before[1])) << "the other row was touched";
          ASSERT_TRUE(SameBits(to.k[0].narrow(1, 0, 2 * t), before[0].narrow(1, 0, 2 * t)))
              << "other columns were touched";
        }
      }
    }
  }
}

// A tensor whose elements are not side by side goes through the tensor library.
TEST(ColumnsTest, PacksStridedElements) {
  std::mt19937_64 random(1);
  const at::Tensor wide = RandomStates(random, 1, 2, 4, 16);
  const KeysValues from{wide.slice(3, 0, 16, 2), wide.slice(3, 1, 16, 2)};
  std::vector<uint8_t> bytes(2 * 4 * 8 * 4 * 2);
  std::vector<PackJob> pack = {{0, 0, absl::MakeSpan(bytes), 0}};
  PackBlocks(from, 4, pack);
  const at::Tensor k = from.k.contiguous();
  EXPECT_EQ(std::memcmp(bytes.data(), k.const_data_ptr(), k.nbytes()), 0);
}

// The copies of a step run on the model's threads: at::parallel_for in our objects is not the serial stand-in that it
// is without OpenMP, and it is the tensor library's own runtime (its thread count is obeyed).
TEST(ColumnsTest, CopiesRunOnTheIntraOpThreads) {
  at::set_num_threads(2);
  Mutex mu;
  std::set<std::thread::id> threads;
  at::parallel_for(0, 2, 1, [&](int64_t, int64_t) {
    MutexLock lock(&mu);
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), 2u);
  EXPECT_EQ(omp_get_max_threads(), at::get_num_threads());
}

}  // namespace
}  // namespace kvferry
