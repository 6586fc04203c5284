#include "service/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvferry {
namespace {

using ::testing::HasSubstr;

class UnixSocketTest : public testing::Test {
 protected:
  UnixSocketTest() : path_(absl::StrCat(testing::TempDir(), "/kvferry_", getpid(), ".sock")) { unlink(path_.c_str()); }
  ~UnixSocketTest() override {
    if (fd_ >= 0) close(fd_);
    unlink(path_.c_str());
  }

  // A socket that is bound, and listens or not.
  void Bind(bool listens) {
    fd_ = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (listens) {
      ASSERT_EQ(listen(fd_, 1), 0);
    }
  }

  const std::string path_;
  int fd_ = -1;
};

TEST_F(UnixSocketTest, LeavesNothingBehind) {
  {
    const auto claim = UnixSocketClaim::Take(path_);
    ASSERT_TRUE(claim.ok()) << claim.status();
    EXPECT_TRUE(std::filesystem::exists(path_ + ".lock"));
  }
  EXPECT_FALSE(std::filesystem::exists(path_ + ".lock"));
}

TEST_F(UnixSocketTest, OneAtATime) {
  auto first = UnixSocketClaim::Take(path_);
  ASSERT_TRUE(first.ok());
  const auto second = UnixSocketClaim::Take(path_);
  EXPECT_TRUE(absl::IsAlreadyExists(second.status()));
  EXPECT_THAT(second.status().message(), HasSubstr("another kvferryd serves there"));
  first->reset();
  EXPECT_TRUE(UnixSocketClaim::Take(path_).ok());
}

TEST_F(UnixSocketTest, RemovesAStaleSocket) {
  Bind(false);  // nobody listens: what a killed service leaves
  EXPECT_TRUE(UnixSocketClaim::Take(path_).ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, LeavesALiveOneAlone) {
  Bind(true);
  const auto claim = UnixSocketClaim::Take(path_);
  EXPECT_TRUE(absl::IsAlreadyExists(claim.status())) << claim.status();
  EXPECT_TRUE(std::filesystem::exists(path_));
  EXPECT_FALSE(std::filesystem::exists(path_ + ".lock"));
}

TEST_F(UnixSocketTest, NeverRemovesAFile) {
  std::ofstream(path_) << "somebody's data";
  const auto claim = UnixSocketClaim::Take(path_);
  EXPECT_TRUE(absl::IsFailedPrecondition(claim.status()));
  EXPECT_THAT(claim.status().message(), HasSubstr("is not a socket"));
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, NamesAMissingFolder) {
  EXPECT_THAT(UnixSocketClaim::Take("/no/such/folder/x.sock").status().message(), HasSubstr("/no/such/folder/x.sock"));
}

}  // namespace
}  // namespace kvferry
