#include "storage/reserve_queue.h"

#include <utility>

namespace kvferry {

uint64_t ReserveQueue::Push(PendingReserve request) {
  waiting_.emplace(next_ticket_, std::move(request));
  return next_ticket_++;
}

PendingReserve ReserveQueue::PopFront() {
  PendingReserve request = std::move(waiting_.begin()->second);
  waiting_.erase(waiting_.begin());
  return request;
}

bool ReserveQueue::Take(uint64_t ticket, PendingReserve* out) {
  const auto it = waiting_.find(ticket);
  if (it == waiting_.end()) return false;
  *out = std::move(it->second);
  waiting_.erase(it);
  return true;
}

std::vector<PendingReserve> ReserveQueue::TakeAllOf(SessionId session) {
  std::vector<PendingReserve> taken;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->second.session == session) {
      taken.push_back(std::move(it->second));
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
  return taken;
}

std::vector<PendingReserve> ReserveQueue::TakeAll() {
  std::vector<PendingReserve> taken;
  for (auto& [ticket, request] : waiting_) taken.push_back(std::move(request));
  waiting_.clear();
  return taken;
}

}  // namespace kvferry
