// The client's side of one chunk: who still needs it, and which of its blocks the store has acknowledged.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/transport.h"
#include "storage/base/mutex.h"

namespace kvferry {

class CachedChunk;

// The blocks of one cache that this process holds, per layer. Thread-safe: transports count down from their own
// threads. Shared by the cache and the acknowledgements still to come, so either may go first.
class PutTracker {
 public:
  // A block that was committed. It is held by this process from Start to Drop, whatever Finish says of it.
  struct Put {
    int layer = 0;
    uint64_t bytes = 0;
    uint64_t sequence = 0;
  };
  Put Start(int layer, uint64_t bytes);
  void Finish(const Put& put, const absl::Status& status);
  void Drop(const Put& put, bool failed);

  // What fails from now on of the blocks started so far concerns nobody; that they take memory still counts.
  void StartSequence();

  // Blocks that the store has acknowledged since the last call, for the cache's own thread to discard.
  void AddAcknowledged(std::weak_ptr<CachedChunk> chunk, int layer);
  std::vector<std::pair<std::weak_ptr<CachedChunk>, int>> TakeAcknowledged();

  // Waits until at most `limit` layers other than `except` have unacknowledged blocks. DEADLINE_EXCEEDED if not in
  // time.
  absl::Status WaitForLayers(int limit, int except, absl::Time deadline);
  // True if this process holds blocks of the layer.
  bool Holds(int layer) const;
  // Layers with blocks that this process holds, other than `except` and but for those that failed.
  int HeldLayers(int except) const;

  uint64_t blocks_put() const;
  uint64_t bytes_put() const;
  // Of the blocks that are held: not acknowledged, not discarded yet, or failed.
  uint64_t bytes_held() const;
  uint64_t bytes_failed() const;
  // Why the last block that failed did; OK if none is held that has.
  absl::Status last_error() const;

 private:
  int PendingLayersLocked(int except) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable Mutex mu_;
  CondVar changed_;
  // Blocks by layer: not acknowledged; held and not failed; failed.
  std::vector<int> pending_ ABSL_GUARDED_BY(mu_);
  std::vector<int> held_ ABSL_GUARDED_BY(mu_);
  std::vector<int> failed_ ABSL_GUARDED_BY(mu_);
  uint64_t blocks_put_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t bytes_put_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t bytes_held_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t bytes_failed_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t sequence_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<std::weak_ptr<CachedChunk>, int>> acknowledged_ ABSL_GUARDED_BY(mu_);
};

// A live chunk of this process, or one that it leases, shared by rows, layers and forks that refer to it; the last one
// gives it back.
// Threads: as its cache, but for the acknowledgements.
class CachedChunk : public std::enable_shared_from_this<CachedChunk> {
 public:
  // `epoch`: of the transport, when the chunk was reserved.
  CachedChunk(std::shared_ptr<Transport> transport, uint64_t epoch, std::unique_ptr<ChunkWriter> writer, int layers);
  // A chunk that is leased under `key`, all of it stored; `bytes` of its blocks, by layer.
  CachedChunk(std::shared_ptr<Transport> transport, uint64_t epoch, const ChunkKey& key,
              const std::vector<uint64_t>& bytes);
  ~CachedChunk();
  CachedChunk(const CachedChunk&) = delete;
  CachedChunk& operator=(const CachedChunk&) = delete;

  const ChunkKey& key() const { return key_; }
  BlockKey Key(int layer) const { return {key_, static_cast<uint16_t>(layer)}; }
  // Takes the layer's slot for packing; false if somebody has before (a row or a fork that shares the chunk), and then
  // it must not be written. Once claimed, pack Layer(layer) and Commit it.
  bool Claim(int layer);
  MutableByteView Layer(int layer) { return writer_->Layer(layer); }
  void Commit(int layer, BlockSum sum, const std::shared_ptr<PutTracker>& tracker);

  // True once the store has acknowledged the blocks of all layers.
  bool Whole() const;
  // True once the store has the block: it must be fetched from there. Until then, and for ever if the put failed, it is
  // read from Local().
  bool Stored(int layer);
  // The packed block in this process's memory. REQUIRES: committed, and Stored() has not returned true.
  BlockView Local(int layer);
  // Bytes of the layer's block. REQUIRES: committed.
  uint64_t Bytes(int layer) const;
  // Bytes of the blocks that the store has acknowledged.
  uint64_t StoredBytes() const;

 private:
  enum State : uint8_t { kReserved, kClaimed, kPending, kAcknowledged, kFailed, kDiscarded, kGone };
  struct Acks;  // outlives the chunk where an acknowledgement comes late

  const std::shared_ptr<Transport> transport_;
  const uint64_t epoch_;
  const ChunkKey key_;
  const std::unique_ptr<ChunkWriter> writer_;  // null: leased
  const std::shared_ptr<Acks> acks_;
};

}  // namespace kvferry
