#include "service/reserved_chunk.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

ReservedChunk::ReservedChunk(std::unique_ptr<ChunkWriter> writer, std::shared_ptr<const ChunkLayout> layout)
    : writer_(std::move(writer)), layout_(std::move(layout)), layers_(layout_->slots.size()) {}

absl::StatusOr<MutableByteView> ReservedChunk::Claim(int layer) {
  {
    MutexLock lock(&mu_);
    if (layer < 0 || static_cast<size_t>(layer) >= layers_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer is ", layer, ", expected 0 to ", layers_.size() - 1, " in chunk ", ToString(key())));
    }
    LayerState& state = layers_[layer];
    if (state.state == State::kStored) {
      return absl::AlreadyExistsError(
          absl::StrCat("layer ", layer, " of chunk ", ToString(key()), " is stored already"));
    }
    if (state.state != State::kFree) {
      return absl::AbortedError(
          absl::StrCat("layer ", layer, " of chunk ", ToString(key()), " is being written by another stream"));
    }
    state.state = State::kClaimed;
    touched_ = true;
  }
  return writer_->Layer(layer);
}

void ReservedChunk::Unclaim(int layer) {
  MutexLock lock(&mu_);
  layers_[layer].state = State::kFree;
}

void ReservedChunk::Commit(std::shared_ptr<ReservedChunk> chunk, int layer, BlockSum sum, CommitDone done) {
  const std::shared_ptr<ReservedChunk> self = chunk;  // `done` may drop the last other one while the writer still runs
  {
    MutexLock lock(&self->mu_);
    self->layers_[layer].state = State::kCommitting;
  }
  self->writer_->Commit(
      layer, sum,
      [chunk = std::move(chunk), layer, checksum = sum.checksum, done = std::move(done)](absl::Status status) mutable {
        chunk->Committed(layer, checksum, status.ok());
        done(std::move(status));
      });
}

void ReservedChunk::Committed(int layer, uint64_t checksum, bool ok) {
  MutexLock lock(&mu_);
  layers_[layer] = ok ? LayerState{State::kStored, checksum} : LayerState{};
  if (ok) ++stored_;
}

uint64_t ReservedChunk::StoredChecksum(int layer) const {
  MutexLock lock(&mu_);
  return layers_[layer].state == State::kStored ? layers_[layer].checksum : 0;
}

bool ReservedChunk::sealed() const {
  MutexLock lock(&mu_);
  return stored_ == layers_.size();
}

bool ReservedChunk::untouched() const {
  MutexLock lock(&mu_);
  return !touched_;
}

}  // namespace kvferry
