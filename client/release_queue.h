// Keys on their way back to the store.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/types/span.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Collects released keys for the session's thread, which sends them in batches and learns by the answers to its
// heartbeats what has arrived. A batch cut off by a broken connection goes out again if its session lives on: live keys
// only, because giving one back twice does nothing, while a lease is counted. Bounded by what its users hold, since
// each key was handed out once. Thread-safe.
class ReleaseQueue {
 public:
  void Push(absl::Span<const ChunkKey> keys);

  // The oldest keys, at most `limit`, which count as sent from now on.
  std::vector<ChunkKey> Take(size_t limit);
  bool empty() const;

  // A heartbeat goes out behind the batches taken so far; an answer has come to the oldest one without.
  void HeartbeatSent();
  void HeartbeatAnswered();

  // The session goes on over another connection: what was sent but not confirmed is to be sent again.
  void Resumed();
  // The session is gone: nothing of it needs to be given back.
  void SessionLost();

 private:
  mutable Mutex mu_;
  std::deque<ChunkKey> waiting_ ABSL_GUARDED_BY(mu_);
  std::deque<std::vector<ChunkKey>> sent_ ABSL_GUARDED_BY(mu_);  // live keys by the heartbeat that follows them
  std::vector<ChunkKey> since_heartbeat_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
