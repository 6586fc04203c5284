#include "client/release_queue.h"

#include <algorithm>
#include <utility>

namespace kvferry {

void ReleaseQueue::Push(absl::Span<const ChunkKey> keys, uint64_t epoch) {
  MutexLock lock(&mu_);
  if (epoch != epoch_) return;
  for (const ChunkKey& key : keys) {
    if (puts_.contains(key)) {
      held_back_.insert(key);
    } else {
      waiting_.push_back(key);
    }
  }
}

void ReleaseQueue::PutStarted(const ChunkKey& chunk) {
  MutexLock lock(&mu_);
  ++puts_[chunk];
}

bool ReleaseQueue::PutDone(const ChunkKey& chunk) {
  MutexLock lock(&mu_);
  const auto it = puts_.find(chunk);
  if (--it->second > 0) return false;
  puts_.erase(it);
  if (held_back_.erase(chunk) == 0) return false;
  waiting_.push_back(chunk);
  return true;
}

std::optional<ReleaseQueue::Batch> ReleaseQueue::Next(size_t limit) {
  MutexLock lock(&mu_);
  if (sent_ == unconfirmed_.size()) {
    if (waiting_.empty()) return std::nullopt;
    const auto end = waiting_.begin() + static_cast<ptrdiff_t>(std::min(limit, waiting_.size()));
    unconfirmed_.push_back({++last_seq_, {waiting_.begin(), end}});
    waiting_.erase(waiting_.begin(), end);
  }
  return unconfirmed_[sent_++];
}

void ReleaseQueue::Confirmed(uint64_t seq) {
  MutexLock lock(&mu_);
  ConfirmedLocked(seq);
}

void ReleaseQueue::ConfirmedLocked(uint64_t seq) {
  while (!unconfirmed_.empty() && unconfirmed_.front().seq <= seq) {
    unconfirmed_.pop_front();
    if (sent_ > 0) --sent_;
  }
}

void ReleaseQueue::Resumed(uint64_t seq) {
  MutexLock lock(&mu_);
  ConfirmedLocked(seq);
  sent_ = 0;
}

void ReleaseQueue::SessionLost(uint64_t epoch) {
  MutexLock lock(&mu_);
  epoch_ = epoch;
  waiting_.clear();
  unconfirmed_.clear();
  held_back_.clear();
  sent_ = 0;
  last_seq_ = 0;
}

}  // namespace kvferry
