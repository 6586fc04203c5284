// How a model process reaches a store. One contract (tests/support/transport_contract.h) for every data plane.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "storage/base/block_view.h"
#include "storage/base/chunk_writer.h"
#include "storage/base/key.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

// The blocks of one Fetch, in the order asked for. Destroying it cancels what has not arrived.
// Threads: one at a time.
class FetchStream {
 public:
  virtual ~FetchStream() = default;
  // The next block, waiting for it until the fetch's deadline. NOT_FOUND: this block is a miss, and the next one may
  // follow. OUT_OF_RANGE: all blocks have been returned. Any other error ends the stream and is returned again.
  // Bytes that came over a socket have been checked.
  virtual absl::StatusOr<BlockView> Next() = 0;
};

struct ReserveRequest {
  NamespaceId ns{};
  uint16_t group = 0;
  uint16_t shard = 0;
  int count = 1;
  // How long the store may wait for room; the deadline bounds it and the answer together.
  absl::Duration wait = absl::InfiniteDuration();
};

struct PrefixName {
  Id128 prefix_key{};
  Id128 parent{};                                 // zero for the first chunk
  int priority = kDefaultPriority;                // 0 to kMaxPriority
  absl::Duration ttl = absl::InfiniteDuration();  // the name is gone after this, to the millisecond
};

struct LookupResult {
  int chunks = 0;  // whole chunks found from the front
  uint64_t bytes = 0;
  uint64_t epoch = 0;  // in which they are leased
};

struct RedeemResult {
  std::vector<ChunkKey> keys;  // to fetch and release the chunks by
  uint64_t epoch = 0;          // in which they are leased
};

// Counted since the transport was made.
struct TransportStats {
  uint64_t blocks_put = 0, bytes_put = 0;  // acknowledged
  uint64_t blocks_got = 0, bytes_got = 0;
  uint64_t get_misses = 0, puts_failed = 0, reconnects = 0, checksum_errors = 0;
  uint64_t bytes_in_flight = 0;  // memory of this process: committed, not acknowledged; received, not yet released
};

// Thread-safe. Calls that take a deadline block until it at most and then return DEADLINE_EXCEEDED. UNAVAILABLE: the
// store cannot be reached, is draining, or is not the one that held our session (it restarted); every message names the
// store. Writers and streams may outlive the transport: they then fail with UNAVAILABLE.
class Transport {
 public:
  virtual ~Transport() = default;

  // "embedded://", "unix:///run/kvferry/kvferry.sock", "grpc://host:port".
  virtual const std::string& url() const = 0;

  // Changes whenever the live chunks that this transport's users hold are gone for good (the store restarted, or the
  // session ended while we were away). Holders of keys compare it to know that theirs are dead.
  virtual uint64_t epoch() const = 0;

  virtual absl::StatusOr<NamespaceId> OpenNamespace(const NamespaceSpec& spec, absl::Time deadline) = 0;

  // All writers or none; RESOURCE_EXHAUSTED if the store has no memory for them by the deadline. OpenNamespace must
  // have succeeded for `ns` on this transport before.
  virtual absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> Reserve(const ReserveRequest& request,
                                                                            absl::Time deadline) = 0;

  virtual absl::Status Publish(const ChunkKey& live, const PrefixName& name, absl::Time deadline) = 0;
  virtual absl::StatusOr<LookupResult> Lookup(absl::Span<const ChunkKey> keys, bool lease, absl::Time deadline) = 0;

  // Keeps whole chunks for other processes: until `ttl` is over they may redeem the ticket, with whatever becomes of
  // this one. FAILED_PRECONDITION if a chunk is not whole yet; INVALID_ARGUMENT as Store::Share.
  virtual absl::StatusOr<uint64_t> Share(absl::Span<const ChunkKey> keys, absl::Duration ttl, absl::Time deadline) = 0;
  // Leases on a ticket's chunks, in the order of Share. NOT_FOUND: it is over, or another tenant's.
  virtual absl::StatusOr<RedeemResult> Redeem(uint64_t ticket, absl::Time deadline) = 0;

  // Gives chunks back (live keys) or leases (prefix keys) of `epoch`; those of another one are gone already. Batched,
  // in the background, never blocks. A chunk may be given back while its commits are under way.
  virtual void Release(absl::Span<const ChunkKey> keys, uint64_t epoch) = 0;

  // Starts to read. Never blocks; errors come from Next().
  virtual std::unique_ptr<FetchStream> Fetch(absl::Span<const BlockKey> keys, absl::Time deadline) = 0;

  // True where fetched blocks take memory of this process until they are released (a socket), false where they are
  // views of a store's memory.
  virtual bool fetch_copies() const = 0;

  virtual void Prefetch(absl::Span<const ChunkKey> keys) = 0;
  virtual absl::Status Erase(const ChunkKey& key, absl::Time deadline) = 0;
  virtual absl::Status Flush(absl::Time deadline) = 0;
  virtual TransportStats Stats() const = 0;

  // Ends the session and the transport's threads, as the destructor does, while others still hold the transport: all
  // that is in progress and every later call fails with UNAVAILABLE. Twice is once. Takes a few seconds at most.
  virtual void Close() {}
};

struct ConnectOptions {
  // embedded:// only: the store's budget, at most what this machine or container has. Without it 2 GiB, or 80 % of
  // that if it is less.
  std::optional<uint64_t> memory_bytes;
  // embedded:// only, both or neither: a folder that no other store uses, for what memory cannot hold, and the bound on
  // what is kept there. What was flushed is found by the next one who connects with this folder.
  std::string disk_path;
  std::optional<uint64_t> disk_bytes;
  absl::Duration connect_timeout = absl::Seconds(10);  // how long Connect waits for the first session
  absl::Duration heartbeat = absl::Seconds(5);
};

// Connects and opens a session. INVALID_ARGUMENT for a URL of another form; UNAVAILABLE if nobody answers in time.
absl::StatusOr<std::shared_ptr<Transport>> Connect(const std::string& url, const ConnectOptions& options);

}  // namespace kvferry
