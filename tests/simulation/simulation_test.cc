// Seeds of the simulation. KVFERRY_SIM_SEEDS=n runs n of them, KVFERRY_SIM_FIRST=s from s on (one, if no number is
// given), KVFERRY_SIM_TRACE=1 tells every step.
#include "tests/simulation/simulation.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "storage/base/log.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

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
constexpr unsigned kPatience = 30;  // seconds that a seed may take

void TellSeed() {
  char line[160];
  const int size = std::snprintf(line, sizeof(line), "died in seed %llu: ./dev soak simulation 1 %llu\n",
                                 static_cast<unsigned long long>(running), static_cast<unsigned long long>(running));
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line, static_cast<size_t>(size));
}
void OnSignal(int signal) {
  TellSeed();
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
    std::signal(SIGALRM, OnSignal);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_set_death_callback(TellSeed);
#else
    for (const int signal : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, OnSignal);
#endif
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

// A seed in a process of its own, whose memory lies elsewhere.
std::string HashElsewhere(uint64_t seed) {
  const std::string command = absl::StrCat("KVFERRY_SIM_FIRST=", seed, " KVFERRY_SIM_SEEDS=1 exec ", "/proc/", getpid(),
                                           "/exe --gtest_filter=SimulationTest.Seeds 2>&1");
  std::string output;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return "";
  char part[256];
  while (std::fgets(part, sizeof(part), pipe) != nullptr) {
    if (absl::StartsWith(part, "hash ")) output = part;
  }
  pclose(pipe);
  return output;
}

TEST_F(SimulationTest, ASeedIsTheSameInEveryProcess) {
  for (const uint64_t seed : {3, 16, 42, 77, 101}) {
    const std::string first = HashElsewhere(seed);
    ASSERT_NE(first, "");
    EXPECT_EQ(HashElsewhere(seed), first) << "seed " << seed;
    // And here, after all that has run in this process.
    EXPECT_EQ(absl::StrCat("hash ", absl::Hex(RunSeed(seed, false).hash, absl::kZeroPad16), "\n"), first) << seed;
  }
}

}  // namespace
}  // namespace kvferry::simulation
