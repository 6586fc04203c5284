// A vector that grows without moving what is in it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry {

// Elements by number, made when they are first asked for, at addresses that stay. Growing costs a page at a time, so
// that it never copies under somebody's lock. Threads: none of its own.
template <typename T>
class PagedVector {
 public:
  T& operator[](uint32_t number) {
    const size_t page = number / kPage;
    if (page >= pages_.size()) pages_.resize(page + 1);
    if (pages_[page] == nullptr) pages_[page] = std::make_unique<Page>();
    return (*pages_[page])[number % kPage];
  }
  // REQUIRES: the element has been made.
  const T& at(uint32_t number) const { return (*pages_[number / kPage])[number % kPage]; }

 private:
  static constexpr size_t kPage = 1024;
  using Page = std::array<T, kPage>;
  std::vector<std::unique_ptr<Page>> pages_;
};

}  // namespace kvferry
