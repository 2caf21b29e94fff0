// SPDX-License-Identifier: Apache-2.0
#include "engine/port.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace bitdecoding::eval {

Result<int> free_loopback_port() {
  const int handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (handle < 0) {
    return Status(StatusCode::kIo, fmt::format("Cannot make a socket: {}.", std::strerror(errno)));
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  const bool bound = bind(handle, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(handle, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  close(handle);
  if (!bound) {
    return Status(
        StatusCode::kIo,
        fmt::format("Cannot find a free port on the loopback address: {}.", std::strerror(error)));
  }
  return static_cast<int>(ntohs(address.sin_port));
}

}  // namespace bitdecoding::eval
