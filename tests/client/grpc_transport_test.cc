// The gRPC transport against a real kvferryd: the contract over both kinds of sockets, and what is its own.
#include "client/grpc_transport.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "gmock/gmock.h"
#include "service/server.h"
#include "service/service_context.h"
#include "storage/base/checksum.h"
#include "tests/support/child_daemon.h"
#include "tests/support/disk_folder.h"
#include "tests/support/transport_contract.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;

std::shared_ptr<Transport> MustConnect(const std::string& url) {
  absl::StatusOr<std::shared_ptr<Transport>> transport = Connect(url, {});
  if (!transport.ok()) {
    fprintf(stderr, "%s\n", transport.status().ToString().c_str());
    abort();
  }
  return *transport;
}

class DaemonHost : public TransportHost {
 public:
  DaemonHost(uint64_t memory_bytes, bool tcp)
      : daemon_({"--memory=" + std::to_string(memory_bytes)}), url_(tcp ? daemon_.tcp_url() : daemon_.unix_url()) {}
  explicit DaemonHost(const SplitBudget& budget)
      : daemon_({"--memory=" + std::to_string(budget.memory_bytes), "--disk=" + folder_.path(),
                 "--disk-bytes=" + std::to_string(budget.disk_bytes), "--disk-keep-free=0"}),
        url_(daemon_.unix_url()) {}
  std::shared_ptr<Transport> Connect() override { return MustConnect(url_); }

 private:
  const TempFolder folder_;
  ChildDaemon daemon_;
  const std::string url_;
};

TransportBackend Backend(const std::string& name, bool tcp) {
  return {name, [tcp](uint64_t memory) { return std::make_unique<DaemonHost>(memory, tcp); }};
}

INSTANTIATE_TEST_SUITE_P(, TransportContract,
                         ::testing::Values(Backend("unix_socket", false), Backend("tcp", true),
                                           TransportBackend{"disk",
                                                            [](uint64_t bytes) {
                                                              return std::make_unique<DaemonHost>(SplitBudget(bytes));
                                                            }}),
                         BackendName);

TEST(GrpcTransportTest, NobodyThereIsUnavailableAndNamed) {
  ConnectOptions options;
  options.connect_timeout = absl::Milliseconds(300);
  const std::string url = "unix:///nonexistent/kvferry.sock";
  const absl::Status status = Connect(url, options).status();
  EXPECT_EQ(status.code(), Code::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(url));
  EXPECT_THAT(std::string(status.message()), HasSubstr("kvferryd"));
}

// B20: what arrives other than it was packed is refused by the store.
TEST(GrpcTransportTest, APutWithAWrongChecksumIsNotStored) {
  ChildDaemon daemon({"--memory=64MiB"});
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({1000, 1000}));
  auto writer = ReserveOne(transport.get(), ns);
  const MutableByteView slot = writer->Layer(0);
  std::fill(slot.begin(), slot.end(), 1);
  std::atomic<int> code{-1};
  writer->Commit(0, BlockChecksum(slot) + 1, [&](absl::Status status) { code = static_cast<int>(status.code()); });
  while (code < 0) std::this_thread::yield();
  EXPECT_EQ(code, static_cast<int>(Code::kDataLoss));
  EXPECT_EQ(GetOne(transport.get(), {writer->key(), 0}).status().code(), Code::kNotFound);
  EXPECT_EQ(transport->Stats().puts_failed, 1u);
}

TEST(GrpcTransportTest, DamagedBlocksAreNeverHandedOut) {
  ServerOptions options;
  options.store.memory_bytes = 64 * kMiB;
  ListenAddress address;
  address.unix_path = testing::TempDir() + "/kvferry-" + std::to_string(getpid()) + ".sock";
  options.listen = {address};
  auto server = Server::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  auto transport = MustConnect((*server)->Addresses()[0]);
  const NamespaceSpec spec = SpecOf({100'000});
  const NamespaceId ns = Open(transport.get(), spec);
  std::vector<BlockKey> keys;
  for (uint64_t n = 1; n <= 3; ++n) {
    const ChunkKey live = PutChunk(transport.get(), ns, 1, n);
    ASSERT_TRUE(transport->Publish(live, {PrefixKey(n), {}}, Soon()).ok());
    keys.push_back({{ns, PrefixKey(n), 0, 0}, 0});
  }
  // A bit falls over in the memory of the store.
  Store* const store = (*server)->store();
  absl::StatusOr<SessionId> session = store->OpenSession(kDefaultTenant);
  ASSERT_TRUE(session.ok());
  store->Get(*session, keys[1], [](absl::StatusOr<BlockView> block) {
    ASSERT_TRUE(block.ok()) << block.status();
    const_cast<uint8_t*>(block->pieces()[0].data())[50'000] ^= 1;
  });
  auto stream = transport->Fetch(keys, Soon());
  EXPECT_TRUE(stream->Next().ok());
  const absl::Status status = stream->Next().status();
  EXPECT_EQ(status.code(), Code::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(transport->url()));
  EXPECT_EQ(stream->Next().status().code(), Code::kDataLoss) << "and again";
  EXPECT_EQ(transport->Stats().checksum_errors, 1u);
  EXPECT_TRUE(GetOne(transport.get(), keys[2]).ok());
}

TEST(GrpcTransportTest, ASecondProcessReadsWhatThisOnePublished) {
  ChildDaemon daemon({"--memory=64MiB"});
  const NamespaceSpec spec = SpecOf({30'000});
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), spec);
  const ChunkKey live = PutChunk(transport.get(), ns, 1, 4);
  ASSERT_TRUE(transport->Publish(live, {PrefixKey(1), {}}, Soon()).ok());
  // `probe_client read URL`: see probe_client.cc.
  EXPECT_EQ(system((std::string(PROBE_CLIENT) + " read " + daemon.tcp_url()).c_str()), 0);
}

// B17: the child of a fork gets an error at once, may embed a store, and gives nothing back; the parent goes on.
TEST(GrpcTransportTest, AForkedChildIsTold) {
  ChildDaemon daemon({"--memory=64MiB"});
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({1000, 1000}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 2, 1);
  auto writer = ReserveOne(transport.get(), ns);
  auto stream = transport->Fetch({{chunk, 0}}, Soon());
  const pid_t child = fork();
  if (child == 0) {
    bool told = absl::IsFailedPrecondition(stream->Next().status());
    told = told && absl::IsFailedPrecondition(GetOne(transport.get(), {chunk, 0}).status());
    told = told && absl::IsFailedPrecondition(transport->Lookup({chunk}, false, Soon()).status());
    told = told && absl::IsFailedPrecondition(transport->Flush(Soon()));
    told = told && absl::IsFailedPrecondition(Connect(daemon.unix_url(), {}).status());
    told = told && Connect("embedded://", {}).ok();
    transport->Release({chunk}, transport->epoch());
    transport->Close();
    writer = nullptr;
    stream = nullptr;
    transport = nullptr;
    _exit(told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(stream->Next().ok());
  EXPECT_TRUE(GetOne(transport.get(), {chunk, 1}).ok());
  EXPECT_TRUE(Put(writer.get(), 0, 1).ok());
}

TEST(GrpcTransportTest, CloseEndsEverythingForThoseWhoStillHoldIt) {
  ChildDaemon daemon({"--memory=64MiB"});
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({1 << 20}));
  ReserveRequest all;
  all.ns = ns;
  all.count = 55;
  ASSERT_TRUE(transport->Reserve(all, Soon()).ok());
  auto held = transport->Reserve(all, Soon());
  ASSERT_TRUE(held.ok()) << held.status();
  std::thread waiting([&] {  // for memory that will not come
    EXPECT_EQ(transport->Reserve(all, Soon()).status().code(), Code::kUnavailable);
  });
  while (true) {  // until its call has reached the store
    ReserveRequest one = all;
    one.count = 1;
    if (!transport->Reserve(one, absl::Now()).ok()) break;
  }
  transport->Close();
  waiting.join();
  EXPECT_EQ(transport->Flush(Soon()).code(), Code::kUnavailable);
  transport->Close();
}

}  // namespace
}  // namespace kvferry
