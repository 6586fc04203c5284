// Who goes first when memory is needed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/key.h"
#include "storage/paged_vector.h"

namespace kvferry {

// A chunk to a policy: the number of its record, which another one may have after it.
using ChunkNumber = uint32_t;

// Where a chunk enters the queue that its uses so far have earned.
enum class Turn {
  kNext,  // at the end that is evicted: its last child has just gone from there, and it is no younger
  kLast,
};

// Bytes of bookkeeping charged for a chunk: the largest node of a policy, its place in a tree or a list, one name that
// is remembered, and one that expires.
inline constexpr uint64_t kEvictionBytes = 72;

// Chunks are added when they get a name, queued while they may be evicted at once (published, sealed, unleased,
// childless) and removed with their name. So any victim is legal. Uses count whether queued or not. Threads: none of
// its own; the store's mutex guards it.
class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  // `name` is a hash of the chunk's key, by which it may be known from before. REQUIRES: not there.
  virtual void Add(ChunkNumber chunk, uint64_t name) = 0;
  // `evicted`: as the victim, not by somebody's wish. REQUIRES: there, not queued.
  virtual void Remove(ChunkNumber chunk, bool evicted) = 0;
  // A use. REQUIRES: there.
  virtual void Touch(ChunkNumber chunk) = 0;
  // REQUIRES: there, not queued.
  virtual void Insert(ChunkNumber chunk, Turn turn) = 0;
  // Leaves the queue; what is known of its uses stays. REQUIRES: queued.
  virtual void Erase(ChunkNumber chunk) = 0;
  // The next to go, still queued; nullopt if none may. In constant time, over all calls.
  virtual std::optional<ChunkNumber> Victim() = 0;
  virtual size_t size() const = 0;  // of the queue
};

// Least recently used first, exactly; the other calls take O(log n), because a chunk that waited for its last child or
// lease to go enters behind those used before it.
std::unique_ptr<EvictionPolicy> NewLruPolicy();

// Least often used first, of those the one that was queued first. Uses count up to 255.
std::unique_ptr<EvictionPolicy> NewLfuPolicy();

// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1): new chunks go
// through a small queue, a tenth of all, and those used twice there into the main one, which gives a second chance for
// each of up to three uses. Names evicted from the small one are remembered, as many as there are chunks: who comes
// back enters the main queue.
std::unique_ptr<EvictionPolicy> NewS3FifoPolicy();

enum class PolicyKind { kS3Fifo, kLru, kLfu };
inline constexpr PolicyKind kPolicies[] = {PolicyKind::kS3Fifo, PolicyKind::kLru, PolicyKind::kLfu};
// "s3fifo", "lru" or "lfu"; INVALID_ARGUMENT names another one.
absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name);
absl::string_view PolicyName(PolicyKind kind);
std::unique_ptr<EvictionPolicy> NewPolicy(PolicyKind kind);

// A policy of one kind for each priority there is: the lowest goes first. Calls as EvictionPolicy's.
class EvictionQueue {
 public:
  explicit EvictionQueue(PolicyKind kind) : kind_(kind) {}

  // REQUIRES: 0 <= priority <= kMaxPriority.
  void Add(ChunkNumber chunk, uint64_t name, int priority);
  void Remove(ChunkNumber chunk, bool evicted) { Of(chunk).Remove(chunk, evicted); }
  void Touch(ChunkNumber chunk) { Of(chunk).Touch(chunk); }
  void Insert(ChunkNumber chunk, Turn turn);
  void Erase(ChunkNumber chunk);
  std::optional<ChunkNumber> Victim();
  size_t size() const { return size_; }

 private:
  EvictionPolicy& Of(ChunkNumber chunk) { return *policies_[priorities_[chunk]]; }

  const PolicyKind kind_;
  std::array<std::unique_ptr<EvictionPolicy>, kMaxPriority + 1> policies_;
  PagedVector<uint8_t> priorities_;
  std::array<uint64_t, 2> queued_{};  // a bit for each priority of which something is queued
  size_t size_ = 0;
};

}  // namespace kvferry
