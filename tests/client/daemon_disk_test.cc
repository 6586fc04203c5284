// kvferryd on a folder, over its client: what a restart finds there, and what it refuses.
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "tests/support/child_daemon.h"
#include "tests/support/disk_folder.h"
#include "tests/support/put_and_get.h"

namespace kvferry {
namespace {

constexpr uint32_t kBlock = 100'000;

class DaemonDisk : public testing::Test {
 protected:
  // Memory for some ten of the chunks that the tests put.
  std::vector<std::string> Flags() const {
    return {"--memory=4MiB", "--disk=" + folder_.path(), "--disk-bytes=256MiB", "--disk-keep-free=0"};
  }
  static std::shared_ptr<Transport> Reach(const ChildDaemon& daemon) {
    auto transport = Connect(daemon.unix_url(), {});
    EXPECT_TRUE(transport.ok()) << transport.status();
    return *transport;
  }
  // Chunks [from, to) of two layers, each the parent of the next.
  static void Publish(Transport* transport, const NamespaceId& ns, uint64_t from, uint64_t to) {
    for (uint64_t n = from; n < to; ++n) {
      const ChunkKey live = PutChunk(transport, ns, 2, 10 * n);
      const Id128 parent = n == from ? Id128{} : PrefixKey(n - 1);
      ASSERT_EQ(transport->Publish(live, {PrefixKey(n), parent}, Soon()), absl::OkStatus());
      transport->Release({live}, transport->epoch());
    }
  }
  static ChunkKey Name(const NamespaceId& ns, uint64_t n) { return {ns, PrefixKey(n), 0, 0}; }
  // How many of the chunks [from, to) are there, each with its own bytes.
  static uint64_t Held(Transport* transport, const NamespaceId& ns, uint64_t from, uint64_t to) {
    uint64_t held = 0;
    for (uint64_t n = from; n < to; ++n) {
      bool both = true;
      for (const uint16_t layer : {0, 1}) {
        const auto block = GetOne(transport, {Name(ns, n), layer});
        EXPECT_TRUE(block.ok() || absl::IsNotFound(block.status())) << block.status();
        both = both && block.ok();
        if (!block.ok()) continue;
        EXPECT_EQ(Bytes(*block), Pattern(10 * n + layer, kBlock)) << n;
      }
      held += both ? 1 : 0;
    }
    return held;
  }

  const TempFolder folder_;
  const NamespaceSpec spec_ = SpecOf({kBlock, kBlock});
};

TEST_F(DaemonDisk, AnOrderlyRestartFindsAllThatWasPublished) {
  ChildDaemon daemon(Flags());
  NamespaceId ns;
  {
    auto transport = Reach(daemon);
    ns = Open(transport.get(), spec_);
    Publish(transport.get(), ns, 1, 60);  // several times what memory holds; nobody flushes
    ASSERT_EQ(transport->Erase(Name(ns, 59), Soon()), absl::OkStatus());
  }
  for (int again = 0; again < 2; ++again) {
    daemon.Terminate();
    daemon.Start();
    auto transport = Reach(daemon);
    ASSERT_EQ(Open(transport.get(), spec_), ns);
    std::vector<ChunkKey> names;
    for (uint64_t n = 1; n < 60; ++n) names.push_back(Name(ns, n));
    EXPECT_EQ(transport->Lookup(names, false, Soon())->chunks, 58);
    EXPECT_EQ(Held(transport.get(), ns, 1, 60), 58u);
  }
}

}  // namespace
}  // namespace kvferry
