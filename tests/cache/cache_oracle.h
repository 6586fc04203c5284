// What transformers' DynamicCache computes, in the tensor library's own words: concatenate, narrow, select. The caches
// are compared with it bit for bit.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "ATen/core/TensorBody.h"
#include "client/cache/cache.h"
#include "client/transport.h"
#include "tests/support/faulty_transport.h"

namespace kvferry {

struct OracleLayer {
  at::Tensor k, v;  // undefined: empty
};

class CacheOracle {
 public:
  explicit CacheOracle(int layers) : layers_(static_cast<size_t>(layers)) {}

  OracleLayer Update(const at::Tensor& k, const at::Tensor& v, int layer);
  void Crop(int64_t n);
  void SelectRows(const std::vector<int64_t>& rows);
  void Reset();
  const OracleLayer& layer(int l) const { return layers_[static_cast<size_t>(l)]; }

 private:
  std::vector<OracleLayer> layers_;
};

// Same shape, dtype and bits (NaN equals itself).
bool SameBits(const at::Tensor& a, const at::Tensor& b);

// [batch, heads, tokens, dim] of random bits, a transposed view of [batch, tokens, heads, dim] as models make them.
at::Tensor RandomStates(std::mt19937_64& random, int64_t batch, int64_t heads, int64_t tokens, int64_t dim,
                        c10::ScalarType type = c10::kFloat);

// A fresh embedded store behind a transport that can be made to misbehave.
std::shared_ptr<FaultyTransport> NewFaultyStore(uint64_t memory_bytes = 64 * kMiB);
TransportProvider Provide(std::shared_ptr<Transport> transport);

// Asserts that every layer the cache holds reads as the oracle's.
void ExpectSame(Cache& cache, const CacheOracle& oracle, int layers);

}  // namespace kvferry
