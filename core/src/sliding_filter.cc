// The sliding counting filter: see monolith/admission.h for what it promises.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "admission_bytes.h"
#include "huge_array.h"
#include "monolith/admission.h"
#include "monolith/error.h"
#include "monolith/hash.h"

namespace monolith {

using admission_bytes::corrupt;
using admission_bytes::Kind;
using admission_bytes::Reader;
using admission_bytes::Writer;

namespace {

constexpr std::uint64_t kTailCells = 64;  // so that a probe that starts at the last home needs no wrap-around
constexpr std::size_t kBlockCells = 2048;  // 4 KiB, a page: what is cleared, saved and made resident at a time

std::uint64_t checked_capacity(std::uint64_t capacity) {
  if (capacity >= SlidingFilter::kMinCapacity && capacity <= SlidingFilter::kMaxCapacity) return capacity;
  throw InvalidArgument("SlidingFilter: capacity is " + std::to_string(capacity) + ", expected " +
                        std::to_string(SlidingFilter::kMinCapacity) + ".." + std::to_string(SlidingFilter::kMaxCapacity) +
                        "; it is the number of ids to remember at a time");
}

std::uint32_t checked_split_num(std::uint32_t split_num, std::uint64_t capacity) {
  if (split_num < SlidingFilter::kMinSplits || split_num > SlidingFilter::kMaxSplits) {
    throw InvalidArgument("SlidingFilter: split_num is " + std::to_string(split_num) + ", expected " +
                          std::to_string(SlidingFilter::kMinSplits) + ".." + std::to_string(SlidingFilter::kMaxSplits) +
                          "; 7 suits most streams");
  }
  if (capacity / (split_num - SlidingFilter::kForwardWindow + 1) < 2) {
    throw InvalidArgument("SlidingFilter: split_num is " + std::to_string(split_num) + " with capacity " +
                          std::to_string(capacity) + ", expected at least 2 ids per split; lower split_num");
  }
  return split_num;
}

// The home cell comes from the high bits of the hash, the signature from the low ones.
constexpr std::uint32_t signature(std::uint64_t hash) noexcept { return static_cast<std::uint32_t>(hash & 0xFFF) << 4; }

std::uint32_t saturated(std::uint64_t count) noexcept {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(count, SlidingFilter::kMaxCount));
}

// Bit i is set if cell i of the 16 is empty or has the signature. At the load of a full split most probes look at all of them.
std::uint32_t empty_or_equal(const std::uint16_t* cells, std::uint32_t signature) noexcept {
#if defined(__SSE2__)
  const __m128i mask = _mm_set1_epi16(static_cast<short>(0xFFF0));
  const __m128i wanted = _mm_set1_epi16(static_cast<short>(signature));
  const auto match = [&](const std::uint16_t* eight) {
    const __m128i cell = _mm_loadu_si128(reinterpret_cast<const __m128i*>(eight));
    return _mm_or_si128(_mm_cmpeq_epi16(cell, _mm_setzero_si128()), _mm_cmpeq_epi16(_mm_and_si128(cell, mask), wanted));
  };
  return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(match(cells), match(cells + 8))));
#else
  std::uint32_t matches = 0;
  for (std::uint32_t i = 0; i < SlidingFilter::kProbeLimit; ++i) {
    matches |= std::uint32_t{cells[i] == 0 || (cells[i] & ~15u) == signature} << i;
  }
  return matches;
#endif
}

static_assert(SlidingFilter::kProbeLimit == 16);

}  // namespace

// Cells of 12-bit signature and 4-bit count, 0 = empty, allocated when first used. Clearing a split only marks its blocks as
// stale; a block is zeroed when it is next probed, so moving the head never stalls for the length of a split.
class SlidingFilter::Split {
 public:
  static constexpr std::size_t kNone = SIZE_MAX;

  explicit Split(std::uint64_t homes) : homes_(homes) {}

  std::size_t cells() const noexcept { return homes_ + kTailCells; }
  std::size_t blocks() const noexcept { return (cells() + kBlockCells - 1) / kBlockCells; }
  std::uint64_t elements() const noexcept { return elements_; }
  std::size_t bytes() const noexcept { return cells_ == nullptr ? 0 : cells() * sizeof(std::uint16_t) + blocks(); }
  std::size_t max_bytes() const noexcept { return cells() * sizeof(std::uint16_t) + blocks(); }

  void allocate() {
    if (cells_ != nullptr) return;
    auto live = std::make_unique<bool[]>(blocks());
    cells_ = make_huge_array<std::uint16_t>(cells());
    live_ = std::move(live);
  }

  void clear() noexcept {
    if (live_ != nullptr) std::fill_n(live_.get(), blocks(), false);
    elements_ = 0;
  }

  void prefetch(std::uint64_t hash) const noexcept {
    if (cells_ != nullptr) __builtin_prefetch(cells_.get() + home(hash), 1);
  }

  // Zeroes what is stale among the cells that `hash` can probe. Before find() on a split that will be written.
  void freshen(std::uint64_t hash) noexcept {
    const std::size_t first = home(hash);
    freshen_block(first / kBlockCells);
    freshen_block((first + kProbeLimit - 1) / kBlockCells);
  }

  // The first cell that is empty or has the id's signature, or kNone. Stale cells count as empty.
  std::size_t find(std::uint64_t hash) const noexcept {
    const std::size_t first = home(hash);
    if (!live(first / kBlockCells)) return first;
    if (!live((first + kProbeLimit - 1) / kBlockCells)) return find_before_stale_block(first, hash);
    const std::uint32_t matches = empty_or_equal(cells_.get() + first, signature(hash));
    return matches == 0 ? kNone : first + static_cast<std::size_t>(std::countr_zero(matches));
  }

  std::uint32_t count(std::size_t at) const noexcept { return read(at) & 15u; }

  void write(std::size_t at, std::uint64_t hash, std::uint32_t count) noexcept {
    elements_ += cells_[at] == 0;
    cells_[at] = static_cast<std::uint16_t>(signature(hash) | count);
  }

  bool live(std::size_t block) const noexcept { return live_ != nullptr && live_[block]; }
  std::span<const std::uint16_t> block(std::size_t block) const noexcept {
    return {cells_.get() + block * kBlockCells, block_cells(block)};
  }
  std::size_t block_cells(std::size_t block) const noexcept {
    return std::min(kBlockCells, cells() - block * kBlockCells);
  }
  void load(std::size_t block, const std::byte* bytes) noexcept {
    std::memcpy(cells_.get() + block * kBlockCells, bytes, block_cells(block) * sizeof(std::uint16_t));
    live_[block] = true;
  }
  void set_elements(std::uint64_t elements) noexcept { elements_ = elements; }

 private:
  std::size_t home(std::uint64_t hash) const noexcept { return fast_range(hash, homes_); }
  std::uint32_t read(std::size_t at) const noexcept { return live(at / kBlockCells) ? cells_[at] : 0u; }
  std::size_t find_before_stale_block(std::size_t first, std::uint64_t hash) const noexcept {
    std::size_t at = first;
    for (; read(at) != 0 && (read(at) & ~15u) != signature(hash); ++at) {
    }
    return at;
  }
  void freshen_block(std::size_t block) noexcept {
    if (std::exchange(live_[block], true)) return;
    std::fill_n(cells_.get() + block * kBlockCells, block_cells(block), std::uint16_t{0});
  }

  std::uint64_t homes_;
  std::uint64_t elements_ = 0;
  HugeArray<std::uint16_t> cells_;
  std::unique_ptr<bool[]> live_;
};

struct SlidingFilter::State {
  State(std::uint32_t split_num, std::uint64_t homes) {
    splits.reserve(split_num);
    for (std::uint32_t i = 0; i < split_num; ++i) splits.emplace_back(homes);
  }

  // index: any below two turns of the ring.
  Split& at(std::uint64_t index) noexcept { return splits[index < splits.size() ? index : index - splits.size()]; }

  std::vector<Split> splits;
  std::uint32_t head = 0;
  std::uint64_t head_increment = 0;
  std::uint64_t failure_count = 0;
};

SlidingFilter::SlidingFilter(std::uint64_t capacity, std::uint32_t split_num, SlotThresholds thresholds)
    : AdmissionFilter(std::move(thresholds)),
      capacity_(checked_capacity(capacity)),
      split_num_(checked_split_num(split_num, capacity)),
      split_capacity_(capacity / (split_num - kForwardWindow + 1)),
      homes_(split_capacity_ * 6 / 5),
      state_(std::make_unique<State>(split_num, homes_)) {
  this->thresholds().require_at_most(kMaxCount, "SlidingFilter",
                                     "counters have 4 bits, so no id would ever be admitted; lower it or use the "
                                     "probabilistic filter");
}

SlidingFilter::~SlidingFilter() = default;

// The count of the most recent split behind the head that knows the id. Splits the head has never been at are not looked at.
std::uint32_t SlidingFilter::carried_count(std::uint64_t hash) const noexcept {
  const std::uint64_t reach = std::min<std::uint64_t>(state_->head_increment, split_num_ - kForwardWindow);
  for (std::uint64_t back = 1; back <= reach; ++back) {
    const Split& split = state_->at(state_->head + split_num_ - back);
    const std::size_t at = split.find(hash);
    if (at != Split::kNone && split.count(at) != 0) return split.count(at);
  }
  return 0;
}

std::uint32_t SlidingFilter::add_locked(std::uint64_t hash, std::uint32_t count) {
  State& state = *state_;
  for (std::uint32_t ahead = 0; ahead < kForwardWindow; ++ahead) state.at(state.head + ahead).allocate();

  for (std::uint32_t ahead = 0; ahead < kForwardWindow; ++ahead) {
    Split& split = state.at(state.head + ahead);
    split.freshen(hash);
    const std::size_t at = split.find(hash);
    if (at == Split::kNone) continue;
    std::uint32_t old = split.count(at);
    const bool known = old != 0;
    if (!known) old = carried_count(hash);
    split.write(at, hash, saturated(std::uint64_t{old} + count));
    if (!known && state.at(state.head).elements() >= split_capacity_ - 1) {
      state.head = (state.head + 1) % split_num_;
      ++state.head_increment;
      state.at(state.head + kForwardWindow - 1).clear();
    }
    return old;
  }
  ++state.failure_count;
  return kMaxCount;
}

std::uint32_t SlidingFilter::add(std::int64_t id, std::uint32_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return add_locked(hash_id(id), count);
}

std::uint32_t SlidingFilter::get(std::int64_t id) const {
  const std::uint64_t hash = hash_id(id);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::uint32_t ahead = 0; ahead < kForwardWindow; ++ahead) {
    const Split& split = state_->at(state_->head + ahead);
    const std::size_t at = split.find(hash);
    if (at == Split::kNone) continue;
    return split.count(at) != 0 ? split.count(at) : carried_count(hash);
  }
  return kMaxCount;
}

bool SlidingFilter::admit(std::int64_t id, std::uint32_t count) {
  const std::uint32_t needed = threshold(id);
  return needed == 0 || add(id, count) >= needed;
}

void SlidingFilter::prefetch(std::uint64_t hash) const noexcept {
  const std::uint64_t reach = std::min<std::uint64_t>(state_->head_increment, split_num_ - kForwardWindow);
  for (std::uint64_t back = 0; back <= reach; ++back) state_->at(state_->head + split_num_ - back).prefetch(hash);
}

void SlidingFilter::admit_batch(std::span<const std::int64_t> ids, const std::uint32_t* counts, bool* out) {
  constexpr std::size_t kAhead = 8;
  constexpr std::size_t kTurn = 1024;  // ids per lock, so that a long batch does not keep the other threads waiting
  for (std::size_t begin = 0; begin < ids.size(); begin += kTurn) {
    const std::size_t end = std::min(ids.size(), begin + kTurn);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = begin; i < end; ++i) {
      if (i + kAhead < end && threshold(ids[i + kAhead]) != 0) prefetch(hash_id(ids[i + kAhead]));
      const std::uint32_t needed = threshold(ids[i]);
      out[i] = needed == 0 || add_locked(hash_id(ids[i]), counts == nullptr ? 1 : counts[i]) >= needed;
    }
  }
}

std::size_t SlidingFilter::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t total = sizeof(*this) + thresholds().bytes() + split_num_ * sizeof(Split);
  for (const Split& split : state_->splits) total += split.bytes();
  return total;
}

std::size_t SlidingFilter::max_bytes() const noexcept {
  const Split split(homes_);
  return sizeof(*this) + thresholds().bytes() + split_num_ * (sizeof(Split) + split.max_bytes());
}

std::uint32_t SlidingFilter::head() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_->head;
}

std::uint64_t SlidingFilter::head_increment() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_->head_increment;
}

std::uint64_t SlidingFilter::failure_count() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return state_->failure_count;
}

std::vector<std::uint64_t> SlidingFilter::elements() const {
  std::vector<std::uint64_t> counts;
  counts.reserve(split_num_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Split& split : state_->splits) counts.push_back(split.elements());
  return counts;
}

// Body: capacity u64, split_num u32, forward window u32, probe limit u32, head u32, head_increment u64, failure_count u64, then
// for each split: elements u64, one bit per block saying whether it is saved, and the cells (u16) of the saved blocks.
std::vector<std::byte> SlidingFilter::serialize() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const State& state = *state_;
  const std::size_t blocks = Split(homes_).blocks();
  std::size_t body = 8 + 4 * 4 + 2 * 8 + split_num_ * (8 + (blocks + 7) / 8);
  for (const Split& split : state.splits) {
    for (std::size_t block = 0; block < blocks; ++block) body += split.live(block) ? split.block_cells(block) * 2 : 0;
  }

  Writer writer(Kind::kSliding, body);
  writer.put(capacity_);
  writer.put(split_num_);
  writer.put(kForwardWindow);
  writer.put(kProbeLimit);
  writer.put(state.head);
  writer.put(state.head_increment);
  writer.put(state.failure_count);
  for (const Split& split : state.splits) {
    writer.put(split.elements());
    for (std::size_t block = 0; block < blocks; block += 8) {
      unsigned bits = 0;
      for (std::size_t i = 0; i < std::min<std::size_t>(8, blocks - block); ++i) bits |= unsigned{split.live(block + i)} << i;
      writer.put(static_cast<std::uint8_t>(bits));
    }
    for (std::size_t block = 0; block < blocks; ++block) {
      if (split.live(block)) writer.put_bytes(split.block(block).data(), split.block(block).size_bytes());
    }
  }
  return std::move(writer).finish();
}

// A checked view into the caller's bytes; only reading it needs memory.
struct SlidingFilter::Saved {
  struct Part {
    std::uint64_t elements;
    std::span<const std::byte> live;
    std::span<const std::byte> cells;
    bool is_live(std::size_t block) const noexcept { return (live[block / 8] >> (block % 8) & std::byte{1}) != std::byte{0}; }
  };
  std::uint32_t head;
  std::uint64_t head_increment;
  std::uint64_t failure_count;
  std::vector<Part> parts;
};

SlidingFilter::Saved SlidingFilter::parse(std::span<const std::byte> bytes) const {
  Reader reader(bytes, Kind::kSliding);
  Reader::expect("capacity", reader.get<std::uint64_t>(), capacity_);
  Reader::expect("split_num", reader.get<std::uint32_t>(), split_num_);
  Reader::expect("forward window", reader.get<std::uint32_t>(), kForwardWindow);
  Reader::expect("probe limit", reader.get<std::uint32_t>(), kProbeLimit);
  Saved saved;
  saved.head = reader.get<std::uint32_t>();
  saved.head_increment = reader.get<std::uint64_t>();
  saved.failure_count = reader.get<std::uint64_t>();
  if (saved.head != saved.head_increment % split_num_) {
    corrupt("head is " + std::to_string(saved.head) + " after " + std::to_string(saved.head_increment) + " moves over " +
            std::to_string(split_num_) + " splits");
  }
  const Split shape(homes_);
  for (std::uint32_t i = 0; i < split_num_; ++i) {
    Saved::Part part{};
    part.elements = reader.get<std::uint64_t>();
    part.live = reader.take((shape.blocks() + 7) / 8);
    std::size_t cells = 0;
    for (std::size_t block = 0; block < shape.blocks(); ++block) cells += part.is_live(block) ? shape.block_cells(block) : 0;
    part.cells = reader.take(cells * sizeof(std::uint16_t));
    std::uint64_t taken = 0;
    for (std::size_t at = 0; at < part.cells.size(); at += sizeof(std::uint16_t)) {
      std::uint16_t cell;
      std::memcpy(&cell, part.cells.data() + at, sizeof(cell));
      taken += cell != 0;
      if (cell != 0 && (cell & 15u) == 0) corrupt("split " + std::to_string(i) + " has a cell with a signature and no count");
    }
    if (taken != part.elements) {
      corrupt("split " + std::to_string(i) + " holds " + std::to_string(taken) + " counters, its header says " +
              std::to_string(part.elements));
    }
    saved.parts.push_back(part);
  }
  reader.finish();
  return saved;
}

void SlidingFilter::restore(std::span<const std::byte> bytes) {
  const Saved saved = parse(bytes);
  auto state = std::make_unique<State>(split_num_, homes_);
  state->head = saved.head;
  state->head_increment = saved.head_increment;
  state->failure_count = saved.failure_count;
  for (std::uint32_t i = 0; i < split_num_; ++i) {
    if (saved.parts[i].cells.empty()) continue;
    Split& split = state->splits[i];
    split.allocate();
    split.set_elements(saved.parts[i].elements);
    const std::byte* from = saved.parts[i].cells.data();
    for (std::size_t block = 0; block < split.blocks(); ++block) {
      if (!saved.parts[i].is_live(block)) continue;
      split.load(block, from);
      from += split.block_cells(block) * sizeof(std::uint16_t);
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(state_, state);
}

}  // namespace monolith
