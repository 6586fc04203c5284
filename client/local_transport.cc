#include "client/local_transport.h"

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "client/fork_guard.h"
#include "client/interrupt.h"
#include "client/store_error.h"
#include "client/transport_counters.h"
#include "storage/base/mutex.h"
#include "storage/base/status.h"
#include "storage/read_ahead.h"

namespace kvferry {
namespace {

// How long the store may take over a deadline that it keeps itself.
constexpr absl::Duration kSlack = absl::Seconds(1);

// What a transport shares with its writers and streams, which may outlive it. Thread-safe.
struct Shared {
  std::string url = "embedded://";
  std::shared_ptr<EmbeddedStore> embedded;
  SessionId session = 0;
  ForkGuard fork;
  TransportCounters counters;
  std::atomic<bool> closed{false};

  Store& store() { return embedded->store(); }

  absl::Status Check() const {
    KVFERRY_RETURN_IF_ERROR(fork.Check(url));
    if (closed) return absl::UnavailableError(absl::StrCat("store ", url, ": closed; connect again"));
    return absl::OkStatus();
  }
};

// One answer that arrives by callback. The callback holds a share, so a late answer has somewhere to go. Thread-safe.
template <typename T>
class Answer {
 public:
  void Set(T value) {
    MutexLock lock(&mu_);
    value_ = std::move(value);
    cv_.NotifyAll();
  }

  // Empty if `deadline` passed first.
  std::optional<T> Wait(absl::Time deadline) {
    MutexLock lock(&mu_);
    while (!value_.has_value()) {
      if (WaitUntil(cv_, &mu_, deadline) && !value_.has_value()) return std::nullopt;
    }
    return std::exchange(value_, std::nullopt);
  }

 private:
  Mutex mu_;
  CondVar cv_;
  std::optional<T> value_ ABSL_GUARDED_BY(mu_);
};

absl::Status TimedOut(const std::string& url, absl::string_view call) {
  return StoreError(url, call, absl::DeadlineExceededError("no answer by the deadline"));
}

// Counts what its store's writer does. Threads: as ChunkWriter.
class LocalWriter : public ChunkWriter {
 public:
  LocalWriter(std::shared_ptr<Shared> shared, std::unique_ptr<ChunkWriter> writer)
      : shared_(std::move(shared)), writer_(std::move(writer)) {}

  ~LocalWriter() override {
    if (shared_->fork.forked()) (void)writer_.release();  // the store's locks may be held by threads that are not here
  }

  const ChunkKey& key() const override { return writer_->key(); }
  MutableByteView Layer(int layer) override { return writer_->Layer(layer); }
  void Discard(int layer) override { writer_->Discard(layer); }

  void Commit(int layer, BlockSum sum, CommitDone done) override {
    if (absl::Status status = shared_->Check(); !status.ok()) {
      shared_->counters.CountPut(false, 0);
      return done(std::move(status));
    }
    const uint64_t bytes = writer_->Layer(layer).size();
    writer_->Commit(layer, sum, [shared = shared_, bytes, done = std::move(done)](absl::Status status) mutable {
      shared->counters.CountPut(status.ok(), bytes);
      done(StoreError(shared->url, "put", status));
    });
  }

 private:
  const std::shared_ptr<Shared> shared_;
  std::unique_ptr<ChunkWriter> writer_;
};

// Asks the store for one block after another, and hints what comes next. Threads: one at a time.
class LocalFetch : public FetchStream {
 public:
  LocalFetch(std::shared_ptr<Shared> shared, absl::Span<const BlockKey> keys, absl::Time deadline)
      : shared_(std::move(shared)), keys_(keys.begin(), keys.end()), deadline_(deadline), ahead_(keys_.size()) {}
  ~LocalFetch() override { *given_up_ = true; }

  absl::StatusOr<BlockView> Next() override {
    if (!end_.ok()) return end_;
    if (next_ == keys_.size()) return absl::OutOfRangeError("all blocks have been returned");
    end_ = shared_->Check();
    if (!end_.ok()) return end_;
    auto answer = std::make_shared<Answer<absl::StatusOr<BlockView>>>();
    shared_->store().Get(shared_->session, keys_[next_], given_up_,
                         [answer](absl::StatusOr<BlockView> block) { answer->Set(std::move(block)); });
    if (hints_are_of_use_) {
      const auto hints = ahead_.Reach(next_, [this](size_t i) { return &keys_[i].chunk; });
      if (!hints.empty()) hints_are_of_use_ = shared_->store().Prefetch(shared_->session, hints, given_up_);
    }
    std::optional<absl::StatusOr<BlockView>> block = answer->Wait(deadline_);
    if (!block.has_value()) {
      end_ = TimedOut(shared_->url, "get");
      return end_;
    }
    ++next_;
    if (absl::Status intact = block->ok() ? (*block)->Verify() : absl::OkStatus(); !intact.ok()) {
      ++shared_->counters.checksum_errors;
      end_ = StoreError(shared_->url, "get", intact);
      return end_;
    }
    if (block->ok()) {
      shared_->counters.CountGot((*block)->size());
    } else if (absl::IsNotFound(block->status())) {
      ++shared_->counters.get_misses;
    } else {
      end_ = StoreError(shared_->url, "get", block->status());
      return end_;
    }
    return *std::move(block);
  }

 private:
  const std::shared_ptr<Shared> shared_;
  const std::vector<BlockKey> keys_;
  const absl::Time deadline_;
  const std::shared_ptr<std::atomic<bool>> given_up_ = std::make_shared<std::atomic<bool>>(false);
  size_t next_ = 0;
  ReadAhead ahead_;
  bool hints_are_of_use_ = true;
  absl::Status end_;
};

// Calls straight through to the store. Thread-safe.
class LocalTransport : public Transport {
 public:
  explicit LocalTransport(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

  ~LocalTransport() override {
    Close();
    if (shared_->fork.forked()) new std::shared_ptr<Shared>(shared_);  // leaked: its thread cannot be joined here
  }

  void Close() override {
    if (shared_->fork.forked() || shared_->closed.exchange(true)) return;
    shared_->store().EndSession(shared_->session);
  }

  const std::string& url() const override { return shared_->url; }
  uint64_t epoch() const override { return 1; }
  bool fetch_copies() const override { return false; }
  TransportStats Stats() const override { return shared_->counters.Snapshot(); }

  absl::StatusOr<NamespaceId> OpenNamespace(const NamespaceSpec& spec, absl::Time) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    absl::StatusOr<NamespaceId> ns = shared_->store().OpenNamespace(shared_->session, spec);
    if (!ns.ok()) return Error("open namespace", ns.status());
    return ns;
  }

  absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> Reserve(const ReserveRequest& request,
                                                                    absl::Time deadline) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    using Writers = std::vector<std::unique_ptr<ChunkWriter>>;
    auto answer = std::make_shared<Answer<absl::StatusOr<Writers>>>();
    ReserveOptions options;
    options.group = request.group;
    options.shard = request.shard;
    options.count = request.count;
    options.deadline =
        request.wait <= absl::ZeroDuration() ? absl::InfinitePast() : std::min(deadline, absl::Now() + request.wait);
    shared_->store().Reserve(shared_->session, request.ns, options,
                             [answer](absl::StatusOr<Writers> writers) { answer->Set(std::move(writers)); });
    std::optional<absl::StatusOr<Writers>> writers = answer->Wait(deadline + kSlack);
    if (!writers.has_value()) return TimedOut(url(), "reserve");
    if (!writers->ok()) return Error("reserve", writers->status());
    for (std::unique_ptr<ChunkWriter>& writer : **writers) {
      writer = std::make_unique<LocalWriter>(shared_, std::move(writer));
    }
    return *std::move(writers);
  }

  absl::Status Publish(const ChunkKey& live, const PrefixName& name, absl::Time) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    PublishOptions options;
    options.prefix_key = name.prefix_key;
    options.parent = name.parent;
    options.priority = name.priority;
    options.ttl = name.ttl;
    return Error("publish", shared_->store().Publish(shared_->session, live, options));
  }

  absl::StatusOr<LookupResult> Lookup(absl::Span<const ChunkKey> keys, bool lease, absl::Time) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    absl::StatusOr<Match> match = shared_->store().Lookup(shared_->session, keys, lease);
    if (!match.ok()) return Error("lookup", match.status());
    return LookupResult{match->chunks, match->bytes, epoch()};
  }

  absl::StatusOr<uint64_t> Share(absl::Span<const ChunkKey> keys, absl::Duration ttl, absl::Time) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    absl::StatusOr<TicketId> ticket = shared_->store().Share(shared_->session, keys, ttl);
    if (!ticket.ok()) return Error("share", ticket.status());
    return *ticket;
  }

  absl::StatusOr<RedeemResult> Redeem(uint64_t ticket, absl::Time) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    absl::StatusOr<std::vector<ChunkKey>> keys = shared_->store().Redeem(shared_->session, ticket);
    if (!keys.ok()) return Error("redeem", keys.status());
    return RedeemResult{*std::move(keys), epoch()};
  }

  void Release(absl::Span<const ChunkKey> keys, uint64_t) override {
    if (shared_->Check().ok()) shared_->store().Release(shared_->session, keys);
  }

  std::unique_ptr<FetchStream> Fetch(absl::Span<const BlockKey> keys, absl::Time deadline) override {
    return std::make_unique<LocalFetch>(shared_, keys, deadline);
  }

  void Prefetch(absl::Span<const ChunkKey> keys) override {
    if (shared_->Check().ok()) shared_->store().Prefetch(shared_->session, keys);
  }

  absl::Status Erase(const ChunkKey& key, absl::Time deadline) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    auto answer = std::make_shared<Answer<absl::Status>>();
    shared_->store().Erase(shared_->session, key, [answer](absl::Status status) { answer->Set(std::move(status)); });
    std::optional<absl::Status> status = answer->Wait(deadline);
    return status.has_value() ? Error("erase", *status) : TimedOut(url(), "erase");
  }

  absl::Status Flush(absl::Time deadline) override {
    KVFERRY_RETURN_IF_ERROR(shared_->Check());
    auto answer = std::make_shared<Answer<absl::Status>>();
    shared_->store().Flush([answer](absl::Status status) { answer->Set(std::move(status)); });
    std::optional<absl::Status> status = answer->Wait(deadline);
    return status.has_value() ? Error("flush", *status) : TimedOut(url(), "flush");
  }

 private:
  absl::Status Error(absl::string_view call, const absl::Status& status) const {
    return StoreError(url(), call, status);
  }

  const std::shared_ptr<Shared> shared_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<EmbeddedStore>> EmbeddedStore::Open(const StoreOptions& options) {
  std::shared_ptr<EmbeddedStore> embedded(new EmbeddedStore);
  embedded->executor_ = NewThreadExecutor();
  KVFERRY_ASSIGN_OR_RETURN(embedded->store_, OpenStore(options, embedded->executor_.get()));
  return embedded;
}

absl::StatusOr<std::shared_ptr<Transport>> NewLocalTransport(std::shared_ptr<EmbeddedStore> store) {
  auto shared = std::make_shared<Shared>();
  shared->embedded = std::move(store);
  KVFERRY_ASSIGN_OR_RETURN(shared->session, shared->store().OpenSession("local"));
  return std::make_shared<LocalTransport>(std::move(shared));
}

}  // namespace kvferry
