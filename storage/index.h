// What chunks there are, by which names, and which of them may go.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/chunk.h"
#include "storage/eviction.h"

namespace kvferry {

// The life of a chunk: reserved -> sealed -> published, with a live name until its session lets go and a prefix name
// from Publish until Erase or eviction. Changed by Index alone, under the store's mutex; `live`, `sealed` and the rest
// are public so that they can be read.
struct Record {
  explicit Record(std::shared_ptr<Chunk> c)
      : chunk(std::move(c)), checksums(chunk->layout().slots.size()), committed(chunk->layout().slots.size()) {}

  const std::shared_ptr<Chunk> chunk;
  std::vector<uint64_t> checksums;
  std::vector<bool> committed;
  uint32_t committed_count = 0;
  bool live = false;  // its session holds it
  bool sealed = false;
  bool published = false;
  Id128 prefix_key{};  // while published
  Id128 parent{};
  uint32_t leases = 0;                          // over all sessions
  absl::Time expires = absl::InfiniteFuture();  // its prefix name
  bool pinned = false;                          // by an operator: not evicted

  // Under its prefix key. REQUIRES: published.
  ChunkKey PublishedKey() const;

 private:
  friend class Index;
  static constexpr ChunkNumber kUnnamed = UINT32_MAX;
  ChunkNumber number = kUnnamed;  // while it has a name
  uint8_t counted = 0;            // as what Index last counted it
  bool queued = false;
};
using RecordPtr = std::shared_ptr<Record>;

// Bytes of bookkeeping charged for a chunk beside its image: record, chunk, layers and the slots of four maps.
uint64_t RecordOverhead(const ChunkLayout& layout);

// The chunks there are by number, their prefix names, who is whose parent, and the queue of those that may be evicted.
// Live names are in their sessions. Threads: none of its own; the store's mutex guards it and its records.
class Index {
 public:
  explicit Index(PolicyKind policy) : queue_(policy) {}

  // Turns of a record's life.
  void AddLive(Record* record);
  void Seal(Record* record);
  void DropLive(Record* record);  // its live name is gone
  void Lease(Record* record, uint32_t count);
  void Unlease(Record* record, uint32_t count);
  // A use. Of a chunk without a prefix name it is nothing.
  void Touch(Record* record);
  // The victim's turn comes again, behind the others.
  void Defer(Record* victim);
  void SetPinned(Record* record, bool pinned);

  // Gives a sealed record a prefix name. ALREADY_EXISTS if another has it; INVALID_ARGUMENT if the chunk would be its
  // own ancestor; FAILED_PRECONDITION if it has another prefix name. Again under the same name is OK.
  absl::Status Publish(const RecordPtr& record, const Id128& prefix_key, const Id128& parent,
                       int priority = kDefaultPriority, absl::Time expires = absl::InfiniteFuture());
  // Takes the prefix name away, by somebody's wish or (`evicted`) as the victim; whoever gets the record may be the
  // last to hold it.
  RecordPtr Unpublish(Record* record, bool evicted = false);

  // When the first name expires; InfiniteFuture: none does.
  absl::Time NextExpiry() const;
  // The chunk whose name expires first. REQUIRES: there is one.
  Record* FirstToExpire() const { return by_number_.at(expiring_.begin()->second); }

  // nullptr if nothing has this prefix name. It may have expired, as long as nobody has taken it away.
  RecordPtr Find(const ChunkKey& key) const;

  // The next to be evicted, or nullptr. It stays until Unpublish.
  Record* Victim();
  size_t queue_size() const { return queue_.size(); }

  void ForEachPublished(absl::FunctionRef<void(const RecordPtr&)> visit) const;
  // In the order of their numbers, from 1: those with a name and a number above `after`, `limit` at most. A number that
  // came free is given again.
  void ForEachAfter(uint64_t after, size_t limit, absl::FunctionRef<void(uint64_t number, const Record&)> visit) const;

  // Gauges of now. Bytes include the bookkeeping; each chunk is in one of the three byte counts at most.
  struct Counts {
    uint64_t reserved = 0, live = 0, published = 0, leased = 0;
    uint64_t live_bytes = 0;       // a session holds it, sealed or not
    uint64_t leased_bytes = 0;     // leases alone hold it
    uint64_t evictable_bytes = 0;  // published, held by nobody; its turn may come after its children's
  };
  const Counts& counts() const { return counts_; }

  // For tests: recomputes everything. INTERNAL names what does not agree.
  absl::Status CheckInvariants() const;

 private:
  bool HasChildren(const Record& record) const;
  bool IsAncestor(const ChunkKey& key, ChunkKey of) const;
  void Settle(Record* record, Turn turn = Turn::kLast);
  void SettleNumber(Record* record);
  static void Count(uint8_t as, uint64_t bytes, bool add, Counts* counts);

  EvictionQueue queue_;
  absl::flat_hash_map<ChunkKey, RecordPtr> published_;
  absl::flat_hash_map<ChunkKey, uint32_t>
      children_;  // prefix key -> published chunks whose parent it is, itself here or not
  absl::btree_set<std::pair<absl::Time, ChunkNumber>> expiring_;  // names that are not for ever
  PagedVector<Record*> by_number_;                                // live or published; nullptr: nobody has the number
  std::vector<ChunkNumber> free_numbers_;
  ChunkNumber numbers_ = 0;  // given so far, free ones too
  Counts counts_;
};

}  // namespace kvferry
