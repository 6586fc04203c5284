// A store on a clock moved by hand, and words to drive it with.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "storage/base/checksum.h"
#include "storage/record.h"
#include "storage/store.h"
#include "tests/base/specs.h"
#include "tests/support/manual_executor.h"

namespace kvferry {

using Writers = std::vector<std::unique_ptr<ChunkWriter>>;

// The byte that layer `layer` of chunk `seed` has at offset `at`.
inline uint8_t ByteAt(uint64_t seed, int layer, uint64_t at) {
  return static_cast<uint8_t>(seed * 0x9e3779b97f4a7c15 >> 56 ^ static_cast<uint64_t>(layer) * 59 ^ at * 7 ^ at >> 8);
}

// Bytes of budget that hold exactly `count` chunks of the spec's group 0, and sessions and leases beside them.
inline uint64_t BudgetFor(const NamespaceSpec& spec, uint64_t count) {
  const ChunkLayout layout = ChunkLayout::For(spec, 0);
  const uint64_t chunks = count * (layout.image_bytes + RecordOverhead(layout));
  return chunks * 64 / 63 + 64;
}

class StoreFixture : public testing::Test {
 protected:
  // Images of this spec take 64 KiB and more, so that the budget of a few chunks is one that options allow.
  static NamespaceSpec BigSpec() { return SmallSpec(2, 4, 64, 16); }

  void Open(StoreOptions options) {
    absl::StatusOr<std::unique_ptr<Store>> opened = OpenStore(options, &executor_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
  }
  void OpenFor(const NamespaceSpec& spec, uint64_t chunks, PolicyKind policy = PolicyKind::kS3Fifo) {
    StoreOptions options;
    options.policy = policy;
    options.memory_bytes = BudgetFor(spec, chunks);
    Open(options);
  }

  SessionId Session(const std::string& tenant = "tenant") {
    absl::StatusOr<SessionId> session = store_->OpenSession(tenant);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.value_or(0);
  }
  NamespaceId Namespace(SessionId session, const NamespaceSpec& spec) {
    absl::StatusOr<NamespaceId> ns = store_->OpenNamespace(session, spec);
    EXPECT_TRUE(ns.ok()) << ns.status();
    return ns.value_or(NamespaceId{});
  }

  // The answer, if it has come.
  using Answer = std::shared_ptr<std::optional<absl::StatusOr<Writers>>>;
  Answer Ask(SessionId session, const NamespaceId& ns, int count, absl::Duration wait) {
    ReserveOptions options;
    options.count = count;
    options.deadline = wait > absl::ZeroDuration() ? executor_.Now() + wait : absl::InfinitePast();
    auto answer = std::make_shared<std::optional<absl::StatusOr<Writers>>>();
    store_->Reserve(session, ns, options, [answer](absl::StatusOr<Writers> writers) {
      EXPECT_FALSE(answer->has_value()) << "answered twice";
      answer->emplace(std::move(writers));
    });
    return answer;
  }
  absl::StatusOr<Writers> Reserve(SessionId session, const NamespaceId& ns, int count = 1) {
    Answer answer = Ask(session, ns, count, absl::ZeroDuration());
    if (!answer->has_value()) return absl::InternalError("not answered at once");
    return *std::move(*answer);
  }

  static absl::Status Commit(ChunkWriter& writer, int layer, uint64_t seed) {
    const MutableByteView slot = writer.Layer(layer);
    for (size_t at = 0; at < slot.size(); ++at) slot[at] = ByteAt(seed, layer, at);
    absl::Status result = absl::InternalError("not answered at once");
    writer.Commit(layer, BlockChecksum(ByteView(slot)), [&result](absl::Status status) { result = status; });
    return result;
  }
  static void Seal(ChunkWriter& writer, uint64_t seed, int layers = 2) {
    for (int layer = 0; layer < layers; ++layer) ASSERT_TRUE(Commit(writer, layer, seed).ok());
  }

  // A sealed live chunk, its writer gone.
  ChunkKey Live(SessionId session, const NamespaceId& ns, uint64_t seed) {
    absl::StatusOr<Writers> writers = Reserve(session, ns);
    EXPECT_TRUE(writers.ok()) << writers.status();
    if (!writers.ok()) return ChunkKey{};
    Seal(*(*writers)[0], seed);
    return (*writers)[0]->key();
  }

  static ChunkKey Prefix(const NamespaceId& ns, uint64_t id) { return ChunkKey{ns, {0, id}, 0, 0}; }

  absl::Status Publish(SessionId session, const ChunkKey& live, uint64_t id, uint64_t parent = 0) {
    return store_->Publish(session, live, PublishOptions{{0, id}, {0, parent}});
  }

  // A published chunk with no live name, as it stays when its sequence has ended.
  ChunkKey Published(SessionId session, const NamespaceId& ns, uint64_t id, uint64_t parent = 0) {
    const ChunkKey live = Live(session, ns, id);
    const absl::Status status = Publish(session, live, id, parent);
    EXPECT_TRUE(status.ok()) << status;
    store_->Release(session, {live});
    return Prefix(ns, id);
  }

  absl::Status Erase(SessionId session, const ChunkKey& key) {
    absl::Status result = absl::InternalError("not answered at once");
    store_->Erase(session, key, [&result](absl::Status status) { result = std::move(status); });
    return result;
  }

  absl::StatusOr<BlockView> Get(SessionId session, const ChunkKey& key, int layer = 0) {
    absl::StatusOr<BlockView> result = absl::InternalError("not answered at once");
    store_->Get(session, BlockKey{key, static_cast<uint16_t>(layer)},
                [&result](absl::StatusOr<BlockView> view) { result = std::move(view); });
    return result;
  }
  int Lookup(SessionId session, const std::vector<ChunkKey>& keys, bool lease) {
    const absl::StatusOr<Match> match = store_->Lookup(session, keys, lease);
    EXPECT_TRUE(match.ok()) << match.status();
    return match.ok() ? match->chunks : -1;
  }

  // True if the chunk is there and has its own bytes; false if it is a miss. Anything else fails the test.
  bool Has(SessionId session, const ChunkKey& key, uint64_t seed, int layer = 0) {
    const absl::StatusOr<BlockView> view = Get(session, key, layer);
    if (view.status().code() == absl::StatusCode::kNotFound) return false;
    EXPECT_TRUE(view.ok()) << view.status();
    if (view.ok()) ExpectBytes(*view, seed, layer);
    return view.ok();
  }
  static void ExpectBytes(const BlockView& view, uint64_t seed, int layer = 0) {
    EXPECT_TRUE(view.Verify().ok()) << view.Verify();
    ASSERT_EQ(view.pieces().size(), 1u);
    const ByteView bytes = view.pieces()[0];
    size_t right = 0;
    while (right < bytes.size() && bytes[right] == ByteAt(seed, layer, right)) ++right;
    EXPECT_EQ(right, bytes.size()) << "another's bytes from here on";
  }

  // Nothing is held by anybody: every gauge is at zero.
  void ExpectEmpty() {
    executor_.Run();
    const StoreStats stats = store_->Stats();
    EXPECT_EQ(stats.memory_used_bytes, 0u);
    EXPECT_EQ(stats.metadata_bytes, 0u);
    EXPECT_EQ(stats.memory_free_in_segments_bytes, 0u);
    EXPECT_EQ(stats.segments, 0u);
    EXPECT_EQ(stats.sessions, 0u);
    EXPECT_EQ(stats.namespaces, 0u);
    EXPECT_EQ(stats.chunks_live, 0u);
    EXPECT_EQ(stats.chunks_published, 0u);
    EXPECT_EQ(stats.chunks_reserved, 0u);
    EXPECT_EQ(stats.chunks_leased, 0u);
  }

  ManualExecutor executor_;
  std::unique_ptr<Store> store_;
};

}  // namespace kvferry
