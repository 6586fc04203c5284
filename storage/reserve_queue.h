// Reservations that wait for memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
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

  // Returns the ticket, by which a timer finds the request again. REQUIRES: !full().
  uint64_t Push(PendingReserve request);
  PendingReserve& Front() { return waiting_.begin()->second; }
  PendingReserve PopFront();

  // True and `*out` if the ticket still waits.
  bool Take(uint64_t ticket, PendingReserve* out);
  std::vector<PendingReserve> TakeAllOf(SessionId session);
  std::vector<PendingReserve> TakeAll();

 private:
  absl::btree_map<uint64_t, PendingReserve> waiting_;  // by ticket
  uint64_t next_ticket_ = 1;
};

}  // namespace kvferry
