// SPDX-License-Identifier: Apache-2.0
// Whole small files, with the operating system's reason in every error.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "bitdecoding/status.h"

namespace bitdecoding {

// kNotFound when there is no such file, kInvalidArgument for a folder, a device (it may never end)
// or a file above max_bytes (nothing is read then), kIo with the reason otherwise. Of a pipe at
// most max_bytes are read.
Result<std::string> read_file(const std::string& path, std::int64_t max_bytes);

// Writes a temporary file beside `path`, syncs it and renames it: a reader, or a crash, sees the
// old file or the new one and never a part.
Status write_file_atomic(const std::string& path, std::string_view bytes);

}  // namespace bitdecoding
