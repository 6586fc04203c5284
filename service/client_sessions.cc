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
  it->second.last_heard = executor_->Now();
  WatchSilence(attachment.session, attachment.generation, it->second.last_heard + 3 * times_.heartbeat);
  return attachment;
}

void ClientSessions::DoHeard(const Attachment& attachment) {
  Session* session = Current(attachment);
  if (session == nullptr) return;
  session->last_heard = executor_->Now();
  if (!session->suspended) return;
  if (Resume(attachment.session, session)) {
    WatchSilence(attachment.session, attachment.generation, session->last_heard + 3 * times_.heartbeat);
  }
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
  return true;
}

void ClientSessions::Suspend(SessionId id, Session* session) {
  session->suspended = true;
  const uint64_t suspension = ++session->suspensions;
  store_->SuspendSession(id);
  const auto still_suspended = [this, id, suspension]() -> Session* {
    const auto it = sessions_.find(id);
    const bool still = it != sessions_.end() && it->second.suspended && it->second.suspensions == suspension;
    return still ? &it->second : nullptr;
  };
  const absl::Time now = executor_->Now();
  executor_->Schedule(now + times_.reservation_grace, [this, id, still_suspended] {
    Session* suspended = still_suspended();
    if (suspended == nullptr) return;
    suspended->chunks->DropAll();
    // Clients that only came to look are not remembered for long.
    if (suspended->chunks->empty()) Remove(id, absl::NotFoundError(absl::StrCat(Name(id), " has ended, unused")));
  });
  executor_->Schedule(now + times_.live_grace, [this, id, still_suspended] {
    if (still_suspended() == nullptr) return;
    KVFERRY_LOG(
        kInfo, absl::StrCat(Name(id), " ends: its client has been gone for ", absl::FormatDuration(times_.live_grace)));
    Remove(id, absl::NotFoundError(absl::StrCat(Name(id), " has ended: nothing was heard from its client for ",
                                                absl::FormatDuration(times_.live_grace))));
  });
}

void ClientSessions::WatchSilence(SessionId id, uint64_t generation, absl::Time when) {
  executor_->Schedule(when, [this, id, generation] {
    Session* session = Current({id, generation});
    if (session == nullptr || session->suspended) return;
    const absl::Time silent = session->last_heard + 3 * times_.heartbeat;
    if (executor_->Now() < silent) {
      WatchSilence(id, generation, silent);
      return;
    }
    ++stats_->sessions_silent;
    Suspend(id, session);
  });
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
