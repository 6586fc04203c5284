#include "storage/arena.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/bytes.h"
#include "storage/base/log.h"

namespace kvferry {
namespace {

constexpr uint64_t kMaxReserve = 16 * kMiB;
constexpr uint64_t kImagesPerSegment = 8;
// Each segment takes a descriptor, of which a process often has 1024: a large budget gets large segments.
constexpr uint64_t kSegmentsPerBudget = 256;
constexpr uint64_t kMinSegmentsPerBudget = 8;
constexpr uint64_t kKeptShare = 8;  // of the budget, in free segments of an active tenant

}  // namespace

Arena::Arena(uint64_t budget_bytes, uint64_t segment_bytes)
    : budget_(budget_bytes),
      segment_bytes_(
          std::min(std::max(segment_bytes, budget_bytes / kSegmentsPerBudget), budget_bytes / kMinSegmentsPerBudget)),
      reserve_bytes_(std::min(budget_bytes / 64, kMaxReserve)) {}

std::optional<Extent> Arena::Allocate(const std::string& tenant_name, uint64_t bytes, uint64_t overhead,
                                      uint64_t charge) {
  std::optional<Extent> extent;
  MutexLock lock(&mu_);
  std::unique_ptr<Tenant>& tenant = tenants_[tenant_name];
  if (tenant == nullptr) tenant = std::make_unique<Tenant>();
  while (Room(charge) < overhead && RetireAnyOne()) {
  }
  if (Room(charge) >= overhead) {
    extent = tenant->pool.Allocate(bytes);
    if (!extent && MapSegment(tenant_name, *tenant, bytes, overhead + charge)) extent = tenant->pool.Allocate(bytes);
  }
  if (extent) {
    extent->overhead = overhead;
    extents_ += bytes;
    overhead_ += overhead;
    charged_ += charge;
  }
  return extent;
}

void Arena::Free(const Extent& extent) {
  PutBack(extent);
  Notify();
}

void Arena::PutBack(const Extent& extent, uint64_t charge) {
  MutexLock lock(&mu_);
  charged_ -= charge;
  extents_ -= extent.bytes;
  overhead_ -= extent.overhead;
  const auto tenant = tenants_.find(extent.segment->tenant());
  if (tenant->second->pool.Free(extent)) Trim(*tenant->second);
  if (tenant->second->pool.empty() && !tenant->second->active) tenants_.erase(tenant);
}

bool Arena::CouldHold(uint64_t bytes, uint64_t overhead, uint64_t count) const {
  return (budget_ - reserve_bytes_) / (bytes + overhead) >= count;
}

bool Arena::TryCharge(uint64_t bytes) {
  MutexLock lock(&mu_);
  while (mapped_ + overhead_ + charged_ + bytes > budget_ && RetireAnyOne()) {
  }
  if (mapped_ + overhead_ + charged_ + bytes > budget_) return false;
  charged_ += bytes;
  return true;
}

void Arena::Uncharge(uint64_t bytes) {
  MutexLock lock(&mu_);
  charged_ -= bytes;
}

void Arena::SetActive(const std::string& name, bool active) {
  {
    MutexLock lock(&mu_);
    std::unique_ptr<Tenant>& tenant = tenants_[name];
    if (tenant == nullptr) tenant = std::make_unique<Tenant>();
    tenant->active = active;
    Trim(*tenant);
    if (tenant->pool.empty() && !active) tenants_.erase(name);
  }
  Notify();
}

void Arena::Bury() {
  std::vector<std::unique_ptr<Segment>> retired;
  absl::Status error;
  {
    MutexLock lock(&mu_);
    retired.swap(retired_);
    retired_count_.store(0, std::memory_order_relaxed);
    error = std::exchange(map_error_, absl::OkStatus());
  }
  if (!error.ok()) KVFERRY_LOG_EVERY(kWarning, absl::Seconds(10), absl::StrCat("memory tier: ", error.message()));
}

Arena::Usage Arena::usage() const {
  MutexLock lock(&mu_);
  Usage usage;
  usage.budget = budget_;
  usage.extents = extents_;
  usage.metadata = overhead_ + charged_;
  usage.free = mapped_ - extents_;
  usage.reserve = reserve_bytes_ > charged_ ? reserve_bytes_ - charged_ : 0;
  for (const auto& [name, tenant] : tenants_) usage.segments += tenant->pool.segment_count();
  return usage;
}

// Bytes that segments and overhead may still take, beside a charge.
uint64_t Arena::Room(uint64_t charge) const {
  const uint64_t taken = mapped_ + overhead_ + std::max(charged_ + charge, reserve_bytes_);
  return taken <= budget_ ? budget_ - taken : 0;
}

bool Arena::MapSegment(const std::string& name, Tenant& tenant, uint64_t bytes, uint64_t overhead) {
  const uint64_t each = bytes + overhead;
  // A whole number of images: none of a segment is lost as long as chunks are alike.
  const uint64_t small = std::max<uint64_t>(1, budget_ / kMinSegmentsPerBudget / each);
  const uint64_t wanted = std::max<uint64_t>(1, std::max(segment_bytes_ / bytes, std::min(kImagesPerSegment, small)));
  while (Room() < wanted * each && RetireAnyOne()) {
  }
  const uint64_t images = std::min(wanted, Room() / each);
  if (images == 0) return false;
  absl::StatusOr<std::unique_ptr<Segment>> segment = Segment::Create(name, next_segment_, images * bytes);
  if (!segment.ok()) {
    map_error_ = segment.status();
    return false;
  }
  ++next_segment_;
  mapped_ += (*segment)->bytes();
  tenant.pool.Add(*std::move(segment));
  return true;
}

bool Arena::RetireOne(Tenant& tenant) {
  std::unique_ptr<Segment> segment = tenant.pool.TakeFreeSegment();
  if (segment == nullptr) return false;
  mapped_ -= segment->bytes();
  retired_.push_back(std::move(segment));
  retired_count_.store(retired_.size(), std::memory_order_relaxed);
  return true;
}

bool Arena::RetireAnyOne() {
  for (auto& [name, tenant] : tenants_) {
    if (tenant->pool.whole_free_bytes() != 0) return RetireOne(*tenant);
  }
  return false;
}

void Arena::Trim(Tenant& tenant) {
  const uint64_t keep = tenant.active ? budget_ / kKeptShare : 0;
  while (tenant.pool.whole_free_bytes() > keep && RetireOne(tenant)) {
  }
}

void Arena::Notify() {
  if (std::shared_ptr<FreedListener> listener = listener_.lock()) {
    listener->OnMemoryFreed();
  } else {
    Bury();  // the store is gone, and so are its locks
  }
}

absl::Status Arena::CheckInvariants() const {
  MutexLock lock(&mu_);
  uint64_t mapped = 0, free = 0;
  for (const auto& [name, tenant] : tenants_) {
    if (absl::Status status = tenant->pool.CheckInvariants(); !status.ok()) return status;
    mapped += tenant->pool.mapped_bytes();
    free += tenant->pool.free_bytes();
  }
  if (mapped != mapped_ || extents_ + free != mapped_ || mapped_ + overhead_ + charged_ > budget_) {
    return absl::InternalError(absl::StrCat("mapped ", mapped, "/", mapped_, ", extents ", extents_, ", free ", free,
                                            ", overhead ", overhead_, ", charged ", charged_, ", budget ", budget_));
  }
  return absl::OkStatus();
}

}  // namespace kvferry
