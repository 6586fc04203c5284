#include "tests/bench/trace.h"

#include <fstream>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvferry {
namespace {

using testing::DoubleNear;
using testing::HasSubstr;

class TraceTest : public testing::Test {
 protected:
  static const Trace& Conversation() {
    static const Trace* const trace = new Trace(*ReadTrace(KVFERRY_TRACES "/conversation.jsonl.gz"));
    return *trace;
  }
  static TraceResult PlayMemory(PolicyKind policy, uint64_t chunks) {
    return Play(Conversation(), {policy, WritePolicy::kWriteBack, chunks, 0});
  }
};

// What others have found out about this trace: tests/traces/README.md says which it is.
TEST_F(TraceTest, AgreesWithWhatIsKnownOfTheTrace) {
  EXPECT_EQ(Conversation().size(), 12031u);
  std::multiset<uint64_t> names;
  for (const auto& request : Conversation()) names.insert(request.begin(), request.end());
  uint64_t distinct = 0, once = 0;
  for (auto it = names.begin(); it != names.end(); it = names.upper_bound(*it)) {
    ++distinct;
    once += names.count(*it) == 1 ? 1 : 0;
  }
  EXPECT_THAT(static_cast<double>(once) / static_cast<double>(distinct), DoubleNear(0.758, 0.001));
  EXPECT_THAT(PlayMemory(PolicyKind::kLru, names.size()).hit_ratio(), DoubleNear(0.366, 0.001));
  EXPECT_THAT(PlayMemory(PolicyKind::kLru, 10'000).hit_ratio(), DoubleNear(0.211, 0.005));
}

TEST_F(TraceTest, TheTiersHoldWhatTheyMay) {
  for (const PolicyKind policy : kPolicies) {
    for (const WritePolicy write : kWritePolicies) {
      SCOPED_TRACE(testing::Message() << PolicyName(policy) << ", " << WritePolicyName(write));
      const TraceResult result = Play(Conversation(), {policy, write, 300, 2'700});
      EXPECT_LE(result.largest_memory, 300u);
      EXPECT_LE(result.largest_disk, 2'700u);
      EXPECT_GT(result.largest_disk, 1'000u);
      EXPECT_GT(result.hit_disk, 0u);
      EXPECT_EQ(result.asked, 288'500u);
      EXPECT_GT(result.hit_ratio(), 0.05);
    }
  }
}

// By hand: a prompt of two chunks, another one, the first again.
TEST_F(TraceTest, WritePolicies) {
  const Trace trace = {{1, 2}, {3, 4}, {1, 2}};
  const auto play = [&](WritePolicy write) { return Play(trace, {PolicyKind::kLru, write, 2, 4}); };
  const TraceResult back = play(WritePolicy::kWriteBack);
  EXPECT_EQ(back.hit_disk, 2u);
  EXPECT_EQ(back.written, 4u) << "1 and 2 made room for 3 and 4, and those for 1 and 2";
  const TraceResult through = play(WritePolicy::kWriteThrough);
  EXPECT_EQ(through.hit_disk, 2u);
  EXPECT_EQ(through.written, 4u);
  const TraceResult second = play(WritePolicy::kOnSecondHit);
  EXPECT_EQ(second.hit_disk + second.hit_memory, 0u) << "nobody had asked for them again";
  EXPECT_EQ(second.written, 0u);
}

TEST_F(TraceTest, BadFilesAreNamed) {
  const std::string path = testing::TempDir() + "/bad_trace.jsonl";
  for (const auto& [text, why] : std::vector<std::pair<std::string, std::string>>{
           {"{\"hash_ids\": [1]}\n{}\n", "line 2 has no array"}, {"{\"hash_ids\": [1, x]}\n", "line 1 has \" x\""}}) {
    std::ofstream(path) << text;
    EXPECT_THAT(std::string(ReadTrace(path).status().message()), testing::AllOf(HasSubstr(path), HasSubstr(why)));
  }
  EXPECT_EQ(ReadTrace("/nowhere/trace").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace kvferry
