// Answers that are due, each once.
#pragma once

#include "tests/simulation/simulation.h"

namespace kvferry::simulation {

class Simulation::Due {
 public:
  Due(Simulation* simulation, uint64_t number) : simulation_(*simulation), number_(number) {}

  // The answer has come; false: it had come before.
  bool Answer(const absl::Status& status) {
    const auto it = simulation_.due_.find(number_);
    if (it == simulation_.due_.end()) {
      simulation_.Fail("answered twice");
      return false;
    }
    simulation_.trace_.Add(it->second + ": " + absl::StatusCodeToString(status.code()));
    simulation_.due_.erase(it);
    return true;
  }

 private:
  Simulation& simulation_;
  const uint64_t number_;
};

}  // namespace kvferry::simulation
