// Table: what followers need to know. The bookkeeping of one shard is feed_set.h; here is the pass through all of them.
#include <algorithm>
#include <array>

#include "table_impl.h"

namespace monolith {
namespace {

// About how many rows one call of read_feed returns.
constexpr std::size_t kPieceRows = 16384;

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
  const std::size_t n = std::min(kGroup, feed.taken.changed.size() - feed.position);
  // Nothing below may fail once a bit is cleared.
  make_room(out.ids, n);
  make_room(out.times, n);
  make_room(out.values, n * layout.dim);
  const auto ids = feed.taken.changed.ids().subspan(feed.position, n);
  const std::lock_guard guard(shard.lock);
  fetch_group(shard, ids);
  for (const std::int64_t id : ids) {
    const auto found = shard.index.find(id, hash_id(id));
    // Without a row it was removed, and is in a list of removed ids. Without its bit it came before.
    if (!found || !shard.feed->is_fed(found.row())) continue;
    const std::byte* const row = shard.rows.at(found.row());
    const std::size_t at = out.values.size();
    out.values.resize(at + layout.dim);
    for (const SegmentPlan& plan : plans) kernels->load(plan, row, out.values.data() + at + plan.value_offset);
    out.ids.push_back(id);
    out.times.push_back(found.time());
    shard.feed->land(found.row());
  }
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
  while (feed.shard < kShards && piece.size() < kPieceRows) {
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
