#include "service/unix_socket.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

std::string LockPath(const std::string& path) { return path + ".lock"; }

// Opens and locks the lock file. A file that its last owner removed between our open and our lock does not count.
absl::StatusOr<int> Lock(const std::string& path) {
  const std::string lock_path = LockPath(path);
  while (true) {
    const int fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) {
      return absl::FailedPreconditionError(absl::StrCat("cannot listen on ", path, ": ", lock_path, ": ",
                                                        std::strerror(errno),
                                                        "; the folder must be there and writable"));
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      close(fd);
      return absl::AlreadyExistsError(absl::StrCat("cannot listen on ", path,
                                                   ": another kvferryd serves there (it holds ", lock_path,
                                                   "); stop it, or give another path"));
    }
    struct stat held, there;
    if (fstat(fd, &held) == 0 && stat(lock_path.c_str(), &there) == 0 && held.st_ino == there.st_ino) return fd;
    close(fd);
  }
}

// True if a process accepts connections at `path`.
bool SomebodyAnswers(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int rc = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const bool refused = rc != 0 && (errno == ECONNREFUSED || errno == ENOENT);
  close(fd);
  return !refused;
}

absl::Status RemoveStale(const std::string& path) {
  struct stat file;
  if (lstat(path.c_str(), &file) != 0) return absl::OkStatus();
  if (!S_ISSOCK(file.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot listen on ", path, ": the file there is not a socket; remove it, or give another path"));
  }
  if (SomebodyAnswers(path)) {
    return absl::AlreadyExistsError(
        absl::StrCat("cannot listen on ", path, ": a live service answers there; stop it, or give another path"));
  }
  if (unlink(path.c_str()) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot listen on ", path, ": the stale socket cannot be removed: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnixSocketClaim>> UnixSocketClaim::Take(const std::string& path) {
  KVFERRY_ASSIGN_OR_RETURN(const int lock, Lock(path));
  if (absl::Status status = RemoveStale(path); !status.ok()) {
    unlink(LockPath(path).c_str());
    close(lock);
    return status;
  }
  return std::unique_ptr<UnixSocketClaim>(new UnixSocketClaim(path, lock));
}

UnixSocketClaim::~UnixSocketClaim() {
  unlink(path_.c_str());
  unlink(LockPath(path_).c_str());
  close(lock_);
}

}  // namespace kvferry
