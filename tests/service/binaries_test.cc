// kvferryd and kvferryctl as processes.
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/base/specs.h"
#include "tests/service/block_bytes.h"
#include "tests/service/process.h"
#include "tests/service/raw_client.h"

namespace kvferry {
namespace {

using ::testing::AllOf;
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
  EXPECT_EQ(second->Wait(), 1);
  EXPECT_THAT(second->err, HasSubstr("another kvferryd serves there"));
  RawClient client(url_);
  EXPECT_TRUE(client.Hello().ok());  // the first one goes on
}

TEST_F(BinariesTest, WrongArgumentsAreExplained) {
  const auto daemon = Daemon({"--memory=1000TiB"});
  EXPECT_EQ(daemon->Wait(), 2);
  EXPECT_THAT(daemon->err, AllOf(HasSubstr("--memory=1000TiB"), HasSubstr("this machine or container has")));
  const auto help = Daemon({"--help"});
  EXPECT_EQ(help->Wait(), 0);
  EXPECT_THAT(help->out, HasSubstr("--reservation-grace=TIME"));
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
