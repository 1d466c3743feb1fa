// Table: what followers need to know. The bookkeeping of one shard is feed_set.h; here is the pass through all of them.
#include <algorithm>
#include <array>

#include "table_impl.h"

namespace monolith {
namespace {

// About how many bytes one call of read_feed returns: all that most intervals change, so that nobody has to put pieces together.
constexpr std::size_t kPieceBytes = std::size_t{1} << 23;

// There is room for `n` more. Twice as much as before, so that many small groups do not copy what is there again and again.
template <typename T>
void make_room(std::vector<T>& values, std::size_t n) {
  if (values.capacity() - values.size() < n) values.reserve(std::max(2 * values.capacity(), values.size() + n));
}

}  // namespace

void Table::track_feed() {
  const std::lock_guard one_at_a_time(impl_->feed.mutex);
  // All shards at once, so that a writer finds the same answer in every shard it holds.
  const auto guards = impl_->lock_all();
  if (impl_->feeds()) return;
  auto bits = std::make_unique<ChangeBits>(1);
  bits->make_room(impl_->region.numbers());
  std::array<std::unique_ptr<FeedSet>, kShards> made;
  for (auto& feed : made) feed = std::make_unique<FeedSet>(*bits);
  impl_->feed_bits = std::move(bits);
  for (std::uint32_t s = 0; s < kShards; ++s) impl_->shards[s]->feed = std::move(made[s]);
}

std::uint64_t Table::fed() const {
  std::uint64_t waiting = 0;
  for (const auto& shard : impl_->shards) {
    const std::shared_lock guard(shard->lock);
    if (shard->feed != nullptr) waiting += shard->feed->waiting();
  }
  return waiting;
}

void Table::Impl::read_feed_group(FeedBatch& out) {
  Shard& shard = *shards[feed.shard];
  const auto waiting = feed.taken.changed.ids().subspan(feed.position);
  // Not a full group and a few more: fetches of a few overlap little.
  const std::size_t n = waiting.size() <= kGroup ? waiting.size() : std::min(kGroup, (waiting.size() + 1) / 2);
  const auto ids = waiting.first(n);
  // Nothing below may fail once a bit is cleared.
  make_room(out.ids, n);
  make_room(out.times, n);
  std::size_t at = out.values.size();
  make_room(out.values, n * layout.dim);
  out.values.resize(at + n * layout.dim);
  const Bucket* homes[kGroup];
  std::uint32_t rows[kGroup];
  const std::uint32_t weight_lines = lines(layout.weight_bytes);
  {
    const std::lock_guard guard(shard.lock);
    for (std::size_t i = 0; i < n; ++i) {
      homes[i] = shard.index.home(hash_id(ids[i]));
      fetch(homes[i]);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const Bucket* const home = homes[i];
      const std::uint32_t row = home->match(ids[i]).row;
      rows[i] = row;
      // One that is not there is mostly in the next bucket.
      fetch_lines(choose(row != 0, shard.rows.at(row), home + home->full()), weight_lines, row != 0 ? 64 : 0);
      shard.feed->prefetch(row);
    }
    for (std::size_t i = 0; i < n; ++i) {
      std::uint32_t time;
      if (rows[i] != 0) {
        time = homes[i]->times[homes[i]->match(ids[i]).slot];
      } else if (const auto found = shard.index.find(ids[i], hash_id(ids[i]))) {
        rows[i] = found.row();
        time = found.time();
      } else {
        continue;  // it was removed, and is in a list of removed ids
      }
      if (!shard.feed->is_fed(rows[i])) continue;  // it came before
      const std::byte* const row = shard.rows.at(rows[i]);
      for (const SegmentPlan& plan : plans) kernels->load(plan, row, out.values.data() + at + plan.value_offset);
      at += layout.dim;
      out.ids.push_back(ids[i]);
      out.times.push_back(time);
      shard.feed->land(rows[i]);
    }
  }
  out.values.resize(at);
  feed.position += n;
}

void Table::Impl::read_feed_erased(FeedBatch& out) {
  Shard& shard = *shards[feed.shard];
  std::vector<std::int64_t>& erased = feed.taken.erased;
  if (erased.empty()) return;
  std::sort(erased.begin(), erased.end());
  erased.erase(std::unique(erased.begin(), erased.end()), erased.end());
  make_room(out.erased, erased.size());
  for (std::size_t first = 0; first < erased.size(); first += kGroup) {
    const std::shared_lock guard(shard.lock);
    for (std::size_t i = first; i < std::min(first + kGroup, erased.size()); ++i) {
      // One that came back is in this pass or in the next. A reader keeps its old row until then.
      if (!shard.index.find(erased[i], hash_id(erased[i]))) out.erased.push_back(erased[i]);
    }
  }
  erased.clear();
}

bool Table::read_feed(FeedBatch& piece) {
  Impl::Feed& feed = impl_->feed;
  const std::lock_guard one_at_a_time(feed.mutex);
  if (!impl_->feeds()) throw InvalidArgument("table '" + config().name + "': has no feed; call track_feed first");
  piece.clear();
  const std::size_t most = std::max(kPieceBytes / (12 + 4 * std::size_t{dim()}), kGroup);
  // A vector that grows step by step costs as much as reading the rows.
  const std::size_t left = feed.reading ? feed.taken.changed.size() - feed.position : 0;
  const std::size_t expected = std::min<std::size_t>(fed() + left, most + kGroup);
  make_room(piece.ids, expected);
  make_room(piece.times, expected);
  make_room(piece.values, expected * dim());
  while (feed.shard < kShards && piece.size() < most) {
    if (!feed.reading) {
      const std::lock_guard guard(impl_->shards[feed.shard]->lock);
      impl_->shards[feed.shard]->feed->take(feed.taken);
      feed.position = 0;
      feed.reading = true;
    }
    if (feed.position < feed.taken.changed.size()) {
      impl_->read_feed_group(piece);
      continue;
    }
    impl_->read_feed_erased(piece);
    feed.reading = false;
    ++feed.shard;
  }
  if (piece.size() != 0) return true;
  feed.shard = 0;
  return false;
}

}  // namespace monolith
