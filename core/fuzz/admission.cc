// The bytes of an admission filter from anywhere: refused, or a filter that can be asked, saved and restored.
#include <memory>
#include <span>

#include "admission_bytes.h"
#include "fuzz.h"
#include "monolith/admission.h"
#include "monolith/crc32c.h"
#include "monolith/error.h"

namespace {

using namespace monolith;

std::unique_ptr<AdmissionFilter> new_filter(bool sliding) {
  if (sliding) return std::make_unique<SlidingFilter>(300, 5, SlotThresholds(3));
  return std::make_unique<ProbabilisticFilter>(true, 7, SlotThresholds(3));
}

void restore(bool sliding, const Bytes& bytes) {
  auto filter = new_filter(sliding);
  filter->admit(5, 1);
  const auto before = filter->serialize();
  try {
    filter->restore(std::as_bytes(std::span(bytes)));
  } catch (const CorruptFile&) {
    FUZZ_REQUIRE(filter->serialize() == before);
    return;
  }
  const auto saved = filter->serialize();
  auto again = new_filter(sliding);
  again->restore(saved);
  FUZZ_REQUIRE(again->serialize() == saved);
  for (std::int64_t id = 0; id < 300; ++id) FUZZ_REQUIRE(filter->admit(id % 50, 1) == again->admit(id % 50, 1));
}

// With the length and the checksum that fit.
Bytes sealed(Bytes bytes) {
  if (bytes.size() < admission_bytes::kEnvelope) return bytes;
  fuzz::write_at(bytes, 16, std::uint64_t{bytes.size()});
  fuzz::write_at(bytes, bytes.size() - 4, crc32c::value(bytes.data(), bytes.size() - 4));
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const bool sliding = input.take<std::uint8_t>() & 1;
  const Bytes bytes = input.rest();
  restore(sliding, bytes);
  restore(sliding, sealed(bytes));
  return 0;
}
