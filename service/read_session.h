// One stream of gets, without any gRPC.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "service/service_stats.h"
#include "service/stepper.h"
#include "storage/base/block_view.h"
#include "storage/base/bytes.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"
#include "storage/read_ahead.h"
#include "storage/store.h"

namespace kvferry {

// A run of bytes of one block, or the reason why it has none. `view` pins the bytes.
struct GetPiece {
  uint32_t index = 0;  // of the key
  absl::Status status;
  uint64_t offset = 0;
  uint64_t size = 0;
  BlockView view;
};

// Gets blocks in the order of their keys, ahead of the consumer by at most a window of bytes (and always at least one
// block), and cuts them into batches for one message each. Nothing is copied: pieces refer to the store's memory.
// Chunks that come behind the window are hinted to the store. Thread-safe; Next by one thread at a time.
class ReadSession : public std::enable_shared_from_this<ReadSession> {
 public:
  static constexpr uint64_t kDefaultWindow = 8 * kMiB;
  static constexpr uint64_t kMaxWindow = 64 * kMiB;
  static constexpr size_t kMaxPiecesInBatch = 1024;

  // A key that has no value of ours comes as its status, which is then the block's. `on_ready` is called, never under a
  // lock, when Next may have something new. `window`: 0 for the default; at most kMaxWindow.
  ReadSession(Store* store, SessionId session, std::vector<absl::StatusOr<BlockKey>> keys, uint64_t window,
              ServiceStats* stats, std::function<void()> on_ready);
  ~ReadSession() { Cancel(); }

  void Start() { Fill(); }

  // Consecutive pieces of at most `max_bytes` in all. Empty: nothing is ready, or done().
  std::vector<GetPiece> Next(uint64_t max_bytes);
  // The consumer has sent this many bytes that Next gave: the window moves on.
  void Consumed(uint64_t bytes);
  bool done() const;  // Next has given everything
  // Forgets what was read ahead, and gives up what has not arrived. Next gives nothing more.
  void Cancel();

 private:
  // One key whose get was started, in order.
  struct Slot {
    bool arrived = false;
    absl::Status status;
    BlockView view;
    uint64_t given = 0;  // bytes
  };

  void Fill();
  void FillAsFarAsItGoes();
  bool TakeNextKey(size_t* index) ABSL_LOCKS_EXCLUDED(mu_);
  void Arrived(size_t index, absl::StatusOr<BlockView> view);

  Store* const store_;
  const SessionId session_;
  const std::vector<absl::StatusOr<BlockKey>> keys_;
  const uint64_t window_;
  ServiceStats* const stats_;
  const std::function<void()> on_ready_;
  const std::shared_ptr<std::atomic<bool>> given_up_ = std::make_shared<std::atomic<bool>>(false);

  Stepper filling_;
  // Touched by it alone.
  ReadAhead ahead_;
  bool hints_are_of_use_ = true;

  mutable Mutex mu_;
  std::deque<Slot> slots_ ABSL_GUARDED_BY(mu_);  // of keys [first_, next_)
  size_t first_ ABSL_GUARDED_BY(mu_) = 0;
  size_t next_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t held_ ABSL_GUARDED_BY(mu_) = 0;     // bytes arrived and not consumed
  bool waiting_ ABSL_GUARDED_BY(mu_) = false;  // the last get that was started has not arrived
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace kvferry
