// Random operations of several sessions against a store that forgets nothing it must keep: a plain map is the oracle.
#include <map>
#include <random>
#include <set>

#include "tests/storage/store_fixture.h"
#include "tests/support/seeds.h"

namespace kvferry {
namespace {

// What a plain map says of the store: which chunk has which bytes, who holds it, what must be there.
struct Oracle {
  struct LiveChunk {
    uint64_t seed = 0;
    uint64_t prefix = 0;  // as it was published; 0: not
  };
  struct Client {
    SessionId id = 0;
    std::map<uint64_t, LiveChunk> live;       // by counter
    std::map<uint64_t, uint32_t> leases;      // by prefix id
    std::map<uint64_t, uint64_t> lease_seed;  // the bytes it leased
  };
  std::vector<Client> clients;
  std::map<uint64_t, uint64_t> seed_of;  // prefix id -> bytes of whoever published it last, evicted since or not
};

class StoreProperty : public StoreFixture, public testing::WithParamInterface<uint64_t> {
 protected:
  void Check(Oracle::Client& client) {
    for (const auto& [counter, chunk] : client.live) {
      const ChunkKey key{ns_, {client.id, counter}, 0, 0};
      ASSERT_TRUE(Has(client.id, key, chunk.seed, 1)) << "a live chunk is lost";
    }
    for (const auto& [prefix, count] : client.leases) {
      ASSERT_TRUE(Has(client.id, Prefix(ns_, prefix), client.lease_seed[prefix])) << "a leased chunk is lost";
    }
  }
  void CheckGauges(const Oracle& oracle) {
    const StoreStats stats = store_->Stats();
    uint64_t live = 0;
    std::set<uint64_t> leased;  // seeds: a chunk may be leased under a name that was erased and under its next one
    for (const Oracle::Client& client : oracle.clients) {
      live += client.live.size();
      for (const auto& [prefix, count] : client.leases) leased.insert(client.lease_seed.at(prefix));
    }
    ASSERT_EQ(stats.chunks_live, live);
    ASSERT_EQ(stats.chunks_leased, leased.size());
    ASSERT_EQ(stats.chunks_reserved, 0u);
    ASSERT_EQ(stats.sessions, oracle.clients.size());
    ASSERT_LE(stats.memory_used_bytes + stats.memory_free_in_segments_bytes, stats.memory_budget_bytes);
    uint64_t listed = 0;
    for (const ChunkInfo& info : store_->List(0, SIZE_MAX)) listed += info.bytes;
    ASSERT_LE(listed, stats.memory_used_bytes - stats.metadata_bytes);
  }
  void Step(Oracle& oracle, std::mt19937& random);

  NamespaceId ns_{};
  uint64_t next_seed_ = 1;
};

void StoreProperty::Step(Oracle& oracle, std::mt19937& random) {
  Oracle::Client& client = oracle.clients[random() % oracle.clients.size()];
  const uint64_t prefix = 1 + random() % 40;
  switch (random() % 9) {
    case 0:
    case 1: {
      const int count = 1 + random() % 3;
      absl::StatusOr<Writers> writers = Reserve(client.id, ns_, count);
      if (!writers.ok()) {
        ASSERT_EQ(writers.status().code(), absl::StatusCode::kResourceExhausted);
        return;
      }
      ASSERT_EQ(writers->size(), static_cast<size_t>(count));
      for (auto& writer : *writers) {
        if (random() % 5 == 0) continue;  // given up
        Seal(*writer, next_seed_);
        client.live[writer->key().id[1]] = {next_seed_++, 0};
      }
      return;
    }
    case 2:
    case 3: {
      if (client.live.empty()) return;
      auto& [counter, chunk] = *std::next(client.live.begin(), random() % client.live.size());
      // Whether another has the name: the store alone knows, after evictions.
      const bool taken = Lookup(client.id, {Prefix(ns_, prefix)}, false) == 1;
      const absl::Status status = Publish(client.id, ChunkKey{ns_, {client.id, counter}, 0, 0}, prefix, prefix - 1);
      if (status.ok()) {
        ASSERT_TRUE(!taken || chunk.prefix == prefix);
        chunk.prefix = prefix;
        oracle.seed_of[prefix] = chunk.seed;
      } else {
        ASSERT_TRUE(taken || chunk.prefix != 0) << status;
      }
      return;
    }
    case 4:
      if (client.live.empty()) return;
      {
        const uint64_t counter = std::next(client.live.begin(), random() % client.live.size())->first;
        store_->Release(client.id, {ChunkKey{ns_, {client.id, counter}, 0, 0}});
        client.live.erase(counter);
        ASSERT_FALSE(Has(client.id, ChunkKey{ns_, {client.id, counter}, 0, 0}, 0));
      }
      return;
    case 5: {
      std::vector<ChunkKey> keys;
      for (uint64_t i = 0; i < 4; ++i) keys.push_back(Prefix(ns_, prefix + i));
      const int hit = Lookup(client.id, keys, true);
      for (int i = 0; i < hit; ++i) {
        if (++client.leases[prefix + i] == 1) client.lease_seed[prefix + i] = oracle.seed_of[prefix + i];
      }
      return;
    }
    case 6:
      if (client.leases.empty()) return;
      {
        const auto it = std::next(client.leases.begin(), random() % client.leases.size());
        store_->Release(client.id, {Prefix(ns_, it->first)});
        if (--it->second == 0) client.leases.erase(it);
      }
      return;
    case 7: {  // a miss, or the right bytes
      const uint64_t seed = client.leases.contains(prefix) ? client.lease_seed[prefix] : oracle.seed_of[prefix];
      Has(client.id, Prefix(ns_, prefix), seed);
      return;
    }
    case 8:
      if (random() % 4 != 0) return;
      if (random() % 2 == 0) {
        if (!Erase(client.id, Prefix(ns_, prefix)).ok()) return;
        for (Oracle::Client& c : oracle.clients) {
          for (auto& [counter, chunk] : c.live) {
            if (chunk.prefix == prefix) chunk.prefix = 0;
          }
        }
      } else {
        store_->EndSession(client.id);
        client = Oracle::Client();
        client.id = Session();
        ASSERT_EQ(Namespace(client.id, BigSpec()), ns_);
      }
      return;
  }
}

TEST_P(StoreProperty, NothingHeldIsLostAndNoByteIsWrong) {
  const uint64_t seed = GetParam() == 0 ? Seeds(1).first : GetParam();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  OpenFor(BigSpec(), 24, static_cast<PolicyKind>(seed % 3));
  Oracle oracle;
  oracle.clients.resize(3);
  for (Oracle::Client& client : oracle.clients) {
    client.id = Session();
    ns_ = Namespace(client.id, BigSpec());
  }
  for (int step = 0; step < 2000 && !HasFatalFailure(); ++step) {
    ASSERT_NO_FATAL_FAILURE(Step(oracle, random)) << "step " << step;
    if (step % 25 == 0) {
      for (Oracle::Client& client : oracle.clients) ASSERT_NO_FATAL_FAILURE(Check(client)) << "step " << step;
      ASSERT_NO_FATAL_FAILURE(CheckGauges(oracle)) << "step " << step;
    }
    if (testing::Test::HasFailure()) break;
  }
  EXPECT_GT(store_->Stats().evictions, 0u);
  const SessionId last = Session();
  for (Oracle::Client& client : oracle.clients) store_->EndSession(client.id);
  for (uint64_t prefix = 0; prefix <= 50; ++prefix) (void)Erase(last, Prefix(ns_, prefix));
  store_->EndSession(last);
  ExpectEmpty();
}

INSTANTIATE_TEST_SUITE_P(Seeds, StoreProperty, testing::Values(1, 2, 3, 0));

}  // namespace
}  // namespace kvferry
