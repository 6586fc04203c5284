#include "client/grpc_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/store_error.h"

namespace kvferry {

GrpcWriter::GrpcWriter(std::shared_ptr<GrpcCore> core, std::shared_ptr<const KnownNamespace> known, const ChunkKey& key)
    : core_(std::move(core)),
      known_(std::move(known)),
      key_(key),
      layout_(known_->layouts[key.group]),
      epoch_(core_->state.EpochOf(key.Owner())) {
  MutexLock lock(&mu_);
  slots_.resize(layout_.slots.size());
}

GrpcWriter::~GrpcWriter() {
  if (core_->fork.forked()) return;
  bool sealed = false;
  {
    MutexLock lock(&mu_);
    sealed = committed_ == slots_.size();
  }
  fate_->gone = true;
  if (!sealed || fate_->failed) core_->Release({key_}, epoch_);
}

MutableByteView GrpcWriter::Layer(int layer) {
  const uint64_t size = layout_.slots[static_cast<size_t>(layer)].size;
  {
    MutexLock lock(&mu_);
    const Slot& slot = slots_[static_cast<size_t>(layer)];
    if (slot.buffer != nullptr) return {slot.buffer.get(), size};
    if (slot.committed) return {};  // discarded: nobody may read it, and nobody will write it
  }
  std::shared_ptr<uint8_t[]> buffer = core_->pool->Take(size);
  MutexLock lock(&mu_);
  Slot& slot = slots_[static_cast<size_t>(layer)];
  if (slot.buffer == nullptr) slot.buffer = std::move(buffer);
  return {slot.buffer.get(), size};
}

void GrpcWriter::Commit(int layer, BlockSum sum, CommitDone done) {
  if (absl::Status status = core_->Check(); !status.ok()) return done(std::move(status));
  std::shared_ptr<uint8_t[]> buffer;
  {
    MutexLock lock(&mu_);
    Slot& slot = slots_[static_cast<size_t>(layer)];
    if (!slot.committed) {
      slot.committed = true;
      ++committed_;
      buffer = slot.buffer;
    }
  }
  if (buffer == nullptr) {
    core_->counters->CountPut(false, 0);
    return done(StoreError(core_->url, "put",
                           absl::FailedPreconditionError(absl::StrCat("layer ", layer, " of chunk ", ToString(key_),
                                                                      " was committed before or never packed"))));
  }
  OutgoingBlock block;
  block.key = {key_, static_cast<uint16_t>(layer)};
  block.checksum = sum.checksum;  // the service finds out itself what the elements are
  block.data.bytes = ByteView(buffer.get(), layout_.slots[static_cast<size_t>(layer)].size);
  block.data.pin = std::move(buffer);
  const std::shared_ptr<GrpcCore> core = core_;  // `done` may destroy this writer
  block.done = [weak = std::weak_ptr<GrpcCore>(core), key = key_, epoch = epoch_, fate = fate_,
                done = std::move(done)](absl::Status status) mutable {
    if (!status.ok()) {
      fate->failed = true;
      const std::shared_ptr<GrpcCore> kept = fate->gone ? weak.lock() : nullptr;
      if (kept != nullptr) kept->Release({key}, epoch);
    }
    done(std::move(status));
  };
  core->Put(key_.Owner(), std::move(block));
}

void GrpcWriter::Discard(int layer) {
  std::shared_ptr<uint8_t[]> dropped;
  MutexLock lock(&mu_);
  dropped.swap(slots_[static_cast<size_t>(layer)].buffer);
}

}  // namespace kvferry
