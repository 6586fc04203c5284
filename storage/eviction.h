// Who goes first when memory is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kvferry {

// What a policy remembers of a chunk, whether queued or not; chunks derive from it.
struct EvictionNode {
  uint64_t last_use = 0;
  bool queued = false;
};

// The queue holds only what may be evicted at once: published, sealed, unleased, childless. So any victim is legal, and
// a policy's memory is bounded by the number of chunks there are. Threads: none of its own; the store's mutex guards
// it.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // Enters the queue at the place its uses so far have earned. REQUIRES: not queued.
  virtual void Insert(EvictionNode* node) = 0;
  // A use, queued or not.
  virtual void Touch(EvictionNode* node) = 0;
  // Leaves the queue, keeping what is known of its uses. REQUIRES: queued.
  virtual void Erase(EvictionNode* node) = 0;
  // The next to go, still queued; nullptr if none may. O(1).
  virtual EvictionNode* Victim() const = 0;
  virtual size_t size() const = 0;
};

// Least recently used first. Insert, Touch, Erase: O(log n), because a chunk that waited for its last child or lease to
// go enters behind those used before it, not at an end.
std::unique_ptr<EvictionPolicy> NewLruPolicy();

}  // namespace kvferry
