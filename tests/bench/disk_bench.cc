// kvferry-disk-bench FOLDER BLOCK_BYTES DEPTH {auto|denied} {write|read} TOTAL_BYTES
//
// Appends images of BLOCK_BYTES to a log of segments in FOLDER until there are TOTAL_BYTES, DEPTH at a time, and syncs;
// or reads those that are there, in random order. `denied`: where the kernel denies io_uring. Prints bytes a second and
// how they reached the disk. tests/bench/disk.py compares it with fio.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "storage/base/checksum.h"
#include "storage/base/log.h"
#include "storage/base/mutex.h"
#include "storage/disk/aligned_buffer.h"
#include "storage/disk/posix_folder.h"
#include "storage/disk/segment_log.h"
#include "tests/support/deny_uring.h"

namespace kvferry {
namespace {

// Lets `depth` operations be under way at a time.
class Window {
 public:
  explicit Window(int depth) : left_(depth), depth_(depth) {}
  void Take() {
    MutexLock lock(&mu_);
    while (left_ == 0) changed_.Wait(&mu_);
    --left_;
  }
  void Give(const absl::Status& status) {
    MutexLock lock(&mu_);
    if (!status.ok()) status_ = status;
    ++left_;
    changed_.NotifyAll();
  }
  absl::Status Drain() {
    MutexLock lock(&mu_);
    while (left_ != depth_) changed_.Wait(&mu_);
    return status_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  int left_ ABSL_GUARDED_BY(mu_);
  const int depth_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

struct Arguments {
  std::string folder, io, what;
  uint64_t block = 0, total = 0;
  int depth = 0;
};

absl::Status Run(const Arguments& arguments) {
  PosixFolderOptions where;
  where.path = arguments.folder;
  where.depth = arguments.depth;
  auto folder = OpenPosixFolder(where);
  if (!folder.ok()) return folder.status();
  SegmentLogOptions options;
  options.store = {1, 2};
  options.bytes = arguments.total * 2 + kGiB;
  SegmentLog log(options, folder->get());
  std::vector<DiskPlace> places;
  const auto no_layout = [](const ChunkKey&) -> const ChunkLayout* { return nullptr; };
  absl::Status status = log.Recover(no_layout, [&](const ImageEntry&, DiskPlace place) {
    places.push_back(place);
    return true;
  });
  if (!status.ok()) return status;
  const uint64_t count = arguments.total / arguments.block;
  std::vector<AlignedBuffer> buffers;
  std::mt19937_64 random(1);
  for (int i = 0; i < arguments.depth; ++i) {
    AlignedBuffer& buffer = buffers.emplace_back(arguments.block);
    auto* words = reinterpret_cast<uint64_t*>(buffer.view().data());
    std::generate_n(words, buffer.size() / sizeof(*words), std::ref(random));
  }
  Window window(arguments.depth);
  const bool write = arguments.what == "write";
  if (!write) std::shuffle(places.begin(), places.end(), random);
  // Buffers go round: whose turn it is has been given back by the one `depth` before, or is read over, which is no
  // harm.
  const absl::Time start = absl::Now();
  for (uint64_t i = 0; i < (write ? count : places.size()); ++i) {
    window.Take();
    AlignedBuffer& buffer = buffers[i % buffers.size()];
    if (write) {
      ImageEntry entry;
      entry.key.id = {i, 1};
      log.Append({buffer.view()}, entry, [&](absl::StatusOr<DiskPlace> place) { window.Give(place.status()); });
    } else {
      log.Read(places[i], 0, buffer.view(), [&](const absl::Status& read) { window.Give(read); });
    }
  }
  status = window.Drain();
  if (write && status.ok()) {
    window.Take();
    log.Sync([&](const absl::Status& synced) { window.Give(synced); });
    status = window.Drain();
  }
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  if (!status.ok()) return status;
  std::cout << static_cast<double>((write ? count : places.size()) * arguments.block) / seconds << " "
            << (*folder)->io() << ((*folder)->direct() ? " direct" : " buffered") << "\n";
  window.Take();
  log.Close([&] { window.Give(absl::OkStatus()); });
  return window.Drain();
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  kvferry::Arguments arguments;
  kvferry::SetLogLevel(kvferry::LogLevel::kWarning);
  if (argc != 7 || !absl::SimpleAtoi(argv[2], &arguments.block) || !absl::SimpleAtoi(argv[3], &arguments.depth) ||
      !absl::SimpleAtoi(argv[6], &arguments.total)) {
    std::cerr << "usage: kvferry-disk-bench FOLDER BLOCK_BYTES DEPTH {auto|denied} {write|read} TOTAL_BYTES\n";
    return 2;
  }
  arguments.folder = argv[1];
  arguments.io = argv[4];
  arguments.what = argv[5];
  if (arguments.io == "denied" && !kvferry::DenyUring()) {
    std::cerr << "kvferry-disk-bench: this kernel does not let us deny io_uring\n";
    return 1;
  }
  const absl::Status status = kvferry::Run(arguments);
  if (status.ok()) return 0;
  std::cerr << status << "\n";
  return 1;
}
