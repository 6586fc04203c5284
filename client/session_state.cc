#include "client/session_state.h"

#include <algorithm>
#include <utility>

#include "client/interrupt.h"
#include "client/store_error.h"

namespace kvferry {

absl::StatusOr<std::shared_ptr<Connection>> SessionState::Wait(absl::Time deadline) {
  MutexLock lock(&mu_);
  if (up_) return connection_;
  // An attempt under way may have missed a store that came up since: the next one counts.
  const uint64_t target = begun_ + 1;
  wanted_ = std::max(wanted_, target);
  cv_.NotifyAll();
  while (!closed_ && !up_ && ended_ < target) {
    if (WaitUntil(cv_, &mu_, deadline) && !closed_ && !up_ && ended_ < target) {
      return StoreError(url_, "connect", absl::DeadlineExceededError("no answer by the deadline"));
    }
  }
  if (!up_) return WhyDown();
  return connection_;
}

absl::Status SessionState::WaitPatiently(absl::Time deadline) {
  MutexLock lock(&mu_);
  while (!closed_ && !up_ && (why_down_.ok() || absl::IsUnavailable(why_down_))) {
    if (WaitUntil(cv_, &mu_, deadline)) break;
  }
  return up_ ? absl::OkStatus() : WhyDown();
}

std::shared_ptr<Connection> SessionState::Current() const {
  MutexLock lock(&mu_);
  return connection_;
}

uint64_t SessionState::epoch() const {
  MutexLock lock(&mu_);
  return epoch_;
}

uint64_t SessionState::EpochOf(SessionId session) const {
  MutexLock lock(&mu_);
  return session == session_ ? epoch_ : 0;
}

SessionId SessionState::session() const {
  MutexLock lock(&mu_);
  return session_;
}

bool SessionState::BeginAttempt(absl::Duration delay) {
  MutexLock lock(&mu_);
  const absl::Time start = absl::Now();
  while (!closed_) {
    const absl::Time due = wanted_ > begun_ ? std::min(start + delay, last_attempt_ + kMinInterval) : start + delay;
    if (absl::Now() >= due) break;
    cv_.WaitUntil(&mu_, due);
  }
  if (closed_) return false;
  ++begun_;
  last_attempt_ = absl::Now();
  return true;
}

bool SessionState::Up(std::shared_ptr<Connection> connection, SessionId session) {
  MutexLock lock(&mu_);
  const bool lost = session_ != 0 && session != session_;
  if (lost || epoch_ == 0) ++epoch_;
  session_ = session;
  connection_ = std::move(connection);
  up_ = !closed_;
  ended_ = begun_;
  cv_.NotifyAll();
  return lost;
}

void SessionState::Down(absl::Status why) {
  MutexLock lock(&mu_);
  up_ = false;
  why_down_ = std::move(why);
  ended_ = begun_;
  cv_.NotifyAll();
}

void SessionState::Close() {
  MutexLock lock(&mu_);
  closed_ = true;
  up_ = false;
  cv_.NotifyAll();
}

bool SessionState::closed() const {
  MutexLock lock(&mu_);
  return closed_;
}

absl::Status SessionState::WhyDown() const {
  if (closed_) return absl::UnavailableError("store " + url_ + ": this transport is closed; connect again");
  if (why_down_.ok()) return StoreError(url_, "connect", absl::UnavailableError("nobody answers"));
  return StoreError(url_, "connect", why_down_);
}

}  // namespace kvferry
