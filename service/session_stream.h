// CacheStore.Session: the life line of one client.
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "kvferry/v1/cache.pb.h"
#include "service/client_sessions.h"
#include "service/live_streams.h"
#include "service/service_context.h"
#include "service/stepper.h"
#include "storage/base/mutex.h"

namespace kvferry {

// Hello first, then heartbeats and releases; what is to be sent is a set of flags, so nothing can pile up. Threads:
// gRPC's and the session table's; all work is done in Step, one at a time.
class SessionStream : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                      public LiveStream,
                      public std::enable_shared_from_this<SessionStream> {
 public:
  // The reactor of one call; it lives until gRPC is done with it.
  static grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Start(ServiceContext* context);

  explicit SessionStream(ServiceContext* context) : context_(context) { ++context_->stats->session_streams; }
  ~SessionStream() override { --context_->stats->session_streams; }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override { context_->streams->Remove(this); }
  void SendDrainNotice() override;
  void Stop() override;
  bool is_bulk() const override { return false; }

 private:
  enum class Event : int { kNothing, kOk, kFailed };

  void Kick();
  void Step();
  void Receive();
  void Hello(const v1::SessionRequest::Hello& hello);
  void Release(const v1::SessionRequest::Release& release);
  void Welcome(const absl::StatusOr<ClientSessions::Attachment>& attached);
  void Write();
  // The first status wins; the call ends when no write is under way.
  void Want(absl::Status status);
  void End(const absl::Status& status);

  ServiceContext* const context_;
  Stepper stepper_;

  // What happened since the last step.
  std::atomic<Event> read_done_{Event::kNothing};
  std::atomic<Event> write_done_{Event::kNothing};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> drain_{false};
  Mutex mu_;
  std::optional<absl::StatusOr<ClientSessions::Attachment>> attach_done_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mu_);  // by the table

  // Touched in Step alone.
  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
  ClientSessions::Attachment attachment_;
  std::shared_ptr<SessionChunks> chunks_;  // of the session, once attached
  uint32_t version_ = 0;                   // of the protocol, agreed on
  std::optional<absl::Status> ending_;
  bool greeted_ = false, attached_ = false;
  bool reading_ = false, writing_ = false, ended_ = false;
  bool owe_welcome_ = false, owe_heartbeat_ = false, owe_drain_ = false;
};

}  // namespace kvferry
