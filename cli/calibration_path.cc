// SPDX-License-Identifier: Apache-2.0
#include "calibration_path.h"

#include <fmt/format.h>

#include <filesystem>

#include "io/calibration_identity.h"

namespace bitdecoding::cli {
namespace {

namespace fs = std::filesystem;

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

std::string full_path(const fs::path& path) {
  std::error_code error;
  const fs::path full = fs::absolute(path, error);
  return error ? path.string() : full.lexically_normal().string();
}

}  // namespace

std::string saved_calibration(const std::string& model) {
  if (!is_folder(model)) return "";
  for (const fs::path& folder : {fs::path(model) / kCalibrationFolder, fs::path(model)}) {
    std::error_code ignored;
    if (fs::exists(folder / kCalibrationFile, ignored)) return full_path(folder / kCalibrationFile);
  }
  return "";
}

// The recipe's elements decide about tau alone: the means are of keys as the model gives them.
Status check_calibration(const std::string& model, const Recipe& recipe, const KeyShift& sidecar) {
  if (!is_folder(model) || sidecar.metadata.count("calibration_version") == 0) return {};
  Result<Identity> wanted = model_identity(model);
  if (!wanted.ok()) return wanted.status();
  if (recipe.tau_calibrate) wanted.value().merge(recipe_identity(recipe));
  wanted.value().insert_or_assign("calibration_version", std::string(kCalibrationVersion));
  const Status s = check_identity(sidecar, wanted.value());
  if (s.ok()) return {};
  return {StatusCode::kInvalidArgument,
          fmt::format("{}. Make another with `bitdecoding calibrate {}`", s.message(), model)};
}

Result<std::string> calibration_path(const std::string& named, const std::string& model) {
  const std::string path = named.empty() ? saved_calibration(model) : full_path(named);
  if (path.empty()) {
    return Status(
        StatusCode::kNotFound,
        fmt::format("there is no calibration in '{}'; make it with `bitdecoding calibrate "
                    "{}`, or name key means with --key-shift",
                    model, model));
  }
  const Result<KeyShift> sidecar = load_key_shift(path);
  if (!sidecar.ok()) return sidecar.status();
  if (Status s = check_calibration(model, Recipe{}, sidecar.value()); !s.ok()) return s;
  return path;
}

}  // namespace bitdecoding::cli
