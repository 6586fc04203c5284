#include "storage/index.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"

namespace kvferry {
namespace {

// What a record counts as.
enum : uint8_t {
  kReserved = 1,
  kLive = 2,
  kPublished = 4,
  kLeased = 8,
  kHeldLive = 16,
  kHeldLeased = 32,
  kEvictable = 64,
  kOnDisk = 128,
};

bool IsUnheld(const Record& r) { return r.published && !r.live && r.leases == 0 && !r.pinned; }

ChunkKey Sibling(const ChunkKey& key, const Id128& id) { return ChunkKey{key.ns, id, key.group, key.shard}; }

constexpr Id128 kNone{};
// The id of a live chunk that is known to its session alone: it lost its prefix name while it lay on disk.
constexpr Id128 kSomeLiveId = {kLiveBit, 0};

}  // namespace

Index::Index(Options options)
    : options_(std::move(options)),
      published_(0, NameHash{this}, NameEq{this}),
      memory_(options_.policy),
      disk_(options_.policy) {}

// ---- turns of a record's life ----

Record* Index::NewRecord() {
  if (free_numbers_.empty()) free_numbers_.push_back(numbers_++);
  const ChunkNumber number = free_numbers_.back();
  free_numbers_.pop_back();
  Record& record = records_[number];
  record.number = number;
  return &record;
}

Record* Index::AddLive(std::shared_ptr<Chunk> chunk) {
  Record* record = NewRecord();
  record->ns = chunk->ns().get();
  record->id = chunk->key().id;
  record->group = chunk->key().group;
  record->shard = chunk->key().shard;
  record->live = true;
  record->chunk = std::move(chunk);
  quotas_.Add(*record->ns, record->layout().image_bytes);
  Settle(record);
  return record;
}

Record* Index::AddFound(const Namespace* ns, const ImageEntry& image, DiskPlace place, uint64_t header_seq,
                        absl::Time expires) {
  if (published_.contains(image.key)) return nullptr;
  Record* record = NewRecord();
  record->ns = ns;
  record->id = image.key.id;
  record->group = image.key.group;
  record->shard = image.key.shard;
  record->parent = image.parent;
  record->disk = place;
  record->disk_seq = header_seq;
  record->priority = image.lifetime.priority;
  record->sealed = true;
  quotas_.Add(*record->ns, record->layout().image_bytes);
  Name(record, expires);
  return record;
}

void Index::Seal(Record* record) {
  record->sealed = true;
  Settle(record);
}

void Index::DropLive(Record* record) {
  record->live = false;
  Settle(record);
}

void Index::Lease(Record* record, uint32_t count) {
  record->leases += count;
  Settle(record);
}

void Index::Unlease(Record* record, uint32_t count) {
  record->leases -= count;
  Settle(record);
}

void Index::Hold(Record* record) {
  ++record->holds;
  Settle(record);
}

void Index::Unhold(Record* record) {
  --record->holds;
  Settle(record);
}

void Index::SetPinned(Record* record, bool pinned) {
  record->pinned = pinned;
  Settle(record);
}

void Index::Touch(Record* record) {
  if (!record->live) record->used_again = true;
  if (record->in_memory) memory_.Touch(record->number);
  if (record->on_disk) disk_.Touch(record->number);
  if (record->owned) {
    for (Quotas::Domain* domain : quotas_.Of(*record->ns)) {
      if (domain->own != nullptr) domain->own->Touch(record->number);
    }
  }
  if (record->queue != Queue::kHeld && record->queue != Queue::kReady) return;
  Dequeue(record);
  Enqueue(record, QueueFor(*record, options_.has_disk), Turn::kLast);
}

void Index::SetChunk(Record* record, std::shared_ptr<Chunk> chunk) {
  const bool leaves = record->chunk != nullptr && chunk == nullptr;
  if (record->counted != 0) {  // with the bytes it has had
    Count(std::exchange(record->counted, 0), record->chunk ? record->chunk->charged_bytes() : 0, false, &counts_);
  }
  if (leaves) Dequeue(record);
  const std::shared_ptr<Chunk> before = std::exchange(record->chunk, std::move(chunk));
  Settle(record, Turn::kLast, leaves);
}

void Index::SetDisk(Record* record, DiskPlace place, uint64_t seq) {
  const bool leaves = record->disk && !place;
  record->disk = place;
  record->disk_seq = seq;
  Settle(record, Turn::kLast, leaves);
}

// ---- names ----

absl::Status Index::Publish(Record* record, const Id128& prefix_key, const Id128& parent, int priority,
                            absl::Time expires) {
  const ChunkKey key = Sibling(record->key(), prefix_key);
  if (record->published) {
    if (record->id == prefix_key) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the chunk is published as ", ToString(record->id), ", asked for ", ToString(prefix_key)));
  }
  if (published_.contains(key)) {
    return absl::AlreadyExistsError(absl::StrCat("chunk ", ToString(key), " is there already; it stays"));
  }
  // A chunk can have descendants before it is there: its head was lost and is written again. Only then can it be its
  // own ancestor, and a ring would have no leaf and never be evicted.
  if (parent == prefix_key || (orphans_.contains(key) && IsAncestor(key, Sibling(key, parent)))) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", ToString(key), " would be an ancestor of itself by parent ", ToString(parent)));
  }
  record->id = prefix_key;
  record->parent = parent;
  record->priority = static_cast<uint8_t>(priority);
  Name(record, expires);
  return absl::OkStatus();
}

void Index::Name(Record* record, absl::Time expires) {
  record->published = true;
  record->epoch = record->ns->epoch;
  record->used_again = false;
  published_.insert(record->number);
  if (const auto orphans = orphans_.find(record->key()); orphans != orphans_.end()) {
    record->family = orphans->second;
    orphans_.erase(orphans);
  }
  if (expires != absl::InfiniteFuture()) {
    record->expires = true;
    expiry_.emplace(record->number, expires);
    expiring_.emplace(expires, record->number);
  }
  CountAtParent(*record, 1, 0, Turn::kLast);
  Settle(record);
}

void Index::Unpublish(Record* record, bool evicted) {
  Dequeue(record);
  if (std::exchange(record->disk_queued, false)) disk_.Erase(record->number);
  published_.erase(record->number);
  if (record->family.children != 0) orphans_[record->key()] = std::exchange(record->family, {});
  if (std::exchange(record->expires, false)) {
    const auto expiry = expiry_.find(record->number);
    expiring_.erase({expiry->second, record->number});
    expiry_.erase(expiry);
  }
  // Its parent counts a child less, in one turn with the one less in memory.
  const bool was_in_memory = std::exchange(record->in_memory, false);
  if (was_in_memory) memory_.Remove(record->number, evicted);
  if (std::exchange(record->on_disk, false)) disk_.Remove(record->number, evicted);
  record->published = record->pinned = false;
  if (record->owned) SettleOwn(record, Turn::kLast, evicted);
  CountAtParent(*record, -1, was_in_memory ? -1 : 0, Turn::kNext);
  record->parent = kNone;
  record->id = record->chunk != nullptr && record->chunk->key().IsLive() ? record->chunk->key().id : kSomeLiveId;
  Settle(record);
}

Record* Index::Find(const ChunkKey& key) const {
  const auto it = published_.find(key);
  return it == published_.end() ? nullptr : const_cast<Record*>(&records_.at(*it));
}

// True if `key` is `of` or lies above it. Ends: what is published has no ring.
bool Index::IsAncestor(const ChunkKey& key, ChunkKey of) const {
  while (of.id != kNone && of != key) {
    const Record* record = Find(of);
    if (record == nullptr) return false;
    of.id = record->parent;
  }
  return of == key;
}

absl::Time Index::ExpiryOf(const Record& record) const {
  return record.expires ? expiry_.at(record.number) : absl::InfiniteFuture();
}

absl::Time Index::NextExpiry() const { return expiring_.empty() ? absl::InfiniteFuture() : expiring_.begin()->first; }

void Index::CountAtParent(const Record& record, int children, int in_memory, Turn turn) {
  if (record.parent == kNone) return;
  const ChunkKey key = Sibling(record.key(), record.parent);
  Record* parent = Find(key);
  Family& family = parent != nullptr ? parent->family : orphans_[key];
  family.children += static_cast<uint32_t>(children);
  family.in_memory += static_cast<uint32_t>(in_memory);
  if (parent != nullptr) return Settle(parent, turn);
  if (family.children == 0) orphans_.erase(key);
}

// ---- who may go ----

bool Index::MayLeave(const Record& record) { return record.disk || (IsUnheld(record) && record.family.children == 0); }

Index::Queue Index::QueueFor(const Record& record, bool has_disk) {
  if (record.chunk == nullptr || !record.sealed || record.holds != 0 || record.pinned) return Queue::kNone;
  if (IsUnheld(record)) return record.family.in_memory == 0 ? Queue::kRanked : Queue::kNone;
  return has_disk && (record.live || record.leases != 0) ? Queue::kHeld : Queue::kNone;
}

Record* Index::Ready() { return ready_.empty() ? nullptr : &records_[ready_.front()]; }

Record* Index::Ranked() {
  const std::optional<ChunkNumber> victim = memory_.Victim();
  return victim ? &records_[*victim] : nullptr;
}

Record* Index::Held() { return held_.empty() ? nullptr : &records_[held_.front()]; }

Record* Index::DiskVictim() {
  const std::optional<ChunkNumber> victim = disk_.Victim();
  return victim ? &records_[*victim] : nullptr;
}

void Index::MakeReady(Record* record) {
  if ((record->queue != Queue::kRanked && record->queue != Queue::kHeld) || !MayLeave(*record)) return;
  Dequeue(record);
  Enqueue(record, Queue::kReady, Turn::kLast);
}

void Index::Defer(Record* record) {
  const Queue queue = record->queue;
  if (queue == Queue::kRanked) memory_.Touch(record->number);
  Dequeue(record);
  Enqueue(record, queue, Turn::kLast);
}

void Index::Enqueue(Record* record, Queue queue, Turn turn) {
  record->queue = queue;
  if (queue == Queue::kRanked) memory_.Insert(record->number, turn);
  if (queue == Queue::kHeld) held_.PushBack(record->number);
  if (queue != Queue::kReady) return;
  ready_.PushBack(record->number);
  ready_bytes_ += record->chunk->charged_bytes();
}

void Index::Dequeue(Record* record) {
  const Queue queue = std::exchange(record->queue, Queue::kNone);
  if (queue == Queue::kRanked) memory_.Erase(record->number);
  if (queue == Queue::kHeld) held_.Erase(record->number);
  if (queue != Queue::kReady) return;
  ready_.Erase(record->number);
  ready_bytes_ -= record->chunk->charged_bytes();
}

// Brings gauges, rankings and queues in line with what the record has become. Every turn ends here, so none can be
// forgotten in one.
void Index::Settle(Record* record, Turn turn, bool evicted) {
  if (const uint8_t as = Classify(*record); as != record->counted) {
    const uint64_t bytes = record->chunk != nullptr ? record->chunk->charged_bytes() : 0;
    Count(record->counted, bytes, false, &counts_);
    Count(as, bytes, true, &counts_);
    record->counted = as;
  }
  const bool dirty = record->published && record->chunk != nullptr && record->chunk->whole() && !record->disk;
  if (dirty != record->dirty) {
    dirty ? (void)dirty_.insert(record->number) : (void)dirty_.erase(record->number);
    record->dirty = dirty;
  }
  SettleMemory(record, turn, evicted);
  SettleDisk(record, turn, evicted);
  if (quotas_.any_own() || record->owned) SettleOwn(record, turn, evicted);
  if (!record->live && !record->published && record->leases == 0 && record->holds == 0) Bury(record);
}

void Index::SettleMemory(Record* record, Turn turn, bool evicted) {
  const bool in_memory = record->published && record->chunk != nullptr;
  if (in_memory && !record->in_memory) {
    record->in_memory = true;
    memory_.Add(record->number, absl::HashOf(record->key()), record->priority);
    CountAtParent(*record, 0, 1, Turn::kLast);
  }
  const Queue queue = QueueFor(*record, options_.has_disk);
  const bool stays_ready = record->queue == Queue::kReady && queue != Queue::kNone && MayLeave(*record);
  if (queue != record->queue && !stays_ready) {
    Dequeue(record);
    Enqueue(record, queue, turn);
  }
  if (!in_memory && record->in_memory) {
    record->in_memory = false;
    memory_.Remove(record->number, evicted);
    CountAtParent(*record, 0, -1, Turn::kNext);
  }
}

void Index::SettleDisk(Record* record, Turn turn, bool evicted) {
  const bool on_disk = record->published && record->disk;
  if (on_disk && !record->on_disk) disk_.Add(record->number, absl::HashOf(record->key()), record->priority);
  const bool queued = on_disk && IsUnheld(*record) && record->family.children == 0 && record->holds == 0;
  if (queued && !record->disk_queued) disk_.Insert(record->number, turn);
  if (!queued && record->disk_queued) disk_.Erase(record->number);
  if (!on_disk && record->on_disk) disk_.Remove(record->number, evicted);
  record->on_disk = on_disk;
  record->disk_queued = queued;
}

void Index::SettleOwn(Record* record, Turn turn, bool evicted) {
  const bool owned = record->published && quotas_.any_own();
  const bool counted = owned && IsUnheld(*record);
  const bool queued = counted && record->family.children == 0 && record->holds == 0;
  const uint64_t bytes = record->layout().image_bytes;
  for (Quotas::Domain* domain : quotas_.Of(*record->ns)) {
    EvictionQueue* const own = domain->own.get();
    if (own == nullptr) continue;
    if (owned && !record->owned) own->Add(record->number, absl::HashOf(record->key()), record->priority);
    if (queued && !record->own_queued) own->Insert(record->number, turn);
    if (!queued && record->own_queued) own->Erase(record->number);
    if (!owned && record->owned) own->Remove(record->number, evicted);
    if (counted && !record->own_counted) domain->evictable_bytes += bytes;
    if (!counted && record->own_counted) domain->evictable_bytes -= bytes;
  }
  record->owned = owned;
  record->own_queued = queued;
  record->own_counted = counted;
}

void Index::SetQuota(absl::string_view tenant, const NamespaceId* ns, std::optional<Quota> quota) {
  // Out of all queues, and into those that there are then.
  const auto settle_all = [this](bool in) {
    for (ChunkNumber number = 0; number < numbers_; ++number) {
      Record& record = records_[number];
      if (record.ns == nullptr) continue;
      if (!in) record.owned = record.own_queued = record.own_counted = false;
      if (in) SettleOwn(&record, Turn::kLast, false);
    }
  };
  Quotas::Domain* const domain = quotas_.Open(tenant, ns);
  if (quotas_.any_own()) settle_all(false);
  quotas_.Set(domain, quota, options_.policy);
  quotas_.EmptyQueues(options_.policy);
  if (quotas_.any_own()) settle_all(true);
  quotas_.CloseIfIdle(domain);
}

Record* Index::OwnVictim(Quotas::Domain* domain) {
  const std::optional<ChunkNumber> victim = domain->own != nullptr ? domain->own->Victim() : std::nullopt;
  return victim ? &records_[*victim] : nullptr;
}

void Index::Bury(Record* record) {
  quotas_.Remove(*record->ns, record->layout().image_bytes);
  Count(record->counted, record->chunk != nullptr ? record->chunk->charged_bytes() : 0, false, &counts_);
  options_.bury(*record);
  const ChunkNumber number = record->number;
  *record = Record();
  free_numbers_.push_back(number);
}

void Index::ForEachAfter(uint64_t after, size_t limit, absl::FunctionRef<void(uint64_t number, Record&)> visit) {
  for (uint64_t number = after; number < numbers_ && limit > 0; ++number) {
    Record& record = records_[static_cast<ChunkNumber>(number)];
    if (record.ns == nullptr) continue;
    visit(number + 1, record);
    --limit;
  }
}

// ---- counts ----

uint8_t Index::Classify(const Record& r) {
  uint8_t as = 0;
  if (r.live) as |= kHeldLive | (r.sealed ? kLive : kReserved);
  if (r.published) as |= kPublished;
  if (r.leases != 0) as |= kLeased | (r.live ? 0 : kHeldLeased);
  if (IsUnheld(r)) as |= kEvictable;
  if (r.disk) as |= kOnDisk;
  return as;
}

void Index::Count(uint8_t as, uint64_t bytes, bool add, Counts* counts) {
  const auto step = [add](uint64_t* gauge, uint64_t n) { add ? * gauge += n : * gauge -= n; };
  if (as & kReserved) step(&counts->reserved, 1);
  if (as & kLive) step(&counts->live, 1);
  if (as & kPublished) step(&counts->published, 1);
  if (as & kLeased) step(&counts->leased, 1);
  if (as & kOnDisk) step(&counts->on_disk, 1);
  if (as & kHeldLive) step(&counts->live_bytes, bytes);
  if (as & kHeldLeased) step(&counts->leased_bytes, bytes);
  if (as & kEvictable) step(&counts->evictable_bytes, bytes);
  if (as != 0 && !(as & kReserved)) step(&counts->sealed_bytes, bytes);
}

absl::Status Index::CheckInvariants() const {
  const auto wrong = [](const Record& record, absl::string_view what) {
    return absl::InternalError(absl::StrCat("chunk ", ToString(record.key()), " ", what));
  };
  absl::flat_hash_map<ChunkKey, Family> families;
  Counts counts;
  uint64_t published = 0, ranked = 0, held = 0, ready = 0, ready_bytes = 0, on_disk = 0, dirty = 0, expiring = 0;
  for (ChunkNumber number = 0; number < numbers_; ++number) {
    const Record& record = records_.at(number);
    if (record.ns == nullptr) continue;
    if (record.number != number) return wrong(record, "has another number");
    if (!record.live && !record.published && record.leases == 0 && record.holds == 0) return wrong(record, "is dead");
    if (record.counted != Classify(record)) return wrong(record, "is counted as what it no longer is");
    const uint64_t bytes = record.chunk != nullptr ? record.chunk->charged_bytes() : 0;
    Count(record.counted, bytes, true, &counts);
    const Queue queue = QueueFor(record, options_.has_disk);
    if (record.queue != queue && !(record.queue == Queue::kReady && queue != Queue::kNone && MayLeave(record))) {
      return wrong(record, "waits in another queue than it should");
    }
    ranked += record.queue == Queue::kRanked ? 1 : 0;
    held += record.queue == Queue::kHeld ? 1 : 0;
    ready += record.queue == Queue::kReady ? 1 : 0;
    ready_bytes += record.queue == Queue::kReady ? bytes : 0;
    const bool disk_queued =
        record.published && record.disk && IsUnheld(record) && record.family.children == 0 && record.holds == 0;
    if (record.disk_queued != disk_queued) return wrong(record, "is queued for the disk, or not");
    on_disk += disk_queued ? 1 : 0;
    if (record.dirty != dirty_.contains(number)) return wrong(record, "is dirty, or not");
    dirty += record.dirty ? 1 : 0;
    if (record.expires && !expiring_.contains({ExpiryOf(record), number})) return wrong(record, "would not expire");
    expiring += record.expires ? 1 : 0;
    if (!record.published) continue;
    ++published;
    if (Find(record.key()) != &record) return wrong(record, "does not know its name");
    if (record.parent == kNone) continue;
    Family& family = families[Sibling(record.key(), record.parent)];
    ++family.children;
    family.in_memory += record.chunk != nullptr ? 1 : 0;
  }
  for (const auto& [key, family] : families) {
    const Record* parent = Find(key);
    const auto orphans = orphans_.find(key);
    if (parent == nullptr && orphans == orphans_.end()) {
      return absl::InternalError(absl::StrCat("the children of ", ToString(key), " are forgotten"));
    }
    if (!((parent != nullptr ? parent->family : orphans->second) == family)) {
      return absl::InternalError(absl::StrCat("the children of ", ToString(key), " are miscounted"));
    }
  }
  for (ChunkNumber number : published_) {
    const Record& record = records_.at(number);
    if (record.family.children != 0 && !families.contains(record.key())) return wrong(record, "has children no more");
  }
  for (const auto& [key, family] : orphans_) {
    if (!families.contains(key) || Find(key) != nullptr) return absl::InternalError("orphans that are none");
  }
  if (counts.live != counts_.live || counts.reserved != counts_.reserved || counts.published != counts_.published ||
      counts.leased != counts_.leased || counts.on_disk != counts_.on_disk || counts.live_bytes != counts_.live_bytes ||
      counts.leased_bytes != counts_.leased_bytes || counts.evictable_bytes != counts_.evictable_bytes ||
      counts.sealed_bytes != counts_.sealed_bytes) {
    return absl::InternalError("the gauges do not agree");
  }
  for (const QuotaInfo& info : quotas_.List()) {
    uint64_t used = 0, queued = 0, evictable = 0;
    for (ChunkNumber number = 0; number < numbers_; ++number) {
      const Record& record = records_.at(number);
      if (record.ns == nullptr || record.ns->tenant != info.tenant) continue;
      if (info.ns.has_value() && *info.ns != record.ns->id) continue;
      used += record.layout().image_bytes;
      queued += record.own_queued ? 1 : 0;
      evictable += record.own_counted ? record.layout().image_bytes : 0;
    }
    const Quotas::Domain* const domain = quotas_.Find(info.tenant, info.ns);
    if (used != info.used_bytes) return absl::InternalError("a quota's bytes do not agree");
    if (domain->own != nullptr && (domain->own->size() != queued || domain->evictable_bytes != evictable)) {
      return absl::InternalError("a quota's own chunks do not agree");
    }
  }
  if (published != published_.size() || ranked != memory_.size() || held != held_.size() || ready != ready_.size() ||
      ready_bytes != ready_bytes_ || on_disk != disk_.size() || dirty != dirty_.size() ||
      expiring != expiring_.size() || expiring != expiry_.size()) {
    return absl::InternalError(absl::StrCat("published ", published, "/", published_.size(), ", ranked ", ranked, "/",
                                            memory_.size(), ", held ", held, "/", held_.size(), ", ready ", ready, "/",
                                            ready_.size(), ", on disk ", on_disk, "/", disk_.size(), ", dirty ", dirty,
                                            "/", dirty_.size(), ", expiring ", expiring, "/", expiring_.size()));
  }
  return absl::OkStatus();
}

}  // namespace kvferry
