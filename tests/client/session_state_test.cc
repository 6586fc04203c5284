#include "client/session_state.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gmock/gmock.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// Connections are only passed on: any pointer will do.
std::shared_ptr<Connection> Some() {
  auto anchor = std::make_shared<int>();
  return std::shared_ptr<Connection>(anchor, reinterpret_cast<Connection*>(anchor.get()));
}

// The driver's thread, whose attempts all end as told.
class Driver {
 public:
  Driver(SessionState* state, absl::Duration delay, std::function<void(SessionState*)> attempt)
      : thread_([=] {
          while (state->BeginAttempt(delay)) attempt(state);
        }) {}
  ~Driver() { thread_.join(); }

 private:
  std::thread thread_;
};

TEST(SessionStateTest, TheEpochChangesWithTheSessionAlone) {
  SessionState state("unix:///s");
  EXPECT_EQ(state.epoch(), 0u);
  ASSERT_TRUE(state.BeginAttempt(absl::ZeroDuration()));
  EXPECT_FALSE(state.Up(Some(), 7));
  const uint64_t first = state.epoch();
  EXPECT_NE(first, 0u);
  state.Down(absl::UnavailableError("x"));
  EXPECT_FALSE(state.Up(Some(), 7)) << "resumed";
  EXPECT_EQ(state.epoch(), first);
  state.Down(absl::UnavailableError("x"));
  EXPECT_TRUE(state.Up(Some(), 8)) << "another session";
  EXPECT_NE(state.epoch(), first);
  EXPECT_EQ(state.EpochOf(8), state.epoch());
  EXPECT_EQ(state.EpochOf(7), 0u);
}

TEST(SessionStateTest, AWaiterDoesNotWaitForTheBackoff) {
  SessionState state("unix:///s");
  {
    Driver driver(&state, absl::Hours(1), [](SessionState* s) { s->Down(absl::UnavailableError("refused")); });
    for (int i = 0; i < 3; ++i) {
      const absl::Status status = state.Wait(Soon()).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(status.message()), HasSubstr("unix:///s"));
      EXPECT_THAT(std::string(status.message()), HasSubstr("refused"));
    }
    state.Close();
  }
  EXPECT_EQ(state.Wait(Soon()).status().code(), absl::StatusCode::kUnavailable);
}

TEST(SessionStateTest, AnAttemptUnderWayDoesNotCount) {
  SessionState state("unix:///s");
  ASSERT_TRUE(state.BeginAttempt(absl::ZeroDuration()));
  std::atomic<bool> connected{false};
  std::thread waiter([&] { connected = state.Wait(Soon()).ok(); });
  // Once the waiter waits, it wants the attempt after this one: BeginAttempt then returns in spite of the delay.
  state.Down(absl::UnavailableError("too early"));
  ASSERT_TRUE(state.BeginAttempt(absl::Hours(1)));
  state.Up(Some(), 7);
  waiter.join();
  EXPECT_TRUE(connected);
  state.Close();
}

TEST(SessionStateTest, WaitsEndAtTheirDeadlineAndAtClose) {
  SessionState state("unix:///s");
  EXPECT_EQ(state.Wait(absl::Now()).status().code(), absl::StatusCode::kDeadlineExceeded);
  std::thread waiter(
      [&] { EXPECT_EQ(state.Wait(absl::InfiniteFuture()).status().code(), absl::StatusCode::kUnavailable); });
  std::thread patient([&] { EXPECT_FALSE(state.WaitPatiently(absl::InfiniteFuture()).ok()); });
  state.Close();
  waiter.join();
  patient.join();
  EXPECT_FALSE(state.BeginAttempt(absl::Hours(1)));
}

TEST(SessionStateTest, PatienceOutlastsFailuresButNotARefusal) {
  SessionState state("unix:///s");
  std::atomic<int> attempts{0};
  {
    Driver driver(&state, absl::Milliseconds(1), [&](SessionState* s) {
      if (++attempts < 5) return s->Down(absl::UnavailableError("nobody"));
      s->Down(absl::FailedPreconditionError("wrong version"));
    });
    EXPECT_EQ(state.WaitPatiently(Soon()).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_GE(attempts, 5);
    state.Close();
  }
}

TEST(SessionStateTest, ManyThreadsWaitWhileItGoesUpAndDown) {
  SessionState state("unix:///s");
  std::atomic<int> up{0}, down{0};
  {
    uint64_t round = 0;
    Driver driver(&state, absl::Milliseconds(1), [&](SessionState* s) {
      if (++round % 2 == 0) return s->Down(absl::UnavailableError("down"));
      s->Up(Some(), 1 + round / 8);
      std::this_thread::yield();
      s->Down(absl::UnavailableError("broke"));
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 10; ++i) state.Wait(Soon()).ok() ? ++up : ++down;
      });
    }
    for (std::thread& thread : threads) thread.join();
    state.Close();
  }
  EXPECT_EQ(up + down, 40);
}

}  // namespace
}  // namespace kvferry
