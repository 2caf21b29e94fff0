// SPDX-License-Identifier: Apache-2.0
// A file of JSON objects, one a line, checksummed, on the disk before the writer goes on. A line
// cut short by a crash is dropped when the file is opened again, so what is half written is never
// taken for whole.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct JsonLines {
  std::vector<nlohmann::json> lines;  // whole, without their checksums
  int dropped = 0;                    // lines that were cut short or damaged
};

// 16 hexadecimal digits, the same on every machine.
std::string stable_hash(const std::string& text);
// The object on one line with its checksum, ended by a newline. Bytes that are no UTF-8 become
// U+FFFD: a reply may hold anything.
std::string json_line(nlohmann::json object);
// Of a file as it is; a file that does not exist has no lines.
Result<JsonLines> read_json_lines(const std::string& path);
// Makes the file and its folder; a line that was cut short at its end is taken off.
Result<JsonLines> open_json_lines(const std::string& path);
// On the disk when it returns; after an error the file is as it was before.
Status append_json_line(const std::string& path, const nlohmann::json& object);

}  // namespace bitdecoding::eval
