#include "storage/reserve_queue.h"

#include <algorithm>
#include <utility>

namespace kvferry {

void ReserveQueue::Push(PendingReserve request) { waiting_.push_back(std::move(request)); }

PendingReserve ReserveQueue::PopFront() {
  PendingReserve request = std::move(waiting_.front());
  waiting_.pop_front();
  return request;
}

std::vector<PendingReserve> ReserveQueue::TakeExpired(absl::Time now) {
  return TakeIf([now](const PendingReserve& request) { return request.options.deadline <= now; });
}

std::vector<PendingReserve> ReserveQueue::TakeAllOf(SessionId session) {
  return TakeIf([session](const PendingReserve& request) { return request.session == session; });
}

template <typename Condition>
std::vector<PendingReserve> ReserveQueue::TakeIf(Condition condition) {
  std::vector<PendingReserve> taken;
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
  for (const PendingReserve& request : waiting_) next = std::min(next, request.options.deadline);
  return next;
}

}  // namespace kvferry
