#include <utility>

#include "absl/container/btree_set.h"
#include "storage/eviction.h"

namespace kvferry {
namespace {

// Chunks in the order of their last use, which a clock of its own makes unique.
class LruPolicy : public EvictionPolicy {
 public:
  void Add(ChunkNumber chunk, uint64_t) override { nodes_[chunk] = {++clock_, false}; }
  void Remove(ChunkNumber, bool) override {}

  void Touch(ChunkNumber chunk) override {
    Node& node = nodes_[chunk];
    if (node.queued) queue_.erase({node.last_use, chunk});
    node.last_use = ++clock_;
    if (node.queued) queue_.emplace(node.last_use, chunk);
  }

  void Insert(ChunkNumber chunk, Turn) override {
    Node& node = nodes_[chunk];
    queue_.emplace(node.last_use, chunk);
    node.queued = true;
  }

  void Erase(ChunkNumber chunk) override {
    Node& node = nodes_[chunk];
    queue_.erase({node.last_use, chunk});
    node.queued = false;
  }

  std::optional<ChunkNumber> Victim() override {
    if (queue_.empty()) return std::nullopt;
    return queue_.begin()->second;
  }

  size_t size() const override { return queue_.size(); }

 private:
  struct Node {
    uint64_t last_use = 0;
    bool queued = false;
  };
  PagedVector<Node> nodes_;
  absl::btree_set<std::pair<uint64_t, ChunkNumber>> queue_;
  uint64_t clock_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewLruPolicy() { return std::make_unique<LruPolicy>(); }

}  // namespace kvferry
