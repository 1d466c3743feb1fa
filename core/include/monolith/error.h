// The errors of the core. Bindings map each class to the Python exception of the same meaning (monolith.errors).
#pragma once

#include <stdexcept>
#include <string>

namespace monolith {

// Base of everything the core throws on purpose. std::bad_alloc passes through unchanged.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something that cannot be: a wrong dim, a negative rate, lengths that disagree. Nothing was changed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A file is truncated, altered, of a newer version, or does not fit the table it is loaded into. Nothing was changed.
class CorruptFile : public Error {
 public:
  using Error::Error;
};

// The operating system refused an open, read, write, fsync or rename; the message has the path and the reason.
class IoError : public Error {
 public:
  using Error::Error;
};

}  // namespace monolith
