// The streams being served: owned here until gRPC is done with them, and ended from here when the service drains.
#pragma once

#include <atomic>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "service/service_stats.h"
#include "storage/base/mutex.h"

namespace kvferry {

// One call that can last. Both are called on any thread and only note what is wanted.
class LiveStream {
 public:
  virtual ~LiveStream() = default;
  virtual void SendDrainNotice() {}
  virtual void Stop() = 0;           // end with UNAVAILABLE
  virtual bool is_bulk() const = 0;  // a drain waits for it for a while
};

// Thread-safe.
class LiveStreams {
 public:
  // Owns `stream` until Remove. If the service is stopping the stream is told so at once.
  void Add(std::shared_ptr<LiveStream> stream);
  void Remove(LiveStream* stream);  // from OnDone

  void SendDrainNotices();
  // False if some are still running at `deadline`.
  bool WaitForBulk(absl::Time deadline);
  void StopAll();  // also those yet to come

 private:
  template <typename Visit>
  void ForEach(Visit visit);

  Mutex mu_;
  CondVar changed_;
  absl::flat_hash_map<LiveStream*, std::shared_ptr<LiveStream>> streams_ ABSL_GUARDED_BY(mu_);
  size_t bulk_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
