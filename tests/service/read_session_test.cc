#include "service/read_session.h"

#include <numeric>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "service/stepper.h"
#include "tests/service/core_fixture.h"

namespace kvferry {
namespace {

class ReadSessionTest : public testing::Test {
 protected:
  ReadSessionTest() { session_ = f_.Attach()->session; }

  // A namespace of one layer with blocks of this size, and `n` sealed chunks in it.
  std::vector<absl::StatusOr<BlockKey>> Store(uint32_t block_kib, int n) {
    const NamespaceSpec spec = SmallSpec(1, 1, 128 * block_kib, 1);
    size_ = spec.BlockBytes(0, 0);
    EXPECT_EQ(size_, block_kib * kKiB);
    const NamespaceId ns = f_.Open(session_, spec);
    std::vector<absl::StatusOr<BlockKey>> keys;
    for (int i = 0; i < n; ++i) {
      std::unique_ptr<ChunkWriter> writer;
      f_.store->Reserve(session_, ns, ReserveOptions(), [&](auto writers) {
        ASSERT_TRUE(writers.ok()) << writers.status();
        writer = std::move((*writers)[0]);
      });
      const auto block = BlockBytes(size_, i);
      std::copy(block.begin(), block.end(), writer->Layer(0).begin());
      writer->Commit(0, BlockChecksum(ByteView(block)), [](const absl::Status& s) { EXPECT_TRUE(s.ok()); });
      keys.push_back(BlockKey{writer->key(), 0});
    }
    return keys;
  }

  std::shared_ptr<ReadSession> Read(std::vector<absl::StatusOr<BlockKey>> keys, uint64_t window = 0) {
    auto read = std::make_shared<ReadSession>(f_.store.get(), session_, std::move(keys), window, &f_.stats,
                                              [this] { ++ready_; });
    read->Start();
    return read;
  }

  static uint64_t Bytes(const std::vector<GetPiece>& batch) {
    return std::accumulate(batch.begin(), batch.end(), uint64_t{0},
                           [](uint64_t sum, const GetPiece& piece) { return sum + piece.size; });
  }

  // Bytes of `view` that the piece covers are those of block `index`.
  void ExpectBytes(const GetPiece& piece) {
    const auto block = BlockBytes(size_, piece.index);
    std::vector<uint8_t> bytes(piece.size);
    piece.view.CopyTo(piece.offset, piece.size, bytes.data());
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), block.begin() + piece.offset)) << piece.index;
  }

  CoreFixture f_;
  SessionId session_ = 0;
  uint64_t size_ = 0;
  int ready_ = 0;
};

TEST_F(ReadSessionTest, SmallBlocksShareAMessage) {
  const auto read = Read(Store(64, 20));
  auto batch = read->Next(kMiB);
  EXPECT_EQ(batch.size(), 16u);
  EXPECT_EQ(Bytes(batch), kMiB);
  for (const GetPiece& piece : batch) ExpectBytes(piece);
  batch = read->Next(kMiB);
  EXPECT_EQ(batch.size(), 4u);
  EXPECT_EQ(batch[0].index, 16u);
  EXPECT_TRUE(read->done());
  EXPECT_TRUE(read->Next(kMiB).empty());
  EXPECT_GE(ready_, 1);
}

// B45: a block of any size comes in pieces of at most one message, in order.
TEST_F(ReadSessionTest, LargeBlocksAreCut) {
  const auto read = Read(Store(2560, 2));
  std::vector<std::pair<uint32_t, uint64_t>> seen;
  while (!read->done()) {
    const auto batch = read->Next(kMiB);
    ASSERT_EQ(batch.size(), 1u);
    EXPECT_LE(batch[0].size, kMiB);
    ExpectBytes(batch[0]);
    seen.emplace_back(batch[0].index, batch[0].offset);
    read->Consumed(batch[0].size);
  }
  EXPECT_EQ(seen, (std::vector<std::pair<uint32_t, uint64_t>>{
                      {0, 0}, {0, kMiB}, {0, 2 * kMiB}, {1, 0}, {1, kMiB}, {1, 2 * kMiB}}));
}

TEST_F(ReadSessionTest, PiecesReferToTheStoresMemory) {
  const auto keys = Store(64, 1);
  const auto batch = Read(keys)->Next(kMiB);
  const auto view = f_.Get(session_, *keys[0]);
  ASSERT_EQ(batch[0].view.pieces().size(), 1u);
  EXPECT_EQ(batch[0].view.pieces()[0].data(), view->pieces()[0].data());
}

TEST_F(ReadSessionTest, MissesAndBadKeysKeepTheirPlace) {
  auto keys = Store(64, 3);
  BlockKey unknown = *keys[0];
  unknown.chunk.id[1] += 1000;
  keys[1] = unknown;
  keys.push_back(absl::InvalidArgumentError("layer of a block key is 70000"));
  const auto batch = Read(keys)->Next(kMiB);
  ASSERT_EQ(batch.size(), 4u);
  EXPECT_TRUE(batch[0].status.ok());
  EXPECT_TRUE(absl::IsNotFound(batch[1].status));
  EXPECT_EQ(batch[1].size, 0u);
  EXPECT_TRUE(batch[2].status.ok());
  ExpectBytes(batch[2]);
  EXPECT_TRUE(absl::IsInvalidArgument(batch[3].status));
}

// B74: one key twice: both slots are filled.
TEST_F(ReadSessionTest, AKeyMayComeTwice) {
  const auto keys = Store(64, 2);
  const auto batch = Read({keys[0], keys[1], keys[0]})->Next(kMiB);
  ASSERT_EQ(batch.size(), 3u);
  EXPECT_EQ(batch[2].index, 2u);
  EXPECT_EQ(batch[2].size, size_);
  EXPECT_TRUE(Read({})->done());
}

TEST_F(ReadSessionTest, ReadsAheadWithinItsWindow) {
  const auto read = Read(Store(256, 40), kMiB);
  EXPECT_EQ(f_.store->Stats().blocks_got, 4u);
  auto batch = read->Next(kMiB);
  EXPECT_EQ(batch.size(), 4u);
  // Given, not consumed: one more at most, so that there is always something under way.
  EXPECT_LE(f_.store->Stats().blocks_got, 5u);
  EXPECT_LE(f_.stats.get_bytes_held, kMiB + size_);
  read->Consumed(Bytes(batch));
  EXPECT_EQ(f_.store->Stats().blocks_got, 8u);
  EXPECT_EQ(f_.stats.get_bytes_held, kMiB);
  read->Cancel();
  EXPECT_EQ(f_.stats.get_bytes_held, 0u);
}

TEST_F(ReadSessionTest, AWindowSmallerThanABlockStillMoves) {
  const auto read = Read(Store(256, 5), 1);
  int blocks = 0;
  while (!read->done()) {
    const auto batch = read->Next(kMiB);
    ASSERT_FALSE(batch.empty());
    blocks += static_cast<int>(batch.size());
    read->Consumed(Bytes(batch));
  }
  EXPECT_EQ(blocks, 5);
}

TEST_F(ReadSessionTest, ManyMissesAreSpreadOverMessages) {
  const auto stored = Store(64, 1);
  BlockKey unknown = *stored[0];
  unknown.chunk.id[1] += 1000;
  const auto read = Read(std::vector<absl::StatusOr<BlockKey>>(5000, unknown));
  size_t seen = 0;
  while (!read->done()) {
    const auto batch = read->Next(kMiB);
    ASSERT_FALSE(batch.empty());
    EXPECT_LE(batch.size(), ReadSession::kMaxPiecesInBatch);
    seen += batch.size();
  }
  EXPECT_EQ(seen, 5000u);
}

TEST_F(ReadSessionTest, CancelForgets) {
  const auto read = Read(Store(64, 10));
  const auto batch = read->Next(64 * kKiB);
  EXPECT_EQ(batch.size(), 1u);
  read->Cancel();
  EXPECT_TRUE(read->Next(kMiB).empty());
  EXPECT_TRUE(read->done());
  read->Consumed(Bytes(batch));  // the wire lets go afterwards
  ExpectBytes(batch[0]);
}

// One thread consumes while another cancels.
TEST_F(ReadSessionTest, CancelRacesWithNext) {
  const auto keys = Store(64, 50);
  for (int round = 0; round < 50; ++round) {
    const auto read = Read(keys, kMiB);
    std::thread canceller([&] { read->Cancel(); });
    while (!read->done()) {
      const auto batch = read->Next(kMiB);
      for (const GetPiece& piece : batch) ExpectBytes(piece);
      read->Consumed(Bytes(batch));
    }
    canceller.join();
  }
}

TEST(Stepper, RunsOnceAtATimeAndMissesNoKick) {
  Stepper stepper;
  std::atomic<int> flags{0}, inside{0};
  int handled = 0;  // touched in the step alone
  const auto kick = [&] {
    ++flags;
    stepper.Kick([&] {
      EXPECT_EQ(inside.fetch_add(1), 0);
      handled += flags.exchange(0);
      inside.fetch_sub(1);
    });
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20'000; ++i) kick();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(handled, 80'000);
}

}  // namespace
}  // namespace kvferry
