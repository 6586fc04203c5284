#include "service/client_sessions.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/service/core_fixture.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

TEST(ClientSessions, OpensAndResumes) {
  CoreFixture f;
  const auto first = f.Attach();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(first->resumed);
  f.sessions->Detach(*first);
  const auto again = f.Attach(first->session);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->resumed);
  EXPECT_EQ(again->session, first->session);
  EXPECT_EQ(f.stats.sessions_opened, 1u);
  EXPECT_EQ(f.stats.sessions_resumed, 1u);
}

TEST(ClientSessions, WhatCannotBeResumedIsANewSession) {
  CoreFixture f;
  const auto unknown = f.Attach(kLiveBit | 12345);
  ASSERT_TRUE(unknown.ok());
  EXPECT_FALSE(unknown->resumed);
  const auto other_tenant = f.Attach(unknown->session, nullptr, "somebody else");
  ASSERT_TRUE(other_tenant.ok());
  EXPECT_FALSE(other_tenant->resumed);
  EXPECT_NE(other_tenant->session, unknown->session);
}

TEST(ClientSessions, ANewerStreamSupersedes) {
  CoreFixture f;
  absl::Status closed;
  const auto old = f.Attach(0, &closed);
  const NamespaceId ns = f.Open(old->session, SmallSpec());
  const auto keys = f.Reserve(old->session, ns);
  const auto young = f.Attach(old->session);
  EXPECT_TRUE(young->resumed);
  EXPECT_TRUE(absl::IsAborted(closed)) << closed;
  // What the old stream still does has no effect.
  f.sessions->Detach(*old);
  f.sessions->End(*old);
  f.executor.Run();
  EXPECT_NE((*f.sessions->Find(old->session))->Find(keys[0]), nullptr);
  EXPECT_EQ(f.stats.sessions_superseded, 1u);
}

TEST(ClientSessions, ByeEndsAtOnce) {
  CoreFixture f;
  const auto session = f.Attach();
  f.Reserve(session->session, f.Open(session->session, SmallSpec()));
  EXPECT_EQ(f.store->Stats().chunks_reserved, 1u);
  f.sessions->End(*session);
  f.executor.Run();
  EXPECT_TRUE(absl::IsNotFound(f.sessions->Find(session->session).status()));
  EXPECT_EQ(f.store->Stats().chunks_reserved, 0u);
  EXPECT_EQ(f.store->Stats().sessions, 0u);
}

// B30: reservations of a lost client go after their grace, and not before.
TEST(ClientSessions, ReservationsSurviveABrokenStreamForTheirGrace) {
  CoreFixture f;
  const auto session = f.Attach();
  const auto keys = f.Reserve(session->session, f.Open(session->session, SmallSpec()));
  f.sessions->Detach(*session);
  f.executor.Advance(f.times.reservation_grace - absl::Milliseconds(1));
  ASSERT_NE((*f.sessions->Find(session->session))->Find(keys[0]), nullptr);
  f.executor.Advance(absl::Milliseconds(1));
  EXPECT_EQ((*f.sessions->Find(session->session))->Find(keys[0]), nullptr);
  EXPECT_EQ(f.store->Stats().chunks_reserved, 0u);
  // The session itself can still be resumed.
  EXPECT_TRUE(f.Attach(session->session)->resumed);
}

TEST(ClientSessions, AnEarlierSuspensionsTimersAreLate) {
  CoreFixture f;
  const auto first = f.Attach();
  const auto keys = f.Reserve(first->session, f.Open(first->session, SmallSpec()));
  f.sessions->Detach(*first);
  f.executor.Advance(f.times.reservation_grace / 2);
  f.sessions->Detach(*f.Attach(first->session));
  f.executor.Advance(f.times.reservation_grace / 2);  // the first suspension's time is up, not the second's
  EXPECT_NE((*f.sessions->Find(first->session))->Find(keys[0]), nullptr);
  f.executor.Advance(f.times.reservation_grace / 2);
  EXPECT_EQ((*f.sessions->Find(first->session))->Find(keys[0]), nullptr);
}

TEST(ClientSessions, LiveGraceEndsTheSession) {
  CoreFixture f;
  const auto session = f.Attach();
  f.Open(session->session, SmallSpec());
  f.sessions->Detach(*session);
  f.executor.Advance(f.times.live_grace);
  EXPECT_TRUE(absl::IsNotFound(f.sessions->Find(session->session).status()));
  EXPECT_FALSE(f.Attach(session->session)->resumed);
}

// B49: clients that come and go without a word, having done nothing, are not remembered for the whole grace period.
TEST(ClientSessions, UnusedSessionsGoSoon) {
  CoreFixture f;
  for (int i = 0; i < 1000; ++i) f.sessions->Detach(*f.Attach());
  f.executor.Advance(f.times.reservation_grace);
  EXPECT_EQ(f.store->Stats().sessions, 0u);
}

// SIGSTOP of the model process: silence suspends the session, the next message resumes it, the stream stays.
TEST(ClientSessions, SilenceSuspendsAndAMessageResumes) {
  CoreFixture f;
  absl::Status closed;
  const auto session = f.Attach(0, &closed);
  const NamespaceId ns = f.Open(session->session, SmallSpec());
  f.Reserve(session->session, ns);
  f.executor.Advance(3 * f.times.heartbeat - absl::Milliseconds(1));
  EXPECT_EQ(f.stats.sessions_silent, 0u);
  f.executor.Advance(absl::Milliseconds(1));
  EXPECT_EQ(f.stats.sessions_silent, 1u);
  f.executor.Advance(absl::Seconds(60));
  EXPECT_EQ(f.store->Stats().chunks_reserved, 0u);  // past the reservations' grace
  f.sessions->Heard(*session);
  f.executor.Run();
  EXPECT_TRUE(closed.ok()) << closed;
  f.Reserve(session->session, ns);
  EXPECT_EQ(f.store->Stats().chunks_reserved, 1u);
  // And it is watched again.
  f.executor.Advance(3 * f.times.heartbeat);
  EXPECT_EQ(f.stats.sessions_silent, 2u);
}

TEST(ClientSessions, HeartbeatsKeepASessionAwake) {
  CoreFixture f;
  const auto session = f.Attach();
  for (int i = 0; i < 100; ++i) {
    f.executor.Advance(2 * f.times.heartbeat);
    f.sessions->Heard(*session);
  }
  EXPECT_EQ(f.stats.sessions_silent, 0u);
  EXPECT_LT(f.executor.waiting(), 10u);  // timers do not pile up
}

TEST(ClientSessions, SilentForTooLongIsToldSo) {
  CoreFixture f;
  absl::Status closed;
  const auto session = f.Attach(0, &closed);
  f.Open(session->session, SmallSpec());
  f.executor.Advance(3 * f.times.heartbeat + f.times.live_grace);
  EXPECT_TRUE(absl::IsNotFound(closed)) << closed;
  EXPECT_THAT(closed.message(), HasSubstr("has ended"));
}

TEST(ClientSessions, DrainLetsNobodyIn) {
  CoreFixture f;
  const auto session = f.Attach();
  f.sessions->Drain();
  EXPECT_TRUE(absl::IsUnavailable(f.Attach().status()));
  EXPECT_TRUE(absl::IsUnavailable(f.Attach(session->session).status()));
}

TEST(ClientSessions, AStreamThatBreaksAgainAndAgainLeavesNoHeapOfTimers) {
  CoreFixture f;
  auto attached = f.Attach();
  f.Open(attached->session, SmallSpec());
  for (int i = 0; i < 1000; ++i) {
    f.sessions->Detach(*attached);
    f.executor.Advance(absl::Milliseconds(1));
    attached = f.Attach(attached->session);
    ASSERT_TRUE(attached->resumed);
  }
  EXPECT_LE(f.executor.waiting(), 5u);  // silence and two graces here, two graces in the store
  // What is put off is not forgotten.
  f.sessions->Detach(*attached);
  f.executor.Advance(f.times.live_grace - absl::Milliseconds(1));
  EXPECT_TRUE(f.sessions->Find(attached->session).ok());
  f.executor.Advance(absl::Milliseconds(1));
  EXPECT_TRUE(absl::IsNotFound(f.sessions->Find(attached->session).status()));
  EXPECT_EQ(f.store->Stats().sessions, 0u);
}

}  // namespace
}  // namespace kvferry
