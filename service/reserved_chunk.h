// One chunk on its way in.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/base/chunk_image.h"
#include "storage/base/chunk_writer.h"
#include "storage/base/mutex.h"

namespace kvferry {

// The store's writer, checked: which layers there are, how big, and who is writing them. Destroying it aborts what is
// not sealed. Thread-safe; a claimed layer's memory is the claimant's alone.
class ReservedChunk {
 public:
  ReservedChunk(std::unique_ptr<ChunkWriter> writer, std::shared_ptr<const ChunkLayout> layout);

  const ChunkKey& key() const { return writer_->key(); }
  const ChunkLayout& layout() const { return *layout_; }

  // The memory of `layer`, to be filled and then committed or unclaimed. INVALID_ARGUMENT: there is no such layer.
  // ALREADY_EXISTS: it is stored. ABORTED: somebody else is writing it now.
  absl::StatusOr<MutableByteView> Claim(int layer);
  void Unclaim(int layer);
  // The memory again. REQUIRES: claimed by the caller.
  MutableByteView Layer(int layer) { return writer_->Layer(layer); }
  // REQUIRES: claimed by the caller, whose claim ends here.
  static void Commit(std::shared_ptr<ReservedChunk> chunk, int layer, BlockSum sum, CommitDone done);

  // Checksum of a stored layer, 0 of any other.
  uint64_t StoredChecksum(int layer) const;
  bool sealed() const;     // every layer is stored
  bool untouched() const;  // no layer was ever claimed

 private:
  enum class State : uint8_t { kFree, kClaimed, kCommitting, kStored };
  struct LayerState {
    State state = State::kFree;
    uint64_t checksum = 0;
  };

  void Committed(int layer, uint64_t checksum, bool ok);

  const std::unique_ptr<ChunkWriter> writer_;
  const std::shared_ptr<const ChunkLayout> layout_;

  mutable Mutex mu_;
  std::vector<LayerState> layers_ ABSL_GUARDED_BY(mu_);
  size_t stored_ ABSL_GUARDED_BY(mu_) = 0;
  bool touched_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
