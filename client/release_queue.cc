#include "client/release_queue.h"

#include <algorithm>
#include <utility>

namespace kvferry {

void ReleaseQueue::Push(absl::Span<const ChunkKey> keys) {
  MutexLock lock(&mu_);
  waiting_.insert(waiting_.end(), keys.begin(), keys.end());
}

std::vector<ChunkKey> ReleaseQueue::Take(size_t limit) {
  MutexLock lock(&mu_);
  const auto end = waiting_.begin() + static_cast<ptrdiff_t>(std::min(limit, waiting_.size()));
  std::vector<ChunkKey> batch(waiting_.begin(), end);
  waiting_.erase(waiting_.begin(), end);
  std::copy_if(batch.begin(), batch.end(), std::back_inserter(since_heartbeat_),
               [](const ChunkKey& key) { return key.IsLive(); });
  return batch;
}

bool ReleaseQueue::empty() const {
  MutexLock lock(&mu_);
  return waiting_.empty();
}

void ReleaseQueue::HeartbeatSent() {
  MutexLock lock(&mu_);
  sent_.push_back(std::exchange(since_heartbeat_, {}));
}

void ReleaseQueue::HeartbeatAnswered() {
  MutexLock lock(&mu_);
  if (!sent_.empty()) sent_.pop_front();
}

void ReleaseQueue::Resumed() {
  MutexLock lock(&mu_);
  for (const std::vector<ChunkKey>& batch : sent_) waiting_.insert(waiting_.end(), batch.begin(), batch.end());
  waiting_.insert(waiting_.end(), since_heartbeat_.begin(), since_heartbeat_.end());
  sent_.clear();
  since_heartbeat_.clear();
}

void ReleaseQueue::SessionLost() {
  MutexLock lock(&mu_);
  waiting_.clear();
  sent_.clear();
  since_heartbeat_.clear();
}

}  // namespace kvferry
