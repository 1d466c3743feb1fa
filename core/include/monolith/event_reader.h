// Finds what a join needs in an event, a JSON object: its key, its time and its type, and adds columns to it. The object is checked
// as a whole and never built. Unusual events (escapes in a key, numbers that are no 64-bit integers or overflow a double, whatever
// is wrong) are not read here: `read` says so, and a slower reader decides what they are. Both agree on what this one reads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace monolith {

struct EventFields {
  std::vector<std::string> key;     // fields of the key. None: it is not in the object
  std::optional<std::string> time;  // none: it is not in the object
  double time_scale = 1;            // milliseconds in its unit
  std::optional<std::string> type;
  std::vector<std::string> absent;  // an object with one of these fields is unusual
};

class EventReader {
 public:
  static constexpr std::size_t kMaxKeyBytes = 256;

  struct Event {
    std::string_view key;  // valid until the next event is read
    std::int64_t time = 0;
    std::string_view type;
  };

  explicit EventReader(EventFields fields);

  // Returns false if the event is unusual. `time` stays what it was, and so does `key`, if they are not in the object.
  bool read(std::span<const std::uint8_t> record, Event& event);

 private:
  enum class Found : std::uint8_t { kNothing, kText, kInteger, kFraction, kUnusual };
  struct Value {
    Found found = Found::kNothing;
    std::string_view text;  // as it is written, a string without its quotes
    double number = 0;
    std::int64_t integer = 0;
  };

  bool read_object(std::span<const std::uint8_t> record);
  bool read_key(std::string_view& key);
  bool read_time(const Value& value, std::int64_t& time) const;

  EventFields fields_;
  std::vector<std::string> names_;  // of the fields to find: key, time, type
  std::vector<Value> values_;       // by name
  std::string scratch_;
  std::string joined_;
};

// Where the fields of the JSON object in `object` end, and whether it has any: columns are added there, before the last brace.
struct ObjectEnd {
  std::size_t size;
  bool has_fields;
};
ObjectEnd end_of_fields(std::span<const std::uint8_t> object);

}  // namespace monolith
