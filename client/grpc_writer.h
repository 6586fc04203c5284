// One reserved chunk of a remote store, packed in memory of this process.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "client/grpc_core.h"
#include "storage/base/chunk_writer.h"

namespace kvferry {

// Lends a pooled buffer a layer and hands it to the wire as it is. Threads: as ChunkWriter.
class GrpcWriter : public ChunkWriter {
 public:
  GrpcWriter(std::shared_ptr<GrpcCore> core, std::shared_ptr<const KnownNamespace> known, const ChunkKey& key);
  // Gives the chunk back unless every layer was committed and none has failed.
  ~GrpcWriter() override;

  const ChunkKey& key() const override { return key_; }
  MutableByteView Layer(int layer) override;
  void Commit(int layer, BlockSum sum, CommitDone done) override;
  void Discard(int layer) override;

 private:
  struct Slot {
    std::shared_ptr<uint8_t[]> buffer;
    bool committed = false;
  };
  // Outlives the writer where an acknowledgement comes late.
  struct Fate {
    std::atomic<bool> failed{false};  // one of the commits has
    std::atomic<bool> gone{false};    // the writer is
  };

  const std::shared_ptr<GrpcCore> core_;
  const std::shared_ptr<const KnownNamespace> known_;
  const ChunkKey key_;
  const ChunkLayout& layout_;
  const uint64_t epoch_;
  const std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  Mutex mu_;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mu_);
  size_t committed_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvferry
