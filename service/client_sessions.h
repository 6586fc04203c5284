// Which clients are here: attaches streams to sessions and tells the store when a client is gone, back or done.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "service/service_stats.h"
#include "service/session_chunks.h"
#include "storage/base/mutex.h"
#include "storage/executor.h"
#include "storage/store.h"

namespace kvferry {

struct SessionTimes {
  absl::Duration heartbeat = absl::Seconds(5);  // a client silent for three of these is taken to be gone
  absl::Duration live_grace = absl::Minutes(10);
  absl::Duration reservation_grace = absl::Seconds(30);
};

// Every change of a session's life runs on the executor, one at a time, so suspend, resume and end reach the store in
// the order in which they were decided. Thread-safe. REQUIRES: `store` outlives the executor's tasks, and the table is
// destroyed after the executor.
class ClientSessions {
 public:
  // One stream's hold on a session. A newer stream of the same session ends it: `generation` no longer matches.
  struct Attachment {
    SessionId session = 0;
    uint64_t generation = 0;
    bool resumed = false;
  };
  using AttachDone = absl::AnyInvocable<void(absl::StatusOr<Attachment>)>;
  // How the table ends a stream: superseded, or its session has ended. Called once at most, on the executor.
  using CloseStream = std::function<void(const absl::Status&)>;

  ClientSessions(Store* store, Executor* executor, const SessionTimes& times, ServiceStats* stats);

  // Resumes the session `resume`, or opens a new one if that is 0 or not there any more (then `resumed` is false).
  // UNAVAILABLE after Drain().
  void Attach(std::string tenant, SessionId resume, CloseStream close, AttachDone done);
  // A message came. A session suspended for silence goes on.
  void Heard(const Attachment& attachment);
  // The stream is gone without a word: the session is suspended.
  void Detach(const Attachment& attachment);
  // The client leaves for good.
  void End(const Attachment& attachment);

  // From now on nobody is let in.
  void Drain();

  // What belongs to the session, suspended or not; NOT_FOUND if it has ended or never was. On any thread.
  absl::StatusOr<std::shared_ptr<SessionChunks>> Find(SessionId session) const;

 private:
  enum TimerKind { kSilence, kReservations, kLive, kTimers };
  // At most one task of each is pending, however often a stream breaks: what is due can be put off, never be made
  // sooner.
  struct Timer {
    absl::Time due = absl::InfiniteFuture();
    bool pending = false;
  };
  struct Session {
    std::string tenant;
    std::shared_ptr<SessionChunks> chunks;
    CloseStream close;  // of the attached stream, null without one
    uint64_t generation = 0;
    bool suspended = false;
    Timer timers[kTimers];
  };

  // All of these run on the executor.
  absl::StatusOr<Attachment> DoAttach(const std::string& tenant, SessionId resume, CloseStream close);
  void DoHeard(const Attachment& attachment);
  Session* Current(const Attachment& attachment);
  bool Resume(SessionId id, Session* session);
  void Suspend(SessionId id, Session* session);
  void Arm(SessionId id, Session* session, TimerKind kind, absl::Duration after);
  void Disarm(Session* session, TimerKind kind);
  void Wait(SessionId id, TimerKind kind, absl::Time until);
  void Fire(SessionId id, TimerKind kind);
  void Remove(SessionId id, const absl::Status& why);

  Store* const store_;
  Executor* const executor_;
  const SessionTimes times_;
  ServiceStats* const stats_;

  // Touched on the executor alone.
  absl::flat_hash_map<SessionId, Session> sessions_;
  uint64_t next_generation_ = 1;
  bool draining_ = false;

  mutable Mutex mu_;
  absl::flat_hash_map<SessionId, std::shared_ptr<SessionChunks>> chunks_ ABSL_GUARDED_BY(mu_);  // what Find() reads
};

}  // namespace kvferry
