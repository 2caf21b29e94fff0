// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/lcb/test_cases.h"

#include <fmt/format.h>
#include <zlib.h>

#include <cstdint>

namespace bitdecoding::eval {
namespace {

// Twenty times the largest that is in the data set.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

Status corrupt(const std::string& what) { return {StatusCode::kCorrupt, what}; }

int base64_value(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : (c == '/' ? 63 : -1);
}

// Reads little-endian numbers and strings; empty-handed at the end of the bytes.
class Bytes {
 public:
  explicit Bytes(std::string_view bytes) : rest_(bytes) {}
  bool number(int size, std::uint64_t& out) {
    if (rest_.size() < static_cast<std::size_t>(size)) return false;
    out = 0;
    for (int i = size - 1; i >= 0; --i) {
      out = (out << 8) | static_cast<unsigned char>(rest_[static_cast<std::size_t>(i)]);
    }
    rest_.remove_prefix(static_cast<std::size_t>(size));
    return true;
  }
  bool text(std::uint64_t size, std::string& out) {
    if (rest_.size() < size) return false;
    out = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return true;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

// The size in bytes of an operand that says a string's length; 0 for other operations.
int string_length_size(std::uint64_t operation) {
  switch (operation) {
    case 0x8c:
      return 1;
    case 'X':
      return 4;
    case 0x8d:
      return 8;
    default:
      return 0;
  }
}

// The operand's size of operations that change nothing about a lone string: protocol, frame, memo.
int harmless_operand(std::uint64_t operation) {
  switch (operation) {
    case 0x80:
    case 'q':
      return 1;
    case 'r':
      return 4;
    case 0x95:
      return 8;
    case 0x94:
      return 0;
    default:
      return -1;
  }
}

Status add_cases(const nlohmann::json& list, const char* name, std::vector<TestCase>& out) {
  if (!list.is_array()) return corrupt(fmt::format("'{}' is not a list of tests.", name));
  for (const nlohmann::json& item : list) {
    const auto text = [&](const char* key) -> const std::string* {
      const bool there = item.is_object() && item.contains(key) && item[key].is_string();
      return there ? item[key].get_ptr<const std::string*>() : nullptr;
    };
    const std::string* input = text("input");
    const std::string* output = text("output");
    const std::string* type = text("testtype");
    if (input == nullptr || output == nullptr || type == nullptr ||
        (*type != "stdin" && *type != "functional")) {
      return corrupt(
          fmt::format("A test in '{}' has not the texts 'input', 'output' and 'testtype' "
                      "(stdin or functional).",
                      name));
    }
    out.push_back({*input, *output, *type == "functional"});
  }
  return {};
}

Result<nlohmann::json> json_of(const nlohmann::json& value, const char* name, bool may_be_packed) {
  if (!value.is_string()) return value;
  const std::string& text = value.get_ref<const std::string&>();
  nlohmann::json parsed = nlohmann::json::parse(text, nullptr, false);
  if (!parsed.is_discarded()) return parsed;
  if (!may_be_packed) return corrupt(fmt::format("'{}' is not JSON.", name));
  const Result<std::string> packed = decode_base64(text);
  if (!packed.ok()) return corrupt(fmt::format("'{}': {}", name, packed.status().message()));
  const Result<std::string> pickle = inflate(packed.value(), kMostBytes);
  if (!pickle.ok()) return corrupt(fmt::format("'{}': {}", name, pickle.status().message()));
  const Result<std::string> inner = pickled_string(pickle.value());
  if (!inner.ok()) return corrupt(fmt::format("'{}': {}", name, inner.status().message()));
  parsed = nlohmann::json::parse(inner.value(), nullptr, false);
  if (parsed.is_discarded()) return corrupt(fmt::format("'{}' holds no JSON.", name));
  return parsed;
}

}  // namespace

Result<std::string> decode_base64(std::string_view text) {
  std::string out;
  std::uint32_t bits = 0;
  int count = 0;
  std::size_t padding = 0;
  for (const char c : text) {
    if (c == '\n' || c == '\r') continue;
    if (c == '=') {
      ++padding;
      continue;
    }
    const int value = base64_value(c);
    if (value < 0 || padding > 0) return corrupt("It is not base64.");
    bits = (bits << 6) | static_cast<std::uint32_t>(value);
    if (++count % 4 != 1) {
      constexpr int kLeft[] = {0, 0, 4, 2};
      out.push_back(static_cast<char>(bits >> kLeft[count % 4]));
    }
  }
  if (count % 4 == 1 || padding > 2) return corrupt("It is base64 that was cut off.");
  return out;
}

Result<std::string> inflate(std::string_view bytes, std::size_t limit) {
  z_stream stream{};
  if (inflateInit(&stream) != Z_OK) {
    return Status(StatusCode::kResourceExhausted, "No memory for decompression.");
  }
  std::string out;
  std::string chunk(std::size_t{1} << 18, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  int state = Z_OK;
  while (state == Z_OK && out.size() <= limit) {
    stream.next_out = reinterpret_cast<Bytef*>(chunk.data());
    stream.avail_out = static_cast<uInt>(chunk.size());
    state = ::inflate(&stream, Z_NO_FLUSH);
    out.append(chunk, 0, chunk.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  if (out.size() > limit) {
    return corrupt(fmt::format("It decompresses to more than {} bytes.", limit));
  }
  if (state != Z_STREAM_END) return corrupt("It is not zlib data, or was cut off.");
  return out;
}

Result<std::string> pickled_string(std::string_view bytes) {
  Bytes in(bytes);
  std::string text;
  bool found = false;
  for (std::uint64_t operation = 0; in.number(1, operation);) {
    std::uint64_t operand = 0;
    if (operation == '.') {
      if (found && in.empty()) return text;
      break;
    }
    if (const int size = string_length_size(operation); size > 0 && !found) {
      if (!in.number(size, operand) || !in.text(operand, text)) break;
      found = true;
      continue;
    }
    const int size = harmless_operand(operation);
    if (size < 0) {
      return corrupt(
          fmt::format("A pickle must hold one string and nothing else; this one has the "
                      "operation {:#04x}. It is not executed.",
                      operation));
    }
    if (size > 0 && !in.number(size, operand)) break;
  }
  return corrupt("It is a pickle that was cut off, or that has no string.");
}

Result<std::vector<TestCase>> test_cases(const nlohmann::json& row) {
  std::vector<TestCase> out;
  for (const auto& [name, packed] :
       {std::pair("public_test_cases", false), std::pair("private_test_cases", true)}) {
    if (!row.contains(name) || row[name].is_null()) continue;
    const Result<nlohmann::json> list = json_of(row[name], name, packed);
    if (!list.ok()) return list.status();
    Status status = add_cases(list.value(), name, out);
    if (!status.ok()) return status;
  }
  if (out.empty()) return corrupt("It has no tests.");
  return out;
}

}  // namespace bitdecoding::eval
