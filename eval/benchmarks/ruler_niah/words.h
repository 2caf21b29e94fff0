// SPDX-License-Identifier: Apache-2.0
// What needles and the text around them are made of. Written for this project.
#pragma once

#include <string_view>

namespace bitdecoding::eval {

// Keys are "adjective-noun".
inline constexpr std::string_view kKeyAdjectives[] = {
    "able",    "agile",    "amber",   "ample",   "ancient", "arid",   "azure",    "bare",
    "bent",    "bitter",   "blank",   "bold",    "brief",   "bright", "brisk",    "broad",
    "calm",    "candid",   "careful", "chilly",  "civil",   "clever", "coarse",   "copper",
    "cordial", "crisp",    "curious", "damp",    "daring",  "deft",   "dense",    "distant",
    "dusty",   "eager",    "earnest", "eastern", "elastic", "faint",  "famous",   "fertile",
    "fleet",   "fluent",   "formal",  "fragile", "frank",   "frosty", "gentle",   "gilded",
    "gloomy",  "golden",   "grand",   "hardy",   "hasty",   "hollow", "humble",   "idle",
    "inner",   "ivory",    "jagged",  "jolly",   "keen",    "kind",   "lavish",   "lean",
    "level",   "limber",   "lively",  "lofty",   "lucid",   "mellow", "merry",    "mild",
    "misty",   "modest",   "narrow",  "neat",    "nimble",  "noble",  "northern", "oblique",
    "opaque",  "orderly",  "patient", "placid",  "plain",   "polite", "prompt",   "proud",
    "quaint",  "quiet",    "rapid",   "remote",  "robust",  "rustic", "sandy",    "scarlet",
    "serene",  "sharp",    "silent",  "silver",  "simple",  "sleek",  "slender",  "solemn",
    "sparse",  "steady",   "stern",   "subtle",  "sudden",  "tender", "thrifty",  "tidy",
    "timid",   "tranquil", "upper",   "vague",   "velvet",  "vivid",  "warm",     "western",
    "wide",    "witty",    "woven",   "young",   "zealous"};
inline constexpr std::string_view kKeyNouns[] = {
    "acorn",   "airship", "almond",  "alley",    "anvil",   "apron",   "arch",     "atlas",
    "badge",   "bakery",  "balcony", "bamboo",   "banner",  "barley",  "basin",    "beacon",
    "beetle",  "bellows", "bench",   "bicycle",  "birch",   "blanket", "bobbin",   "boulder",
    "bracket", "bramble", "bridle",  "broom",    "bucket",  "buckle",  "bugle",    "button",
    "cabin",   "cable",   "cactus",  "camera",   "canal",   "candle",  "canopy",   "canyon",
    "carpet",  "castle",  "cedar",   "cello",    "chalk",   "chimney", "chisel",   "cinder",
    "circus",  "clover",  "cobbler", "comet",    "compass", "copper",  "coral",    "cottage",
    "cradle",  "crater",  "cricket", "cushion",  "cypress", "dagger",  "daisy",    "delta",
    "desk",    "diary",   "dome",    "dragon",   "drawer",  "drum",    "easel",    "eclipse",
    "elbow",   "ember",   "engine",  "envelope", "falcon",  "feather", "fern",     "ferry",
    "fiddle",  "fjord",   "flask",   "flute",    "forge",   "fossil",  "fountain", "furnace",
    "galaxy",  "garden",  "garlic",  "gazelle",  "ginger",  "glacier", "goblet",   "granite",
    "guitar",  "hammer",  "harbor",  "harvest",  "hatch",   "hazel",   "helmet",   "heron",
    "hinge",   "honey",   "icicle",  "island",   "jacket",  "jasmine", "jigsaw",   "jungle",
    "kettle",  "keyhole", "kite",    "ladder",   "lagoon",  "lantern", "lattice",  "lemon",
    "lever",   "lichen",  "lighter", "lily",     "lizard",  "locket",  "loom",     "lotus",
    "magnet",  "mantle",  "maple",   "marble",   "meadow",  "mirror",  "mitten",   "monsoon",
    "mortar",  "mosaic",  "needle",  "nutmeg",   "oasis",   "onion",   "orchard",  "otter",
    "paddle",  "parcel",  "pebble",  "pendulum", "pepper",  "piano",   "pigeon",   "pillow",
    "pine",    "pocket",  "pulley",  "quarry",   "quill",   "quilt",   "radish",   "raven",
    "ribbon",  "river",   "rocket",  "rudder",   "saddle",  "saffron", "sail",     "satchel",
    "scarf",   "shovel",  "sparrow", "spindle",  "spruce",  "stove",   "summit",   "tablet",
    "teapot",  "thimble", "thistle", "ticket",   "timber",  "tower",   "trellis",  "trumpet",
    "tulip",   "tunnel",  "turnip",  "umbrella", "urn",     "valley",  "vase",     "violet",
    "wagon",   "walnut",  "willow",  "window",   "wrench",  "yarn",    "zephyr",   "zinc"};

// Said over and over: text that holds nothing at all.
inline constexpr std::string_view kNoise[] = {"The rain is soft.", "The road is long.",
                                              "The hill is near.", "We walk on.",
                                              "Then we walk back."};

}  // namespace bitdecoding::eval
