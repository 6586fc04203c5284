#include <liburing.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/mutex.h"
#include "storage/disk/io_engine.h"

namespace kvferry {
namespace {

// Whoever submits enters the kernel himself, so that a transfer starts without waking anybody; one thread waits for
// what has ended. What does not fit into the ring waits in line.
class UringEngine : public IoEngine {
 public:
  UringEngine(const io_uring& ring, int depth)
      : depth_(depth), ring_(ring), tasks_(NewThreadEngine(1)), poster_(tasks_.get()), reaper_([this] { Reap(); }) {}

  ~UringEngine() override {
    tasks_.reset();  // what was posted may submit
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      if (in_flight_ == 0) Wake();
    }
    reaper_.join();
    io_uring_queue_exit(&ring_);
  }

  absl::string_view name() const override { return "io_uring"; }

  void Submit(IoRequest request) override {
    auto owned = std::make_unique<IoRequest>(std::move(request));
    MutexLock lock(&mu_);
    waiting_.push_back(std::move(owned));
    Start();
  }

  void Post(absl::AnyInvocable<void()> task) override { poster_->Post(std::move(task)); }

 private:
  // Starts as many of those in line as there is room for.
  void Start() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    bool any = false;
    while (!waiting_.empty() && in_flight_ < depth_) {
      io_uring_sqe* entry = io_uring_get_sqe(&ring_);
      if (entry == nullptr) break;  // the kernel has not taken the ones before
      Prepare(waiting_.front().release(), entry);
      waiting_.pop_front();
      ++in_flight_;
      any = true;
    }
    if (any) Enter();
  }

  static void Prepare(IoRequest* request, io_uring_sqe* entry) {
    const auto count = static_cast<unsigned>(request->pieces.size());
    switch (request->kind) {
      case IoRequest::kRead:
        io_uring_prep_readv(entry, request->fd, request->pieces.data(), count, request->offset);
        break;
      case IoRequest::kWrite:
        io_uring_prep_writev(entry, request->fd, request->pieces.data(), count, request->offset);
        break;
      case IoRequest::kSync:
        io_uring_prep_fsync(entry, request->fd, IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data(entry, request);
  }

  // Hands what was prepared to the kernel. One that is short of memory (EAGAIN) is asked again: nobody else would.
  void Enter() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    while (io_uring_sq_ready(&ring_) != 0) {
      if (io_uring_submit(&ring_) < 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // Ends the reaper's wait.
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_nop(entry);
    io_uring_sqe_set_data(entry, nullptr);
    Enter();
  }

  void Reap() {
    do {
      io_uring_cqe* entry = nullptr;
      if (io_uring_wait_cqe(&ring_, &entry) < 0) continue;  // a signal
      std::unique_ptr<IoRequest> request(static_cast<IoRequest*>(io_uring_cqe_get_data(entry)));
      const int64_t result = entry->res;
      io_uring_cqe_seen(&ring_, entry);
      if (request == nullptr) continue;
      if (result == -EINTR || result == -EAGAIN) {
        Next(std::move(request));
      } else {
        Next(nullptr);  // before the callback: the disk need not wait for it
        std::move(request->done)(result);
      }
    } while (!Over());
  }

  // A transfer has ended, or is to be tried `again`.
  void Next(std::unique_ptr<IoRequest> again) {
    MutexLock lock(&mu_);
    --in_flight_;
    if (again != nullptr) waiting_.push_front(std::move(again));
    Start();
  }

  bool Over() {
    MutexLock lock(&mu_);
    return stopping_ && in_flight_ == 0 && waiting_.empty();
  }

  Mutex mu_;
  const int depth_;
  io_uring ring_;
  std::deque<std::unique_ptr<IoRequest>> waiting_ ABSL_GUARDED_BY(mu_);
  int in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::unique_ptr<IoEngine> tasks_;
  IoEngine* const poster_;  // tasks_, also while it runs its last ones
  std::thread reaper_;      // last: it uses what is above
};

}  // namespace

std::unique_ptr<IoEngine> NewUringEngine(int depth, std::string* why) {
  io_uring ring;
  if (const int error = io_uring_queue_init(static_cast<unsigned>(depth), &ring, 0); error < 0) {
    *why = absl::StrCat("io_uring_setup failed: ", std::strerror(-error));
    return nullptr;
  }
  return std::make_unique<UringEngine>(ring, depth);
}

}  // namespace kvferry
