// What the gRPC transport does when kvferryd is killed, stopped and started again. Every wait here is for a state, and
// every outcome but a wrong byte or a hang is allowed while the store is away.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "client/transport.h"
#include "gmock/gmock.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "kvferry/v1/admin.grpc.pb.h"
#include "storage/base/checksum.h"
#include "storage/base/mutex.h"
#include "tests/support/child_daemon.h"
#include "tests/support/put_and_get.h"

extern char** environ;

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using Code = absl::StatusCode;
constexpr uint32_t kBlock = 1 << 20;

std::vector<std::string> Flags() {
  return {"--memory=256MiB", "--heartbeat=1s", "--live-grace=5m", "--reservation-grace=5m"};
}

std::shared_ptr<Transport> MustConnect(const std::string& url, absl::Duration heartbeat = absl::Seconds(1)) {
  ConnectOptions options;
  options.heartbeat = heartbeat;
  absl::StatusOr<std::shared_ptr<Transport>> transport = Connect(url, options);
  if (!transport.ok()) {
    fprintf(stderr, "%s\n", transport.status().ToString().c_str());
    abort();
  }
  return *transport;
}

uint64_t Stat(const ChildDaemon& daemon, const std::string& name) {
  auto stub = v1::CacheAdmin::NewStub(
      grpc::CreateChannel(daemon.tcp_url().substr(strlen("grpc://")), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  v1::StatsReply reply;
  EXPECT_TRUE(stub->Stats(&context, {}, &reply).ok());
  for (const auto& value : reply.values()) {
    if (value.name() == name) return value.value();
  }
  ADD_FAILURE() << "no figure " << name;
  return 0;
}

template <typename Condition>
void Await(const char* what, Condition condition) {
  const absl::Time deadline = Soon();
  while (!condition()) {
    ASSERT_LT(absl::Now(), deadline) << what;
    absl::SleepFor(absl::Milliseconds(5));
  }
}

// Commits without waiting; counts how each ended.
struct Commits {
  std::atomic<int> stored{0}, unavailable{0}, other{0};
  int ended() const { return stored + unavailable + other; }

  void Start(ChunkWriter* writer, int layer, uint64_t seed) {
    const MutableByteView slot = writer->Layer(layer);
    const std::vector<uint8_t> bytes = Pattern(seed, slot.size());
    std::copy(bytes.begin(), bytes.end(), slot.begin());
    writer->Commit(layer, BlockChecksum(slot), [this](absl::Status status) {
      ++(status.ok() ? stored : absl::IsUnavailable(status) ? unavailable : other);
    });
  }
};

// B18: killed in the middle of puts and gets, ten times; each time the same transport works again, with a new epoch.
TEST(GrpcFaultsTest, KilledAndStartedAgainTenTimes) {
  ChildDaemon daemon(Flags());
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf(std::vector<uint32_t>(8, kBlock)));
  ReserveRequest four;
  four.ns = ns;
  four.count = 4;
  for (int round = 0; round < 10; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const uint64_t epoch = transport->epoch();
    const ChunkKey chunk = PutChunk(transport.get(), ns, 8, 1);
    auto writers = transport->Reserve(four, Soon());
    ASSERT_TRUE(writers.ok()) << writers.status();
    std::vector<BlockKey> keys;
    for (int i = 0; i < 64; ++i) keys.push_back({chunk, static_cast<uint16_t>(i % 8)});
    auto stream = transport->Fetch(keys, Soon());
    Commits commits;
    for (int i = 0; i < 32; ++i) commits.Start((*writers)[static_cast<size_t>(i / 8)].get(), i % 8, 7);
    ASSERT_TRUE(stream->Next().ok());
    daemon.Kill();

    // The get ends, with no wrong byte.
    absl::Status end;
    for (size_t i = 1; end.ok(); ++i) {
      absl::StatusOr<BlockView> block = stream->Next();
      end = block.status();
      if (block.ok()) {
        ASSERT_EQ(Bytes(*block), Pattern(1 + i % 8, kBlock));
      }
    }
    EXPECT_TRUE(absl::IsUnavailable(end) || absl::IsOutOfRange(end)) << end;
    // So does every put.
    Await("the end of the puts", [&] { return commits.ended() == 32; });
    EXPECT_EQ(commits.other, 0);
    // And whatever begins now, at once.
    const absl::Status status = transport->Lookup({chunk}, false, Soon()).status();
    EXPECT_EQ(status.code(), Code::kUnavailable) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(daemon.unix_url()));

    daemon.Start();
    const ChunkKey again = PutChunk(transport.get(), ns, 8, 100);  // the namespace is known there
    EXPECT_NE(transport->epoch(), epoch);
    absl::StatusOr<BlockView> block = GetOne(transport.get(), {again, 3});
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_EQ(Bytes(*block), Pattern(103, kBlock));
    EXPECT_EQ(GetOne(transport.get(), {chunk, 0}).status().code(), Code::kNotFound);
    EXPECT_FALSE(Put((*writers)[0].get(), 0, 1).ok()) << "the chunk is gone";
    transport->Release({again}, transport->epoch());
  }
  EXPECT_GE(transport->Stats().reconnects, 10u);
  EXPECT_EQ(transport->Stats().checksum_errors, 0u);
  EXPECT_EQ(transport->Stats().bytes_in_flight, 0u);
}

TEST(GrpcFaultsTest, AWriterOfALostSessionFailsAtOnce) {
  ChildDaemon daemon(Flags());
  auto transport = MustConnect(daemon.tcp_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({kBlock, kBlock}));
  auto writer = ReserveOne(transport.get(), ns);
  const uint64_t epoch = transport->epoch();
  daemon.Kill();
  daemon.Start();
  Await("a new session", [&] { return transport->epoch() != epoch; });
  EXPECT_EQ(Put(writer.get(), 0, 1).code(), Code::kUnavailable);
}

TEST(GrpcFaultsTest, ADrainedStoreIsLeftAndFoundAgain) {
  ChildDaemon daemon(Flags());
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({kBlock}));
  PutChunk(transport.get(), ns, 1, 1);
  daemon.Terminate();
  EXPECT_EQ(transport->Flush(Soon()).code(), Code::kUnavailable);
  daemon.Start();
  PutChunk(transport.get(), ns, 1, 1);
}

// A store that does not answer costs the deadline and no more, and a second client nothing.
TEST(GrpcFaultsTest, AStoppedStoreIsADeadline) {
  ChildDaemon daemon({"--memory=256MiB", "--heartbeat=1h"});  // silence is not noticed here
  auto transport = MustConnect(daemon.unix_url(), absl::Hours(1));
  const NamespaceId ns = Open(transport.get(), SpecOf({kBlock}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 1, 1);
  ReserveRequest one, eight;
  one.ns = eight.ns = ns;
  eight.count = 8;
  auto writers = transport->Reserve(eight, Soon());
  ASSERT_TRUE(writers.ok()) << writers.status();
  daemon.Stop();
  Commits commits;  // more than a socket takes: whatever else is sent waits behind them
  for (const auto& writer : *writers) commits.Start(writer.get(), 0, 1);
  const auto deadline = [] { return absl::Now() + absl::Milliseconds(200); };
  EXPECT_EQ(transport->Lookup({chunk}, false, deadline()).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(transport->Reserve(one, deadline()).status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(transport->Fetch({{chunk, 0}}, deadline())->Next().status().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(transport->Flush(deadline()).code(), Code::kDeadlineExceeded);
  daemon.Continue();
  EXPECT_TRUE(GetOne(transport.get(), {chunk, 0}).ok());
  Await("the end of the puts", [&] { return commits.ended() == 8; });
  EXPECT_EQ(commits.stored, 8);
}

// What the store hands out after the caller has left is given back.
TEST(GrpcFaultsTest, LateAnswersLeaveNothingBehind) {
  ChildDaemon daemon({"--memory=256MiB", "--heartbeat=60s"});
  auto transport = MustConnect(daemon.unix_url(), absl::Minutes(1));
  const NamespaceId ns = Open(transport.get(), SpecOf({kBlock}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 1, 1);
  const PrefixName name{{5, 5}, {}};
  ASSERT_TRUE(transport->Publish(chunk, name, Soon()).ok());
  ReserveRequest eight;
  eight.ns = ns;
  eight.count = 8;
  daemon.Stop();
  const auto deadline = [] { return absl::Now() + absl::Milliseconds(100); };
  EXPECT_EQ(transport->Lookup({{ns, name.prefix_key, 0, 0}}, /*lease=*/true, deadline()).status().code(),
            Code::kDeadlineExceeded);
  EXPECT_EQ(transport->Reserve(eight, deadline()).status().code(), Code::kDeadlineExceeded);
  daemon.Continue();
  Await("the late look-up", [&] { return Stat(daemon, "lookup_chunks_hit") == 1; });
  Await("the end of its lease", [&] { return Stat(daemon, "chunks_leased") == 0; });
  Await("the late reservation", [&] { return ReserveOne(transport.get(), ns)->key().id[1] > 8; });
  Await("its end", [&] { return Stat(daemon, "chunks_reserved") == 0; });
}

TEST(GrpcFaultsTest, ATransportToAStoppedStoreCanBeDestroyed) {
  ChildDaemon daemon(Flags());
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({kBlock}));
  auto writer = ReserveOne(transport.get(), ns);
  daemon.Stop();
  Commits commits;
  commits.Start(writer.get(), 0, 1);
  auto stream = transport->Fetch({{writer->key(), 0}}, absl::InfiniteFuture());
  transport = nullptr;
  Await("the end of the put", [&] { return commits.ended() == 1; });
  EXPECT_EQ(stream->Next().status().code(), Code::kUnavailable);
}

// A store that is silent for three heartbeats is given up: what was in flight fails. When it is heard again the session
// goes on and nothing that was acknowledged is lost.
TEST(GrpcFaultsTest, ASilentStoreIsLeftAndTheSessionResumed) {
  ChildDaemon daemon(Flags());
  auto transport = MustConnect(daemon.unix_url());
  const NamespaceId ns = Open(transport.get(), SpecOf({kBlock, kBlock}));
  const ChunkKey chunk = PutChunk(transport.get(), ns, 2, 1);
  auto writer = ReserveOne(transport.get(), ns);
  const uint64_t epoch = transport->epoch();
  daemon.Stop();
  Commits commits;
  commits.Start(writer.get(), 0, 9);
  auto stream = transport->Fetch({{chunk, 0}, {chunk, 1}}, absl::InfiniteFuture());
  Await("the end of the put", [&] { return commits.ended() == 1; });
  EXPECT_EQ(commits.unavailable, 1);
  daemon.Continue();
  // The get goes on over the next connection.
  absl::StatusOr<BlockView> block = stream->Next();
  if (!block.ok()) {
    EXPECT_TRUE(absl::IsUnavailable(block.status())) << block.status();
    block = GetOne(transport.get(), {chunk, 0});
  }
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(Bytes(*block), Pattern(1, kBlock));
  EXPECT_EQ(transport->epoch(), epoch);
  EXPECT_GE(transport->Stats().reconnects, 1u);
}

// A client that is stopped for longer than the heartbeat limit, and than the deadline of what it was doing, loses
// nothing.
TEST(GrpcFaultsTest, AStoppedClientLosesNothing) {
  ChildDaemon daemon(Flags());
  const std::string url = daemon.unix_url();
  std::string program = PROBE_CLIENT, what = "stop", where = url;
  char* argv[] = {program.data(), what.data(), where.data(), nullptr};
  pid_t client = 0;
  ASSERT_EQ(posix_spawn(&client, PROBE_CLIENT, nullptr, nullptr, argv, environ), 0);
  int status = 0;
  ASSERT_EQ(waitpid(client, &status, WUNTRACED), client);
  ASSERT_TRUE(WIFSTOPPED(status)) << status;
  const absl::Time stopped = absl::Now();
  Await("the store's notice", [&] { return Stat(daemon, "sessions_silent") >= 1; });
  Await("the deadline of the client's get", [&] { return absl::Now() > stopped + absl::Seconds(6); });
  ASSERT_EQ(kill(client, SIGCONT), 0);
  ASSERT_EQ(waitpid(client, &status, 0), client);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST(GrpcFaultsTest, ConnectWaitsForAStoreThatStartsLater) {
  ChildDaemon daemon(Flags());
  const std::string url = daemon.unix_url();
  daemon.Kill();
  std::thread later([&] {
    absl::SleepFor(absl::Milliseconds(300));
    daemon.Start();
  });
  auto transport = MustConnect(url);
  later.join();
  EXPECT_TRUE(transport->Flush(Soon()).ok());
}

}  // namespace
}  // namespace kvferry
