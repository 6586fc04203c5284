// Seeds of the simulation. KVFERRY_SIM_SEEDS=n runs n of them, KVFERRY_SIM_FIRST=s from s on (one, if no number is
// given), KVFERRY_SIM_TRACE=1 tells every step.
#include "tests/simulation/simulation.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "storage/base/log.h"

namespace kvferry::simulation {
namespace {

uint64_t Given(const char* name, uint64_t otherwise) {
  const char* given = std::getenv(name);
  uint64_t value = otherwise;
  if (given != nullptr && !absl::SimpleAtoi(given, &value)) ADD_FAILURE() << name << " is " << given;
  return value;
}

// The seed that runs, for when the process dies of it.
volatile uint64_t running = 0;
constexpr unsigned kPatience = 20;  // seconds that a seed may take

void TellSeed(int signal) {
  char line[160];
  const int size = std::snprintf(line, sizeof(line), "signal %d in seed %llu: ./dev soak simulation 1 %llu\n", signal,
                                 static_cast<unsigned long long>(running), static_cast<unsigned long long>(running));
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, static_cast<size_t>(size));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

struct Outcome {
  std::string failure;
  uint64_t hash = 0;
};
Outcome RunSeed(uint64_t seed, bool verbose) {
  running = seed;
  alarm(kPatience);
  Simulation simulation(seed, verbose);
  simulation.Run();
  alarm(0);
  return {simulation.failure(), simulation.hash()};
}

class SimulationTest : public testing::Test {
 protected:
  SimulationTest() {
    if (std::getenv("KVFERRY_SIM_TRACE") == nullptr) SetLogLevel(LogLevel::kNone);
    for (const int signal : {SIGSEGV, SIGABRT, SIGALRM, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, TellSeed);
  }
};

TEST_F(SimulationTest, Seeds) {
  const bool one = std::getenv("KVFERRY_SIM_FIRST") != nullptr;
  const uint64_t first = Given("KVFERRY_SIM_FIRST", 1), seeds = Given("KVFERRY_SIM_SEEDS", one ? 1 : 200);
  const bool verbose = Given("KVFERRY_SIM_TRACE", 0) != 0;
  std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + seeds - 1));
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const Outcome outcome = RunSeed(seed, verbose);
    if (seeds == 1) std::printf("hash %016llx\n", static_cast<unsigned long long>(outcome.hash));
    ASSERT_EQ(outcome.failure, "") << "seed " << seed << ": ./dev soak simulation 1 " << seed;
    if ((seed - first) % 100 == 99) {
      std::printf("%llu seeds passed\n", static_cast<unsigned long long>(seed - first + 1));
      std::fflush(stdout);
    }
  }
  const Simulation::Met& met = Simulation::met;
  std::printf(
      "steps %llu, crashes %llu, hits %llu, misses %llu, refused %llu, found after a crash %llu, flushed before %llu, "
      "evictions %llu, from "
      "disk %llu, spills %llu, loads %llu, failed writes %llu, failed reads %llu, corruptions %llu, flushes %llu, "
      "erasures %llu, expirations %llu, prefetches %llu\n",
      static_cast<unsigned long long>(met.steps), static_cast<unsigned long long>(met.crashes),
      static_cast<unsigned long long>(met.gets_hit), static_cast<unsigned long long>(met.gets_missed),
      static_cast<unsigned long long>(met.refusals), static_cast<unsigned long long>(met.found),
      static_cast<unsigned long long>(met.durable), static_cast<unsigned long long>(met.evictions),
      static_cast<unsigned long long>(met.disk_evictions), static_cast<unsigned long long>(met.spills),
      static_cast<unsigned long long>(met.loads), static_cast<unsigned long long>(met.failed_writes),
      static_cast<unsigned long long>(met.failed_reads), static_cast<unsigned long long>(met.corruptions),
      static_cast<unsigned long long>(met.flushes), static_cast<unsigned long long>(met.erasures),
      static_cast<unsigned long long>(met.expirations), static_cast<unsigned long long>(met.prefetches));
}

}  // namespace
}  // namespace kvferry::simulation
