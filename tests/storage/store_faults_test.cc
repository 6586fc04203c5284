// The store over a folder of this machine whose transfers fail: whatever the n-th one comes to, for every n, a reader
// gets the right bytes or a miss.
#include <fcntl.h>

#include <atomic>
#include <filesystem>
#include <future>
#include <set>

#include "storage/base/log.h"
#include "storage/base/status.h"
#include "storage/disk/posix_folder.h"
#include "tests/storage/folder_store_fixture.h"
#include "tests/support/faulty_engine.h"

namespace kvferry {
namespace {

// What becomes of the n-th transfer, of those it concerns.
struct Fault {
  const char* name;
  int kinds;             // a bit for each IoRequest::Kind
  int64_t result;        // as FaultyEngine has it
  bool lost = false;     // it is answered and not done
  bool flipped = false;  // a bit of what is read
};
constexpr int kReads = 1 << IoRequest::kRead, kWrites = 1 << IoRequest::kWrite, kSyncs = 1 << IoRequest::kSync;
constexpr Fault kFaults[] = {
    {"ShortRead", kReads, 512},
    {"ReadError", kReads, -EIO},
    {"ReadRefusesDirect", kReads, -EINVAL},
    {"ShortWrite", kWrites, 512},
    {"WriteError", kWrites, -EIO},
    {"NoSpace", kWrites, -ENOSPC},
    {"SyncError", kSyncs, -EIO},
    {"WriteRefusesDirect", kWrites, -EINVAL},
    {"LostSync", kSyncs, 0, true},
    {"FlippedBit", kReads, 0, false, true},
};

// A bit of what a read brings is another one. Also: a transfer that is said to have been done, and was not.
class LyingEngine : public IoEngine {
 public:
  LyingEngine(std::unique_ptr<IoEngine> real, std::function<const Fault*(const IoRequest&)> fault)
      : real_(std::move(real)), fault_(std::move(fault)) {}
  absl::string_view name() const override { return real_->name(); }
  void Post(absl::AnyInvocable<void()> task) override { real_->Post(std::move(task)); }

  void Submit(IoRequest request) override {
    const Fault* const fault = fault_(request);
    if (fault != nullptr && fault->lost) {
      real_->Post([done = std::move(request.done), bytes = BytesOf(request)]() mutable { std::move(done)(bytes); });
      return;
    }
    if (fault != nullptr && fault->flipped) {
      auto* const byte = static_cast<uint8_t*>(request.pieces[0].iov_base);
      request.done = [byte, done = std::move(request.done)](int64_t result) mutable {
        byte[100] ^= 1;
        std::move(done)(result);
      };
    }
    real_->Submit(std::move(request));
  }
  int64_t Transfer(const IoRequest& request) override {
    const Fault* const fault = fault_(request);
    if (fault != nullptr && fault->lost) return BytesOf(request);
    const int64_t result = real_->Transfer(request);
    if (fault != nullptr && fault->flipped) static_cast<uint8_t*>(request.pieces[0].iov_base)[100] ^= 1;
    return result;
  }

 private:
  static int64_t BytesOf(const IoRequest& request) {
    int64_t bytes = 0;
    for (const iovec& piece : request.pieces) bytes += static_cast<int64_t>(piece.iov_len);
    return bytes;
  }
  const std::unique_ptr<IoEngine> real_;
  const std::function<const Fault*(const IoRequest&)> fault_;
};

class StoreFaults : public FolderStoreFixture, public testing::WithParamInterface<Fault> {
 protected:
  StoreFaults() { SetLogLevel(LogLevel::kNone); }
  ~StoreFaults() override { SetLogLevel(LogLevel::kInfo); }

  static constexpr int kNever = -1000000;
  void Arm(int transfer) { armed_ = transfer; }

  absl::Status OpenOnDisk(uint64_t chunks) {
    const auto fault = [this](const IoRequest& request) { return IsIt(request); };
    PosixCalls calls;
    auto faulty = std::make_unique<FaultyEngine>(NewThreadEngine(2), [this](int, const IoRequest& request) -> int64_t {
      if (GetParam().lost || GetParam().flipped) return 0;
      const Fault* const met = IsIt(request);
      return met == nullptr ? 0 : met->result;
    });
    if (GetParam().lost || GetParam().flipped) {
      calls.engine = std::make_unique<LyingEngine>(std::move(faulty), fault);
    } else {
      calls.engine = std::move(faulty);
    }
    return OpenFolder(chunks, std::move(calls));
  }
  // A restart without faults: `all` are there again, or each is there or a miss.
  void Reopen(bool all, uint64_t count) {
    Arm(kNever);
    Close();
    ASSERT_EQ(OpenOnDisk(8), absl::OkStatus());
    const size_t found = Read(count).size();
    if (all) {
      EXPECT_EQ(found, count);
    }
  }

  // Runs `body` once for each n at which it meets the fault, and once more.
  template <typename Body>
  void ForEachTransfer(Body body) {
    constexpr int kMost = 500;
    for (int n = 0; n < kMost && !HasFailure(); ++n) {
      SCOPED_TRACE(testing::Message() << GetParam().name << " at transfer " << n);
      temp_ = std::make_unique<TempFolder>();
      met_ = false;
      body(n);
      Close();
      if (!met_) return;
    }
    EXPECT_TRUE(HasFailure()) << "it never ends";
  }

  std::atomic<bool> met_{false};

 private:
  const Fault* IsIt(const IoRequest& request) {
    const Fault& fault = GetParam();
    if ((fault.kinds & 1 << request.kind) == 0 || armed_-- != 0) return nullptr;
    met_ = true;
    return &fault;
  }
  std::atomic<int> armed_{-1};
};

TEST_P(StoreFaults, OfAPut) {
  ForEachTransfer([this](int n) {
    Arm(kNever);
    ASSERT_TRUE(OpenOnDisk(8).ok());
    Arm(n);
    for (uint64_t id = 1; id <= 4; ++id) Put(id);
    const bool flushed = Flush().ok();
    EXPECT_EQ(Read(4).size(), 4u) << "memory has them";
    Reopen(flushed && !GetParam().lost, 4);
  });
}

TEST_P(StoreFaults, OfASpill) {
  ForEachTransfer([this](int n) {
    Arm(kNever);
    ASSERT_TRUE(OpenOnDisk(2).ok());
    Arm(n);
    for (uint64_t id = 1; id <= 5; ++id) Put(id);
    Read(5);
    Reopen(false, 5);
  });
}

TEST_P(StoreFaults, OfAPromotion) {
  ForEachTransfer([this](int n) {
    Arm(kNever);
    ASSERT_TRUE(OpenOnDisk(2).ok());
    for (uint64_t id = 1; id <= 5; ++id) Put(id);
    ASSERT_TRUE(Flush().ok());
    Arm(n);
    EXPECT_GE(Read(5).size(), 4u);  // one transfer is one chunk's
    Reopen(false, 5);
  });
}

TEST_P(StoreFaults, OfARecovery) {
  ForEachTransfer([this](int n) {
    Arm(kNever);
    ASSERT_TRUE(OpenOnDisk(8).ok());
    for (uint64_t id = 1; id <= 4; ++id) Put(id);
    ASSERT_TRUE(Flush().ok());
    // As a process that was killed leaves it: no footer.
    TempFolder killed;
    std::filesystem::copy(temp_->path(), killed.path(), std::filesystem::copy_options::recursive);
    Close();
    std::filesystem::remove_all(temp_->path());
    std::filesystem::copy(killed.path(), temp_->path(), std::filesystem::copy_options::recursive);
    Arm(n);
    const bool opened = OpenOnDisk(8).ok();
    Arm(kNever);
    if (opened) Read(4);
    // A disk that failed once is no disk that has lost anything, unless it has said so.
    Reopen(!GetParam().flipped && !GetParam().lost, 4);
  });
}

INSTANTIATE_TEST_SUITE_P(Faults, StoreFaults, testing::ValuesIn(kFaults),
                         [](const testing::TestParamInfo<Fault>& info) { return info.param.name; });

TEST(StoreFaultsAtOpen, AFileSystemWithoutDirectTransfers) {
  // With tmpfs in old kernels, and with some that are mounted over the network.
  TempFolder temp;
  ManualExecutor executor;
  StoreOptions options;
  options.memory_bytes = 8 * kMiB;
  options.disk_bytes = 8 * kMiB;
  options.disk_keep_free_bytes = 0;
  PosixFolderOptions where;
  where.path = temp.path() + "/store";
  PosixCalls calls;
  calls.engine = NewThreadEngine(2);
  calls.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) == 0) return open(path, flags, mode);
    errno = EINVAL;
    return -1;
  };
  absl::StatusOr<std::unique_ptr<Folder>> folder = OpenPosixFolder(where, std::move(calls));
  ASSERT_TRUE(folder.ok());
  const auto store = OpenStore(options, &executor, *std::move(folder));
  ASSERT_TRUE(store.ok()) << store.status();
  std::promise<absl::Status> flushed;
  (*store)->Flush([&flushed](absl::Status status) { flushed.set_value(std::move(status)); });
  EXPECT_EQ(flushed.get_future().get(), absl::OkStatus());
}

}  // namespace
}  // namespace kvferry
