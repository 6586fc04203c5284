// Random operations on a cache and on what DynamicCache would do, over every way blocks travel.

#include <random>

#include "gtest/gtest.h"
#include "tests/cache/cache_oracle.h"
#include "tests/support/seeds.h"

namespace kvferry {
namespace {

struct Plane {
  const char* name;
  bool copies;
  bool late_acks;
};

class CachePropertyTest : public testing::TestWithParam<Plane> {};

struct Subject {
  std::unique_ptr<Cache> cache;
  CacheOracle oracle;
};

// Shapes of one run, drawn at random.
struct Shape {
  int layers, batch;
  c10::ScalarType type;
  std::vector<std::array<int64_t, 3>> heads_dims;  // by layer: heads, dim of K, dim of V
  CacheOptions options;
};

Shape RandomShape(std::mt19937_64& random, bool copies) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  Shape shape;
  shape.layers = 1 + below(5);
  shape.batch = 1 + below(3);
  shape.type = below(2) == 0 ? c10::kFloat : c10::kBFloat16;
  const bool uniform = below(4) != 0;
  for (int l = 0; l < shape.layers; ++l) {
    const std::array<int64_t, 3> drawn = {1 + below(3), 4 * (1 + below(4)), 4 * (1 + below(4))};
    shape.heads_dims.push_back(uniform && l > 0 ? shape.heads_dims[0] : drawn);
  }
  shape.options.block_tokens = 1 << below(5);
  if (below(3) != 0) shape.options.layers = shape.layers;
  if (below(3) != 0) shape.options.resident_layers = below(shape.layers + 2);
  if (below(3) == 0) shape.options.device_memory = 50'000 + random() % 1'000'000;
  if (copies && below(2) == 0) shape.options.prefetch_depth = below(4);
  return shape;
}

std::vector<int64_t> RandomRows(std::mt19937_64& random, int64_t batch) {
  std::vector<int64_t> rows(1 + random() % 4);
  for (int64_t& row : rows) row = static_cast<int64_t>(random() % static_cast<uint64_t>(batch));
  return rows;
}

// One forward pass; false if the bound is too small for it, and then nothing has changed.
bool Forward(std::mt19937_64& random, const Shape& shape, Subject& subject, bool first) {
  const int64_t batch = subject.cache->batch() == 0 ? shape.batch : subject.cache->batch();
  const auto t = static_cast<uint64_t>(shape.options.block_tokens);
  const auto tokens = static_cast<int64_t>(random() % 3 == 0 ? 1 + random() % (3 * t) : 1);
  for (int l = 0; l < shape.layers; ++l) {
    const auto [heads, k_dim, v_dim] = shape.heads_dims[static_cast<size_t>(l)];
    const at::Tensor k = RandomStates(random, batch, heads, tokens, k_dim, shape.type);
    const at::Tensor v = RandomStates(random, batch, heads, tokens, v_dim, shape.type);
    absl::StatusOr<std::pair<at::Tensor, at::Tensor>> full = subject.cache->Update(k, v, l);
    if (!full.ok()) {
      EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted) << full.status();
      EXPECT_EQ(l, 0) << "refused in the middle of a forward pass: " << full.status();
      return false;
    }
    const OracleLayer expected = subject.oracle.Update(k, v, l);
    EXPECT_TRUE(SameBits(full->first, expected.k)) << "keys, layer " << l;
    EXPECT_TRUE(SameBits(full->second, expected.v)) << "values, layer " << l;
    const CacheStats stats = subject.cache->Stats();
    const bool learning = first && (!shape.options.layers || stats.relearned > 0);
    if (learning || stats.refused > 0) continue;
    EXPECT_LE(stats.layers_on_device, stats.resident_layers + stats.prefetch_depth + 1) << "layer " << l;
  }
  return true;
}

TEST_P(CachePropertyTest, EqualsDynamicCache) {
  const uint64_t seed = Seeds(1).first;
  std::mt19937_64 random(seed);
  for (int run = 0; run < 150; ++run) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << " run " << run);
    const Shape shape = RandomShape(random, GetParam().copies);
    auto transport = NewFaultyStore();
    transport->copies = GetParam().copies;
    transport->late_acks = GetParam().late_acks;
    auto created = Cache::Create(shape.options, Provide(transport));
    ASSERT_TRUE(created.ok()) << created.status();
    std::vector<Subject> subjects;
    subjects.push_back({*std::move(created), CacheOracle(shape.layers)});
    for (int step = 0; step < 40; ++step) {
      Subject& subject = subjects[random() % subjects.size()];
      const bool empty = subject.cache->SeqLength(0) == 0;
      switch (empty ? 0 : random() % 10) {
        case 6: {
          const auto n = static_cast<int64_t>(random() % static_cast<uint64_t>(subject.cache->SeqLength(0) + 3));
          ASSERT_TRUE(subject.cache->Crop(n).ok());
          subject.oracle.Crop(n);
          break;
        }
        case 7: {
          const std::vector<int64_t> rows = RandomRows(random, subject.cache->batch());
          const absl::Status status = subject.cache->SelectRows(rows);
          if (status.ok()) {
            subject.oracle.SelectRows(rows);
          } else {
            ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
          }
          break;
        }
        case 8: {
          if (subjects.size() > 2) break;
          auto fork = subject.cache->Fork();
          ASSERT_TRUE(fork.ok()) << fork.status();
          Subject copy{*std::move(fork), subject.oracle};
          subjects.push_back(std::move(copy));
          break;
        }
        case 9:
          if (random() % 4 == 0) {
            subject.cache->Reset();
            subject.oracle.Reset();
          } else {
            ExpectSame(*subject.cache, subject.oracle, shape.layers);
          }
          break;
        default:
          Forward(random, shape, subject, empty);
      }
      if (HasFailure()) return;
      const CacheStats stats = subjects[0].cache->Stats();
      if (shape.options.device_memory && shape.options.layers && stats.relearned == 0 && subjects.size() == 1) {
        ASSERT_LE(stats.device_bytes_peak, *shape.options.device_memory) << "step " << step;
      }
    }
    for (Subject& subject : subjects) ExpectSame(*subject.cache, subject.oracle, shape.layers);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Planes, CachePropertyTest,
                         testing::Values(Plane{"views", false, false}, Plane{"copies", true, false},
                                         Plane{"late_acks", true, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace kvferry
