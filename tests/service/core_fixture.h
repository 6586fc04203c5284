// A store, its clients' sessions and a clock moved by hand: the service without gRPC.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "service/client_sessions.h"
#include "service/service_stats.h"
#include "storage/base/checksum.h"
#include "storage/store.h"
#include "tests/base/specs.h"
#include "tests/service/block_bytes.h"
#include "tests/support/manual_executor.h"

namespace kvferry {

class CoreFixture {
 public:
  explicit CoreFixture(const StoreOptions& options = SmallStore()) {
    auto opened = OpenStore(options, &executor);
    EXPECT_TRUE(opened.ok()) << opened.status();
    store = *std::move(opened);
    times.live_grace = options.live_grace;
    times.reservation_grace = options.reservation_grace;
    sessions = std::make_unique<ClientSessions>(store.get(), &executor, times, &stats);
  }

  static StoreOptions SmallStore() {
    StoreOptions options;
    options.memory_bytes = 64 * kMiB;
    options.segment_bytes = 4 * kMiB;
    return options;
  }

  // Attaches a stream; what the table later says to it goes to `closed`.
  absl::StatusOr<ClientSessions::Attachment> Attach(SessionId resume = 0, absl::Status* closed = nullptr,
                                                    const std::string& tenant = "default") {
    absl::StatusOr<ClientSessions::Attachment> result = absl::InternalError("not answered");
    sessions->Attach(
        tenant, resume,
        [closed](const absl::Status& why) {
          if (closed != nullptr) *closed = why;
        },
        [&result](auto attached) { result = std::move(attached); });
    executor.Run();
    return result;
  }

  NamespaceId Open(SessionId session, const NamespaceSpec& spec) {
    const auto ns = store->OpenNamespace(session, spec);
    EXPECT_TRUE(ns.ok()) << ns.status();
    (*sessions->Find(session))->MarkUsed();
    return *ns;
  }

  std::vector<ChunkKey> Reserve(SessionId session, const NamespaceId& ns, int count = 1) {
    std::vector<ChunkKey> keys;
    ReserveOptions options;
    options.count = count;
    store->Reserve(session, ns, options, [&](auto writers) {
      ASSERT_TRUE(writers.ok()) << writers.status();
      for (const auto& writer : *writers) keys.push_back(writer->key());
      const auto chunks = *sessions->Find(session);
      ASSERT_TRUE(chunks->Add(*std::move(writers), *store->Layout(session, ns, 0)));
    });
    return keys;
  }

  absl::StatusOr<BlockView> Get(SessionId session, const BlockKey& key) {
    absl::StatusOr<BlockView> result = absl::InternalError("not answered");
    store->Get(session, key, [&result](auto view) { result = std::move(view); });
    return result;
  }

  ManualExecutor executor;
  ServiceStats stats;
  SessionTimes times;
  std::unique_ptr<Store> store;
  std::unique_ptr<ClientSessions> sessions;
};

}  // namespace kvferry
