#include "tests/support/put_and_get.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "gtest/gtest.h"
#include "storage/base/checksum.h"
#include "storage/base/mutex.h"

namespace kvferry {

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

NamespaceSpec SpecOf(const std::vector<uint32_t>& block_bytes) {
  NamespaceSpec spec;
  spec.model = "contract";
  spec.dtype = "uint8";
  spec.dtype_bytes = 1;
  spec.block_tokens = 1;
  GroupSpec& group = spec.groups.emplace_back();
  for (const uint32_t bytes : block_bytes) {
    // One head of `bytes` elements, or several where that is too wide.
    constexpr uint32_t kWidest = 1 << 20;
    LayerSpec& layer = group.layers.emplace_back();
    if (bytes / kWidest > 0) layer.parts.push_back({bytes / kWidest, kWidest});
    if (bytes % kWidest > 0) layer.parts.push_back({1, bytes % kWidest});
  }
  return spec;
}

NamespaceId Open(Transport* transport, const NamespaceSpec& spec) {
  absl::StatusOr<NamespaceId> ns = transport->OpenNamespace(spec, Soon());
  EXPECT_TRUE(ns.ok()) << ns.status();
  return ns.value_or(NamespaceId{});
}

Id128 PrefixKey(uint64_t n) { return {0x1234, n}; }

std::vector<uint8_t> Pattern(uint64_t seed, uint64_t size) {
  std::vector<uint8_t> bytes(RoundUp(size, 8));
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (size_t i = 0; i < bytes.size(); i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const uint64_t word = state ^ (state >> 29);
    std::memcpy(&bytes[i], &word, 8);
  }
  bytes.resize(size);
  return bytes;
}

std::vector<uint8_t> Bytes(const BlockView& view) {
  std::vector<uint8_t> bytes(view.size());
  view.CopyTo(0, view.size(), bytes.data());
  return bytes;
}

namespace {

// The outcome of a commit, which may come on another thread.
class Acknowledgement {
 public:
  CommitDone Done() {
    return [this](absl::Status status) {
      MutexLock lock(&mu_);
      status_ = std::move(status);
      ++calls_;
      cv_.NotifyAll();
    };
  }

  absl::Status Wait() {
    MutexLock lock(&mu_);
    while (calls_ == 0) {
      if (cv_.WaitUntil(&mu_, Soon())) return absl::DeadlineExceededError("no acknowledgement");
    }
    return status_;
  }

 private:
  Mutex mu_;
  CondVar cv_;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

absl::Status Put(ChunkWriter* writer, int layer, uint64_t seed) {
  const MutableByteView slot = writer->Layer(layer);
  const std::vector<uint8_t> bytes = Pattern(seed, slot.size());
  std::copy(bytes.begin(), bytes.end(), slot.begin());
  Acknowledgement ack;
  writer->Commit(layer, BlockChecksum(slot), ack.Done());
  return ack.Wait();
}

std::unique_ptr<ChunkWriter> ReserveOne(Transport* transport, const NamespaceId& ns) {
  ReserveRequest request;
  request.ns = ns;
  auto writers = transport->Reserve(request, Soon());
  if (!writers.ok()) {
    ADD_FAILURE() << writers.status();
    return nullptr;
  }
  return std::move(writers->front());
}

ChunkKey PutChunk(Transport* transport, const NamespaceId& ns, int layers, uint64_t seed) {
  std::unique_ptr<ChunkWriter> writer = ReserveOne(transport, ns);
  if (writer == nullptr) return {};
  for (int layer = 0; layer < layers; ++layer) {
    const absl::Status status = Put(writer.get(), layer, seed + static_cast<uint64_t>(layer));
    EXPECT_TRUE(status.ok()) << status;
    writer->Discard(layer);
  }
  return writer->key();
}

absl::StatusOr<BlockView> GetOne(Transport* transport, const BlockKey& key) {
  return transport->Fetch({key}, Soon())->Next();
}

void AwaitMiss(Transport* transport, const BlockKey& key) {
  const absl::Time deadline = Soon();
  while (absl::Now() < deadline) {
    const absl::Status status = GetOne(transport, key).status();
    if (absl::IsNotFound(status)) return;
    ASSERT_TRUE(status.ok()) << status;
    std::this_thread::yield();
  }
  FAIL() << ToString(key) << " is still there";
}

}  // namespace kvferry
