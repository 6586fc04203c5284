// The life of a chunk: reserved, committed layer by layer, sealed, published, released, erased; and who sees it when.
#include <thread>

#include "storage/base/chunk_image.h"
#include "tests/storage/store_fixture.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

class StoreLife : public StoreFixture {
 protected:
  void SetUp() override {
    Open(StoreOptions());
    session_ = Session();
    ns_ = Namespace(session_, SmallSpec());
  }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(StoreLife, OptionsAreChecked) {
  StoreOptions options;
  options.memory_bytes = 1;
  const absl::Status status = OpenStore(options, &executor_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("memory_bytes is 1, expected 65536"));
  options = StoreOptions();
  options.live_grace = -absl::Seconds(1);
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument);
  options = StoreOptions();
  options.segment_bytes = 0;
  EXPECT_EQ(Validate(options).code(), absl::StatusCode::kInvalidArgument);
}

// B31: until a layer is committed it does not exist, for its owner; until all are, the chunk does not, for others.
TEST_F(StoreLife, B31_LayersAppearAsTheyAreCommitted) {
  const SessionId other = Session();
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ASSERT_TRUE(writers.ok()) << writers.status();
  ChunkWriter& writer = *(*writers)[0];
  EXPECT_TRUE(writer.key().IsLive());
  EXPECT_EQ(writer.key().Owner(), session_);
  EXPECT_FALSE(Has(session_, writer.key(), 1, 0));
  ASSERT_TRUE(Commit(writer, 1, 1).ok());
  EXPECT_TRUE(Has(session_, writer.key(), 1, 1));
  EXPECT_FALSE(Has(session_, writer.key(), 1, 0));
  EXPECT_EQ(Lookup(session_, {writer.key()}, true), 0);
  EXPECT_EQ(Publish(session_, writer.key(), 7).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Stats().chunks_reserved, 1u);
  ASSERT_TRUE(Commit(writer, 0, 1).ok());
  EXPECT_EQ(store_->Stats().chunks_reserved, 0u);
  EXPECT_EQ(store_->Stats().chunks_live, 1u);
  EXPECT_TRUE(Has(session_, writer.key(), 1, 0));
  EXPECT_EQ(Lookup(session_, {writer.key()}, true), 1);
  EXPECT_FALSE(Has(other, writer.key(), 1)) << "a live chunk is its session's alone";
  EXPECT_EQ(Lookup(other, {writer.key()}, true), 0);
  ASSERT_TRUE(Publish(session_, writer.key(), 7).ok());
  EXPECT_TRUE(Has(other, Prefix(ns_, 7), 1, 0));
  EXPECT_TRUE(Has(other, Prefix(ns_, 7), 1, 1));
}

TEST_F(StoreLife, CommitChecksItsLayer) {
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ChunkWriter& writer = *(*writers)[0];
  absl::Status status;
  const auto keep = [&status](absl::Status s) { status = s; };
  writer.Commit(2, 0, keep);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  writer.Commit(-1, 0, keep);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(Commit(writer, 0, 1).ok());
  writer.Commit(0, 0, keep);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Has(session_, writer.key(), 1, 0)) << "the first commit stands";
  EXPECT_EQ(Get(session_, writer.key(), 2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StoreLife, WhatIsNotFiniteIsReadAndNeverPublished) {
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ChunkWriter& writer = *(*writers)[0];
  ASSERT_TRUE(Commit(writer, 0, 1).ok());
  const MutableByteView slot = writer.Layer(1);
  for (size_t at = 0; at < slot.size(); ++at) slot[at] = ByteAt(1, 1, at);
  writer.Commit(1, BlockSum(BlockChecksum(ByteView(slot)), /*finite=*/false),
                [](const absl::Status& status) { EXPECT_TRUE(status.ok()) << status; });
  EXPECT_TRUE(Has(session_, writer.key(), 1, 1));
  EXPECT_EQ(Lookup(session_, {writer.key()}, true), 1);
  const absl::Status refused = Publish(session_, writer.key(), 7);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), testing::HasSubstr("NaN"));
  EXPECT_TRUE(Has(session_, writer.key(), 1, 0));
}

// B30: a writer that is gone before it sealed leaves nothing behind.
TEST_F(StoreLife, B30_AnUnsealedWriterIsAborted) {
  const uint64_t before = store_->Stats().memory_used_bytes;
  ChunkKey key;
  {
    absl::StatusOr<Writers> writers = Reserve(session_, ns_);
    key = (*writers)[0]->key();
    ASSERT_TRUE(Commit(*(*writers)[0], 0, 1).ok());
  }
  EXPECT_FALSE(Has(session_, key, 1, 0));
  EXPECT_EQ(store_->Stats().memory_used_bytes, before);
  EXPECT_EQ(store_->Stats().reservations_aborted, 1u);
  EXPECT_EQ(store_->Stats().chunks_reserved, 0u);
}

TEST_F(StoreLife, ASealedWriterLeavesItsChunk) {
  const ChunkKey key = Live(session_, ns_, 1);
  EXPECT_TRUE(Has(session_, key, 1));
  EXPECT_EQ(store_->Stats().reservations_aborted, 0u);
  store_->Release(session_, {key});
  EXPECT_FALSE(Has(session_, key, 1));
}

// B30: the space of a session that ended is not reused while its writer may still write.
TEST_F(StoreLife, B30_ALateWriterCanTouchNothingButItsOwn) {
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  const uint64_t one = store_->Stats().memory_used_bytes;
  store_->EndSession(session_);
  EXPECT_GT(store_->Stats().memory_used_bytes, 0u) << "freed under its writer";
  EXPECT_LT(store_->Stats().memory_used_bytes, one);
  const SessionId other = Session();
  std::vector<ChunkKey> keys;
  const NamespaceId ns = Namespace(other, SmallSpec());
  for (uint64_t seed = 10; seed < 60; ++seed) keys.push_back(Live(other, ns, seed));
  EXPECT_EQ(Commit(*(*writers)[0], 0, 99).code(), absl::StatusCode::kNotFound);  // writes its bytes all the same
  for (uint64_t seed = 10; seed < 60; ++seed) EXPECT_TRUE(Has(other, keys[seed - 10], seed));
  store_->EndSession(other);
  writers->clear();
  ExpectEmpty();
}

TEST_F(StoreLife, AViewOutlivesEverything) {
  const ChunkKey key = Live(session_, ns_, 3);
  absl::StatusOr<BlockView> view = Get(session_, key, 1);
  ASSERT_TRUE(view.ok());
  store_->EndSession(session_);
  ExpectBytes(*view, 3, 1);
  EXPECT_GT(store_->Stats().memory_used_bytes, 0u);
  store_.reset();
  ExpectBytes(*view, 3, 1);
}

TEST_F(StoreLife, TheLastViewFreesItsChunk) {
  const ChunkKey key = Live(session_, ns_, 3);
  absl::StatusOr<BlockView> view = Get(session_, key, 1);
  store_->EndSession(session_);
  view = absl::CancelledError();
  ExpectEmpty();
}

TEST_F(StoreLife, AWriterOutlivesTheStore) {
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  store_.reset();
  EXPECT_EQ(Commit(*(*writers)[0], 0, 1).code(), absl::StatusCode::kUnavailable);
}

TEST_F(StoreLife, PublishIsASecondName) {
  const ChunkKey live = Live(session_, ns_, 1);
  const uint64_t used = store_->Stats().memory_used_bytes;
  ASSERT_TRUE(Publish(session_, live, 7).ok());
  EXPECT_EQ(store_->Stats().memory_used_bytes, used) << "no byte moves";
  EXPECT_TRUE(Has(session_, live, 1));
  EXPECT_TRUE(Has(session_, Prefix(ns_, 7), 1));
  const absl::StatusOr<BlockView> by_live = Get(session_, live), by_prefix = Get(session_, Prefix(ns_, 7));
  EXPECT_EQ(by_live->pieces()[0].data(), by_prefix->pieces()[0].data());
  EXPECT_TRUE(Publish(session_, live, 7).ok()) << "again is the same";
  EXPECT_EQ(Publish(session_, live, 8).code(), absl::StatusCode::kFailedPrecondition) << "one prefix name a chunk";
  store_->Release(session_, {live});
  EXPECT_FALSE(Has(session_, live, 1));
  EXPECT_TRUE(Has(session_, Prefix(ns_, 7), 1));
  EXPECT_EQ(Publish(session_, live, 7).code(), absl::StatusCode::kNotFound);
}

// B29: the first stays, the second goes on privately.
TEST_F(StoreLife, B29_TheFirstOfTwoStays) {
  const SessionId other = Session();
  Namespace(other, SmallSpec());
  const ChunkKey first = Live(session_, ns_, 1), second = Live(other, ns_, 2);
  ASSERT_TRUE(Publish(session_, first, 7).ok());
  EXPECT_EQ(Publish(other, second, 7).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(Has(other, Prefix(ns_, 7), 1));
  EXPECT_TRUE(Has(other, second, 2));
  store_->Release(other, {second});
  EXPECT_FALSE(Has(other, second, 2));
}

// B29: eight at the same moment.
TEST_F(StoreLife, B29_EightPublishersOneWins) {
  std::vector<ChunkKey> live;
  std::vector<absl::Status> results(8);
  for (uint64_t i = 0; i < 8; ++i) live.push_back(Live(session_, ns_, i));
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) threads.emplace_back([&, i] { results[i] = Publish(session_, live[i], 7); });
  for (std::thread& thread : threads) thread.join();
  int won = -1;
  for (int i = 0; i < 8; ++i) {
    if (results[i].ok()) {
      EXPECT_EQ(won, -1);
      won = i;
    } else {
      EXPECT_EQ(results[i].code(), absl::StatusCode::kAlreadyExists);
    }
  }
  ASSERT_NE(won, -1);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 7), won));
}

TEST_F(StoreLife, PublishRefusesWhatIsNoPrefixKey) {
  const ChunkKey live = Live(session_, ns_, 1);
  const auto publish = [&](Id128 key, Id128 parent) {
    return store_->Publish(session_, live, PublishOptions{key, parent}).code();
  };
  EXPECT_EQ(publish({kLiveBit, 1}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(publish({0, 0}, {}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(publish({0, 1}, {kLiveBit, 1}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(publish({0, 1}, {0, 1}), absl::StatusCode::kInvalidArgument) << "its own parent";
  // A ring of parents would have no leaf, so nothing in it could ever be evicted.
  ASSERT_TRUE(Publish(session_, Live(session_, ns_, 2), 2, 1).ok());
  ASSERT_TRUE(Publish(session_, Live(session_, ns_, 3), 3, 2).ok());
  EXPECT_EQ(publish({0, 1}, {0, 3}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(publish({0, 1}, {}), absl::StatusCode::kOk);
}

TEST_F(StoreLife, WithoutAModelNothingIsPublished) {
  const NamespaceId ns = Namespace(session_, SmallSpec(2, 2, 8, 4, ""));
  const ChunkKey live = Live(session_, ns, 1);
  EXPECT_EQ(Publish(session_, live, 7).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Has(session_, live, 1));
}

// B20: the same name in a namespace of another dtype is another chunk.
TEST_F(StoreLife, B20_AnotherDtypeIsAMiss) {
  Published(session_, ns_, 7);
  for (const char* dtype : {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}) {
    NamespaceSpec spec = SmallSpec();
    spec.dtype = dtype;
    spec.dtype_bytes = spec.dtype.substr(0, 6) == "float8" ? 1 : 2;
    EXPECT_FALSE(Has(session_, Prefix(Namespace(session_, spec), 7), 7)) << dtype;
  }
  EXPECT_TRUE(Has(session_, Prefix(ns_, 7), 7));
}

// B27: keys that differ in one half, or in group or shard, are different chunks.
TEST_F(StoreLife, B27_TheWholeKeyIsCompared) {
  Published(session_, ns_, 7);
  EXPECT_FALSE(Has(session_, ChunkKey{ns_, {1, 7}, 0, 0}, 7));
  EXPECT_FALSE(Has(session_, ChunkKey{ns_, {0, 7}, 1, 0}, 7));
  EXPECT_FALSE(Has(session_, ChunkKey{ns_, {0, 7}, 0, 1}, 7));
  EXPECT_FALSE(Has(session_, ChunkKey{{ns_[0], ns_[1] + 1}, {0, 7}, 0, 0}, 7));
  const ChunkKey live = Live(session_, ns_, 1);
  EXPECT_FALSE(Has(session_, ChunkKey{ns_, live.id, 1, 0}, 1));
  EXPECT_FALSE(Has(session_, ChunkKey{NamespaceId{1, 2}, live.id, 0, 0}, 1));
}

TEST_F(StoreLife, WhatAnotherTenantOwnsDoesNotExist) {
  const ChunkKey published = Published(session_, ns_, 7), live = Live(session_, ns_, 1);
  const SessionId other = Session("other tenant");
  EXPECT_NE(Namespace(other, SmallSpec()), ns_);
  EXPECT_FALSE(Has(other, published, 7));
  EXPECT_FALSE(Has(other, live, 1));
  EXPECT_EQ(Lookup(other, {published}, true), 0);
  EXPECT_EQ(Erase(other, published).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Publish(other, live, 9).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(other, ns_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->ResumeSession("other tenant", session_).code(), absl::StatusCode::kNotFound);
  store_->Release(other, {published, live});
  EXPECT_TRUE(Has(session_, published, 7));
  EXPECT_TRUE(Has(session_, live, 1));
}

TEST_F(StoreLife, ReserveChecksWhatItIsAsked) {
  const auto reserve = [&](const ReserveOptions& options) {
    absl::Status status;
    store_->Reserve(session_, ns_, options, [&](absl::StatusOr<Writers> writers) { status = writers.status(); });
    return status;
  };
  ReserveOptions options;
  options.count = 0;
  EXPECT_EQ(reserve(options).code(), absl::StatusCode::kInvalidArgument);
  options.count = 1, options.group = 1;
  EXPECT_THAT(std::string(reserve(options).message()), HasSubstr("group is 1, expected 0 to 0"));
  options.group = 0, options.shard = 1;
  EXPECT_THAT(std::string(reserve(options).message()), HasSubstr("shard is 1, expected 0 to 0"));
  EXPECT_EQ(Reserve(session_, NamespaceId{1, 1}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Reserve(12345, ns_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(StoreLife, EraseTakesTheNameAway) {
  const ChunkKey key = Published(session_, ns_, 7);
  ASSERT_TRUE(Erase(session_, key).ok());
  EXPECT_FALSE(Has(session_, key, 7));
  EXPECT_EQ(Erase(session_, key).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Erase(session_, Live(session_, ns_, 1)).code(), absl::StatusCode::kNotFound);
}

// B69: who leased it goes on reading those bytes, even when the name has been given to another chunk.
TEST_F(StoreLife, B69_AnErasedChunkStaysWithWhoLeasesIt) {
  const SessionId other = Session();
  const ChunkKey key = Published(session_, ns_, 7);
  ASSERT_EQ(Lookup(other, {key}, true), 1);
  ASSERT_TRUE(Erase(session_, key).ok());
  EXPECT_TRUE(Has(other, key, 7));
  EXPECT_FALSE(Has(session_, key, 7));
  ASSERT_TRUE(Publish(session_, Live(session_, ns_, 8), 7).ok());
  EXPECT_TRUE(Has(other, key, 7)) << "its own";
  EXPECT_TRUE(Has(session_, key, 8)) << "the new one";
  store_->Release(other, {key});
  EXPECT_TRUE(Has(other, key, 8));
}

// B74: the same key twice in one request is two answers; a miss in the middle ends the run.
TEST_F(StoreLife, B74_AKeyTwiceAndAMissInTheMiddle) {
  const ChunkKey a = Published(session_, ns_, 1), b = Published(session_, ns_, 2);
  EXPECT_EQ(Lookup(session_, {a, b, a}, true), 3);
  store_->Release(session_, {a});
  EXPECT_EQ(store_->Stats().chunks_leased, 2u) << "it was leased twice";
  store_->Release(session_, {a, b, b, a});  // more than it holds: ignored
  EXPECT_EQ(store_->Stats().chunks_leased, 0u);
  EXPECT_EQ(Lookup(session_, {a, Prefix(ns_, 99), b}, true), 1);
  EXPECT_EQ(Lookup(session_, {}, true), 0);
  EXPECT_TRUE(Has(session_, a, 1) && Has(session_, b, 2) && Has(session_, a, 1));
}

// B78: each layer has its own shape.
TEST_F(StoreLife, B78_LayersOfDifferentShapes) {
  const NamespaceId ns = Namespace(session_, MixedSpec());
  absl::StatusOr<Writers> writers = Reserve(session_, ns);
  ASSERT_TRUE(writers.ok()) << writers.status();
  ChunkWriter& writer = *(*writers)[0];
  for (int layer = 0; layer < 7; ++layer) {
    EXPECT_EQ(writer.Layer(layer).size(), MixedSpec().BlockBytes(0, layer));
  }
  Seal(writer, 4, 7);
  for (int layer = 0; layer < 7; ++layer) EXPECT_TRUE(Has(session_, writer.key(), 4, layer)) << layer;
}

TEST_F(StoreLife, CountsAreExact) {
  const ChunkKey published = Published(session_, ns_, 1);
  const ChunkKey live = Live(session_, ns_, 2);
  EXPECT_TRUE(Has(session_, live, 2));
  EXPECT_FALSE(Has(session_, Prefix(ns_, 99), 2));
  EXPECT_EQ(Lookup(session_, {published, Prefix(ns_, 99)}, true), 1);
  const StoreStats stats = store_->Stats();
  const uint64_t block = SmallSpec().BlockBytes(0, 0);
  EXPECT_EQ(stats.reserves, 2u);
  EXPECT_EQ(stats.blocks_committed, 4u);
  EXPECT_EQ(stats.bytes_committed, 4 * block);
  EXPECT_EQ(stats.blocks_got, 1u);
  EXPECT_EQ(stats.bytes_got, block);
  EXPECT_EQ(stats.get_misses, 1u);
  EXPECT_EQ(stats.lookups, 1u);
  EXPECT_EQ(stats.lookup_chunks_asked, 2u);
  EXPECT_EQ(stats.lookup_chunks_hit, 1u);
  EXPECT_EQ(stats.chunks_live, 1u);
  EXPECT_EQ(stats.chunks_published, 1u);
  EXPECT_EQ(stats.chunks_leased, 1u);
  EXPECT_EQ(stats.sessions, 1u);
  EXPECT_EQ(stats.namespaces, 1u);
  EXPECT_EQ(stats.memory_used_bytes - stats.metadata_bytes, 2 * ChunkLayout::For(SmallSpec(), 0).image_bytes);
}

TEST_F(StoreLife, ListsEveryChunkOnceInSteps) {
  Published(session_, ns_, 1);
  ASSERT_TRUE(Publish(session_, Live(session_, ns_, 2), 2).ok());
  Live(session_, ns_, 3);
  absl::StatusOr<Writers> writers = Reserve(session_, ns_);
  ASSERT_TRUE(Commit(*(*writers)[0], 1, 4).ok());
  const std::vector<ChunkInfo> all = store_->List(0, 100);
  std::vector<std::string> states;
  for (const ChunkInfo& info : all) {
    states.push_back(info.state);
    EXPECT_EQ(info.tenant, "tenant");
    EXPECT_EQ(info.model, "test/model");
    EXPECT_EQ(info.bytes, 4096u);
    EXPECT_EQ(info.layers, 2u);
    EXPECT_EQ(info.layers_committed, info.state == "reserved" ? 1u : 2u);
  }
  EXPECT_THAT(states, testing::ElementsAre("published", "published", "live", "reserved"));
  EXPECT_EQ(all[0].key, Prefix(ns_, 1));
  EXPECT_EQ(all[3].key, (*writers)[0]->key());
  // What goes between two steps neither ends the listing nor brings a chunk twice.
  const std::vector<ChunkInfo> front = store_->List(0, 2);
  ASSERT_EQ(front.size(), 2u);
  ASSERT_TRUE(Erase(session_, Prefix(ns_, 1)).ok());
  store_->Release(session_, {all[2].key});
  const std::vector<ChunkInfo> rest = store_->List(front.back().number, 2);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].key, all[3].key);
  EXPECT_TRUE(store_->List(rest[0].number, 2).empty());
  EXPECT_TRUE(store_->List(0, 0).empty());
}

TEST_F(StoreLife, FlushIsDoneAtOnceWithoutADisk) {
  absl::Status status = absl::UnknownError("not called");
  store_->Flush([&](absl::Status s) { status = s; });
  EXPECT_TRUE(status.ok());
}

TEST_F(StoreLife, EverythingReleasedIsEverythingFree) {
  std::vector<ChunkKey> keys;
  for (uint64_t i = 1; i <= 20; ++i) keys.push_back(Published(session_, ns_, i, i - 1));
  Live(session_, ns_, 100);
  absl::StatusOr<Writers> writers = Reserve(session_, ns_, 3);
  EXPECT_EQ(Lookup(session_, keys, true), 20);
  for (const ChunkKey& key : keys) ASSERT_TRUE(Erase(session_, key).ok());
  store_->EndSession(session_);
  writers->clear();
  ExpectEmpty();
}

class StoreExpiry : public StoreFixture {
 protected:
  void SetUp() override {
    OpenFor(BigSpec(), 8);
    session_ = Session();
    ns_ = Namespace(session_, BigSpec());
  }
  ChunkKey PublishedFor(uint64_t id, absl::Duration ttl, uint64_t parent = 0) {
    const ChunkKey live = Live(session_, ns_, id);
    PublishOptions options{Prefix(ns_, id).id, parent == 0 ? Id128{} : Prefix(ns_, parent).id};
    options.ttl = ttl;
    const absl::Status status = store_->Publish(session_, live, options);
    EXPECT_TRUE(status.ok()) << status;
    store_->Release(session_, {live});
    return Prefix(ns_, id);
  }

  SessionId session_ = 0;
  NamespaceId ns_{};
};

TEST_F(StoreExpiry, NamesGoInTheirTime) {
  PublishedFor(1, absl::Minutes(10));
  PublishedFor(2, absl::Minutes(5), 1);
  PublishedFor(3, absl::InfiniteDuration());
  EXPECT_EQ(Lookup(session_, {Prefix(ns_, 1), Prefix(ns_, 2)}, false), 2);
  executor_.Advance(absl::Minutes(5));
  EXPECT_EQ(Lookup(session_, {Prefix(ns_, 1), Prefix(ns_, 2)}, false), 1);
  EXPECT_EQ(store_->Stats().expirations, 1u);
  EXPECT_EQ(store_->Stats().chunks_published, 2u);
  executor_.Advance(absl::Hours(1000));
  EXPECT_EQ(store_->Stats().chunks_published, 1u);
  EXPECT_TRUE(Has(session_, Prefix(ns_, 3), 3));
}

TEST_F(StoreExpiry, ALeaseOutlivesTheName) {
  const ChunkKey key = PublishedFor(1, absl::Minutes(5));
  ASSERT_EQ(Lookup(session_, {key}, true), 1);
  const SessionId other = Session();
  executor_.Advance(absl::Minutes(5));
  EXPECT_TRUE(Has(session_, key, 1));
  EXPECT_FALSE(Has(other, key, 1));
  store_->Release(session_, {key});
  EXPECT_FALSE(Has(session_, key, 1));
  EXPECT_EQ(store_->Stats().chunks_leased, 0u);
}

// Whether the timer has run or not.
TEST_F(StoreExpiry, AnExpiredNameIsGivenAnew) {
  PublishedFor(1, absl::Minutes(5));
  executor_.Set(executor_.Now() + absl::Minutes(6));
  EXPECT_FALSE(Has(session_, Prefix(ns_, 1), 1));
  EXPECT_EQ(Erase(session_, Prefix(ns_, 1)).code(), absl::StatusCode::kNotFound);
  PublishedFor(1, absl::InfiniteDuration());
  executor_.Advance(absl::Hours(1000));
  EXPECT_TRUE(Has(session_, Prefix(ns_, 1), 1));
  EXPECT_EQ(store_->Stats().expirations, 1u);
}

TEST_F(StoreExpiry, ManyAtATime) {
  OpenFor(SmallSpec(), 3000);
  session_ = Session();
  ns_ = Namespace(session_, SmallSpec());
  for (uint64_t id = 1; id <= 1000; ++id) PublishedFor(id, absl::Minutes(1 + id % 3));
  executor_.Advance(absl::Minutes(2));
  EXPECT_EQ(store_->Stats().expirations, 667u);
  executor_.Advance(absl::Minutes(1));
  EXPECT_EQ(store_->Stats().chunks_published, 0u);
  EXPECT_EQ(store_->Stats().memory_used_bytes, store_->Stats().metadata_bytes);
}

}  // namespace
}  // namespace kvferry
