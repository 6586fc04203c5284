// The store fails at every kind of moment: what the cache then returns is right, or an error that says what to do.

#include <functional>
#include <new>
#include <thread>

#include "c10/core/CPUAllocator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cache/cache_oracle.h"

namespace kvferry {
namespace {

using testing::HasSubstr;

constexpr int kLayers = 3;

class CacheFaultsTest : public testing::Test {
 protected:
  void NewCache(std::optional<int> resident, OnFull on_full = OnFull::kRaise, std::optional<int> depth = std::nullopt,
                std::optional<uint64_t> device_memory = std::nullopt,
                absl::Duration fetch_timeout = absl::Seconds(30)) {
    CacheOptions options;
    options.layers = kLayers;
    options.block_tokens = 4;
    options.resident_layers = resident;
    options.prefetch_depth = depth;
    options.device_memory = device_memory;
    options.on_full = on_full;
    options.full_timeout = absl::Seconds(20);
    options.fetch_timeout = fetch_timeout;
    auto cache = Cache::Create(options, Provide(store_));
    ASSERT_TRUE(cache.ok());
    cache_ = *std::move(cache);
  }

  // The first error of a forward pass, or OK after comparing all layers.
  absl::Status Forward(int64_t tokens) {
    for (int l = 0; l < kLayers; ++l) {
      const at::Tensor k = RandomStates(random_, 2, 2, tokens, 8), v = RandomStates(random_, 2, 2, tokens, 8);
      auto full = cache_->Update(k, v, l);
      if (!full.ok()) return full.status();
      const OracleLayer expected = oracle_.Update(k, v, l);
      EXPECT_TRUE(SameBits(full->first, expected.k) && SameBits(full->second, expected.v)) << "layer " << l;
    }
    return absl::OkStatus();
  }

  std::mt19937_64 random_{11};
  std::shared_ptr<FaultyTransport> store_ = NewFaultyStore();
  std::unique_ptr<Cache> cache_;
  CacheOracle oracle_{kLayers};
};

TEST_F(CacheFaultsTest, FullStoreRaisesBeforeAnythingChanges) {
  NewCache(1);
  ASSERT_TRUE(Forward(9).ok());
  const CacheStats before = cache_->Stats();
  store_->fail_reserves = 1;
  const absl::Status full = Forward(4);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(cache_->Stats().device_bytes, before.device_bytes);
  EXPECT_EQ(cache_->Stats().device_bytes_peak, before.device_bytes_peak);
  EXPECT_EQ(cache_->Stats().refused, 2u) << "one chunk a row";
  for (int l = 0; l < kLayers; ++l) EXPECT_EQ(cache_->SeqLength(l), 9);
  ExpectSame(*cache_, oracle_, kLayers);
  EXPECT_TRUE(Forward(4).ok()) << "the cache is still usable";
}

TEST_F(CacheFaultsTest, FullStoreAtTheFirstUpdateLeavesAnEmptyCache) {
  NewCache(0);
  store_->fail_reserves = 1;
  EXPECT_EQ(Forward(9).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(cache_->batch(), 0);
  EXPECT_EQ(cache_->SeqLength(0), 0);
  EXPECT_TRUE(Forward(9).ok());
}

TEST_F(CacheFaultsTest, FullStoreKeepsBlocksOnTheDeviceIfAskedTo) {
  NewCache(0, OnFull::kDevice);
  store_->fail_reserves = 1'000'000;
  ASSERT_TRUE(Forward(30).ok());
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(Forward(1).ok());
  EXPECT_EQ(cache_->Stats().blocks_put, 0u);
  EXPECT_GT(cache_->Stats().refused, 0u);
  const int asked = store_->reserves;
  ASSERT_TRUE(Forward(2).ok()) << "39 tokens: no block more than at 36";
  EXPECT_EQ(store_->reserves, asked) << "asked again only when another block is complete";
  store_->fail_reserves = 0;
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Forward(1).ok());
  EXPECT_EQ(cache_->Stats().blocks_put, 2u * kLayers * 10) << "all 10 blocks of the 43 tokens, the old ones first";
  ExpectSame(*cache_, oracle_, kLayers);
}

TEST_F(CacheFaultsTest, LostBlockSaysWhatToDo) {
  NewCache(0);
  ASSERT_TRUE(Forward(9).ok());
  store_->fail_fetch_after = 5;  // the first layer reads four
  const absl::Status lost = Forward(1);
  EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(lost.message()),
              testing::AllOf(HasSubstr("embedded://"), HasSubstr("10 tokens"), HasSubstr("reset()")));
  // Layer 0 has grown and the others have not: no further pass can be right.
  store_->fail_fetch_after = -1;
  const absl::Status torn = Forward(1);
  EXPECT_EQ(torn.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(torn.message()), HasSubstr("reset()"));
  cache_->Reset();
  oracle_.Reset();
  EXPECT_TRUE(Forward(9).ok());
  EXPECT_TRUE(Forward(1).ok());
}

TEST_F(CacheFaultsTest, LostAtTheFirstLayerCanBeTriedAgain) {
  NewCache(0);
  ASSERT_TRUE(Forward(9).ok());
  store_->fail_fetch_after = 0;
  EXPECT_EQ(Forward(1).code(), absl::StatusCode::kUnavailable);
  store_->fail_fetch_after = -1;
  EXPECT_TRUE(Forward(1).ok());
}

// What was asked for ahead and does not come is asked for once more, in what is left of the time.
TEST_F(CacheFaultsTest, AFetchIsWaitedForOnce) {
  store_->copies = true;
  NewCache(0, OnFull::kRaise, 1, std::nullopt, absl::Milliseconds(30));
  ASSERT_TRUE(Forward(9).ok());
  ASSERT_TRUE(Forward(1).ok());
  store_->stall_fetches = true;
  EXPECT_EQ(Forward(1).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LE(store_->last_deadline_ns, store_->stalled_since_ns + absl::ToInt64Nanoseconds(absl::Milliseconds(30)));
}

TEST_F(CacheFaultsTest, FailedPutsStayOnTheDevice) {
  NewCache(0);
  store_->fail_commits = 7;
  ASSERT_TRUE(Forward(13).ok());
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(Forward(1).ok());
  EXPECT_EQ(cache_->Flush(absl::Now() + absl::Seconds(10)).code(), absl::StatusCode::kUnavailable);
  ExpectSame(*cache_, oracle_, kLayers);
}

// Stands before the tensor library's allocator and fails one call.
class FailingAllocator final : public c10::Allocator {
 public:
  FailingAllocator() { c10::SetAllocator(c10::kCPU, this, kPriority); }
  ~FailingAllocator() override { c10::SetAllocator(c10::kCPU, real_, kPriority); }

  int fail_at = -1;  // how many calls succeed before one fails; -1: none fails

  c10::DataPtr allocate(size_t n) override {
    if (fail_at >= 0 && fail_at-- == 0) throw std::bad_alloc();
    return real_->allocate(n);
  }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  c10::DeleterFnPtr raw_deleter() const override { return real_->raw_deleter(); }

 private:
  static constexpr uint8_t kPriority = 100;
  c10::Allocator* const real_ = c10::GetAllocator(c10::kCPU);
};

// Whichever allocation of a pass, of rows that grow in number, or of a fork fails: the cache then goes on rightly or
// says that it cannot until it is reset.
TEST_F(CacheFaultsTest, NoMemoryAtAnyMoment) {
  FailingAllocator allocator;
  std::vector<at::Tensor> states;
  for (int i = 0; i < 2 * kLayers; ++i) states.push_back(RandomStates(random_, 2, 2, 300, 8));  // buffers must grow
  const std::vector<std::function<void()>> operations = {
      [&] {
        for (int l = 0; l < kLayers; ++l) {
          const auto i = static_cast<size_t>(2 * l);
          ASSERT_TRUE(cache_->Update(states[i], states[i + 1], l).ok());
        }
      },
      [&] {
        ASSERT_TRUE(cache_->SelectRows({0, 1, 1, 0, 0, 1}).ok());
        EXPECT_LT(cache_->Stats().resident_layers, kLayers) << "some had to leave";
      },
      [&] { ASSERT_TRUE(cache_->Fork().ok()); },
  };
  for (size_t operation = 0; operation < operations.size(); ++operation) {
    bool failed = true;
    for (int at = 0; failed; ++at) {
      SCOPED_TRACE(testing::Message() << "operation " << operation << " allocation " << at);
      NewCache(operation == 0 ? std::optional<int>(1) : std::nullopt, OnFull::kRaise, std::nullopt, 700'000);
      oracle_.Reset();
      ASSERT_TRUE(Forward(9).ok());
      failed = false;
      allocator.fail_at = at;
      try {
        operations[operation]();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      allocator.fail_at = -1;
      if (!failed) break;
      const absl::Status next = Forward(1);
      EXPECT_TRUE(next.ok() || next.code() == absl::StatusCode::kFailedPrecondition) << next;
      cache_->Reset();
      oracle_.Reset();
      ASSERT_TRUE(Forward(9).ok());
      ASSERT_TRUE(Forward(1).ok());
    }
  }
}

TEST_F(CacheFaultsTest, UnacknowledgedBlocksAreReadFromTheDevice) {
  NewCache(kLayers);  // all resident: nothing waits for acknowledgements
  store_->hold_acks = true;
  ASSERT_TRUE(Forward(13).ok());
  EXPECT_EQ(cache_->Stats().blocks_put, 0u);
  ASSERT_TRUE(Forward(1).ok());
  store_->ReleaseAcks();
  EXPECT_EQ(cache_->Stats().blocks_put, 2u * kLayers * 3);
  EXPECT_TRUE(Forward(1).ok());
}

TEST_F(CacheFaultsTest, LayersThatStayNeverWaitForTheStore) {
  NewCache(kLayers, OnFull::kRaise, /*depth=*/0);
  store_->copies = true;
  store_->hold_acks = true;
  ASSERT_TRUE(Forward(13).ok());
  const int some = store_->commits;
  EXPECT_GT(some, 0);
  EXPECT_LT(some, 2 * kLayers * 3) << "blocks of all layers take memory of this process at once";
  store_->ReleaseAcks();
  ASSERT_TRUE(cache_->Flush(absl::Now() + absl::Seconds(10)).ok());
  EXPECT_EQ(cache_->Stats().blocks_put, 2u * kLayers * 3);
  EXPECT_TRUE(Forward(1).ok());
}

// A put that failed counts as long as its chunk lives, and no longer.
TEST_F(CacheFaultsTest, FailedBlocksGoWithTheirChunk) {
  NewCache(0, OnFull::kRaise, /*depth=*/0);
  store_->copies = true;
  ASSERT_TRUE(Forward(8).ok());
  store_->fail_commits = 1000;
  ASSERT_TRUE(Forward(4).ok());
  store_->fail_commits = 0;
  EXPECT_EQ(cache_->Stats().layers_on_device, kLayers);
  ASSERT_TRUE(cache_->Crop(4).ok());
  oracle_.Crop(4);
  EXPECT_TRUE(cache_->Flush(absl::Now() + absl::Seconds(10)).ok()) << "nothing that is held has failed";
  ASSERT_TRUE(Forward(1).ok());
  EXPECT_EQ(cache_->Stats().layers_on_device, 1);
}

TEST_F(CacheFaultsTest, ModelWaitsForASlowStoreOnly) {
  NewCache(0);
  store_->hold_acks = true;
  std::thread late([this] {
    while (store_->commits < 6) std::this_thread::yield();  // layer 0's blocks are out: layer 1 waits for them
    store_->ReleaseAcks();
  });
  EXPECT_TRUE(Forward(13).ok());
  late.join();
  EXPECT_GT(cache_->Stats().seconds_waited, 0);
}

TEST_F(CacheFaultsTest, RestartedStoreWithEverythingOnTheDevice) {
  NewCache(kLayers);
  ASSERT_TRUE(Forward(9).ok());
  ++store_->epoch_added;
  EXPECT_TRUE(Forward(4).ok());
  EXPECT_EQ(store_->commits, 2 * kLayers * 2 + 2 * kLayers * 3) << "everything is put anew";
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(Forward(1).ok());
}

// The reservation for the next blocks is what finds the restarted store.
TEST_F(CacheFaultsTest, StoreFoundRestartedByAReservation) {
  NewCache(kLayers);
  ASSERT_TRUE(Forward(9).ok());
  store_->restarts_in_reserve = 1;
  ASSERT_TRUE(Forward(4).ok());
  EXPECT_EQ(store_->commits, 2 * kLayers * 2 + 2 * kLayers * 3) << "everything is put anew";
  NewCache(0);
  oracle_.Reset();
  ASSERT_TRUE(Forward(9).ok());
  store_->restarts_in_reserve = 1;
  EXPECT_EQ(Forward(4).code(), absl::StatusCode::kUnavailable);
}

// Of the first block its beginning is still wanted, and nothing else refers to it.
TEST_F(CacheFaultsTest, RestartedStoreThatHeldTheBeginningOfABlock) {
  NewCache(0);
  ASSERT_TRUE(Forward(6).ok());
  ASSERT_TRUE(cache_->Crop(3).ok());
  ++store_->epoch_added;
  EXPECT_EQ(cache_->Flush(absl::Now() + absl::Seconds(10)).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Forward(1).code(), absl::StatusCode::kUnavailable);
}

TEST_F(CacheFaultsTest, AFirstPassThatBrokeOffIsNoticedInTheNext) {
  NewCache(0);
  const at::Tensor k = RandomStates(random_, 2, 2, 4, 8);
  ASSERT_TRUE(cache_->Update(k, k, 0).ok());
  ASSERT_TRUE(cache_->Update(k, k, 0).ok());
  EXPECT_EQ(cache_->Update(k, k, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  cache_->Reset();
  EXPECT_TRUE(Forward(8).ok());
}

TEST_F(CacheFaultsTest, NoWaitForRoomIsTimeEnoughForAStoreThatHasSome) {
  CacheOptions options;
  options.layers = kLayers;
  options.block_tokens = 4;
  options.resident_layers = 0;
  options.full_timeout = absl::ZeroDuration();
  store_->copies = true;
  store_->late_acks = true;
  cache_ = *Cache::Create(options, Provide(store_));
  ASSERT_TRUE(Forward(13).ok());
  EXPECT_TRUE(Forward(1).ok());
}

TEST_F(CacheFaultsTest, AnInterruptedPassCannotBeCropped) {
  NewCache(0);
  ASSERT_TRUE(Forward(8).ok());
  const at::Tensor k = RandomStates(random_, 2, 2, 1, 8);
  ASSERT_TRUE(cache_->Update(k, k, 0).ok());
  EXPECT_EQ(cache_->Crop(1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(cache_->Read(1).ok()) << "refused, and nothing was changed";
  EXPECT_TRUE(cache_->Crop(9).ok()) << "that empties it";
  oracle_.Reset();
  EXPECT_TRUE(Forward(8).ok());
}

TEST_F(CacheFaultsTest, FlushSaysWhatFoundNoRoom) {
  NewCache(1, OnFull::kDevice);
  store_->fail_reserves = 1'000'000;
  ASSERT_TRUE(Forward(13).ok());
  const auto flush = [this] { return cache_->Flush(absl::Now() + absl::Seconds(10)); };
  EXPECT_EQ(flush().code(), absl::StatusCode::kResourceExhausted) << flush();
  store_->fail_reserves = 0;
  EXPECT_TRUE(flush().ok()) << flush();
  EXPECT_EQ(cache_->Stats().blocks_put, 2u * kLayers * 3);
  ExpectSame(*cache_, oracle_, kLayers);
  ASSERT_TRUE(cache_->SelectRows({1, 1}).ok());
  oracle_.SelectRows({1, 1});
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(Forward(1).ok());
  ExpectSame(*cache_, oracle_, kLayers);
}

TEST_F(CacheFaultsTest, BlocksOnTheirWayCountAfterAReset) {
  NewCache(kLayers, OnFull::kRaise, /*depth=*/0);
  store_->copies = true;
  store_->hold_acks = true;
  ASSERT_TRUE(Forward(13).ok());
  cache_->Reset();
  EXPECT_GT(cache_->Stats().device_bytes, 0u) << "the put holds them";
  store_->ReleaseAcks();
  EXPECT_EQ(cache_->Stats().device_bytes, 0u);
}

TEST_F(CacheFaultsTest, RestartedStoreThatHeldBlocks) {
  NewCache(1);
  ASSERT_TRUE(Forward(9).ok());
  ++store_->epoch_added;
  const absl::Status gone = Forward(1);
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(gone.message()),
              testing::AllOf(HasSubstr("restarted"), HasSubstr("9 tokens"), HasSubstr("reset()")));
  cache_->Reset();
  oracle_.Reset();
  EXPECT_TRUE(Forward(9).ok()) << "the same cache works again";
  EXPECT_TRUE(Forward(1).ok());
}

TEST_F(CacheFaultsTest, StoreThatDiesWhereNothingHasToLeave) {
  NewCache(kLayers);
  store_->reserve_code = absl::StatusCode::kUnavailable;
  store_->fail_reserves = 1'000'000;
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Forward(3).ok());
  EXPECT_GT(cache_->Stats().refused, 0u);
  ExpectSame(*cache_, oracle_, kLayers);
}

TEST_F(CacheFaultsTest, DeadStoreRefusesWhatMustLeave) {
  NewCache(0);
  store_->reserve_code = absl::StatusCode::kUnavailable;
  store_->fail_reserves = 1;
  EXPECT_EQ(Forward(9).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Forward(9).ok());
}

}  // namespace
}  // namespace kvferry
