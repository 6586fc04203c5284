// A transport in front of a real one that misbehaves on request: late acknowledgements, failing calls, blocks that take
// memory of this process as those from a socket do.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/transport.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Thread-safe. Holds acknowledgements back until ReleaseAcks, or hands each to a thread of its own that delivers it a
// little later (`late_acks`).
class FaultyTransport final : public Transport {
 public:
  explicit FaultyTransport(std::shared_ptr<Transport> real);
  ~FaultyTransport() override;

  // Knobs; each may be turned at any time.
  std::atomic<bool> copies{false};  // what fetch_copies() says; then fetched blocks are copies in odd pieces
  std::atomic<bool> late_acks{false};
  std::atomic<bool> hold_acks{false};
  std::atomic<int> fail_fetch_after{-1};   // blocks until one fails UNAVAILABLE; -1: never
  std::atomic<bool> stall_fetches{false};  // no block comes by the deadline
  std::atomic<int> fail_reserves{0};       // how many of the next calls fail
  std::atomic<int> fail_commits{0};
  std::atomic<uint64_t> epoch_added{0};     // as if the store had been restarted
  std::atomic<int> restarts_in_reserve{0};  // how many of the next reserves find it restarted
  absl::StatusCode reserve_code = absl::StatusCode::kResourceExhausted;
  void ReleaseAcks();

  // What was asked for.
  std::atomic<int> blocks_fetched{0}, reserves{0}, commits{0}, fetches{0};
  std::atomic<int64_t> last_deadline_ns{0};  // of a fetch
  std::atomic<int64_t> stalled_since_ns{0};  // when somebody first waited for a fetch that stalls

  const std::string& url() const override { return real_->url(); }
  uint64_t epoch() const override { return real_->epoch() + epoch_added; }
  absl::StatusOr<NamespaceId> OpenNamespace(const NamespaceSpec& spec, absl::Time deadline) override {
    return real_->OpenNamespace(spec, deadline);
  }
  absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> Reserve(const ReserveRequest& request,
                                                                    absl::Time deadline) override;
  absl::Status Publish(const ChunkKey& live, const PrefixName& name, absl::Time deadline) override {
    return real_->Publish(live, name, deadline);
  }
  absl::StatusOr<LookupResult> Lookup(absl::Span<const ChunkKey> keys, bool lease, absl::Time deadline) override {
    return real_->Lookup(keys, lease, deadline);
  }
  absl::StatusOr<uint64_t> Share(absl::Span<const ChunkKey> keys, absl::Duration ttl, absl::Time deadline) override {
    return real_->Share(keys, ttl, deadline);
  }
  absl::StatusOr<RedeemResult> Redeem(uint64_t ticket, absl::Time deadline) override {
    return real_->Redeem(ticket, deadline);
  }
  void Release(absl::Span<const ChunkKey> keys, uint64_t epoch) override { real_->Release(keys, epoch - epoch_added); }
  std::unique_ptr<FetchStream> Fetch(absl::Span<const BlockKey> keys, absl::Time deadline) override;
  bool fetch_copies() const override { return copies; }
  void Prefetch(absl::Span<const ChunkKey> keys) override { real_->Prefetch(keys); }
  absl::Status Erase(const ChunkKey& key, absl::Time deadline) override { return real_->Erase(key, deadline); }
  absl::Status Flush(absl::Time deadline) override { return real_->Flush(deadline); }
  TransportStats Stats() const override { return real_->Stats(); }

  // Called by the writers it hands out.
  void Acknowledge(CommitDone done, absl::Status status);

 private:
  void Deliver();

  const std::shared_ptr<Transport> real_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::pair<CommitDone, absl::Status>> late_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<CommitDone, absl::Status>> held_ ABSL_GUARDED_BY(mu_);
  std::thread deliverer_;
};

}  // namespace kvferry
