// Memory that a transport lends for packing, used again instead of being mapped and faulted in anew.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "client/fork_guard.h"
#include "storage/base/bytes.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Buffers of equal size are kept for the next taker, up to `kept_bytes` in all. Thread-safe.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  static constexpr uint64_t kAlignment = 64;

  static std::shared_ptr<BlockPool> Create(uint64_t kept_bytes) {
    return std::shared_ptr<BlockPool>(new BlockPool(kept_bytes));
  }
  ~BlockPool();

  // `size` bytes aligned to kAlignment, unspecified at first. They come back when the last share goes.
  std::shared_ptr<uint8_t[]> Take(uint64_t size);

  uint64_t kept_bytes() const;

 private:
  explicit BlockPool(uint64_t limit) : limit_(limit) {}
  void Return(uint8_t* buffer, uint64_t capacity);

  const uint64_t limit_;
  const ForkGuard fork_;
  mutable Mutex mu_;
  absl::flat_hash_map<uint64_t, std::vector<uint8_t*>> free_ ABSL_GUARDED_BY(mu_);  // by capacity
  uint64_t kept_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvferry
