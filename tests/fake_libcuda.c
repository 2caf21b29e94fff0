/* SPDX-License-Identifier: Apache-2.0 */
// A driver's library without a driver: what `doctor` is told of GPUs in tests. FAKE_CUDA picks what
// it says: "none" = no device, "broken" = an error, else two GPUs.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kInvalidValue = 1, kNoDevice = 100, kMajor = 75, kMinor = 76 };

static int says(const char* word) {
  const char* wanted = getenv("FAKE_CUDA");
  return wanted != NULL && strcmp(wanted, word) == 0;
}

int cuInit(unsigned flags) {
  (void)flags;
  if (says("none")) return kNoDevice;
  return says("broken") ? 999 : kSuccess;
}
int cuDriverGetVersion(int* version) {
  *version = 13010;
  return kSuccess;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return kSuccess;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = 7 + ordinal;
  return kSuccess;
}
int cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, (size_t)length, device == 7 ? "Model X" : "Model Y");
  return kSuccess;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (attribute != kMajor && attribute != kMinor) return kInvalidValue;
  *value = attribute == kMinor ? 0 : (device == 7 ? 9 : 12);
  return kSuccess;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (size_t)(device == 7 ? 96 : 24) << 30;
  return kSuccess;
}
int cuGetErrorString(int error, const char** words) {
  if (error != 999) return kInvalidValue;
  *words = "unknown error of the fake";
  return kSuccess;
}
