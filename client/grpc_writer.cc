#include "client/grpc_writer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/store_error.h"

namespace kvferry {

GrpcWriter::GrpcWriter(std::shared_ptr<GrpcCore> core, std::shared_ptr<const KnownNamespace> known, const ChunkKey& key)
    : core_(std::move(core)), known_(std::move(known)), key_(key), layout_(known_->layouts[key.group]) {
  MutexLock lock(&mu_);
  slots_.resize(layout_.slots.size());
}

GrpcWriter::~GrpcWriter() {
  bool sealed = false;
  {
    MutexLock lock(&mu_);
    sealed = committed_ == slots_.size();
  }
  if (!sealed) core_->Release({key_});
}

MutableByteView GrpcWriter::Layer(int layer) {
  const uint64_t size = layout_.slots[static_cast<size_t>(layer)].size;
  {
    MutexLock lock(&mu_);
    if (const auto& buffer = slots_[static_cast<size_t>(layer)].buffer; buffer != nullptr) return {buffer.get(), size};
  }
  std::shared_ptr<uint8_t[]> buffer = core_->pool->Take(size);
  MutexLock lock(&mu_);
  Slot& slot = slots_[static_cast<size_t>(layer)];
  if (slot.buffer == nullptr) slot.buffer = std::move(buffer);
  return {slot.buffer.get(), size};
}

void GrpcWriter::Commit(int layer, uint64_t checksum, CommitDone done) {
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
  block.checksum = checksum;
  block.data.bytes = ByteView(buffer.get(), layout_.slots[static_cast<size_t>(layer)].size);
  block.data.pin = std::move(buffer);
  block.done = std::move(done);
  core_->Put(key_.Owner(), std::move(block));
}

void GrpcWriter::Discard(int layer) {
  std::shared_ptr<uint8_t[]> dropped;
  MutexLock lock(&mu_);
  dropped.swap(slots_[static_cast<size_t>(layer)].buffer);
}

}  // namespace kvferry
