// Table: remembering what changed. The bookkeeping of one shard is change_set.h; here are the cuts through all of them.
#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include "table_impl.h"

namespace monolith {
namespace {

// About how many rows one call of read_changes returns: enough that the cost of a call does not count, little memory.
constexpr std::size_t kPieceRows = 16384;

[[noreturn]] void refuse(const TableConfig& config, const std::string& what) {
  throw InvalidArgument("table '" + config.name + "': " + what);
}

void append(RowBatch& to, const RowBatch& from) {
  to.ids.insert(to.ids.end(), from.ids.begin(), from.ids.end());
  to.times.insert(to.times.end(), from.times.begin(), from.times.end());
  to.rows.insert(to.rows.end(), from.rows.begin(), from.rows.end());
}

void sort_unique(std::vector<std::int64_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

// Copies those rows of `ids` that are in flight, which then are no longer. The shard must be locked for writing.
void copy_flying(Shard& shard, std::span<const std::int64_t> ids, std::size_t row_bytes, RowBatch& out) {
  for (const std::int64_t id : ids) {
    const auto found = shard.index.find(id, hash_id(id));
    if (!found || !shard.changes->in_flight(found.row())) continue;
    const std::byte* const row = shard.rows.at(found.row());
    out.ids.push_back(id);
    out.times.push_back(found.time());
    out.rows.insert(out.rows.end(), row, row + row_bytes);
    shard.changes->land(found.row());
  }
}

}  // namespace

void Table::Impl::Cut::require(const TableConfig& config, std::uint64_t wanted) const {
  if (open && wanted == number) return;
  refuse(config, "cut " + std::to_string(wanted) + " is not under way; it was committed or rolled back");
}

void Table::Impl::skip_empty_flights() noexcept {
  while (cut.shard < kShards && shards[cut.shard]->changes->flight().empty()) ++cut.shard;
}

void Table::Impl::read_group(RowBatch& out) {
  Shard& shard = *shards[cut.shard];
  ChangeSet::Flight& flight = shard.changes->flight();
  if (cut.position == 0) sort_unique(flight.erased);
  const std::size_t n = std::min(kGroup, flight.changed.size() - cut.position);
  const std::size_t before = out.ids.size();
  {
    std::unique_lock guard(shard.lock);
    const auto ids = flight.changed.ids().subspan(cut.position, n);
    fetch_group(shard, ids);
    copy_flying(shard, ids, layout.row_bytes, out);
    cut.position += n;
    if (cut.position == flight.changed.size()) shard.changes->all_read();
    const SavedRooms::Loan saved = shard.changes->take_saved();
    guard.unlock();
    for (const RowBatch& batch : saved.batches()) append(out, batch);
  }
  if (flight.erased.empty()) return;
  for (std::size_t i = before; i < out.ids.size(); ++i) {
    if (std::binary_search(flight.erased.begin(), flight.erased.end(), out.ids[i])) cut.came_back.push_back(out.ids[i]);
  }
}

void Table::Impl::finish_flight(std::vector<std::int64_t>& erased) {
  const std::vector<std::int64_t>& gone = shards[cut.shard]->changes->flight().erased;
  std::sort(cut.came_back.begin(), cut.came_back.end());
  std::set_difference(gone.begin(), gone.end(), cut.came_back.begin(), cut.came_back.end(), std::back_inserter(erased));
  cut.came_back.clear();
  cut.position = 0;
  ++cut.shard;
  skip_empty_flights();
}

void Table::Impl::end_cut() noexcept {
  for (const auto& shard : shards) {
    const std::lock_guard guard(shard->lock);
    shard->changes->end_flight();
  }
  saved_rooms.end_cut();
  cut.came_back = {};
  cut.open = false;
}

void Table::track_changes() {
  const std::lock_guard one_at_a_time(impl_->cut.mutex);
  // All shards at once, so that a writer finds the same answer in every shard it holds.
  const auto guards = impl_->lock_all();
  if (impl_->tracks()) return;
  auto bits = std::make_unique<ChangeBits>();
  bits->make_room(impl_->region.numbers());
  std::array<std::unique_ptr<ChangeSet>, kShards> made;
  for (auto& changes : made) changes = std::make_unique<ChangeSet>(impl_->saved_rooms, *bits, impl_->layout.row_bytes);
  impl_->change_bits = std::move(bits);
  for (std::uint32_t s = 0; s < kShards; ++s) impl_->shards[s]->changes = std::move(made[s]);
}

std::uint64_t Table::changed() const {
  std::uint64_t waiting = 0;
  for (const auto& shard : impl_->shards) {
    const std::shared_lock guard(shard->lock);
    if (shard->changes != nullptr) waiting += shard->changes->waiting();
  }
  return waiting;
}

std::uint64_t Table::cut_changes() {
  Impl::Cut& cut = impl_->cut;
  const std::lock_guard one_at_a_time(cut.mutex);
  if (!impl_->tracks()) refuse(config(), "does not track changes; call track_changes first");
  if (cut.open) refuse(config(), "the previous cut is still under way; commit it or roll it back first");
  cut.unread = 0;
  for (const auto& shard : impl_->shards) {
    const std::lock_guard guard(shard->lock);
    shard->changes->cut();
    cut.unread += shard->changes->flight().changed.size();
  }
  cut.open = true;
  cut.failed = false;
  cut.shard = 0;
  cut.position = 0;
  impl_->skip_empty_flights();
  return ++cut.number;
}

bool Table::read_changes(std::uint64_t number, ChangeBatch& piece) {
  Impl::Cut& cut = impl_->cut;
  const std::lock_guard one_at_a_time(cut.mutex);
  cut.require(config(), number);
  if (cut.failed) refuse(config(), "a piece of this cut was lost to an error; roll it back");
  piece.clear();
  // Rows that were read do not come again: until the piece is complete, an exception spoils the cut.
  cut.failed = true;
  const std::size_t room = std::min<std::size_t>(kPieceRows + kGroup, cut.unread);
  piece.rows.ids.reserve(room);
  piece.rows.times.reserve(room);
  piece.rows.rows.reserve(room * impl_->layout.row_bytes);
  while (cut.shard < kShards && piece.size() < kPieceRows) {
    impl_->read_group(piece.rows);
    if (cut.position == impl_->shards[cut.shard]->changes->flight().changed.size()) impl_->finish_flight(piece.erased);
  }
  cut.unread -= std::min<std::size_t>(cut.unread, piece.rows.ids.size());
  cut.failed = false;
  return piece.size() != 0;
}

void Table::commit_changes(std::uint64_t number) {
  Impl::Cut& cut = impl_->cut;
  const std::lock_guard one_at_a_time(cut.mutex);
  cut.require(config(), number);
  if (cut.failed || cut.shard < kShards) refuse(config(), "a cut is committed after all of it was read; roll it back instead");
  impl_->end_cut();
}

void Table::rollback_changes(std::uint64_t number) {
  Impl::Cut& cut = impl_->cut;
  const std::lock_guard one_at_a_time(cut.mutex);
  cut.require(config(), number);
  cut.failed = true;  // also if memory runs out below: then it can only be rolled back, by another call
  for (const auto& shard : impl_->shards) {
    const std::span<const std::int64_t> ids = shard->changes->flight().changed.ids();
    for (std::size_t first = 0; first < ids.size(); first += kGroup) {
      const std::lock_guard guard(shard->lock);
      for (std::size_t i = first; i < std::min(first + kGroup, ids.size()); ++i) {
        const auto slot = shard->index.find(ids[i], hash_id(ids[i]));
        // Without a row it was removed before the cut or after it, and is in one of the lists of removed ids.
        if (slot) shard->changes->put_back(ids[i], slot.row());
      }
    }
    const std::lock_guard guard(shard->lock);
    shard->changes->put_back_erased();
  }
  impl_->end_cut();
}

}  // namespace monolith
