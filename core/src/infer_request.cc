#include "monolith/infer_request.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "json_reader.h"
#include "wire.h"

namespace monolith {
namespace {

using Bytes = InferRequestReader::Bytes;

constexpr std::size_t kMaxInputs = 4096;
constexpr std::size_t kMaxId = 1024;
constexpr std::size_t kKeptNames = std::size_t{1} << 16;

// The request is for the other reader.
struct Unusual {};

void require(bool usual) {
  if (!usual) throw Unusual{};
}

// Each field of an object once: of two with the same name, the other reader knows which one counts.
class Fields {
 public:
  void once(unsigned field) {
    require((seen_ & 1u << field) == 0);
    seen_ |= 1u << field;
  }
  bool has(unsigned field) const { return (seen_ & 1u << field) != 0; }

 private:
  unsigned seen_ = 0;
};

// The values of the request are those of `found`, its inputs are checked when all of them are known.
class JsonRequest {
 public:
  JsonRequest(Bytes text, Bytes tensors, std::string& scratch, InferRequest& found)
      : text_(text), json_(text, scratch), has_tensors_(!tensors.empty()), found_(found) {}

  void read() {
    enum : unsigned { kId, kParameters, kInputs };
    Fields fields;
    object([&](std::string_view name) {
      if (name == "inputs") {
        fields.once(kInputs);
        json_.list([&] { input(); });
      } else if (name == "id") {
        fields.once(kId);
        found_.id = string();
      } else {
        require(name == "parameters");
        fields.once(kParameters);
        parameters();
      }
    });
    json_.end();
  }

 private:
  template <typename Field>
  void object(Field field) {
    json_.expect('{', "expected an object");
    if (json_.take('}')) return;
    do field(json_.key());
    while (json_.take(','));
    json_.expect('}', "expected ',' or '}' in an object");
  }

  void parameters() {
    enum : unsigned { kBinary, kTimeout, kRouteKey };
    Fields fields;
    object([&](std::string_view name) {
      if (name == "binary_data_output") {
        fields.once(kBinary);
        require(json_.at_bool());
        found_.binary_output = json_.boolean();
      } else if (name == "timeout") {
        fields.once(kTimeout);
        found_.timeout = size();
      } else {
        require(name == "route_key");
        fields.once(kRouteKey);
        found_.route_key = string();
      }
    });
  }

  void input() {
    enum : unsigned { kName, kDatatype, kShape, kData, kParameters };
    require(found_.names.size() < kMaxInputs);
    Fields fields;
    std::uint64_t rows = 0, elements = 0;
    object([&](std::string_view key) {
      if (key == "name") {
        fields.once(kName);
        found_.names.push_back(string());
      } else if (key == "datatype") {
        fields.once(kDatatype);
        require(string() == "INT64");
      } else if (key == "shape") {
        fields.once(kShape);
        std::size_t sizes = 0;
        json_.list([&] { rows = size(), ++sizes; });
        require(sizes == 1);
      } else if (key == "data") {
        fields.once(kData);
        require(!has_tensors_);
        const std::size_t before = found_.ids.size();
        json_.list([&] { found_.ids.push_back(number()); });
        elements = found_.ids.size() - before;
      } else {
        require(key == "parameters" && has_tensors_);
        fields.once(kParameters);
        object([&](std::string_view name) {
          require(name == "binary_data_size" && elements == 0);
          const std::uint64_t bytes = size();
          require(bytes % 8 == 0);
          elements = bytes / 8;
        });
      }
    });
    require(fields.has(kName) && fields.has(kDatatype) && fields.has(kShape) && rows > 0 && rows == elements);
    if (found_.names.size() == 1) found_.rows = rows;
    require(rows == found_.rows);
  }

  // One without escapes, so that it lies in the text and is ASCII.
  std::string_view string() {
    const std::string_view value = json_.string();
    const auto* const first = reinterpret_cast<const std::uint8_t*>(value.data());
    require(text_.data() <= first && first < text_.data() + text_.size());
    return value;
  }

  std::int64_t number() {
    require(json_.at_number());
    const JsonNumber number = json_.number();
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    // A zero with a sign is a fraction in some readers.
    require(number.integral && number.exact && number.digits <= kMost && !(number.negative && number.digits == 0));
    const auto digits = static_cast<std::int64_t>(number.digits);
    return number.negative ? -digits : digits;
  }

  std::uint64_t size() {
    const std::int64_t value = number();
    require(value >= 0);
    return static_cast<std::uint64_t>(value);
  }

  Bytes text_;
  JsonReader json_;
  bool has_tensors_;
  InferRequest& found_;
};

class Message {
 public:
  Message(Bytes message, InferRequest& found) : reader_(message), found_(found) {}

  void read() {
    Fields fields;
    std::size_t raw = 0;
    while (!reader_.done()) {
      const auto [field, type] = reader_.tag();
      require(type == wire::kBytes);
      const Bytes value = reader_.bytes();
      switch (field) {
        case 1: fields.once(field), found_.model = ascii(value); break;
        case 2: fields.once(field), found_.version = ascii(value); break;
        case 3: fields.once(field), found_.id = ascii(value); break;
        case 5:
          // They come before all raw contents, whose rows are known then.
          require(raw == 0);
          input(value);
          break;
        case 7:
          require(!typed_ && ++raw <= found_.names.size() && value.size() == 8 * found_.rows);
          append(value);
          break;
        default: throw Unusual{};
      }
    }
    require(typed_ || raw == found_.names.size());
    found_.raw = !typed_;
  }

 private:
  void input(Bytes bytes) {
    require(found_.names.size() < kMaxInputs);
    wire::Reader reader(bytes);
    Fields fields;
    std::uint64_t rows = 0;
    const std::size_t before = found_.ids.size();
    while (!reader.done()) {
      const auto [field, type] = reader.tag();
      if (field == 3 && type == wire::kVarint) {
        fields.once(field);
        rows = reader.varint();
        continue;
      }
      require(type == wire::kBytes);
      const Bytes value = reader.bytes();
      switch (field) {
        case 1: fields.once(field), found_.names.push_back(ascii(value)); break;
        case 2: fields.once(field), require(ascii(value) == "INT64"); break;
        case 3: {
          fields.once(field);
          wire::Reader shape(value);
          rows = shape.varint();
          require(shape.done());
          break;
        }
        case 5: fields.once(field), contents(value); break;
        default: throw Unusual{};
      }
    }
    require(fields.has(1) && fields.has(2) && rows > 0 && rows <= std::numeric_limits<std::int64_t>::max() / 8);
    if (found_.names.size() == 1) found_.rows = rows, typed_ = fields.has(5);
    require(rows == found_.rows && typed_ == fields.has(5) && (!typed_ || found_.ids.size() - before == rows));
  }

  void contents(Bytes bytes) {
    wire::Reader reader(bytes);
    const auto [field, type] = reader.tag();
    require(field == 3 && type == wire::kBytes);
    wire::Reader packed(reader.bytes());
    require(reader.done());
    while (!packed.done()) found_.ids.push_back(static_cast<std::int64_t>(packed.varint()));
  }

  void append(Bytes raw) {
    const std::size_t before = found_.ids.size();
    found_.ids.resize(before + raw.size() / 8);
    std::memcpy(found_.ids.data() + before, raw.data(), raw.size());
  }

  static std::string_view ascii(Bytes value) {
    require(std::ranges::all_of(value, [](std::uint8_t byte) { return byte < 0x80; }));
    return {reinterpret_cast<const char*>(value.data()), value.size()};
  }

  wire::Reader reader_;
  InferRequest& found_;
  bool typed_ = false;
};

bool are_different(std::vector<std::string_view> names) {
  std::ranges::sort(names);
  return std::ranges::adjacent_find(names) == names.end();
}

// Keeps the memory of the one before.
void clear(InferRequest& request) {
  request.names.clear();
  request.ids.clear();
  request.model = request.version = request.id = {};
  request.binary_output.reset();
  request.timeout.reset();
  request.route_key.reset();
  request.rows = 0;
  constexpr std::size_t kKept = std::size_t{1} << 16;
  if (request.ids.capacity() > kKept) request.ids.shrink_to_fit();
}

template <typename Read>
bool is_usual(Read read) {
  try {
    read();
    return true;
  } catch (const Unusual&) {
  } catch (const JsonDamage&) {
  } catch (const wire::Malformed&) {
  }
  return false;
}

}  // namespace

const InferRequest* InferRequestReader::json(Bytes text) {
  clear(found_);
  const bool usual = is_usual([&] { JsonRequest(text, {}, scratch_, found_).read(); });
  return usual && compare_names() ? &found_ : nullptr;
}

const InferRequest* InferRequestReader::binary(Bytes text, Bytes tensors) {
  clear(found_);
  const bool usual = !tensors.empty() && is_usual([&] { JsonRequest(text, tensors, scratch_, found_).read(); });
  // Divided, because a product of what a request states could be too large.
  if (!usual || found_.names.empty() || tensors.size() % (8 * found_.names.size()) != 0 ||
      tensors.size() / (8 * found_.names.size()) != found_.rows) {
    return nullptr;
  }
  found_.ids.resize(tensors.size() / 8);
  std::memcpy(found_.ids.data(), tensors.data(), tensors.size());
  return compare_names() ? &found_ : nullptr;
}

const InferRequest* InferRequestReader::message(Bytes message) {
  clear(found_);
  return is_usual([&] { Message(message, found_).read(); }) && compare_names() ? &found_ : nullptr;
}

bool InferRequestReader::compare_names() {
  if (found_.names.empty() || found_.id.size() > kMaxId) return false;
  joined_.clear();
  for (const std::string_view name : found_.names) {
    const std::size_t size = name.size();
    joined_.append(reinterpret_cast<const char*>(&size), sizeof size).append(name);
  }
  same_names_ = joined_ == last_joined_;
  if (same_names_) return true;
  if (!are_different(found_.names)) return false;
  last_joined_.clear();
  if (joined_.size() <= kKeptNames) last_joined_ = joined_;
  return true;
}

}  // namespace monolith
