// The streams being served: owned here until gRPC is done with them, and ended from here when the service drains.
#pragma once

#include <atomic>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "service/service_stats.h"
#include "storage/base/mutex.h"

namespace kvferry {

// One call that can last. Called on any thread; the first two only note what is wanted.
class LiveStream {
 public:
  virtual ~LiveStream() = default;
  virtual void SendDrainNotice() {}
  virtual void Stop() = 0;           // end with UNAVAILABLE
  virtual bool is_bulk() const = 0;  // a drain waits for a while as long as this holds
};

// Thread-safe.
class LiveStreams {
 public:
  // Owns `stream` until Remove. If the service is stopping the stream is told so at once.
  void Add(std::shared_ptr<LiveStream> stream);
  void Remove(LiveStream* stream);  // from OnDone

  void SendDrainNotices();
  // Until no stream is_bulk(); false if one still is at `deadline`.
  bool WaitForBulk(absl::Time deadline);
  void NoteIdle();  // a stream no longer is_bulk()
  void StopAll();   // also those yet to come

 private:
  template <typename Visit>
  void ForEach(Visit visit);
  bool AnyBulk() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;
  absl::flat_hash_map<LiveStream*, std::shared_ptr<LiveStream>> streams_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
