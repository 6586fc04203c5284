#include <utility>

#include "absl/container/btree_set.h"
#include "storage/eviction.h"

namespace kvferry {
namespace {

// Nodes in the order of their last use, which a clock of its own makes unique.
class LruPolicy : public EvictionPolicy {
 public:
  void Insert(EvictionNode* node) override {
    if (node->last_use == 0) node->last_use = ++clock_;
    queue_.emplace(node->last_use, node);
    node->queued = true;
  }

  void Touch(EvictionNode* node) override {
    if (node->queued) queue_.erase({node->last_use, node});
    node->last_use = ++clock_;
    if (node->queued) queue_.emplace(node->last_use, node);
  }

  void Erase(EvictionNode* node) override {
    queue_.erase({node->last_use, node});
    node->queued = false;
  }

  EvictionNode* Victim() const override { return queue_.empty() ? nullptr : queue_.begin()->second; }
  size_t size() const override { return queue_.size(); }

 private:
  absl::btree_set<std::pair<uint64_t, EvictionNode*>> queue_;
  uint64_t clock_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewLruPolicy() { return std::make_unique<LruPolicy>(); }

}  // namespace kvferry
