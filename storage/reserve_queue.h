// Who waits for memory.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "storage/namespaces.h"
#include "storage/record.h"
#include "storage/store.h"

namespace kvferry {

// A session that reserves chunks, or a chunk that is to be read from disk.
struct MemoryRequest {
  SessionId session = 0;
  std::shared_ptr<const Namespace> ns;
  ReserveOptions options;
  ReserveDone done;
  Record* load = nullptr;  // held; then `session` and `done` are of nobody

  const ChunkLayout& layout() const { return ns->layouts[options.group]; }
};

// First come, first served: a small request never overtakes a large one, so neither starves. Chunks that are to be read
// come before those that are to be written: somebody waits for each of them. Bounded. Threads: none of
// its own; the store's mutex guards it.
class ReserveQueue {
 public:
  static constexpr size_t kMaxWaiting = 4096;

  bool full() const { return waiting_.size() >= kMaxWaiting; }
  bool empty() const { return waiting_.empty(); }
  bool HasLoads() const { return !waiting_.empty() && waiting_.front().load != nullptr; }
  size_t size() const { return waiting_.size(); }

  // REQUIRES: !full(), unless it is a load: of those there is one a chunk.
  void Push(MemoryRequest request);
  MemoryRequest& Front() { return waiting_.front(); }
  MemoryRequest PopFront();

  // Those whose deadline has come.
  std::vector<MemoryRequest> TakeExpired(absl::Time now);
  std::vector<MemoryRequest> TakeAllOf(SessionId session);
  // The first deadline that will come; never, if nobody waits.
  absl::Time NextDeadline() const;

 private:
  template <typename Condition>
  std::vector<MemoryRequest> TakeIf(Condition condition);

  std::list<MemoryRequest> waiting_;  // in the order in which they came
};

}  // namespace kvferry
