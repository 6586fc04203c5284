// Answers of the service as text, for people and for programs.
#pragma once

#include <string>

#include "kvferry/v1/admin.pb.h"

namespace kvferry::cli {

// Each ends with a newline. Names may have any bytes: a table shows those that a terminal would not as \xNN, JSON has
// U+FFFD for what is no UTF-8.
std::string StatsTable(const std::string& server, const v1::StatsReply& stats);
std::string StatsJson(const v1::StatsReply& stats);
std::string ChunkTable(const v1::ListReply& list);
std::string ChunkJson(const v1::ListReply& list);

}  // namespace kvferry::cli
