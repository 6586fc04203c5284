// kvferryd on a folder, over its client: what a restart finds there, and what it refuses.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "storage/base/checksum.h"
#include "tests/service/process.h"
#include "tests/service/raw_client.h"
#include "tests/support/child_daemon.h"
#include "tests/support/disk_folder.h"
#include "tests/support/put_and_get.h"

namespace kvferry {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kBlock = 100'000;

class DaemonDisk : public testing::Test {
 protected:
  // Memory for some twenty of the chunks that the tests put.
  std::vector<std::string> Flags(const std::string& disk_bytes = "256MiB") const {
    return {"--memory=4MiB", "--disk=" + folder_.path(), "--disk-bytes=" + disk_bytes, "--disk-keep-free=0"};
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

  // Makes the file's first block say another version, as a later kvferryd would, tells how a start on it ends, and
  // makes it say its own again. `checked`: bytes before the block's checksum, itself behind them.
  std::string RefusalOfVersion(uint8_t version, const std::string& name, uint64_t checked) {
    std::fstream file(folder_.path() + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> block(checked + sizeof(uint64_t));
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    std::vector<uint8_t> other(block.begin(), block.end());
    other[4] = version;
    const uint64_t checksum = HeaderChecksum(ByteView(other).subspan(0, checked));
    std::memcpy(&other[checked], &checksum, sizeof(checksum));
    file.seekp(0)
        .write(reinterpret_cast<const char*>(other.data()), static_cast<std::streamsize>(other.size()))
        .flush();
    std::vector<std::string> command = Flags();
    command.insert(command.begin(), {KVFERRYD, "--listen=127.0.0.1:0"});
    Process daemon(command);
    const std::string ready = daemon.ReadLine();
    EXPECT_EQ(ready, "") << "it serves";
    if (!ready.empty()) daemon.Signal(SIGKILL);
    EXPECT_EQ(daemon.Wait(), 1);
    file.seekp(0).write(block.data(), static_cast<std::streamsize>(block.size())).flush();
    return daemon.err;
  }
  std::string FileOf(const std::string& prefix) const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      if (entry.path().filename().string().rfind(prefix, 0) == 0) return entry.path().filename().string();
    }
    ADD_FAILURE() << "no " << prefix;
    return "";
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

TEST_F(DaemonDisk, AKillLosesNothingThatWasFlushedOntoAFullDisk) {
  ChildDaemon daemon(Flags("16MiB"));
  std::set<uint64_t> durable;
  NamespaceId ns;
  {
    auto transport = Reach(daemon);
    ns = Open(transport.get(), spec_);
    for (uint64_t from = 1; from < 160; from += 20) {
      Publish(transport.get(), ns, from, from + 20);
      ASSERT_EQ(transport->Flush(Soon()), absl::OkStatus());
    }
    auto stats = RawClient(daemon.unix_url()).Stats();
    EXPECT_GT(stats["disk_evictions"], 0u) << "it is not full";
    EXPECT_LE(stats["disk_used_bytes"], 16 * kMiB);
    EXPECT_EQ(stats["chunks_dirty"], 0u);
    for (uint64_t n = 1; n < 161; ++n) {
      if (transport->Lookup({Name(ns, n)}, false, Soon())->chunks == 1) durable.insert(n);
    }
  }
  EXPECT_GT(durable.size(), 40u);
  daemon.Kill();
  daemon.Start();
  EXPECT_LE(RawClient(daemon.unix_url()).Stats()["disk_used_bytes"], 16 * kMiB);
  auto transport = Reach(daemon);
  ASSERT_EQ(Open(transport.get(), spec_), ns);
  for (const uint64_t n : durable) EXPECT_EQ(Held(transport.get(), ns, n, n + 1), 1u) << n;
  auto stats = RawClient(daemon.unix_url()).Stats();
  EXPECT_EQ(stats["corruptions"] + stats["disk_reads_failed"], 0u);
  Publish(transport.get(), ns, 200, 220);  // and it goes on
  EXPECT_EQ(transport->Flush(Soon()), absl::OkStatus());
  EXPECT_EQ(Held(transport.get(), ns, 200, 220), 20u);
}

// Another model, layout or number of ranks is another namespace: what lies there is nothing to it.
TEST_F(DaemonDisk, AnotherSpecIsAMissAndReadsNothing) {
  ChildDaemon daemon(Flags());
  NamespaceId ns;
  {
    auto transport = Reach(daemon);
    ns = Open(transport.get(), spec_);
    Publish(transport.get(), ns, 1, 10);
  }
  daemon.Terminate();
  daemon.Start();
  auto transport = Reach(daemon);
  std::vector<NamespaceSpec> others(5, spec_);
  others[0].shards = 2;
  others[1].model = "another";
  others[2].block_tokens = 2;
  others[3].groups[0].layers[0].parts = {{2, kBlock / 2}};  // the same size
  others[4].dtype = "int8";
  for (const NamespaceSpec& other : others) {
    const NamespaceId id = Open(transport.get(), other);
    ASSERT_NE(id, ns);
    for (uint64_t n = 1; n < 10; ++n) {
      EXPECT_EQ(transport->Lookup({Name(id, n)}, true, Soon())->chunks, 0);
      EXPECT_EQ(GetOne(transport.get(), {Name(id, n), 0}).status().code(), absl::StatusCode::kNotFound);
    }
  }
  ChunkKey of_another_rank = Name(ns, 1);
  of_another_rank.shard = 1;
  EXPECT_EQ(GetOne(transport.get(), {of_another_rank, 0}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(RawClient(daemon.unix_url()).Stats()["disk_reads"], 0u);
  ASSERT_EQ(Open(transport.get(), spec_), ns);
  EXPECT_EQ(Held(transport.get(), ns, 1, 10), 9u);
}

TEST_F(DaemonDisk, AnotherFormatVersionIsRefusedAndLeftAsItIs) {
  ChildDaemon daemon(Flags());
  NamespaceId ns;
  {
    auto transport = Reach(daemon);
    ns = Open(transport.get(), spec_);
    Publish(transport.get(), ns, 1, 10);
  }
  daemon.Terminate();
  const std::string segment = FileOf("segment-"), manifest = FileOf("manifest-");
  uint32_t entry_bytes = 0;  // of the manifest's first frame
  std::ifstream(folder_.path() + "/" + manifest).seekg(36).read(reinterpret_cast<char*>(&entry_bytes), 4);
  EXPECT_THAT(RefusalOfVersion(77, segment, 32),
              AllOf(HasSubstr(segment), HasSubstr("version is 77, this build reads")));
  EXPECT_THAT(RefusalOfVersion(77, manifest, 40 + entry_bytes),
              AllOf(HasSubstr(manifest), HasSubstr("version is 77, this build reads")));
  daemon.Start();
  auto transport = Reach(daemon);
  ASSERT_EQ(Open(transport.get(), spec_), ns);
  EXPECT_EQ(Held(transport.get(), ns, 1, 10), 9u);
}

}  // namespace
}  // namespace kvferry
