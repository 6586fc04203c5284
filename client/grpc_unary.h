// One call with one answer.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/grpc_connection.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Not gRPC's blocking call: that one returns only once the socket has taken the request, and so may outlast its
// deadline by as long as the store is stopped. Here whoever waits leaves at the deadline, and the call's memory stays
// for gRPC. Thread-safe.
template <typename Request, typename Reply>
class UnaryCall : public std::enable_shared_from_this<UnaryCall<Request, Reply>> {
 public:
  using Method = void (v1::CacheStore::Stub::async::*)(grpc::ClientContext*, const Request*, Reply*,
                                                       std::function<void(grpc::Status)>);

  Request request;
  Reply reply;  // REQUIRES to read it: Wait() returned OK.

  // Sends `request`. REQUIRES: called once, on a call that a shared_ptr owns.
  void Start(std::shared_ptr<Connection> connection, Method method, absl::Time deadline) {
    auto self = this->shared_from_this();
    connection_ = std::move(connection);
    context_ = connection_->Begin(deadline, [weak = this->weak_from_this()] {
      if (auto call = weak.lock(); call != nullptr) call->Set(ConnectionLost());
    });
    if (context_ == nullptr) return Set(ConnectionLost());
    (connection_->stub().async()->*method)(context_.get(), &request, &reply, [self](grpc::Status status) {
      self->connection_->Finish(self->context_);
      self->Set(CallStatus(*self->connection_, status));
    });
  }

  absl::Status Wait(absl::Time deadline) {
    MutexLock lock(&mu_);
    while (!status_.has_value()) {
      if (cv_.WaitUntil(&mu_, deadline) && !status_.has_value()) {
        status_ = absl::DeadlineExceededError("no answer by the deadline");  // and no later one is looked at
      }
    }
    return *status_;
  }

 private:
  // The first one counts.
  void Set(absl::Status status) {
    MutexLock lock(&mu_);
    if (!status_.has_value()) status_ = std::move(status);
    cv_.NotifyAll();
  }

  std::shared_ptr<Connection> connection_;
  std::shared_ptr<grpc::ClientContext> context_;
  Mutex mu_;
  CondVar cv_;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
