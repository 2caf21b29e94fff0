// SPDX-License-Identifier: Apache-2.0
// Sentences with drawn words, the same bytes from every compiler. The order in which a call's
// arguments are evaluated is the compiler's choice, so a draw is no argument itself: it is
// described (`of`, `between`, `below`, or a callable with a Choice&), and `said` makes the draws,
// the last place's first.
#pragma once

#include <fmt/format.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "calibrate/words.h"

namespace bitdecoding::eval {

template <class List>
auto of(const List& list) {
  return [&list](Choice& choice) { return choice.of(list); };
}
inline auto between(int low, int high) {
  return [low, high](Choice& choice) { return choice.between(low, high); };
}
inline auto below(int n) {
  return [n](Choice& choice) { return choice.below(n); };
}

template <class Part>
auto drawn(Choice& choice, const Part& part) {
  if constexpr (std::is_invocable_v<const Part&, Choice&>) {
    return part(choice);
  } else {
    return part;
  }
}

template <class... Parts>
std::string said(Choice& choice, fmt::string_view form, const Parts&... parts) {
  const auto given = std::tie(parts...);
  std::tuple<decltype(drawn(choice, parts))...> values;
  constexpr std::size_t kLast = sizeof...(Parts) - 1;
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((std::get<kLast - I>(values) = drawn(choice, std::get<kLast - I>(given))), ...);
  }
  (std::index_sequence_for<Parts...>());
  return std::apply(
      [&](const auto&... value) { return fmt::vformat(form, fmt::make_format_args(value...)); },
      values);
}

// Sentences that the calibration's prose and the evaluation's essays share.
inline std::string deed(Choice& choice) {
  return said(choice, "{}, {} {} {} at {}, {}.", of(kWhen), of(kPeople), of(kDid), of(kThings),
              of(kPlaces), of(kBecause));
}
inline std::string short_deed(Choice& choice) {
  return said(choice, "{} {} {}, {}.", of(kPeople), of(kDid), of(kThings), of(kBecause));
}

}  // namespace bitdecoding::eval
