// The thread that keeps a transport's session alive.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/grpc_session_call.h"
#include "client/release_queue.h"
#include "client/session_state.h"
#include "client/suspension.h"
#include "client/transport_counters.h"

namespace kvferry {

// Opens the session, sends heartbeats and releases, and resumes or replaces the session when its stream breaks. What it
// learns goes to `state`. A broken stream alone ends no other call: only silence, a dead channel or the loss of the
// session does. Thread-safe.
class GrpcSession {
 public:
  struct Parts {  // outlive the session
    std::string url, target;
    SessionState* state;
    ReleaseQueue* releases;
    SuspensionMeter* suspension;
    TransportCounters* counters;
  };

  GrpcSession(Parts parts, absl::Duration heartbeat);
  ~GrpcSession() { Stop(); }

  // Releases are waiting.
  void Wake();
  // Says bye if the store listens, cancels every call and joins the thread. Takes two seconds at most.
  void Stop();

 private:
  void Run();
  // Hello and Welcome.
  absl::StatusOr<v1::SessionReply::Welcome> Handshake(SessionCall* stream);
  // Heartbeats and releases until the stream is over; says whether the connection is to be given up as well.
  absl::Status Serve(SessionCall* stream, absl::Duration heartbeat, bool* silent);
  void SayBye(SessionCall* stream);
  void SetInUse(std::shared_ptr<SessionCall> stream, std::shared_ptr<Connection> connection);

  const Parts parts_;
  const absl::Duration heartbeat_;
  Mutex mu_;
  // What Stop() has to wake and to cancel.
  std::shared_ptr<SessionCall> stream_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  Mutex join_mu_;
  std::thread thread_ ABSL_GUARDED_BY(join_mu_);
};

}  // namespace kvferry
