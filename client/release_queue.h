// Keys on their way back to the store.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/types/span.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Collects released keys for the session's thread, which sends them in numbered batches. The store applies each number
// once and says which the last one was, so what a broken connection swallowed goes out again and no batch counts twice.
// A chunk whose blocks are still on their way waits for them: they travel on another stream, and a release that
// overtook them would make the store refuse them. Bounded by what its users hold, since each key was handed out once.
// Thread-safe.
class ReleaseQueue {
 public:
  struct Batch {
    uint64_t seq = 0;  // counts the batches of a session from 1
    std::vector<ChunkKey> keys;
  };

  // `epoch`: of the transport when they were handed out; those of another one than the present are dropped.
  void Push(absl::Span<const ChunkKey> keys, uint64_t epoch);

  // A block of `chunk` has been handed to the wire; it is acknowledged or has failed. PutDone returns true if there is
  // something new to send.
  void PutStarted(const ChunkKey& chunk);
  bool PutDone(const ChunkKey& chunk);

  // The next batch, of at most `limit` keys, which counts as sent from now on; nullopt if there is none.
  std::optional<Batch> Next(size_t limit);

  // The store has applied all batches up to `seq`.
  void Confirmed(uint64_t seq);
  // The session goes on over another connection, and `seq` is the last batch it has had.
  void Resumed(uint64_t seq);
  // The session is gone: nothing of it needs to be given back, and the next one, which begins `epoch`, counts anew.
  void SessionLost(uint64_t epoch);

 private:
  void ConfirmedLocked(uint64_t seq) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  std::deque<ChunkKey> waiting_ ABSL_GUARDED_BY(mu_);
  std::deque<Batch> unconfirmed_ ABSL_GUARDED_BY(mu_);
  size_t sent_ ABSL_GUARDED_BY(mu_) = 0;  // of unconfirmed_, over this connection
  uint64_t last_seq_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<ChunkKey, int> puts_ ABSL_GUARDED_BY(mu_);  // blocks on their way
  absl::flat_hash_set<ChunkKey> held_back_ ABSL_GUARDED_BY(mu_);  // released, with blocks on their way
};

}  // namespace kvferry
