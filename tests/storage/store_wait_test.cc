// Reservations that wait for memory.
#include "storage/reserve_queue.h"
#include "tests/storage/store_fixture.h"

namespace kvferry {
namespace {

class StoreWait : public StoreFixture {
 protected:
  void SetUp() override {
    OpenFor(BigSpec(), 4);
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
    for (uint64_t i = 0; i < 4; ++i) live_.push_back(Live(session_, ns_, i));
  }
  Answer Ask(int count, absl::Duration wait = absl::Seconds(10)) {
    return StoreFixture::Ask(session_, ns_, count, wait);
  }
  static bool Granted(const Answer& answer) { return answer->has_value() && (*answer)->ok(); }

  SessionId session_ = 0;
  NamespaceId ns_{};
  std::vector<ChunkKey> live_;
};

TEST_F(StoreWait, GrantedWhenMemoryIsFreed) {
  const Answer answer = Ask(1);
  executor_.Run();
  EXPECT_FALSE(answer->has_value());
  store_->Release(session_, {live_[0]});
  executor_.Run();
  ASSERT_TRUE(Granted(answer));
  Seal(*(**answer)->front(), 9);
  EXPECT_TRUE(Has(session_, (**answer)->front()->key(), 9));
}

// A client that was killed while it waited for much stands first for as long as it said; the others must not.
TEST_F(StoreWait, WhoHasGivenUpHoldsNobodyBack) {
  auto given_up = std::make_shared<std::atomic<bool>>(false);
  ReserveOptions options;
  options.count = 4;
  options.deadline = executor_.Now() + absl::Hours(1);
  options.given_up = given_up;
  absl::Status answered;
  store_->Reserve(session_, ns_, options, [&](absl::StatusOr<Writers> writers) { answered = writers.status(); });
  const Answer behind = Ask(1);
  store_->Release(session_, {live_[0]});
  executor_.Run();
  EXPECT_FALSE(behind->has_value()) << "first come, first served";
  *given_up = true;
  EXPECT_EQ(Reserve(session_, ns_).status().code(), absl::StatusCode::kResourceExhausted) << "one waits rightly";
  executor_.Run();
  EXPECT_EQ(answered.code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Granted(behind));
}

// B38: a bounded wait, then a refusal; nothing runs meanwhile.
TEST_F(StoreWait, B38_RefusedAtTheDeadlineAndNeverSpins) {
  const Answer answer = Ask(1);
  executor_.Run();  // returns: nothing schedules itself anew
  executor_.Advance(absl::Seconds(9));
  EXPECT_FALSE(answer->has_value());
  executor_.Advance(absl::Seconds(1));
  ASSERT_TRUE(answer->has_value());
  EXPECT_EQ((*answer)->status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(executor_.waiting(), 0u);
  store_->Release(session_, live_);
  executor_.Run();
}

// Who is granted early leaves no timer behind for as long as he would have waited.
TEST_F(StoreWait, AllWhoWaitShareATimer) {
  for (int i = 0; i < 100; ++i) {
    const Answer first = Ask(1, absl::Hours(1)), second = Ask(1, absl::Hours(2));
    store_->Release(session_, {live_[0], live_[1]});
    executor_.Advance(absl::Milliseconds(1));
    ASSERT_TRUE(Granted(first) && Granted(second));
    live_[0] = (**first)->front()->key();
    live_[1] = (**second)->front()->key();
    Seal(*(**first)->front(), 1);
    Seal(*(**second)->front(), 2);
  }
  EXPECT_LE(executor_.waiting(), 1u);
  // Each is refused at its own deadline, the sooner one first though it came last.
  const Answer late = Ask(1, absl::Hours(3)), soon = Ask(1, absl::Seconds(1));
  executor_.Advance(absl::Seconds(1) - absl::Milliseconds(1));
  EXPECT_FALSE(soon->has_value());
  executor_.Advance(absl::Milliseconds(1));
  EXPECT_TRUE(soon->has_value());
  executor_.Advance(absl::Hours(3) - absl::Seconds(1) - absl::Milliseconds(1));
  EXPECT_FALSE(late->has_value());
  executor_.Advance(absl::Milliseconds(1));
  EXPECT_TRUE(late->has_value());
  EXPECT_EQ(executor_.waiting(), 0u);
}

TEST_F(StoreWait, FirstComeFirstServed) {
  const Answer large = Ask(3), small = Ask(1);
  store_->Release(session_, {live_[0]});
  executor_.Run();
  EXPECT_FALSE(small->has_value()) << "a small one must not starve a large one";
  EXPECT_EQ(Reserve(session_, ns_).status().code(), absl::StatusCode::kResourceExhausted)
      << "nor one that does not wait";
  store_->Release(session_, {live_[1], live_[2]});
  executor_.Run();
  EXPECT_TRUE(Granted(large));
  EXPECT_FALSE(small->has_value());
  store_->Release(session_, {live_[3]});
  executor_.Run();
  EXPECT_TRUE(Granted(small));
}

TEST_F(StoreWait, WhoStoodBehindAnExpiredOneIsServed) {
  const Answer large = Ask(4, absl::Seconds(1)), small = Ask(1);
  store_->Release(session_, {live_[0]});
  executor_.Run();
  EXPECT_FALSE(small->has_value());
  executor_.Advance(absl::Seconds(1));
  EXPECT_FALSE(Granted(large));
  EXPECT_TRUE(Granted(small));
}

TEST_F(StoreWait, GrantedWhenAWriterGivesUp) {
  store_->Release(session_, {live_[0]});
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ASSERT_TRUE(writers.ok());
  const Answer answer = Ask(1);
  executor_.Run();
  EXPECT_FALSE(answer->has_value());
  writers->clear();
  executor_.Run();
  EXPECT_TRUE(Granted(answer));
}

TEST_F(StoreWait, GrantedWhenTheLastViewIsDropped) {
  absl::StatusOr<BlockView> view = Get(session_, live_[0]);
  const Answer answer = Ask(1);
  store_->Release(session_, {live_[0]});
  executor_.Run();
  EXPECT_FALSE(answer->has_value());
  view = absl::CancelledError();
  executor_.Run();
  EXPECT_TRUE(Granted(answer));
}

TEST_F(StoreWait, GrantedWhenAReadOfTheOnlyVictimEnds) {
  ASSERT_TRUE(Publish(session_, live_[0], 7).ok());
  store_->Release(session_, {live_[0]});
  absl::StatusOr<BlockView> view = Get(session_, Prefix(ns_, 7));
  const Answer answer = Ask(1);
  executor_.Run();
  EXPECT_FALSE(answer->has_value());
  ExpectBytes(*view, 0);
  view = absl::CancelledError();
  executor_.Run();
  EXPECT_TRUE(Granted(answer));
}

TEST_F(StoreWait, GrantedWhenALeaseIsReturned) {
  ASSERT_TRUE(Publish(session_, live_[0], 7).ok());
  ASSERT_EQ(Lookup(session_, {Prefix(ns_, 7)}, true), 1);
  store_->Release(session_, {live_[0]});
  const Answer answer = Ask(1);
  executor_.Run();
  EXPECT_FALSE(answer->has_value());
  store_->Release(session_, {Prefix(ns_, 7)});
  executor_.Run();
  EXPECT_TRUE(Granted(answer));
  EXPECT_EQ(store_->Stats().evictions, 1u);
}

TEST_F(StoreWait, GrantedWhenAnotherSessionEnds) {
  const SessionId other = Session();
  Namespace(other, BigSpec());
  const Answer answer = StoreFixture::Ask(other, ns_, 4, absl::Seconds(10));
  store_->EndSession(session_);
  executor_.Run();
  EXPECT_TRUE(Granted(answer));
}

TEST_F(StoreWait, RefusedWhenItsSessionEnds) {
  const Answer answer = Ask(1);
  store_->EndSession(session_);
  executor_.Run();
  ASSERT_TRUE(answer->has_value());
  EXPECT_EQ((*answer)->status().code(), absl::StatusCode::kNotFound);
  ExpectEmpty();
}

TEST_F(StoreWait, AnsweredWhenTheStoreCloses) {
  const Answer answer = Ask(1);
  store_.reset();
  ASSERT_TRUE(answer->has_value());
  EXPECT_EQ((*answer)->status().code(), absl::StatusCode::kUnavailable);
  executor_.Advance(absl::Hours(1));
}

TEST_F(StoreWait, TheQueueIsBounded) {
  std::vector<Answer> answers;
  for (size_t i = 0; i <= ReserveQueue::kMaxWaiting; ++i) answers.push_back(Ask(1));
  EXPECT_FALSE(answers.front()->has_value());
  ASSERT_TRUE(answers.back()->has_value());
  EXPECT_EQ((*answers.back())->status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(StoreWait, AnAnswerMayCallTheStore) {
  ReserveOptions options;
  options.deadline = executor_.Now() + absl::Seconds(10);
  bool answered = false;
  store_->Reserve(session_, ns_, options, [&](absl::StatusOr<Writers> writers) {
    ASSERT_TRUE(writers.ok()) << writers.status();
    EXPECT_EQ(store_->Stats().chunks_reserved, 1u);  // would hang under a lock
    store_->Release(session_, {writers->front()->key()});
    answered = true;
  });
  store_->Release(session_, {live_[0]});
  executor_.Run();
  EXPECT_TRUE(answered);
}

}  // namespace
}  // namespace kvferry
