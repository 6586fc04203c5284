// The free space of one tenant's segments.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "storage/segment.h"

namespace kvferry {

// Extents of mixed sizes, best fit, neighbours merged at once: when the last extent of a segment is freed, the segment
// is one hole and can be given back whole. Threads: none of its own; the arena's mutex guards it.
class ExtentPool {
 public:
  void Add(std::unique_ptr<Segment> segment);

  // nullopt if no hole is large enough.
  std::optional<Extent> Allocate(uint64_t bytes);

  // True if the extent's segment is now wholly free.
  bool Free(const Extent& extent);

  // The wholly free segment that is largest; nullptr if there is none.
  std::unique_ptr<Segment> TakeFreeSegment();

  bool empty() const { return segments_.empty(); }
  uint64_t segment_count() const { return segments_.size(); }
  uint64_t mapped_bytes() const { return mapped_bytes_; }
  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t whole_free_bytes() const { return whole_free_bytes_; }  // of wholly free segments

  // For tests: walks everything and compares. INTERNAL names what does not agree.
  absl::Status CheckInvariants() const;

 private:
  struct Holes {
    std::unique_ptr<Segment> segment;
    absl::btree_map<uint64_t, uint64_t> by_offset;  // offset -> bytes; neighbours never touch
  };
  // (bytes, segment id, offset): the smallest hole that fits, and of equal ones the one in the oldest segment, so that
  // young segments run empty.
  using Hole = std::tuple<uint64_t, uint64_t, uint64_t>;

  void Insert(Holes& holes, uint64_t offset, uint64_t bytes);
  void Erase(Holes& holes, absl::btree_map<uint64_t, uint64_t>::iterator hole);

  absl::flat_hash_map<uint64_t, Holes> segments_;  // by id
  absl::btree_set<Hole> by_size_;
  uint64_t mapped_bytes_ = 0;
  uint64_t free_bytes_ = 0;
  uint64_t whole_free_bytes_ = 0;
};

}  // namespace kvferry
