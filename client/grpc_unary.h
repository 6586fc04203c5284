// One call with one answer.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/grpc_connection.h"
#include "client/interrupt.h"
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
  Reply reply;  // REQUIRES to read it: Wait() returned OK, or in `on_late`.
  // Called on one of gRPC's threads if the store did as it was asked and nobody waits any more: to undo it. May be
  // null.
  std::function<void(const UnaryCall&)> on_late;

  // Sends `request`. REQUIRES: called once, on a call that a shared_ptr owns.
  void Start(std::shared_ptr<Connection> connection, Method method, absl::Time deadline) {
    auto self = this->shared_from_this();
    connection_ = std::move(connection);
    // One whose late answer matters runs on: what the store does for a call that it gave up is not known.
    context_ = connection_->Begin(on_late ? absl::InfiniteFuture() : deadline, [weak = this->weak_from_this()] {
      if (auto call = weak.lock(); call != nullptr) call->Set(ConnectionLost());
    });
    if (context_ == nullptr) {
      Set(ConnectionLost());
      return;
    }
    (connection_->stub().async()->*method)(context_.get(), &request, &reply, [self](grpc::Status status) {
      self->connection_->Finish(self->context_);
      const bool late = !self->Set(CallStatus(*self->connection_, status));
      if (late && status.ok() && self->on_late) self->on_late(*self);
    });
  }

  // The session of the call. REQUIRES: started.
  SessionId session() const { return connection_->session(); }

  absl::Status Wait(absl::Time deadline) {
    MutexLock lock(&mu_);
    while (!status_.has_value()) {
      if (WaitUntil(cv_, &mu_, deadline) && !status_.has_value()) {
        status_ = absl::DeadlineExceededError("no answer by the deadline");  // and no later one is looked at
      }
    }
    return *status_;
  }

 private:
  // The first one counts; says whether this is it.
  bool Set(absl::Status status) {
    MutexLock lock(&mu_);
    if (status_.has_value()) return false;
    status_ = std::move(status);
    cv_.NotifyAll();
    return true;
  }

  std::shared_ptr<Connection> connection_;
  std::shared_ptr<grpc::ClientContext> context_;
  Mutex mu_;
  CondVar cv_;
  std::optional<absl::Status> status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
