#include "client/grpc_connection.h"

#include <sys/un.h>

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/interrupt.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"
#include "proto/codec.h"
#include "proto/frame.h"

namespace kvferry {
namespace {

// When the last channel of a process goes, gRPC joins the threads that run callbacks and shuts down. On one of those
// very threads, where the last share of a channel often goes, that ends in a crash; elsewhere it may take ten seconds.
// So one channel, which leads nowhere, stays; its one call makes it hold the threads.
void KeepGrpcUp() {
  struct Call {
    grpc::ClientContext context;
    v1::FlushRequest request;
    v1::FlushReply reply;
  };
  // Volatile: nobody reads it, and yet it must be there for leak checkers to find.
  [[maybe_unused]] static std::shared_ptr<grpc::Channel>* volatile kept = [] {
    auto* const channel = new std::shared_ptr<grpc::Channel>(grpc::CreateCustomChannel("", nullptr, {}));
    auto call = std::make_shared<Call>();
    const auto stub = v1::CacheStore::NewStub(*channel);
    stub->async()->Flush(&call->context, &call->request, &call->reply, [call](grpc::Status) {});
    return channel;
  }();
}

}  // namespace

std::shared_ptr<grpc::Channel> Dial(const std::string& target) {
  KeepGrpcUp();
  // Larger frames, windows and read chunks make no difference that can be measured.
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(kMaxMessageBytes);
  args.SetMaxSendMessageSize(kMaxMessageBytes);
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);     // a call that failed is told to its caller
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // http_proxy is for browsers
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), args);
}

absl::StatusOr<std::string> DialTarget(const std::string& url) {
  absl::string_view rest = url;
  const bool text = url.find('\0') == std::string::npos;
  if (text && absl::ConsumePrefix(&rest, "unix://") && rest.size() > 1 && rest[0] == '/') {
    if (rest.size() < sizeof(sockaddr_un::sun_path)) return absl::StrCat("unix:", rest);
    return absl::InvalidArgumentError(absl::StrCat("store URL \"", url, "\": its path has ", rest.size(),
                                                   " bytes; a unix socket's has at most ",
                                                   sizeof(sockaddr_un::sun_path) - 1, ": use a shorter one"));
  }
  rest = url;
  if (text && absl::ConsumePrefix(&rest, "grpc://")) {
    const size_t colon = rest.rfind(':');
    uint32_t port = 0;
    const bool has_port = colon != absl::string_view::npos && colon > 0 &&
                          rest.find_first_not_of("0123456789", colon + 1) == absl::string_view::npos &&
                          absl::SimpleAtoi(rest.substr(colon + 1), &port) && port > 0 && port <= 65535;
    if (has_port && rest.find('/') == absl::string_view::npos) return absl::StrCat("dns:///", rest);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("store URL is \"", url, "\"; expected unix:///absolute/path or grpc://host:port"));
}

Connection::Connection(std::shared_ptr<grpc::Channel> channel, SessionId session)
    : channel_(std::move(channel)),
      session_(session),
      stub_(v1::CacheStore::NewStub(channel_)),
      raw_(std::make_unique<grpc::GenericStub>(channel_)) {}

std::shared_ptr<grpc::ClientContext> Connection::Begin(absl::Time deadline, std::function<void()> cancelled) {
  auto context = std::make_shared<grpc::ClientContext>();
  if (deadline != absl::InfiniteFuture()) context->set_deadline(absl::ToChronoTime(deadline));
  MutexLock lock(&mu_);
  if (cancelled_) return nullptr;
  calls_.emplace(context, std::move(cancelled));
  return context;
}

void Connection::Finish(const std::shared_ptr<grpc::ClientContext>& context) {
  MutexLock lock(&mu_);
  calls_.erase(context);
  if (calls_.empty()) idle_.NotifyAll();
}

void Connection::Cancel() {
  std::vector<std::pair<std::shared_ptr<grpc::ClientContext>, std::function<void()>>> calls;
  {
    MutexLock lock(&mu_);
    cancelled_ = true;
    calls.assign(calls_.begin(), calls_.end());
  }
  for (const auto& [context, cancelled] : calls) {
    context->TryCancel();
    cancelled();
  }
}

bool Connection::cancelled() const {
  MutexLock lock(&mu_);
  return cancelled_;
}

bool Connection::WaitIdle(absl::Time deadline) {
  MutexLock lock(&mu_);
  while (!calls_.empty()) {
    if (WaitUntil(idle_, &mu_, deadline) && !calls_.empty()) return false;
  }
  return true;
}

absl::Status ConnectionLost() { return absl::UnavailableError("the connection was lost"); }

absl::Status CallStatus(const Connection& connection, const grpc::Status& status) {
  return CallStatus(connection, FromGrpc(status));
}

absl::Status CallStatus(const Connection& connection, const absl::Status& status) {
  if (absl::IsCancelled(status)) {  // by us, or by a server that is shutting down when the call arrives
    return connection.cancelled() ? ConnectionLost() : absl::UnavailableError("the store ended the call");
  }
  if (absl::IsNotFound(status) && absl::StartsWith(status.message(), "session ")) {
    return absl::UnavailableError(status.message());
  }
  return status;
}

}  // namespace kvferry
