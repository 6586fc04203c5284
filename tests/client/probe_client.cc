// A client process for tests: `probe_client read URL` reads what GrpcTransportTest published; `probe_client stop URL`
// has itself stopped in the middle of everything and finds nothing lost. Exit status 0: all is well.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "tests/support/put_and_get.h"

namespace kvferry {
namespace {

#define CHECK_THAT(condition)                                         \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      return 1;                                                       \
    }                                                                 \
  } while (false)

int Read(Transport* transport) {
  const NamespaceId ns = Open(transport, SpecOf({30'000}));
  const ChunkKey name{ns, PrefixKey(1), 0, 0};
  CHECK_THAT(transport->Lookup({name}, true, Soon())->chunks == 1);
  const auto block = GetOne(transport, {name, 0});
  CHECK_THAT(block.ok());
  CHECK_THAT(Bytes(*block) == Pattern(4, 30'000));
  return 0;
}

int Stop(Transport* transport) {
  constexpr uint32_t kBlock = 1 << 20;
  const NamespaceId ns = Open(transport, SpecOf(std::vector<uint32_t>(4, kBlock)));
  const ChunkKey chunk = PutChunk(transport, ns, 4, 1);
  auto half = ReserveOne(transport, ns);
  CHECK_THAT(Put(half.get(), 0, 50).ok());
  std::vector<BlockKey> keys;
  for (int i = 0; i < 24; ++i) keys.push_back({chunk, static_cast<uint16_t>(i % 4)});
  const uint64_t epoch = transport->epoch();
  // Its deadline passes while this process is stopped.
  auto stream = transport->Fetch(keys, absl::Now() + absl::Seconds(5));
  CHECK_THAT(stream->Next().ok());
  raise(SIGSTOP);
  for (int i = 1; i < 24; ++i) {
    const auto block = stream->Next();
    if (!block.ok()) fprintf(stderr, "block %d: %s\n", i, block.status().ToString().c_str());
    CHECK_THAT(block.ok());
    CHECK_THAT(Bytes(*block) == Pattern(1 + static_cast<uint64_t>(i % 4), kBlock));
  }
  for (int layer = 1; layer < 4; ++layer) CHECK_THAT(Put(half.get(), layer, 50).ok());
  const auto block = GetOne(transport, {half->key(), 0});
  CHECK_THAT(block.ok());
  CHECK_THAT(Bytes(*block) == Pattern(50, kBlock));
  CHECK_THAT(transport->epoch() == epoch);
  return 0;
}

int Main(const char* what, const std::string& url) {
  ConnectOptions options;
  options.heartbeat = absl::Seconds(1);
  auto transport = Connect(url, options);
  CHECK_THAT(transport.ok());
  return strcmp(what, "read") == 0 ? Read(transport->get()) : Stop(transport->get());
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) { return argc == 3 ? kvferry::Main(argv[1], argv[2]) : 2; }
