// SPDX-License-Identifier: Apache-2.0
// The words and sentences that the built-in texts are made of, and the generator's choice among
// them. Written for this project.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace bitdecoding::eval {

// SplitMix64: the same numbers on every machine and with every standard library.
class Choice {
 public:
  explicit Choice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  template <class List>
  std::string_view of(const List& list) {
    return list[static_cast<std::size_t>(below(static_cast<int>(std::size(list))))];
  }

 private:
  std::uint64_t state_;
};

inline constexpr std::string_view kPeople[] = {
    "Amara",   "Benoît", "Chiara", "Dmitri", "Eleni",  "Farouk", "Greta",   "Hiroshi",
    "Ingrid",  "João",   "Katya",  "Liam",   "Mireia", "Noor",   "Ottavia", "Priya",
    "Quentin", "Rosa",   "Samuel", "Tomás",  "Ulrike", "Viktor", "Wanjiru", "Yusuf"};
inline constexpr std::string_view kPlaces[] = {"the ferry landing",
                                               "a workshop behind the station",
                                               "the archive's reading room",
                                               "the north reservoir",
                                               "an orchard above the village",
                                               "the customs house",
                                               "the observatory",
                                               "a kitchen with one window",
                                               "the municipal greenhouse",
                                               "the printing works",
                                               "the old signal box",
                                               "a hospital corridor",
                                               "the salt warehouse",
                                               "the school's roof",
                                               "a narrow lane of bookbinders",
                                               "the weather station",
                                               "the covered market",
                                               "a laboratory on the third floor"};
inline constexpr std::string_view kThings[] = {
    "a ledger with water stains",  "the brass barometer",    "two letters without a date",
    "the revised timetable",       "a box of glass slides",  "the irrigation plan",
    "a violin with three strings", "the translator's notes", "an unpaid invoice",
    "the map of the sewers",       "a basket of quinces",    "the spare generator",
    "the minutes of the meeting",  "a sketch of the bridge", "the seed catalogue",
    "a clock that ran backwards",  "the second manuscript",  "a tray of soil samples"};
inline constexpr std::string_view kDid[] = {
    "carried",  "repaired", "described", "counted", "misplaced", "examined",
    "borrowed", "copied",   "returned",  "wrapped", "measured",  "defended",
    "sold",     "hid",      "inherited", "drew",    "weighed",   "annotated"};
inline constexpr std::string_view kWhen[] = {"Before the rain began",
                                             "On the last Thursday of March",
                                             "Long after the lamps were lit",
                                             "In the year of the drought",
                                             "While the others argued",
                                             "At a quarter past six",
                                             "During the second rehearsal",
                                             "When the tide had turned",
                                             "Three winters later",
                                             "As soon as the post arrived",
                                             "Between two trains",
                                             "Without a word to anyone",
                                             "For reasons nobody recorded",
                                             "Once the harvest was in"};
inline constexpr std::string_view kBecause[] = {"because the roof could not wait another season",
                                                "although the figures did not agree",
                                                "so that the apprentices would learn it by hand",
                                                "and nobody asked what it had cost",
                                                "since the river had already taken the lower road",
                                                "which explained the silence at dinner",
                                                "but the committee had decided otherwise",
                                                "as if the whole street were listening",
                                                "until the inspector closed the file",
                                                "and the smell of turpentine stayed for weeks",
                                                "whatever the neighbours might say",
                                                "for the insurance covered only fire and hail"};
inline constexpr std::string_view kReflections[] = {
    "A plan is a promise that one makes to the weather.",
    "It is easier to move a wall than to move a habit.",
    "What is measured twice is believed once.",
    "There are mistakes that only patience can make.",
    "The cheapest repair is the one that is described correctly.",
    "Nobody remembers the dry years until the well is low.",
    "Every catalogue leaves out the thing that it was made for.",
    "A good tool forgives; an excellent one explains.",
    "The sea gives back wood, glass and, sometimes, an answer.",
    "Half of the work was deciding what not to keep.",
    "An honest estimate is longer than a hopeful one.",
    "In every queue somebody knows the rule and somebody knows the clerk.",
    "Der Fluss war nach drei Tagen Regen kaum wiederzuerkennen.",
    "On ne comprend bien que ce que l'on a dû réparer soi-même.",
    "La llave estaba donde siempre, y por eso nadie la buscó.",
    "Chi misura due volte taglia una volta sola.",
    "Light bends a little at every surface that it crosses, and so does a story.",
    "Yeast, unlike a committee, begins to work without being asked."};
inline constexpr std::string_view kTopics[] = {"how tides are predicted",
                                               "why bread rises",
                                               "what a hash table does",
                                               "how to prune an apple tree",
                                               "the difference between weather and climate",
                                               "how a sewing machine makes a stitch",
                                               "why the sky is dark at night",
                                               "how to read a balance sheet",
                                               "what a compiler's parser does",
                                               "how vaccines train the immune system",
                                               "why bridges have expansion joints",
                                               "how to tune a guitar by ear",
                                               "what inflation does to savings",
                                               "how whales find each other",
                                               "how a lock on a canal works",
                                               "why some metals rust and others do not"};
inline constexpr std::string_view kAnswers[] = {
    "Think of it in two steps: first what changes, then what stays the same.",
    "The short answer is that small differences add up over a large surface.",
    "Most explanations leave out friction, and friction is the interesting part.",
    "It helps to write down the units before any number.",
    "You can see the effect at home with a glass of water and a sheet of paper.",
    "There are exceptions, and the common one is heat.",
    "Historically people found the rule long before they found the reason.",
    "A useful rule of thumb is to change one thing at a time and keep a note of it.",
    "In practice the limit is not the material but the time that it takes to cool.",
    "If the first measurement surprises you, repeat it before you explain it.",
    "The order matters: doing the second step first undoes the third.",
    "Nothing about this depends on scale until you reach the size of a grain of sand.",
    "Two causes look alike here; the way to tell them apart is to wait an hour.",
    "What remains is a matter of taste, and you should ignore anyone who says otherwise."};
inline constexpr std::string_view kNouns[] = {"buffer", "packet",  "ledger", "sensor", "window",
                                              "cursor", "token",   "bucket", "record", "matrix",
                                              "route",  "session", "shard",  "ticket", "vector",
                                              "anchor", "budget",  "signal", "layer",  "archive"};
inline constexpr std::string_view kVerbs[] = {"merge",   "parse",  "flush", "rotate",   "collect",
                                              "balance", "encode", "probe", "schedule", "trim",
                                              "append",  "verify", "split", "resolve",  "compact"};

}  // namespace bitdecoding::eval
