#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"
#include "storage/disk/posix_folder.h"
#include "storage/dropper.h"
#include "storage/loader.h"
#include "storage/reserver.h"
#include "storage/spiller.h"
#include "storage/store.h"
#include "storage/store_state.h"
#include "storage/store_writer.h"

namespace kvferry {
namespace {

constexpr size_t kMaxNamespacesPerSession = 1024;

// The store over its tiers. Every call is one step under the state's mutex.
class TieredStore : public Store {
 public:
  TieredStore(const StoreOptions& options, Executor* executor, bool has_disk)
      : state_(std::make_shared<StoreState>(options, executor, has_disk)) {
    state_->arena->SetListener(state_);
  }
  ~TieredStore() override {
    state_->Close([] {});
    if (state_->disk == nullptr) return;
    state_->disk->Wait();    // what is under way still goes through this pointer
    state_->disk = nullptr;  // its threads hold the state, and must not be the last to
  }
  absl::Status OpenDisk(std::unique_ptr<Folder> folder) { return state_->OpenDisk(std::move(folder)); }

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
  void Get(SessionId session, const BlockKey& key, GivenUp given_up, GetDone done) override;
  absl::StatusOr<Match> Lookup(SessionId session, absl::Span<const ChunkKey> keys, bool lease) override;
  absl::StatusOr<TicketId> Share(SessionId session, absl::Span<const ChunkKey> keys, absl::Duration ttl) override;
  absl::StatusOr<std::vector<ChunkKey>> Redeem(SessionId session, TicketId ticket) override;
  void Release(SessionId session, absl::Span<const ChunkKey> keys) override;
  bool Prefetch(SessionId session, absl::Span<const ChunkKey> keys, GivenUp given_up) override {
    if (!state_->has_disk) return false;
    Loader(state_.get()).Prefetch(session, keys, given_up);
    return true;
  }
  void Erase(SessionId session, const ChunkKey& key, EraseDone done) override;
  void Flush(FlushDone done) override { Spiller(state_.get()).Flush(std::move(done)); }
  void Close(absl::AnyInvocable<void()> done) override { state_->Close(std::move(done)); }

  void Drop(const NamespaceId& ns, bool purge, DropDone done) override {
    Dropper(state_.get()).Drop(ns, purge, std::move(done));
  }
  void SetQuota(absl::string_view tenant, std::optional<NamespaceId> ns, std::optional<Quota> quota) override {
    Step step(state_.get());
    state_->index.SetQuota(tenant, ns.has_value() ? &*ns : nullptr, quota);
  }
  std::vector<QuotaInfo> ListQuotas() const override {
    MutexLock lock(&state_->mu);
    return state_->index.quotas().List();
  }
  absl::Status SetPinned(const ChunkKey& published, bool pinned) override;

  StoreStats Stats() const override;
  std::vector<ChunkInfo> List(uint64_t after, size_t limit) const override;
  absl::Status CheckInvariants() const override { return state_->CheckInvariants(); }

 private:
  absl::Status PublishUntil(SessionId session, const ChunkKey& live, const PublishOptions& options, absl::Time expires);
  // The block, or why not; nullopt: it lies on disk, and `done` will be called.
  std::optional<absl::StatusOr<BlockView>> TryGet(SessionId session, const BlockKey& key, GivenUp given_up,
                                                  GetDone* done);
  // One lease less, if the session has one on the key.
  void ReturnLease(Session* session, const ChunkKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);
  bool LeaseTo(Session* session, const ChunkKey& key, Record* record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);

  const std::shared_ptr<StoreState> state_;
};

absl::StatusOr<SessionId> TieredStore::OpenSession(absl::string_view tenant) {
  SessionId id = SessionIdOf(state_->NewId());
  MutexLock lock(&state_->mu);
  while (state_->sessions.Find(id) != nullptr) id = SessionIdOf(state_->NewId());
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
  Step step(state_.get());
  const Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  Record* record = session->FindLive(live);
  if (record == nullptr) {
    return absl::NotFoundError(absl::StrCat("publish: session has no live chunk ", ToString(live)));
  }
  if (!record->sealed) {
    return absl::FailedPreconditionError(
        absl::StrCat("publish: chunk ", ToString(live), " has ", record->chunk->readable_count(), " of ",
                     record->layout().slots.size(), " layers committed, expected all"));
  }
  if (!record->is_somewhere()) return absl::NotFoundError(absl::StrCat("publish: chunk ", ToString(live), " is lost"));
  if (record->ns->spec.model.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("publish: namespace ", ToString(live.ns),
                                                      " names no model, so a prefix key would not say whose KV it is"));
  }
  if (!record->is_finite) {
    return absl::FailedPreconditionError(
        absl::StrCat("publish: chunk ", ToString(live), " holds NaN or infinity, which no other sequence should get"));
  }
  const ChunkKey key{live.ns, options.prefix_key, live.group, live.shard};
  for (Record* named : {state_->index.Find(key), record}) {  // names that are over, and not taken away yet
    if (named == nullptr || !named->published || !state_->IsOver(*named)) continue;
    state_->index.Unpublish(named);
    ++state_->counters.expirations;
  }
  const bool again = record->published;
  KVFERRY_RETURN_IF_ERROR(state_->index.Publish(record, options.prefix_key, options.parent, options.priority, expires));
  if (!again) Spiller(state_.get()).Published(record);
  return absl::OkStatus();
}

void TieredStore::Get(SessionId session, const BlockKey& key, GivenUp given_up, GetDone done) {
  if (auto result = TryGet(session, key, std::move(given_up), &done)) std::move(done)(*std::move(result));
}

std::optional<absl::StatusOr<BlockView>> TieredStore::TryGet(SessionId id, const BlockKey& key, GivenUp given_up,
                                                             GetDone* done) {
  Step step(state_.get());
  const Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  Record* record = state_->FindAny(*session, key.chunk);
  if (record != nullptr && key.layer >= record->layout().slots.size()) {
    return absl::InvalidArgumentError(absl::StrCat("get: layer is ", key.layer, ", expected 0 to ",
                                                   record->layout().slots.size() - 1, " in chunk ",
                                                   ToString(key.chunk)));
  }
  const bool in_memory = record != nullptr && record->chunk != nullptr && record->chunk->readable(key.layer);
  if (!in_memory && (record == nullptr || !record->disk)) {
    ++state_->counters.get_misses;
    return absl::NotFoundError(absl::StrCat("get: no block ", ToString(key)));
  }
  if (key.layer == 0) state_->index.Touch(record);  // whoever reads a chunk begins there
  if (in_memory) return state_->View(record->chunk, key.layer);
  Loader(state_.get()).Get(record, {key.layer, std::move(given_up), std::move(*done)});
  return std::nullopt;
}

absl::StatusOr<Match> TieredStore::Lookup(SessionId id, absl::Span<const ChunkKey> keys, bool lease) {
  Match match;
  Step step(state_.get());
  Session* session = state_->sessions.Find(id);
  if (session == nullptr) return UnknownSession(id);
  ++state_->counters.lookups;
  state_->counters.lookup_chunks_asked += keys.size();
  for (const ChunkKey& key : keys) {
    Record* record;
    if (key.IsLive()) {
      record = session->FindLive(key);  // the session holds it: a lease would add nothing
      if (record == nullptr || !record->sealed || !record->is_somewhere()) break;
    } else {
      record = state_->FindPublished(*session, key);
      if (record == nullptr || (lease && !LeaseTo(session, key, record))) break;
    }
    ++match.chunks;
    match.bytes += record->layout().image_bytes;
  }
  state_->counters.lookup_chunks_hit += match.chunks;
  return match;
}

bool TieredStore::LeaseTo(Session* session, const ChunkKey& key, Record* record) {
  auto held = session->leases.find(key);
  if (held == session->leases.end()) {
    if (!state_->arena->TryCharge(kLeaseBytes)) return false;
    held = session->leases.emplace(key, Session::Lease{record, 0}).first;
  }
  // A lease from before the name was erased and given anew is of the chunk it was taken on, which has the same tokens.
  ++held->second.count;
  state_->index.Lease(held->second.record, 1);
  state_->index.Touch(held->second.record);
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
  TicketId ticket_id = SessionIdOf(state_->NewId());
  const uint64_t name = state_->NewId() & ~kLiveBit;
  {
    Step step(state_.get());
    const Session* session = state_->sessions.Find(id);
    if (session == nullptr) return UnknownSession(id);
    std::vector<Record*> records;
    records.reserve(keys.size());
    for (const ChunkKey& key : keys) {
      Record* record = state_->FindAny(*session, key);
      if (record == nullptr || !record->is_somewhere()) {
        return absl::NotFoundError(absl::StrCat("share: no chunk ", ToString(key)));
      }
      if (!record->sealed) {
        return absl::FailedPreconditionError(
            absl::StrCat("share: chunk ", ToString(key), " has ", record->chunk->readable_count(), " of ",
                         record->layout().slots.size(), " layers committed, expected all"));
      }
      records.push_back(record);
    }
    const uint64_t bytes = kSessionBytes + keys.size() * (kLeaseBytes + sizeof(ChunkKey));
    if (!state_->arena->TryCharge(bytes)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("share: no memory for a ticket of ", bytes, " bytes, budget ", state_->options.memory_bytes));
    }
    while (state_->tickets.Find(ticket_id) != nullptr) ticket_id = SessionIdOf(state_->NewId());
    Session* ticket = state_->tickets.Open(ticket_id, session->tenant);
    for (size_t i = 0; i < keys.size(); ++i) {
      ChunkKey key = keys[i];
      key.id = {name, i + 1};
      state_->index.Lease(records[i], 1);
      ticket->leases.emplace(key, Session::Lease{records[i], 1});
      ticket->shared.push_back(key);
    }
  }
  state_->RunAt(state_->executor->Now() + ttl, [ticket_id](StoreState& state) { state.EndTicket(ticket_id); });
  return ticket_id;
}

absl::StatusOr<std::vector<ChunkKey>> TieredStore::Redeem(SessionId id, TicketId ticket_id) {
  Step step(state_.get());
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

void TieredStore::ReturnLease(Session* session, const ChunkKey& key) {
  const auto held = session->leases.find(key);
  if (held == session->leases.end()) return;
  Record* const record = held->second.record;
  if (--held->second.count == 0) {
    session->leases.erase(held);
    state_->arena->Uncharge(kLeaseBytes);
  }
  state_->index.Unlease(record, 1);
}

void TieredStore::Release(SessionId id, absl::Span<const ChunkKey> keys) {
  {
    Step step(state_.get());
    Session* session = state_->sessions.Find(id);
    if (session == nullptr) return;
    for (const ChunkKey& key : keys) {
      if (!key.IsLive()) {
        ReturnLease(session, key);
      } else if (Record* live = session->FindLive(key)) {
        session->live.erase(key.id[1]);
        state_->DropLive(live);
      }
    }
  }
  state_->OnMemoryFreed();  // what is not freed may have become evictable
}

void TieredStore::Erase(SessionId id, const ChunkKey& key, EraseDone done) {
  uint64_t seq = 0;
  absl::Status status;
  {
    Step step(state_.get());
    const Session* session = state_->sessions.Find(id);
    Record* record = session == nullptr ? nullptr : state_->FindPublished(*session, key);
    if (session == nullptr) {
      status = UnknownSession(id);
    } else if (record == nullptr) {
      status = absl::NotFoundError(absl::StrCat("erase: no published chunk ", ToString(key)));
    } else {
      seq = state_->next_seq++;  // above that of every image of it so far
      state_->index.Unpublish(record);
    }
  }
  state_->OnMemoryFreed();  // its parent may have become evictable
  if (!status.ok() || !state_->has_disk) return std::move(done)(std::move(status));
  state_->disk->Erase({key}, seq, std::move(done));
}

absl::Status TieredStore::SetPinned(const ChunkKey& published, bool pinned) {
  {
    Step step(state_.get());
    Record* record = state_->index.Find(published);
    if (record == nullptr || state_->IsOver(*record)) {
      return absl::NotFoundError(absl::StrCat("pin: no published chunk ", ToString(published)));
    }
    state_->index.SetPinned(record, pinned);
  }
  state_->OnMemoryFreed();
  return absl::OkStatus();
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
  stats.chunks_on_disk = counts.on_disk;
  if (state_->has_disk) {
    const SegmentLog::Usage disk = state_->disk->usage();
    stats.disk_budget_bytes = state_->options.disk_bytes;
    stats.disk_used_bytes = disk.bytes;
    stats.disk_live_bytes = disk.live_bytes;
    stats.chunks_dirty = state_->index.dirty().size();
    stats.disk_io_uring = state_->disk->folder().io() == "io_uring" ? 1 : 0;
    stats.disk_direct = state_->disk->folder().direct() ? 1 : 0;
  }
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
      const ChunkLayout& layout = record.layout();
      ChunkInfo& info = chunks.emplace_back();
      info.number = number;
      info.key = record.key();
      info.state = record.published ? "published" : record.sealed ? "live" : "reserved";
      info.bytes = layout.image_bytes;
      info.tokens = layout.tokens;
      info.leases = record.leases;
      info.layers = static_cast<uint32_t>(layout.slots.size());
      info.layers_committed = record.sealed ? info.layers : static_cast<uint32_t>(record.chunk->readable_count());
      state_->AssertHeld();
      namespaces.push_back(state_->namespaces.Find(record.ns->id));
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
  if (!options.disk_path.empty() || options.disk_bytes != 0) {
    KVFERRY_RETURN_IF_ERROR(Between("disk_bytes", options.disk_bytes, kMiB, kMost));
  }
  KVFERRY_RETURN_IF_ERROR(NotNegative("load_patience", options.load_patience));
  KVFERRY_RETURN_IF_ERROR(NotNegative("live_grace", options.live_grace));
  return NotNegative("reservation_grace", options.reservation_grace);
}

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, Executor* executor) {
  KVFERRY_RETURN_IF_ERROR(Validate(options));
  std::unique_ptr<Folder> folder;
  if (!options.disk_path.empty()) {
    PosixFolderOptions where;
    where.path = options.disk_path;
    KVFERRY_ASSIGN_OR_RETURN(folder, OpenPosixFolder(where));
  }
  return OpenStore(options, executor, std::move(folder));
}

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, Executor* executor,
                                                 std::unique_ptr<Folder> folder) {
  KVFERRY_RETURN_IF_ERROR(Validate(options));
  auto store = std::make_unique<TieredStore>(options, executor, folder != nullptr);
  if (folder != nullptr) KVFERRY_RETURN_IF_ERROR(store->OpenDisk(std::move(folder)));
  return store;
}

}  // namespace kvferry
