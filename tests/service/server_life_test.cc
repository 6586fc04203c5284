// Clients that come, go, hang and die, and a service that stops.
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/server.h"
#include "tests/base/specs.h"
#include "tests/service/block_bytes.h"
#include "tests/service/raw_caller.h"
#include "tests/service/raw_client.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

class ServerLifeTest : public testing::Test {
 protected:
  // Plain clients send no heartbeats: unless a test is about silence, none is asked for.
  static ServerOptions Patient() {
    ServerOptions options;
    options.heartbeat = absl::Minutes(10);
    return options;
  }

  void Start(ServerOptions options = Patient()) {
    options.store.memory_bytes = 256 * kMiB;
    path_ = absl::StrCat(testing::TempDir(), "/kvf_life_", getpid(), ".sock");
    options.listen = {*ParseListenAddress("unix://" + path_)};
    auto started = Server::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    url_ = server_->Addresses()[0];
  }

  static size_t OpenFiles() {
    DIR* dir = opendir("/proc/self/fd");
    size_t n = 0;
    while (readdir(dir) != nullptr) ++n;
    closedir(dir);
    return n;
  }

  std::unique_ptr<Server> server_;
  std::string path_, url_;
};

// B84: idle streams and a slow upload; new calls are refused, streams end with UNAVAILABLE, Shutdown returns.
TEST_F(ServerLifeTest, ShutdownEndsEveryStream) {
  Start();
  std::vector<std::unique_ptr<RawClient>> idle;
  for (int i = 0; i < 10; ++i) {
    idle.push_back(std::make_unique<RawClient>(url_));
    ASSERT_TRUE(idle.back()->Hello().ok());
  }
  RawClient uploader(url_);
  ASSERT_TRUE(uploader.Hello().ok());
  const NamespaceId ns = uploader.Open(SmallSpec(1, 4, 128, 1024));
  std::vector<ChunkKey> keys;
  ASSERT_TRUE(uploader.Reserve(ns, 1, &keys).ok());
  const auto block = BlockBytes(4 * kMiB, 1);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto upload = uploader.stub->Put(&context);
  ASSERT_TRUE(upload->Write(uploader.Piece({keys[0], 0}, block, 0, kMiB)));
  ASSERT_TRUE(Eventually([&] { return server_->stats().put_bytes_copied == kMiB; }));

  server_->Drain();
  for (const auto& client : idle) {
    v1::SessionReply reply;
    ASSERT_TRUE(client->Hear(&reply));
    EXPECT_TRUE(reply.has_drain());
  }
  RawClient late(url_);
  EXPECT_EQ(late.Hello().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(uploader.Reserve(ns, 1, &keys).error_code(), grpc::StatusCode::UNAVAILABLE);

  std::thread stopping([&] { server_->Shutdown(absl::ZeroDuration()); });
  v1::PutReply reply;
  EXPECT_FALSE(upload->Read(&reply));
  EXPECT_EQ(upload->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  for (const auto& client : idle) EXPECT_EQ(client->WaitForEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  stopping.join();
  EXPECT_NE(access(path_.c_str(), F_OK), 0);
}

TEST_F(ServerLifeTest, ACallUnderWayMayFinishWithinTheGrace) {
  Start();
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  std::vector<ChunkKey> keys;
  ASSERT_TRUE(client.Reserve(client.Open(SmallSpec(1, 2, 128, 1024)), 1, &keys).ok());
  const auto block = BlockBytes(2 * kMiB, 1);
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto upload = client.stub->Put(&context);
  ASSERT_TRUE(upload->Write(client.Piece({keys[0], 0}, block, 0, kMiB)));
  ASSERT_TRUE(Eventually([&] { return server_->stats().put_bytes_copied == kMiB; }));
  std::thread stopping([&] { server_->Shutdown(absl::Hours(1)); });
  v1::SessionReply notice;
  ASSERT_TRUE(client.Hear(&notice));
  EXPECT_TRUE(notice.has_drain());
  ASSERT_TRUE(upload->Write(client.Piece({keys[0], 0}, block, kMiB, kMiB)));
  v1::PutReply reply;
  ASSERT_TRUE(upload->Read(&reply));
  EXPECT_EQ(reply.acks(0).code(), 0u) << reply.acks(0).message();
  // Nothing is under way any more: the service does not wait for the rest of the grace.
  EXPECT_FALSE(upload->Read(&reply));
  EXPECT_EQ(upload->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stopping.join();
}

// B84: a stream of puts that stays open between two blocks, as clients keep one, is no call under way.
TEST_F(ServerLifeTest, AnIdleUploadDoesNotHoldUpTheDrain) {
  Start();
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  std::vector<ChunkKey> keys;
  ASSERT_TRUE(client.Reserve(client.Open(SmallSpec(2, 1, 128, 1024)), 1, &keys).ok());
  grpc::ClientContext context, other;
  SetTestDeadline(&context);
  SetTestDeadline(&other);
  const auto upload = client.stub->Put(&context), unused = client.stub->Put(&other);
  ASSERT_TRUE(upload->Write(client.Piece({keys[0], 0}, BlockBytes(kMiB, 1), 0, kMiB)));
  v1::PutReply reply;
  ASSERT_TRUE(upload->Read(&reply));
  EXPECT_EQ(reply.acks(0).code(), 0u) << reply.acks(0).message();
  ASSERT_TRUE(Eventually([&] { return server_->stats().put_streams == 2; }));
  std::thread stopping([&] { server_->Shutdown(absl::Hours(1)); });
  EXPECT_FALSE(upload->Read(&reply));
  EXPECT_EQ(upload->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(unused->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  stopping.join();
}

// B49, scaled down: clients that shake hands and leave, some cut half way, some speaking no gRPC at all.
TEST_F(ServerLifeTest, ComingAndGoingLeavesNothing) {
  ServerOptions options = Patient();
  options.store.reservation_grace = absl::Milliseconds(50);
  Start(options);
  RawClient steady(url_);
  ASSERT_TRUE(steady.Hello().ok());
  const auto cycle = [&](int i) {
    if (i % 4 == 3) {
      const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
      EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
      EXPECT_EQ(write(fd, "PRI * HT", 8), 8);
      close(fd);
      return;
    }
    RawClient client(url_);
    EXPECT_TRUE(client.Hello().ok());
    if (i % 4 == 0) {
      EXPECT_TRUE(client.Bye().ok());
    }
  };
  for (int i = 0; i < 20; ++i) cycle(i);  // what is allocated once
  const auto settled = [&] { return server_->store()->Stats().sessions == 1 && server_->stats().session_streams == 1; };
  ASSERT_TRUE(Eventually(settled));
  const size_t files = OpenFiles();
  for (int i = 0; i < 300; ++i) cycle(i);
  EXPECT_TRUE(Eventually(settled));
  EXPECT_TRUE(Eventually([&] { return OpenFiles() <= files + 5; })) << OpenFiles() << " " << files;
  v1::SessionRequest heartbeat;
  heartbeat.mutable_heartbeat();
  EXPECT_TRUE(steady.Say(heartbeat));
}

// B48, scaled down: a client dies with 1,000 leases and reservations; others are served, all comes back.
TEST_F(ServerLifeTest, ADeadClientGivesEverythingBack) {
  ServerOptions options = Patient();
  options.store.reservation_grace = absl::Milliseconds(50);
  options.store.live_grace = absl::Milliseconds(200);
  Start(options);
  RawClient other(url_);
  ASSERT_TRUE(other.Hello().ok());
  const NamespaceSpec spec = SmallSpec();
  const auto block = BlockBytes(spec.BlockBytes(0, 0), 1);
  {
    RawClient client(url_);
    ASSERT_TRUE(client.Hello().ok());
    const NamespaceId ns = client.Open(spec);
    std::vector<ChunkKey> keys;
    ASSERT_TRUE(client.Reserve(ns, 1000, &keys).ok());
    std::vector<std::pair<BlockKey, std::vector<uint8_t>>> blocks;
    for (int i = 0; i < 500; ++i) {
      blocks.push_back({{keys[i], 0}, block});
      blocks.push_back({{keys[i], 1}, block});
    }
    std::map<std::string, v1::PutReply::Ack> acks;
    ASSERT_TRUE(client.Put(blocks, &acks).ok());
    EXPECT_EQ(acks.size(), 1000u);
    EXPECT_EQ(other.Stats()["chunks_live"], 500u);
    EXPECT_EQ(other.Stats()["chunks_reserved"], 500u);
  }
  EXPECT_TRUE(Eventually([&] { return other.Stats()["chunks_live"] == 0; }));
  EXPECT_EQ(other.Stats()["chunks_reserved"], 0u);
  EXPECT_EQ(other.Stats()["sessions"], 1u);
}

// A reservation that waits for memory answers its dead client's service at once and leaks nothing.
TEST_F(ServerLifeTest, AnAbandonedReserveGivesBackWhatItGets) {
  Start();
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  const NamespaceId ns = client.Open(SmallSpec(1, 16, 128, 1024));  // 16 MiB a chunk
  std::vector<ChunkKey> keys;
  while (client.Reserve(ns, 1, &keys).ok()) continue;  // full
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  v1::ReserveRequest request;
  request.set_session(client.welcome.session());
  ToProto(ns, request.mutable_ns());
  request.set_count(1);
  request.set_wait_ms(3'600'000);
  v1::ReserveReply reply;
  const auto code = client.stub->Reserve(&context, request, &reply).error_code();
  EXPECT_TRUE(code == grpc::StatusCode::DEADLINE_EXCEEDED || code == grpc::StatusCode::RESOURCE_EXHAUSTED) << code;
  v1::SessionRequest release;
  release.mutable_release()->set_seq(1);
  for (const ChunkKey& key : keys) ToProto(key, release.mutable_release()->add_keys());
  ASSERT_TRUE(client.Say(release));
  EXPECT_TRUE(Eventually([&] { return server_->store()->Stats().chunks_reserved == 0; }));
}

TEST_F(ServerLifeTest, SilentClientsAreSuspendedAndMayGoOn) {
  ServerOptions options;
  options.heartbeat = absl::Milliseconds(20);
  Start(options);
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  const NamespaceId ns = client.Open(SmallSpec());
  ASSERT_TRUE(Eventually([&] { return server_->stats().sessions_silent == 1; }));
  v1::SessionRequest heartbeat;
  heartbeat.mutable_heartbeat();
  ASSERT_TRUE(client.Say(heartbeat));
  v1::SessionReply reply;
  ASSERT_TRUE(client.Hear(&reply));
  EXPECT_TRUE(reply.has_heartbeat());
  std::vector<ChunkKey> keys;
  EXPECT_TRUE(client.Reserve(ns, 1, &keys).ok());
}

TEST_F(ServerLifeTest, ServesHealthAndReflection) {
  Start();
  RawCaller caller(DialUrl(url_));  // their stubs we do not generate
  EXPECT_EQ(caller.CallUnary("/grpc.health.v1.Health/Check", "").replies, "\x08\x01");  // SERVING
  const std::string services =
      caller.CallUnary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "\x3a\x01*").replies;
  EXPECT_THAT(services, HasSubstr("kvferry.v1.CacheStore"));
  EXPECT_THAT(services, HasSubstr("kvferry.v1.CacheAdmin"));
}

}  // namespace
}  // namespace kvferry
