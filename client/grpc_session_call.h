// The Session stream of one attempt, as a mailbox for the session's thread.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "kvferry/v1/cache.grpc.pb.h"
#include "storage/base/mutex.h"

namespace kvferry {

// gRPC's threads put in, one thread takes out. It keeps itself alive until gRPC is done with it. Thread-safe.
class SessionCall : public grpc::ClientBidiReactor<v1::SessionRequest, v1::SessionReply> {
 public:
  static std::shared_ptr<SessionCall> Open(v1::CacheStore::Stub* stub);

  // Sends `request` if nothing is being sent and the stream is not over; says whether it does.
  bool Write(v1::SessionRequest request);
  bool writable() const;
  std::optional<v1::SessionReply> Take();
  // Waits for a reply, the end of a write, the end of the stream, Wake() or `deadline`.
  void Wait(absl::Time deadline);
  void Wake();
  // OK while the stream is not over; then UNAVAILABLE or what the store said.
  absl::Status over() const;
  bool done() const;  // over, and gRPC has let go
  void Cancel() { context_.TryCancel(); }

 private:
  SessionCall() = default;
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  grpc::ClientContext context_;
  std::shared_ptr<SessionCall> self_;  // until OnDone
  v1::SessionRequest request_;         // of the write in progress
  v1::SessionReply reply_;             // of the read in progress

  mutable Mutex mu_;
  CondVar cv_;
  std::deque<v1::SessionReply> replies_ ABSL_GUARDED_BY(mu_);
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // no reply will follow
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
