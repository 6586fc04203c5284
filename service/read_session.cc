#include "service/read_session.h"

#include <algorithm>
#include <utility>

namespace kvferry {
namespace {

constexpr size_t kMaxSlots = 4096;  // blocks read ahead, whatever their size

}  // namespace

ReadSession::ReadSession(Store* store, SessionId session, std::vector<absl::StatusOr<BlockKey>> keys, uint64_t window,
                         ServiceStats* stats, std::function<void()> on_ready)
    : store_(store),
      session_(session),
      keys_(std::move(keys)),
      window_(window == 0 ? kDefaultWindow : std::min(window, kMaxWindow)),
      stats_(stats),
      on_ready_(std::move(on_ready)),
      ahead_(keys_.size()) {}

void ReadSession::Fill() {
  filling_.Kick([this] { FillAsFarAsItGoes(); });
}

void ReadSession::FillAsFarAsItGoes() {
  size_t index;
  while (TakeNextKey(&index)) {
    const absl::StatusOr<BlockKey>& key = keys_[index];
    if (!key.ok()) {
      Arrived(index, key.status());
      continue;
    }
    store_->Get(session_, *key, given_up_, [self = shared_from_this(), index](absl::StatusOr<BlockView> view) {
      self->Arrived(index, std::move(view));
    });
    if (!hints_are_of_use_) continue;
    const std::vector<ChunkKey> hints =
        ahead_.Reach(index, [this](size_t i) { return keys_[i].ok() ? &keys_[i]->chunk : nullptr; });
    if (!hints.empty()) hints_are_of_use_ = store_->Prefetch(session_, hints, given_up_);
  }
}

// Claims the next key if the window has room for it. While one is waited for nothing behind it is: blocks that cannot
// be sent yet would keep the memory that it waits for.
bool ReadSession::TakeNextKey(size_t* index) {
  MutexLock lock(&mu_);
  const bool room = slots_.empty() || (!waiting_ && held_ < window_ && slots_.size() < kMaxSlots);
  if (cancelled_ || next_ == keys_.size() || !room) return false;
  *index = next_++;
  slots_.emplace_back();
  waiting_ = true;
  return true;
}

void ReadSession::Arrived(size_t index, absl::StatusOr<BlockView> view) {
  bool notify;
  {
    MutexLock lock(&mu_);
    waiting_ = false;
    if (cancelled_) return;
    Slot& slot = slots_[index - first_];
    slot.arrived = true;
    if (view.ok()) {
      slot.view = *std::move(view);
      held_ += slot.view.size();
      stats_->get_bytes_held += slot.view.size();
    } else {
      slot.status = view.status();
    }
    notify = index == first_;
  }
  if (notify) on_ready_();
  Fill();
}

std::vector<GetPiece> ReadSession::Next(uint64_t max_bytes) {
  std::vector<GetPiece> batch;
  uint64_t room = max_bytes;
  {
    MutexLock lock(&mu_);
    while (!slots_.empty() && slots_.front().arrived && batch.size() < kMaxPiecesInBatch) {
      Slot& slot = slots_.front();
      const uint64_t left = slot.view.size() - slot.given;
      if (left > room && room < max_bytes) break;  // begins the next message
      GetPiece& piece = batch.emplace_back();
      piece.index = static_cast<uint32_t>(first_);
      piece.status = slot.status;
      piece.offset = slot.given;
      piece.size = std::min(left, room);
      room -= piece.size;
      slot.given += piece.size;
      if (slot.given < slot.view.size()) {
        piece.view = slot.view;
        break;
      }
      if (slot.status.ok()) {
        ++stats_->get_blocks;
        stats_->get_bytes += slot.view.size();
      }
      piece.view = std::move(slot.view);
      slots_.pop_front();
      ++first_;
      if (room == 0) break;
    }
  }
  if (!batch.empty()) Fill();
  return batch;
}

void ReadSession::Consumed(uint64_t bytes) {
  {
    MutexLock lock(&mu_);
    bytes = std::min(held_, bytes);
    held_ -= bytes;
    stats_->get_bytes_held -= bytes;
  }
  Fill();
}

bool ReadSession::done() const {
  MutexLock lock(&mu_);
  return first_ == keys_.size();
}

void ReadSession::Cancel() {
  *given_up_ = true;
  std::deque<Slot> dropped;  // their pins go after the lock
  MutexLock lock(&mu_);
  cancelled_ = true;
  dropped.swap(slots_);
  first_ = next_ = keys_.size();
  stats_->get_bytes_held -= std::exchange(held_, 0);
}

}  // namespace kvferry
