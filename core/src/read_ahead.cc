#include "read_ahead.h"

#include <utility>

namespace monolith {
namespace {

std::unique_ptr<ReadAhead::Piece> pop_front(std::vector<std::unique_ptr<ReadAhead::Piece>>& pieces) {
  std::unique_ptr<ReadAhead::Piece> first = std::move(pieces.front());
  pieces.erase(pieces.begin());
  return first;
}

}  // namespace

std::byte* ReadAhead::Piece::room(std::size_t bytes) {
  if (size_ < bytes) {
    size_ = 0;
    memory_ = {};  // before the larger one is there, not after
    memory_ = make_huge_array<std::byte>(bytes);
    size_ = bytes;
  }
  return memory_.get();
}

ReadAhead::ReadAhead(std::size_t count, std::size_t room, Read read) : count_(count), read_(std::move(read)) {
  // With room for all of them: moving a piece cannot fail then.
  unused_.reserve(room);
  ready_.reserve(room);
  for (std::size_t i = 0; i < room; ++i) unused_.push_back(std::make_unique<Piece>());
  thread_ = std::thread([this] { run(); });
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool ReadAhead::next(std::unique_ptr<Piece>& piece) {
  std::unique_lock lock(mutex_);
  if (piece != nullptr) {
    unused_.push_back(std::move(piece));
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return error_ != nullptr || ended_ || !ready_.empty(); });
  if (error_ != nullptr) std::rethrow_exception(error_);
  if (ready_.empty()) return false;
  piece = pop_front(ready_);
  return true;
}

std::unique_ptr<ReadAhead::Piece> ReadAhead::unused() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stopping_ || !unused_.empty(); });
  return stopping_ ? nullptr : pop_front(unused_);
}

void ReadAhead::run() {
  std::exception_ptr error;
  try {
    for (std::size_t number = 0; number < count_; ++number) {
      std::unique_ptr<Piece> piece = unused();
      if (piece == nullptr) break;
      piece->number = number;
      read_(*piece);
      const std::lock_guard guard(mutex_);
      ready_.push_back(std::move(piece));
      changed_.notify_all();
    }
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard guard(mutex_);
  error_ = error;
  ended_ = true;
  changed_.notify_all();
}

}  // namespace monolith
