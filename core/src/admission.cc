#include "monolith/admission.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "admission_bytes.h"
#include "monolith/error.h"
#include "monolith/hash.h"

namespace monolith {

using admission_bytes::Kind;
using admission_bytes::Reader;
using admission_bytes::Writer;

SlotThresholds::SlotThresholds(std::uint32_t default_threshold, const std::map<std::uint32_t, std::uint32_t>& by_slot)
    : default_threshold_(default_threshold), thresholds_(kSlots, default_threshold) {
  for (const auto& [slot, threshold] : by_slot) {
    if (slot >= kSlots) {
      throw InvalidArgument("slot_thresholds: slot is " + std::to_string(slot) + ", expected 0.." +
                            std::to_string(kSlots - 1) + "; a slot is bits 48..62 of the id (fid v2)");
    }
    thresholds_[slot] = threshold;
  }
}

void SlotThresholds::require_at_most(std::uint32_t most, const char* filter, const char* why) const {
  const auto refuse = [&](const std::string& field, std::uint32_t threshold) {
    throw InvalidArgument(std::string(filter) + ": " + field + " is " + std::to_string(threshold) + ", expected 0.." +
                          std::to_string(most) + ": " + why);
  };
  if (default_threshold_ > most) refuse("default_threshold", default_threshold_);
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
    if (thresholds_[slot] > most) refuse("slot_thresholds[" + std::to_string(slot) + "]", thresholds_[slot]);
  }
}

void AdmissionFilter::admit(std::span<const std::int64_t> ids, std::span<const std::uint32_t> counts, std::span<bool> out) {
  const auto check_length = [&](const char* field, std::size_t length) {
    if (length == ids.size()) return;
    throw InvalidArgument(std::string("admit: ") + field + " has " + std::to_string(length) + " entries, expected " +
                          std::to_string(ids.size()) + ", one per id");
  };
  check_length("out", out.size());
  if (!counts.empty()) check_length("counts", counts.size());
  const auto zero = std::find(counts.begin(), counts.end(), 0u);
  if (zero != counts.end()) {
    throw InvalidArgument("admit: counts[" + std::to_string(zero - counts.begin()) +
                          "] is 0, expected at least 1; leave out ids that did not occur");
  }
  admit_batch(ids, counts.empty() ? nullptr : counts.data(), out.data());
}

ProbabilisticFilter::ProbabilisticFilter(bool equal_probability, std::uint64_t seed, SlotThresholds thresholds)
    : AdmissionFilter(std::move(thresholds)), equal_probability_(equal_probability), seed_(seed) {}

double ProbabilisticFilter::probability(std::uint32_t threshold, std::uint32_t count) const noexcept {
  const double share = static_cast<double>(count) / static_cast<double>(threshold);
  // 1 - (1 - p)^count with p = 1 - 0.05^(1 / threshold).
  return equal_probability_ ? 1.0 - std::pow(0.05, share) : std::min(1.0, share);
}

bool ProbabilisticFilter::admit(std::int64_t id, std::uint32_t count) {
  const std::uint32_t needed = threshold(id);
  if (needed == 0) return true;
  const std::uint64_t draw = draws_.fetch_add(1, std::memory_order_relaxed);
  const auto mix = [](std::uint64_t x) { return hash_id(static_cast<std::int64_t>(x)); };
  const std::uint64_t bits = mix(mix(mix(seed_) ^ hash_id(id)) + draw);
  return static_cast<double>(bits >> 11) * 0x1p-53 < probability(needed, count);
}

void ProbabilisticFilter::admit_batch(std::span<const std::int64_t> ids, const std::uint32_t* counts, bool* out) {
  for (std::size_t i = 0; i < ids.size(); ++i) out[i] = admit(ids[i], counts == nullptr ? 1 : counts[i]);
}

std::vector<std::byte> ProbabilisticFilter::serialize() const {
  Writer writer(Kind::kProbabilistic, 8 + 4 + 8);
  writer.put(seed_);
  writer.put(std::uint32_t{equal_probability_});
  writer.put(draws());
  return std::move(writer).finish();
}

void ProbabilisticFilter::restore(std::span<const std::byte> bytes) {
  Reader reader(bytes, Kind::kProbabilistic);
  Reader::expect("seed", reader.get<std::uint64_t>(), seed_);
  Reader::expect("equal_probability", reader.get<std::uint32_t>(), equal_probability_);
  const auto draws = reader.get<std::uint64_t>();
  reader.finish();
  draws_.store(draws, std::memory_order_relaxed);
}

std::size_t ProbabilisticFilter::bytes() const { return sizeof(*this) + thresholds().bytes(); }

}  // namespace monolith
