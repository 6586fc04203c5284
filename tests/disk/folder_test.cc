// What every Folder of this machine keeps to, however its transfers reach the kernel and whatever becomes of them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "storage/disk/posix_folder.h"
#include "tests/support/deny_uring.h"
#include "tests/support/disk_folder.h"
#include "tests/support/faulty_engine.h"

namespace kvferry {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// How a folder is opened: plainly, or with transfers that fall short.
struct Way {
  const char* name;
  IoKind io;
  bool direct;
  bool falls_short;
};

std::unique_ptr<IoEngine> NewEngine(IoKind io) {
  std::string why;
  return io == IoKind::kUring ? NewUringEngine(8, &why) : NewThreadEngine(4);
}

int64_t RandomlyShort(int number, const IoRequest& request) {
  if (request.kind == IoRequest::kSync) return 0;
  uint64_t bytes = 0;
  for (const iovec& piece : request.pieces) bytes += piece.iov_len;
  std::mt19937_64 random(number);
  return random() % 3 == 0 ? static_cast<int64_t>(512 * (1 + random() % (bytes / 512))) : 0;
}

class FolderTest : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    const Way way = GetParam();
    PosixCalls calls;
    calls.engine = NewEngine(way.io);
    if (calls.engine == nullptr) GTEST_SKIP() << "this kernel has no io_uring, or denies it";
    if (way.falls_short) calls.engine = std::make_unique<FaultyEngine>(std::move(calls.engine), RandomlyShort);
    absl::StatusOr<std::unique_ptr<Folder>> folder = OpenPosixFolder(Options(), std::move(calls));
    ASSERT_TRUE(folder.ok()) << folder.status();
    folder_ = *std::move(folder);
  }

  PosixFolderOptions Options() const {
    PosixFolderOptions options;
    options.path = temp_.path() + "/store";
    options.direct = GetParam().direct;
    return options;
  }

  std::unique_ptr<File> Create(absl::string_view name, uint64_t bytes) {
    absl::StatusOr<std::unique_ptr<File>> file = folder_->Create(name, bytes);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? *std::move(file) : nullptr;
  }

  TempFolder temp_;
  std::unique_ptr<Folder> folder_;
};

TEST_P(FolderTest, WhatWasWrittenIsRead) {
  const std::unique_ptr<File> file = Create("a", kMiB);
  for (const uint64_t bytes : {kDiskAlignment, 3 * kDiskAlignment, kMiB}) {
    const AlignedBuffer written = RandomBytes(bytes, bytes);
    AlignedBuffer read(bytes);
    EXPECT_EQ(Write(*file, kMiB - bytes, written.view()), absl::OkStatus());
    EXPECT_EQ(Sync(*file), absl::OkStatus());
    EXPECT_EQ(Read(*file, kMiB - bytes, read.view()), absl::OkStatus());
    EXPECT_EQ(read, written) << bytes;
  }
}

TEST_P(FolderTest, PiecesFollowOneAnother) {
  const std::unique_ptr<File> file = Create("a", kMiB);
  const AlignedBuffer first = RandomBytes(kDiskAlignment, 1), second = RandomBytes(5 * kDiskAlignment, 2);
  EXPECT_EQ(Await([&](IoDone done) {
              file->Write(kDiskAlignment, {first.view(), second.view(), first.view()}, std::move(done));
            }),
            absl::OkStatus());
  AlignedBuffer read(7 * kDiskAlignment);
  EXPECT_EQ(Read(*file, kDiskAlignment, read.view()), absl::OkStatus());
  EXPECT_EQ(read.view().subspan(0, kDiskAlignment), first.view());
  EXPECT_EQ(read.view().subspan(kDiskAlignment, 5 * kDiskAlignment), second.view());
  EXPECT_EQ(read.view().subspan(6 * kDiskAlignment), first.view());
}

TEST_P(FolderTest, ManyOperationsAtATime) {
  constexpr uint64_t kBlocks = 64;
  const std::unique_ptr<File> file = Create("a", kBlocks * kDiskAlignment);
  std::vector<AlignedBuffer> blocks;
  for (uint64_t i = 0; i < kBlocks; ++i) blocks.push_back(RandomBytes(kDiskAlignment, i));
  for (const bool write : {true, false}) {
    std::vector<std::promise<absl::Status>> done(kBlocks);
    std::vector<AlignedBuffer> read;
    for (uint64_t i = 0; i < kBlocks; ++i) read.emplace_back(kDiskAlignment);
    for (uint64_t i = 0; i < kBlocks; ++i) {
      const auto tell = [&, i](absl::Status status) { done[i].set_value(std::move(status)); };
      if (write) {
        file->Write(i * kDiskAlignment, {blocks[i].view()}, tell);
      } else {
        file->Read(i * kDiskAlignment, read[i].view(), tell);
      }
    }
    for (uint64_t i = 0; i < kBlocks; ++i) {
      EXPECT_EQ(done[i].get_future().get(), absl::OkStatus());
      if (!write) {
        EXPECT_EQ(read[i], blocks[i]) << i;
      }
    }
  }
}

TEST_P(FolderTest, CallbacksComeFromElsewhereAndMayGoOn) {
  const std::unique_ptr<File> file = Create("a", kMiB);
  const AlignedBuffer block = RandomBytes(kDiskAlignment, 1);
  std::promise<std::thread::id> thread;
  int left = 100;
  std::function<void(absl::Status)> next = [&](absl::Status status) {
    EXPECT_EQ(status, absl::OkStatus());
    if (--left == 0) return thread.set_value(std::this_thread::get_id());
    file->Write(left * kDiskAlignment, {block.view()}, next);
  };
  file->Write(0, {block.view()}, next);
  EXPECT_NE(thread.get_future().get(), std::this_thread::get_id());
}

TEST_P(FolderTest, AFileEnds) {
  const std::unique_ptr<File> file = Create("a", 2 * kDiskAlignment);
  AlignedBuffer read(2 * kDiskAlignment);
  const absl::Status status = Read(*file, kDiskAlignment, read.view());
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/store/a"));
  EXPECT_EQ(Read(*file, 9 * kDiskAlignment, read.view()).code(), absl::StatusCode::kOutOfRange);
  ASSERT_EQ(file->Truncate(kDiskAlignment), absl::OkStatus());
  EXPECT_EQ(*file->Size(), kDiskAlignment);
  EXPECT_EQ(Read(*file, 0, read.view()).code(), absl::StatusCode::kOutOfRange);
}

TEST_P(FolderTest, RoomIsTakenAtOnceAndGivenBack) {
  const std::unique_ptr<File> file = Create("a", kMiB);
  EXPECT_EQ(*file->Size(), kMiB);
  EXPECT_EQ(*file->AllocatedBytes(), kMiB);
  const AlignedBuffer written = RandomBytes(kMiB, 1);
  ASSERT_EQ(Write(*file, 0, written.view()), absl::OkStatus());
  ASSERT_EQ(file->Punch(256 * kKiB, 512 * kKiB), absl::OkStatus());
  EXPECT_EQ(*file->AllocatedBytes(), 512 * kKiB);
  EXPECT_EQ(*file->Size(), kMiB);
  AlignedBuffer read(kMiB);
  ASSERT_EQ(Read(*file, 0, read.view()), absl::OkStatus());
  EXPECT_EQ(read.view().subspan(0, 256 * kKiB), written.view().subspan(0, 256 * kKiB));
  EXPECT_THAT(read.view().subspan(256 * kKiB, 512 * kKiB), testing::Each(0));
  EXPECT_EQ(read.view().subspan(768 * kKiB), written.view().subspan(768 * kKiB));
}

TEST_P(FolderTest, Names) {
  EXPECT_THAT(*folder_->List(), ElementsAre());
  Create("b", 0);
  Create("a", kDiskAlignment);
  EXPECT_THAT(*folder_->List(), ElementsAre("a", "b"));
  EXPECT_EQ(folder_->Create("a", 0).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(*(*folder_->Open("a"))->Size(), kDiskAlignment);
  EXPECT_EQ(folder_->Open("c").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(folder_->Rename("a", "b"), absl::OkStatus());
  EXPECT_EQ(*(*folder_->Open("b"))->Size(), kDiskAlignment);
  EXPECT_EQ(folder_->Remove("a").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(folder_->Remove("b"), absl::OkStatus());
  EXPECT_EQ(folder_->Sync(), absl::OkStatus());
  EXPECT_THAT(*folder_->List(), ElementsAre());
}

TEST_P(FolderTest, OneStoreAFolder) {
  const absl::StatusOr<std::unique_ptr<Folder>> second = OpenPosixFolder(Options());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(Options().path + " is in use by another process"));
  folder_.reset();
  EXPECT_TRUE(OpenPosixFolder(Options()).ok());
}

TEST_P(FolderTest, TheVolumeTellsWhatItHas) {
  const uint64_t before = *folder_->FreeBytes();
  EXPECT_GT(before, kMiB);
}

TEST_P(FolderTest, PostedTasksRunBeforeTheFolderGoes) {
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) {
    folder_->Post([&ran, folder = folder_.get()] {
      if (++ran == 50) folder->Post([&ran] { ran += 1000; });
    });
  }
  folder_.reset();
  EXPECT_EQ(ran, 1100);
}

TEST_P(FolderTest, CallsThatBlockDoTheSame) {
  const std::unique_ptr<File> file = Create("a", kMiB);
  const AlignedBuffer first = RandomBytes(kMiB, 1), second = RandomBytes(kMiB, 2);
  AlignedBuffer read(kMiB);
  EXPECT_EQ(file->WriteNow(0, first.view()), absl::OkStatus());
  EXPECT_EQ(file->SyncNow(), absl::OkStatus());
  EXPECT_EQ(Read(*file, 0, read.view()), absl::OkStatus());
  EXPECT_EQ(read, first);
  EXPECT_EQ(Write(*file, 0, second.view()), absl::OkStatus());
  EXPECT_EQ(file->ReadNow(0, read.view()), absl::OkStatus());
  EXPECT_EQ(read, second);
  EXPECT_EQ(file->ReadNow(kDiskAlignment, read.view()).code(), absl::StatusCode::kOutOfRange);
}

TEST_P(FolderTest, AgreesWithAMap) {
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  constexpr uint64_t kBlocks = 256;
  const std::unique_ptr<File> file = Create("a", kBlocks * kDiskAlignment);
  AlignedBuffer oracle(kBlocks * kDiskAlignment);
  std::memset(oracle.view().data(), 0, oracle.view().size());
  for (int step = 0; step < 300; ++step) {
    const uint64_t from = random() % kBlocks, count = 1 + random() % std::min<uint64_t>(kBlocks - from, 40);
    const MutableByteView part = oracle.view().subspan(from * kDiskAlignment, count * kDiskAlignment);
    AlignedBuffer bytes = RandomBytes(part.size(), random());
    switch (random() % 5) {
      case 0:
        ASSERT_EQ(file->Punch(from * kDiskAlignment, part.size()), absl::OkStatus());
        std::memset(part.data(), 0, part.size());
        break;
      case 1:
      case 2:
        ASSERT_EQ(Write(*file, from * kDiskAlignment, bytes.view()), absl::OkStatus());
        std::memcpy(part.data(), bytes.view().data(), part.size());
        break;
      default:
        ASSERT_EQ(Read(*file, from * kDiskAlignment, bytes.view()), absl::OkStatus());
        ASSERT_EQ(bytes.view(), part);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, FolderTest,
                         testing::Values(Way{"threads", IoKind::kThreads, true, false},
                                         Way{"threads_buffered", IoKind::kThreads, false, false},
                                         Way{"threads_falling_short", IoKind::kThreads, true, true},
                                         Way{"uring", IoKind::kUring, true, false},
                                         Way{"uring_buffered", IoKind::kUring, false, false},
                                         Way{"uring_falling_short", IoKind::kUring, true, true}),
                         [](const auto& info) { return info.param.name; });

// A folder whose transfers a test makes fail.
class FolderFaultTest : public testing::Test {
 protected:
  void Open(FaultyEngine::Fault fault) {
    PosixCalls calls;
    auto engine = std::make_unique<FaultyEngine>(NewThreadEngine(2), std::move(fault));
    engine_ = engine.get();
    calls.engine = std::move(engine);
    calls.open = [this](const char* path, int flags, mode_t mode) {
      const int fd = open(path, flags, mode);
      if (!refuses_direct_ || (flags & O_DIRECT) == 0) return fd;
      if (fd >= 0) close(fd);  // as tmpfs did: the file is made, and then not opened
      errno = EINVAL;
      return -1;
    };
    PosixFolderOptions options;
    options.path = temp_.path();
    folder_ = *OpenPosixFolder(options, std::move(calls));
  }

  // Writes a block through the folder and reads it back.
  void ExpectWorks() {
    std::unique_ptr<File> file = *folder_->Create("works", kMiB);
    const AlignedBuffer written = RandomBytes(kMiB, 7);
    AlignedBuffer read(kMiB);
    EXPECT_EQ(Write(*file, 0, written.view()), absl::OkStatus());
    EXPECT_EQ(Read(*file, 0, read.view()), absl::OkStatus());
    EXPECT_EQ(read, written);
  }

  TempFolder temp_;
  bool refuses_direct_ = false;
  FaultyEngine* engine_ = nullptr;
  std::unique_ptr<Folder> folder_;
};

TEST_F(FolderFaultTest, DirectRefusedAtOpen) {
  refuses_direct_ = true;
  Open([](int, const IoRequest&) { return 0; });
  EXPECT_TRUE(folder_->direct());
  ExpectWorks();
  EXPECT_FALSE(folder_->direct());
}

TEST_F(FolderFaultTest, DirectRefusedOnlyByATransfer) {
  for (const IoRequest::Kind kind : {IoRequest::kWrite, IoRequest::kRead}) {
    folder_.reset();
    std::filesystem::remove(temp_.path() + "/works");
    Open([kind](int, const IoRequest& request) -> int64_t {
      return request.kind == kind && (fcntl(request.fd, F_GETFL) & O_DIRECT) != 0 ? -EINVAL : 0;
    });
    ExpectWorks();
    EXPECT_FALSE(folder_->direct());
  }
}

TEST_F(FolderFaultTest, ErrorsNameTheFileAndTheOperation) {
  int error = 0;
  Open([&error](int, const IoRequest&) { return -error; });
  std::unique_ptr<File> file = *folder_->Create("a", kMiB);
  AlignedBuffer block(kDiskAlignment);
  const std::vector<std::pair<int, absl::StatusCode>> expected = {{EIO, absl::StatusCode::kUnavailable},
                                                                  {ENOSPC, absl::StatusCode::kResourceExhausted},
                                                                  {EDQUOT, absl::StatusCode::kResourceExhausted},
                                                                  {EROFS, absl::StatusCode::kUnavailable}};
  for (const auto& [number, code] : expected) {
    error = number;
    const absl::Status written = Write(*file, 8192, block.view());
    EXPECT_EQ(written.code(), code);
    EXPECT_THAT(std::string(written.message()), HasSubstr("write 4096 bytes at 8192 of " + temp_.path() + "/a: "));
    EXPECT_THAT(std::string(written.message()), HasSubstr(std::strerror(number)));
    EXPECT_EQ(Read(*file, 0, block.view()).code(), code);
    EXPECT_THAT(std::string(Sync(*file).message()), HasSubstr("sync " + temp_.path() + "/a: "));
    EXPECT_EQ(file->WriteNow(0, block.view()).code(), code);
    EXPECT_EQ(file->ReadNow(0, block.view()).code(), code);
    EXPECT_EQ(file->SyncNow().code(), code);
  }
}

TEST_F(FolderFaultTest, ATransferThatNeverMovesAnythingEnds) {
  Open([](int, const IoRequest& request) { return request.kind == IoRequest::kWrite ? 512 : 0; });
  std::unique_ptr<File> file = *folder_->Create("a", kMiB);
  AlignedBuffer block(kDiskAlignment);
  EXPECT_EQ(Write(*file, 0, block.view()).code(), absl::StatusCode::kUnavailable);
}

TEST(DeniedUringTest, ThreadsTakeItsPlace) {
  std::thread([] {
    ASSERT_TRUE(DenyUring());
    std::string why;
    EXPECT_EQ(NewUringEngine(8, &why), nullptr);
    EXPECT_THAT(why, HasSubstr("Operation not permitted"));
    TempFolder temp;
    PosixFolderOptions options;
    options.path = temp.path();
    options.io = IoKind::kUring;
    EXPECT_EQ(OpenPosixFolder(options).status().code(), absl::StatusCode::kUnavailable);
    options.io = IoKind::kAuto;
    std::unique_ptr<Folder> folder = *OpenPosixFolder(options);
    EXPECT_EQ(folder->io(), "threads");
    std::unique_ptr<File> file = *folder->Create("a", kMiB);
    AlignedBuffer written = RandomBytes(kMiB, 3), read(kMiB);
    EXPECT_EQ(Write(*file, 0, written.view()), absl::OkStatus());
    EXPECT_EQ(Read(*file, 0, read.view()), absl::OkStatus());
    EXPECT_EQ(read, written);
  }).join();
}

}  // namespace
}  // namespace kvferry
