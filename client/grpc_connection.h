// One connection of grpc_transport and the calls that run over it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "kvferry/v1/cache.grpc.pb.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

// What gRPC dials for "unix:///path" or "grpc://host:port"; INVALID_ARGUMENT for anything else.
absl::StatusOr<std::string> DialTarget(const std::string& url);

// A channel that shares neither subchannels nor back-off with another one.
std::shared_ptr<grpc::Channel> Dial(const std::string& target);

// One session's use of a channel: every call in progress, so that losing the session ends them all at once instead of
// at their deadlines. Thread-safe.
class Connection {
 public:
  Connection(std::shared_ptr<grpc::Channel> channel, SessionId session);

  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  SessionId session() const { return session_; }

  v1::CacheStore::Stub& stub() { return *stub_; }
  grpc::GenericStub& raw() { return *raw_; }

  // A context for a call that Cancel() ends, or null if the connection has been cancelled. Finish() when the call is
  // over. Cancel() also calls `cancelled`, because gRPC itself lets a cancelled call go only when the socket has taken
  // what was written to it before, which a store that is stopped may never allow.
  std::shared_ptr<grpc::ClientContext> Begin(absl::Time deadline, std::function<void()> cancelled);
  void Finish(const std::shared_ptr<grpc::ClientContext>& context);

  // Ends every call and lets no other begin.
  void Cancel();
  bool cancelled() const;
  // Returns whether every call has finished by `deadline`.
  bool WaitIdle(absl::Time deadline);

 private:
  const std::shared_ptr<grpc::Channel> channel_;
  const SessionId session_;
  const std::unique_ptr<v1::CacheStore::Stub> stub_;
  const std::unique_ptr<grpc::GenericStub> raw_;

  mutable Mutex mu_;
  CondVar idle_;
  // What to call when they are cancelled.
  absl::flat_hash_map<std::shared_ptr<grpc::ClientContext>, std::function<void()>> calls_ ABSL_GUARDED_BY(mu_);
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

// What becomes of a call when its connection is cancelled.
absl::Status ConnectionLost();

// The outcome of a call over `connection` as our status: a call that Connection::Cancel ended is UNAVAILABLE, and so is
// one whose session the store no longer knows.
absl::Status CallStatus(const Connection& connection, const grpc::Status& status);
absl::Status CallStatus(const Connection& connection, const absl::Status& status);

}  // namespace kvferry
