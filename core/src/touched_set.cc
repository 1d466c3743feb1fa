#include "monolith/touched_set.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "gate.h"
#include "monolith/error.h"
#include "striped_id_set.h"

namespace monolith {
namespace {

void check_range(const char* field, std::int64_t value, std::int64_t most) {
  if (value >= 1 && value <= most) return;
  throw InvalidArgument(std::string("TouchedKeySet: ") + field + " is " + std::to_string(value) + ", expected 1.." +
                        std::to_string(most) + "; choose a value in this range");
}

std::uint64_t checked_capacity(std::int64_t capacity) {
  check_range("capacity", capacity, TouchedKeySet::kMaxCapacity);
  return static_cast<std::uint64_t>(capacity);
}

std::uint32_t checked_stripes(std::int64_t concurrency_level) {
  check_range("concurrency_level", concurrency_level, TouchedKeySet::kMaxConcurrencyLevel);
  return std::bit_ceil(static_cast<std::uint32_t>(concurrency_level));
}

}  // namespace

TouchedKeySet::TouchedKeySet(std::int64_t capacity, std::int64_t concurrency_level)
    : capacity_(checked_capacity(capacity)),
      stripes_(checked_stripes(concurrency_level)),
      gate_(std::make_unique<Gate>()),
      ids_(std::make_unique<StripedIdSet>(stripes_)) {}

TouchedKeySet::~TouchedKeySet() = default;

// Claims room for all ids before adding any. If they all fit, none of them can meet a set that is over capacity, whatever other
// threads add meanwhile, because those claim their room too.
bool TouchedKeySet::insert_if_room(std::span<const std::int64_t> ids) {
  const auto inside = gate_->enter();
  struct Claim {
    std::atomic<std::uint64_t>& reserved;
    std::size_t claimed;
    std::size_t used = 0;
    ~Claim() { reserved.fetch_sub(claimed - used, std::memory_order_relaxed); }
  } claim{reserved_, ids.size()};
  const std::uint64_t before = reserved_.fetch_add(ids.size(), std::memory_order_relaxed);
  if (before + ids.size() > capacity_ + 1) return false;
  ids_->insert(ids, claim.used);
  return true;
}

// The rule to the letter, with everybody else kept out.
std::uint64_t TouchedKeySet::insert_alone(std::span<const std::int64_t> ids) {
  const auto closed = gate_->close();
  std::uint64_t dropped = 0;
  for (const std::int64_t id : ids) {
    if (ids_->size() > capacity_) {
      dropped += ids_->size();
      ids_->clear();
      reserved_.store(0, std::memory_order_relaxed);
    }
    if (ids_->insert_alone(id)) reserved_.fetch_add(1, std::memory_order_relaxed);
  }
  return dropped;
}

std::uint64_t TouchedKeySet::insert(std::span<const std::int64_t> ids) {
  std::uint64_t dropped = 0;
  while (!ids.empty()) {
    const auto chunk = ids.first(std::min(ids.size(), StripedIdSet::kChunk));
    ids = ids.subspan(chunk.size());
    if (!insert_if_room(chunk)) dropped += insert_alone(chunk);
  }
  return dropped;
}

std::vector<std::int64_t> TouchedKeySet::steal() {
  std::vector<std::int64_t> stolen;
  std::unique_ptr<StripedIdSet> full;
  {
    // Every allocation comes before the exchange: if one fails, nothing has changed.
    const auto closed = gate_->close();
    if (ids_->size() == 0) return stolen;
    stolen.reserve(ids_->size() + 1);
    full = std::make_unique<StripedIdSet>(stripes_, ids_.get());
    std::swap(full, ids_);
    reserved_.store(0, std::memory_order_relaxed);
  }
  stolen.resize(full->size() + 1);
  full->copy_to(stolen.data());
  stolen.pop_back();
  return stolen;
}

std::size_t TouchedKeySet::size() const {
  const auto inside = gate_->enter();
  return ids_->size();
}

std::size_t TouchedKeySet::bytes() const {
  const auto closed = gate_->close();
  return ids_->bytes();
}

}  // namespace monolith
