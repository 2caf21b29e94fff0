// SPDX-License-Identifier: Apache-2.0
#include "gpu.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>
#include <cctype>
#include <memory>
#include <sstream>

#include "io/file.h"

namespace bitdecoding::cli {
namespace {

// Numbers of the driver's interface, which never change.
constexpr int kSuccess = 0;
constexpr int kNoDevice = 100;
constexpr int kMajor = 75;
constexpr int kMinor = 76;

// The few calls of libcuda that are made.
struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*version)(int*) = nullptr;
  int (*count)(int*) = nullptr;
  int (*get)(int*, int) = nullptr;
  int (*name)(char*, int, int) = nullptr;
  int (*attribute)(int*, int, int) = nullptr;
  int (*memory)(std::size_t*, int) = nullptr;
  int (*words)(int, const char**) = nullptr;

  bool load(void* library) {
    return find(library, "cuInit", &init) && find(library, "cuDriverGetVersion", &version) &&
           find(library, "cuDeviceGetCount", &count) && find(library, "cuDeviceGet", &get) &&
           find(library, "cuDeviceGetName", &name) &&
           find(library, "cuDeviceGetAttribute", &attribute) &&
           find(library, "cuDeviceTotalMem_v2", &memory) &&
           find(library, "cuGetErrorString", &words);
  }
  std::string say(int error) const {
    const char* text = nullptr;
    if (words(error, &text) == kSuccess && text != nullptr) return text;
    return fmt::format("error {}", error);
  }

 private:
  template <class Call>
  static bool find(void* library, const char* symbol, Call* call) {
    *call = reinterpret_cast<Call>(::dlsym(library, symbol));
    return *call != nullptr;
  }
};

// The kernel module's version: a word of digits and dots.
std::string kernel_module_version() {
  for (const char* path : {"/sys/module/nvidia/version", "/proc/driver/nvidia/version"}) {
    const Result<std::string> text = read_file(path, 1 << 16);
    if (!text.ok()) continue;
    std::istringstream words(text.value());
    for (std::string word; words >> word;) {
      const bool number = word.find_first_not_of("0123456789.") == std::string::npos;
      if (number && word.find('.') != std::string::npos) return word;
    }
  }
  return {};
}

Result<GpuFacts> read_gpu(const Driver& driver, int ordinal) {
  GpuFacts gpu;
  int device = 0;
  std::array<char, 256> name{};
  std::size_t bytes = 0;
  int error = driver.get(&device, ordinal);
  if (error == kSuccess)
    error = driver.name(name.data(), static_cast<int>(name.size()) - 1, device);
  if (error == kSuccess) error = driver.attribute(&gpu.major, kMajor, device);
  if (error == kSuccess) error = driver.attribute(&gpu.minor, kMinor, device);
  if (error == kSuccess) error = driver.memory(&bytes, device);
  if (error != kSuccess) return Status(StatusCode::kInternal, driver.say(error));
  gpu.name = name.data();
  gpu.memory_bytes = static_cast<std::int64_t>(bytes);
  return gpu;
}

void read_gpus(const Driver& driver, GpuReport* report) {
  int cuda = 0;
  int count = 0;
  int error = driver.init(0);
  if (error == kNoDevice) {
    report->trouble = "it shows no GPU";
    return;
  }
  if (error == kSuccess) error = driver.version(&cuda);
  if (error == kSuccess) error = driver.count(&count);
  if (error != kSuccess) {
    report->trouble = driver.say(error);
    return;
  }
  report->cuda_version = fmt::format("{}.{}", cuda / 1000, cuda % 1000 / 10);
  if (count == 0) report->trouble = "it shows no GPU";
  for (int i = 0; i < count; ++i) {
    Result<GpuFacts> gpu = read_gpu(driver, i);
    if (!gpu.ok()) {
      report->trouble = fmt::format("GPU {}: {}", i, gpu.status().message());
      return;
    }
    report->gpus.push_back(gpu.take());
  }
}

}  // namespace

GpuReport gpu_report() {
  GpuReport report;
  // Never unloaded: the driver leaves threads behind.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return report;
  report.driver = true;
  report.driver_version = kernel_module_version();
  Driver driver;
  if (driver.load(library)) {
    read_gpus(driver, &report);
  } else {
    report.trouble = "its library is too old to be asked";
  }
  return report;
}

}  // namespace bitdecoding::cli
