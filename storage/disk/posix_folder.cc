#include "storage/disk/posix_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr int kMode = 0600;           // KV is as confidential as the prompts it came from
constexpr uint64_t kStatBlock = 512;  // what st_blocks counts in

absl::Status Failed(int error, absl::string_view what) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(error));
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(message);
    case ENOENT:
      return absl::NotFoundError(message);
    case EEXIST:
      return absl::AlreadyExistsError(message);
    default:
      return absl::UnavailableError(message);
  }
}

// What the folder and its files share.
struct Shared {
  PosixFolderOptions options;
  PosixCalls calls;
  IoEngine* engine = nullptr;  // calls.engine; what runs on it may use it to the end
  std::atomic<bool> direct{true};

  // The file system takes no O_DIRECT: from now on files are opened without it.
  void GoBuffered(absl::string_view when) {
    if (direct.exchange(false)) {
      KVFERRY_LOG(kWarning, absl::StrCat("disk: the file system of ", options.path, " refuses O_DIRECT at ", when,
                                         "; going through the page cache"));
    }
  }
};

class PosixFile : public File {
 public:
  PosixFile(std::shared_ptr<Shared> shared, std::string path, int fd, bool direct)
      : shared_(std::move(shared)), path_(std::move(path)), fd_(fd), direct_(direct) {}
  ~PosixFile() override { close(fd_); }

  void Read(uint64_t offset, MutableByteView to, IoDone done) override {
    Submit(Operation(IoRequest::kRead, offset, {to}), std::move(done));
  }
  void Write(uint64_t offset, IoPieces pieces, IoDone done) override {
    Submit(Operation(IoRequest::kWrite, offset, pieces), std::move(done));
  }
  void Sync(IoDone done) override { Submit(Operation(IoRequest::kSync, 0, {}), std::move(done)); }

  absl::Status ReadNow(uint64_t offset, MutableByteView to) override {
    return Run(Operation(IoRequest::kRead, offset, {to}));
  }
  absl::Status WriteNow(uint64_t offset, ByteView from) override {
    return Run(Operation(IoRequest::kWrite, offset, {from}));
  }
  absl::Status SyncNow() override { return Run(Operation(IoRequest::kSync, 0, {})); }

  absl::Status Punch(uint64_t offset, uint64_t bytes) override {
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes)) == 0) {
      return absl::OkStatus();
    }
    const std::string what = absl::StrCat("punch ", bytes, " bytes at ", offset, " of ", path_);
    return errno == EOPNOTSUPP || errno == ENOSYS ? absl::UnimplementedError(what) : Failed(errno, what);
  }

  absl::Status Allocate(uint64_t bytes) {
    if (bytes == 0 || fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) == 0) return absl::OkStatus();
    if (errno == EOPNOTSUPP || errno == ENOSYS) return Truncate(bytes);  // room is then found as it is written
    return Failed(errno, absl::StrCat("give ", path_, " ", bytes, " bytes"));
  }

  absl::Status Truncate(uint64_t bytes) override {
    if (ftruncate(fd_, static_cast<off_t>(bytes)) == 0) return absl::OkStatus();
    return Failed(errno, absl::StrCat("truncate ", path_, " to ", bytes, " bytes"));
  }

  absl::StatusOr<uint64_t> Size() override {
    struct stat info;
    if (fstat(fd_, &info) != 0) return Failed(errno, absl::StrCat("stat ", path_));
    return static_cast<uint64_t>(info.st_size);
  }

  absl::StatusOr<uint64_t> AllocatedBytes() override {
    struct stat info;
    if (fstat(fd_, &info) != 0) return Failed(errno, absl::StrCat("stat ", path_));
    return static_cast<uint64_t>(info.st_blocks) * kStatBlock;
  }

 private:
  // A read, write or sync, over as many transfers as the system makes of it.
  struct Operation {
    Operation(IoRequest::Kind k, uint64_t at, const IoPieces& bytes) : kind(k), offset(at) {
      for (const ByteView& piece : bytes) {
        left += piece.size();
        pieces.push_back({const_cast<uint8_t*>(piece.data()), piece.size()});  // which only a read writes to
      }
    }

    IoRequest::Kind kind;
    uint64_t offset;
    uint64_t left = 0;
    std::vector<iovec> pieces;
    int idle = 0;          // transfers in a row that moved less than a block
    bool refused = false;  // once, as if O_DIRECT were not taken
  };

  IoRequest Next(const Operation& operation) const {
    IoRequest request;
    request.kind = operation.kind;
    request.fd = fd_;
    request.offset = operation.offset;
    request.pieces = operation.pieces;
    return request;
  }

  void Submit(Operation operation, IoDone done) {
    IoRequest request = Next(operation);
    request.done = [this, operation = std::move(operation), done = std::move(done)](int64_t result) mutable {
      if (std::optional<absl::Status> status = Transferred(result, &operation)) {
        std::move(done)(*std::move(status));
      } else {
        Submit(std::move(operation), std::move(done));
      }
    };
    shared_->engine->Submit(std::move(request));
  }

  absl::Status Run(Operation operation) {
    for (;;) {
      const int64_t result = shared_->engine->Transfer(Next(operation));
      if (std::optional<absl::Status> status = Transferred(result, &operation)) return *std::move(status);
    }
  }

  // What a transfer of the operation came to; nullopt if it needs another.
  std::optional<absl::Status> Transferred(int64_t result, Operation* operation) {
    // Others of the file that are under way may be refused too: each tries again by itself.
    if (result == -EINVAL && operation->kind != IoRequest::kSync && direct_ &&
        !std::exchange(operation->refused, true)) {
      shared_->GoBuffered(operation->kind == IoRequest::kRead ? "a read" : "a write");
      fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_DIRECT);
      return std::nullopt;
    }
    if (result < 0) return Failed(static_cast<int>(-result), Describe(*operation));
    const auto moved = static_cast<uint64_t>(result);
    if (moved >= operation->left) return absl::OkStatus();
    // What follows begins at a block again, so some bytes may be moved twice.
    const uint64_t blocks = moved - moved % kDiskAlignment;
    operation->idle = blocks == 0 ? operation->idle + 1 : 0;
    const bool ended = moved == 0 && operation->kind == IoRequest::kRead;
    if (ended || operation->idle >= kMostIdle) return NoFurther(*operation);
    Advance(blocks, operation);
    return std::nullopt;
  }

  static void Advance(uint64_t bytes, Operation* operation) {
    operation->offset += bytes;
    operation->left -= bytes;
    while (bytes != 0) {
      iovec& first = operation->pieces.front();
      const uint64_t taken = std::min<uint64_t>(bytes, first.iov_len);
      first.iov_base = static_cast<uint8_t*>(first.iov_base) + taken;
      first.iov_len -= taken;
      bytes -= taken;
      if (first.iov_len == 0) operation->pieces.erase(operation->pieces.begin());
    }
  }

  absl::Status NoFurther(const Operation& operation) const {
    const std::string what = Describe(operation);
    if (operation.kind == IoRequest::kRead) return absl::OutOfRangeError(absl::StrCat(what, ": the file ends before"));
    return absl::UnavailableError(absl::StrCat(what, ": the system writes nothing and says no error"));
  }

  std::string Describe(const Operation& operation) const {
    if (operation.kind == IoRequest::kSync) return absl::StrCat("sync ", path_);
    return absl::StrCat(operation.kind == IoRequest::kRead ? "read " : "write ", operation.left, " bytes at ",
                        operation.offset, " of ", path_);
  }

  static constexpr int kMostIdle = 64;  // ends what would go on for ever

  const std::shared_ptr<Shared> shared_;
  const std::string path_;
  const int fd_;
  const bool direct_;  // when it was opened
};

class PosixFolder : public Folder {
 public:
  PosixFolder(std::shared_ptr<Shared> shared, int lock_fd) : shared_(std::move(shared)), lock_fd_(lock_fd) {}

  ~PosixFolder() override {
    shared_->calls.engine.reset();
    close(lock_fd_);
  }

  absl::StatusOr<std::unique_ptr<File>> Create(absl::string_view name, uint64_t bytes) override {
    KVFERRY_ASSIGN_OR_RETURN(std::unique_ptr<PosixFile> file, Make(name, O_CREAT | O_EXCL));
    absl::Status status = file->Allocate(bytes);
    if (!status.ok()) {
      (void)unlink(Path(name).c_str());
      return status;
    }
    return file;
  }

  absl::StatusOr<std::unique_ptr<File>> Open(absl::string_view name) override { return Make(name, 0); }

  absl::Status Rename(absl::string_view from, absl::string_view to) override {
    if (rename(Path(from).c_str(), Path(to).c_str()) == 0) return absl::OkStatus();
    return Failed(errno, absl::StrCat("rename ", Path(from), " to ", to));
  }

  absl::Status Remove(absl::string_view name) override {
    if (unlink(Path(name).c_str()) == 0) return absl::OkStatus();
    return Failed(errno, absl::StrCat("remove ", Path(name)));
  }

  absl::StatusOr<std::vector<std::string>> List() override {
    const std::string& path = shared_->options.path;
    const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
    if (folder == nullptr) return Failed(errno, absl::StrCat("list ", path));
    std::vector<std::string> names;
    for (errno = 0; const dirent* entry = readdir(folder.get()); errno = 0) {
      struct stat info;
      if (fstatat(dirfd(folder.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // it has just gone
        return Failed(errno, absl::StrCat("stat ", Path(entry->d_name)));
      }
      if (S_ISREG(info.st_mode)) names.emplace_back(entry->d_name);
    }
    if (errno != 0) return Failed(errno, absl::StrCat("list ", path));
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::Status Sync() override {
    if (fsync(lock_fd_) == 0) return absl::OkStatus();
    return Failed(errno, absl::StrCat("sync folder ", shared_->options.path));
  }

  absl::StatusOr<uint64_t> FreeBytes() override {
    struct statvfs info;
    if (fstatvfs(lock_fd_, &info) != 0) return Failed(errno, absl::StrCat("statvfs ", shared_->options.path));
    return uint64_t{info.f_bavail} * info.f_frsize;
  }

  absl::string_view io() const override { return shared_->engine->name(); }
  bool direct() const override { return shared_->direct; }

  void Post(absl::AnyInvocable<void()> task) override { shared_->engine->Post(std::move(task)); }

 private:
  std::string Path(absl::string_view name) const { return absl::StrCat(shared_->options.path, "/", name); }

  absl::StatusOr<std::unique_ptr<PosixFile>> Make(absl::string_view name, int flags) {
    const std::string path = Path(name);
    flags |= O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    bool direct = shared_->direct;
    int fd = shared_->calls.open(path.c_str(), flags | (direct ? O_DIRECT : 0), kMode);
    if (fd < 0 && errno == EINVAL && direct) {
      shared_->GoBuffered("open");
      direct = false;
      flags &= ~O_EXCL;  // some file systems make the file before they refuse
      fd = shared_->calls.open(path.c_str(), flags, kMode);
    }
    if (fd < 0) return Failed(errno, absl::StrCat("open ", path));
    return std::make_unique<PosixFile>(shared_, path, fd, direct);
  }

  const std::shared_ptr<Shared> shared_;
  const int lock_fd_;  // the directory itself
};

}  // namespace

absl::StatusOr<std::unique_ptr<Folder>> OpenPosixFolder(const PosixFolderOptions& options) {
  PosixCalls calls;
  std::string why;
  if (options.io != IoKind::kThreads) calls.engine = NewUringEngine(options.depth, &why);
  if (calls.engine == nullptr && options.io == IoKind::kUring) return absl::UnavailableError(why);
  if (calls.engine == nullptr) calls.engine = NewThreadEngine(options.depth);
  if (!why.empty()) {
    KVFERRY_LOG(kInfo, absl::StrCat("disk: ", options.path, " goes without io_uring, since ", why));
  }
  return OpenPosixFolder(options, std::move(calls));
}

absl::StatusOr<std::unique_ptr<Folder>> OpenPosixFolder(const PosixFolderOptions& options, PosixCalls calls) {
  if (calls.open == nullptr) {
    calls.open = [](const char* path, int flags, mode_t mode) { return open(path, flags, mode); };
  }
  if (mkdir(options.path.c_str(), kMode | S_IXUSR) != 0 && errno != EEXIST) {
    return absl::UnavailableError(absl::StrCat("make folder ", options.path, ": ", strerror(errno)));
  }
  const int fd = open(options.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("open folder ", options.path, ": ", strerror(errno)));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    close(fd);
    if (error != EWOULDBLOCK) return Failed(error, absl::StrCat("lock folder ", options.path));
    return absl::FailedPreconditionError(
        absl::StrCat("folder ", options.path, " is in use by another process; each store needs one of its own"));
  }
  auto shared = std::make_shared<Shared>();
  shared->options = options;
  shared->calls = std::move(calls);
  shared->engine = shared->calls.engine.get();
  shared->direct = options.direct;
  return std::make_unique<PosixFolder>(std::move(shared), fd);
}

}  // namespace kvferry
