// What the store, its writers and its timers share.
#pragma once

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "storage/arena.h"
#include "storage/base/mutex.h"
#include "storage/disk/disk_tier.h"
#include "storage/index.h"
#include "storage/namespaces.h"
#include "storage/reserve_queue.h"
#include "storage/session.h"
#include "storage/store.h"
#include "storage/transfers.h"

namespace kvferry {

// One mutex over sessions, namespaces, index, waiting reservations and transfers: each operation of the store is one
// step, seen whole or not at all. It is held for hash look-ups only; bytes are touched, memory unmapped, transfers
// begun and callbacks run outside it. Lives as long as a writer, timer or transfer does; after Close every one of them
// finds the store closed. Lock order: mu, the disk's, arena, kick_mu_, executor's.
class StoreState : public FreedListener, public std::enable_shared_from_this<StoreState> {
 public:
  StoreState(const StoreOptions& options, Executor* executor, bool has_disk);

  // Takes over what `folder` has, before anything else. Errors as DiskTier::Open.
  absl::Status OpenDisk(std::unique_ptr<Folder> folder) ABSL_LOCKS_EXCLUDED(mu);

  // Ends every session, forgets every chunk (but not on disk), answers with UNAVAILABLE whoever waits, and waits for a
  // task that runs on the executor (unless called from it): afterwards no callback runs but `done`, once nothing is
  // under way on the disk. Again it does nothing. Not thread-safe against calls of the store; against writers, views
  // and timers it is.
  void Close(absl::AnyInvocable<void()> done) ABSL_LOCKS_EXCLUDED(mu);

  // For the analysis of locks, which cannot tell that a helper's state is ours.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(mu) {}

  // Runs `task` on the executor, not before `when`, unless the store is closed by then. Only from calls of the store.
  void RunAt(absl::Time when, absl::AnyInvocable<void(StoreState&)> task);

  // Does the waiting work (grants, late answers, unmapping) on the executor, soon. From anywhere, at any time; false if
  // the store is closed.
  bool Kick() ABSL_LOCKS_EXCLUDED(kick_mu_);
  // Something may have become free or evictable: cheap where nobody waits. Under any lock but the arena's.
  void OnMemoryFreed() override;

  // Drops what the session has reserved and not sealed after one grace, and ends it after the other, unless it is
  // resumed before. Only from calls of the store.
  void SuspendSession(SessionId id) ABSL_LOCKS_EXCLUDED(mu);
  void EndSession(SessionId id) ABSL_LOCKS_EXCLUDED(mu);
  void EndTicket(TicketId id) ABSL_LOCKS_EXCLUDED(mu);

  // The live name of a record is gone.
  void DropLive(Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // Its prefix name has expired, or was dropped with its namespace: nobody has taken it away yet.
  bool IsOver(const Record& record) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return record.epoch != record.ns->epoch || (record.expires && index.ExpiryOf(record) <= executor->Now());
  }
  // nullptr if the index has no such prefix name, one that is over, or another tenant's.
  Record* FindPublished(const Session& session, const ChunkKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // By any name that the session may use: a live one of its own, one it leases (that very chunk, even if its name was
  // erased since), any published one of its tenant.
  Record* FindAny(const Session& session, const ChunkKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Of a readable layer; counted as got.
  BlockView View(const std::shared_ptr<Chunk>& chunk, size_t layer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  // Takes names away as they expire, now and at later times. Call it when one was given that expires; only from calls
  // of the store.
  void ExpireNames() ABSL_LOCKS_EXCLUDED(mu);

  // Bits nobody can guess, as the options say.
  uint64_t NewId() const { return options.random ? options.random() : RandomBits(); }

  // For tests: recomputes everything. INTERNAL names what does not agree.
  absl::Status CheckInvariants() const ABSL_LOCKS_EXCLUDED(mu);

  const StoreOptions options;
  Executor* const executor;  // for calls of the store, during which it is alive; others Kick
  const std::shared_ptr<Arena> arena;
  const bool has_disk;
  std::unique_ptr<DiskTier> disk;  // null without; constant once it is open

  // An answer that is due, on the executor.
  struct Completion {
    ReserveDone done;
    absl::StatusOr<std::vector<std::unique_ptr<ChunkWriter>>> result;
  };

  mutable Mutex mu;
  SessionTable sessions ABSL_GUARDED_BY(mu);
  SessionTable tickets ABSL_GUARDED_BY(mu);
  NamespaceTable namespaces ABSL_GUARDED_BY(mu);
  Index index ABSL_GUARDED_BY(mu);
  ReserveQueue queue ABSL_GUARDED_BY(mu);
  Transfers transfers ABSL_GUARDED_BY(mu);
  std::vector<Completion> due ABSL_GUARDED_BY(mu);
  absl::InlinedVector<absl::AnyInvocable<void()>, 2> after ABSL_GUARDED_BY(mu);  // see Step
  absl::Time next_expiry ABSL_GUARDED_BY(mu) = absl::InfiniteFuture();  // the timer of the first deadline in `queue`
  absl::Time next_name_expiry ABSL_GUARDED_BY(mu) = absl::InfiniteFuture();  // the timer of the index's first one
  StoreStats counters ABSL_GUARDED_BY(mu);                                   // counts only, the gauges are computed
  uint64_t next_seq ABSL_GUARDED_BY(mu) = 1;
  bool closed ABSL_GUARDED_BY(mu) = false;

  // queue.size(), for whoever frees memory without the lock.
  std::atomic<int> waiting{0};

 private:
  // When a session was suspended last, and which timers of it are pending: one of each kind, however often its stream
  // breaks.
  struct Grace {
    absl::Time since;
    bool abort_pending = false, end_pending = false;
  };
  // A pending timer has fired. `over`: the session has been suspended for `length`. `again`: it has been for less, and
  // the timer stays pending until then.
  struct Fired {
    bool over = false;
    absl::Time again = absl::InfiniteFuture();
  };
  Fired Fire(SessionId id, bool Grace::*pending, absl::Duration length) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void AbortReservationsIfOver(SessionId id) ABSL_LOCKS_EXCLUDED(mu);
  void EndSessionIfOver(SessionId id) ABSL_LOCKS_EXCLUDED(mu);

  std::unique_ptr<Session> RemoveSession(SessionId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void Unuse(const NamespaceId& ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void Bury(const Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Takes what the session holds out of the index.
  void Forget(Session* session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  Executor::Task Guarded(absl::AnyInvocable<void(StoreState&)> task);
  bool EnterTask() ABSL_LOCKS_EXCLUDED(kick_mu_);
  void LeaveTask() ABSL_LOCKS_EXCLUDED(kick_mu_);

  absl::flat_hash_map<SessionId, Grace> graces_ ABSL_GUARDED_BY(mu);  // of sessions with a pending timer

  Mutex kick_mu_;
  Executor* kicker_ ABSL_GUARDED_BY(kick_mu_);  // nullptr once closed
  bool kicked_ ABSL_GUARDED_BY(kick_mu_) = false;
  int tasks_running_ ABSL_GUARDED_BY(kick_mu_) = 0;
  std::thread::id task_thread_ ABSL_GUARDED_BY(kick_mu_);
  CondVar task_done_;
};

// One step of the store: holds its mutex while it lives. What was put into `after` meanwhile is done when it ends, in
// that order and under no lock.
class ABSL_SCOPED_LOCKABLE Step {
 public:
  explicit Step(StoreState* state) ABSL_EXCLUSIVE_LOCK_FUNCTION(state->mu) : state_(state) { state_->mu.Lock(); }
  ~Step() ABSL_UNLOCK_FUNCTION() {
    auto after = std::move(state_->after);
    state_->after.clear();
    state_->mu.Unlock();
    for (auto& todo : after) std::move(todo)();
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

 private:
  StoreState* const state_;
};

}  // namespace kvferry
