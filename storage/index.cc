#include "storage/index.h"

#include <utility>

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
};

uint8_t Classify(const Record& r) {
  uint8_t as = 0;
  if (r.live) as |= kHeldLive | (r.sealed ? kLive : kReserved);
  if (r.published) as |= kPublished;
  if (r.leases != 0) as |= kLeased | (r.live ? 0 : kHeldLeased);
  if (r.published && !r.live && r.leases == 0) as |= kEvictable;
  return as;
}

ChunkKey Sibling(const ChunkKey& key, const Id128& id) { return ChunkKey{key.ns, id, key.group, key.shard}; }

constexpr Id128 kNone{};

}  // namespace

ChunkKey Record::PublishedKey() const { return Sibling(chunk->key(), prefix_key); }

uint64_t RecordOverhead(const ChunkLayout& layout) {
  constexpr uint64_t kControlBlocks = 64;
  constexpr uint64_t kMapSlots = 3 * (sizeof(ChunkKey) + sizeof(RecordPtr) + 16);
  constexpr uint64_t kNumberSlot = 2 * (sizeof(uint64_t) + sizeof(uintptr_t));  // of a node that is half full
  return sizeof(Record) + sizeof(Chunk) + kControlBlocks + kMapSlots + kNumberSlot +
         layout.slots.size() * sizeof(uint64_t) + layout.slots.size() / 8;
}

void Index::AddLive(Record* record) {
  record->live = true;
  Settle(record);
}

void Index::Seal(Record* record) {
  record->sealed = true;
  policy_->Touch(record);
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

absl::Status Index::Publish(const RecordPtr& record, const Id128& prefix_key, const Id128& parent) {
  const ChunkKey key = Sibling(record->chunk->key(), prefix_key);
  if (record->published) {
    if (record->prefix_key == prefix_key) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("chunk ", ToString(record->chunk->key()), " is published as ",
                                                      ToString(record->prefix_key), ", asked for ",
                                                      ToString(prefix_key)));
  }
  if (published_.contains(key)) {
    return absl::AlreadyExistsError(absl::StrCat("chunk ", ToString(key), " is there already; it stays"));
  }
  // A chunk can have descendants before it is there: its head was lost and is written again. Only then can it be its
  // own ancestor, and a ring would have no leaf and never be evicted.
  if (parent == prefix_key || (children_.contains(key) && IsAncestor(key, Sibling(key, parent)))) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", ToString(key), " would be an ancestor of itself by parent ", ToString(parent)));
  }
  record->published = true;
  record->prefix_key = prefix_key;
  record->parent = parent;
  published_.emplace(key, record);
  policy_->Touch(record.get());
  if (parent != kNone) {
    ++children_[Sibling(key, parent)];
    if (RecordPtr above = Find(Sibling(key, parent))) Settle(above.get());
  }
  Settle(record.get());
  return absl::OkStatus();
}

RecordPtr Index::Unpublish(Record* record) {
  const ChunkKey key = record->PublishedKey();
  const auto it = published_.find(key);
  RecordPtr out = std::move(it->second);
  published_.erase(it);
  record->published = false;
  Settle(record);
  if (record->parent != kNone) {
    const auto count = children_.find(Sibling(key, record->parent));
    if (--count->second == 0) children_.erase(count);
    if (RecordPtr above = Find(Sibling(key, record->parent))) Settle(above.get());
  }
  record->prefix_key = record->parent = kNone;
  return out;
}

RecordPtr Index::Find(const ChunkKey& key) const {
  const auto it = published_.find(key);
  return it == published_.end() ? nullptr : it->second;
}

void Index::ForEachPublished(absl::FunctionRef<void(const RecordPtr&)> visit) const {
  for (const auto& [key, record] : published_) visit(record);
}

void Index::ForEachAfter(uint64_t after, size_t limit, absl::FunctionRef<void(const Record&)> visit) const {
  for (auto it = by_number_.upper_bound(after); it != by_number_.end() && limit > 0; ++it, --limit) visit(*it->second);
}

bool Index::HasChildren(const Record& record) const { return children_.contains(record.PublishedKey()); }

// True if `key` is `of` or lies above it. Ends: what is published has no ring.
bool Index::IsAncestor(const ChunkKey& key, ChunkKey of) const {
  while (of.id != kNone && of != key) {
    const RecordPtr record = Find(of);
    if (record == nullptr) return false;
    of.id = record->parent;
  }
  return of == key;
}

// Brings the gauges, the numbers and the queue in line with what the record has become. Every turn ends here, so none
// can be forgotten in one.
void Index::Settle(Record* record) {
  const uint8_t as = Classify(*record);
  if (as != record->counted) {
    const uint64_t bytes = record->chunk->charged_bytes();
    Count(record->counted, bytes, false, &counts_);
    Count(as, bytes, true, &counts_);
    record->counted = as;
  }
  const bool named = record->live || record->published;
  if (named && record->number == 0) {
    record->number = ++last_number_;
    by_number_.emplace_hint(by_number_.end(), record->number, record);
  } else if (!named && record->number != 0) {
    by_number_.erase(std::exchange(record->number, 0));
  }
  const bool may_go = (as & kEvictable) != 0 && !HasChildren(*record);
  if (may_go && !record->queued) policy_->Insert(record);
  if (!may_go && record->queued) policy_->Erase(record);
}

void Index::Count(uint8_t as, uint64_t bytes, bool add, Counts* counts) {
  const auto step = [add](uint64_t* gauge, uint64_t n) { add ? * gauge += n : * gauge -= n; };
  if (as & kReserved) step(&counts->reserved, 1);
  if (as & kLive) step(&counts->live, 1);
  if (as & kPublished) step(&counts->published, 1);
  if (as & kLeased) step(&counts->leased, 1);
  if (as & kHeldLive) step(&counts->live_bytes, bytes);
  if (as & kHeldLeased) step(&counts->leased_bytes, bytes);
  if (as & kEvictable) step(&counts->evictable_bytes, bytes);
}

absl::Status Index::CheckInvariants() const {
  absl::flat_hash_map<ChunkKey, uint32_t> children;
  uint64_t queued = 0, evictable_bytes = 0;
  for (const auto& [key, record] : published_) {
    if (!record->published || record->PublishedKey() != key) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), " does not know its name"));
    }
    if (record->counted != Classify(*record)) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), " is counted as what it no longer is"));
    }
    const bool evictable = !record->live && record->leases == 0;
    if (evictable) evictable_bytes += record->chunk->charged_bytes();
    if (record->queued != (evictable && !HasChildren(*record))) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), record->queued ? " is" : " is not", " queued"));
    }
    queued += record->queued ? 1 : 0;
    if (record->parent != kNone) ++children[Sibling(key, record->parent)];
  }
  uint64_t live = 0, published = 0;
  for (const auto& [number, record] : by_number_) {
    if (record->number != number) return absl::InternalError(absl::StrCat("chunk ", number, " has another number"));
    live += record->live ? 1 : 0;
    published += record->published ? 1 : 0;
  }
  if (live != counts_.live + counts_.reserved || published != published_.size()) {
    return absl::InternalError(absl::StrCat("numbered are ", live, "/", counts_.live + counts_.reserved, " live and ",
                                            published, "/", published_.size(), " published chunks"));
  }
  if (children != children_) return absl::InternalError("the counts of children do not agree");
  if (queued != policy_->size() || published_.size() != counts_.published ||
      evictable_bytes != counts_.evictable_bytes) {
    return absl::InternalError(absl::StrCat("queued ", queued, "/", policy_->size(), ", published ", published_.size(),
                                            "/", counts_.published, ", evictable bytes ", evictable_bytes, "/",
                                            counts_.evictable_bytes));
  }
  return absl::OkStatus();
}

}  // namespace kvferry
