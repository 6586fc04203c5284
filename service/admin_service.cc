#include "service/admin_service.h"

#include <algorithm>
#include <vector>

#include "absl/time/clock.h"
#include "proto/codec.h"
#include "proto/frame.h"
#include "proto/version.h"
#include "service/request.h"

namespace kvferry {
namespace {

constexpr uint64_t kChunksInMessage = 512;

void AddStore(const StoreStats& s, v1::StatsReply* reply) {
  const auto gauge = [reply](const char* name, uint64_t value) {
    v1::StatsReply::Value* v = reply->add_values();
    v->set_name(name);
    v->set_value(value);
    v->set_gauge(true);
  };
  const auto count = [reply](const char* name, uint64_t value) {
    v1::StatsReply::Value* v = reply->add_values();
    v->set_name(name);
    v->set_value(value);
  };
  gauge("memory_budget_bytes", s.memory_budget_bytes);
  gauge("memory_used_bytes", s.memory_used_bytes);
  gauge("memory_free_in_segments_bytes", s.memory_free_in_segments_bytes);
  gauge("metadata_bytes", s.metadata_bytes);
  gauge("segments", s.segments);
  gauge("sessions", s.sessions);
  gauge("namespaces", s.namespaces);
  gauge("chunks_live", s.chunks_live);
  gauge("chunks_published", s.chunks_published);
  gauge("chunks_reserved", s.chunks_reserved);
  gauge("chunks_leased", s.chunks_leased);
  gauge("disk_budget_bytes", s.disk_budget_bytes);
  gauge("disk_used_bytes", s.disk_used_bytes);
  gauge("disk_live_bytes", s.disk_live_bytes);
  gauge("disk_io_uring", s.disk_io_uring);
  gauge("disk_direct", s.disk_direct);
  gauge("chunks_on_disk", s.chunks_on_disk);
  gauge("chunks_dirty", s.chunks_dirty);
  count("blocks_committed", s.blocks_committed);
  count("blocks_got", s.blocks_got);
  count("get_misses", s.get_misses);
  count("bytes_committed", s.bytes_committed);
  count("bytes_got", s.bytes_got);
  count("lookups", s.lookups);
  count("lookup_chunks_asked", s.lookup_chunks_asked);
  count("lookup_chunks_hit", s.lookup_chunks_hit);
  count("reserves", s.reserves);
  count("reserves_refused", s.reserves_refused);
  count("evictions", s.evictions);
  count("expirations", s.expirations);
  count("reservations_aborted", s.reservations_aborted);
  count("sessions_expired", s.sessions_expired);
  count("chunks_found", s.chunks_found);
  count("bytes_found", s.bytes_found);
  count("disk_writes", s.disk_writes);
  count("disk_bytes_written", s.disk_bytes_written);
  count("disk_writes_failed", s.disk_writes_failed);
  count("disk_evictions", s.disk_evictions);
  count("disk_reads", s.disk_reads);
  count("disk_bytes_read", s.disk_bytes_read);
  count("disk_reads_failed", s.disk_reads_failed);
  count("prefetches", s.prefetches);
  count("prefetches_dropped", s.prefetches_dropped);
  count("corruptions", s.corruptions);
}

void AddService(const ServiceStats& s, v1::StatsReply* reply) {
  const auto add = [reply](const char* name, const Counter& value, bool gauge = false) {
    v1::StatsReply::Value* v = reply->add_values();
    v->set_name(name);
    v->set_value(value);
    v->set_gauge(gauge);
  };
  add("put_blocks", s.put_blocks);
  add("put_bytes", s.put_bytes);
  add("put_bytes_copied", s.put_bytes_copied);
  add("put_blocks_failed", s.put_blocks_failed);
  add("put_checksum_errors", s.put_checksum_errors);
  add("get_blocks", s.get_blocks);
  add("get_bytes", s.get_bytes);
  add("malformed_messages", s.malformed_messages);
  add("sessions_opened", s.sessions_opened);
  add("sessions_resumed", s.sessions_resumed);
  add("sessions_superseded", s.sessions_superseded);
  add("sessions_silent", s.sessions_silent);
  add("session_streams", s.session_streams, true);
  add("put_streams", s.put_streams, true);
  add("get_streams", s.get_streams, true);
  add("get_bytes_held", s.get_bytes_held, true);
}

void Fill(const ChunkInfo& info, v1::ListReply::Chunk* out) {
  ChunkKey key = info.key;
  if (key.IsLive()) key.id[0] = kLiveBit | SessionTag(key.Owner());
  ToProto(key, out->mutable_key());
  out->set_tenant(info.tenant);
  out->set_model(info.model);
  out->set_state(info.state);
  out->set_bytes(info.bytes);
  out->set_tokens(info.tokens);
  out->set_leases(info.leases);
  out->set_layers(info.layers);
  out->set_layers_committed(info.layers_committed);
}

// Asks the store for the next message's chunks when the last one is off. Threads: gRPC's, one event at a time.
class ListStream : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  ListStream(ServiceContext* context, const grpc::ByteBuffer& request) : store_(context->store) {
    v1::ListRequest list;
    if (const absl::Status status = ReadRequest(request, context->stats, &list); !status.ok()) {
      Finish(ToGrpc(status));
      return;
    }
    left_ = list.limit() == 0 ? UINT64_MAX : list.limit();
    WriteNext();
  }

  void OnWriteDone(bool ok) override { ok ? WriteNext() : Finish(grpc::Status::OK); }
  void OnDone() override { delete this; }

 private:
  void WriteNext() {
    const std::vector<ChunkInfo> chunks = store_->List(last_, std::min(left_, kChunksInMessage));
    if (chunks.empty()) {
      Finish(grpc::Status::OK);
      return;
    }
    left_ -= chunks.size();
    last_ = chunks.back().number;
    v1::ListReply reply;
    for (const ChunkInfo& chunk : chunks) Fill(chunk, reply.add_chunks());
    reply_ = EncodeMessage(reply);
    StartWrite(&reply_);
  }

  const Store* const store_;
  uint64_t left_ = 0;  // of the limit
  uint64_t last_ = 0;  // number of the last chunk sent
  grpc::ByteBuffer reply_;
};

}  // namespace

grpc::ServerUnaryReactor* AdminService::Stats(grpc::CallbackServerContext* call, const grpc::ByteBuffer* request,
                                              grpc::ByteBuffer* reply) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  v1::StatsRequest read;
  const absl::Status status = ReadRequest(*request, context_->stats, &read);
  if (status.ok()) {
    v1::StatsReply stats;
    stats.set_version(kVersion);
    stats.set_boot(context_->boot);
    stats.set_uptime_ms(static_cast<uint64_t>(absl::ToInt64Milliseconds(absl::Now() - context_->started)));
    AddStore(context_->store->Stats(), &stats);
    AddService(*context_->stats, &stats);
    *reply = EncodeMessage(stats);
  }
  reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* AdminService::List(grpc::CallbackServerContext*,
                                                               const grpc::ByteBuffer* request) {
  return new ListStream(context_, *request);
}

}  // namespace kvferry
