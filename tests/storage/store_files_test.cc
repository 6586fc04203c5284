// What becomes of a store whose files somebody else damages, and of a disk that is out of room for a while.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <vector>

#include "storage/base/log.h"
#include "tests/storage/folder_store_fixture.h"
#include "tests/support/faulty_engine.h"

namespace kvferry {
namespace {

class StoreFiles : public FolderStoreFixture {
 protected:
  StoreFiles() { SetLogLevel(LogLevel::kNone); }
  ~StoreFiles() override { SetLogLevel(LogLevel::kInfo); }

  void Begin(uint64_t chunks) {
    PosixCalls calls;
    calls.engine = std::make_unique<FaultyEngine>(NewThreadEngine(2), [this](int, const IoRequest& request) -> int64_t {
      if (request.kind != IoRequest::kWrite || writes_to_fail_ <= 0 || writes_to_pass_-- > 0) return 0;
      --writes_to_fail_;
      return -EIO;
    });
    ASSERT_EQ(OpenFolder(chunks, std::move(calls)), absl::OkStatus());
  }
  // Chunks 1 to `count`, on disk, and no more than the last of them in memory.
  void PutOnDisk(uint64_t count) {
    for (uint64_t id = 1; id <= count; ++id) Put(id);
    ASSERT_EQ(Flush(), absl::OkStatus());
  }
  std::vector<std::filesystem::path> Segments() const {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(temp_->path() + "/store")) {
      if (entry.path().filename().string().rfind("segment-", 0) == 0) paths.push_back(entry.path());
    }
    return paths;
  }
  // What is not there is a miss at once, by every call; what is there has its own bytes; and the store goes on.
  void ExpectMissesAlone(uint64_t count) {
    const std::set<uint64_t> found = Read(count);
    EXPECT_LT(found.size(), count);
    for (uint64_t id = 1; id <= count; ++id) {
      EXPECT_EQ(Lookup(session_, {Prefix(ns_, id)}, false), static_cast<int>(found.count(id))) << id;
    }
    for (uint64_t id = 1; id <= count; ++id) {
      if (!found.contains(id)) Put(id);
    }
    EXPECT_EQ(Read(count).size(), count);
  }

  std::atomic<int> writes_to_pass_{0}, writes_to_fail_{0};
};

// B53, B54: cut by a byte, by a page, to nothing; the others of the file are read, and so are those behind them.
TEST_F(StoreFiles, ACutFileIsAMissForWhatItHasLost) {
  for (const int64_t cut : {int64_t{1}, int64_t{4096}, int64_t{1} << 40}) {
    SCOPED_TRACE(cut);
    temp_ = std::make_unique<TempFolder>();
    Begin(3);
    PutOnDisk(10);
    Close();  // seals it, so that a chunk is the last thing before its footer
    Begin(3);
    for (const std::filesystem::path& path : Segments()) {
      const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
      std::filesystem::resize_file(path, static_cast<uintmax_t>(std::max<int64_t>(0, size - 8192 - cut)));
    }
    ExpectMissesAlone(10);
    Close();
  }
}

// B54: of the right size and with a wrong byte.
TEST_F(StoreFiles, AWrongByteIsAMiss) {
  Begin(3);
  PutOnDisk(10);
  for (const std::filesystem::path& path : Segments()) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const int64_t at : {10000, 200000}) {
      file.seekg(at);
      const auto byte = static_cast<char>(file.get() ^ 1);
      file.seekp(at);
      file.put(byte);
    }
  }
  ExpectMissesAlone(10);
  EXPECT_EQ(store_->Stats().corruptions, 2u);
}

// B55, B60: a file that went away while the store had it open is read on; a start without it has misses, and no more.
TEST_F(StoreFiles, AFileThatWentAwayIsAMiss) {
  Begin(3);
  PutOnDisk(10);
  Close();
  const std::vector<std::filesystem::path> segments = Segments();
  ASSERT_GE(segments.size(), 1u);
  std::filesystem::remove(segments[0]);
  Begin(3);
  ExpectMissesAlone(10);
}

// B57: of many writes some fail, once. The others are written, and a second flush writes those.
TEST_F(StoreFiles, AFlushThatFailsInPartWritesTheRest) {
  options_.write_policy = WritePolicy::kWriteBack;
  Begin(100);
  for (uint64_t id = 1; id <= 60; ++id) Put(id);
  writes_to_pass_ = 7;
  writes_to_fail_ = 6;
  EXPECT_FALSE(Flush().ok());
  const uint64_t written = store_->Stats().disk_writes;
  EXPECT_GE(written, 50u);
  EXPECT_LT(written, 60u);
  EXPECT_EQ(Flush(), absl::OkStatus());
  EXPECT_EQ(store_->Stats().chunks_on_disk, 60u);
  EXPECT_EQ(Read(60).size(), 60u);
}

// B58, B67: what is on disk already is not written again, whatever part of a prefix each tier has.
TEST_F(StoreFiles, ATierGetsWhatItLacks) {
  Begin(100);
  for (uint64_t id = 1; id <= 6; ++id) Put(id);
  ASSERT_EQ(Flush(), absl::OkStatus());
  for (uint64_t id = 7; id <= 13; ++id) Put(id);
  EXPECT_EQ(Await<absl::Status>([&](auto done) { store_->Erase(session_, Prefix(ns_, 4), std::move(done)); }),
            absl::OkStatus());
  Put(4);
  std::future<absl::Status> flushes[2];
  std::promise<absl::Status> promises[2];
  for (int i = 0; i < 2; ++i) {
    flushes[i] = promises[i].get_future();
    store_->Flush([&promises, i](absl::Status status) { promises[i].set_value(std::move(status)); });
  }
  for (std::future<absl::Status>& flush : flushes) EXPECT_EQ(flush.get(), absl::OkStatus());
  EXPECT_EQ(store_->Stats().disk_writes, 14u) << "each once, and the one that was erased twice";
  EXPECT_EQ(store_->Stats().chunks_on_disk, 13u);
  EXPECT_EQ(Read(13).size(), 13u);
}

// B62: what a start finds keeps its place, however much is written after it.
TEST_F(StoreFiles, WhatWasFoundIsNotWrittenOver) {
  Begin(3);
  PutOnDisk(20);
  for (int again = 1; again <= 3; ++again) {
    Close();
    Begin(3);
    for (uint64_t id = 1; id <= 20; ++id) Put(static_cast<uint64_t>(again) * 20 + id);
    ASSERT_EQ(Flush(), absl::OkStatus());
    EXPECT_EQ(Read(20).size(), 20u);
  }
}

// B52, B66: full, for as long as anybody looks, and never a byte above the bound.
TEST_F(StoreFiles, TheFolderStaysWithinItsBound) {
  Begin(3);
  for (uint64_t id = 1; id <= 400; ++id) {
    Put(id);
    uint64_t taken = 0;
    for (const std::filesystem::path& path : Segments()) {
      struct stat info {};
      if (stat(path.c_str(), &info) == 0) taken += static_cast<uint64_t>(info.st_blocks) * 512;
    }
    ASSERT_LE(taken, options_.disk_bytes) << id;
  }
  EXPECT_GT(store_->Stats().disk_evictions, 0u);
  const std::set<uint64_t> found = Read(400);
  EXPECT_GT(found.size(), 50u);
  EXPECT_TRUE(found.contains(400));
}

}  // namespace
}  // namespace kvferry
