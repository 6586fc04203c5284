#include <algorithm>

#include "storage/eviction.h"
#include "storage/ghosts.h"
#include "storage/number_list.h"

namespace kvferry {
namespace {

constexpr uint8_t kMostUses = 3;
constexpr uint8_t kUsesForMain = 2;
constexpr size_t kSmallShare = 10;  // the small queue has one in so many

class S3FifoPolicy : public EvictionPolicy {
 public:
  void Add(ChunkNumber chunk, uint64_t name) override {
    ++added_;
    Node& node = nodes_[chunk];
    node = {};
    node.fingerprint = Ghosts::Fingerprint(name);
    node.main = ghosts_.Take(node.fingerprint);
  }

  void Remove(ChunkNumber chunk, bool evicted) override {
    --added_;
    const Node& node = nodes_[chunk];
    if (evicted && !node.main) ghosts_.Add(node.fingerprint, added_);
  }

  void Touch(ChunkNumber chunk) override {
    Node& node = nodes_[chunk];
    node.uses = std::min<uint8_t>(node.uses + 1, kMostUses);
  }

  void Insert(ChunkNumber chunk, Turn turn) override {
    List& list = ListOf(chunk);
    turn == Turn::kNext ? list.PushFront(chunk) : list.PushBack(chunk);
  }

  void Erase(ChunkNumber chunk) override { ListOf(chunk).Erase(chunk); }

  // Each turn of the loop takes away uses that calls of Touch have given, or moves a chunk on for good.
  std::optional<ChunkNumber> Victim() override {
    while (size() > 0) {
      if (!small_.empty() && (main_.empty() || small_.size() * kSmallShare >= size())) {
        const ChunkNumber oldest = small_.front();
        Node& node = nodes_[oldest];
        if (node.uses < kUsesForMain) return oldest;
        small_.Erase(oldest);
        node.main = true;
        node.uses = 0;
        main_.PushBack(oldest);
      } else {
        const ChunkNumber oldest = main_.front();
        Node& node = nodes_[oldest];
        if (node.uses == 0) return oldest;
        --node.uses;
        main_.Erase(oldest);
        main_.PushBack(oldest);
      }
    }
    return std::nullopt;
  }

  size_t size() const override { return small_.size() + main_.size(); }

 private:
  struct Node {
    uint32_t prev = 0, next = 0;
    uint32_t fingerprint = 0;
    uint8_t uses = 0;
    bool main = false;  // the queue it belongs to
  };
  using List = NumberList<Node>;

  List& ListOf(ChunkNumber chunk) { return nodes_[chunk].main ? main_ : small_; }

  PagedVector<Node> nodes_;
  List small_{&nodes_}, main_{&nodes_};
  Ghosts ghosts_;
  size_t added_ = 0;
};

}  // namespace

std::unique_ptr<EvictionPolicy> NewS3FifoPolicy() { return std::make_unique<S3FifoPolicy>(); }

}  // namespace kvferry
