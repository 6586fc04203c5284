#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "storage/base/mutex.h"
#include "storage/disk/io_engine.h"

namespace kvferry {

int64_t IoEngine::Transfer(const IoRequest& request) {
  const auto count = static_cast<int>(request.pieces.size());
  const auto offset = static_cast<off_t>(request.offset);
  for (;;) {
    int64_t result = 0;
    switch (request.kind) {
      case IoRequest::kRead:
        result = preadv(request.fd, request.pieces.data(), count, offset);
        break;
      case IoRequest::kWrite:
        result = pwritev(request.fd, request.pieces.data(), count, offset);
        break;
      case IoRequest::kSync:
        result = fdatasync(request.fd);
        break;
    }
    if (result >= 0) return result;
    if (errno != EINTR) return -errno;
  }
}

namespace {

class ThreadEngine : public IoEngine {
 public:
  explicit ThreadEngine(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }

  ~ThreadEngine() override {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    for (std::thread& thread : threads_) thread.join();
  }

  absl::string_view name() const override { return "threads"; }

  void Submit(IoRequest request) override {
    Post([this, request = std::move(request)]() mutable { std::move(request.done)(Transfer(request)); });
  }

  void Post(absl::AnyInvocable<void()> task) override {
    MutexLock lock(&mu_);
    tasks_.push_back(std::move(task));
    changed_.NotifyOne();
  }

 private:
  void Run() {
    MutexLock lock(&mu_);
    for (;;) {
      while (tasks_.empty() && !(stopping_ && running_ == 0)) changed_.Wait(&mu_);
      if (tasks_.empty()) return;
      absl::AnyInvocable<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      ++running_;
      mu_.Unlock();
      std::move(task)();
      task = nullptr;
      mu_.Lock();
      if (--running_ == 0 && stopping_) changed_.NotifyAll();  // it may have left more to do, or nothing to anybody
    }
  }

  Mutex mu_;
  CondVar changed_;
  std::deque<absl::AnyInvocable<void()>> tasks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int running_ ABSL_GUARDED_BY(mu_) = 0;  // tasks, which may post others
  std::vector<std::thread> threads_;      // last: they use what is above
};

}  // namespace

std::unique_ptr<IoEngine> NewThreadEngine(int threads) { return std::make_unique<ThreadEngine>(threads); }

}  // namespace kvferry
