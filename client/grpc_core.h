// What a grpc transport shares with its writers and streams, which may outlive it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/block_pool.h"
#include "client/fork_guard.h"
#include "client/grpc_connection.h"
#include "client/grpc_put_call.h"
#include "client/grpc_session.h"
#include "client/namespace_book.h"
#include "client/release_queue.h"
#include "client/session_state.h"
#include "client/suspension.h"
#include "client/transport_counters.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Thread-safe. REQUIRES: owned by a shared_ptr.
class GrpcCore : public std::enable_shared_from_this<GrpcCore> {
 public:
  GrpcCore(std::string url, std::string target, absl::Duration heartbeat)
      : url(std::move(url)),
        state(this->url),
        suspension(heartbeat, absl::Now()),
        session({this->url, std::move(target), &state, &releases, &suspension, counters.get()}, heartbeat) {}

  // FAILED_PRECONDITION in a forked child.
  absl::Status Check() const { return fork.Check(url); }

  // Gives chunks and leases of this epoch back in the background.
  void Release(absl::Span<const ChunkKey> keys, uint64_t epoch);

  // Sends the block, or calls its `done` with the reason why not: `session` is the one that reserved its chunk.
  void Put(SessionId session, OutgoingBlock block);

  const std::string url;
  const ForkGuard fork;
  const std::shared_ptr<TransportCounters> counters = std::make_shared<TransportCounters>();
  const std::shared_ptr<BlockPool> pool = BlockPool::Create(kKeptForPacking);
  SessionState state;
  ReleaseQueue releases;
  NamespaceBook namespaces;
  SuspensionMeter suspension;
  GrpcSession session;  // last: its thread uses what stands above

 private:
  static constexpr uint64_t kKeptForPacking = 64 * kMiB;

  Mutex put_mu_;
  std::shared_ptr<PutCall> put_ ABSL_GUARDED_BY(put_mu_);
  std::shared_ptr<Connection> put_connection_ ABSL_GUARDED_BY(put_mu_);
};

}  // namespace kvferry
