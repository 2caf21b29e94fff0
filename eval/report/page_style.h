// SPDX-License-Identifier: Apache-2.0
// The report's style sheet: system fonts, light and dark by the reader's preference.
#pragma once

namespace bitdecoding::eval {

inline constexpr const char* kPageStyle = R"css(
:root {
  --page: #fcfcfa; --ink: #1d2126; --soft: #5b646e; --rule: #dfe2e5; --panel: #f3f4f2;
  --s0: #8a929b; --s1: #3d6a99; --s2: #c05621; --s3: #7a5ea8; --s4: #b83a5a; --s5: #2f8559;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181b; --ink: #e5e8eb; --soft: #9aa4ae; --rule: #31373d; --panel: #1e2327;
    --s0: #8b949e; --s1: #6ea3d8; --s2: #ee8b4f; --s3: #ab90dc; --s4: #e77390; --s5: #62bd8c;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 1.25rem; margin: 0 0 6px; }
h3 { font-size: 1rem; margin: 20px 0 0; }
.lead { color: var(--soft); margin: 0 0 24px; }
.note { color: var(--soft); font-size: 0.92rem; margin: 0 0 14px; max-width: 76ch; }
section { border-top: 1px solid var(--rule); margin-top: 36px; padding-top: 24px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; text-align: right; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
.words th, .words td { text-align: left; }
.words th:first-child, .words td:first-child { white-space: normal; }
.nowrap { white-space: nowrap; }
figure { margin: 0 0 20px; }
figcaption { font-weight: 600; font-size: 0.92rem; margin-bottom: 6px; }
svg { width: 100%; height: auto; display: block; font-family: inherit; }
svg text { fill: var(--ink); font-size: 13px; }
svg .tick { fill: var(--soft); font-size: 12px; }
svg .cell { font-size: 11px; font-variant-numeric: tabular-nums; }
svg .value { fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); }
.s3 { fill: var(--s3); } .s4 { fill: var(--s4); } .s5 { fill: var(--s5); }
.t0 { stroke: var(--s0); } .t1 { stroke: var(--s1); } .t2 { stroke: var(--s2); }
.t3 { stroke: var(--s3); } .t4 { stroke: var(--s4); } .t5 { stroke: var(--s5); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; font-size: 0.92rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); border-radius: 6px; padding: 12px 14px; font-size: 0.8rem;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0 0; }
@media (max-width: 600px) { main { padding: 24px 16px 48px; } }
)css";

}  // namespace bitdecoding::eval
