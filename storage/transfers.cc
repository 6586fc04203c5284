#include "storage/transfers.h"

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::Status Transfers::CheckInvariants() const {
  uint64_t writing = 0, cleaning = 0, hinted = 0, begun = 0;
  for (const auto& [number, write] : writes) {
    if (write.record == nullptr || write.record->holds == 0) return absl::InternalError("a write of what nobody holds");
    begun += write.begun ? 1 : 0;
    writing += write.begun ? write.chunk->layout().image_bytes : 0;
    cleaning += write.cleaning ? write.chunk->charged_bytes() : 0;
  }
  for (const auto& [number, load] : loads) {
    if (load->record->holds == 0) return absl::InternalError("a load of what nobody holds");
    hinted += load->hinted ? 1 : 0;
  }
  if (writing == writing_bytes && cleaning == cleaning_bytes && hinted == hinted_loads &&
      begun + to_write.size() == writes.size()) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("writing ", writing, "/", writing_bytes, " bytes, cleaning ", cleaning, "/",
                                          cleaning_bytes, ", hinted ", hinted, "/", hinted_loads, ", ", writes.size(),
                                          " writes, of which ", begun, " have begun and ", to_write.size(), " wait"));
}

}  // namespace kvferry
