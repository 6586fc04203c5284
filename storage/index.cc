#include "storage/index.h"

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
};

uint8_t Classify(const Record& r) {
  uint8_t as = 0;
  if (r.live) as |= kHeldLive | (r.sealed ? kLive : kReserved);
  if (r.published) as |= kPublished;
  if (r.leases != 0) as |= kLeased | (r.live ? 0 : kHeldLeased);
  if (r.published && !r.live && r.leases == 0 && !r.pinned) as |= kEvictable;
  return as;
}

ChunkKey Sibling(const ChunkKey& key, const Id128& id) { return ChunkKey{key.ns, id, key.group, key.shard}; }

constexpr Id128 kNone{};

}  // namespace

ChunkKey Record::PublishedKey() const { return Sibling(chunk->key(), prefix_key); }

uint64_t RecordOverhead(const ChunkLayout& layout) {
  constexpr uint64_t kControlBlocks = 64;
  constexpr uint64_t kMapSlots = 3 * (sizeof(ChunkKey) + sizeof(RecordPtr) + 16);
  constexpr uint64_t kNumberSlot = sizeof(uintptr_t) + sizeof(ChunkNumber);
  return sizeof(Record) + sizeof(Chunk) + kControlBlocks + kMapSlots + kNumberSlot + kEvictionBytes +
         layout.slots.size() * sizeof(uint64_t) + layout.slots.size() / 8;
}

void Index::AddLive(Record* record) {
  record->live = true;
  Settle(record);
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

void Index::Touch(Record* record) {
  if (record->published) queue_.Touch(record->number);
}

void Index::Defer(Record* victim) {
  queue_.Touch(victim->number);
  queue_.Erase(victim->number);
  queue_.Insert(victim->number, Turn::kLast);
}

absl::Time Index::NextExpiry() const { return expiring_.empty() ? absl::InfiniteFuture() : expiring_.begin()->first; }

void Index::SetPinned(Record* record, bool pinned) {
  record->pinned = pinned;
  Settle(record);
}

Record* Index::Victim() {
  const std::optional<ChunkNumber> victim = queue_.Victim();
  return victim ? by_number_[*victim] : nullptr;
}

absl::Status Index::Publish(const RecordPtr& record, const Id128& prefix_key, const Id128& parent, int priority,
                            absl::Time expires) {
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
  record->expires = expires;
  published_.emplace(key, record);
  SettleNumber(record.get());
  queue_.Add(record->number, absl::HashOf(key), priority);
  if (expires != absl::InfiniteFuture()) expiring_.emplace(expires, record->number);
  if (parent != kNone) {
    ++children_[Sibling(key, parent)];
    if (RecordPtr above = Find(Sibling(key, parent))) Settle(above.get());
  }
  Settle(record.get());
  return absl::OkStatus();
}

RecordPtr Index::Unpublish(Record* record, bool evicted) {
  const ChunkKey key = record->PublishedKey();
  const auto it = published_.find(key);
  RecordPtr out = std::move(it->second);
  published_.erase(it);
  if (std::exchange(record->queued, false)) queue_.Erase(record->number);
  queue_.Remove(record->number, evicted);
  if (record->expires != absl::InfiniteFuture()) {
    expiring_.erase({std::exchange(record->expires, absl::InfiniteFuture()), record->number});
  }
  record->published = record->pinned = false;
  Settle(record);
  if (record->parent != kNone) {
    const auto count = children_.find(Sibling(key, record->parent));
    if (--count->second == 0) children_.erase(count);
    if (RecordPtr above = Find(Sibling(key, record->parent))) Settle(above.get(), Turn::kNext);
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

void Index::ForEachAfter(uint64_t after, size_t limit,
                         absl::FunctionRef<void(uint64_t number, const Record&)> visit) const {
  for (uint64_t number = after; number < numbers_ && limit > 0; ++number) {
    const Record* record = by_number_.at(static_cast<ChunkNumber>(number));
    if (record == nullptr) continue;
    visit(number + 1, *record);
    --limit;
  }
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
void Index::Settle(Record* record, Turn turn) {
  const uint8_t as = Classify(*record);
  if (as != record->counted) {
    const uint64_t bytes = record->chunk->charged_bytes();
    Count(record->counted, bytes, false, &counts_);
    Count(as, bytes, true, &counts_);
    record->counted = as;
  }
  SettleNumber(record);
  const bool may_go = (as & kEvictable) != 0 && !HasChildren(*record);
  if (may_go && !record->queued) queue_.Insert(record->number, turn);
  if (!may_go && record->queued) queue_.Erase(record->number);
  record->queued = may_go;
}

void Index::SettleNumber(Record* record) {
  const bool named = record->live || record->published;
  if (named && record->number == Record::kUnnamed) {
    if (free_numbers_.empty()) free_numbers_.push_back(numbers_++);
    record->number = free_numbers_.back();
    free_numbers_.pop_back();
    by_number_[record->number] = record;
  } else if (!named && record->number != Record::kUnnamed) {
    by_number_[record->number] = nullptr;
    free_numbers_.push_back(std::exchange(record->number, Record::kUnnamed));
  }
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
  uint64_t queued = 0, evictable_bytes = 0, expiring = 0;
  for (const auto& [key, record] : published_) {
    if (!record->published || record->PublishedKey() != key) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), " does not know its name"));
    }
    if (record->counted != Classify(*record)) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), " is counted as what it no longer is"));
    }
    const bool evictable = !record->live && record->leases == 0 && !record->pinned;
    if (evictable) evictable_bytes += record->chunk->charged_bytes();
    if (record->queued != (evictable && !HasChildren(*record))) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), record->queued ? " is" : " is not", " queued"));
    }
    queued += record->queued ? 1 : 0;
    expiring += expiring_.contains({record->expires, record->number}) ? 1 : 0;
    if (record->expires != absl::InfiniteFuture() && !expiring_.contains({record->expires, record->number})) {
      return absl::InternalError(absl::StrCat("chunk ", ToString(key), " would not expire"));
    }
    if (record->parent != kNone) ++children[Sibling(key, record->parent)];
  }
  uint64_t live = 0, published = 0;
  for (ChunkNumber number = 0; number < numbers_; ++number) {
    const Record* record = by_number_.at(number);
    if (record == nullptr) continue;
    if (record->number != number) return absl::InternalError(absl::StrCat("chunk ", number, " has another number"));
    live += record->live ? 1 : 0;
    published += record->published ? 1 : 0;
  }
  if (live != counts_.live + counts_.reserved || published != published_.size()) {
    return absl::InternalError(absl::StrCat("numbered are ", live, "/", counts_.live + counts_.reserved, " live and ",
                                            published, "/", published_.size(), " published chunks"));
  }
  if (children != children_) return absl::InternalError("the counts of children do not agree");
  if (expiring != expiring_.size()) return absl::InternalError("names that are gone would expire");
  if (queued != queue_.size() || published_.size() != counts_.published || evictable_bytes != counts_.evictable_bytes) {
    return absl::InternalError(absl::StrCat("queued ", queued, "/", queue_.size(), ", published ", published_.size(),
                                            "/", counts_.published, ", evictable bytes ", evictable_bytes, "/",
                                            counts_.evictable_bytes));
  }
  return absl::OkStatus();
}

}  // namespace kvferry
