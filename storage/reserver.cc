#include "storage/reserver.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"
#include "storage/store_writer.h"

namespace kvferry {
namespace {

absl::Status OutOfRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  return absl::InvalidArgumentError(absl::StrCat("reserve: ", field, " is ", value, ", expected ", low, " to ", high));
}

}  // namespace

void Reserver::Reserve(SessionId session, const NamespaceId& ns, const ReserveOptions& options, ReserveDone done) {
  absl::StatusOr<Writers> result = Writers();
  bool answers_due = false;
  std::optional<absl::Time> expiry;
  {
    MutexLock lock(&state_.mu);
    DropGivenUp();
    answers_due = !state_.due.empty();
    absl::StatusOr<PendingReserve> request = Check(session, ns, options);
    if (request.ok()) {
      ++state_.counters.reserves;
      const bool first = state_.queue.empty();
      std::optional<Writers> granted;
      if (first) granted = TryGrant(*request, false);
      if (granted) {
        result = *std::move(granted);
      } else if (options.deadline <= state_.executor->Now()) {
        result = Refusal(*request, first ? "no memory" : "others wait for memory");
      } else if (state_.queue.full()) {
        result = Refusal(*request, "too many wait for memory");
      } else {
        request->done = std::exchange(done, nullptr);
        state_.queue.Push(*std::move(request));
        ++state_.waiting;
        expiry = ArmExpiry(options.deadline);
      }
    } else {
      result = std::move(request).status();
    }
  }
  state_.arena->Bury();  // before the memory that took its place in the budget is touched
  if (answers_due) state_.Kick();
  if (done != nullptr) {  // nobody waits
    std::move(done)(std::move(result));
    return;
  }
  if (expiry) ScheduleExpiry(*expiry);
  // Once more, now that whoever frees memory sees us waiting; and with chunks that are being read given up for us.
  state_.Kick();
}

// Whoever stands first and has gone away must not keep the others waiting, nor have anything evicted for him.
void Reserver::DropGivenUp() {
  while (!state_.queue.empty()) {
    const auto& given_up = state_.queue.Front().options.given_up;
    if (given_up == nullptr || !given_up->load()) return;
    state_.due.push_back({state_.queue.PopFront().done, absl::CancelledError("reserve: the caller has given up")});
    --state_.waiting;
  }
}

void Reserver::Pump() {
  std::vector<StoreState::Completion> answers;
  {
    MutexLock lock(&state_.mu);
    for (DropGivenUp(); !state_.closed && !state_.queue.empty(); DropGivenUp()) {
      std::optional<Writers> granted = TryGrant(state_.queue.Front(), true);
      if (!granted) break;
      answers.push_back({state_.queue.PopFront().done, *std::move(granted)});
      --state_.waiting;
    }
    answers.insert(answers.end(), std::make_move_iterator(state_.due.begin()),
                   std::make_move_iterator(state_.due.end()));
    state_.due.clear();
  }
  state_.arena->Bury();
  for (StoreState::Completion& answer : answers) std::move(answer.done)(std::move(answer.result));
}

// One timer for all who wait, at the first of their deadlines; another one only when a sooner deadline comes.
std::optional<absl::Time> Reserver::ArmExpiry(absl::Time next) {
  if (next >= state_.next_expiry) return std::nullopt;
  return state_.next_expiry = next;
}

void Reserver::ScheduleExpiry(absl::Time when) {
  state_.RunAt(when, [when](StoreState& state) { Reserver(&state).Expire(when); });
}

void Reserver::Expire(absl::Time when) {
  std::vector<StoreState::Completion> answers;
  std::optional<absl::Time> expiry;
  {
    MutexLock lock(&state_.mu);
    if (state_.next_expiry == when) state_.next_expiry = absl::InfiniteFuture();
    for (PendingReserve& request : state_.queue.TakeExpired(state_.executor->Now())) {
      --state_.waiting;
      absl::Status refusal = Refusal(request, "no memory by the deadline");
      answers.push_back({std::move(request.done), std::move(refusal)});
    }
    expiry = ArmExpiry(state_.queue.NextDeadline());
  }
  if (expiry) ScheduleExpiry(*expiry);
  for (StoreState::Completion& answer : answers) std::move(answer.done)(std::move(answer.result));
  Pump();  // a smaller one may have stood behind it
}

absl::StatusOr<PendingReserve> Reserver::Check(SessionId id, const NamespaceId& ns_id, const ReserveOptions& options) {
  const Session* session = state_.sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  if (!session->namespaces.contains(ns_id)) return NamespaceNotOpen(ns_id);
  PendingReserve request;
  request.session = id;
  request.ns = state_.namespaces.Find(session->tenant, ns_id);
  request.options = options;
  const NamespaceSpec& spec = request.ns->spec;
  if (options.count < 1 || options.count > kMaxChunksInCall) {
    return OutOfRange("count", options.count, 1, kMaxChunksInCall);
  }
  if (options.group >= spec.groups.size()) return OutOfRange("group", options.group, 0, spec.groups.size() - 1);
  if (options.shard >= spec.shards) return OutOfRange("shard", options.shard, 0, spec.shards - 1);
  const ChunkLayout& layout = request.layout();
  if (!state_.arena->CouldHold(layout.image_bytes, RecordOverhead(layout), options.count)) {
    ++state_.counters.reserves;
    return Refusal(request, "more than the budget can ever hold");
  }
  return request;
}

std::optional<Reserver::Writers> Reserver::TryGrant(const PendingReserve& request, bool may_wait) {
  const ChunkLayout& layout = request.layout();
  const uint64_t overhead = RecordOverhead(layout);
  const size_t count = request.options.count;
  std::vector<Extent> extents;
  extents.reserve(count);
  bool worth_it = false;
  size_t skipped = 0;
  while (extents.size() < count) {
    if (std::optional<Extent> extent = state_.arena->Allocate(request.ns->tenant, layout.image_bytes, overhead)) {
      extents.push_back(*extent);
      continue;
    }
    if (!worth_it) {  // evicting everything for a request that cannot be served anyway would serve nobody
      const Arena::Usage usage = state_.arena->usage();
      const uint64_t could_be_free =
          usage.budget - usage.used() - usage.reserve + state_.index.counts().evictable_bytes;
      worth_it = could_be_free >= (count - extents.size()) * (layout.image_bytes + overhead);
    }
    if (!worth_it || !EvictOne(may_wait, &skipped)) break;
  }
  if (extents.size() < count) {
    for (const Extent& extent : extents) state_.arena->PutBack(extent);
    return std::nullopt;
  }
  Session* session = state_.sessions.Find(request.session);
  Writers writers;
  writers.reserve(count);
  for (const Extent& extent : extents) writers.push_back(MakeWriter(request, session, extent));
  return writers;
}

// Evicts one chunk, or passes over one that is being read: its memory would not come free now, and a reader is a use.
// False if nothing is left to try. Once all that remain are being read they are evicted too, but only for a request
// that can wait until the readers are done.
bool Reserver::EvictOne(bool may_wait, size_t* skipped) {
  Record* victim = state_.index.Victim();
  if (victim == nullptr) return false;
  if (victim->chunk.use_count() > 1) {
    // A policy may offer one three times before all others have had their turn: each deferral is a use.
    const size_t most = 3 * state_.index.queue_size();
    if (*skipped >= most && !may_wait) return false;
    if (*skipped < most) {
      ++*skipped;
      state_.index.Defer(victim);
      return true;
    }
  }
  ++state_.counters.evictions;
  state_.Unpublish(victim, true);  // the last to hold it: the extent is free at once, unless a reader pins it
  return true;
}

std::unique_ptr<ChunkWriter> Reserver::MakeWriter(const PendingReserve& request, Session* session,
                                                  const Extent& extent) {
  const uint64_t counter = session->next_counter++;
  const ChunkKey key{request.ns->id, {session->id, counter}, request.options.group, request.options.shard};
  auto record = std::make_shared<Record>(std::make_shared<Chunk>(state_.arena, extent, request.ns, key));
  session->live.emplace(counter, record);
  state_.namespaces.Use(request.ns);
  state_.index.AddLive(record.get());
  return std::make_unique<StoreWriter>(state_.shared_from_this(), std::move(record));
}

absl::Status Reserver::Refusal(const PendingReserve& request, absl::string_view why) {
  ++state_.counters.reserves_refused;
  const Arena::Usage usage = state_.arena->usage();
  const Index::Counts& held = state_.index.counts();
  const uint64_t each = request.layout().image_bytes;
  return absl::ResourceExhaustedError(
      absl::StrCat("reserve: ", why, ": asked for ", request.options.count, " chunks of ", each, " bytes (",
                   request.options.count * each, "), budget ", usage.budget, ", used ", usage.used(),
                   ", of which live chunks hold ", held.live_bytes, " and leases ", held.leased_bytes, ", evictable ",
                   held.evictable_bytes, "; ", state_.queue.size(), " requests wait"));
}

}  // namespace kvferry
