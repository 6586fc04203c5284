// Chunks that are shared by a ticket: kept for whoever redeems it, until its time is over.
#include "tests/storage/store_fixture.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

class StoreTicket : public StoreFixture {
 protected:
  void SetUp() override {
    OpenFor(BigSpec(), 8);
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
  }

  TicketId Share(const std::vector<ChunkKey>& keys, absl::Duration ttl = absl::Minutes(1)) {
    const absl::StatusOr<TicketId> ticket = store_->Share(session_, keys, ttl);
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    return ticket.value_or(0);
  }
  std::vector<ChunkKey> Redeem(SessionId session, TicketId ticket) {
    const absl::StatusOr<std::vector<ChunkKey>> keys = store_->Redeem(session, ticket);
    EXPECT_TRUE(keys.ok()) << keys.status();
    return keys.value_or(std::vector<ChunkKey>());
  }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(StoreTicket, WhoRedeemsReadsTheChunksInTheirOrder) {
  const ChunkKey live = Live(session_, ns_, 1), published = Published(session_, ns_, 2);
  const TicketId ticket = Share({live, published, live});
  const SessionId other = Session();
  const std::vector<ChunkKey> keys = Redeem(other, ticket);
  ASSERT_EQ(keys.size(), 3u);
  EXPECT_TRUE(Has(other, keys[0], 1));
  EXPECT_TRUE(Has(other, keys[1], 2));
  EXPECT_TRUE(Has(other, keys[2], 1, 1));
  EXPECT_FALSE(Has(other, live, 1)) << "the live name is its session's alone";
  EXPECT_FALSE(Has(session_, keys[0], 1)) << "so are the ticket's names";
}

TEST_F(StoreTicket, OutlivesTheSessionThatShared) {
  const TicketId ticket = Share({Live(session_, ns_, 1)});
  store_->EndSession(session_);
  const SessionId other = Session();
  EXPECT_TRUE(Has(other, Redeem(other, ticket)[0], 1));
  store_->EndSession(other);
  const SessionId third = Session();
  EXPECT_TRUE(Has(third, Redeem(third, ticket)[0], 1));
  store_->EndSession(third);
  executor_.Advance(absl::Minutes(1));
  ExpectEmpty();
}

TEST_F(StoreTicket, ItsChunksAreNotEvicted) {
  const TicketId ticket = Share({Published(session_, ns_, 1)});
  for (uint64_t id = 2; id < 30; ++id) Published(session_, ns_, id);
  EXPECT_TRUE(Has(session_, Redeem(session_, ticket)[0], 1));
  EXPECT_GT(store_->Stats().evictions, 0u);
}

TEST_F(StoreTicket, EndsWithItsTimeButNotWhatWasRedeemed) {
  const TicketId ticket = Share({Live(session_, ns_, 1)}, absl::Seconds(10));
  store_->EndSession(session_);
  const SessionId other = Session();
  const ChunkKey key = Redeem(other, ticket)[0];
  Redeem(other, ticket);
  executor_.Advance(absl::Seconds(10));
  EXPECT_EQ(store_->Redeem(other, ticket).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(Has(other, key, 1));
  store_->Release(other, {key});
  EXPECT_TRUE(Has(other, key, 1)) << "redeemed twice, released once";
  store_->Release(other, {key});
  EXPECT_FALSE(Has(other, key, 1));
  store_->EndSession(other);
  ExpectEmpty();
}

TEST_F(StoreTicket, AnotherTenantsTicketDoesNotExist) {
  const TicketId ticket = Share({Live(session_, ns_, 1)});
  const SessionId stranger = Session("stranger");
  EXPECT_EQ(store_->Redeem(stranger, ticket).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->Redeem(session_, ticket + 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->ResumeSession("tenant", ticket).code(), absl::StatusCode::kNotFound) << "no session is behind it";
}

TEST_F(StoreTicket, RefusesWhatCannotBeShared) {
  const ChunkKey live = Live(session_, ns_, 1);
  absl::StatusOr<Writers> unsealed = Reserve(session_, ns_);
  ASSERT_TRUE(unsealed.ok());
  const auto refused = [&](const std::vector<ChunkKey>& keys, absl::Duration ttl, absl::StatusCode code,
                           const char* message) {
    const absl::Status status = store_->Share(session_, keys, ttl).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  };
  refused({}, absl::Seconds(1), absl::StatusCode::kInvalidArgument, "number of keys is 0, expected 1 to");
  refused({live}, absl::ZeroDuration(), absl::StatusCode::kInvalidArgument, "ttl is 0, expected more than 0");
  refused({live}, absl::InfiniteDuration(), absl::StatusCode::kInvalidArgument, "ttl is inf");
  refused({live, Prefix(ns_, 9)}, absl::Seconds(1), absl::StatusCode::kNotFound, ToString(Prefix(ns_, 9)).c_str());
  refused({live, (*unsealed)[0]->key()}, absl::Seconds(1), absl::StatusCode::kFailedPrecondition,
          "0 of 2 layers committed");
  EXPECT_EQ(store_->Stats().chunks_leased, 0u);
  EXPECT_EQ(store_->Share(session_ + 1, {live}, absl::Seconds(1)).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(StoreTicket, BookkeepingIsWithinTheBudget) {
  const ChunkKey live = Live(session_, ns_, 1);
  absl::Status status;
  for (int i = 0; i < 100000 && status.ok(); ++i) status = store_->Share(session_, {live}, absl::Hours(1)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  executor_.Advance(absl::Hours(1));
  EXPECT_TRUE(store_->Share(session_, {live}, absl::Hours(1)).ok());
}

}  // namespace
}  // namespace kvferry
