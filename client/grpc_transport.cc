#include "client/grpc_transport.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/grpc_core.h"
#include "client/grpc_fetch.h"
#include "client/grpc_unary.h"
#include "client/grpc_writer.h"
#include "client/store_error.h"
#include "proto/codec.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr absl::Duration kCloseTimeout = absl::Seconds(2);
constexpr absl::Duration kPrefetchTimeout = absl::Seconds(5);

using Async = class v1::CacheStore::Stub::async;

// gRPC's threads are started once in a process and do not survive fork(): a channel opened in the child would hang.
absl::Status CheckGrpcProcess(const std::string& url) {
  static std::atomic<pid_t> first{0};
  pid_t owner = 0;
  if (first.compare_exchange_strong(owner, getpid()) || owner == getpid()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("store ", url, ": this process was forked from ", owner,
                   ", which uses gRPC; start it with the spawn method, or connect in it alone"));
}

// How long the store may wait before it answers, so that its answer arrives before the deadline.
uint32_t WaitMillis(absl::Duration wait, absl::Time deadline) {
  const absl::Duration left = std::clamp(deadline - absl::Now(), absl::ZeroDuration(), absl::Hours(1));
  const absl::Duration margin = std::min(left / 4, absl::Milliseconds(100));
  return static_cast<uint32_t>(
      absl::ToInt64Milliseconds(std::clamp(wait, absl::ZeroDuration(), absl::Duration(left - margin))));
}

absl::StatusOr<std::vector<ChunkKey>> KeysOf(const v1::RedeemReply& reply) {
  std::vector<ChunkKey> keys;
  for (const v1::ChunkKey& key : reply.keys()) {
    KVFERRY_ASSIGN_OR_RETURN(keys.emplace_back(), FromProto(key));
  }
  return keys;
}

// Calls over the connection of the moment. Thread-safe.
class GrpcTransport : public Transport {
 public:
  explicit GrpcTransport(std::shared_ptr<GrpcCore> core) : core_(std::move(core)) {}

  ~GrpcTransport() override {
    Close();
    if (core_->fork.forked()) new std::shared_ptr<GrpcCore>(core_);  // leaked: its threads cannot be joined here
  }

  void Close() override {
    if (core_->fork.forked()) return;
    core_->session.Stop();
    if (std::shared_ptr<Connection> connection = core_->state.Current(); connection != nullptr) {
      connection->Cancel();
      connection->WaitIdle(absl::Now() + kCloseTimeout);
    }
  }

  absl::Status WaitConnected(absl::Time deadline) { return core_->state.WaitPatiently(deadline); }

  const std::string& url() const override { return core_->url; }
  uint64_t epoch() const override { return core_->fork.forked() ? 0 : core_->state.epoch(); }
  bool fetch_copies() const override { return true; }
  TransportStats Stats() const override { return core_->counters->Snapshot(); }

  absl::StatusOr<NamespaceId> OpenNamespace(const NamespaceSpec& spec, absl::Time deadline) override {
    if (absl::Status status = Validate(spec); !status.ok()) return StoreError(url(), "open namespace", status);
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, Wait(deadline));
    return OpenOn(std::move(connection), spec, deadline);
  }

  absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> Reserve(const kvferry::ReserveRequest& request,
                                                                    absl::Time deadline) override {
    KVFERRY_RETURN_IF_ERROR(core_->Check());
    const std::shared_ptr<const KnownNamespace> known = core_->namespaces.Find(request.ns);
    if (known == nullptr || request.group >= known->layouts.size()) {
      return StoreError(
          url(), "reserve",
          absl::FailedPreconditionError(absl::StrCat("group ", request.group, " of namespace ", ToString(request.ns),
                                                     " is unknown; expected one opened on this transport")));
    }
    auto call = std::make_shared<UnaryCall<v1::ReserveRequest, v1::ReserveReply>>();
    ToProto(request.ns, call->request.mutable_ns());
    call->request.set_group(request.group);
    call->request.set_shard(request.shard);
    call->request.set_count(static_cast<uint32_t>(std::max(request.count, 0)));
    call->on_late = [weak = std::weak_ptr<GrpcCore>(core_), request](const auto& late) {
      std::vector<ChunkKey> keys;
      for (const v1::Id& id : late.reply.ids())
        keys.push_back({request.ns, FromProto(id), request.group, request.shard});
      GiveBack(weak, late.session(), keys);
    };
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, WaitOpen(request.ns, "reserve", deadline));
    call->request.set_wait_ms(WaitMillis(request.wait, deadline));
    KVFERRY_RETURN_IF_ERROR(SendOn(std::move(connection), "reserve", call.get(), &Async::Reserve, deadline));
    std::vector<std::unique_ptr<ChunkWriter>> writers;
    for (const v1::Id& id : call->reply.ids()) {
      const ChunkKey key{request.ns, FromProto(id), request.group, request.shard};
      writers.push_back(std::make_unique<GrpcWriter>(core_, known, key));
    }
    if (static_cast<int>(writers.size()) != request.count) {
      return StoreError(url(), "reserve",
                        absl::InternalError(
                            absl::StrCat("the store reserved ", writers.size(), " chunks, expected ", request.count)));
    }
    return writers;
  }

  absl::Status Publish(const ChunkKey& live, const PrefixName& name, absl::Time deadline) override {
    auto call = std::make_shared<UnaryCall<v1::PublishRequest, v1::PublishReply>>();
    ToProto(live, call->request.mutable_live());
    ToProto(name.prefix_key, call->request.mutable_prefix_key());
    ToProto(name.parent, call->request.mutable_parent());
    call->request.set_priority(name.priority);
    if (name.ttl != absl::InfiniteDuration()) {
      const int64_t ms = absl::ToInt64Milliseconds(absl::Ceil(name.ttl, absl::Milliseconds(1)));
      call->request.set_ttl_ms(static_cast<uint64_t>(std::max<int64_t>(ms, 0)));
    }
    return Send("publish", call.get(), &Async::Publish, deadline);
  }

  absl::StatusOr<LookupResult> Lookup(absl::Span<const ChunkKey> keys, bool lease, absl::Time deadline) override {
    auto call = std::make_shared<UnaryCall<v1::LookupRequest, v1::LookupReply>>();
    for (const ChunkKey& key : keys) ToProto(key, call->request.add_keys());
    call->request.set_lease(lease);
    call->on_late = [weak = std::weak_ptr<GrpcCore>(core_), lease,
                     keys = std::vector<ChunkKey>(keys.begin(), keys.end())](const auto& late) {
      const size_t found = std::min<size_t>(late.reply.chunks(), keys.size());
      if (lease) GiveBack(weak, late.session(), absl::MakeConstSpan(keys).first(found));
    };
    const NamespaceId ns = keys.empty() ? NamespaceId{} : keys[0].ns;
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, WaitOpen(ns, "lookup", deadline));
    KVFERRY_RETURN_IF_ERROR(SendOn(std::move(connection), "lookup", call.get(), &Async::Lookup, deadline));
    return LookupResult{static_cast<int>(call->reply.chunks()), call->reply.bytes(),
                        core_->state.EpochOf(call->session())};
  }

  absl::StatusOr<uint64_t> Share(absl::Span<const ChunkKey> keys, absl::Duration ttl, absl::Time deadline) override {
    auto call = std::make_shared<UnaryCall<v1::ShareRequest, v1::ShareReply>>();
    for (const ChunkKey& key : keys) ToProto(key, call->request.add_keys());
    call->request.set_ttl_ms(static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Milliseconds(ttl))));
    KVFERRY_RETURN_IF_ERROR(Send("share", call.get(), &Async::Share, deadline));
    return call->reply.ticket();
  }

  absl::StatusOr<RedeemResult> Redeem(uint64_t ticket, absl::Time deadline) override {
    auto call = std::make_shared<UnaryCall<v1::RedeemRequest, v1::RedeemReply>>();
    call->request.set_ticket(ticket);
    call->on_late = [weak = std::weak_ptr<GrpcCore>(core_)](const auto& late) {
      if (const auto keys = KeysOf(late.reply); keys.ok()) GiveBack(weak, late.session(), *keys);
    };
    KVFERRY_RETURN_IF_ERROR(Send("redeem", call.get(), &Async::Redeem, deadline));
    KVFERRY_ASSIGN_OR_RETURN(std::vector<ChunkKey> keys, KeysOf(call->reply));
    return RedeemResult{std::move(keys), core_->state.EpochOf(call->session())};
  }

  void Release(absl::Span<const ChunkKey> keys, uint64_t epoch) override { core_->Release(keys, epoch); }

  std::unique_ptr<FetchStream> Fetch(absl::Span<const BlockKey> keys, absl::Time deadline) override {
    return std::make_unique<GrpcFetch>(core_, keys, deadline);
  }

  void Prefetch(absl::Span<const ChunkKey> keys) override {
    if (core_->fork.forked() || core_->state.closed()) return;
    std::shared_ptr<Connection> connection = core_->state.Current();
    if (connection == nullptr) return;
    auto call = std::make_shared<UnaryCall<v1::PrefetchRequest, v1::PrefetchReply>>();
    call->request.set_session(connection->session());
    for (const ChunkKey& key : keys) ToProto(key, call->request.add_keys());
    call->Start(std::move(connection), &Async::Prefetch, absl::Now() + kPrefetchTimeout);
  }

  absl::Status Erase(const ChunkKey& key, absl::Time deadline) override {
    auto call = std::make_shared<UnaryCall<v1::EraseRequest, v1::EraseReply>>();
    ToProto(key, call->request.mutable_key());
    return Send("erase", call.get(), &Async::Erase, deadline);
  }

  absl::Status Flush(absl::Time deadline) override {
    auto call = std::make_shared<UnaryCall<v1::FlushRequest, v1::FlushReply>>();
    return Send("flush", call.get(), &Async::Flush, deadline);
  }

 private:
  // What an answer that nobody waited for has handed out.
  static void GiveBack(const std::weak_ptr<GrpcCore>& weak, SessionId session, absl::Span<const ChunkKey> keys) {
    const std::shared_ptr<GrpcCore> core = weak.lock();
    if (core != nullptr) core->Release(keys, core->state.EpochOf(session));
  }

  absl::StatusOr<std::shared_ptr<Connection>> Wait(absl::Time deadline) {
    KVFERRY_RETURN_IF_ERROR(core_->Check());
    return core_->state.Wait(deadline);
  }

  // Sends the call's request within the session of the moment and waits for its reply.
  template <typename Call>
  absl::Status Send(absl::string_view name, Call* call, typename Call::Method method, absl::Time deadline) {
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, Wait(deadline));
    return SendOn(std::move(connection), name, call, method, deadline);
  }

  // The connection of the moment, with `ns` open in its session if it has been opened in any before.
  absl::StatusOr<std::shared_ptr<Connection>> WaitOpen(const NamespaceId& ns, absl::string_view name,
                                                       absl::Time deadline) {
    KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection, Wait(deadline));
    const std::shared_ptr<const KnownNamespace> known = core_->namespaces.Find(ns);
    if (known == nullptr || known->session == connection->session()) return connection;
    KVFERRY_ASSIGN_OR_RETURN(const NamespaceId now, OpenOn(connection, known->spec, deadline));
    if (now == ns) return connection;
    return StoreError(
        url(), name,
        absl::FailedPreconditionError(absl::StrCat("the store now calls namespace ", ToString(ns), " ", ToString(now),
                                                   "; it serves another tenant: connect again")));
  }

  template <typename Call>
  absl::Status SendOn(std::shared_ptr<Connection> connection, absl::string_view name, Call* call,
                      typename Call::Method method, absl::Time deadline) {
    call->request.set_session(connection->session());
    call->Start(std::move(connection), method, deadline);
    return StoreError(url(), name, call->Wait(deadline));
  }

  absl::StatusOr<NamespaceId> OpenOn(std::shared_ptr<Connection> connection, const NamespaceSpec& spec,
                                     absl::Time deadline) {
    auto call = std::make_shared<UnaryCall<v1::OpenNamespaceRequest, v1::OpenNamespaceReply>>();
    ToProto(spec, call->request.mutable_spec());
    const SessionId session = connection->session();
    KVFERRY_RETURN_IF_ERROR(
        SendOn(std::move(connection), "open namespace", call.get(), &Async::OpenNamespace, deadline));
    const NamespaceId ns = FromProto(call->reply.ns());
    core_->namespaces.Add(ns, spec)->session = session;
    return ns;
  }

  const std::shared_ptr<GrpcCore> core_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> NewGrpcTransport(const std::string& url, const ConnectOptions& options) {
  KVFERRY_ASSIGN_OR_RETURN(const std::string target, DialTarget(url));
  KVFERRY_RETURN_IF_ERROR(CheckGrpcProcess(url));
  auto transport = std::make_shared<GrpcTransport>(std::make_shared<GrpcCore>(url, target, options.heartbeat));
  KVFERRY_RETURN_IF_ERROR(transport->WaitConnected(absl::Now() + options.connect_timeout));
  return transport;
}

}  // namespace kvferry
