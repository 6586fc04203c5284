// A reserved chunk in the hands of its writer.
#pragma once

#include <memory>

#include "storage/base/chunk_writer.h"
#include "storage/store_state.h"

namespace kvferry {

// Holds the chunk's memory: whatever becomes of the session, it is nobody else's while this lives.
class StoreWriter : public ChunkWriter {
 public:
  StoreWriter(std::shared_ptr<StoreState> state, std::shared_ptr<Chunk> chunk, Record* record)
      : state_(std::move(state)), chunk_(std::move(chunk)), record_(record) {}
  ~StoreWriter() override;

  const ChunkKey& key() const override { return chunk_->key(); }
  MutableByteView Layer(int layer) override { return chunk_->Slot(layer); }
  void Commit(int layer, BlockSum sum, CommitDone done) override;
  void Discard(int) override {}  // the memory is the store's

 private:
  absl::Status TryCommit(int layer, BlockSum sum);
  // The session holds the chunk, and it is not sealed: until then it does not leave its memory.
  bool IsReserved() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
    return record_->chunk == chunk_ && record_->live && !record_->sealed;
  }

  const std::shared_ptr<StoreState> state_;
  const std::shared_ptr<Chunk> chunk_;
  Record* const record_;  // another chunk's, once this one has gone
};

absl::Status UnknownSession(SessionId id);
absl::Status NamespaceNotOpen(const NamespaceId& ns);

}  // namespace kvferry
