// The embedded store as a transport: the contract, and what is its own.
#include "client/local_transport.h"

#include <sys/wait.h>
#include <unistd.h>

#include "gmock/gmock.h"
#include "tests/support/disk_folder.h"
#include "tests/support/transport_contract.h"

namespace kvferry {
namespace {

class LocalHost : public TransportHost {
 public:
  explicit LocalHost(uint64_t memory_bytes) {
    StoreOptions options;
    options.memory_bytes = memory_bytes;
    store_ = *EmbeddedStore::Open(options);
  }
  explicit LocalHost(const SplitBudget& budget) : folder_(std::make_unique<TempFolder>()) {
    StoreOptions options;
    options.memory_bytes = budget.memory_bytes;
    options.disk_path = folder_->path();
    options.disk_bytes = budget.disk_bytes;
    options.disk_keep_free_bytes = 0;
    store_ = *EmbeddedStore::Open(options);
  }
  std::shared_ptr<Transport> Connect() override { return *NewLocalTransport(store_); }

 private:
  std::unique_ptr<TempFolder> folder_;
  std::shared_ptr<EmbeddedStore> store_;
};

INSTANTIATE_TEST_SUITE_P(
    , TransportContract,
    ::testing::Values(TransportBackend{"local", [](uint64_t bytes) { return std::make_unique<LocalHost>(bytes); }},
                      TransportBackend{"local_disk",
                                       [](uint64_t bytes) { return std::make_unique<LocalHost>(SplitBudget(bytes)); }}),
    BackendName);

// A stray write of this process into the store's memory is found at the next read.
TEST(LocalTransportTest, ADamagedBlockIsNotHandedOut) {
  LocalHost host(64 * kMiB);
  auto transport = host.Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({5000, 5000}));
  auto writer = ReserveOne(transport.get(), ns);
  ASSERT_TRUE(Put(writer.get(), 0, 1).ok());
  ASSERT_TRUE(Put(writer.get(), 1, 2).ok());
  ASSERT_TRUE(GetOne(transport.get(), {writer->key(), 0}).ok());
  writer->Layer(0)[4999] ^= 1;
  EXPECT_EQ(GetOne(transport.get(), {writer->key(), 0}).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(GetOne(transport.get(), {writer->key(), 1}).ok());
  EXPECT_EQ(transport->Stats().checksum_errors, 1u);
}

TEST(LocalTransportTest, ConnectsByUrl) {
  ConnectOptions options;
  options.memory_bytes = 32 * kMiB;
  auto transport = Connect("embedded://", options);
  ASSERT_TRUE(transport.ok()) << transport.status();
  EXPECT_EQ((*transport)->url(), "embedded://");
  EXPECT_FALSE((*transport)->fetch_copies());
  EXPECT_NE((*transport)->epoch(), 0u);
}

TEST(LocalTransportTest, ADiskOutlivesItsStore) {
  const TempFolder folder;
  ConnectOptions options;
  options.memory_bytes = 32 * kMiB;
  options.disk_path = folder.path();
  EXPECT_THAT(std::string(Connect("embedded://", options).status().message()),
              ::testing::HasSubstr("disk is \"" + folder.path() + "\" and disk_bytes is not given"));
  options.disk_bytes = 64 * kMiB;
  for (const bool first : {true, false}) {
    auto transport = Connect("embedded://", options);
    ASSERT_TRUE(transport.ok()) << transport.status();
    const NamespaceId ns = Open(transport->get(), SpecOf({5000}));
    if (first) {
      const ChunkKey live = PutChunk(transport->get(), ns, 1, 1);
      ASSERT_EQ((*transport)->Publish(live, {PrefixKey(1), {}}, Soon()), absl::OkStatus());
      ASSERT_EQ((*transport)->Flush(Soon()), absl::OkStatus());
      EXPECT_EQ(Connect("embedded://", options).status().code(), absl::StatusCode::kFailedPrecondition)
          << "another store has the folder";
    }
    const auto block = GetOne(transport->get(), {{ns, PrefixKey(1), 0, 0}, 0});
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(1, 5000));
  }
  options.disk_path.clear();
  EXPECT_THAT(std::string(Connect("embedded://", options).status().message()),
              ::testing::HasSubstr("disk_bytes is 67108864 and disk is not given"));
}

TEST(LocalTransportTest, AStoreMayGoWhileItWrites) {
  const TempFolder folder;
  for (int round = 0; round < 100; ++round) {
    StoreOptions options;
    options.memory_bytes = 4 * kMiB;
    options.disk_path = folder.path();
    options.disk_bytes = 64 * kMiB;
    options.disk_keep_free_bytes = 0;
    options.write_policy = WritePolicy::kWriteThrough;
    auto transport = *NewLocalTransport(*EmbeddedStore::Open(options));
    const NamespaceId ns = Open(transport.get(), SpecOf({100'000}));
    for (uint64_t n = 1; n <= 8; ++n) {
      const ChunkKey live = PutChunk(transport.get(), ns, 1, n);
      const absl::Status status = transport->Publish(live, {PrefixKey(n), {}}, Soon());
      EXPECT_TRUE(status.ok() || absl::IsAlreadyExists(status)) << status;
    }
  }
}

TEST(LocalTransportTest, RefusesOtherUrlsAndOptions) {
  for (const std::string url :
       {"embedded", "http://x:1", "unix://relative", "grpc://host", "grpc://:1", "grpc://h:x", ""}) {
    const absl::Status status = Connect(url, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << url;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("\"" + url + "\""));
  }
  const std::string deep = "unix:///" + std::string(200, 'x');
  EXPECT_THAT(std::string(Connect(deep, {}).status().message()), ::testing::HasSubstr("at most 107"));
  ConnectOptions none;
  none.memory_bytes = 0;
  EXPECT_EQ(Connect("embedded://", none).status().code(), absl::StatusCode::kInvalidArgument);
}

// A block is the store's own memory, once in it.
TEST(LocalTransportTest, FetchedBlocksAreViews) {
  LocalHost host(64 * kMiB);
  auto transport = host.Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({100'000}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 1, 1);
  absl::StatusOr<BlockView> a = GetOne(transport.get(), {chunk, 0}), b = GetOne(transport.get(), {chunk, 0});
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_EQ(a->pieces().size(), 1u);
  EXPECT_EQ(a->pieces()[0].data(), b->pieces()[0].data());
}

// B17: the child of a fork gets an error at once; the parent goes on.
TEST(LocalTransportTest, AForkedChildIsTold) {
  LocalHost host(64 * kMiB);
  auto transport = host.Connect();
  const NamespaceId ns = Open(transport.get(), SpecOf({1000, 1000}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 2, 1);
  auto writer = ReserveOne(transport.get(), ns);
  const pid_t child = fork();
  if (child == 0) {
    const bool told = absl::IsFailedPrecondition(GetOne(transport.get(), {chunk, 0}).status()) &&
                      absl::IsFailedPrecondition(transport->Lookup({chunk}, false, Soon()).status());
    writer = nullptr;
    transport = nullptr;
    _exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(GetOne(transport.get(), {chunk, 0}).ok());
  EXPECT_TRUE(Put(writer.get(), 0, 1).ok());
}

}  // namespace
}  // namespace kvferry
