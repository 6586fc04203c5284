// What chunks there are, by which names, and which of them may go.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/eviction.h"
#include "storage/number_list.h"
#include "storage/quotas.h"
#include "storage/record.h"

namespace kvferry {

// The records there are by number, their prefix names, who is whose parent, and the queues of those that may leave
// memory or the disk. Live names are in their sessions. A record's address stays as long as the record. Threads: none
// of its own; the store's mutex guards it and its records.
class Index {
 public:
  struct Options {
    PolicyKind policy = PolicyKind::kLru;
    bool has_disk = false;  // so that what somebody holds may leave memory too
    // Told of a record that is about to go: nobody has a name for it, leases or holds it.
    std::function<void(const Record&)> bury;
  };
  explicit Index(Options options);

  // A chunk that is being written under its live key.
  Record* AddLive(std::shared_ptr<Chunk> chunk);
  // A published chunk that lies on disk alone; nullptr if another has its name. `ns` must outlive the record.
  Record* AddFound(const Namespace* ns, const ImageEntry& image, DiskPlace place, uint64_t header_seq,
                   absl::Time expires);

  // Turns of a record's life. It may be gone after those that let go of it.
  void Seal(Record* record);
  void DropLive(Record* record);  // its live name is gone
  void Lease(Record* record, uint32_t count);
  void Unlease(Record* record, uint32_t count);
  void Hold(Record* record);
  void Unhold(Record* record);
  void SetPinned(Record* record, bool pinned);
  // A use. Of a chunk without a prefix name it is one of its session.
  void Touch(Record* record);
  // It came a second time: as if it had been used.
  static void SetUsedAgain(Record* record) { record->used_again = true; }
  static void SetNotFinite(Record* record) { record->is_finite = false; }
  // Its bytes come into memory, or leave it (nullptr).
  void SetChunk(Record* record, std::shared_ptr<Chunk> chunk);
  // Its image is there now, under a header with `seq`; or there no more ({}, 0).
  void SetDisk(Record* record, DiskPlace place, uint64_t seq);

  // Gives a sealed record a prefix name. ALREADY_EXISTS if another has it; INVALID_ARGUMENT if the chunk would be its
  // own ancestor; FAILED_PRECONDITION if it has another prefix name. Again under the same name is OK.
  absl::Status Publish(Record* record, const Id128& prefix_key, const Id128& parent, int priority = kDefaultPriority,
                       absl::Time expires = absl::InfiniteFuture());
  // Takes the prefix name away, by somebody's wish or (`evicted`) as the victim.
  void Unpublish(Record* record, bool evicted = false);

  absl::Time ExpiryOf(const Record& record) const;
  // When the first name expires; InfiniteFuture: none does.
  absl::Time NextExpiry() const;
  // The chunk whose name expires first. REQUIRES: there is one.
  Record* FirstToExpire() { return &records_[expiring_.begin()->second]; }

  // nullptr if nothing has this prefix name. It may have expired, as long as nobody has taken it away.
  Record* Find(const ChunkKey& key) const;

  // Who leaves memory next, nullptr if there is nobody. Ready: those that were made so, first come first served; their
  // bytes are on disk, or nobody needs them. Ranked: published, held by nobody, no child in memory; as the policy says.
  // Held: live or leased ones, least recently used first; none without a disk.
  Record* Ready();
  Record* Ranked();
  Record* Held();
  // Takes one of the ranked or the held to the end of the ready ones, until it is used; another one, or one that may
  // not leave, stays where it is.
  void MakeReady(Record* record);
  // Whether its bytes may leave memory now: they are on disk, or neither anybody nor a child needs them.
  static bool MayLeave(const Record& record);
  // The turn of the first one in any of these queues comes again, behind the others.
  void Defer(Record* record);
  // Who goes first of a domain that evicts its own: as DiskVictim, wherever it lies.
  Record* OwnVictim(Quotas::Domain* domain);
  // Of a tenant, or (`ns` not null) of one namespace of it; nullopt: none any more. Visits all records.
  void SetQuota(absl::string_view tenant, const NamespaceId* ns, std::optional<Quota> quota);
  Quotas& quotas() { return quotas_; }
  const Quotas& quotas() const { return quotas_; }
  // Who leaves the disk next: published, held by nobody, childless; as the policy says.
  Record* DiskVictim();

  size_t queued() const { return memory_.size() + held_.size() + ready_.size(); }
  uint64_t ready_bytes() const { return ready_bytes_; }

  // Published, in memory and not on disk.
  const absl::btree_set<ChunkNumber>& dirty() const { return dirty_; }
  Record* at(ChunkNumber number) { return &records_[number]; }
  static ChunkNumber NumberOf(const Record& record) { return record.number; }

  // In the order of their numbers, from 1: those above `after`, `limit` at most. A number that came free is given
  // again.
  void ForEachAfter(uint64_t after, size_t limit, absl::FunctionRef<void(uint64_t number, Record&)> visit);

  // Gauges of now. Bytes are of chunks in memory with their bookkeeping; each is in one of the three counts at most.
  struct Counts {
    uint64_t reserved = 0, live = 0, published = 0, leased = 0, on_disk = 0;
    uint64_t live_bytes = 0;       // a session holds it, sealed or not
    uint64_t leased_bytes = 0;     // leases alone hold it
    uint64_t evictable_bytes = 0;  // published, held by nobody; its turn may come after its children's
    uint64_t sealed_bytes = 0;     // of all
  };
  const Counts& counts() const { return counts_; }

  // For tests: recomputes everything. INTERNAL names what does not agree.
  absl::Status CheckInvariants() const;

 private:
  // Names in the set are numbers; a key finds the record that has it.
  struct NameHash {
    using is_transparent = void;
    const Index* index;
    size_t operator()(ChunkNumber number) const { return (*this)(index->records_.at(number).key()); }
    size_t operator()(const ChunkKey& key) const { return absl::HashOf(key); }
  };
  struct NameEq {
    using is_transparent = void;
    const Index* index;
    bool operator()(ChunkNumber a, ChunkNumber b) const { return a == b; }
    bool operator()(ChunkNumber number, const ChunkKey& key) const { return index->records_.at(number).key() == key; }
    bool operator()(const ChunkKey& key, ChunkNumber number) const { return (*this)(number, key); }
  };
  using Queue = Record::Queue;

  Record* NewRecord();
  void Bury(Record* record);
  bool IsAncestor(const ChunkKey& key, ChunkKey of) const;
  // Adds to or takes from what its parent counts, if it has one.
  void CountAtParent(const Record& record, int children, int in_memory, Turn turn);
  void Name(Record* record, absl::Time expires);
  void Settle(Record* record, Turn turn = Turn::kLast, bool evicted = false);
  void SettleMemory(Record* record, Turn turn, bool evicted);
  void SettleDisk(Record* record, Turn turn, bool evicted);
  void SettleOwn(Record* record, Turn turn, bool evicted);
  static Queue QueueFor(const Record& record, bool has_disk);
  void Enqueue(Record* record, Queue queue, Turn turn);
  void Dequeue(Record* record);
  static uint8_t Classify(const Record& record);
  static void Count(uint8_t as, uint64_t bytes, bool add, Counts* counts);

  const Options options_;
  PagedVector<Record> records_;
  std::vector<ChunkNumber> free_numbers_;
  ChunkNumber numbers_ = 0;  // given so far, free ones too
  absl::flat_hash_set<ChunkNumber, NameHash, NameEq> published_;
  absl::flat_hash_map<ChunkKey, Family> orphans_;  // of parents that are not there
  absl::flat_hash_map<ChunkNumber, absl::Time> expiry_;
  absl::btree_set<std::pair<absl::Time, ChunkNumber>> expiring_;
  absl::btree_set<ChunkNumber> dirty_;
  EvictionQueue memory_, disk_;
  Quotas quotas_;
  NumberList<Record> held_{&records_}, ready_{&records_};
  uint64_t ready_bytes_ = 0;
  Counts counts_;
};

}  // namespace kvferry
