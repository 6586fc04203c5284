// One chunk of KV into a store and back: `roundtrip unix:///run/kvferry/kvferry.sock`, or without an argument in this
// process.
#include <cstring>
#include <future>
#include <iostream>
#include <string>

#include "client/transport.h"
#include "storage/base/checksum.h"

namespace kvferry {
namespace {

// Two layers, each with 2 KV heads of 64 dimensions, in blocks of 16 tokens.
NamespaceSpec ExampleSpec() {
  NamespaceSpec spec;
  spec.dtype = "float32";
  spec.dtype_bytes = 4;
  spec.block_tokens = 16;
  const LayerSpec layer{.parts = {{.heads = 2, .dim = 64}, {.heads = 2, .dim = 64}}};  // K, then V
  spec.groups = {GroupSpec{.layers = {layer, layer}}};
  return spec;
}

absl::Status RoundTrip(const std::string& url) {
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  auto transport = Connect(url, ConnectOptions{});
  if (!transport.ok()) return transport.status();
  auto ns = (*transport)->OpenNamespace(ExampleSpec(), deadline);
  if (!ns.ok()) return ns.status();

  // Reserve a chunk, pack every layer in place, hand each over. The last one seals the chunk.
  auto writers = (*transport)->Reserve({.ns = *ns}, deadline);
  if (!writers.ok()) return writers.status();
  ChunkWriter& writer = *writers->front();
  const ChunkKey key = writer.key();
  for (uint16_t layer = 0; layer < 2; ++layer) {
    const MutableByteView block = writer.Layer(layer);
    std::memset(block.data(), 'a' + layer, block.size());
    std::promise<absl::Status> acknowledged;
    writer.Commit(layer, BlockChecksum(block), [&](absl::Status status) { acknowledged.set_value(status); });
    if (absl::Status status = acknowledged.get_future().get(); !status.ok()) return status;
  }

  // Read them back in the order a model needs them. Every block that arrives has been checked.
  const BlockKey blocks[] = {{key, 0}, {key, 1}};
  const auto stream = (*transport)->Fetch(blocks, deadline);
  for (const BlockKey& block : blocks) {
    auto view = stream->Next();
    if (!view.ok()) return view.status();
    std::string bytes(view->size(), '\0');
    view->CopyTo(0, view->size(), reinterpret_cast<uint8_t*>(bytes.data()));
    std::cout << ToString(block) << ": " << view->size() << " bytes of '" << bytes[0] << "'\n";
  }
  (*transport)->Release({&key, 1}, (*transport)->epoch());  // by its live key: the chunk is freed
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  const absl::Status status = kvferry::RoundTrip(argc > 1 ? argv[1] : "embedded://");
  if (!status.ok()) std::cerr << status << '\n';
  return status.ok() ? 0 : 1;
}
