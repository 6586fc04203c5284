#include "storage/reserver.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"
#include "storage/loader.h"
#include "storage/spiller.h"
#include "storage/store_writer.h"

namespace kvferry {
namespace {

absl::Status OutOfRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  return absl::InvalidArgumentError(absl::StrCat("reserve: ", field, " is ", value, ", expected ", low, " to ", high));
}

}  // namespace

void Reserver::Reserve(SessionId session, const NamespaceId& ns, const ReserveOptions& options, ReserveDone done) {
  absl::StatusOr<Writers> result = Writers();
  bool waits = false;
  {
    Step step(&state_);
    DropGivenUp();
    waits = !state_.due.empty();
    absl::StatusOr<MemoryRequest> request = Check(session, ns, options);
    if (request.ok()) {
      ++state_.counters.reserves;
      const bool first = state_.queue.empty();
      const absl::Status fits = FitIntoQuotas(*request);
      std::optional<std::vector<Extent>> extents;
      if (first && fits.ok()) extents = TryAllocate(*request, false);
      if (!fits.ok()) {
        result = fits;
      } else if (extents) {
        result = MakeWriters(*request, *extents);
      } else if (options.deadline <= state_.executor->Now()) {
        result = Refusal(*request, first ? "no memory" : "others wait for memory");
      } else if (state_.queue.full()) {
        result = Refusal(*request, "too many wait for memory");
      } else {
        request->done = std::exchange(done, nullptr);
        Wait(*std::move(request));
        waits = true;
      }
    } else {
      result = std::move(request).status();
    }
  }
  state_.arena->Bury();  // before the memory that took its place in the budget is touched
  // What waits is tried once more, now that whoever frees memory sees it; with chunks that are being read given up.
  if (waits) state_.Kick();
  if (done != nullptr) std::move(done)(std::move(result));
}

bool Reserver::Load(Record* record, bool may_wait) {
  state_.AssertHeld();
  MemoryRequest request;
  request.ns = state_.namespaces.Find(record->ns->id);
  request.options.group = record->group;
  request.options.deadline = state_.executor->Now() + state_.options.load_patience;
  request.load = record;
  DropGivenUp();
  if (!state_.due.empty()) state_.after.push_back([&state = state_] { state.Kick(); });
  if (!state_.queue.HasLoads()) {
    if (const std::optional<std::vector<Extent>> extents = TryAllocate(request, false)) {
      Loader(&state_).Begin(record, extents->front());
      return true;
    }
  }
  if (!may_wait) return false;
  Wait(std::move(request));
  state_.after.push_back([&state = state_] { state.Kick(); });
  return true;
}

void Reserver::Wait(MemoryRequest request) {
  const absl::Time deadline = request.options.deadline;
  state_.queue.Push(std::move(request));
  ++state_.waiting;
  if (const std::optional<absl::Time> expiry = ArmExpiry(deadline)) {
    state_.after.push_back([&state = state_, when = *expiry] { Reserver(&state).ScheduleExpiry(when); });
  }
}

// Whoever stands first and has gone away must not keep the others waiting, nor have anything evicted for him.
void Reserver::DropGivenUp() {
  while (!state_.queue.empty()) {
    const MemoryRequest& front = state_.queue.Front();
    if (front.load != nullptr ? !Loader(&state_).IsGivenUp(front.load) : !HasGivenUp(front.options.given_up)) return;
    MemoryRequest request = state_.queue.PopFront();
    --state_.waiting;
    const absl::Status status = absl::CancelledError("the caller has given up");
    if (request.load != nullptr) {
      Loader(&state_).Refuse(request.load, status);
    } else {
      state_.due.push_back({std::move(request.done), status});
    }
  }
}

void Reserver::Pump() {
  std::vector<StoreState::Completion> answers;
  {
    Step step(&state_);
    for (DropGivenUp(); !state_.closed && !state_.queue.empty(); DropGivenUp()) {
      if (absl::Status fits = FitIntoQuotas(state_.queue.Front()); !fits.ok()) {
        answers.push_back({state_.queue.PopFront().done, std::move(fits)});
        --state_.waiting;
        continue;
      }
      const std::optional<std::vector<Extent>> extents = TryAllocate(state_.queue.Front(), true);
      if (!extents) break;
      MemoryRequest request = state_.queue.PopFront();
      --state_.waiting;
      if (request.load != nullptr) {
        Loader(&state_).Begin(request.load, extents->front());
      } else {
        answers.push_back({std::move(request.done), MakeWriters(request, *extents)});
      }
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
    Step step(&state_);
    if (state_.next_expiry == when) state_.next_expiry = absl::InfiniteFuture();
    for (MemoryRequest& request : state_.queue.TakeExpired(state_.executor->Now())) {
      --state_.waiting;
      absl::Status refusal = Refusal(request, "no memory by the deadline");
      if (request.load != nullptr) {
        Loader(&state_).Refuse(request.load, refusal);
      } else {
        answers.push_back({std::move(request.done), std::move(refusal)});
      }
    }
    expiry = ArmExpiry(state_.queue.NextDeadline());
  }
  if (expiry) ScheduleExpiry(*expiry);
  for (StoreState::Completion& answer : answers) std::move(answer.done)(std::move(answer.result));
  Pump();  // a smaller one may have stood behind it
}

absl::StatusOr<MemoryRequest> Reserver::Check(SessionId id, const NamespaceId& ns_id, const ReserveOptions& options) {
  const Session* session = state_.sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  if (!session->namespaces.contains(ns_id)) return NamespaceNotOpen(ns_id);
  MemoryRequest request;
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

std::optional<std::vector<Extent>> Reserver::TryAllocate(const MemoryRequest& request, bool may_wait) {
  const ChunkLayout& layout = request.layout();
  const uint64_t overhead = ChunkOverhead(layout);
  const uint64_t charge = request.load != nullptr ? 0 : kRecordBytes;  // whoever is loaded has its record
  const size_t count = static_cast<size_t>(request.options.count);
  std::vector<Extent> extents;
  extents.reserve(count);
  bool worth_it = false;
  size_t skipped = 0;
  while (extents.size() < count) {
    if (std::optional<Extent> extent =
            state_.arena->Allocate(request.ns->tenant, layout.image_bytes, overhead, charge)) {
      extents.push_back(*extent);
      continue;
    }
    const uint64_t needed = (count - extents.size()) * (layout.image_bytes + overhead + charge);
    if (!worth_it) {  // evicting everything for a request that cannot be served anyway would serve nobody
      const Arena::Usage usage = state_.arena->usage();
      const Index::Counts& counts = state_.index.counts();
      const uint64_t could_be_free = usage.budget - std::min(usage.budget, usage.used() + usage.reserve) +
                                     (state_.has_disk ? counts.sealed_bytes : counts.evictable_bytes);
      worth_it = could_be_free >= needed;
    }
    if (worth_it && EvictOne(may_wait, &skipped)) continue;
    if (worth_it) Spiller(&state_).Clean(needed);
    break;
  }
  if (extents.size() < count) {
    for (const Extent& extent : extents) state_.arena->PutBack(extent, charge);
    return std::nullopt;
  }
  Spiller(&state_).Clean(0);
  return extents;
}

absl::Status Reserver::FitIntoQuotas(const MemoryRequest& request) {
  if (request.load != nullptr) return absl::OkStatus();  // it counts already
  const uint64_t bytes = static_cast<uint64_t>(request.options.count) * request.layout().image_bytes;
  while (Quotas::Domain* domain = state_.index.quotas().Exceeded(*request.ns, bytes)) {
    QuotaInfo& info = domain->info;
    const uint64_t held = info.used_bytes - domain->evictable_bytes;
    Record* const victim = state_.index.OwnVictim(domain);
    if (victim == nullptr || held + bytes > info.quota->bytes) {
      ++info.refusals;
      ++state_.counters.reserves_refused;
      return absl::ResourceExhaustedError(absl::StrCat(
          "reserve: quota of ", info.ns ? absl::StrCat("namespace ", ToString(*info.ns)) : "tenant", " \"", info.tenant,
          "\" (", QuotaModeName(info.quota->mode), "): asked for ", bytes, " bytes, quota ", info.quota->bytes,
          ", used ", info.used_bytes, ", of which evictable ", domain->evictable_bytes));
    }
    ++info.evictions;
    ++state_.counters.evictions;
    state_.index.Unpublish(victim, /*evicted=*/true);
  }
  return absl::OkStatus();
}

// Drops one chunk from memory, or passes over one that is being read: its memory would not come free now, and a reader
// is a use. False if nothing is left to try. Once all that remain are being read they are dropped too, but only for a
// request that can wait until the readers are done.
bool Reserver::EvictOne(bool may_wait, size_t* skipped) {
  Record* victim = Victim();
  if (victim == nullptr) return false;
  if (victim->chunk.use_count() > 1) {
    // A policy may offer one three times before all others have had their turn: each deferral is a use.
    const size_t most = 3 * state_.index.queued();
    if (*skipped >= most && !may_wait) return false;
    if (*skipped < most) {
      ++*skipped;
      state_.index.Defer(victim);
      return true;
    }
  }
  Drop(victim);
  return true;
}

Record* Reserver::Victim() {
  if (Record* ready = state_.index.Ready()) return ready;
  const Spiller spiller(&state_);
  for (Record* next : {state_.index.Ranked(), state_.index.Held()}) {
    if (next == nullptr) continue;
    const bool kept = state_.has_disk && spiller.IsWanted(*next) && !spiller.IsPaused();
    if (next->disk || (Index::MayLeave(*next) && !kept)) return next;
  }
  return nullptr;
}

void Reserver::Drop(Record* victim) {
  if (victim->disk) return state_.index.SetChunk(victim, nullptr);
  ++state_.counters.evictions;
  Spiller(&state_).Remember(*victim);
  state_.index.Unpublish(victim, /*evicted=*/true);
}

Reserver::Writers Reserver::MakeWriters(const MemoryRequest& request, const std::vector<Extent>& extents) {
  Session* session = state_.sessions.Find(request.session);
  Writers writers;
  writers.reserve(extents.size());
  for (const Extent& extent : extents) {
    const uint64_t counter = session->next_counter++;
    const ChunkKey key{request.ns->id, {session->id, counter}, request.options.group, request.options.shard};
    auto chunk = std::make_shared<Chunk>(state_.arena, extent, request.ns, key);
    state_.namespaces.Use(request.ns);
    Record* const record = state_.index.AddLive(chunk);
    session->live.emplace(counter, record);
    writers.push_back(std::make_unique<StoreWriter>(state_.shared_from_this(), std::move(chunk), record));
  }
  return writers;
}

absl::Status Reserver::Refusal(const MemoryRequest& request, absl::string_view why) {
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
