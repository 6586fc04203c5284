#include "tests/cache/cache_oracle.h"

#include <cstring>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "gtest/gtest.h"

namespace kvferry {

OracleLayer CacheOracle::Update(const at::Tensor& k, const at::Tensor& v, int layer) {
  OracleLayer& held = layers_[static_cast<size_t>(layer)];
  held.k = held.k.defined() ? at::cat({held.k, k}, 2) : k.contiguous();
  held.v = held.v.defined() ? at::cat({held.v, v}, 2) : v.contiguous();
  return held;
}

void CacheOracle::Crop(int64_t n) {
  for (OracleLayer& held : layers_) {
    if (!held.k.defined() || n == 0) continue;
    const int64_t length = std::max<int64_t>(0, held.k.size(2) - n);
    held = length == 0 ? OracleLayer{} : OracleLayer{held.k.narrow(2, 0, length), held.v.narrow(2, 0, length)};
  }
}

void CacheOracle::SelectRows(const std::vector<int64_t>& rows) {
  at::Tensor index = at::empty({static_cast<int64_t>(rows.size())}, at::TensorOptions(c10::kLong));
  std::memcpy(index.data_ptr(), rows.data(), rows.size() * sizeof(int64_t));
  for (OracleLayer& held : layers_) {
    if (held.k.defined()) held = {held.k.index_select(0, index), held.v.index_select(0, index)};
  }
}

void CacheOracle::Reset() {
  for (OracleLayer& held : layers_) held = {};
}

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), static_cast<size_t>(x.nbytes())) == 0;
}

at::Tensor RandomStates(std::mt19937_64& random, int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
                        c10::ScalarType type) {
  at::Tensor t = at::empty({batch, tokens, heads, dim}, at::TensorOptions(type));
  auto* bytes = static_cast<uint8_t*>(t.data_ptr());
  for (size_t i = 0; i < static_cast<size_t>(t.nbytes()); ++i) bytes[i] = static_cast<uint8_t>(random());
  return t.transpose(1, 2);
}

std::shared_ptr<FaultyTransport> NewFaultyStore(uint64_t memory_bytes) {
  ConnectOptions options;
  options.memory_bytes = memory_bytes;
  absl::StatusOr<std::shared_ptr<Transport>> transport = Connect("embedded://", options);
  EXPECT_TRUE(transport.ok()) << transport.status();
  return std::make_shared<FaultyTransport>(*transport);
}

TransportProvider Provide(std::shared_ptr<Transport> transport) {
  return [transport = std::move(transport)]() -> absl::StatusOr<std::shared_ptr<Transport>> { return transport; };
}

void ExpectSame(Cache& cache, const CacheOracle& oracle, int layers) {
  for (int l = 0; l < layers; ++l) {
    const OracleLayer& expected = oracle.layer(l);
    ASSERT_EQ(cache.SeqLength(l), expected.k.defined() ? expected.k.size(2) : 0) << "layer " << l;
    absl::StatusOr<std::pair<at::Tensor, at::Tensor>> read = cache.Read(l);
    ASSERT_TRUE(read.ok()) << read.status();
    if (!expected.k.defined()) {
      EXPECT_FALSE(read->first.defined());
      continue;
    }
    ASSERT_TRUE(SameBits(read->first, expected.k)) << "keys of layer " << l;
    ASSERT_TRUE(SameBits(read->second, expected.v)) << "values of layer " << l;
  }
}

}  // namespace kvferry
