#include "client/cache/cached_chunk.h"

#include <algorithm>
#include <utility>

#include "client/interrupt.h"

namespace kvferry {

PutTracker::Put PutTracker::Start(int layer, uint64_t bytes) {
  MutexLock lock(&mu_);
  const auto l = static_cast<size_t>(layer);
  if (pending_.size() <= l) {
    pending_.resize(l + 1);
    held_.resize(l + 1);
    failed_.resize(l + 1);
  }
  ++pending_[l];
  ++held_[l];
  bytes_held_ += bytes;
  return {layer, bytes, sequence_};
}

void PutTracker::Finish(const Put& put, const absl::Status& status) {
  MutexLock lock(&mu_);
  --pending_[static_cast<size_t>(put.layer)];
  if (!status.ok()) --held_[static_cast<size_t>(put.layer)];
  if (status.ok()) {
    ++blocks_put_;
    bytes_put_ += put.bytes;
  } else if (put.sequence == sequence_) {
    ++failed_[static_cast<size_t>(put.layer)];
    bytes_failed_ += put.bytes;
    last_error_ = status;
  }
  changed_.NotifyAll();
}

void PutTracker::Drop(const Put& put, bool failed) {
  MutexLock lock(&mu_);
  bytes_held_ -= put.bytes;
  if (!failed) --held_[static_cast<size_t>(put.layer)];
  if (!failed || put.sequence != sequence_) return;
  --failed_[static_cast<size_t>(put.layer)];
  bytes_failed_ -= put.bytes;
  if (bytes_failed_ == 0) last_error_ = absl::OkStatus();
}

void PutTracker::StartSequence() {
  MutexLock lock(&mu_);
  ++sequence_;
  failed_.assign(failed_.size(), 0);
  bytes_failed_ = 0;
  last_error_ = absl::OkStatus();
}

void PutTracker::AddAcknowledged(std::weak_ptr<CachedChunk> chunk, int layer) {
  MutexLock lock(&mu_);
  acknowledged_.emplace_back(std::move(chunk), layer);
}

std::vector<std::pair<std::weak_ptr<CachedChunk>, int>> PutTracker::TakeAcknowledged() {
  MutexLock lock(&mu_);
  return std::exchange(acknowledged_, {});
}

int PutTracker::PendingLayersLocked(int except) const {
  int layers = 0;
  for (size_t l = 0; l < pending_.size(); ++l) layers += pending_[l] > 0 && static_cast<int>(l) != except ? 1 : 0;
  return layers;
}

absl::Status PutTracker::WaitForLayers(int limit, int except, absl::Time deadline) {
  MutexLock lock(&mu_);
  while (PendingLayersLocked(except) > limit) {
    if (WaitUntil(changed_, &mu_, deadline) && PendingLayersLocked(except) > limit) {
      return absl::DeadlineExceededError("the store did not acknowledge the blocks of earlier layers in time");
    }
  }
  return absl::OkStatus();
}

bool PutTracker::Holds(int layer) const {
  MutexLock lock(&mu_);
  const auto l = static_cast<size_t>(layer);
  return l < held_.size() && held_[l] + failed_[l] > 0;
}

int PutTracker::HeldLayers(int except) const {
  MutexLock lock(&mu_);
  int layers = 0;
  for (size_t l = 0; l < held_.size(); ++l) layers += held_[l] > 0 && static_cast<int>(l) != except ? 1 : 0;
  return layers;
}

uint64_t PutTracker::blocks_put() const {
  MutexLock lock(&mu_);
  return blocks_put_;
}

uint64_t PutTracker::bytes_put() const {
  MutexLock lock(&mu_);
  return bytes_put_;
}

uint64_t PutTracker::bytes_failed() const {
  MutexLock lock(&mu_);
  return bytes_failed_;
}

uint64_t PutTracker::bytes_held() const {
  MutexLock lock(&mu_);
  return bytes_held_;
}

absl::Status PutTracker::last_error() const {
  MutexLock lock(&mu_);
  return last_error_;
}

struct CachedChunk::Acks {
  explicit Acks(int layers)
      : state(static_cast<size_t>(layers)), puts(static_cast<size_t>(layers)), trackers(static_cast<size_t>(layers)) {}
  std::vector<std::atomic<uint8_t>> state;  // of State, by layer
  // By layer, set at commit.
  std::vector<PutTracker::Put> puts;
  std::vector<std::shared_ptr<PutTracker>> trackers;
};

CachedChunk::CachedChunk(std::shared_ptr<Transport> transport, uint64_t epoch, std::unique_ptr<ChunkWriter> writer,
                         int layers)
    : transport_(std::move(transport)),
      epoch_(epoch),
      key_(writer->key()),
      writer_(std::move(writer)),
      acks_(std::make_shared<Acks>(layers)) {}

CachedChunk::CachedChunk(std::shared_ptr<Transport> transport, uint64_t epoch, const ChunkKey& key,
                         const std::vector<uint64_t>& bytes)
    : transport_(std::move(transport)),
      epoch_(epoch),
      key_(key),
      acks_(std::make_shared<Acks>(static_cast<int>(bytes.size()))) {
  for (size_t l = 0; l < bytes.size(); ++l) {
    acks_->state[l] = kDiscarded;
    acks_->puts[l] = {static_cast<int>(l), bytes[l], 0};
  }
}

CachedChunk::~CachedChunk() {
  for (size_t l = 0; l < acks_->state.size(); ++l) {
    const uint8_t was = acks_->state[l].exchange(kGone);
    if (was == kAcknowledged || was == kFailed) acks_->trackers[l]->Drop(acks_->puts[l], was == kFailed);
  }
  transport_->Release({key_}, epoch_);
}

bool CachedChunk::Claim(int layer) {
  uint8_t expected = kReserved;
  return acks_->state[static_cast<size_t>(layer)].compare_exchange_strong(expected, kClaimed);
}

void CachedChunk::Commit(int layer, BlockSum sum, const std::shared_ptr<PutTracker>& tracker) {
  const auto l = static_cast<size_t>(layer);
  acks_->trackers[l] = tracker;
  acks_->puts[l] = tracker->Start(layer, writer_->Layer(layer).size());
  acks_->state[l].store(kPending, std::memory_order_relaxed);
  writer_->Commit(layer, sum, [weak = weak_from_this(), acks = acks_, l](absl::Status status) {
    PutTracker& tracker = *acks->trackers[l];
    uint8_t now = kPending;
    if (status.ok()) {  // whoever waits for Finish finds the block given back, or to be discarded
      acks->state[l].compare_exchange_strong(now, kAcknowledged);
      now == kGone ? tracker.Drop(acks->puts[l], /*failed=*/false) : tracker.AddAcknowledged(weak, static_cast<int>(l));
      tracker.Finish(acks->puts[l], status);
    } else {  // what failed is counted before anybody can drop it
      tracker.Finish(acks->puts[l], status);
      acks->state[l].compare_exchange_strong(now, kFailed);
      if (now == kGone) tracker.Drop(acks->puts[l], /*failed=*/true);
    }
  });
}

bool CachedChunk::Whole() const {
  return std::all_of(acks_->state.begin(), acks_->state.end(), [](const std::atomic<uint8_t>& state) {
    const uint8_t now = state.load(std::memory_order_acquire);
    return now == kAcknowledged || now == kDiscarded;
  });
}

bool CachedChunk::Stored(int layer) {
  const auto l = static_cast<size_t>(layer);
  uint8_t now = acks_->state[l].load(std::memory_order_acquire);
  if (now != kAcknowledged) return now == kDiscarded;
  if (!acks_->state[l].compare_exchange_strong(now, kDiscarded)) return now == kDiscarded;
  writer_->Discard(layer);  // one of the forks that share the chunk comes here
  acks_->trackers[l]->Drop(acks_->puts[l], /*failed=*/false);
  return true;
}

BlockView CachedChunk::Local(int layer) { return BlockView({ByteView(writer_->Layer(layer))}, 0, nullptr); }

uint64_t CachedChunk::Bytes(int layer) const { return acks_->puts[static_cast<size_t>(layer)].bytes; }

uint64_t CachedChunk::StoredBytes() const {
  uint64_t bytes = 0;
  for (size_t l = 0; l < acks_->state.size(); ++l) {
    const uint8_t now = acks_->state[l].load(std::memory_order_acquire);
    if (now == kAcknowledged || now == kDiscarded) bytes += acks_->puts[l].bytes;
  }
  return bytes;
}

}  // namespace kvferry
