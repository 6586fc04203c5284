#include <algorithm>
#include <vector>

#include "storage/eviction.h"
#include "storage/number_list.h"

namespace kvferry {
namespace {

// A list for each number of uses.
class LfuPolicy : public EvictionPolicy {
 public:
  LfuPolicy() : lists_(kMostUses + 1, List(&nodes_)) {}

  void Add(ChunkNumber chunk, uint64_t) override { nodes_[chunk] = {}; }
  void Remove(ChunkNumber, bool) override {}

  void Touch(ChunkNumber chunk) override {
    Node& node = nodes_[chunk];
    const bool queued = node.queued;
    if (queued) Erase(chunk);
    node.uses = static_cast<uint8_t>(std::min<int>(node.uses + 1, kMostUses));
    if (queued) Insert(chunk, Turn::kLast);
  }

  void Insert(ChunkNumber chunk, Turn turn) override {
    Node& node = nodes_[chunk];
    List& list = lists_[node.uses];
    turn == Turn::kNext ? list.PushFront(chunk) : list.PushBack(chunk);
    node.queued = true;
    lowest_ = std::min<size_t>(lowest_, node.uses);
    ++size_;
  }

  void Erase(ChunkNumber chunk) override {
    Node& node = nodes_[chunk];
    lists_[node.uses].Erase(chunk);
    node.queued = false;
    --size_;
  }

  std::optional<ChunkNumber> Victim() override {
    if (size_ == 0) return std::nullopt;
    while (lists_[lowest_].empty()) ++lowest_;
    return lists_[lowest_].front();
  }

  size_t size() const override { return size_; }

 private:
  static constexpr int kMostUses = 255;
  struct Node {
    uint32_t prev = 0, next = 0;
    uint8_t uses = 0;
    bool queued = false;
  };
  using List = NumberList<Node>;

  PagedVector<Node> nodes_;
  std::vector<List> lists_;
  size_t lowest_ = 0;  // no list below it has any
  size_t size_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewLfuPolicy() { return std::make_unique<LfuPolicy>(); }

}  // namespace kvferry
