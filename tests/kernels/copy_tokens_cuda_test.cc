#include <random>

#include "gtest/gtest.h"
#include "kernels/cuda/copy_tokens.h"
#include "tests/kernels/copy_tokens_cases.h"

namespace kvferry {
namespace {

// Device memory that is freed with its scope.
class DeviceBytes {
 public:
  explicit DeviceBytes(const std::vector<uint8_t>& from) : size_(from.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, from.data(), size_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> bytes(size_);
    EXPECT_EQ(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost), cudaSuccess);
    return bytes;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

TEST(CopyTokensCudaTest, EqualsReferenceForRandomStrides_B76) {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) GTEST_SKIP() << "no CUDA device: " << cudaGetErrorString(found);
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 500; ++i) {
    CopyCase c = RandomCopyCase(random);
    std::vector<uint8_t> expected = c.target;
    CopyTokensRef(c.From(c.source.data()), c.To(expected.data()), c.extent);
    DeviceBytes source(c.source), target(c.target);
    ASSERT_EQ(CopyTokensCuda(c.From(source.data()), c.To(target.data()), c.extent, nullptr), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    ASSERT_EQ(target.Read(), expected) << "case " << i;
  }
}

}  // namespace
}  // namespace kvferry
