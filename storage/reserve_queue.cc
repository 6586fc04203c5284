#include "storage/reserve_queue.h"

#include <algorithm>
#include <utility>

namespace kvferry {

void ReserveQueue::Push(MemoryRequest request) {
  const auto place = request.load == nullptr
                         ? waiting_.end()
                         : std::find_if(waiting_.begin(), waiting_.end(),
                                        [](const MemoryRequest& other) { return other.load == nullptr; });
  waiting_.insert(place, std::move(request));
}

MemoryRequest ReserveQueue::PopFront() {
  MemoryRequest request = std::move(waiting_.front());
  waiting_.pop_front();
  return request;
}

std::vector<MemoryRequest> ReserveQueue::TakeExpired(absl::Time now) {
  return TakeIf([now](const MemoryRequest& request) { return request.options.deadline <= now; });
}

std::vector<MemoryRequest> ReserveQueue::TakeAllOf(SessionId session) {
  return TakeIf([session](const MemoryRequest& request) { return request.session == session; });
}

template <typename Condition>
std::vector<MemoryRequest> ReserveQueue::TakeIf(Condition condition) {
  std::vector<MemoryRequest> taken;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (condition(*it)) {
      taken.push_back(std::move(*it));
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
  return taken;
}

absl::Time ReserveQueue::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const MemoryRequest& request : waiting_) next = std::min(next, request.options.deadline);
  return next;
}

}  // namespace kvferry
