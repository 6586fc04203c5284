#include "storage/eviction.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/seeds.h"

namespace kvferry {
namespace {

// What a policy is to do, by plain loops over all there is.
class Plain {
 public:
  struct Chunk {
    uint64_t name = 0, last_use = 0, place = 0;
    int uses = 0;
    bool queued = false, main = false;
  };

  explicit Plain(PolicyKind kind) : kind_(kind) {}

  void Add(ChunkNumber n, uint64_t name) {
    Chunk chunk{name, ++clock_};
    const auto ghost = std::find(ghosts_.begin(), ghosts_.end(), name);
    chunk.main = ghost != ghosts_.end();
    if (chunk.main) *ghost = 0;  // nobody's name
    chunks_[n] = chunk;
  }
  void Remove(ChunkNumber n, bool evicted) {
    const Chunk gone = chunks_[n];
    chunks_.erase(n);
    if (!evicted || gone.main) return;
    if (std::find(ghosts_.begin(), ghosts_.end(), gone.name) == ghosts_.end()) ghosts_.push_back(gone.name);
    while (ghosts_.size() > chunks_.size()) ghosts_.pop_front();
  }
  void Touch(ChunkNumber n) {
    Chunk& chunk = chunks_[n];
    chunk.last_use = ++clock_;
    chunk.uses = std::min(chunk.uses + 1, kind_ == PolicyKind::kS3Fifo ? 3 : 255);
    if (kind_ == PolicyKind::kLfu && chunk.queued) chunk.place = Last();
  }
  void Insert(ChunkNumber n, Turn turn) {
    chunks_[n].place = turn == Turn::kNext ? --first_ : Last();
    chunks_[n].queued = true;
  }
  void Erase(ChunkNumber n) { chunks_[n].queued = false; }

  std::optional<ChunkNumber> Victim() {
    if (kind_ == PolicyKind::kS3Fifo) return S3Victim();
    return Least([this](const Chunk& c) {
      return kind_ == PolicyKind::kLru ? std::pair<uint64_t, uint64_t>(c.last_use, 0)
                                       : std::pair<uint64_t, uint64_t>(c.uses, c.place);
    });
  }
  size_t size() const {
    return std::count_if(chunks_.begin(), chunks_.end(), [](const auto& c) { return c.second.queued; });
  }
  const std::map<ChunkNumber, Chunk>& chunks() const { return chunks_; }

 private:
  uint64_t Last() { return ++last_; }

  template <typename Rank>
  std::optional<ChunkNumber> Least(Rank rank) {
    std::optional<ChunkNumber> least;
    for (const auto& [n, chunk] : chunks_) {
      if (chunk.queued && (!least || rank(chunk) < rank(chunks_[*least]))) least = n;
    }
    return least;
  }
  std::optional<ChunkNumber> S3Victim() {
    while (size() > 0) {
      const auto in = [](bool main) {
        return [main](const Chunk& c) { return std::pair<uint64_t, uint64_t>(c.main != main, c.place); };
      };
      const ChunkNumber small = *Least(in(false)), main = *Least(in(true));
      const auto small_size = static_cast<size_t>(std::count_if(
          chunks_.begin(), chunks_.end(), [](const auto& c) { return c.second.queued && !c.second.main; }));
      if (small_size > 0 && (small_size == size() || small_size * 10 >= size())) {
        if (chunks_[small].uses < 2) return small;
        chunks_[small].uses = 0;
        chunks_[small].main = true;
        chunks_[small].place = Last();
      } else {
        if (chunks_[main].uses == 0) return main;
        --chunks_[main].uses;
        chunks_[main].place = Last();
      }
    }
    return std::nullopt;
  }

  const PolicyKind kind_;
  std::map<ChunkNumber, Chunk> chunks_;
  std::deque<uint64_t> ghosts_;
  uint64_t clock_ = 0, first_ = uint64_t{1} << 40, last_ = uint64_t{1} << 41;
};

class PolicyTest : public testing::TestWithParam<PolicyKind> {};

std::string NameOf(const testing::TestParamInfo<PolicyKind>& info) { return std::string(PolicyName(info.param)); }

INSTANTIATE_TEST_SUITE_P(Policies, PolicyTest, testing::ValuesIn(kPolicies), NameOf);

TEST_P(PolicyTest, AgreesWithPlainLoops) {
  const Seeds seeds(50);
  for (uint64_t seed = seeds.first; seed != seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const auto below = [&random](uint64_t n) { return random() % n; };
    const std::unique_ptr<EvictionPolicy> policy = NewPolicy(GetParam());
    Plain plain(GetParam());
    const uint64_t most = 2 + below(40), names = most + below(100);
    for (int step = 0; step < 1500; ++step) {
      if (plain.chunks().size() < most) {
        ChunkNumber n = 0;
        while (plain.chunks().contains(n)) ++n;
        const uint64_t name = 1 + below(names);
        const bool named = std::any_of(plain.chunks().begin(), plain.chunks().end(),
                                       [name](const auto& c) { return c.second.name == name; });
        if (!named) {
          policy->Add(n, name);
          plain.Add(n, name);
          policy->Insert(n, Turn::kLast);
          plain.Insert(n, Turn::kLast);
        }
      }
      const auto any = std::next(plain.chunks().begin(), static_cast<int64_t>(below(plain.chunks().size())));
      const ChunkNumber n = any->first;
      switch (below(6)) {
        case 0:
        case 1:
          policy->Touch(n);
          plain.Touch(n);
          break;
        case 2: {
          const bool queued = any->second.queued;
          const Turn turn = below(2) == 0 ? Turn::kNext : Turn::kLast;
          queued ? policy->Erase(n) : policy->Insert(n, turn);
          queued ? plain.Erase(n) : plain.Insert(n, turn);
          break;
        }
        case 3: {
          const std::optional<ChunkNumber> victim = policy->Victim();
          ASSERT_EQ(victim, plain.Victim()) << "step " << step;
          if (!victim) break;
          for (const auto leave : {0, 1}) {
            leave == 0 ? policy->Erase(*victim) : policy->Remove(*victim, true);
            leave == 0 ? plain.Erase(*victim) : plain.Remove(*victim, true);
          }
          break;
        }
        case 4:
          if (below(8) != 0 || any->second.queued) break;
          policy->Remove(n, false);
          plain.Remove(n, false);
          break;
        default:
          ASSERT_EQ(policy->Victim(), plain.Victim()) << "step " << step;
          ASSERT_EQ(policy->Victim(), plain.Victim()) << "asked twice, step " << step;
      }
      ASSERT_EQ(policy->size(), plain.size());
      if (plain.chunks().empty()) continue;
    }
  }
}

TEST_P(PolicyTest, HasAName) {
  EXPECT_EQ(*ParsePolicy(PolicyName(GetParam())), GetParam());
  EXPECT_THAT(std::string(ParsePolicy("fifo").status().message()), testing::HasSubstr("\"fifo\", expected s3fifo"));
}

TEST_P(PolicyTest, TheLowestPriorityGoesFirst) {
  EvictionQueue queue(GetParam());
  const std::vector<int> priorities = {50, 0, 100, 64, 63, 1, 50};
  for (ChunkNumber n = 0; n < priorities.size(); ++n) {
    queue.Add(n, n + 1, priorities[n]);
    queue.Insert(n, Turn::kLast);
  }
  for (int i = 0; i < 10; ++i) queue.Touch(1);  // uses do not make up for it
  std::vector<int> order;
  while (const std::optional<ChunkNumber> victim = queue.Victim()) {
    order.push_back(priorities[*victim]);
    queue.Erase(*victim);
    queue.Remove(*victim, true);
  }
  EXPECT_THAT(order, testing::ElementsAre(0, 1, 50, 50, 63, 64, 100));
  EXPECT_EQ(queue.size(), 0u);
}

// A scan of names that nobody asks for twice drives nothing out that was used twice.
TEST(S3FifoTest, AScanPassesThroughTheSmallQueue) {
  const std::unique_ptr<EvictionPolicy> policy = NewS3FifoPolicy();
  constexpr ChunkNumber kChunks = 100;
  for (ChunkNumber n = 0; n < kChunks; ++n) {
    policy->Add(n, n + 1);
    policy->Insert(n, Turn::kLast);
    for (int use = 0; n < 50 && use < 2; ++use) policy->Touch(n);
  }
  std::set<ChunkNumber> gone;
  for (uint64_t name = 1000; name < 2000; ++name) {
    const ChunkNumber victim = *policy->Victim();
    gone.insert(victim);
    policy->Erase(victim);
    policy->Remove(victim, true);
    policy->Add(victim, name);
    policy->Insert(victim, Turn::kLast);
  }
  EXPECT_EQ(*gone.begin(), 50u) << "of those used twice none has gone";
}

}  // namespace
}  // namespace kvferry
