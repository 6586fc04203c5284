// kvferryd and kvferryctl as processes.
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/specs.h"
#include "tests/service/block_bytes.h"
#include "tests/service/process.h"
#include "tests/service/raw_caller.h"
#include "tests/service/raw_client.h"
#include "tests/support/disk_folder.h"

namespace kvferry {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class BinariesTest : public testing::Test {
 protected:
  BinariesTest() : path_(absl::StrCat(testing::TempDir(), "/kvf_bin_", getpid(), ".sock")), url_("unix://" + path_) {}
  ~BinariesTest() override {
    std::filesystem::remove(path_);
    std::filesystem::remove(path_ + ".lock");
  }

  std::unique_ptr<Process> Daemon(const std::vector<std::string>& more = {}) {
    std::vector<std::string> command = {KVFERRYD, "--listen=" + url_, "--memory=128MiB", "--heartbeat=10m"};
    command.insert(command.end(), more.begin(), more.end());
    return std::make_unique<Process>(command);
  }
  std::unique_ptr<Process> ReadyDaemon(const std::vector<std::string>& more = {}) {
    auto daemon = Daemon(more);
    EXPECT_EQ(daemon->ReadLine(), absl::StrCat("kvferryd ready on ", url_, "\n"));
    return daemon;
  }
  void ExpectRefused(Process* daemon, const std::string& why) {
    const std::string ready = daemon->ReadLine();
    EXPECT_EQ(ready, "") << "it serves";
    if (!ready.empty()) daemon->Signal(SIGKILL);
    EXPECT_EQ(daemon->Wait(), 1);
    EXPECT_THAT(daemon->err, AllOf(HasSubstr("cannot listen on " + path_ + ": "), HasSubstr(why)));
  }
  void ExpectServes() {
    RawClient client(url_);
    ASSERT_TRUE(client.Hello().ok());
    EXPECT_TRUE(client.Bye().ok());
  }
  int Ctl(std::vector<std::string> arguments, std::string* out, std::string* err) {
    arguments.insert(arguments.begin(), KVFERRYCTL);
    Process ctl(arguments);
    const int status = ctl.Wait();
    *out = ctl.out;
    *err = ctl.err;
    return status;
  }

  const std::string path_, url_;
};

TEST_F(BinariesTest, ServesUntilSigterm) {
  const auto daemon = ReadyDaemon();
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  daemon->Signal(SIGTERM);
  EXPECT_EQ(client.WaitForEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(daemon->Wait(), 0) << daemon->err;
  EXPECT_THAT(daemon->err, AllOf(HasSubstr("serves on " + url_), HasSubstr("128 MiB"),
                                 HasSubstr("drains after SIGTERM"), HasSubstr("stopped")));
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(std::filesystem::exists(path_ + ".lock"));
}

// B84: a slow upload holds up the drain for its grace; a second signal does not wait for it.
TEST_F(BinariesTest, ASecondSignalStopsAtOnce) {
  const auto daemon = ReadyDaemon({"--drain-grace=10m"});
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  const NamespaceId ns = client.Open(SmallSpec(1, 2, 128, 1024));
  std::vector<ChunkKey> keys;
  ASSERT_TRUE(client.Reserve(ns, 1, &keys).ok());
  grpc::ClientContext context;
  SetTestDeadline(&context);
  const auto upload = client.stub->Put(&context);
  ASSERT_TRUE(upload->Write(client.Piece({keys[0], 0}, BlockBytes(2 * kMiB, 1), 0, kMiB)));
  ASSERT_TRUE(Eventually([&] { return client.Stats()["put_bytes_copied"] == kMiB; }));
  daemon->Signal(SIGTERM);
  v1::SessionReply notice;
  ASSERT_TRUE(client.Hear(&notice));
  EXPECT_TRUE(notice.has_drain());
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 3);
  EXPECT_FALSE(upload->Finish().ok());
  // What it left behind is no obstacle.
  EXPECT_TRUE(std::filesystem::exists(path_));
  const auto next = ReadyDaemon();
  next->Signal(SIGINT);
  EXPECT_EQ(next->Wait(), 0);
}

TEST_F(BinariesTest, StartsWhereAKilledOneWas) {
  uint64_t boot;
  {
    const auto daemon = ReadyDaemon();
    RawClient client(url_);
    ASSERT_TRUE(client.Hello().ok());
    boot = client.welcome.boot();
    daemon->Signal(SIGKILL);
    EXPECT_EQ(daemon->Wait(), -SIGKILL);
  }
  EXPECT_TRUE(std::filesystem::exists(path_));
  const auto daemon = ReadyDaemon();
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  EXPECT_NE(client.welcome.boot(), boot);
}

TEST_F(BinariesTest, ASecondOneOnThePathIsRefused) {
  const auto daemon = ReadyDaemon();
  const auto second = Daemon();
  ExpectRefused(second.get(), "another kvferryd serves there");
  ExpectServes();  // the first one goes on
}

// Whatever the first one is doing: it hangs, somebody has removed its lock file, it drains.
TEST_F(BinariesTest, ASecondOneIsRefusedAtBadMomentsToo) {
  const auto daemon = ReadyDaemon({"--drain-grace=10m"});
  daemon->Signal(SIGSTOP);
  ExpectRefused(Daemon().get(), "another kvferryd serves there");
  std::filesystem::remove(path_ + ".lock");
  ExpectRefused(Daemon().get(), "a live service answers there");
  daemon->Signal(SIGCONT);
  ExpectServes();
  ExpectRefused(Daemon().get(), "a live service answers there");

  {
    RawClient client(url_);
    ASSERT_TRUE(client.Hello().ok());
    std::vector<ChunkKey> keys;
    ASSERT_TRUE(client.Reserve(client.Open(SmallSpec(1, 2, 128, 1024)), 1, &keys).ok());
    const auto block = BlockBytes(2 * kMiB, 1);
    grpc::ClientContext context;
    SetTestDeadline(&context);
    const auto upload = client.stub->Put(&context);
    ASSERT_TRUE(upload->Write(client.Piece({keys[0], 0}, block, 0, kMiB)));
    ASSERT_TRUE(Eventually([&] { return client.Stats()["put_bytes_copied"] == kMiB; }));
    daemon->Signal(SIGTERM);
    v1::SessionReply notice;
    ASSERT_TRUE(client.Hear(&notice));
    EXPECT_TRUE(notice.has_drain());
    ExpectRefused(Daemon().get(), "a live service answers there");
    ASSERT_TRUE(upload->Write(client.Piece({keys[0], 0}, block, kMiB, kMiB)));
    v1::PutReply reply;
    ASSERT_TRUE(upload->Read(&reply));
    EXPECT_EQ(reply.acks(0).code(), 0u) << reply.acks(0).message();
    EXPECT_EQ(client.WaitForEnd().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_EQ(daemon->Wait(), 0) << daemon->err;
}

// Of those who start at one time one serves and the others go away, on a fresh path and on one that was left behind.
TEST_F(BinariesTest, OneOfManyServes) {
  for (int round = 0; round < 4; ++round) {
    std::vector<std::unique_ptr<Process>> daemons(5);
    for (auto& daemon : daemons) daemon = Daemon();
    std::unique_ptr<Process> serving;
    for (auto& daemon : daemons) {
      if (daemon->ReadLine().empty()) {
        ExpectRefused(daemon.get(), "another kvferryd serves there");
      } else {
        EXPECT_EQ(serving, nullptr) << "two serve";
        serving = std::move(daemon);
      }
    }
    ASSERT_NE(serving, nullptr) << "none serves";
    ExpectServes();
    serving->Signal(round % 2 == 0 ? SIGKILL : SIGTERM);
    serving->Wait();
    EXPECT_EQ(std::filesystem::exists(path_), round % 2 == 0);
  }
}

TEST_F(BinariesTest, AFileOnThePathIsNobodysSocket) {
  std::ofstream(path_) << "somebody's data";
  ExpectRefused(Daemon().get(), "is not a socket");
  std::string text;
  std::getline(std::ifstream(path_), text);
  EXPECT_EQ(text, "somebody's data");
  std::filesystem::remove(path_);
  std::filesystem::create_symlink(path_ + ".nowhere", path_);
  ExpectRefused(Daemon().get(), "is not a socket");
  EXPECT_TRUE(std::filesystem::is_symlink(path_));
  EXPECT_FALSE(std::filesystem::exists(path_ + ".lock"));
}

// Whoever sends much that is no message fills no disk with what is said about it.
TEST_F(BinariesTest, BadInputIsNotLogged) {
  const auto daemon = ReadyDaemon();
  v1::OpenNamespaceRequest request;
  ToProto(SmallSpec(), request.mutable_spec());
  std::string bytes = request.SerializeAsString();
  bytes[bytes.find("float32")] = '\xff';  // no UTF-8
  const Answer answer = RawCaller(DialUrl(url_)).CallUnary("/kvferry.v1.CacheStore/OpenNamespace", bytes);
  EXPECT_EQ(answer.status.error_code(), grpc::INVALID_ARGUMENT) << answer.status.error_message();
  EXPECT_EQ(RawClient(url_).Stats()["malformed_messages"], 1u);
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0);
  EXPECT_THAT(daemon->err, Not(HasSubstr("protobuf")));
}

TEST_F(BinariesTest, WrongArgumentsAreExplained) {
  const auto daemon = Daemon({"--memory=1000TiB"});
  EXPECT_EQ(daemon->Wait(), 2);
  EXPECT_THAT(daemon->err, AllOf(HasSubstr("--memory=1000TiB"), HasSubstr("this machine or container has")));
  const auto nowhere = Daemon({"--disk=/nowhere/at/all", "--disk-bytes=64MiB"});
  EXPECT_EQ(nowhere->Wait(), 1);
  EXPECT_THAT(nowhere->err, HasSubstr("make folder /nowhere/at/all"));
  const auto help = Daemon({"--help"});
  EXPECT_EQ(help->Wait(), 0);
  EXPECT_THAT(help->out, HasSubstr("--reservation-grace=TIME"));
}

TEST_F(BinariesTest, TheDiskIsSaidAtStartAndShownByCtl) {
  const TempFolder folder;
  const std::string path = folder.path() + "/disk";
  const auto daemon = ReadyDaemon({"--disk=" + path, "--disk-bytes=64MiB"});
  std::string out, err;
  EXPECT_EQ(Ctl({"--server=" + url_, "stats"}, &out, &err), 0) << err;
  EXPECT_THAT(out, ContainsRegex("disk_budget_bytes +64.00 MiB"));
  EXPECT_THAT(out, AllOf(ContainsRegex("disk_used_bytes +0\n"), ContainsRegex("chunks_found +0\n"),
                         HasSubstr("disk_io_uring"), HasSubstr("disk_direct"), HasSubstr("disk_bytes_written")));
  // Another one on the same folder, with a socket of its own.
  Process second({KVFERRYD, "--listen=" + url_ + ".2", "--memory=64MiB", "--disk=" + path, "--disk-bytes=64MiB"});
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.err, AllOf(HasSubstr("folder " + path), HasSubstr("in use by another process")));
  daemon->Signal(SIGTERM);
  EXPECT_EQ(daemon->Wait(), 0) << daemon->err;
  EXPECT_THAT(daemon->err, ContainsRegex("disk: " + path +
                                         " through (io_uring|threads), (direct|buffered), bound 64 "
                                         "MiB, 0 chunks found, 0 B"));
  EXPECT_THAT(daemon->err, HasSubstr("disk: " + path + " has all 0 chunks that are published"));
}

TEST_F(BinariesTest, CtlShowsStatsAndChunks) {
  const auto daemon = ReadyDaemon();
  RawClient client(url_);
  ASSERT_TRUE(client.Hello().ok());
  NamespaceSpec spec = SmallSpec();
  spec.model = "a \"quoted\" model \xff\n";  // any bytes
  std::vector<ChunkKey> keys;
  ASSERT_TRUE(client.Reserve(client.Open(spec), 3, &keys).ok());
  std::string out, err;
  EXPECT_EQ(Ctl({"--server=" + url_, "stats"}, &out, &err), 0) << err;
  EXPECT_THAT(out, AllOf(HasSubstr("memory_budget_bytes"), HasSubstr("128.00 MiB")));
  EXPECT_EQ(Ctl({"stats", "--json", "--server", url_}, &out, &err), 0) << err;
  EXPECT_THAT(out, HasSubstr("\"chunks_reserved\": 3"));
  EXPECT_EQ(Ctl({"ls", "--server", url_}, &out, &err), 0) << err;
  EXPECT_THAT(out, AllOf(HasSubstr("CHUNK"), HasSubstr("reserved"), HasSubstr("0/2"),
                         HasSubstr("a \"quoted\" model \\xff\\x0a\n")));
  EXPECT_THAT(out, Not(HasSubstr(absl::StrCat(absl::Hex(client.welcome.session()))))) << "whoever has it can resume it";
  EXPECT_EQ(Ctl({"ls", "--json", "--limit=2", "--server", url_}, &out, &err), 0) << err;
  EXPECT_THAT(out, HasSubstr("\"model\": \"a \\\"quoted\\\" model \\ufffd\\u000a\""));
  EXPECT_EQ(std::count(out.begin(), out.end(), '{'), 2);
}

TEST_F(BinariesTest, CtlSaysWhatToDo) {
  std::string out, err;
  EXPECT_EQ(Ctl({"stats", "--server=" + url_, "--timeout=5s"}, &out, &err), 1);
  EXPECT_THAT(err, AllOf(HasSubstr(url_), HasSubstr("is kvferryd running there?"), HasSubstr("--server=URL")));
  EXPECT_EQ(Ctl({"status"}, &out, &err), 2);
  EXPECT_THAT(err, HasSubstr("unknown command \"status\""));
  EXPECT_EQ(Ctl({"ls", "--limit=some"}, &out, &err), 2);
  EXPECT_THAT(err, HasSubstr("--limit=some: expected a number of chunks"));
  EXPECT_EQ(Ctl({"ls", "--server=ftp://x"}, &out, &err), 2);
  EXPECT_THAT(err, AllOf(HasSubstr("\"ftp://x\""), HasSubstr("unix:///absolute/path or grpc://host:port")));
  EXPECT_EQ(Ctl({"--help"}, &out, &err), 0);
  EXPECT_THAT(out, HasSubstr("KVFERRY_URL"));
}

}  // namespace
}  // namespace kvferry
