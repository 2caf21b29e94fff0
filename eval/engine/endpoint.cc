// SPDX-License-Identifier: Apache-2.0
#include "engine/endpoint.h"

#include <fmt/format.h>

namespace bitdecoding::eval {

Result<Endpoint> parse_endpoint(const std::string& url) {
  const auto bad = [&](const char* why) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("The endpoint '{}' {}; expected http://HOST:PORT or "
                              "http://HOST:PORT/v1.",
                              url, why));
  };
  const std::size_t scheme = url.find("://");
  if (scheme == std::string::npos) return bad("has no scheme");
  const std::string name = url.substr(0, scheme);
#ifdef CPPHTTPLIB_OPENSSL_SUPPORT
  if (name != "http" && name != "https") return bad("is neither http nor https");
#else
  if (name != "http") return bad("is not http, and this build has no TLS");
#endif
  const std::size_t host = scheme + 3;
  const std::size_t path = url.find('/', host);
  const std::string authority = url.substr(host, path == std::string::npos ? path : path - host);
  if (authority.empty()) return bad("names no host");
  const std::size_t colon = authority.rfind(':');
  if (colon != std::string::npos && authority.back() != ']') {
    const std::string port = authority.substr(colon + 1);
    const bool digits = !port.empty() && port.find_first_not_of("0123456789") == std::string::npos;
    if (!digits || port.size() > 5 || std::stoi(port) > 65535) return bad("has no valid port");
  }
  Endpoint out{fmt::format("{}://{}", name, authority),
               path == std::string::npos ? "" : url.substr(path)};
  if (out.prefix.find_first_of("?#") != std::string::npos) return bad("has a query");
  while (!out.prefix.empty() && out.prefix.back() == '/') out.prefix.pop_back();
  if (out.prefix.size() >= 3 && out.prefix.compare(out.prefix.size() - 3, 3, "/v1") == 0) {
    out.prefix.erase(out.prefix.size() - 3);
  }
  return out;
}

Endpoint loopback(int port) { return {fmt::format("http://127.0.0.1:{}", port), ""}; }

}  // namespace bitdecoding::eval
