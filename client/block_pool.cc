#include "client/block_pool.h"

#include <algorithm>
#include <new>
#include <utility>

namespace kvferry {
namespace {

constexpr std::align_val_t kAlign{BlockPool::kAlignment};

}  // namespace

BlockPool::~BlockPool() {
  MutexLock lock(&mu_);
  for (auto& [capacity, buffers] : free_) {
    for (uint8_t* buffer : buffers) ::operator delete(buffer, kAlign);
  }
}

std::shared_ptr<uint8_t[]> BlockPool::Take(uint64_t size) {
  const uint64_t capacity = RoundUp(std::max<uint64_t>(size, 1), kAlignment);
  uint8_t* buffer = nullptr;
  {
    MutexLock lock(&mu_);
    if (auto it = free_.find(capacity); it != free_.end() && !it->second.empty()) {
      buffer = it->second.back();  // the one used last: most likely still in a cache
      it->second.pop_back();
      kept_ -= capacity;
    }
  }
  if (buffer == nullptr) buffer = static_cast<uint8_t*>(::operator new(capacity, kAlign));
  return std::shared_ptr<uint8_t[]>(
      buffer, [pool = shared_from_this(), capacity](uint8_t* returned) { pool->Return(returned, capacity); });
}

uint64_t BlockPool::kept_bytes() const {
  MutexLock lock(&mu_);
  return kept_;
}

void BlockPool::Return(uint8_t* buffer, uint64_t capacity) {
  if (fork_.forked()) return;  // the lock may be held by a thread that is not here
  {
    MutexLock lock(&mu_);
    if (kept_ + capacity <= limit_) {
      free_[capacity].push_back(buffer);
      kept_ += capacity;
      return;
    }
  }
  ::operator delete(buffer, kAlign);
}

}  // namespace kvferry
