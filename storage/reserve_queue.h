// Reservations that wait for memory.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "storage/namespaces.h"
#include "storage/store.h"

namespace kvferry {

struct PendingReserve {
  SessionId session = 0;
  std::shared_ptr<const Namespace> ns;
  ReserveOptions options;
  ReserveDone done;

  const ChunkLayout& layout() const { return ns->layouts[options.group]; }
};

// First come, first served: a small request never overtakes a large one, so neither starves. Bounded. Threads: none of
// its own; the store's mutex guards it.
class ReserveQueue {
 public:
  static constexpr size_t kMaxWaiting = 4096;

  bool full() const { return waiting_.size() >= kMaxWaiting; }
  bool empty() const { return waiting_.empty(); }
  size_t size() const { return waiting_.size(); }

  // REQUIRES: !full().
  void Push(PendingReserve request);
  PendingReserve& Front() { return waiting_.front(); }
  PendingReserve PopFront();

  // Those whose deadline has come.
  std::vector<PendingReserve> TakeExpired(absl::Time now);
  std::vector<PendingReserve> TakeAllOf(SessionId session);
  // The first deadline that will come; never, if nobody waits.
  absl::Time NextDeadline() const;

 private:
  template <typename Condition>
  std::vector<PendingReserve> TakeIf(Condition condition);

  std::list<PendingReserve> waiting_;  // in the order in which they came
};

}  // namespace kvferry
