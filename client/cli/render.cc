#include "client/cli/render.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
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

// Bytes of the character at the front of `text`, 0 if they are not UTF-8.
size_t CharacterSize(absl::string_view text) {
  const auto byte = [text](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const uint8_t lead = byte(0), second = byte(1);
  if (lead < 0x80) return 1;
  const size_t size = lead >= 0xc2 && lead <= 0xdf   ? 2
                      : (lead & 0xf0) == 0xe0        ? 3
                      : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                     : 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool longer_than_needed = (lead == 0xe0 && second < 0xa0) || (lead == 0xf0 && second < 0x90);
  const bool no_character = (lead == 0xed && second >= 0xa0) || (lead == 0xf4 && second >= 0x90);
  return longer_than_needed || no_character ? 0 : size;
}

// For a terminal: what is no UTF-8 or moves the cursor comes as \xNN.
std::string Printable(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t size = CharacterSize(text);
    const auto lead = static_cast<uint8_t>(text[0]);
    const bool control =
        lead < 0x20 || lead == 0x7f || (size == 2 && lead == 0xc2 && static_cast<uint8_t>(text[1]) < 0xa0);
    const absl::string_view character = text.substr(0, std::max<size_t>(size, 1));
    if (size == 0 || control) {
      for (const char c : character) absl::StrAppendFormat(&out, "\\x%02x", static_cast<uint8_t>(c));
    } else {
      absl::StrAppend(&out, lead == '\\' ? "\\" : "", character);
    }
    text.remove_prefix(character.size());
  }
  return out;
}

// A JSON string. JSON has no bytes: what is no UTF-8 comes as U+FFFD.
std::string Quoted(absl::string_view text) {
  std::string out = "\"";
  while (!text.empty()) {
    const size_t size = CharacterSize(text);
    const auto lead = static_cast<uint8_t>(text[0]);
    const absl::string_view character = text.substr(0, std::max<size_t>(size, 1));
    if (size == 0) {
      out += "\\ufffd";
    } else if (lead < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", lead);
    } else {
      absl::StrAppend(&out, lead == '"' || lead == '\\' ? "\\" : "", character);
    }
    text.remove_prefix(character.size());
  }
  return out + "\"";
}

// Characters, of UTF-8.
size_t Width(absl::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; });
}

// Columns as wide as their widest cell; numbers to the right.
std::string Table(std::vector<std::vector<std::string>> rows, const std::vector<bool>& right) {
  std::vector<size_t> widths(right.size(), 0);
  for (auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = Printable(row[i]);
      widths[i] = std::max(widths[i], Width(row[i]));
    }
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - Width(row[i]), ' ');
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
  return Table(std::move(rows), {false, true});
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
  return Table(std::move(rows), {false, false, true, true, false, true, true, true, true, false, false});
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
