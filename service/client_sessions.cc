#include "service/client_sessions.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/base/log.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

// Sessions live for their grace period after a client vanished; beyond this many, newcomers are refused.
constexpr size_t kMaxSessions = 100'000;

std::string Name(SessionId session) { return absl::StrFormat("session %016x", session); }

}  // namespace

ClientSessions::ClientSessions(Store* store, Executor* executor, const SessionTimes& times, ServiceStats* stats)
    : store_(store), executor_(executor), times_(times), stats_(stats) {}

void ClientSessions::Attach(std::string tenant, SessionId resume, CloseStream close, AttachDone done) {
  executor_->Schedule(executor_->Now(),
                      [this, tenant = std::move(tenant), resume, close = std::move(close),
                       done = std::move(done)]() mutable { done(DoAttach(tenant, resume, std::move(close))); });
}

void ClientSessions::Heard(const Attachment& attachment) {
  executor_->Schedule(executor_->Now(), [this, attachment] { DoHeard(attachment); });
}

void ClientSessions::Detach(const Attachment& attachment) {
  executor_->Schedule(executor_->Now(), [this, attachment] {
    Session* session = Current(attachment);
    if (session == nullptr) return;
    session->close = nullptr;
    session->generation = 0;
    if (!session->suspended) Suspend(attachment.session, session);
  });
}

void ClientSessions::End(const Attachment& attachment) {
  executor_->Schedule(executor_->Now(), [this, attachment] {
    if (Session* session = Current(attachment); session != nullptr) {
      session->close = nullptr;  // its stream knows
      Remove(attachment.session, absl::OkStatus());
    }
  });
}

void ClientSessions::Drain() {
  executor_->Schedule(executor_->Now(), [this] { draining_ = true; });
}

absl::StatusOr<std::shared_ptr<SessionChunks>> ClientSessions::Find(SessionId session) const {
  MutexLock lock(&mu_);
  const auto it = chunks_.find(session);
  if (it == chunks_.end()) {
    return absl::NotFoundError(absl::StrCat(Name(session), " is not here: it has ended, or the service was restarted"));
  }
  return it->second;
}

absl::StatusOr<ClientSessions::Attachment> ClientSessions::DoAttach(const std::string& tenant, SessionId resume,
                                                                    CloseStream close) {
  if (draining_) return absl::UnavailableError("the service is draining and takes no new sessions");
  Attachment attachment;
  auto it = sessions_.find(resume);
  if (it != sessions_.end() && it->second.tenant == tenant) {
    Session& session = it->second;
    if (session.close != nullptr) {
      ++stats_->sessions_superseded;
      std::exchange(session.close,
                    nullptr)(absl::AbortedError(absl::StrCat(Name(resume), " goes on in a newer stream")));
    }
    if (!session.suspended || Resume(resume, &session)) attachment = {resume, 0, true};
  }
  if (!attachment.resumed) {
    if (sessions_.size() >= kMaxSessions) {
      return absl::ResourceExhaustedError(absl::StrCat("there are ", sessions_.size(), " sessions, at most ",
                                                       kMaxSessions, " can be held; those of lost clients end after ",
                                                       absl::FormatDuration(times_.live_grace)));
    }
    KVFERRY_ASSIGN_OR_RETURN(attachment.session, store_->OpenSession(tenant));
    it = sessions_.try_emplace(attachment.session).first;
    it->second.tenant = tenant;
    it->second.chunks = std::make_shared<SessionChunks>();
    MutexLock lock(&mu_);
    chunks_[attachment.session] = it->second.chunks;
  }
  ++(attachment.resumed ? stats_->sessions_resumed : stats_->sessions_opened);
  attachment.generation = next_generation_++;
  it->second.generation = attachment.generation;
  it->second.close = std::move(close);
  Arm(attachment.session, &it->second, kSilence, 3 * times_.heartbeat);
  return attachment;
}

void ClientSessions::DoHeard(const Attachment& attachment) {
  Session* session = Current(attachment);
  if (session == nullptr) return;
  if (session->suspended && !Resume(attachment.session, session)) return;
  Arm(attachment.session, session, kSilence, 3 * times_.heartbeat);
}

ClientSessions::Session* ClientSessions::Current(const Attachment& attachment) {
  const auto it = sessions_.find(attachment.session);
  return it != sessions_.end() && it->second.generation == attachment.generation ? &it->second : nullptr;
}

bool ClientSessions::Resume(SessionId id, Session* session) {
  if (const absl::Status status = store_->ResumeSession(session->tenant, id); !status.ok()) {
    Remove(id, status);
    return false;
  }
  session->suspended = false;
  Disarm(session, kReservations);
  Disarm(session, kLive);
  return true;
}

void ClientSessions::Suspend(SessionId id, Session* session) {
  session->suspended = true;
  store_->SuspendSession(id);
  Disarm(session, kSilence);
  Arm(id, session, kReservations, times_.reservation_grace);
  Arm(id, session, kLive, times_.live_grace);
}

void ClientSessions::Arm(SessionId id, Session* session, TimerKind kind, absl::Duration after) {
  Timer& timer = session->timers[kind];
  timer.due = executor_->Now() + after;
  if (!std::exchange(timer.pending, true)) Wait(id, kind, timer.due);
}

void ClientSessions::Disarm(Session* session, TimerKind kind) { session->timers[kind].due = absl::InfiniteFuture(); }

void ClientSessions::Wait(SessionId id, TimerKind kind, absl::Time until) {
  executor_->Schedule(until, [this, id, kind] { Fire(id, kind); });
}

void ClientSessions::Fire(SessionId id, TimerKind kind) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return;
  Session* session = &it->second;
  Timer& timer = session->timers[kind];
  timer.pending = timer.due != absl::InfiniteFuture() && timer.due > executor_->Now();
  if (timer.pending) Wait(id, kind, timer.due);
  if (timer.pending || timer.due == absl::InfiniteFuture()) return;
  switch (kind) {
    case kSilence:
      ++stats_->sessions_silent;
      Suspend(id, session);
      break;
    case kReservations:
      session->chunks->DropAll();
      // Clients that only came to look are not remembered for long.
      if (!session->chunks->used()) Remove(id, absl::NotFoundError(absl::StrCat(Name(id), " has ended, unused")));
      break;
    case kLive:
      KVFERRY_LOG(kInfo, absl::StrCat("session ", absl::Hex(SessionTag(id), absl::kZeroPad8),
                                      " ends: its client has been gone for ", absl::FormatDuration(times_.live_grace)));
      Remove(id, absl::NotFoundError(absl::StrCat(Name(id), " has ended: nothing was heard from its client for ",
                                                  absl::FormatDuration(times_.live_grace))));
      break;
    case kTimers:
      break;
  }
}

void ClientSessions::Remove(SessionId id, const absl::Status& why) {
  const auto it = sessions_.find(id);
  if (it == sessions_.end()) return;
  const Session session = std::move(it->second);
  sessions_.erase(it);
  {
    MutexLock lock(&mu_);
    chunks_.erase(id);
  }
  session.chunks->Close();
  store_->EndSession(id);
  if (session.close != nullptr) session.close(why);
}

}  // namespace kvferry
