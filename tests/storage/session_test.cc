// Sessions end, are suspended, come back.
#include "tests/storage/store_fixture.h"

namespace kvferry {
namespace {

class SessionTest : public StoreFixture {
 protected:
  void SetUp() override {
    Open(StoreOptions());
    session_ = Session();
    ns_ = Namespace(session_, SmallSpec());
  }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(SessionTest, IdsAreLiveAndDistinct) {
  EXPECT_NE(session_ & kLiveBit, 0u);
  EXPECT_NE(Session(), session_);
}

TEST_F(SessionTest, AnEndedSessionIsNotFound) {
  const ChunkKey live = Live(session_, ns_, 1), published = Published(session_, ns_, 2);
  store_->EndSession(session_);
  store_->EndSession(session_);  // again: ignored
  EXPECT_EQ(Get(session_, live).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Lookup(session_, {published}, false).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(session_, ns_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Publish(session_, live, 9).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->OpenNamespace(session_, SmallSpec()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Erase(session_, published).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->ResumeSession("tenant", session_).code(), absl::StatusCode::kNotFound);
  store_->SuspendSession(session_);
  store_->Release(session_, {live});
  const SessionId other = Session();
  EXPECT_TRUE(Has(other, published, 2)) << "published chunks outlive their session";
}

TEST_F(SessionTest, EndingReturnsLeases) {
  const SessionId other = Session();
  const ChunkKey key = Published(session_, ns_, 1);
  ASSERT_EQ(Lookup(other, {key, key}, true), 2);
  EXPECT_EQ(store_->Stats().chunks_leased, 1u);
  store_->EndSession(other);
  EXPECT_EQ(store_->Stats().chunks_leased, 0u);
}

TEST_F(SessionTest, SuspendedForTheGraceOnly) {
  const ChunkKey live = Live(session_, ns_, 1);
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  const ChunkKey reserved = (*writers)[0]->key();
  ASSERT_TRUE(Commit(*(*writers)[0], 0, 2).ok());
  store_->SuspendSession(session_);
  executor_.Advance(absl::Seconds(29));
  EXPECT_TRUE(Has(session_, reserved, 2, 0));
  executor_.Advance(absl::Seconds(1));
  EXPECT_FALSE(Has(session_, reserved, 2, 0)) << "reservations go after 30 s";
  EXPECT_EQ(Commit(*(*writers)[0], 1, 2).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Has(session_, live, 1)) << "live chunks stay";
  executor_.Advance(absl::Minutes(9));
  EXPECT_TRUE(Has(session_, live, 1));
  executor_.Advance(absl::Minutes(1));
  EXPECT_EQ(Get(session_, live).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Stats().sessions, 0u);
  EXPECT_EQ(store_->Stats().sessions_expired, 1u);
  EXPECT_EQ(store_->Stats().reservations_aborted, 1u);
  writers->clear();
  ExpectEmpty();
}

TEST_F(SessionTest, BackInTimeItGoesOn) {
  const ChunkKey live = Live(session_, ns_, 1);
  store_->SuspendSession(session_);
  executor_.Advance(absl::Minutes(9));
  ASSERT_TRUE(store_->ResumeSession("tenant", session_).ok());
  executor_.Advance(absl::Minutes(5));
  EXPECT_TRUE(Has(session_, live, 1)) << "the timer of a suspension that is over does nothing";
  // A second suspension has its own, whole grace.
  store_->SuspendSession(session_);
  store_->SuspendSession(session_);  // already: nothing new
  executor_.Advance(absl::Minutes(9));
  EXPECT_TRUE(Has(session_, live, 1));
  executor_.Advance(absl::Minutes(1));
  EXPECT_EQ(store_->Stats().sessions, 0u);
}

TEST_F(SessionTest, TheTimersOfAnEarlierSuspensionAreLate) {
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  store_->SuspendSession(session_);
  executor_.Advance(absl::Seconds(20));
  ASSERT_TRUE(store_->ResumeSession("tenant", session_).ok());
  store_->SuspendSession(session_);
  executor_.Advance(absl::Seconds(20));  // 40 s after the first, 20 s after the second
  EXPECT_TRUE(Commit(*(*writers)[0], 0, 1).ok());
  executor_.Advance(absl::Seconds(10));
  EXPECT_EQ(Commit(*(*writers)[0], 1, 1).code(), absl::StatusCode::kNotFound);
}

TEST_F(SessionTest, SuspendedAgainAndAgainItHasOneTimerOfEachKind) {
  const ChunkKey live = Live(session_, ns_, 1);
  for (int i = 0; i < 1000; ++i) {
    store_->SuspendSession(session_);
    executor_.Advance(absl::Milliseconds(1));
    ASSERT_TRUE(store_->ResumeSession("tenant", session_).ok());
  }
  EXPECT_LE(executor_.waiting(), 2u);
  // The last suspension has its whole grace.
  store_->SuspendSession(session_);
  executor_.Advance(absl::Minutes(10) - absl::Milliseconds(1));
  EXPECT_TRUE(Has(session_, live, 1));
  executor_.Advance(absl::Milliseconds(1));
  EXPECT_EQ(store_->Stats().sessions, 0u);
  EXPECT_EQ(executor_.waiting(), 0u);
}

// However many sessions and chunks there are, a group's layout is one object.
TEST_F(SessionTest, LayoutsAreShared) {
  const SessionId other = Session();
  ASSERT_EQ(Namespace(other, SmallSpec()), ns_);
  const auto layout = store_->Layout(session_, ns_, 0);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ((*layout)->slots.size(), 2u);
  EXPECT_EQ(store_->Layout(other, ns_, 0)->get(), layout->get());
  EXPECT_THAT(std::string(store_->Layout(session_, ns_, 1).status().message()),
              testing::HasSubstr("group is 1, expected 0 to 0"));
  EXPECT_EQ(store_->Layout(session_, ns_, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->Layout(Session(), ns_, 0).status().code(), absl::StatusCode::kNotFound) << "not open there";
  EXPECT_EQ(store_->Layout(kLiveBit | 1, ns_, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SessionTest, ANamespaceLivesAsLongAsItIsUsed) {
  EXPECT_EQ(Namespace(session_, SmallSpec()), ns_);
  EXPECT_EQ(store_->Stats().namespaces, 1u);
  const ChunkKey key = Published(session_, ns_, 1);
  store_->EndSession(session_);
  EXPECT_EQ(store_->Stats().namespaces, 1u) << "its chunk";
  const SessionId other = Session();
  ASSERT_TRUE(Erase(other, key).ok());
  EXPECT_EQ(store_->Stats().namespaces, 0u);
  EXPECT_EQ(Reserve(other, ns_).status().code(), absl::StatusCode::kNotFound) << "not open in this session";
}

TEST_F(SessionTest, ABadSpecIsRefused) {
  NamespaceSpec spec = SmallSpec();
  spec.block_tokens = 0;
  EXPECT_EQ(store_->OpenNamespace(session_, spec).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->Stats().namespaces, 1u);
}

TEST_F(SessionTest, TimersOfAClosedStoreDoNothing) {
  store_->SuspendSession(session_);
  store_.reset();
  executor_.Advance(absl::Hours(1));
}

}  // namespace
}  // namespace kvferry
