#include "storage/store_state.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/reserver.h"

namespace kvferry {

StoreState::StoreState(const StoreOptions& o, Executor* e)
    : options(o),
      executor(e),
      arena(std::make_shared<Arena>(o.memory_bytes, o.segment_bytes)),
      index(o.policy),
      kicker_(e) {}

void StoreState::Close() {
  std::vector<std::unique_ptr<Session>> ended;
  std::vector<RecordPtr> forgotten;
  std::vector<Completion> answers;
  {
    MutexLock lock(&mu);
    closed = true;
    std::vector<SessionId> ids;
    sessions.ForEach([&ids](const Session& session) { ids.push_back(session.id); });
    for (const SessionId id : ids) ended.push_back(RemoveSession(id));
    ids.clear();
    tickets.ForEach([&ids](const Session& ticket) { ids.push_back(ticket.id); });
    for (const TicketId id : ids) Forget(ended.emplace_back(tickets.Remove(id)).get());
    index.ForEachPublished([&forgotten](const RecordPtr& record) { forgotten.push_back(record); });
    for (const RecordPtr& record : forgotten) Unpublish(record.get());
    answers = std::move(due);
    due.clear();
    for (Completion& answer : answers) answer.result = absl::UnavailableError("reserve: the store is closing");
  }
  {
    MutexLock lock(&kick_mu_);
    kicker_ = nullptr;
    while (tasks_running_ != 0 && task_thread_ != std::this_thread::get_id()) task_done_.Wait(&kick_mu_);
  }
  ended.clear();
  forgotten.clear();
  arena->Bury();
  for (Completion& answer : answers) std::move(answer.done)(std::move(answer.result));
}

void StoreState::RunAt(absl::Time when, absl::AnyInvocable<void(StoreState&)> task) {
  executor->Schedule(when, Guarded(std::move(task)));
}

bool StoreState::Kick() {
  MutexLock lock(&kick_mu_);
  if (kicker_ == nullptr) return false;
  if (kicked_) return true;
  kicked_ = true;
  kicker_->Schedule(kicker_->Now(), Guarded([](StoreState& state) {
                      {
                        MutexLock relock(&state.kick_mu_);
                        state.kicked_ = false;  // what is freed from here on needs another kick
                      }
                      Reserver(&state).Pump();
                    }));
  return true;
}

Executor::Task StoreState::Guarded(absl::AnyInvocable<void(StoreState&)> task) {
  return [weak = weak_from_this(), task = std::move(task)]() mutable {
    const std::shared_ptr<StoreState> state = weak.lock();
    if (state == nullptr || !state->EnterTask()) return;
    std::move(task)(*state);
    state->LeaveTask();
  };
}

bool StoreState::EnterTask() {
  MutexLock lock(&kick_mu_);
  if (kicker_ == nullptr) return false;
  ++tasks_running_;
  task_thread_ = std::this_thread::get_id();
  return true;
}

void StoreState::LeaveTask() {
  MutexLock lock(&kick_mu_);
  --tasks_running_;
  task_done_.NotifyAll();
}

void StoreState::OnMemoryFreed() {
  if (waiting.load() == 0 && !arena->HasRetired()) return;
  if (!Kick()) arena->Bury();  // closed: no lock of ours is held any more
}

void StoreState::SuspendSession(SessionId id) {
  const absl::Time now = executor->Now();
  bool arm_abort, arm_end;
  {
    MutexLock lock(&mu);
    Session* session = sessions.Find(id);
    if (session == nullptr || session->suspended) return;
    session->suspended = true;
    Grace& grace = graces_[id];
    grace.since = now;
    arm_abort = !std::exchange(grace.abort_pending, true);
    arm_end = !std::exchange(grace.end_pending, true);
  }
  if (arm_abort) {
    RunAt(now + options.reservation_grace, [id](StoreState& state) { state.AbortReservationsIfOver(id); });
  }
  if (arm_end) RunAt(now + options.live_grace, [id](StoreState& state) { state.EndSessionIfOver(id); });
}

StoreState::Fired StoreState::Fire(SessionId id, bool Grace::*pending, absl::Duration length) {
  const auto it = graces_.find(id);
  const Session* session = sessions.Find(id);
  const bool suspended = session != nullptr && session->suspended;
  const absl::Time end = it->second.since + length;
  if (suspended && executor->Now() < end) return {false, end};
  it->second.*pending = false;
  if (!it->second.abort_pending && !it->second.end_pending) graces_.erase(it);
  return {suspended};
}

void StoreState::AbortReservationsIfOver(SessionId id) {
  std::vector<RecordPtr> aborted;  // die after the lock is gone
  Fired fired;
  {
    MutexLock lock(&mu);
    fired = Fire(id, &Grace::abort_pending, options.reservation_grace);
    if (fired.over) {
      Session* session = sessions.Find(id);
      for (const auto& [counter, record] : session->live) {
        if (!record->sealed) aborted.push_back(record);
      }
      for (const RecordPtr& record : aborted) {
        session->live.erase(record->chunk->key().id[1]);
        DropLive(record.get());
      }
    }
  }
  if (fired.again != absl::InfiniteFuture()) {
    RunAt(fired.again, [id](StoreState& state) { state.AbortReservationsIfOver(id); });
  }
  if (aborted.empty()) return;
  aborted.clear();
  OnMemoryFreed();
}

void StoreState::EndSessionIfOver(SessionId id) {
  std::unique_ptr<Session> session;  // dies after the lock is gone
  Fired fired;
  {
    MutexLock lock(&mu);
    fired = Fire(id, &Grace::end_pending, options.live_grace);
    if (fired.over) {
      ++counters.sessions_expired;
      session = RemoveSession(id);
    }
  }
  if (fired.again != absl::InfiniteFuture()) {
    RunAt(fired.again, [id](StoreState& state) { state.EndSessionIfOver(id); });
  }
  if (session == nullptr) return;
  session.reset();
  Kick();
}

void StoreState::EndSession(SessionId id) {
  std::unique_ptr<Session> session;  // dies after the lock is gone
  {
    MutexLock lock(&mu);
    session = RemoveSession(id);
  }
  if (session == nullptr) return;
  session.reset();
  Kick();
}

void StoreState::EndTicket(TicketId id) {
  std::unique_ptr<Session> ticket;  // dies after the lock is gone
  {
    MutexLock lock(&mu);
    ticket = tickets.Remove(id);
    if (ticket == nullptr) return;
    Forget(ticket.get());
  }
  ticket.reset();
  Kick();
}

std::unique_ptr<Session> StoreState::RemoveSession(SessionId id) {
  std::unique_ptr<Session> session = sessions.Remove(id);
  if (session != nullptr) Forget(session.get());
  return session;
}

void StoreState::Forget(Session* session) {
  for (const auto& [counter, record] : session->live) DropLive(record.get());
  for (const auto& [key, lease] : session->leases) index.Unlease(lease.record.get(), lease.count);
  for (const NamespaceId& ns : session->namespaces) Unuse(ns);
  arena->Uncharge(kSessionBytes + session->leases.size() * kLeaseBytes +
                  session->namespaces.size() * kOpenNamespaceBytes + session->shared.size() * sizeof(ChunkKey));
  if (sessions.CountOf(session->tenant) == 0) arena->SetActive(session->tenant, false);
  for (PendingReserve& request : queue.TakeAllOf(session->id)) {
    --waiting;
    due.push_back({std::move(request.done), absl::NotFoundError(absl::StrCat("session ", absl::Hex(session->id),
                                                                             " ended while it waited for memory"))});
  }
}

void StoreState::ExpireNames() {
  constexpr size_t kMostAtOnce = 256;  // under one hold of the lock
  std::vector<RecordPtr> expired;      // die after the lock is gone
  absl::Time again = absl::InfiniteFuture();
  {
    MutexLock lock(&mu);
    const absl::Time now = executor->Now();
    if (next_name_expiry <= now) next_name_expiry = absl::InfiniteFuture();  // the timer that has fired
    for (; index.NextExpiry() <= now && expired.size() < kMostAtOnce; ++counters.expirations) {
      expired.push_back(Unpublish(index.FirstToExpire()));
    }
    if (index.NextExpiry() < next_name_expiry) again = next_name_expiry = index.NextExpiry();
  }
  if (again != absl::InfiniteFuture()) RunAt(again, [](StoreState& state) { state.ExpireNames(); });
  if (expired.empty()) return;
  expired.clear();
  OnMemoryFreed();
}

void StoreState::DropLive(Record* record) {
  if (!record->sealed) ++counters.reservations_aborted;
  index.DropLive(record);
  if (!record->published) Unuse(record->chunk->key().ns);
}

RecordPtr StoreState::Unpublish(Record* record, bool evicted) {
  RecordPtr out = index.Unpublish(record, evicted);
  if (!record->live) Unuse(record->chunk->key().ns);
  return out;
}

void StoreState::Unuse(const NamespaceId& ns) {
  if (const uint64_t bytes = namespaces.Unuse(ns); bytes != 0) arena->Uncharge(bytes);
}

}  // namespace kvferry
