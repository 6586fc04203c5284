// The memory of the memory tier, and its budget.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "storage/base/mutex.h"
#include "storage/extent_pool.h"

namespace kvferry {

// Told, possibly under a lock and on any thread, that memory came back or that a segment waits to be unmapped. Must not
// block.
class FreedListener {
 public:
  virtual ~FreedListener() = default;
  virtual void OnMemoryFreed() = 0;
};

// Hands out extents of segments, each segment of one tenant, and counts every byte against one hard budget:
//
//   mapped segments + overhead of extents + bookkeeping of sessions, names and leases <= budget
//
// A share of the budget (`reserve_bytes`) is kept from segments, so that sessions and leases can be made when chunks
// fill the rest. Wholly free segments are kept for their tenant, up to an eighth of the budget, while it is active;
// else they go back to the system, always as a whole and never under a lock (Bury). Threads: all methods.
class Arena {
 public:
  Arena(uint64_t budget_bytes, uint64_t segment_bytes);

  // Told of every extent and segment that comes free. Call before the first Allocate.
  void SetListener(std::weak_ptr<FreedListener> listener) { listener_ = std::move(listener); }

  // nullopt if the budget or the holes do not allow it now. `overhead` is charged until the extent is freed, `charge`
  // until Uncharge.
  std::optional<Extent> Allocate(const std::string& tenant, uint64_t bytes, uint64_t overhead, uint64_t charge = 0);
  void Free(const Extent& extent);
  // As if it had never been allocated: tells nobody, or a waiter that cannot be served would be woken by its own
  // attempt.
  void PutBack(const Extent& extent, uint64_t charge = 0);

  // True if `count` such extents could be had if nothing else were held.
  bool CouldHold(uint64_t bytes, uint64_t overhead, uint64_t count) const;

  // Bookkeeping that is no extent's. False, and nothing is charged, if the budget does not allow it.
  bool TryCharge(uint64_t bytes);
  void Uncharge(uint64_t bytes);

  // An inactive tenant keeps no free segment.
  void SetActive(const std::string& tenant, bool active);

  // What must not be done under a lock: unmaps what was retired, logs what could not be mapped. Call it with none held.
  void Bury();
  bool HasRetired() const { return retired_count_.load(std::memory_order_relaxed) != 0; }

  struct Usage {
    uint64_t budget = 0;
    uint64_t extents = 0;   // handed out
    uint64_t metadata = 0;  // overhead and bookkeeping
    uint64_t free = 0;      // in segments, handed out to nobody
    uint64_t segments = 0;  // number of them
    uint64_t reserve = 0;   // kept from segments and not charged yet
    uint64_t used() const { return extents + metadata; }
  };
  Usage usage() const;

  // For tests. INTERNAL names what does not agree.
  absl::Status CheckInvariants() const;

 private:
  struct Tenant {
    ExtentPool pool;
    bool active = false;
  };

  uint64_t Room(uint64_t charge = 0) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MapSegment(const std::string& name, Tenant& tenant, uint64_t bytes, uint64_t overhead)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool RetireOne(Tenant& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool RetireAnyOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Trim(Tenant& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Notify();

  const uint64_t budget_;
  const uint64_t segment_bytes_;
  const uint64_t reserve_bytes_;
  std::weak_ptr<FreedListener> listener_;  // set once

  mutable Mutex mu_;
  absl::btree_map<std::string, std::unique_ptr<Tenant>> tenants_ ABSL_GUARDED_BY(mu_);
  uint64_t mapped_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t extents_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t overhead_ ABSL_GUARDED_BY(mu_) = 0;  // of extents
  uint64_t charged_ ABSL_GUARDED_BY(mu_) = 0;   // by TryCharge
  uint64_t next_segment_ ABSL_GUARDED_BY(mu_) = 1;
  std::vector<std::unique_ptr<Segment>> retired_ ABSL_GUARDED_BY(mu_);  // out of the budget, not yet unmapped
  std::atomic<uint64_t> retired_count_{0};
  absl::Status map_error_ ABSL_GUARDED_BY(mu_);  // not yet logged
};

}  // namespace kvferry
