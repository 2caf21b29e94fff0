// SPDX-License-Identifier: Apache-2.0
// The program as a user runs it, in a folder with a model and a Python environment of its own.
#pragma once

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace bitdecoding {

namespace fs = std::filesystem;

#define EXPECT_HAS(text, part)                               \
  EXPECT_NE(std::string(text).find(part), std::string::npos) \
      << "\"" << (text) << "\" lacks \"" << (part) << "\""

struct Outcome {
  int code = -1;
  std::string out;  // standard output and error together
};

inline Outcome shell(const std::string& line) {
  Outcome run;
  FILE* pipe = ::popen(line.c_str(), "r");
  if (pipe == nullptr) return run;
  std::array<char, 4096> buffer{};
  std::size_t n = 0;
  while ((n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
    run.out.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  run.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return run;
}

inline Outcome program(const std::string& arguments) {
  return shell(std::string(BITDECODING_PROGRAM) + " " + arguments + " 2>&1");
}

inline nlohmann::json json_of(const std::string& arguments, int code = 0) {
  const Outcome run = shell(std::string(BITDECODING_PROGRAM) + " " + arguments + " 2>/dev/null");
  EXPECT_EQ(run.code, code) << run.out;
  nlohmann::json json = nlohmann::json::parse(run.out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << run.out;
  return json;
}

class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("bitdecoding_cli_" + std::to_string(::getpid()));
    fs::create_directories(folder_ / "model");
    write("model/config.json", "{}");
    // A Python environment with vLLM and the plugin, whose `vllm` prints what it was given.
    const fs::path packages = folder_ / "env/lib/python3.11/site-packages";
    for (const char* name : {"vllm", "vllm-0.32.0.dist-info", "bitdecoding_vllm-0.1.0.dist-info"}) {
      fs::create_directories(packages / name);
    }
    write("env/lib/python3.11/site-packages/vllm/__init__.py", "");
    fs::create_directories(folder_ / "env/bin");
    const std::string script =
        "#!/bin/sh\nfor a in \"$@\"; do echo \"[$a]\"; done\n"
        "echo \"recipe=$BITDECODING_RECIPE\"\nexit 7\n";
    for (const char* name : {"env/bin/vllm", "env/bin/python"}) {
      write(name, script);
      ::chmod(path(name).c_str(), 0755);
    }
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  // `serve` with this environment and without the test machine's own.
  std::string serve(const std::string& arguments) const {
    return "serve " + path("model") + " --python " + path("env/bin/python") + " " + arguments;
  }
  fs::path folder_;
};

}  // namespace bitdecoding
