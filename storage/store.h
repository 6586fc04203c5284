// START HERE: the cache store. It holds chunks of KV (see base/key.h for the words), finds them by key and never hands
// out a wrong byte. kvferryd serves one over gRPC; the client library embeds one for `embedded://`.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/base/block_view.h"
#include "storage/base/chunk_image.h"
#include "storage/base/chunk_writer.h"
#include "storage/base/key.h"
#include "storage/base/namespace_spec.h"
#include "storage/disk/file.h"
#include "storage/eviction.h"
#include "storage/executor.h"
#include "storage/quotas.h"
#include "storage/write_policy.h"

namespace kvferry {

struct StoreOptions {
  uint64_t memory_bytes = 2 * kGiB;               // hard budget: segments plus metadata
  PolicyKind policy = PolicyKind::kLru;           // who is evicted first
  uint64_t segment_bytes = 64 * kMiB;             // or eight images, if that is more; less where the budget is small
  absl::Duration live_grace = absl::Minutes(10);  // live chunks of a suspended session
  absl::Duration reservation_grace = absl::Seconds(30);  // its unsealed reservations

  std::string disk_path;                       // the folder of the disk tier; empty: there is none
  uint64_t disk_bytes = 0;                     // hard bound on what its segments take
  uint64_t disk_keep_free_bytes = 256 * kMiB;  // left to others on the volume
  WritePolicy write_policy = WritePolicy::kWriteBack;
  absl::Duration load_patience = absl::Seconds(30);  // how long a block on disk waits for memory to be read into

  // Where ids of sessions and tickets come from, which nobody must be able to guess. Thread-safe; empty: the system.
  std::function<uint64_t()> random;
};

// INVALID_ARGUMENT naming the option, its value and what was expected.
absl::Status Validate(const StoreOptions& options);

// Set to true by a caller who has given up waiting: what he asked for then holds nobody else back. Null: never.
using GivenUp = std::shared_ptr<const std::atomic<bool>>;

struct ReserveOptions {
  uint16_t group = 0;
  uint16_t shard = 0;
  int count = 1;                               // 1 to kMaxChunksInCall
  absl::Time deadline = absl::InfinitePast();  // how long to wait for memory; in the past: not at all
  GivenUp given_up;
};
using ReserveDone = absl::AnyInvocable<void(absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>>)>;

struct PublishOptions {
  Id128 prefix_key{};               // kLiveBit clear
  Id128 parent{};                   // prefix key of the chunk before it; zero for the first
  int priority = kDefaultPriority;  // 0 to kMaxPriority: lower ones are evicted first
  // The name is gone after this; whoever holds a lease by then keeps the chunk. More than a century is for ever.
  absl::Duration ttl = absl::InfiniteDuration();
};

// Answer of Lookup: the longest run of whole chunks from the front of the keys asked for.
struct Match {
  int chunks = 0;
  uint64_t bytes = 0;  // of their images
};

// What chunks are shared by: random, so that it cannot be guessed.
using TicketId = uint64_t;
inline constexpr absl::Duration kMaxTicketLife = absl::Hours(24);

using GetDone = absl::AnyInvocable<void(absl::StatusOr<BlockView>)>;
using FlushDone = absl::AnyInvocable<void(absl::Status)>;
// What became of the chunks of a namespace. Bytes are of images.
struct DropReport {
  uint64_t chunks = 0, bytes = 0;  // that lost their name
  uint64_t bytes_kept = 0;         // of them, those that somebody holds or reads
  // Really gone, by a purge: overwritten, given back to the file system. What a file system without holes keeps until
  // its segment goes is in neither.
  uint64_t memory_bytes_purged = 0, disk_bytes_purged = 0;
};
using DropDone = absl::AnyInvocable<void(absl::StatusOr<DropReport>)>;
using EraseDone = absl::AnyInvocable<void(absl::Status)>;

// Exact counts since the store was opened, and gauges of now. Names are those of the metrics.
struct StoreStats {
  uint64_t memory_budget_bytes = 0, memory_used_bytes = 0, memory_free_in_segments_bytes = 0, metadata_bytes = 0;
  uint64_t segments = 0, sessions = 0, namespaces = 0;
  uint64_t chunks_live = 0, chunks_published = 0, chunks_reserved = 0, chunks_leased = 0;
  uint64_t blocks_committed = 0, blocks_got = 0, get_misses = 0;
  uint64_t bytes_committed = 0, bytes_got = 0;
  uint64_t lookups = 0, lookup_chunks_asked = 0, lookup_chunks_hit = 0;
  uint64_t reserves = 0, reserves_refused = 0, evictions = 0, expirations = 0, reservations_aborted = 0,
           sessions_expired = 0;
  // Of the disk tier; zero without one. Writes and reads are of whole images.
  uint64_t disk_budget_bytes = 0, disk_used_bytes = 0, disk_live_bytes = 0, chunks_on_disk = 0;
  uint64_t chunks_dirty = 0;                    // published, and not on disk yet
  uint64_t disk_io_uring = 0, disk_direct = 0;  // 1: transfers go through io_uring; past the page cache
  uint64_t chunks_found = 0, bytes_found = 0;   // on disk, at start
  uint64_t disk_writes = 0, disk_bytes_written = 0, disk_writes_failed = 0, disk_evictions = 0;
  uint64_t disk_reads = 0, disk_bytes_read = 0, disk_reads_failed = 0, prefetches = 0, prefetches_dropped = 0;
  uint64_t corruptions = 0;  // chunks that were dropped because a checksum did not agree, in memory or on disk
};

// One line of a listing.
struct ChunkInfo {
  uint64_t number = 0;  // ascending in a listing; of a chunk that has gone another one may have it
  ChunkKey key;
  std::string tenant, model, state;  // state: "reserved", "live", "published"
  uint64_t bytes = 0;
  uint32_t tokens = 0, leases = 0, layers = 0, layers_committed = 0;
};

// Thread-safe. No call blocks; every `done` runs once, never under a lock, on the calling thread where the answer is at
// hand. A session that is unknown or has ended is NOT_FOUND "session ..."; what another tenant owns does not exist.
class Store {
 public:
  virtual ~Store() = default;  // REQUIRES: no call is in progress. Views and writers handed out may outlive the store.

  // Sessions own live chunks and leases. Open -> (Suspend <-> Resume)* -> End.
  virtual absl::StatusOr<SessionId> OpenSession(absl::string_view tenant) = 0;
  // The owner is gone for now: after reservation_grace its unsealed chunks go, after live_grace the session ends.
  virtual void SuspendSession(SessionId session) = 0;
  // The owner is back in time. NOT_FOUND if the session has ended or belongs to another tenant.
  virtual absl::Status ResumeSession(absl::string_view tenant, SessionId session) = 0;
  // Frees its live chunks and returns its leases at once. Unknown sessions are ignored.
  virtual void EndSession(SessionId session) = 0;

  // Makes the spec's namespace known to the session's tenant and returns its id. Errors as Validate(spec).
  virtual absl::StatusOr<NamespaceId> OpenNamespace(SessionId session, const NamespaceSpec& spec) = 0;
  // How chunks of a group lie in memory; all who ask share one. NOT_FOUND if the session has not opened the namespace;
  // INVALID_ARGUMENT if its spec has no such group.
  virtual absl::StatusOr<std::shared_ptr<const ChunkLayout>> Layout(SessionId session, const NamespaceId& ns,
                                                                    int group) const = 0;

  // All `count` writers or none. Evicts published, unleased chunks if needed, else waits until the deadline for memory;
  // then RESOURCE_EXHAUSTED. More than the budget could ever hold is RESOURCE_EXHAUSTED at once.
  virtual void Reserve(SessionId session, const NamespaceId& ns, const ReserveOptions& options, ReserveDone done) = 0;

  // Gives a sealed live chunk of this session a second name: no byte moves, and the live name goes on. ALREADY_EXISTS
  // if another chunk has the name: that one stays. FAILED_PRECONDITION if the chunk is not sealed, if it was committed
  // as holding NaN or infinity, or if the namespace's spec names no model; INVALID_ARGUMENT if the prefix key has
  // kLiveBit or the priority or the ttl is out of range. Again under the same name is OK and changes nothing.
  virtual absl::Status Publish(SessionId session, const ChunkKey& live, const PublishOptions& options) = 0;

  // The block, pinned by the view. NOT_FOUND is a miss: unknown, evicted, unsealed and not ours, another's live chunk,
  // or one whose bytes were lost. A block on disk comes with its chunk, which is read into memory once however many
  // wait; RESOURCE_EXHAUSTED: there was no memory for it in time; CANCELLED: all who waited have given up.
  virtual void Get(SessionId session, const BlockKey& key, GivenUp given_up, GetDone done) = 0;
  void Get(SessionId session, const BlockKey& key, GetDone done) { Get(session, key, nullptr, std::move(done)); }

  // Longest run of sealed chunks from the front; each is leased to the session (counted, see Release) unless
  // `lease` is false: a probe holds nothing.
  virtual absl::StatusOr<Match> Lookup(SessionId session, absl::Span<const ChunkKey> keys, bool lease) = 0;

  // Keeps sealed chunks, by any name that the session may use, for others: until `ttl` is over whoever of the tenant
  // has the ticket may redeem it. Its leases are its own, so they outlive this session. NOT_FOUND or
  // FAILED_PRECONDITION name the first chunk that is not there or not sealed; INVALID_ARGUMENT: no keys or more than
  // kMaxChunksInCall, or a ttl that is not between zero and kMaxTicketLife.
  virtual absl::StatusOr<TicketId> Share(SessionId session, absl::Span<const ChunkKey> keys, absl::Duration ttl) = 0;

  // Leases the ticket's chunks to the session; returns the keys by which it reads and releases them, in the order of
  // Share. May be done again. NOT_FOUND: the ticket is over, or another tenant's.
  virtual absl::StatusOr<std::vector<ChunkKey>> Redeem(SessionId session, TicketId ticket) = 0;

  // Live keys: the chunk is freed, or goes on under its prefix key alone. Prefix keys: one lease is returned.
  // Keys that the session does not hold are ignored.
  virtual void Release(SessionId session, absl::Span<const ChunkKey> keys) = 0;

  // A hint that these will be asked for, in this order: what lies on disk is read into memory, as far as memory can be
  // had without waiting. Bounded and best effort. False: there is no disk, so that no hint is of use.
  virtual bool Prefetch(SessionId session, absl::Span<const ChunkKey> keys, GivenUp given_up) = 0;
  bool Prefetch(SessionId session, absl::Span<const ChunkKey> keys) { return Prefetch(session, keys, nullptr); }

  // Takes a published chunk's name away; its bytes go when the last lease and view do. NOT_FOUND if there is none. Done
  // when it will not be found again after a restart either.
  virtual void Erase(SessionId session, const ChunkKey& key, EraseDone done) = 0;

  // Done when everything published before the call is on disk and survives a loss of power. Without a disk tier that
  // is at once, and says nothing. An error: something could not be written, which is still in memory.
  virtual void Flush(FlushDone done) = 0;

  // Takes the names of all published chunks of a namespace away at once: readers find none of them from the call on,
  // and after a restart neither, though it takes a while until the last of them is gone. Chunks that are live or leased
  // stay until they are let go. `purge`: what nobody holds is overwritten in memory and trimmed on disk. Done when that
  // has been done; NOT_FOUND if there is no such namespace.
  virtual void Drop(const NamespaceId& ns, bool purge, DropDone done) = 0;

  // How much a tenant, or (`ns`) one namespace of it, may hold, from now on; nullopt: as much as there is. What it
  // holds beyond that stays until it is evicted or given up.
  virtual void SetQuota(absl::string_view tenant, std::optional<NamespaceId> ns, std::optional<Quota> quota) = 0;
  // Of tenants and namespaces that have chunks or a quota.
  virtual std::vector<QuotaInfo> ListQuotas() const = 0;

  // A pinned chunk is not evicted from where it lies, until it is unpinned or loses its name. NOT_FOUND if nothing has
  // the name.
  virtual absl::Status SetPinned(const ChunkKey& published, bool pinned) = 0;

  // Ends every session and answers whoever waits with UNAVAILABLE; done when nothing is under way on disk. No other
  // call may follow but the destructor, which does the same and waits.
  virtual void Close(absl::AnyInvocable<void()> done) = 0;

  virtual StoreStats Stats() const = 0;
  // The chunks numbered above `after`, in that order, `limit` at most. Many are listed by one call after another: what
  // comes or goes meanwhile may be missing.
  virtual std::vector<ChunkInfo> List(uint64_t after, size_t limit) const = 0;

  // For tests: recomputes what the store counts. INTERNAL names what does not agree.
  virtual absl::Status CheckInvariants() const = 0;
};

// `executor` must outlive the store. Blocks while it finds what an earlier store has left on disk. Errors as
// Validate(options), OpenPosixFolder and DiskTier::Open.
absl::StatusOr<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, Executor* executor);
// The same on a folder of one's own, in the place of disk_path; null: none.
absl::StatusOr<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, Executor* executor,
                                                 std::unique_ptr<Folder> folder);

}  // namespace kvferry
