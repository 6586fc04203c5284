// Memory for new chunks: free, else evicted, else waited for.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "storage/store_state.h"

namespace kvferry {

// The operations on StoreState that grant reservations. Holds nothing itself. REQUIRES: the store's mutex is held,
// unless it is excluded.
class Reserver {
 public:
  using Writers = std::vector<std::unique_ptr<ChunkWriter>>;

  explicit Reserver(StoreState* state) : state_(*state) {}

  // See Store::Reserve.
  void Reserve(SessionId session, const NamespaceId& ns, const ReserveOptions& options, ReserveDone done)
      ABSL_LOCKS_EXCLUDED(state_.mu);

  // Memory for a chunk on disk: Loader::Begin or Refuse is told. False: there is none now, and it may not wait.
  bool Load(Record* record, bool may_wait);

  // Grants what waits, first come first served, as far as memory goes; runs due answers; unmaps what was retired.
  void Pump() ABSL_LOCKS_EXCLUDED(state_.mu);

 private:
  absl::StatusOr<MemoryRequest> Check(SessionId session, const NamespaceId& ns, const ReserveOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // All the extents or none.
  std::optional<std::vector<Extent>> TryAllocate(const MemoryRequest& request, bool may_wait)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // OK once the quotas have room for the request; domains that evict their own make some. RESOURCE_EXHAUSTED names the
  // quota, and nothing has been evicted.
  absl::Status FitIntoQuotas(const MemoryRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  bool EvictOne(bool may_wait, size_t* skipped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // Who is next to leave memory and needs no transfer for that; nullptr if there is nobody.
  Record* Victim() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void Drop(Record* victim) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  Writers MakeWriters(const MemoryRequest& request, const std::vector<Extent>& extents)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void Wait(MemoryRequest request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  absl::Status Refusal(const MemoryRequest& request, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void DropGivenUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  // A deadline to come: when Expire is to be scheduled, if nothing sooner is.
  std::optional<absl::Time> ArmExpiry(absl::Time next) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);
  void ScheduleExpiry(absl::Time when) ABSL_LOCKS_EXCLUDED(state_.mu);
  void Expire(absl::Time when) ABSL_LOCKS_EXCLUDED(state_.mu);

  StoreState& state_;
};

}  // namespace kvferry
