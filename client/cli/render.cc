#include "client/cli/render.h"

#include <algorithm>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/codec.h"
#include "storage/base/bytes.h"

namespace kvferry::cli {
namespace {

std::string ForPeople(const std::string& name, uint64_t value) {
  if (!absl::StrContains(name, "bytes") || value < kKiB) return absl::StrCat(value);
  if (value >= kGiB) return absl::StrFormat("%.2f GiB", static_cast<double>(value) / kGiB);
  if (value >= kMiB) return absl::StrFormat("%.2f MiB", static_cast<double>(value) / kMiB);
  return absl::StrFormat("%.2f KiB", static_cast<double>(value) / kKiB);
}

// Quoted. Bytes that are no ASCII go through as they are: the fields are UTF-8 already.
std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", c);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Columns as wide as their widest cell; numbers to the right.
std::string Table(const std::vector<std::vector<std::string>>& rows, const std::vector<bool>& right) {
  std::vector<size_t> widths(right.size(), 0);
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      absl::StrAppend(&line, i > 0 ? "  " : "", right[i] ? pad + row[i] : row[i] + pad);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&out, line, "\n");
  }
  return out;
}

std::string IdText(const v1::Id& id) { return ToString(FromProto(id)); }

}  // namespace

std::string StatsTable(const std::string& server, const v1::StatsReply& stats) {
  std::vector<std::vector<std::string>> rows = {
      {"server", server},
      {"version", stats.version()},
      {"boot", absl::StrFormat("%016x", stats.boot())},
      {"uptime", absl::FormatDuration(absl::Milliseconds(stats.uptime_ms()))},
  };
  for (const v1::StatsReply::Value& value : stats.values()) {
    rows.push_back({value.name(), ForPeople(value.name(), value.value())});
  }
  return Table(rows, {false, true});
}

std::string StatsJson(const v1::StatsReply& stats) {
  std::string out = absl::StrFormat("{\"version\": %s, \"boot\": \"%016x\", \"uptime_ms\": %d, \"values\": {",
                                    Quoted(stats.version()), stats.boot(), stats.uptime_ms());
  for (int i = 0; i < stats.values_size(); ++i) {
    absl::StrAppend(&out, i > 0 ? ", " : "", Quoted(stats.values(i).name()), ": ", stats.values(i).value());
  }
  return out + "}}\n";
}

std::string ChunkTable(const v1::ListReply& list) {
  std::vector<std::vector<std::string>> rows = {
      {"CHUNK", "NAMESPACE", "GROUP", "SHARD", "STATE", "BYTES", "TOKENS", "LAYERS", "LEASES", "TENANT", "MODEL"}};
  for (const v1::ListReply::Chunk& chunk : list.chunks()) {
    rows.push_back({IdText(chunk.key().id()), IdText(chunk.key().ns()).substr(0, 8), absl::StrCat(chunk.key().group()),
                    absl::StrCat(chunk.key().shard()), chunk.state(), ForPeople("bytes", chunk.bytes()),
                    absl::StrCat(chunk.tokens()), absl::StrCat(chunk.layers_committed(), "/", chunk.layers()),
                    absl::StrCat(chunk.leases()), chunk.tenant(), chunk.model()});
  }
  return Table(rows, {false, false, true, true, false, true, true, true, true, false, false});
}

std::string ChunkJson(const v1::ListReply& list) {
  std::string out = "[";
  for (int i = 0; i < list.chunks_size(); ++i) {
    const v1::ListReply::Chunk& c = list.chunks(i);
    absl::StrAppend(&out, i > 0 ? ",\n " : "", "{\"id\": ", Quoted(IdText(c.key().id())),
                    ", \"namespace\": ", Quoted(IdText(c.key().ns())), ", \"group\": ", c.key().group(),
                    ", \"shard\": ", c.key().shard());
    absl::StrAppend(&out, ", \"state\": ", Quoted(c.state()), ", \"bytes\": ", c.bytes(), ", \"tokens\": ", c.tokens(),
                    ", \"layers\": ", c.layers(), ", \"layers_committed\": ", c.layers_committed());
    absl::StrAppend(&out, ", \"leases\": ", c.leases(), ", \"tenant\": ", Quoted(c.tenant()),
                    ", \"model\": ", Quoted(c.model()), "}");
  }
  return out + "]\n";
}

}  // namespace kvferry::cli
