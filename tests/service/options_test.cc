#include "service/options.h"

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvferry {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const MemoryLimit kMachine{16 * kGiB, "/proc/meminfo"};

absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& args) { return ParseCommandLine(args, kMachine); }

std::string Error(const std::vector<std::string>& args) {
  const auto line = Parse(args);
  EXPECT_TRUE(absl::IsInvalidArgument(line.status())) << line.status();
  return std::string(line.status().message());
}

TEST(CommandLine, Defaults) {
  const auto line = Parse({});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->action, CommandLine::Action::kServe);
  ASSERT_EQ(line->options.listen.size(), 1u);
  EXPECT_EQ(line->options.listen[0].Url(), "grpc://127.0.0.1:7400");
  EXPECT_EQ(line->options.store.memory_bytes, 16 * kGiB / 10 * 8);
}

TEST(CommandLine, ReadsItsFlagsInBothForms) {
  const auto line =
      Parse({"--listen=unix:///tmp/a.sock,127.0.0.1:0,[::1]:7400", "--memory", "4GiB", "--segment=8MiB",
             "--policy=s3fifo", "--live-grace=20m", "--reservation-grace=1m", "--heartbeat=500ms", "--drain-grace=0"});
  ASSERT_TRUE(line.ok()) << line.status();
  const ServerOptions& options = line->options;
  ASSERT_EQ(options.listen.size(), 3u);
  EXPECT_EQ(options.listen[0].ForGrpc(), "unix:/tmp/a.sock");
  EXPECT_EQ(options.listen[0].Url(), "unix:///tmp/a.sock");
  EXPECT_EQ(options.listen[2].ForGrpc(), "[::1]:7400");
  EXPECT_EQ(options.store.memory_bytes, 4 * kGiB);
  EXPECT_EQ(options.store.segment_bytes, 8 * kMiB);
  EXPECT_EQ(options.store.policy, PolicyKind::kS3Fifo);
  EXPECT_EQ(options.store.live_grace, absl::Minutes(20));
  EXPECT_EQ(options.store.reservation_grace, absl::Minutes(1));
  EXPECT_EQ(options.heartbeat, absl::Milliseconds(500));
  EXPECT_EQ(options.drain_grace, absl::ZeroDuration());
  EXPECT_EQ(Parse({"--help"})->action, CommandLine::Action::kShowHelp);
  EXPECT_EQ(Parse({"--version"})->action, CommandLine::Action::kShowVersion);
}

TEST(CommandLine, ADiskHasAFolderAndABound) {
  const auto line = Parse({"--disk=/var/lib/kvferry", "--disk-bytes=100GiB", "--disk-keep-free", "1GiB",
                           "--write-policy=on_second_hit", "--flush-grace=5s"});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->options.store.disk_path, "/var/lib/kvferry");
  EXPECT_EQ(line->options.store.disk_bytes, 100 * kGiB);
  EXPECT_EQ(line->options.store.disk_keep_free_bytes, kGiB);
  EXPECT_EQ(line->options.store.write_policy, WritePolicy::kOnSecondHit);
  EXPECT_EQ(line->options.flush_grace, absl::Seconds(5));
  EXPECT_EQ(Parse({"--disk-keep-free=0"})->options.store.disk_keep_free_bytes, 0u);
  EXPECT_EQ(Parse({})->options.store.disk_path, "");

  EXPECT_THAT(Error({"--disk=/d"}), AllOf(HasSubstr("--disk=/d"), HasSubstr("expected --disk-bytes=SIZE")));
  EXPECT_THAT(Error({"--disk-bytes=1GiB"}),
              AllOf(HasSubstr("--disk-bytes=1073741824"), HasSubstr("expected --disk=FOLDER")));
  EXPECT_THAT(Error({"--disk=", "--disk-bytes=1GiB"}), AllOf(HasSubstr("--disk=: "), HasSubstr("expected a folder")));
  EXPECT_THAT(Error({"--disk=/d", "--disk-bytes=0"}), HasSubstr("--disk-bytes=0: expected a size"));
  EXPECT_THAT(Error({"--disk=/d", "--disk-bytes=64KiB"}), HasSubstr("disk_bytes is 65536, expected 1048576"));
  EXPECT_THAT(Error({"--disk-keep-free=-1"}), HasSubstr("--disk-keep-free=-1: expected a size"));
  EXPECT_THAT(Error({"--write-policy=never"}),
              AllOf(HasSubstr("\"never\""), HasSubstr("write_back, write_through or on_second_hit")));
  EXPECT_THAT(Error({"--flush-grace=-1s"}), HasSubstr("a time of 0 to 8760h"));
}

TEST(CommandLine, ErrorsNameFlagValueAndWhatWasExpected) {
  EXPECT_THAT(Error({"--memory=lots"}), AllOf(HasSubstr("--memory=lots"), HasSubstr("4GiB")));
  EXPECT_THAT(Error({"--memory=0"}), HasSubstr("--memory=0"));
  EXPECT_THAT(Error({"--memory=-1GiB"}), HasSubstr("expected a size"));
  EXPECT_THAT(Error({"--memory=1e300"}), HasSubstr("expected a size"));
  EXPECT_THAT(Error({"--memory=nan"}), HasSubstr("expected a size"));
  // B87: a budget that the machine or the container does not have is refused at start, with both figures.
  EXPECT_THAT(Error({"--memory=17GiB"}), AllOf(HasSubstr("has 16 GiB"), HasSubstr("/proc/meminfo")));
  EXPECT_THAT(Error({"--listen=localhost"}), HasSubstr("expected host:port"));
  EXPECT_THAT(Error({"--listen=127.0.0.1:70000"}), HasSubstr("port of 0 to 65535"));
  EXPECT_THAT(Error({"--listen=::1:7400"}), HasSubstr("expected host:port"));
  EXPECT_THAT(Error({"--listen=unix:relative.sock"}), HasSubstr("absolute path"));
  EXPECT_THAT(Error({"--listen=unix:///" + std::string(120, 'x')}), HasSubstr("at most 107"));
  EXPECT_THAT(Error({"--heartbeat=soon"}), AllOf(HasSubstr("--heartbeat=soon"), HasSubstr("30s")));
  for (const char* no_time : {"0", "-5s", "5", "nan", "nans", "inf", "-inf", "1e300s", "25h", "4294967297ms", ""}) {
    EXPECT_THAT(Error({absl::StrCat("--heartbeat=", no_time)}),
                AllOf(HasSubstr(absl::StrCat("--heartbeat=", no_time, ": ")), HasSubstr("a time of 10ms to 24h")));
  }
  for (const char* no_time : {"0", "-1ns", "inf", "8761h"}) {
    EXPECT_THAT(Error({absl::StrCat("--live-grace=", no_time)}), HasSubstr("a time of 10ms to 8760h"));
    EXPECT_THAT(Error({absl::StrCat("--reservation-grace=", no_time)}), HasSubstr("a time of 10ms to 8760h"));
  }
  for (const char* no_time : {"-1ns", "inf", "soon"}) {
    EXPECT_THAT(Error({absl::StrCat("--drain-grace=", no_time)}), HasSubstr("a time of 0 to 8760h"));
  }
  EXPECT_THAT(Error({"--colour=red"}), HasSubstr("unknown argument \"--colour=red\""));
  EXPECT_THAT(Error({"--memory"}), HasSubstr("--memory has no value"));
  EXPECT_THAT(Error({"serve"}), HasSubstr("unknown argument \"serve\""));
}

TEST(Bytes, ParseAndFormat) {
  EXPECT_EQ(*ParseBytes("1073741824"), kGiB);
  EXPECT_EQ(*ParseBytes("1.5GiB"), 3 * kGiB / 2);
  EXPECT_EQ(*ParseBytes("2TiB"), 2048 * kGiB);
  EXPECT_FALSE(ParseBytes("GiB").ok());
  EXPECT_EQ(FormatBytes(3 * kGiB / 2), "1.5 GiB");
  EXPECT_EQ(FormatBytes(512), "512 B");
}

class MemoryLimitTest : public testing::Test {
 protected:
  MemoryLimitTest() : root_(testing::TempDir() + "/memory_limit") {
    std::filesystem::remove_all(root_);
    Write("/proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 1 kB\n");
  }
  ~MemoryLimitTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }

  const std::string root_;
};

TEST_F(MemoryLimitTest, TheMachinesMemoryWithoutGroups) {
  EXPECT_EQ(DetectMemoryLimit(root_).bytes, 16 * kGiB);
  EXPECT_EQ(DetectMemoryLimit(root_).source, "/proc/meminfo");
}

TEST_F(MemoryLimitTest, TheLeastOfAllGroupsAbove) {
  Write("/proc/self/cgroup", "0::/kubepods/pod7/c1\n");
  Write("/sys/fs/cgroup/kubepods/pod7/c1/memory.max", "max\n");
  Write("/sys/fs/cgroup/kubepods/pod7/memory.max", "2147483648\n");
  Write("/sys/fs/cgroup/kubepods/memory.max", "8589934592\n");
  EXPECT_EQ(DetectMemoryLimit(root_).bytes, 2 * kGiB);
  EXPECT_EQ(DetectMemoryLimit(root_).source, "/sys/fs/cgroup/kubepods/pod7/memory.max");
}

TEST_F(MemoryLimitTest, InAContainerTheMountsRootCounts) {
  Write("/proc/self/cgroup", "0::/../../not/visible/here\n");
  Write("/sys/fs/cgroup/memory.max", "1073741824\n");
  EXPECT_EQ(DetectMemoryLimit(root_).bytes, kGiB);
}

TEST_F(MemoryLimitTest, VersionOneGroups) {
  Write("/proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n");
  Write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "3221225472\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(DetectMemoryLimit(root_).bytes, 3 * kGiB);
}

}  // namespace
}  // namespace kvferry
