// The end of a namespace.
#pragma once

#include <memory>

#include "storage/store_state.h"

namespace kvferry {

// The operations on StoreState that drop namespaces. Holds nothing itself.
class Dropper {
 public:
  explicit Dropper(StoreState* state) : state_(*state) {}

  // See Store::Drop.
  void Drop(const NamespaceId& ns, bool purge, DropDone done) ABSL_LOCKS_EXCLUDED(state_.mu);

 private:
  struct Job;

  // Takes the names away of some of its chunks, and goes on with the others in another task.
  void Sweep(const std::shared_ptr<Job>& job) ABSL_LOCKS_EXCLUDED(state_.mu);
  void Take(Record* record, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_.mu);

  StoreState& state_;
};

}  // namespace kvferry
