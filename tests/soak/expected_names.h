// What one writer knows of the names that it alone publishes, whatever becomes of the daemon.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace kvferry {

// A version of a name is the seed of its bytes. Threads: one at a time.
class ExpectedNames {
 public:
  struct Name {
    std::optional<uint64_t> now;   // acknowledged, and not erased since
    std::optional<uint64_t> must;  // of it, what a restart has to find
    std::set<uint64_t> may;        // what a restart may find
  };

  explicit ExpectedNames(size_t names) : names_(names) {}

  size_t size() const { return names_.size(); }
  const Name& operator[](size_t i) const { return names_[i]; }

  // Before and after what is asked of the daemon: in between it may be killed.
  void Publishing(size_t i, uint64_t version) { names_[i].may.insert(version); }
  void Published(size_t i, uint64_t version) { names_[i].now = version; }
  void Erasing(size_t i) { names_[i].now = names_[i].must = std::nullopt; }
  void Erased(size_t i) { names_[i] = {}; }
  // After a flush, or an orderly end: everything acknowledged before is there to stay.
  void Flushed() {
    for (Name& name : names_) name.must = name.now;
  }
  // It may have been lost, as the write policy allows, and is a miss now.
  void Lost(size_t i) { names_[i] = {}; }

  // After a restart. What was found stays, and what was not found does not come back.
  bool Agrees(size_t i, std::optional<uint64_t> found) const {
    const Name& name = names_[i];
    return name.must.has_value() ? found == name.must : !found.has_value() || name.may.contains(*found);
  }
  void Found(size_t i, std::optional<uint64_t> found) {
    names_[i] = {found, found, {}};
    if (found.has_value()) names_[i].may.insert(*found);
  }

 private:
  std::vector<Name> names_;
};

}  // namespace kvferry
