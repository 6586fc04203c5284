// Lists that run through numbered nodes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "storage/paged_vector.h"

namespace kvferry {

// A doubly linked list of numbers, each in one list at a time. Node has `prev` and `next`, which are this class's.
template <typename Node>
class NumberList {
 public:
  explicit NumberList(PagedVector<Node>* nodes) : nodes_(*nodes) {}

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  // REQUIRES: not empty.
  uint32_t front() const { return front_; }

  void PushFront(uint32_t number) { Link(kNone, number, front_); }
  void PushBack(uint32_t number) { Link(back_, number, kNone); }
  // REQUIRES: it is in this list.
  void Erase(uint32_t number) {
    const Node& node = nodes_[number];
    (node.prev == kNone ? front_ : nodes_[node.prev].next) = node.next;
    (node.next == kNone ? back_ : nodes_[node.next].prev) = node.prev;
    --size_;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  void Link(uint32_t prev, uint32_t number, uint32_t next) {
    Node& node = nodes_[number];
    node.prev = prev;
    node.next = next;
    (prev == kNone ? front_ : nodes_[prev].next) = number;
    (next == kNone ? back_ : nodes_[next].prev) = number;
    ++size_;
  }

  PagedVector<Node>& nodes_;
  uint32_t front_ = kNone, back_ = kNone;
  size_t size_ = 0;
};

}  // namespace kvferry
