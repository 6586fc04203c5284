#include "service/server.h"

#include <atomic>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "proto/frame.h"
#include "service/admin_service.h"
#include "service/cache_service.h"
#include "service/service_context.h"
#include "service/unix_socket.h"
#include "storage/base/mutex.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

// After the streams were told to end, how long gRPC waits for the rest before it cuts connections.
constexpr absl::Duration kStopGrace = absl::Seconds(3);

uint64_t RandomBoot() {
  std::random_device random;
  return (uint64_t{random()} << 32 | random()) | 1;  // never 0
}

void Configure(grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder->SetMaxSendMessageSize(kMaxMessageBytes);
  // Two services must never share a port and each get half of the calls.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Find out about peers whose machine is gone; heartbeats find out about processes.
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 120'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 60'000);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
}

void InstallPlugins() {
  static const bool once = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    // It writes a line for every string that is no UTF-8: whoever sends many could fill a disk. Who sends it is told.
    google::protobuf::SetLogHandler(nullptr);
    return true;
  }();
  (void)once;
}

}  // namespace

// Members die from the last to the first: gRPC before the services, the table's executor before the table, the table
// before the store, the store before its executor.
struct Server::Impl {
  std::vector<std::unique_ptr<UnixSocketClaim>> sockets;
  std::vector<std::string> addresses;
  ServiceStats stats;
  LiveStreams streams;
  std::unique_ptr<Executor> store_executor;
  std::unique_ptr<Store> store;
  std::unique_ptr<ClientSessions> sessions;
  std::unique_ptr<Executor> executor;
  ServiceContext context;
  std::unique_ptr<CacheService> cache;
  std::unique_ptr<AdminService> admin;
  std::unique_ptr<grpc::Server> grpc;

  absl::Status Listen(const std::vector<ListenAddress>& listen);
};

absl::Status Server::Impl::Listen(const std::vector<ListenAddress>& listen) {
  if (listen.empty()) return absl::InvalidArgumentError("no address to listen on, expected at least one");
  InstallPlugins();
  grpc::ServerBuilder builder;
  Configure(&builder);
  std::vector<int> ports(listen.size(), 0);
  for (size_t i = 0; i < listen.size(); ++i) {
    if (!listen[i].unix_path.empty()) {
      KVFERRY_ASSIGN_OR_RETURN(auto claim, UnixSocketClaim::Take(listen[i].unix_path));
      sockets.push_back(std::move(claim));
    }
    builder.AddListeningPort(listen[i].ForGrpc(), grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(cache.get());
  builder.RegisterService(admin.get());
  grpc = builder.BuildAndStart();
  for (size_t i = 0; i < listen.size(); ++i) {
    if (grpc == nullptr || ports[i] == 0) {
      if (ports[i] != 0) continue;  // not the one to blame
      return absl::UnavailableError(absl::StrCat("cannot listen on ", listen[i].Url(),
                                                 ": the address is in use or not one of this machine; "
                                                 "stop who serves there, or give another one with --listen"));
    }
    ListenAddress bound = listen[i];
    if (bound.unix_path.empty()) bound.port = ports[i];
    addresses.push_back(bound.Url());
  }
  return grpc != nullptr ? absl::OkStatus() : absl::InternalError("gRPC did not start a server");
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options) {
  auto impl = std::make_unique<Impl>();
  impl->store_executor = NewThreadExecutor();
  KVFERRY_ASSIGN_OR_RETURN(impl->store, OpenStore(options.store, impl->store_executor.get()));
  impl->executor = NewThreadExecutor();
  const SessionTimes times{options.heartbeat, options.store.live_grace, options.store.reservation_grace};
  impl->sessions = std::make_unique<ClientSessions>(impl->store.get(), impl->executor.get(), times, &impl->stats);

  ServiceContext& context = impl->context;
  context.store = impl->store.get();
  context.sessions = impl->sessions.get();
  context.streams = &impl->streams;
  context.stats = &impl->stats;
  context.boot = RandomBoot();
  context.heartbeat = options.heartbeat;
  context.started = absl::Now();
  impl->cache = std::make_unique<CacheService>(&context);
  impl->admin = std::make_unique<AdminService>(&context);
  KVFERRY_RETURN_IF_ERROR(impl->Listen(options.listen));
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

const std::vector<std::string>& Server::Addresses() const { return impl_->addresses; }
Store* Server::store() { return impl_->store.get(); }
const ServiceStats& Server::stats() const { return impl_->stats; }

void Server::Drain() {
  if (impl_->context.draining.exchange(true)) return;
  impl_->sessions->Drain();
  if (auto* health = impl_->grpc->GetHealthCheckService(); health != nullptr) health->SetServingStatus(false);
  impl_->streams.SendDrainNotices();
}

void Server::Shutdown(absl::Duration grace) {
  if (impl_->grpc == nullptr) return;
  Drain();
  impl_->streams.WaitForBulk(absl::Now() + grace);
  impl_->streams.StopAll();
  impl_->grpc->Shutdown(absl::ToChronoTime(absl::Now() + kStopGrace));
  impl_->grpc->Wait();
  impl_->grpc.reset();
}

absl::Status Server::Flush(absl::Duration grace) {
  struct Answer {
    Mutex mu;
    CondVar changed;
    std::optional<absl::Status> status ABSL_GUARDED_BY(mu);
  };
  const auto answer = std::make_shared<Answer>();  // may come after the deadline
  impl_->store->Flush([answer](absl::Status status) {
    MutexLock lock(&answer->mu);
    answer->status = std::move(status);
    answer->changed.NotifyAll();
  });
  const absl::Time deadline = absl::Now() + grace;
  MutexLock lock(&answer->mu);
  while (!answer->status.has_value()) {
    if (!answer->changed.WaitUntil(&answer->mu, deadline) || answer->status.has_value()) continue;
    return absl::DeadlineExceededError(absl::StrCat("not done within ", absl::FormatDuration(grace)));
  }
  return *answer->status;
}

}  // namespace kvferry
