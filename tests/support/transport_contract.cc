#include "tests/support/transport_contract.h"

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "storage/base/checksum.h"
#include "storage/base/mutex.h"

namespace kvferry {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST_P(TransportContract, OddSizesComeBackAsTheyWentIn) {
  const std::vector<uint32_t> sizes = {1, 3, 63, 64, 65, 4095, 4096, 4097, 16385, 98304, 1048575, 1048577};
  auto host = GetParam().open(128 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf(sizes));
  const ChunkKey chunk = PutChunk(transport.get(), ns, static_cast<int>(sizes.size()), 7);
  std::vector<BlockKey> keys;
  for (size_t layer = 0; layer < sizes.size(); ++layer) keys.push_back({chunk, static_cast<uint16_t>(layer)});
  auto stream = transport->Fetch(keys, Soon());
  uint64_t total = 0;
  for (size_t layer = 0; layer < sizes.size(); ++layer) {
    absl::StatusOr<BlockView> block = stream->Next();
    ASSERT_TRUE(block.ok()) << block.status();
    const std::vector<uint8_t> expected = Pattern(7 + layer, sizes[layer]);
    EXPECT_EQ(Bytes(*block), expected) << "layer " << layer;
    EXPECT_EQ(block->checksum(), BlockChecksum(expected));
    total += sizes[layer];
  }
  EXPECT_EQ(stream->Next().status().code(), Code::kOutOfRange);
  EXPECT_EQ(stream->Next().status().code(), Code::kOutOfRange);
  const TransportStats stats = transport->Stats();
  EXPECT_EQ(stats.blocks_put, sizes.size());
  EXPECT_EQ(stats.bytes_put, total);
  EXPECT_EQ(stats.blocks_got, sizes.size());
  EXPECT_EQ(stats.bytes_got, total);
  EXPECT_EQ(stats.puts_failed + stats.get_misses + stats.checksum_errors, 0u);
  EXPECT_EQ(stats.bytes_in_flight, 0u);
}

TEST_P(TransportContract, ViewsOutliveTheirStreamAndTheirChunk) {
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({300'000}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 1, 1);
  absl::StatusOr<BlockView> block = GetOne(transport.get(), {chunk, 0});
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(transport->Stats().bytes_in_flight, transport->fetch_copies() ? 300'000u : 0u);
  transport->Release({chunk}, transport->epoch());
  AwaitMiss(transport.get(), {chunk, 0});
  PutChunk(transport.get(), ns, 1, 99);  // into the same memory, if it were free
  transport = nullptr;
  EXPECT_EQ(Bytes(*block), Pattern(1, 300'000));
}

TEST_P(TransportContract, MoreBlocksThanOneCallBrings) {
  constexpr size_t kKeys = kMaxChunksInCall + 500;
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({64, 64}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 2, 3);
  std::vector<BlockKey> keys;
  for (size_t i = 0; i < kKeys; ++i) keys.push_back({chunk, static_cast<uint16_t>(i % 7 == 0)});
  auto stream = transport->Fetch(keys, Soon());
  for (size_t i = 0; i < kKeys; ++i) {
    absl::StatusOr<BlockView> block = stream->Next();
    ASSERT_TRUE(block.ok()) << i << " " << block.status();
    ASSERT_EQ(Bytes(*block), Pattern(3 + keys[i].layer, 64)) << i;
  }
  EXPECT_EQ(stream->Next().status().code(), Code::kOutOfRange);
}

TEST_P(TransportContract, AChunkMayBeGivenBackWhileItsCommitsAreUnderWay) {
  constexpr int kRounds = 40, kSlots = 4;
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf(std::vector<uint32_t>(kSlots, 200'000)));
  Mutex mu;
  CondVar changed;
  std::vector<absl::Status> outcomes;
  for (int round = 0; round < kRounds; ++round) {
    auto writer = ReserveOne(transport.get(), ns);
    for (int layer = 0; layer < kSlots; ++layer) {
      const std::vector<uint8_t> bytes = Pattern(static_cast<uint64_t>(layer), 200'000);
      std::copy(bytes.begin(), bytes.end(), writer->Layer(layer).begin());
      writer->Commit(layer, BlockChecksum(bytes), [&](absl::Status status) {
        MutexLock lock(&mu);
        outcomes.push_back(std::move(status));
        changed.NotifyAll();
      });
    }
    const ChunkKey chunk = writer->key();
    writer = nullptr;
    transport->Release({chunk}, transport->epoch());
  }
  MutexLock lock(&mu);
  while (outcomes.size() < size_t{kRounds} * kSlots) ASSERT_FALSE(changed.WaitUntil(&mu, Soon())) << outcomes.size();
  for (const absl::Status& status : outcomes) EXPECT_TRUE(status.ok()) << status;
}

// B31: until its chunk is sealed a block exists for its owner alone; a live chunk for ever.
TEST_P(TransportContract, LiveBlocksAreVisibleToTheirOwnerAlone) {
  auto host = GetParam().open(64 * kMiB);
  auto owner = host->Connect(), other = host->Connect();
  const NamespaceSpec spec = SpecOf({5000, 6000});
  const NamespaceId ns = Open(owner.get(), spec);
  ASSERT_EQ(Open(other.get(), spec), ns);
  auto writer = ReserveOne(owner.get(), ns);
  const BlockKey first{writer->key(), 0}, second{writer->key(), 1};
  EXPECT_EQ(GetOne(owner.get(), first).status().code(), Code::kNotFound);
  ASSERT_TRUE(Put(writer.get(), 0, 10).ok());
  EXPECT_TRUE(GetOne(owner.get(), first).ok());
  EXPECT_EQ(GetOne(owner.get(), second).status().code(), Code::kNotFound);
  EXPECT_EQ(GetOne(other.get(), first).status().code(), Code::kNotFound);
  ASSERT_TRUE(Put(writer.get(), 1, 11).ok());
  EXPECT_TRUE(GetOne(owner.get(), second).ok());
  EXPECT_EQ(GetOne(other.get(), first).status().code(), Code::kNotFound);
  EXPECT_EQ(other->Stats().get_misses, 2u);
}

TEST_P(TransportContract, RetentionIsChecked) {
  auto host = GetParam().open(64 * kMiB);
  auto owner = host->Connect();
  const NamespaceId ns = Open(owner.get(), SpecOf({5000}));
  const ChunkKey live = PutChunk(owner.get(), ns, 1, 1);
  PrefixName name{PrefixKey(1), {}};
  for (const int priority : {-1, 101, 1 << 30}) {
    name.priority = priority;
    const absl::Status status = owner->Publish(live, name, Soon());
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(absl::StrCat("priority is ", priority)));
  }
  name.priority = 100;
  for (const absl::Duration ttl : {absl::ZeroDuration(), -absl::Seconds(1), -absl::InfiniteDuration()}) {
    name.ttl = ttl;
    EXPECT_EQ(owner->Publish(live, name, Soon()).code(), Code::kInvalidArgument) << ttl;
  }
  name.ttl = absl::Hours(24 * 365 * 1000);
  EXPECT_TRUE(owner->Publish(live, name, Soon()).ok());
  EXPECT_EQ(owner->Lookup({{ns, PrefixKey(1), 0, 0}}, false, Soon())->chunks, 1);
}

TEST_P(TransportContract, PublishedChunksAreFoundByOthers) {
  auto host = GetParam().open(64 * kMiB);
  auto owner = host->Connect(), other = host->Connect();
  const NamespaceSpec spec = SpecOf({5000, 6000});
  const NamespaceId ns = Open(owner.get(), spec);
  Open(other.get(), spec);
  std::vector<ChunkKey> names;
  for (uint64_t i = 1; i <= 3; ++i) {
    const ChunkKey live = PutChunk(owner.get(), ns, 2, 10 * i);
    const Id128 parent = i == 1 ? Id128{} : PrefixKey(i - 1);
    const absl::Status status = owner->Publish(live, {PrefixKey(i), parent}, Soon());
    ASSERT_TRUE(status.ok()) << status;
    names.push_back({ns, PrefixKey(i), 0, 0});
  }
  names.push_back({ns, PrefixKey(4), 0, 0});
  absl::StatusOr<LookupResult> found = other->Lookup(names, /*lease=*/true, Soon());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->chunks, 3);
  EXPECT_GE(found->bytes, 3u * 11'000);
  for (uint64_t i = 1; i <= 3; ++i) {
    absl::StatusOr<BlockView> block = GetOne(other.get(), {names[i - 1], 1});
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(10 * i + 1, 6000));
  }
  EXPECT_EQ(other->Lookup({names[3], names[0]}, false, Soon())->chunks, 0) << "only leading chunks count";
}

TEST_P(TransportContract, ATicketOutlivesWhoSharedAndServesWhoRedeems) {
  auto host = GetParam().open(64 * kMiB);
  auto owner = host->Connect(), other = host->Connect();
  const NamespaceSpec spec = SpecOf({5000, 6000});
  const NamespaceId ns = Open(owner.get(), spec);
  const ChunkKey first = PutChunk(owner.get(), ns, 2, 10), second = PutChunk(owner.get(), ns, 2, 20);
  const absl::StatusOr<uint64_t> ticket = owner->Share({second, first}, absl::Minutes(1), Soon());
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  owner->Close();
  ASSERT_EQ(Open(other.get(), spec), ns);
  const absl::StatusOr<RedeemResult> redeemed = other->Redeem(*ticket, Soon());
  ASSERT_TRUE(redeemed.ok()) << redeemed.status();
  EXPECT_EQ(redeemed->epoch, other->epoch());
  ASSERT_EQ(redeemed->keys.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    absl::StatusOr<BlockView> block = GetOne(other.get(), {redeemed->keys[i], 1});
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(i == 0 ? 21 : 11, 6000));
  }
  EXPECT_EQ(other->Redeem(*ticket + 1, Soon()).status().code(), Code::kNotFound);
  const absl::Status refused = other->Share({redeemed->keys[0]}, absl::Hours(1000), Soon()).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument) << refused;
  EXPECT_TRUE(other->Share({redeemed->keys[0]}, absl::Seconds(1), Soon()).ok()) << "what was shared can be shared on";
}

// B29: of several writers of one name the first one stays; nobody's bytes are mixed.
TEST_P(TransportContract, OnePublisherOfANameWins) {
  constexpr int kWriters = 8;
  auto host = GetParam().open(64 * kMiB);
  const NamespaceSpec spec = SpecOf({20'000});
  std::atomic<int> won{0}, second{0};
  std::vector<std::thread> threads;
  std::atomic<uint64_t> winner{0};
  std::vector<std::shared_ptr<Transport>> transports;
  for (int i = 0; i < kWriters; ++i) transports.push_back(host->Connect());
  NamespaceId ns = Open(transports[0].get(), spec);
  for (int i = 0; i < kWriters; ++i) {
    threads.emplace_back([&, i] {
      Transport* const transport = transports[static_cast<size_t>(i)].get();
      Open(transport, spec);
      const uint64_t seed = 100 + static_cast<uint64_t>(i);
      const ChunkKey live = PutChunk(transport, ns, 1, seed);
      const absl::Status status = transport->Publish(live, {PrefixKey(1), {}}, Soon());
      if (status.ok()) {
        ++won;
        winner = seed;
      } else if (absl::IsAlreadyExists(status)) {
        ++second;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(won, 1);
  EXPECT_EQ(second, kWriters - 1);
  absl::StatusOr<BlockView> block = GetOne(transports[3].get(), {{ns, PrefixKey(1), 0, 0}, 0});
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(Bytes(*block), Pattern(winner, 20'000));
}

// B74: one key twice, a miss in the middle, no key at all.
TEST_P(TransportContract, EachKeyOfAFetchGetsItsOwnAnswer) {
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({70'000, 80'000}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 2, 20);
  ChunkKey missing = chunk;
  missing.id[1] += 1000;
  const BlockKey a{chunk, 0}, b{chunk, 1}, none{missing, 0};
  auto stream = transport->Fetch({a, none, a, b, none, none, a}, Soon());
  const std::vector<int> expected = {0, -1, 0, 1, -1, -1, 0};
  for (size_t i = 0; i < expected.size(); ++i) {
    absl::StatusOr<BlockView> block = stream->Next();
    if (expected[i] < 0) {
      EXPECT_EQ(block.status().code(), Code::kNotFound) << i;
      continue;
    }
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(20 + static_cast<uint64_t>(expected[i]), expected[i] == 0 ? 70'000 : 80'000)) << i;
  }
  EXPECT_EQ(stream->Next().status().code(), Code::kOutOfRange);
  EXPECT_EQ(transport->Stats().get_misses, 3u);
  EXPECT_EQ(transport->Fetch({}, Soon())->Next().status().code(), Code::kOutOfRange);
}

// B45: a block larger than any message.
TEST_P(TransportContract, BlocksLargerThanAMessage) {
  for (const uint32_t size : {uint32_t{4 * kMiB - 1}, uint32_t{4 * kMiB + 1}, uint32_t{8 * kMiB + kKiB + 1}}) {
    auto host = GetParam().open(512 * kMiB);
    auto transport = host->Connect();
    const NamespaceId ns = Open(transport.get(), SpecOf({size, 100}));
    const ChunkKey chunk = PutChunk(transport.get(), ns, 2, size);
    absl::StatusOr<BlockView> block = GetOne(transport.get(), {chunk, 0});
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(size, size));
  }
}

TEST_P(TransportContract, AFullStoreRefusesWholeReservationsAndReleaseMakesRoom) {
  auto host = GetParam().open(16 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({1 << 20}));
  std::vector<std::unique_ptr<ChunkWriter>> held;
  ReserveRequest one;
  one.ns = ns;
  absl::Status refused;
  while (refused.ok()) {
    auto writers = transport->Reserve(one, absl::Now() + absl::Milliseconds(300));
    refused = writers.status();
    if (writers.ok()) held.push_back(std::move(writers->front()));
    ASSERT_LT(held.size(), 17u) << "more than the budget holds";
  }
  EXPECT_EQ(refused.code(), Code::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr(transport->url()));
  ASSERT_GE(held.size(), 4u);
  ReserveRequest three = one;
  three.count = 3;
  const ChunkKey kept = held[0]->key();
  ASSERT_TRUE(Put(held[0].get(), 0, 1).ok());
  held[0] = nullptr;  // its memory may be the store's own
  // A reservation that waits gets its memory when enough has come back, and not before.
  std::atomic<bool> got{false};
  std::thread waiter([&] {
    auto writers = transport->Reserve(three, Soon());
    EXPECT_TRUE(writers.ok()) << writers.status();
    EXPECT_EQ(writers.ok() ? writers->size() : 0u, 3u);
    got = true;
  });
  held[1] = nullptr;
  held[2] = nullptr;
  EXPECT_FALSE(got);
  transport->Release({kept}, transport->epoch());
  waiter.join();
}

TEST_P(TransportContract, ReleaseFreesLiveChunksButNotTheirPublishedNames) {
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({9000}));
  const ChunkKey plain = PutChunk(transport.get(), ns, 1, 1), published = PutChunk(transport.get(), ns, 1, 2);
  ASSERT_TRUE(transport->Publish(published, {PrefixKey(5), {}}, Soon()).ok());
  transport->Release({plain, published}, transport->epoch());
  AwaitMiss(transport.get(), {plain, 0});
  AwaitMiss(transport.get(), {published, 0});
  absl::StatusOr<BlockView> block = GetOne(transport.get(), {{ns, PrefixKey(5), 0, 0}, 0});
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(Bytes(*block), Pattern(2, 9000));
}

TEST_P(TransportContract, LeasedChunksAreNotEvicted) {
  auto host = GetParam().open(8 * kMiB);
  auto writer = host->Connect(), reader = host->Connect();
  const NamespaceSpec spec = SpecOf({1 << 18});
  const NamespaceId ns = Open(writer.get(), spec);
  Open(reader.get(), spec);
  const auto publish = [&](uint64_t n) {
    const ChunkKey live = PutChunk(writer.get(), ns, 1, n);
    ASSERT_TRUE(writer->Publish(live, {PrefixKey(n), {}}, Soon()).ok());
    writer->Release({live}, writer->epoch());
  };
  publish(1);
  const ChunkKey first{ns, PrefixKey(1), 0, 0};
  ASSERT_EQ(reader->Lookup({first}, /*lease=*/true, Soon())->chunks, 1);
  for (uint64_t n = 2; n < 40; ++n) publish(n);  // more than the budget: the others are evicted
  EXPECT_TRUE(GetOne(reader.get(), {first, 0}).ok());
  EXPECT_EQ(reader->Lookup({{ns, PrefixKey(2), 0, 0}}, false, Soon())->chunks, 0);
  reader->Release({first}, reader->epoch());
  const absl::Time deadline = Soon();
  for (uint64_t n = 40; reader->Lookup({first}, false, Soon())->chunks == 1; ++n) {
    ASSERT_LT(absl::Now(), deadline) << "the lease was never returned";
    publish(n);
  }
}

TEST_P(TransportContract, ErasedNamesAreGone) {
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({9000}));
  const ChunkKey live = PutChunk(transport.get(), ns, 1, 1), name{ns, PrefixKey(1), 0, 0};
  ASSERT_TRUE(transport->Publish(live, {PrefixKey(1), {}}, Soon()).ok());
  EXPECT_TRUE(transport->Erase(name, Soon()).ok());
  EXPECT_EQ(transport->Lookup({name}, false, Soon())->chunks, 0);
  EXPECT_EQ(transport->Erase(name, Soon()).code(), Code::kNotFound);
  EXPECT_TRUE(GetOne(transport.get(), {live, 0}).ok()) << "the live name goes on";
}

// B30: what a writer leaves unfinished was never there, and its space is used again.
TEST_P(TransportContract, AnAbandonedWriterLeavesNothing) {
  auto host = GetParam().open(16 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({1 << 20, 1 << 20}));
  ChunkKey last;
  for (int round = 0; round < 20; ++round) {  // 40 MiB in all
    auto writer = ReserveOne(transport.get(), ns);
    ASSERT_NE(writer, nullptr) << "round " << round;
    ASSERT_TRUE(Put(writer.get(), 0, 1).ok());
    last = writer->key();
  }
  AwaitMiss(transport.get(), {last, 0});
}

TEST_P(TransportContract, AFetchMayBeDroppedInTheMiddle) {
  auto host = GetParam().open(512 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf(std::vector<uint32_t>(8, 1 << 20)));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 8, 1);
  std::vector<BlockKey> keys;
  for (int i = 0; i < 128; ++i) keys.push_back({chunk, static_cast<uint16_t>(i % 8)});
  for (const int taken : {0, 1, 3}) {
    auto stream = transport->Fetch(keys, Soon());
    for (int i = 0; i < taken; ++i) ASSERT_TRUE(stream->Next().ok());
  }
  absl::StatusOr<BlockView> block = GetOne(transport.get(), {chunk, 5});
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(Bytes(*block), Pattern(6, 1 << 20));
}

// More chunks than the memory of a store with a disk, live ones and published ones; layer by layer, as a cache reads.
TEST_P(TransportContract, ManyChunksComeBackInAnyOrder) {
  constexpr uint64_t kChunks = 60;
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({70'000, 40'000}));
  std::vector<ChunkKey> live, chunks;
  for (uint64_t n = 1; n <= kChunks; ++n) {
    live.push_back(PutChunk(transport.get(), ns, 2, 10 * n));
    if (n % 2 == 0) {
      chunks.push_back(live.back());
      continue;
    }
    const Id128 parent = n > 2 ? PrefixKey(n - 2) : Id128{};
    ASSERT_EQ(transport->Publish(live.back(), {PrefixKey(n), parent}, Soon()), absl::OkStatus());
    chunks.push_back({ns, PrefixKey(n), 0, 0});
  }
  std::vector<BlockKey> keys;
  for (const uint16_t layer : {0, 1}) {
    for (const ChunkKey& chunk : chunks) keys.push_back({chunk, layer});
  }
  transport->Prefetch({chunks.data(), 5});
  { auto dropped = transport->Fetch(keys, Soon()); }
  auto stream = transport->Fetch(keys, Soon());
  for (size_t i = 0; i < keys.size(); ++i) {
    absl::StatusOr<BlockView> block = stream->Next();
    ASSERT_TRUE(block.ok()) << i << " " << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(10 * (i % kChunks + 1) + i / kChunks, i < kChunks ? 70'000 : 40'000)) << i;
  }
  transport->Release(live, transport->epoch());
  for (uint64_t n = 1; n <= kChunks; ++n) {
    if (n % 2 == 0) AwaitMiss(transport.get(), {live[n - 1], 0});
  }
  EXPECT_EQ(transport->Flush(Soon()), absl::OkStatus());
  EXPECT_TRUE(GetOne(transport.get(), {chunks[0], 1}).ok());
}

TEST_P(TransportContract, WrongUseIsRefusedByName) {
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  NamespaceSpec bad = SpecOf({100});
  bad.block_tokens = 0;
  const absl::Status spec = transport->OpenNamespace(bad, Soon()).status();
  EXPECT_EQ(spec.code(), Code::kInvalidArgument);
  EXPECT_THAT(std::string(spec.message()), HasSubstr("block_tokens"));
  ReserveRequest unknown;
  unknown.ns = {1, 2};
  EXPECT_FALSE(transport->Reserve(unknown, Soon()).ok());
  const NamespaceId ns = Open(transport.get(), SpecOf({100, 100}));
  auto writer = ReserveOne(transport.get(), ns);
  ASSERT_TRUE(Put(writer.get(), 0, 1).ok());
  EXPECT_EQ(Put(writer.get(), 0, 1).code(), Code::kFailedPrecondition) << "committed twice";
  const absl::Status unsealed = transport->Publish(writer->key(), {PrefixKey(1), {}}, Soon());
  EXPECT_EQ(unsealed.code(), Code::kFailedPrecondition) << unsealed;
  EXPECT_THAT(std::string(unsealed.message()), HasSubstr(transport->url()));
  EXPECT_TRUE(transport->Flush(Soon()).ok());
}

TEST_P(TransportContract, WritersAndStreamsMayOutliveTheirTransport) {
  auto host = GetParam().open(64 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({1000, 1000}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 2, 1);
  auto writer = ReserveOne(transport.get(), ns);
  auto stream = transport->Fetch(std::vector<BlockKey>(10'000, BlockKey{chunk, 0}), Soon());
  ASSERT_TRUE(stream->Next().ok());
  transport = nullptr;
  EXPECT_EQ(Put(writer.get(), 0, 1).code(), Code::kUnavailable);
  absl::Status status;
  while (status.ok()) status = stream->Next().status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status;
  EXPECT_EQ(stream->Next().status().code(), Code::kUnavailable) << "and again";
}

TEST_P(TransportContract, ManyThreadsShareATransport) {
  constexpr int kThreads = 4, kRounds = 30;
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  auto host = GetParam().open(128 * kMiB);
  auto transport = host->Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({50'001, 3, 120'000}));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(t));
      std::vector<std::pair<ChunkKey, uint64_t>> mine;
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t pattern = random();
        mine.emplace_back(PutChunk(transport.get(), ns, 3, pattern), pattern);
        const auto& [chunk, expected] = mine[random() % mine.size()];
        const uint16_t layer = random() % 3;
        absl::StatusOr<BlockView> block = GetOne(transport.get(), {chunk, layer});
        ASSERT_TRUE(block.ok()) << block.status();
        ASSERT_EQ(Bytes(*block), Pattern(expected + layer, block->size()));
        if (mine.size() > 10) {
          transport->Release({mine.front().first}, transport->epoch());
          mine.erase(mine.begin());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(transport->Stats().blocks_put, static_cast<uint64_t>(kThreads * kRounds * 3));
}

}  // namespace kvferry
