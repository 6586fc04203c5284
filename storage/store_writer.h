// A reserved chunk in the hands of its writer.
#pragma once

#include <memory>

#include "storage/base/chunk_writer.h"
#include "storage/store_state.h"

namespace kvferry {

// Holds the record, and with it the extent: whatever becomes of the session, the memory is nobody else's while this
// lives.
class StoreWriter : public ChunkWriter {
 public:
  StoreWriter(std::shared_ptr<StoreState> state, RecordPtr record)
      : state_(std::move(state)), record_(std::move(record)) {}
  ~StoreWriter() override;

  const ChunkKey& key() const override { return record_->chunk->key(); }
  MutableByteView Layer(int layer) override { return record_->chunk->Slot(layer); }
  void Commit(int layer, uint64_t checksum, CommitDone done) override;
  void Discard(int) override {}  // the memory is the store's

 private:
  absl::Status TryCommit(int layer, uint64_t checksum);
  // OK while the session holds the chunk.
  absl::Status CheckLive() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);

  const std::shared_ptr<StoreState> state_;
  const RecordPtr record_;
};

// The image's header, by what the record is now.
ChunkHeader HeaderOf(const Record& record, uint64_t seq);

absl::Status UnknownSession(SessionId id);
absl::Status NamespaceNotOpen(const NamespaceId& ns);

}  // namespace kvferry
