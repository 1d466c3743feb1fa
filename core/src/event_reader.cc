#include "monolith/event_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "json_reader.h"

namespace monolith {
namespace {

// Doubles end at 1.8e308, and 64 bits of digits have 20 places.
constexpr std::int64_t kSafeExponent = 280;
constexpr double kMaxTime = 1LL << 52;

bool is_space(std::uint8_t byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }

}  // namespace

EventReader::EventReader(EventFields fields) : fields_(std::move(fields)) {
  names_ = fields_.key;
  if (fields_.time) names_.push_back(*fields_.time);
  if (fields_.type) names_.push_back(*fields_.type);
  values_.resize(names_.size());
}

bool EventReader::read(std::span<const std::uint8_t> record, Event& event) {
  try {
    if (!read_object(record)) return false;
  } catch (const JsonDamage&) {
    return false;
  }
  const Value* next = values_.data() + fields_.key.size();
  if (fields_.time && !read_time(*next++, event.time)) return false;
  if (fields_.type) {
    if (next->found != Found::kText && next->found != Found::kInteger) return false;
    event.type = next->text;
  }
  return fields_.key.empty() || read_key(event.key);
}

bool EventReader::read_object(std::span<const std::uint8_t> record) {
  JsonReader json(record, scratch_);
  std::fill(values_.begin(), values_.end(), Value{});
  if (!json.take('{')) return false;
  if (!json.take('}')) {
    do {
      const std::string_view name = json.key();
      const bool refused = std::find(fields_.absent.begin(), fields_.absent.end(), name) != fields_.absent.end();
      if (refused) return false;
      Value found;
      const auto wanted = std::find(names_.begin(), names_.end(), name);
      json.next();
      const JsonReader::Mark start = json.mark();
      if (wanted == names_.end()) {
        json.skip();
        continue;
      }
      if (json.at_number()) {
        const JsonNumber number = json.number();
        const bool fits = number.exact && number.digits <= std::uint64_t{INT64_MAX} && number.text != "-0";
        found.found = !number.integral ? Found::kFraction : fits ? Found::kInteger : Found::kUnusual;
        found.text = number.text;
        found.number = number.value();
        if (fits) found.integer = number.negative ? -static_cast<std::int64_t>(number.digits) : static_cast<std::int64_t>(number.digits);
        if (number.exponent > kSafeExponent) found.found = Found::kUnusual;
      } else {
        const bool is_text = json.next() == '"';
        json.skip();
        const auto* const text = reinterpret_cast<const char*>(start);
        found.text = {text, static_cast<std::size_t>(json.mark() - start)};
        found.found = is_text && found.text.find('\\') == std::string_view::npos ? Found::kText : Found::kUnusual;
        if (is_text) found.text = found.text.substr(1, found.text.size() - 2);
      }
      // One object may have a name twice. Then the last one counts, for every name that is wanted twice.
      for (std::size_t i = 0; i < names_.size(); ++i) {
        if (names_[i] == *wanted) values_[i] = found;
      }
    } while (json.take(','));
    json.expect('}', "expected ',' or '}' in an object");
  }
  json.end();
  return json.largest_exponent() <= kSafeExponent;
}

bool EventReader::read_key(std::string_view& key) {
  for (std::size_t i = 0; i < fields_.key.size(); ++i) {
    const Value& value = values_[i];
    if ((value.found != Found::kText && value.found != Found::kInteger) || value.text.empty()) return false;
  }
  if (fields_.key.size() == 1) {
    key = values_[0].text;
  } else {
    joined_.clear();
    for (std::size_t i = 0; i < fields_.key.size(); ++i) {
      joined_.append(i == 0 ? "[\"" : ",\"").append(values_[i].text).push_back('"');
    }
    joined_.push_back(']');
    key = joined_;
  }
  return key.size() <= kMaxKeyBytes;
}

bool EventReader::read_time(const Value& value, std::int64_t& time) const {
  if (value.found != Found::kInteger && value.found != Found::kFraction) return false;
  // Exact for an integer below the limit.
  const double scaled = value.found == Found::kInteger ? static_cast<double>(value.integer) * fields_.time_scale
                                                       : std::nearbyint(value.number * fields_.time_scale);
  if (!(scaled > 0 && scaled <= kMaxTime)) return false;
  time = static_cast<std::int64_t>(scaled);
  return true;
}

ObjectEnd end_of_fields(std::span<const std::uint8_t> object) {
  std::size_t size = object.size();
  while (size > 0 && object[size - 1] != '}') --size;
  if (size > 0) --size;
  while (size > 0 && is_space(object[size - 1])) --size;
  return {size, size > 0 && object[size - 1] != '{'};
}

}  // namespace monolith
