// Whether a transport has a session, and who waits for one. No gRPC in here, so that ThreadSanitizer can judge it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"

namespace kvferry {

class Connection;  // grpc_connection.h; here it is only passed on

// down -> (attempt -> up -> down)* -> closed. One thread, the driver, makes the attempts; any thread may wait for the
// outcome. A waiter never waits for the back-off: it asks for an attempt of its own, at most one each kMinInterval.
class SessionState {
 public:
  static constexpr absl::Duration kMinInterval = absl::Milliseconds(50);

  explicit SessionState(std::string url) : url_(std::move(url)) {}

  // Any thread.
  // The connection in use. While down: waits for an attempt that starts after this call, and if that fails returns
  // UNAVAILABLE saying why; DEADLINE_EXCEEDED if it has no outcome by `deadline`.
  absl::StatusOr<std::shared_ptr<Connection>> Wait(absl::Time deadline);
  // The same, but goes on waiting while attempts fail for want of anybody who answers.
  absl::Status WaitPatiently(absl::Time deadline);
  // The connection in use, or the last one, on which calls may still go on; null before the first. Never waits.
  std::shared_ptr<Connection> Current() const;
  uint64_t epoch() const;
  // The epoch that began with `session`; 0, which no epoch is, if another session has followed it.
  uint64_t EpochOf(SessionId session) const;
  SessionId session() const;  // the last one; 0 before the first

  // The driver.
  // Sleeps for `delay`, less if somebody waits for an attempt or Close() is called. Then an attempt has begun, which Up
  // or Down ends; false if closed instead.
  bool BeginAttempt(absl::Duration delay);
  // Returns true if the session before is gone with its live chunks: the epoch has changed.
  bool Up(std::shared_ptr<Connection> connection, SessionId session);
  void Down(absl::Status why);  // UNAVAILABLE, or what no other attempt can change

  // Any thread. All waits end with UNAVAILABLE, now and from now on.
  void Close();
  bool closed() const;

 private:
  absl::Status WhyDown() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const std::string url_;
  mutable Mutex mu_;
  CondVar cv_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  bool up_ ABSL_GUARDED_BY(mu_) = false;
  SessionId session_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t epoch_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t begun_ ABSL_GUARDED_BY(mu_) = 0;   // attempts
  uint64_t ended_ ABSL_GUARDED_BY(mu_) = 0;   // attempts with an outcome
  uint64_t wanted_ ABSL_GUARDED_BY(mu_) = 0;  // somebody waits for this attempt to end
  absl::Time last_attempt_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  absl::Status why_down_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
