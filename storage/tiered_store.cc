#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "storage/base/status.h"
#include "storage/reserver.h"
#include "storage/store.h"
#include "storage/store_state.h"
#include "storage/store_writer.h"

namespace kvferry {
namespace {

constexpr size_t kMaxNamespacesPerSession = 1024;

// The store over its tiers; the memory tier is the only one so far. Every call is one step under the state's mutex.
class TieredStore : public Store {
 public:
  TieredStore(const StoreOptions& options, Executor* executor)
      : state_(std::make_shared<StoreState>(options, executor)) {
    state_->arena->SetListener(state_);
  }
  ~TieredStore() override { state_->Close(); }

  absl::StatusOr<SessionId> OpenSession(absl::string_view tenant) override;
  void SuspendSession(SessionId session) override { state_->SuspendSession(session); }
  absl::Status ResumeSession(absl::string_view tenant, SessionId session) override;
  void EndSession(SessionId session) override { state_->EndSession(session); }
  absl::StatusOr<NamespaceId> OpenNamespace(SessionId session, const NamespaceSpec& spec) override;
  absl::StatusOr<std::shared_ptr<const ChunkLayout>> Layout(SessionId session, const NamespaceId& ns,
                                                            int group) const override;

  void Reserve(SessionId session, const NamespaceId& ns, const ReserveOptions& options, ReserveDone done) override {
    Reserver(state_.get()).Reserve(session, ns, options, std::move(done));
  }
  absl::Status Publish(SessionId session, const ChunkKey& live, const PublishOptions& options) override;
  void Get(SessionId session, const BlockKey& key, GetDone done) override { std::move(done)(FindBlock(session, key)); }
  absl::StatusOr<Match> Lookup(SessionId session, absl::Span<const ChunkKey> keys, bool lease) override;
  absl::StatusOr<TicketId> Share(SessionId session, absl::Span<const ChunkKey> keys, absl::Duration ttl) override;
  absl::StatusOr<std::vector<ChunkKey>> Redeem(SessionId session, TicketId ticket) override;
  void Release(SessionId session, absl::Span<const ChunkKey> keys) override;
  void Prefetch(SessionId, absl::Span<const ChunkKey>) override {}
  absl::Status Erase(SessionId session, const ChunkKey& key) override;
  void Flush(FlushDone done) override { std::move(done)(absl::OkStatus()); }

  StoreStats Stats() const override;
  std::vector<ChunkInfo> List(uint64_t after, size_t limit) const override;

 private:
  absl::Status PublishUntil(SessionId session, const ChunkKey& live, const PublishOptions& options, absl::Time expires);
  bool HasExpired(const Record& record) const {
    return record.expires != absl::InfiniteFuture() && record.expires <= state_->executor->Now();
  }
  absl::StatusOr<BlockView> FindBlock(SessionId session, const BlockKey& key);
  // nullptr if the index has no such prefix name, one that has expired, or another tenant's.
  RecordPtr FindPublished(const Session& session, const ChunkKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);
  // By any name that the session may use: a live one of its own, one it leases (that very chunk, even if its name was
  // erased since), any published one of its tenant.
  RecordPtr FindAny(const Session& session, const ChunkKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);
  // One lease less, if the session has one on the key; the record may die with what is returned, outside the lock.
  RecordPtr ReturnLease(Session* session, const ChunkKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);
  bool LeaseTo(Session* session, const ChunkKey& key, const RecordPtr& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);

  const std::shared_ptr<StoreState> state_;
};

absl::StatusOr<SessionId> TieredStore::OpenSession(absl::string_view tenant) {
  SessionId id = NewSessionId();
  MutexLock lock(&state_->mu);
  while (state_->sessions.Find(id) != nullptr) id = NewSessionId();
  if (!state_->arena->TryCharge(kSessionBytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("session: no memory for its bookkeeping of ", kSessionBytes,
                                                     " bytes, budget ", state_->options.memory_bytes));
  }
  const Session* session = state_->sessions.Open(id, tenant);
  if (state_->sessions.CountOf(tenant) == 1) state_->arena->SetActive(session->tenant, true);
  return id;
}

absl::Status TieredStore::ResumeSession(absl::string_view tenant, SessionId id) {
  MutexLock lock(&state_->mu);
  Session* session = state_->sessions.Find(id);
  if (session == nullptr || session->tenant != tenant) return UnknownSession(id);
  session->suspended = false;
  return absl::OkStatus();
}

absl::StatusOr<NamespaceId> TieredStore::OpenNamespace(SessionId id, const NamespaceSpec& spec) {
  KVFERRY_RETURN_IF_ERROR(Validate(spec));
  std::string tenant;
  {
    MutexLock lock(&state_->mu);
    const Session* session = state_->sessions.Find(id);
    if (session == nullptr) return UnknownSession(id);
    tenant = session->tenant;
  }
  auto ns = std::make_shared<const Namespace>(std::move(tenant), spec);  // hashes: outside the lock
  MutexLock lock(&state_->mu);
  Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  if (session->namespaces.contains(ns->id)) return ns->id;
  const bool known = state_->namespaces.Find(session->tenant, ns->id) != nullptr;
  const uint64_t bytes = kOpenNamespaceBytes + (known ? 0 : ns->bytes);
  if (session->namespaces.size() >= kMaxNamespacesPerSession || !state_->arena->TryCharge(bytes)) {
    return absl::ResourceExhaustedError(absl::StrCat("namespace: the session has ", session->namespaces.size(),
                                                     " open, expected fewer than ", kMaxNamespacesPerSession,
                                                     ", or no ", bytes, " bytes are left for its bookkeeping"));
  }
  state_->namespaces.Use(ns);
  session->namespaces.insert(ns->id);
  return ns->id;
}

absl::StatusOr<std::shared_ptr<const ChunkLayout>> TieredStore::Layout(SessionId id, const NamespaceId& ns_id,
                                                                       int group) const {
  std::shared_ptr<const Namespace> ns;
  {
    MutexLock lock(&state_->mu);
    const Session* session = state_->sessions.Find(id);
    if (session == nullptr) return UnknownSession(id);
    if (!session->namespaces.contains(ns_id)) return NamespaceNotOpen(ns_id);
    ns = state_->namespaces.Find(session->tenant, ns_id);
  }
  if (group < 0 || static_cast<size_t>(group) >= ns->layouts.size()) {
    return absl::InvalidArgumentError(absl::StrCat("group is ", group, ", expected 0 to ", ns->layouts.size() - 1,
                                                   " in namespace ", ToString(ns_id)));
  }
  return std::shared_ptr<const ChunkLayout>(ns, &ns->layouts[group]);
}

absl::Status TieredStore::Publish(SessionId id, const ChunkKey& live, const PublishOptions& options) {
  constexpr Id128 kNone{};
  if ((options.prefix_key[0] & kLiveBit) != 0 || options.prefix_key == kNone) {
    return absl::InvalidArgumentError(absl::StrCat("publish: prefix key is ", ToString(options.prefix_key),
                                                   ", expected one that is not zero and has its highest bit clear"));
  }
  if ((options.parent[0] & kLiveBit) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("publish: parent is ", ToString(options.parent),
                                                   ", expected a prefix key: its highest bit clear"));
  }
  if (options.priority < 0 || options.priority > kMaxPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("publish: priority is ", options.priority, ", expected 0 to ", kMaxPriority));
  }
  if (!(options.ttl > absl::ZeroDuration())) {
    return absl::InvalidArgumentError(
        absl::StrCat("publish: ttl is ", absl::FormatDuration(options.ttl), ", expected more than 0"));
  }
  const bool expires = options.ttl <= absl::Hours(24 * 36525);
  const absl::Time now = state_->executor->Now();
  KVFERRY_RETURN_IF_ERROR(PublishUntil(id, live, options, expires ? now + options.ttl : absl::InfiniteFuture()));
  if (expires) state_->ExpireNames();
  return absl::OkStatus();
}

absl::Status TieredStore::PublishUntil(SessionId id, const ChunkKey& live, const PublishOptions& options,
                                       absl::Time expires) {
  RecordPtr expired;  // dies after the lock is gone
  MutexLock lock(&state_->mu);
  const Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  const RecordPtr* record = session->FindLive(live);
  if (record == nullptr) {
    return absl::NotFoundError(absl::StrCat("publish: session has no live chunk ", ToString(live)));
  }
  if (!(*record)->sealed) {
    return absl::FailedPreconditionError(absl::StrCat("publish: chunk ", ToString(live), " has ",
                                                      (*record)->committed_count, " of ", (*record)->committed.size(),
                                                      " layers committed, expected all"));
  }
  if ((*record)->chunk->ns()->spec.model.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("publish: namespace ", ToString(live.ns),
                                                      " names no model, so a prefix key would not say whose KV it is"));
  }
  const ChunkKey key{live.ns, options.prefix_key, live.group, live.shard};
  if (const RecordPtr other = state_->index.Find(key); other != nullptr && HasExpired(*other)) {
    expired = state_->Unpublish(other.get());
    ++state_->counters.expirations;
  }
  const bool again = (*record)->published;
  KVFERRY_RETURN_IF_ERROR(
      state_->index.Publish(*record, options.prefix_key, options.parent, options.priority, expires));
  if (!again) EncodeHeader(HeaderOf(**record, state_->next_seq++), (*record)->chunk->Image());
  return absl::OkStatus();
}

absl::StatusOr<BlockView> TieredStore::FindBlock(SessionId id, const BlockKey& key) {
  MutexLock lock(&state_->mu);
  const Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  const RecordPtr record = FindAny(*session, key.chunk);
  if (record != nullptr && key.layer >= record->committed.size()) {
    return absl::InvalidArgumentError(absl::StrCat("get: layer is ", key.layer, ", expected 0 to ",
                                                   record->committed.size() - 1, " in chunk ", ToString(key.chunk)));
  }
  if (record == nullptr || !record->committed[key.layer]) {
    ++state_->counters.get_misses;
    return absl::NotFoundError(absl::StrCat("get: no block ", ToString(key)));
  }
  if (record->published) state_->index.Touch(record.get());
  const MutableByteView slot = record->chunk->Slot(key.layer);
  ++state_->counters.blocks_got;
  state_->counters.bytes_got += slot.size();
  return BlockView({slot}, record->checksums[key.layer], record->chunk);
}

absl::StatusOr<Match> TieredStore::Lookup(SessionId id, absl::Span<const ChunkKey> keys, bool lease) {
  Match match;
  MutexLock lock(&state_->mu);
  Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  ++state_->counters.lookups;
  state_->counters.lookup_chunks_asked += keys.size();
  for (const ChunkKey& key : keys) {
    RecordPtr record;
    if (key.IsLive()) {
      const RecordPtr* live = session->FindLive(key);
      if (live == nullptr || !(*live)->sealed) break;
      record = *live;  // the session holds it: a lease would add nothing
    } else {
      record = FindPublished(*session, key);
      if (record == nullptr || (lease && !LeaseTo(session, key, record))) break;
    }
    ++match.chunks;
    match.bytes += record->chunk->layout().image_bytes;
  }
  state_->counters.lookup_chunks_hit += match.chunks;
  return match;
}

bool TieredStore::LeaseTo(Session* session, const ChunkKey& key, const RecordPtr& record) {
  auto held = session->leases.find(key);
  if (held == session->leases.end()) {
    if (!state_->arena->TryCharge(kLeaseBytes)) return false;
    held = session->leases.emplace(key, Session::Lease{record, 0}).first;
  }
  // A lease from before the name was erased and given anew is of the chunk it was taken on, which has the same tokens.
  ++held->second.count;
  state_->index.Lease(held->second.record.get(), 1);
  state_->index.Touch(held->second.record.get());
  return true;
}

absl::StatusOr<TicketId> TieredStore::Share(SessionId id, absl::Span<const ChunkKey> keys, absl::Duration ttl) {
  if (keys.empty() || keys.size() > kMaxChunksInCall) {
    return absl::InvalidArgumentError(
        absl::StrCat("share: number of keys is ", keys.size(), ", expected 1 to ", kMaxChunksInCall));
  }
  if (!(ttl > absl::ZeroDuration()) || ttl > kMaxTicketLife) {
    return absl::InvalidArgumentError(absl::StrCat("share: ttl is ", absl::FormatDuration(ttl),
                                                   ", expected more than 0 and at most ",
                                                   absl::FormatDuration(kMaxTicketLife)));
  }
  TicketId ticket_id = NewSessionId();
  const uint64_t name = NewSessionId() & ~kLiveBit;
  {
    MutexLock lock(&state_->mu);
    const Session* session = state_->sessions.Find(id);
    if (session == nullptr) return UnknownSession(id);
    std::vector<RecordPtr> records;
    records.reserve(keys.size());
    for (const ChunkKey& key : keys) {
      records.push_back(FindAny(*session, key));
      if (records.back() == nullptr) return absl::NotFoundError(absl::StrCat("share: no chunk ", ToString(key)));
      if (!records.back()->sealed) {
        return absl::FailedPreconditionError(
            absl::StrCat("share: chunk ", ToString(key), " has ", records.back()->committed_count, " of ",
                         records.back()->committed.size(), " layers committed, expected all"));
      }
    }
    const uint64_t bytes = kSessionBytes + keys.size() * (kLeaseBytes + sizeof(ChunkKey));
    if (!state_->arena->TryCharge(bytes)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("share: no memory for a ticket of ", bytes, " bytes, budget ", state_->options.memory_bytes));
    }
    while (state_->tickets.Find(ticket_id) != nullptr) ticket_id = NewSessionId();
    Session* ticket = state_->tickets.Open(ticket_id, session->tenant);
    for (size_t i = 0; i < keys.size(); ++i) {
      ChunkKey key = keys[i];
      key.id = {name, i + 1};
      state_->index.Lease(records[i].get(), 1);
      ticket->leases.emplace(key, Session::Lease{std::move(records[i]), 1});
      ticket->shared.push_back(key);
    }
  }
  state_->RunAt(state_->executor->Now() + ttl, [ticket_id](StoreState& state) { state.EndTicket(ticket_id); });
  return ticket_id;
}

absl::StatusOr<std::vector<ChunkKey>> TieredStore::Redeem(SessionId id, TicketId ticket_id) {
  MutexLock lock(&state_->mu);
  Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  const Session* ticket = state_->tickets.Find(ticket_id);
  if (ticket == nullptr || ticket->tenant != session->tenant) {
    return absl::NotFoundError(absl::StrCat("redeem: there is no ticket ", absl::Hex(ticket_id, absl::kZeroPad16),
                                            "; it is over, or was never given"));
  }
  for (size_t i = 0; i < ticket->shared.size(); ++i) {
    const ChunkKey& key = ticket->shared[i];
    if (LeaseTo(session, key, ticket->leases.at(key).record)) continue;
    for (size_t done = 0; done < i; ++done) ReturnLease(session, ticket->shared[done]);
    return absl::ResourceExhaustedError(absl::StrCat("redeem: no memory for ", ticket->shared.size(),
                                                     " leases, budget ", state_->options.memory_bytes));
  }
  return ticket->shared;
}

RecordPtr TieredStore::ReturnLease(Session* session, const ChunkKey& key) {
  const auto held = session->leases.find(key);
  if (held == session->leases.end()) return nullptr;
  RecordPtr record = held->second.record;
  state_->index.Unlease(record.get(), 1);
  if (--held->second.count == 0) {
    session->leases.erase(held);
    state_->arena->Uncharge(kLeaseBytes);
  }
  return record;
}

void TieredStore::Release(SessionId id, absl::Span<const ChunkKey> keys) {
  absl::InlinedVector<RecordPtr, 8> released;  // die after the lock is gone
  {
    MutexLock lock(&state_->mu);
    Session* session = state_->sessions.Find(id);
    if (session == nullptr) return;
    for (const ChunkKey& key : keys) {
      if (key.IsLive()) {
        const RecordPtr* live = session->FindLive(key);
        if (live == nullptr) continue;
        released.push_back(*live);
        session->live.erase(key.id[1]);
        state_->DropLive(released.back().get());
      } else {
        released.push_back(ReturnLease(session, key));
      }
    }
  }
  released.clear();
  state_->OnMemoryFreed();  // what is not freed may have become evictable
}

absl::Status TieredStore::Erase(SessionId id, const ChunkKey& key) {
  RecordPtr erased;  // dies after the lock is gone
  {
    MutexLock lock(&state_->mu);
    const Session* session = state_->sessions.Find(id);
    if (session == nullptr) return UnknownSession(id);
    erased = FindPublished(*session, key);
    if (erased == nullptr) return absl::NotFoundError(absl::StrCat("erase: no published chunk ", ToString(key)));
    state_->Unpublish(erased.get());
  }
  erased.reset();
  state_->OnMemoryFreed();  // its parent may have become evictable
  return absl::OkStatus();
}

RecordPtr TieredStore::FindPublished(const Session& session, const ChunkKey& key) const {
  RecordPtr record = state_->index.Find(key);
  if (record == nullptr || record->chunk->ns()->tenant != session.tenant) return nullptr;
  return HasExpired(*record) ? nullptr : record;
}

RecordPtr TieredStore::FindAny(const Session& session, const ChunkKey& key) const {
  if (key.IsLive()) {
    const RecordPtr* record = session.FindLive(key);
    return record == nullptr ? nullptr : *record;
  }
  const auto held = session.leases.find(key);
  return held != session.leases.end() ? held->second.record : FindPublished(session, key);
}

StoreStats TieredStore::Stats() const {
  MutexLock lock(&state_->mu);
  StoreStats stats = state_->counters;
  const Arena::Usage usage = state_->arena->usage();
  stats.memory_budget_bytes = usage.budget;
  stats.memory_used_bytes = usage.used();
  stats.memory_free_in_segments_bytes = usage.free;
  stats.metadata_bytes = usage.metadata;
  stats.segments = usage.segments;
  stats.sessions = state_->sessions.size();
  stats.namespaces = state_->namespaces.size();
  const Index::Counts& counts = state_->index.counts();
  stats.chunks_live = counts.live;
  stats.chunks_published = counts.published;
  stats.chunks_reserved = counts.reserved;
  stats.chunks_leased = counts.leased;
  return stats;
}

std::vector<ChunkInfo> TieredStore::List(uint64_t after, size_t limit) const {
  constexpr size_t kUsual = 1024;  // room made before the lock is taken
  std::vector<ChunkInfo> chunks;
  std::vector<std::shared_ptr<const Namespace>> namespaces;
  chunks.reserve(std::min(limit, kUsual));
  namespaces.reserve(std::min(limit, kUsual));
  {
    MutexLock lock(&state_->mu);
    state_->index.ForEachAfter(after, limit, [&](uint64_t number, const Record& record) {
      ChunkInfo& info = chunks.emplace_back();
      info.number = number;
      info.key = record.published ? record.PublishedKey() : record.chunk->key();
      info.state = record.published ? "published" : record.sealed ? "live" : "reserved";
      info.bytes = record.chunk->layout().image_bytes;
      info.tokens = record.chunk->layout().tokens;
      info.leases = record.leases;
      info.layers = static_cast<uint32_t>(record.committed.size());
      info.layers_committed = record.committed_count;
      namespaces.push_back(record.chunk->ns());
    });
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    chunks[i].tenant = namespaces[i]->tenant;
    chunks[i].model = namespaces[i]->spec.model;
  }
  return chunks;
}

absl::Status Between(absl::string_view option, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("store options: ", option, " is ", value, ", expected ", low, " to ", high));
}

absl::Status NotNegative(absl::string_view option, absl::Duration value) {
  if (value >= absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("store options: ", option, " is ", absl::FormatDuration(value), ", expected 0 or more"));
}

}  // namespace

absl::Status Validate(const StoreOptions& options) {
  constexpr uint64_t kMost = uint64_t{1} << 50;
  KVFERRY_RETURN_IF_ERROR(Between("memory_bytes", options.memory_bytes, 64 * kKiB, kMost));
  KVFERRY_RETURN_IF_ERROR(Between("segment_bytes", options.segment_bytes, kImageAlignment, kMost));
  KVFERRY_RETURN_IF_ERROR(NotNegative("live_grace", options.live_grace));
  return NotNegative("reservation_grace", options.reservation_grace);
}

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, Executor* executor) {
  KVFERRY_RETURN_IF_ERROR(Validate(options));
  return std::make_unique<TieredStore>(options, executor);
}

}  // namespace kvferry
