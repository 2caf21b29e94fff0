// SPDX-License-Identifier: Apache-2.0
#include "report/machine.h"

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <thread>

namespace bitdecoding::eval {
namespace {

// The value behind "key<separator>" in the first line that begins with key; empty when absent.
std::string value_in_file(const char* path, const std::string& key, char separator) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(key, 0) != 0) continue;
    const std::size_t at = line.find(separator);
    if (at == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t\"", at + 1);
    const std::size_t end = line.find_last_not_of(" \t\"");
    if (begin != std::string::npos) return line.substr(begin, end - begin + 1);
  }
  return "";
}

double gib_in_meminfo(const std::string& key) {
  const std::string text = value_in_file("/proc/meminfo", key, ':');
  return text.empty() ? std::nan("") : std::stod(text) / (1024.0 * 1024.0);
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(CPU_COUNT(&set), 1);
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

double available_memory_gib() { return gib_in_meminfo("MemAvailable"); }

nlohmann::json describe_machine() {
  nlohmann::json out = {{"cores", usable_cores()}};
  const auto put = [&](const char* name, const std::string& value) {
    if (!value.empty()) out[name] = value;
  };
  put("cpu", value_in_file("/proc/cpuinfo", "model name", ':'));
  put("system", value_in_file("/etc/os-release", "PRETTY_NAME", '='));
  utsname kernel{};
  if (uname(&kernel) == 0) {
    put("kernel", kernel.release);
    put("architecture", kernel.machine);
  }
  const double memory = gib_in_meminfo("MemTotal");
  if (!std::isnan(memory)) out["memory_gib"] = std::round(memory * 10.0) / 10.0;
  return out;
}

}  // namespace bitdecoding::eval
