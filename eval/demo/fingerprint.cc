// SPDX-License-Identifier: Apache-2.0
#include "demo/fingerprint.h"

#include <algorithm>
#include <filesystem>

namespace bitdecoding::eval {

namespace fs = std::filesystem;

nlohmann::json file_identities(const std::vector<std::string>& paths) {
  nlohmann::json out = nlohmann::json::array();
  for (const std::string& path : paths) {
    std::error_code error;
    const auto size = fs::file_size(path, error);
    if (error) {
      out.push_back({path, "missing"});
      continue;
    }
    const auto time = fs::last_write_time(path, error).time_since_epoch().count();
    out.push_back({path, size, static_cast<std::int64_t>(time)});
  }
  return out;
}

nlohmann::json build_identity(const DemoOptions& options) {
  std::vector<std::string> paths = {options.model + "/config.json",
                                    options.root + "/build/release/lib/libbitdecoding.so",
                                    options.venv + "/.bitdecoding-stamp"};
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(options.model, error)) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return file_identities(paths);
}

}  // namespace bitdecoding::eval
