// What ranks that share tables send each other: ids to their owners, rows back, summed gradients to the owners.
//
// A message is int64: a hash of the tables that the sender has, the number of tables K, for each of them its number and how many ids
// follow, then the ids, one table after the other. Tables with an admission filter add how often each id occurred, behind all ids.
// Rows and gradients are float, dim of them for each id, in the order of the ids of the message they belong to.
//
// Thread-safety: an OwnerSplit may be read by several threads. Ownership: it keeps no pointer to what it was made of.
// Failure: InvalidArgument for a message that another rank has put together wrongly, before anything has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "monolith/table.h"

namespace monolith {

// One table's part of a request.
struct SplitTable {
  std::int64_t number;
  std::uint32_t dim;
  bool counted;  // it has an admission filter
  std::span<const std::int64_t> ids;
};

// Bags of one table and their vectors, or the gradients of those.
template <typename Float>
struct SplitBags {
  std::span<const std::int64_t> offsets;  // [bags + 1], rising from any number. Empty: each id is a bag of its own.
  Pooling pooling = Pooling::kSum;
  Float* vectors;      // [bags, dim]
  std::size_t stride;  // floats from one to the next
};

// The distinct ids of several tables by owner, and where each id of the request is among them.
class OwnerSplit {
 public:
  // owners: [kBuckets], the owner of each bucket, < num_owners. Empty: an id belongs to id % num_owners, taken as unsigned.
  // Distinct ids keep the order of their first occurrence. An id that occurs in two tables is two ids.
  OwnerSplit(std::span<const SplitTable> tables, std::span<const std::uint16_t> owners, std::size_t num_owners,
             std::int64_t tables_hash);

  std::size_t num_owners() const noexcept { return num_owners_; }
  std::size_t num_tables() const noexcept { return tables_.size(); }
  std::span<const std::int64_t> message(std::size_t owner) const noexcept;
  // How many of the message's ids are of each table: [tables].
  std::span<const std::int64_t> sizes(std::size_t owner) const noexcept;
  // Floats of the rows of all owners before this one; floats_before(num_owners()) is the size of all rows.
  std::size_t floats_before(std::size_t owner) const noexcept { return float_starts_[owner]; }
  // For each id of the request, where its row begins if the rows of all owners lie behind each other.
  void row_offsets(std::span<std::int64_t> out) const;

  // Pools what the owners answered to their messages. rows: [owners]. bags: [tables]. Adds in the order of each bag, as a table does.
  void pool(std::span<const std::span<const float>> rows, std::span<const SplitBags<float>> bags) const;
  // out: the gradients of the ids of all messages, owner after owner. An id's gradients are added in order, each multiplied by `weight`
  // and by what pooling divides by.
  void sum(std::span<const SplitBags<const float>> bags, float weight, std::span<float> out) const;

 private:
  struct Slot {
    std::uint32_t dim;
    bool counted;
    std::size_t first;     // of its ids in the request
    std::size_t size;      // ids in the request
    std::size_t distinct;  // in the arrays from `first` on
  };

  template <typename OwnerOf>
  void find_distinct(Slot& slot, std::span<const std::int64_t> ids, std::span<std::int64_t> sizes, const OwnerOf& owner_of);
  void write_messages(std::span<const SplitTable> tables, std::int64_t tables_hash);
  template <typename Float>
  void check(std::span<const SplitBags<Float>> bags) const;

  std::size_t num_owners_;
  std::size_t num_ids_ = 0;
  std::vector<Slot> tables_;
  std::unique_ptr<std::uint32_t[]> place_of_;   // [ids]: the distinct id of each, counted from the first of its table
  std::unique_ptr<std::int64_t[]> distinct_;    // by table, with gaps: that of place p is at slot.first + p
  std::unique_ptr<std::uint16_t[]> owner_;      // of each of these
  std::unique_ptr<std::uint32_t[]> count_;      // how often each occurs
  std::unique_ptr<std::size_t[]> offset_;       // floats from the first row of its owner to its row
  std::vector<std::int64_t> messages_;
  std::vector<std::size_t> message_starts_;     // [owners + 1]
  std::vector<std::int64_t> sizes_;             // [owners, tables]
  std::vector<std::size_t> float_starts_;       // [owners + 1]
};

// The rows that messages ask for, one message after the other. Returns where each ends, in floats. If `out` is too small nothing is
// looked up, and the last end is the size that it should have.
std::vector<std::size_t> lookup_messages(std::span<const Table* const> tables, std::span<const std::span<const std::int64_t>> messages,
                                         std::span<float> out);

// Makes one optimizer step per table and id with the sum of its gradients in all messages, added in the order of the messages.
// grads: those of the ids of each message. learning_rates: of all segments of all tables. Tables that are in no message are left as
// they are. With options.sequential each message makes a step of its own.
void apply_messages(std::span<Table* const> tables, std::span<const std::span<const std::int64_t>> messages,
                    std::span<const std::span<const float>> grads, const UpdateOptions& options);

}  // namespace monolith
