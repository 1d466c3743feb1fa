// The collisionless embedding table: int64 id -> row of weights, optimizer state and last-update time.
//
// Thread-safety: every method may be called from any number of threads at once. A row is always read and written whole.
// Batches are not atomic: two overlapping calls may interleave row by row.
// Ownership: spans and pointers are only used during the call. All arrays are dense and row-major.
// Units: event times are seconds since 1970; row_splits and counts are elements.
// Failure: InvalidArgument before anything is changed; std::bad_alloc leaves each row either as before the call or fully
// updated, and the table usable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "monolith/admission.h"
#include "monolith/config.h"

namespace monolith {

struct UpdateOptions {
  std::span<const float> learning_rates;  // one per segment
  std::int64_t step = 0;                  // >= 0
  std::uint32_t event_time = 0;
  const float* snapshot = nullptr;  // [ids, dim]: the values the gradients were computed at, for delay compensation
  bool sequential = false;          // one step per occurrence instead of one for the sum
};

struct TableStats {
  std::uint64_t rows = 0;
  std::uint64_t bytes = 0;         // everything the table holds from the system
  std::uint64_t row_bytes = 0;     // of one row, without index
  std::uint64_t index_slots = 0;   // rows / index_slots is the load
  std::uint64_t growths = 0;       // index blocks doubled or split so far
  std::uint32_t max_event_time = 0;
};

// The name and shape of one piece of optimizer state.
struct SlotInfo {
  std::string name;  // "<segment>/<slot>", e.g. "0/norm"
  std::uint32_t width;
  bool is_int64;
};

// Raw copies of rows, as scan() produces and insert_raw() takes them.
struct RowBatch {
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> times;
  std::vector<std::byte> rows;  // ids.size() * row_bytes
  void clear() noexcept {
    ids.clear();
    times.clear();
    rows.clear();
  }
};

// A piece of what changed: rows as they were at the cut, and ids that had been removed by then.
struct ChangeBatch {
  RowBatch rows;
  std::vector<std::int64_t> erased;
  std::size_t size() const noexcept { return rows.ids.size() + erased.size(); }
  void clear() noexcept {
    rows.clear();
    erased.clear();
  }
};

// A piece of a feed: stored weights as they were when they were read, and ids that have no row.
struct FeedBatch {
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> times;
  std::vector<float> values;  // ids.size() * dim
  std::vector<std::int64_t> erased;
  std::size_t size() const noexcept { return ids.size() + erased.size(); }
  void clear() noexcept {
    ids.clear();
    times.clear();
    values.clear();
    erased.clear();
  }
};

// Where a scan stands: rows are visited in the order of the leading bits of their ids' hashes. Starts at the beginning.
struct Cursor {
  std::uint32_t shard = 0;
  std::uint64_t position = 0;

  // Before all rows with this hash or a larger one.
  static Cursor at(std::uint64_t hash) noexcept;
  auto operator<=>(const Cursor&) const = default;
};

// Arrays that entries are decoded into; `slots` in the order of slot_infos(), float or int64 as declared there.
struct EntryArrays {
  float* values;
  std::vector<void*> slots;
};
// The same, to encode from.
struct EntryViews {
  const float* values;
  std::vector<const void*> slots;
};

struct TableRead;
struct TableUpdate;

class Table {
 public:
  // admission may be null (every id is admitted) and may be shared with other tables.
  explicit Table(TableConfig config, std::shared_ptr<AdmissionFilter> admission = nullptr);
  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  const TableConfig& config() const noexcept;
  std::uint32_t dim() const noexcept;
  std::uint32_t row_bytes() const noexcept;
  bool has_admission() const noexcept;  // whether a filter decides which ids get a row
  std::string layout() const;  // equal for two tables iff their rows are interchangeable
  std::vector<SlotInfo> slot_infos() const;

  // out: [ids, dim]. Never inserts: an id without a row reads its initial value, or zeros if so configured.
  void lookup(std::span<const std::int64_t> ids, float* out) const;

  // out: [bags, dim]; bag b holds ids[row_splits[b] .. row_splits[b + 1]). An empty bag is zero.
  void lookup_pooled(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits, Pooling pooling,
                     float* out) const;

  // grads: [ids, dim]. Gradients of equal ids are summed in order, then one optimizer step is made; ids without a row get
  // one first, if the admission filter lets them in.
  void apply_gradients(std::span<const std::int64_t> ids, const float* grads, const UpdateOptions& options);

  // grads: [bags, dim], the gradient of lookup_pooled's output.
  void apply_pooled_gradients(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits, Pooling pooling,
                              const float* grads, const UpdateOptions& options);

  // values: [ids, dim]. New ids are subject to admission; optimizer state of existing rows stays. The last duplicate wins.
  void assign(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time);
  // The same, adding: a new id starts from its initial value; every duplicate adds.
  void assign_add(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time);

  // Value and state as if new; existed[i] = 1 if the id had a row, else 0. Not subject to admission.
  void reinitialize(std::span<const std::int64_t> ids, std::uint32_t event_time, std::int32_t* existed);

  void contains(std::span<const std::int64_t> ids, bool* found) const;
  void erase(std::span<const std::int64_t> ids, bool* erased);

  // Removes every row with now - time >= its slot's expiry; returns how many. max_event_time() is the usual now.
  std::uint64_t evict(std::uint32_t now);
  bool expired(std::int64_t id, std::uint32_t time, std::uint32_t now) const noexcept;

  void clear();
  std::uint64_t size() const noexcept;
  // The newest event time any write has carried.
  std::uint32_t max_event_time() const noexcept;
  TableStats stats() const;

  // Appends copies of the rows of one index block (at most a few thousand) and moves the cursor; false when there was
  // nothing left. Rows present throughout a scan are copied exactly once, however the table grows meanwhile.
  bool scan(Cursor& cursor, RowBatch& batch) const;
  // Raw copies of the rows of these ids; found[i] tells which had one, rows of the others are zero.
  void copy_rows(std::span<const std::int64_t> ids, bool* found, RowBatch& batch) const;
  // Stored weights (no read path) and optimizer slots of raw rows.
  void decode(std::span<const std::byte> rows, const EntryArrays& out) const;
  // The other way: raw rows that decode() to these entries. Throws InvalidArgument unless `rows` has the size of n of them.
  void encode(std::size_t n, const EntryViews& entries, std::span<std::byte> rows) const;
  // Upserts raw rows of a table with the same layout(). rows: ids.size() * row_bytes.
  void insert_raw(std::span<const std::int64_t> ids, std::span<const std::uint32_t> times, std::span<const std::byte> rows);

  // Change tracking. From track_changes() on the table remembers which ids were written or removed. A cut closes that set: it is
  // read piece by piece, as the rows were at the cut, while other threads go on writing; what they write belongs to the next
  // cut. The cut holds the state between two calls if no write runs during cut_changes(), which takes microseconds; otherwise it
  // has some of that write's rows, each whole, and the next cut the others. Nothing is ever in neither.
  void track_changes();  // does nothing the second time
  // Ids waiting for the next cut; one that was removed and came back counts twice. 0 without tracking.
  std::uint64_t changed() const;
  // Returns the number of the cut, for the calls below; they throw InvalidArgument unless it is the one under way. Throws
  // InvalidArgument without tracking, or while a cut is neither committed nor rolled back.
  std::uint64_t cut_changes();
  // Replaces `piece` by about 16 thousand rows and removed ids; false when there are none left. Over all pieces each id comes
  // once at most, as a row or as removed. When it throws, the cut can only be rolled back.
  bool read_changes(std::uint64_t cut, ChangeBatch& piece);
  // The changes are safe elsewhere: forgets them. Throws InvalidArgument before all of them were read.
  void commit_changes(std::uint64_t cut);
  // They are not: all wait for the next cut again. On std::bad_alloc the cut is still under way; call it again.
  void rollback_changes(std::uint64_t cut);

  // The feed, for followers that want each row as it is now, soon and often, and not the state of one moment. From track_feed() on the
  // table remembers which ids were written or removed, independently of change tracking, and without copies of rows: a copy of the
  // table that applies all pieces in their order, removed ids first, has the stored weights of all ids that nobody writes any more.
  void track_feed();  // does nothing the second time
  // Ids that wait, some of them perhaps twice. 0 without a feed.
  std::uint64_t fed() const;
  // Replaces `piece` by about 8 MiB of rows and removed ids; false when a pass over the table has ended. One reader at a time.
  // Throws InvalidArgument without a feed. After any other exception some changes are lost: start followers from a scan again.
  bool read_feed(FeedBatch& piece);

  // Uses other hyperparameters for the same rows from now on: of optimizers, initializers and compressors, expiry, and another
  // admission filter. Throws InvalidArgument, and changes nothing, unless name, seed, mode, what unseen ids read and the layout
  // of rows are those of the table. Lookups may run at the same time, no other call may.
  void reconfigure(const TableConfig& config, std::shared_ptr<AdmissionFilter> admission);

  // What a table knows besides its rows, to be saved with them.
  struct State {
    std::uint32_t max_event_time = 0;
    std::uint32_t updates = 0;            // gradient calls so far, modulo 2^32
    std::vector<float> hashnet_scales;  // one per segment
  };
  State state() const;
  // Throws InvalidArgument unless there is one scale per segment, each finite and >= 0.
  void set_state(const State& state);

  struct Impl;  // known to the core alone

 private:
  friend void lookup_many(std::span<const TableRead>);
  friend void apply_many(std::span<const TableUpdate>);

  std::unique_ptr<Impl> impl_;
};

// One table's part of a request to several.
struct TableRead {
  const Table* table;
  std::span<const std::int64_t> ids;
  // [bags + 1]: bag b has offsets[b + 1] - offsets[b] ids, one bag after the other. They rise from any number, so that they can
  // be cut out of those of a whole request. Empty: each id is a bag of its own.
  std::span<const std::int64_t> offsets;
  Pooling pooling = Pooling::kSum;
  float* out;          // [bags, dim]
  std::size_t stride;  // floats from the vector of a bag to that of the next; dim where they lie side by side
};

// Table::lookup_pooled of several tables, large requests by several threads. An error names the table and comes before anything is
// written.
void lookup_many(std::span<const TableRead> reads);

// As TableRead, for the gradients of what a lookup gave.
struct TableUpdate {
  Table* table;
  std::span<const std::int64_t> ids;
  std::span<const std::int64_t> offsets;
  Pooling pooling = Pooling::kSum;
  const float* grads;  // [bags, dim]
  std::size_t stride;
  UpdateOptions options;  // a snapshot is [ids, dim]; with bags of several ids there can be none
  // Where the gradient of each id is, in place of `grads`. [ids], without offsets.
  const float* const* rows = nullptr;
  // How often each id occurred before its gradients were summed, >= 1, which admission filters count. [ids], without offsets; empty:
  // once each.
  std::span<const std::int64_t> counts = {};
};

// Table::apply_pooled_gradients of several tables, each named once. An error names the table and comes before any table has changed;
// only std::bad_alloc can leave some tables updated and others not.
void apply_many(std::span<const TableUpdate> updates);

}  // namespace monolith
