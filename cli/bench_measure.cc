// SPDX-License-Identifier: Apache-2.0
#include "bench_measure.h"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <map>
#include <vector>

#include "bitdecoding/bitdecoding.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

double process_cpu_us() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

double median(std::vector<double>* values) {
  std::sort(values->begin(), values->end());
  const std::size_t n = values->size();
  return n % 2 == 1 ? (*values)[n / 2] : ((*values)[n / 2 - 1] + (*values)[n / 2]) / 2;
}

// The first processor's fields of /proc/cpuinfo; empty where there is no such file.
std::map<std::string, std::string> read_cpuinfo() {
  std::map<std::string, std::string> fields;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line) && !line.empty();) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    const std::string key = line.substr(0, line.find_last_not_of(" \t:", colon) + 1);
    fields[key] = line.substr(colon + 2);
  }
  return fields;
}

std::string print_value(const nlohmann::ordered_json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

Result<Timing> measure(const std::function<Status()>& call, double seconds, int repeat) {
  for (int i = 0; i < 2; ++i) {
    if (Status s = call(); !s.ok()) return s;
  }
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::vector<double> wall;
  std::vector<double> cpu;
  while (wall.size() < static_cast<std::size_t>(std::max(repeat, 1)) || Clock::now() < end) {
    const double cpu_start = process_cpu_us();
    const auto start = Clock::now();
    Status s = call();
    const std::chrono::duration<double, std::micro> time = Clock::now() - start;
    if (!s.ok()) return s;
    wall.push_back(time.count());
    cpu.push_back(process_cpu_us() - cpu_start);
  }
  Timing timing;
  timing.calls = static_cast<int>(wall.size());
  timing.us_median = median(&wall);
  timing.us_min = wall.front();
  timing.us_max = wall.back();
  timing.us_cpu_median = median(&cpu);
  return timing;
}

double round_to(double value, int digits) {
  const double factor = std::pow(10.0, digits);
  return std::round(value * factor) / factor;
}

void add_timing(const Timing& timing, nlohmann::ordered_json* row) {
  (*row)["us_median"] = round_to(timing.us_median, 2);
  (*row)["us_min"] = round_to(timing.us_min, 2);
  (*row)["us_max"] = round_to(timing.us_max, 2);
  (*row)["us_cpu_median"] = round_to(timing.us_cpu_median, 2);
  (*row)["calls"] = timing.calls;
}

void add_machine(nlohmann::ordered_json* row) {
  const std::map<std::string, std::string> cpu = read_cpuinfo();
  const auto field = [&](const char* name) {
    const auto found = cpu.find(name);
    return found == cpu.end() ? std::string() : found->second;
  };
  utsname system{};
  uname(&system);
  const std::string model = field("model name");
  (*row)["cpu"] = model.empty() ? std::string(system.machine) : model;
  if (!field("cpu family").empty()) {
    (*row)["cpu_id"] = fmt::format("{} family {} model {}", field("vendor_id"), field("cpu family"),
                                   field("model"));
  }
  (*row)["version"] = bd_version();
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &utc);
  (*row)["date"] = text;
}

void print_row(const nlohmann::ordered_json& row, bool json) {
  if (json) {
    print(row.dump() + "\n");
    return;
  }
  std::size_t width = 0;
  for (const auto& [key, value] : row.items()) width = std::max(width, key.size());
  for (const auto& [key, value] : row.items()) {
    print(fmt::format("{:<{}}  {}\n", key, width, print_value(value)));
  }
}

}  // namespace bitdecoding::cli
