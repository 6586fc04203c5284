#include "storage/store_state.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/loader.h"
#include "storage/reserver.h"
#include "storage/spiller.h"

namespace kvferry {

StoreState::StoreState(const StoreOptions& o, Executor* e, bool with_disk)
    : options(o),
      executor(e),
      arena(std::make_shared<Arena>(o.memory_bytes, o.segment_bytes)),
      has_disk(with_disk),
      index({o.policy, with_disk,
             [this](const Record& record) {
               AssertHeld();
               Bury(record);
             }}),
      kicker_(e) {}

absl::Status StoreState::OpenDisk(std::unique_ptr<Folder> folder) {
  DiskTierOptions disk_options;
  disk_options.bytes = options.disk_bytes;
  disk_options.keep_free_bytes = options.disk_keep_free_bytes;
  disk_options.freed = [weak = weak_from_this()] {
    if (const std::shared_ptr<StoreState> state = weak.lock()) Spiller(state.get()).Resume();
  };
  disk_options.moved = [weak = weak_from_this()](const ImageEntry& image, uint64_t header_seq, DiskPlace from,
                                                 const absl::StatusOr<DiskPlace>& to) {
    if (const std::shared_ptr<StoreState> state = weak.lock()) Loader(state.get()).Moved(image, header_seq, from, to);
  };
  std::vector<DiskTier::Found> refused;
  absl::flat_hash_map<NamespaceId, std::shared_ptr<const Namespace>> known;
  const auto take = [&](const DiskTier::Found& found) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    std::shared_ptr<const Namespace>& ns = known[found.image.key.ns];
    if (ns == nullptr) {  // its canonical spec has been checked, or nothing of it would be found
      ns = std::make_shared<const Namespace>(found.ns->tenant, *ParseCanonical(found.ns->spec));
    }
    const bool first = namespaces.Find(ns->id) == nullptr;
    if (!arena->TryCharge(kRecordBytes + (first ? ns->bytes : 0))) return refused.push_back(found);
    namespaces.Use(ns);
    ++counters.chunks_found;
    counters.bytes_found += found.image.blocks * kDiskAlignment;
    const uint32_t seconds = found.image.lifetime.expires;
    index.AddFound(ns.get(), found.image, found.place, found.header_seq,
                   seconds == 0 ? absl::InfiniteFuture() : absl::FromUnixSeconds(seconds));
  };
  const auto found = [&](const DiskTier::Found& chunk) {
    MutexLock lock(&mu);
    take(chunk);
  };
  KVFERRY_ASSIGN_OR_RETURN(DiskTier::Opened opened,
                           DiskTier::Open(disk_options, std::move(folder), executor->Now(), found));
  disk = std::move(opened.tier);
  {
    MutexLock lock(&mu);
    next_seq = opened.next_seq;
  }
  for (const DiskTier::Found& chunk : refused) disk->Free(chunk.place, chunk.image.blocks * kDiskAlignment);
  if (!refused.empty()) {
    KVFERRY_LOG(kWarning, absl::StrCat("disk: ", refused.size(), " chunks are given up: a budget of ",
                                       options.memory_bytes, " bytes has no room for their bookkeeping"));
  }
  ExpireNames();  // sets the timer of those that will
  return absl::OkStatus();
}

void StoreState::Close(absl::AnyInvocable<void()> done) {
  std::vector<std::unique_ptr<Session>> ended;
  std::vector<Completion> answers;
  std::vector<FlushDone> flushes;
  std::vector<ChunkLoad::Waiter> gets;
  {
    Step step(this);
    if (std::exchange(closed, true)) return;
    std::vector<SessionId> ids;
    sessions.ForEach([&ids](const Session& session) { ids.push_back(session.id); });
    for (const SessionId id : ids) ended.push_back(RemoveSession(id));
    ids.clear();
    tickets.ForEach([&ids](const Session& ticket) { ids.push_back(ticket.id); });
    for (const TicketId id : ids) Forget(ended.emplace_back(tickets.Remove(id)).get());
    waiting -= static_cast<int>(queue.TakeAllOf(0).size());  // loads
    for (auto& [number, write] : transfers.writes) {
      std::move(write.waiters.begin(), write.waiters.end(), std::back_inserter(flushes));
      index.Unhold(write.record);
    }
    for (auto& [number, load] : transfers.loads) {
      std::move(load->waiters.begin(), load->waiters.end(), std::back_inserter(gets));
      index.Unhold(load->record);
    }
    transfers = {};
    std::vector<Record*> published;
    index.ForEachAfter(0, SIZE_MAX, [&published](uint64_t, Record& record) {
      if (record.published) published.push_back(&record);
    });
    for (Record* record : published) index.Unpublish(record);
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
  arena->Bury();
  for (Completion& answer : answers) std::move(answer.done)(std::move(answer.result));
  for (FlushDone& flush : flushes) std::move(flush)(absl::UnavailableError("flush: the store is closing"));
  for (ChunkLoad::Waiter& get : gets) std::move(get.done)(absl::UnavailableError("get: the store is closing"));
  if (disk == nullptr) return std::move(done)();
  disk->Close(std::move(done));
}

absl::Status StoreState::CheckInvariants() const {
  MutexLock lock(&mu);
  KVFERRY_RETURN_IF_ERROR(index.CheckInvariants());
  KVFERRY_RETURN_IF_ERROR(arena->CheckInvariants());
  if (waiting.load() != static_cast<int>(queue.size())) return absl::InternalError("those who wait are miscounted");
  return transfers.CheckInvariants();
}

void StoreState::Bury(const Record& record) {
  arena->Uncharge(kRecordBytes);
  if (record.disk && !closed) disk->Free(record.disk, record.layout().image_bytes);
  Unuse(record.ns->id);
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
  bool aborted = false;
  Fired fired;
  {
    Step step(this);
    fired = Fire(id, &Grace::abort_pending, options.reservation_grace);
    if (fired.over) {
      auto& live = sessions.Find(id)->live;
      for (auto it = live.begin(); it != live.end();) {
        if (it->second->sealed) {
          ++it;
          continue;
        }
        DropLive(it->second);
        it = live.erase(it);
        aborted = true;
      }
    }
  }
  if (fired.again != absl::InfiniteFuture()) {
    RunAt(fired.again, [id](StoreState& state) { state.AbortReservationsIfOver(id); });
  }
  if (aborted) OnMemoryFreed();
}

void StoreState::EndSessionIfOver(SessionId id) {
  std::unique_ptr<Session> session;  // dies after the lock is gone
  Fired fired;
  {
    Step step(this);
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
    Step step(this);
    session = RemoveSession(id);
  }
  if (session == nullptr) return;
  session.reset();
  Kick();
}

void StoreState::EndTicket(TicketId id) {
  std::unique_ptr<Session> ticket;  // dies after the lock is gone
  {
    Step step(this);
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
  for (const auto& [counter, record] : session->live) DropLive(record);
  for (const auto& [key, lease] : session->leases) index.Unlease(lease.record, lease.count);
  for (const NamespaceId& ns : session->namespaces) Unuse(ns);
  arena->Uncharge(kSessionBytes + session->leases.size() * kLeaseBytes +
                  session->namespaces.size() * kOpenNamespaceBytes + session->shared.size() * sizeof(ChunkKey));
  if (sessions.CountOf(session->tenant) == 0) arena->SetActive(session->tenant, false);
  for (MemoryRequest& request : queue.TakeAllOf(session->id)) {
    --waiting;
    due.push_back({std::move(request.done), absl::NotFoundError(absl::StrCat("session ", absl::Hex(session->id),
                                                                             " ended while it waited for memory"))});
  }
}

void StoreState::ExpireNames() {
  constexpr size_t kMostAtOnce = 256;  // under one hold of the lock
  size_t expired = 0;
  absl::Time again = absl::InfiniteFuture();
  {
    Step step(this);
    const absl::Time now = executor->Now();
    if (next_name_expiry <= now) next_name_expiry = absl::InfiniteFuture();  // the timer that has fired
    for (; index.NextExpiry() <= now && expired < kMostAtOnce; ++expired) {
      index.Unpublish(index.FirstToExpire());
      ++counters.expirations;
    }
    if (index.NextExpiry() < next_name_expiry) again = next_name_expiry = index.NextExpiry();
  }
  if (again != absl::InfiniteFuture()) RunAt(again, [](StoreState& state) { state.ExpireNames(); });
  if (expired != 0) OnMemoryFreed();
}

void StoreState::DropLive(Record* record) {
  if (!record->sealed) ++counters.reservations_aborted;
  index.DropLive(record);
}

Record* StoreState::FindPublished(const Session& session, const ChunkKey& key) const {
  Record* record = index.Find(key);
  return record == nullptr || record->ns->tenant != session.tenant || IsOver(*record) ? nullptr : record;
}

Record* StoreState::FindAny(const Session& session, const ChunkKey& key) const {
  if (key.IsLive()) return session.FindLive(key);
  const auto held = session.leases.find(key);
  return held != session.leases.end() ? held->second.record : FindPublished(session, key);
}

BlockView StoreState::View(const std::shared_ptr<Chunk>& chunk, size_t layer) {
  const MutableByteView slot = chunk->Slot(static_cast<int>(layer));
  ++counters.blocks_got;
  counters.bytes_got += slot.size();
  return BlockView({slot}, chunk->checksums()[layer], chunk);
}

void StoreState::Unuse(const NamespaceId& ns) {
  if (const uint64_t bytes = namespaces.Unuse(ns); bytes != 0) arena->Uncharge(bytes);
}

}  // namespace kvferry
