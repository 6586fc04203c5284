#include "storage/eviction.h"

#include "absl/numeric/bits.h"
#include "absl/strings/str_cat.h"

namespace kvferry {

absl::StatusOr<PolicyKind> ParsePolicy(absl::string_view name) {
  for (const PolicyKind kind : kPolicies) {
    if (name == PolicyName(kind)) return kind;
  }
  return absl::InvalidArgumentError(absl::StrCat("policy is \"", name, "\", expected s3fifo, lru or lfu"));
}

absl::string_view PolicyName(PolicyKind kind) {
  switch (kind) {
    case PolicyKind::kLru:
      return "lru";
    case PolicyKind::kLfu:
      return "lfu";
    case PolicyKind::kS3Fifo:
      break;
  }
  return "s3fifo";
}

std::unique_ptr<EvictionPolicy> NewPolicy(PolicyKind kind) {
  switch (kind) {
    case PolicyKind::kLru:
      return NewLruPolicy();
    case PolicyKind::kLfu:
      return NewLfuPolicy();
    case PolicyKind::kS3Fifo:
      break;
  }
  return NewS3FifoPolicy();
}

void EvictionQueue::Add(ChunkNumber chunk, uint64_t name, int priority) {
  std::unique_ptr<EvictionPolicy>& policy = policies_[priority];
  if (policy == nullptr) policy = NewPolicy(kind_);
  priorities_[chunk] = static_cast<uint8_t>(priority);
  policy->Add(chunk, name);
}

void EvictionQueue::Insert(ChunkNumber chunk, Turn turn) {
  const uint8_t priority = priorities_[chunk];
  policies_[priority]->Insert(chunk, turn);
  queued_[priority / 64] |= uint64_t{1} << priority % 64;
  ++size_;
}

void EvictionQueue::Erase(ChunkNumber chunk) {
  const uint8_t priority = priorities_[chunk];
  policies_[priority]->Erase(chunk);
  if (policies_[priority]->size() == 0) queued_[priority / 64] &= ~(uint64_t{1} << priority % 64);
  --size_;
}

std::optional<ChunkNumber> EvictionQueue::Victim() {
  if (size_ == 0) return std::nullopt;
  const int lowest = queued_[0] != 0 ? absl::countr_zero(queued_[0]) : 64 + absl::countr_zero(queued_[1]);
  return policies_[lowest]->Victim();
}

}  // namespace kvferry
