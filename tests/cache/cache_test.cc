#include "client/cache/cache.h"

#include <random>

#include "ATen/ops/_neg_view.h"
#include "ATen/ops/mul.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "client/local_transport.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cache/cache_oracle.h"

namespace kvferry {
namespace {

using testing::HasSubstr;

constexpr int kLayers = 4;
constexpr int64_t kHeads = 2, kDim = 8;

class CacheTest : public testing::Test {
 protected:
  std::unique_ptr<Cache> NewCache(CacheOptions options) {
    auto cache = Cache::Create(options, [this]() -> absl::StatusOr<std::shared_ptr<Transport>> {
      ++connects_;
      return store_;
    });
    EXPECT_TRUE(cache.ok()) << cache.status();
    return *std::move(cache);
  }

  static CacheOptions Options(std::optional<int> resident = std::nullopt, int block_tokens = 4) {
    CacheOptions options;
    options.layers = kLayers;
    options.block_tokens = block_tokens;
    options.resident_layers = resident;
    return options;
  }

  at::Tensor States(int64_t tokens, int64_t batch = 2) { return RandomStates(random_, batch, kHeads, tokens, kDim); }

  // Runs one forward pass on both and compares what attention gets.
  void Forward(Cache& cache, CacheOracle& oracle, int64_t tokens, int64_t batch = 2) {
    for (int l = 0; l < kLayers; ++l) {
      const at::Tensor k = States(tokens, batch), v = States(tokens, batch);
      auto full = cache.Update(k, v, l);
      ASSERT_TRUE(full.ok()) << full.status();
      const OracleLayer expected = oracle.Update(k, v, l);
      ASSERT_TRUE(SameBits(full->first, expected.k) && SameBits(full->second, expected.v)) << "layer " << l;
    }
  }

  std::mt19937_64 random_{7};
  std::shared_ptr<FaultyTransport> store_ = NewFaultyStore();
  int connects_ = 0;
};

TEST_F(CacheTest, NothingLeavesTheDeviceUntilItMust) {
  auto cache = NewCache(Options());
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 50);
  for (int i = 0; i < 20; ++i) Forward(*cache, oracle, 1);
  EXPECT_EQ(connects_, 0) << "no store is needed while everything fits";
  EXPECT_EQ(cache->Stats().blocks_put, 0u);
}

TEST_F(CacheTest, EveryFullBlockIsPutOnce) {
  auto cache = NewCache(Options(1));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 10);
  EXPECT_EQ(store_->commits, 2 * kLayers * 2) << "rows x layers x floor(10 / 4)";
  Forward(*cache, oracle, 1);
  EXPECT_EQ(store_->commits, 2 * kLayers * 2);
  Forward(*cache, oracle, 1);
  EXPECT_EQ(store_->commits, 2 * kLayers * 3) << "the twelfth token completes the third block";
  EXPECT_EQ(cache->Stats().bytes_put, 2u * kLayers * 3 * 4 * kHeads * kDim * 2 * 4);
  EXPECT_EQ(cache->Stats().stored_bytes, cache->Stats().bytes_put);
}

TEST_F(CacheTest, RowOperationsSendAndReadNoByte) {
  auto cache = NewCache(Options(1));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 11);
  const int commits = store_->commits, fetched = store_->blocks_fetched;
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{1, 0}, {0, 0, 1}, {2, 1}, {1}, {0, 0}}) {
    ASSERT_TRUE(cache->SelectRows(rows).ok());
    oracle.SelectRows(rows);
  }
  auto fork = cache->Fork();
  ASSERT_TRUE(fork.ok());
  EXPECT_EQ(store_->commits, commits);
  EXPECT_EQ(store_->blocks_fetched, fetched);
  Forward(*cache, oracle, 1);
  EXPECT_EQ(store_->blocks_fetched - fetched, 3 * 2)
      << "two rows that share two chunks fetch them once for each of 3 layers";
}

TEST_F(CacheTest, CropOverABlocksEdgeReadsOnePartialBlockARowAndLayer) {
  auto cache = NewCache(Options(1));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 11);  // two blocks a row and a tail of 3
  ASSERT_TRUE(cache->Crop(5).ok());
  oracle.Crop(5);
  const int before = store_->blocks_fetched;
  Forward(*cache, oracle, 1);  // 6 + 1: one whole block and two tokens of what was the second
  EXPECT_EQ(store_->blocks_fetched - before, 3 * 2 * 2) << "3 layers x 2 rows x (one whole, one partial)";
  const int again = store_->blocks_fetched;
  Forward(*cache, oracle, 1);
  EXPECT_EQ(store_->blocks_fetched - again, 3 * 2) << "from now on the rest of the second is in the tail";
}

TEST_F(CacheTest, CropTwiceBeforeTheNextUpdate) {
  auto cache = NewCache(Options(0));
  CacheOracle oracle(kLayers);
  for (const int64_t second : {1, 2, 3, 5, 9, 13, 14}) {
    cache->Reset();
    oracle.Reset();
    Forward(*cache, oracle, 19);
    for (const int64_t n : {5L, second}) {
      ASSERT_TRUE(cache->Crop(n).ok());
      oracle.Crop(n);
    }
    ExpectSame(*cache, oracle, kLayers);
    Forward(*cache, oracle, 3);
  }
}

// Rows of different starts: pads are stored nowhere and read as zeros where the layer left the device.
TEST_F(CacheTest, RowsStartAtTheirFirstToken) {
  const std::vector<int64_t> starts = {0, 3, 6};
  for (const int resident : {0, kLayers}) {
    auto cache = NewCache(Options(resident));
    ASSERT_TRUE(cache->SetRowStarts(starts).ok());
    CacheOracle oracle(kLayers);
    const auto forward = [&](int64_t tokens) {
      for (int l = 0; l < kLayers; ++l) {
        const at::Tensor k = States(tokens, 3), v = States(tokens, 3);
        for (int64_t r = 0; r < 3; ++r) {
          const int64_t pads = std::min(tokens, std::max<int64_t>(0, starts[r] - cache->SeqLength(l)));
          for (const at::Tensor& t : {k, v}) t.narrow(0, r, 1).narrow(2, 0, pads).zero_();
        }
        auto full = cache->Update(k, v, l);
        ASSERT_TRUE(full.ok()) << full.status();
        const OracleLayer expected = oracle.Update(k, v, l);
        ASSERT_TRUE(SameBits(full->first, expected.k) && SameBits(full->second, expected.v)) << "layer " << l;
      }
    };
    forward(2);
    forward(8);
    EXPECT_EQ(store_->commits % kLayers, 0);
    for (int i = 0; i < 9; ++i) forward(1);
    ASSERT_TRUE(cache->Crop(6).ok());
    oracle.Crop(6);
    for (int i = 0; i < 5; ++i) forward(1);
    ExpectSame(*cache, oracle, kLayers);
  }
}

TEST_F(CacheTest, RowStartsOfAFilledCacheAreRefused) {
  auto cache = NewCache(Options());
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 1);
  EXPECT_EQ(cache->SetRowStarts({0, 1}).code(), absl::StatusCode::kFailedPrecondition);
  cache->Reset();
  EXPECT_EQ(cache->SetRowStarts({0, -1}).code(), absl::StatusCode::kInvalidArgument);
}

// As those of DynamicCache do: matrix products of others may differ in the last bit.
TEST_F(CacheTest, TokensLieOneBehindTheOther) {
  for (const int resident : {0, kLayers}) {
    auto cache = NewCache(Options(resident));
    for (const int64_t tokens : {9, 1, 3}) {
      for (int l = 0; l < kLayers; ++l) {
        const auto strided = [&] { return States(tokens).transpose(1, 2).contiguous().transpose(1, 2); };
        const auto full = cache->Update(strided(), strided(), l);
        ASSERT_TRUE(full.ok()) << full.status();
        for (const at::Tensor& t : {full->first, full->second}) EXPECT_EQ(t.stride(2), kDim) << tokens << " tokens";
      }
    }
  }
}

// Some models use the keys and values of one layer again in later ones.
TEST_F(CacheTest, TensorsThatAreStillHeldKeepTheirBytes) {
  auto cache = NewCache(Options(1));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 9);
  std::vector<std::pair<at::Tensor, at::Tensor>> held;
  for (int step = 0; step < 3; ++step) {
    std::vector<OracleLayer> expected;
    held.clear();
    for (int l = 0; l < kLayers; ++l) {
      const at::Tensor k = States(1), v = States(1);
      auto full = cache->Update(k, v, l);
      ASSERT_TRUE(full.ok());
      held.push_back(*full);
      expected.push_back(oracle.Update(k, v, l));
      for (size_t i = 0; i < held.size(); ++i) {
        ASSERT_TRUE(SameBits(held[i].first, expected[i].k) && SameBits(held[i].second, expected[i].v)) << "layer " << i;
      }
    }
  }
}

TEST_F(CacheTest, LayersOfOtherShapesThanTheFirstAreLearnt_B78) {
  const auto shape = [](int l) { return l == 2 ? std::array<int64_t, 3>{1, 16, 4} : std::array<int64_t, 3>{2, 8, 8}; };
  auto cache = NewCache(Options(0));
  CacheOracle oracle(kLayers);
  for (const int64_t tokens : {9, 1, 1, 6}) {
    for (int l = 0; l < kLayers; ++l) {
      const auto [heads, k_dim, v_dim] = shape(l);
      const at::Tensor k = RandomStates(random_, 2, heads, tokens, k_dim),
                       v = RandomStates(random_, 2, heads, tokens, v_dim);
      auto full = cache->Update(k, v, l);
      ASSERT_TRUE(full.ok()) << full.status();
      const OracleLayer expected = oracle.Update(k, v, l);
      ASSERT_TRUE(SameBits(full->first, expected.k) && SameBits(full->second, expected.v)) << "layer " << l;
    }
  }
  EXPECT_EQ(cache->Stats().relearned, 1u);
  EXPECT_EQ(cache->Stats().resident_layers, 0);
  EXPECT_GT(cache->Stats().stored_bytes, 0u);
}

TEST_F(CacheTest, LayersThatAreNotAnnouncedAreLearnt_B14) {
  CacheOptions options = Options(0);
  options.layers.reset();
  auto cache = NewCache(options);
  CacheOracle oracle(kLayers);
  // Layer 2 before 0 and 1.
  const at::Tensor k = States(5), v = States(5);
  ASSERT_TRUE(cache->Update(k, v, 2).ok());
  oracle.Update(k, v, 2);
  EXPECT_EQ(cache->layers(), 3);
  EXPECT_EQ(cache->SeqLength(0), 0);
  EXPECT_EQ(cache->SeqLength(2), 5);
  for (const int l : {0, 1, 3}) {
    ASSERT_TRUE(cache->Update(k, v, l).ok());
    oracle.Update(k, v, l);
  }
  EXPECT_EQ(connects_, 0);
  Forward(*cache, oracle, 1);
  EXPECT_EQ(cache->Stats().layers_on_device, 1);
  EXPECT_EQ(store_->commits, 2 * kLayers);
}

TEST_F(CacheTest, GradientsKeepTheirLayerOnTheDevice) {
  auto cache = NewCache(Options(0));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 9);
  const c10::AutoGradMode grad(true);
  at::Tensor k = States(2).clone().requires_grad_(true), v = States(2);
  auto full = cache->Update(k, v, 0);
  ASSERT_TRUE(full.ok()) << full.status();
  const OracleLayer expected = oracle.Update(k, v, 0);
  EXPECT_TRUE(SameBits(full->first.detach(), expected.k.detach()));
  full->first.sum().backward();
  EXPECT_TRUE(k.grad().defined());
  EXPECT_EQ(k.grad().size(2), 2);
  EXPECT_EQ(cache->Stats().plain_layers, 1u);
}

TEST_F(CacheTest, InferenceModeNowAndGradientsLater) {
  auto cache = NewCache(Options(1));
  CacheOracle oracle(kLayers);
  {
    const c10::InferenceMode inference;
    Forward(*cache, oracle, 9);
  }
  const c10::AutoGradMode grad(true);
  at::Tensor weight = States(1).clone().requires_grad_(true);
  const at::Tensor k = States(1), v = States(1);
  for (int l = 0; l < kLayers; ++l) {
    auto full = cache->Update(k, v, l);
    ASSERT_TRUE(full.ok());
    at::mul(full->first.narrow(2, 0, 1), weight).sum().backward();  // saves what update returned
  }
  EXPECT_TRUE(weight.grad().defined());
}

TEST_F(CacheTest, ForkIsACacheOfItsOwn_B16) {
  for (const std::optional<int> resident : {std::optional<int>(), std::optional<int>(1)}) {
    auto cache = NewCache(Options(resident));
    CacheOracle oracle(kLayers);
    Forward(*cache, oracle, 10);
    auto fork = cache->Fork();
    ASSERT_TRUE(fork.ok());
    CacheOracle forked = oracle;
    for (int i = 0; i < 7; ++i) {
      Forward(*cache, oracle, 1);
      Forward(**fork, forked, 1);
    }
    cache.reset();
    ExpectSame(**fork, forked, kLayers);
    Forward(**fork, forked, 3);
  }
}

TEST_F(CacheTest, DeviceMemoryIsAHardBound) {
  CacheOptions options = Options();
  options.device_memory = 400'000;
  auto cache = NewCache(options);
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 5);
  EXPECT_EQ(connects_, 0);
  int least = kLayers;
  absl::Status refused;
  for (int i = 0; i < 500 && refused.ok(); ++i) {
    for (int l = 0; l < kLayers && refused.ok(); ++l) {
      const at::Tensor k = States(7), v = States(7);
      auto full = cache->Update(k, v, l);
      refused = full.status();
      if (!full.ok()) {
        EXPECT_EQ(l, 0);
        break;
      }
      const OracleLayer expected = oracle.Update(k, v, l);
      ASSERT_TRUE(SameBits(full->first, expected.k)) << "step " << i << " layer " << l;
      ASSERT_LE(cache->Stats().device_bytes_peak, 400'000u);
    }
    least = std::min(least, cache->Stats().resident_layers);
  }
  EXPECT_EQ(least, 0) << "layers left the device one by one";
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("device_memory is 400000"));
  ExpectSame(*cache, oracle, kLayers);  // as it was
  ASSERT_TRUE(cache->Crop(100).ok());
  oracle.Crop(100);
  Forward(*cache, oracle, 1);
}

// A view with a lazy negative or conjugate bit is what it stands for.
TEST_F(CacheTest, LazyBitsAreResolved) {
  auto cache = NewCache(Options(0));
  CacheOracle oracle(kLayers);
  for (const int64_t tokens : {9, 4, 1}) {
    for (int l = 0; l < kLayers; ++l) {
      const at::Tensor k = at::_neg_view(States(tokens)), v = at::_neg_view(States(tokens));
      auto full = cache->Update(k, v, l);
      ASSERT_TRUE(full.ok()) << full.status();
      const OracleLayer expected = oracle.Update(k.resolve_neg(), v.resolve_neg(), l);
      EXPECT_TRUE(SameBits(full->first, expected.k) && SameBits(full->second, expected.v)) << "layer " << l;
    }
  }
}

TEST_F(CacheTest, MoreBlocksThanOneCallReserves) {
  store_ = NewFaultyStore(512 * kMiB);
  CacheOptions options;
  options.layers = 1;
  options.block_tokens = 1;
  options.resident_layers = 0;
  auto cache = NewCache(options);
  const at::Tensor k = RandomStates(random_, 1, 1, kMaxChunksInCall + 500, 2);
  ASSERT_TRUE(cache->Update(k, k, 0).ok());
  EXPECT_EQ(cache->Stats().blocks_put, kMaxChunksInCall + 500u);
  const auto all = cache->Read(0);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_TRUE(SameBits(all->first, k.contiguous()));
}

TEST_F(CacheTest, EverythingIsGivenBack) {
  StoreOptions options;
  options.memory_bytes = 64 * kMiB;
  auto embedded = EmbeddedStore::Open(options);
  ASSERT_TRUE(embedded.ok()) << embedded.status();
  auto transport = NewLocalTransport(*embedded);
  ASSERT_TRUE(transport.ok()) << transport.status();
  store_ = std::make_shared<FaultyTransport>(*transport);
  const auto held = [&] {
    const StoreStats stats = (*embedded)->store().Stats();
    return stats.chunks_live + stats.chunks_reserved;
  };
  auto cache = NewCache(Options(0));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 33);
  EXPECT_EQ(held(), 2u * 8);
  auto fork = cache->Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  EXPECT_GT(cache->Stats().device_bytes, 0u);
  cache->Reset();
  EXPECT_EQ(cache->Stats().device_bytes, 0u);
  EXPECT_EQ(cache->Stats().stored_bytes, 0u);
  EXPECT_EQ(held(), 2u * 8) << "the fork's";
  fork->reset();
  EXPECT_EQ(held(), 0u);
  Forward(*cache, oracle = CacheOracle(kLayers), 5, 3);  // another batch
  ASSERT_TRUE(cache->SelectRows({1, 1, 0, 2}).ok());
  oracle.SelectRows({1, 1, 0, 2});
  Forward(*cache, oracle, 9, 4);
  ASSERT_TRUE(cache->Crop(10).ok());
  EXPECT_EQ(held(), 3u) << "the first block of three rows, one of them twice in the batch";
  cache = nullptr;
  EXPECT_EQ(held(), 0u);
}

TEST_F(CacheTest, BadInputNamesItselfAndChangesNothing) {
  auto cache = NewCache(Options(1));
  CacheOracle oracle(kLayers);
  Forward(*cache, oracle, 6);
  const at::Tensor good = States(1);
  const auto expect = [&](const at::Tensor& k, const at::Tensor& v, int layer, const std::string& what) {
    auto full = cache->Update(k, v, layer);
    ASSERT_FALSE(full.ok()) << what;
    EXPECT_EQ(full.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(full.status().message()), HasSubstr(what));
  };
  expect(good[0], good, 0, "key_states has shape [2, 1, 8], expected 4 dimensions");
  expect(good, good.narrow(2, 0, 0), 0, "value_states has shape [2, 2, 0, 8]");
  expect(good, good.narrow(0, 0, 1), 0, "expected the same batch");
  expect(good, States(2), 0, "expected the same tokens");
  expect(States(1, 3), States(1, 3), 0, "batch 3, expected 2");
  expect(good.to(c10::kHalf), good, 0, "key_states of layer 0 has dtype Half, expected Float");
  expect(good.narrow(1, 0, 1), good, 0, "heads 1, expected 2");
  expect(good, good.narrow(3, 0, 4), 0, "value_states of layer 0 has dim 4, expected 8");
  expect(good, good, kLayers, "layer_idx is 4, expected 0 to 3");
  expect(good, good, -1, "layer_idx is -1");
  expect(at::Tensor(), good, 0, "key_states is undefined");
  EXPECT_THAT(std::string(cache->SelectRows({0, 2}).message()), HasSubstr("row index is 2, expected 0 to 1"));
  EXPECT_THAT(std::string(cache->SelectRows({}).message()), HasSubstr("rows is empty"));
  EXPECT_THAT(std::string(cache->Crop(-1).message()), HasSubstr("crop by -1"));
  ExpectSame(*cache, oracle, kLayers);
  Forward(*cache, oracle, 1);
}

TEST_F(CacheTest, OptionsOutOfRangeAreNamed) {
  const auto message = [](const CacheOptions& options) { return std::string(Validate(options).message()); };
  CacheOptions options;
  EXPECT_TRUE(Validate(options).ok());
  options.block_tokens = 48;
  EXPECT_THAT(message(options), HasSubstr("block_tokens is 48, expected a power of two"));
  options = {};
  options.layers = 0;
  EXPECT_THAT(message(options), HasSubstr("layers is 0"));
  options = {};
  options.resident_layers = -1;
  EXPECT_THAT(message(options), HasSubstr("resident_layers is -1"));
  options = {};
  options.prefetch_depth = 65;
  EXPECT_THAT(message(options), HasSubstr("prefetch_depth is 65"));
  options = {};
  options.device_memory = 0;
  EXPECT_THAT(message(options), HasSubstr("device_memory is 0"));
}

TEST_F(CacheTest, CropFollowsTransformers_B01) {
  for (const std::optional<int> resident : {std::optional<int>(), std::optional<int>(0), std::optional<int>(2)}) {
    auto cache = NewCache(Options(resident, 2));
    CacheOracle oracle(kLayers);
    Forward(*cache, oracle, 3);
    ASSERT_TRUE(cache->Crop(0).ok());
    EXPECT_EQ(cache->SeqLength(0), 3);
    ASSERT_TRUE(cache->Crop(5).ok());
    oracle.Crop(5);
    for (int l = 0; l < kLayers; ++l) EXPECT_EQ(cache->SeqLength(l), 0);
    EXPECT_EQ(cache->Stats().stored_bytes, 0u);
    Forward(*cache, oracle, 1);
  }
}

}  // namespace
}  // namespace kvferry
