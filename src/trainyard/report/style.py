"""The look of the report: light and dark, from a phone to a wide screen."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --text: #1d2430; --muted: #5b6675; --grid: #dde1e7;
  --accent: #0b6bb3; --mark: #fff3cf; --alert: #b3261e;
  --run-0: #0b6bb3; --run-1: #c2570a; --run-2: #11805a;
  --run-3: #9b4a8a; --run-4: #8a6d00; --run-5: #3b8ea5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b2129; --text: #e4e8ee; --muted: #9aa6b5; --grid: #323b47;
    --accent: #63b3f0; --mark: #3d3517; --alert: #ff8a80;
    --run-0: #63b3f0; --run-1: #f29a55; --run-2: #4cc498;
    --run-3: #d58ac4; --run-4: #d9bb45; --run-5: #7fcbe0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 84rem; padding: 1.5rem 1rem 4rem;
  background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: break-word;
}
h1 { margin: 0; font-size: 1.7rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .8rem; font-size: 1.2rem; }
h3 { margin: 1.2rem 0 .5rem; font-size: 1rem; }
p { margin: .4rem 0; max-width: 48rem; }
header p { max-width: none; }
.muted, small { color: var(--muted); }
small { display: block; font-size: .8rem; line-height: 1.35; }
.tiles { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.card {
  background: var(--card); border: 1px solid var(--grid); border-radius: .6rem;
  padding: .8rem 1rem; min-width: 0;
}
.tile dt { font-size: .85rem; color: var(--muted); }
.tile dd { margin: 0; }
.tile dd.value {
  font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3;
}
dl { margin: 0; }
.alert { color: var(--alert); }
.plots {
  display: grid; gap: .7rem;
  grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
}
.plots .card { padding: .7rem; margin: 0; }
figcaption { font-size: .9rem; font-weight: 600; }
.uplot, .u-legend { font-family: inherit; }
.uplot { max-width: 100%; }
.u-legend { font-size: .78rem; text-align: left; overflow-wrap: anywhere; }
.u-legend th { color: var(--muted); }
.u-legend .u-value { font-variant-numeric: tabular-nums; }
.u-series > * { padding: 1px 3px; }
.uplot .edge { display: none; }
.mark .u-value, .u-legend th::after { display: none !important; }
.u-legend :is(th, td, tr) { border: 0 !important; min-width: 0; }
.u-select { background: color-mix(in srgb, var(--accent) 18%, transparent); }
.next pre {
  margin: .1rem 0 .7rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .85rem/1.5 ui-monospace, Menlo, Consolas, monospace;
}
.curves { margin-top: 1rem; }
main { display: flex; flex-direction: column; }
main > * { min-width: 0; max-width: 100%; }
.scroll { overflow-x: auto; padding: 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .4rem .9rem; text-align: left; vertical-align: top; }
tr + tr > *, thead + tbody > tr:first-child > * { border-top: 1px solid var(--grid); }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; min-width: 7rem; }
th { font-weight: 500; }
thead th { color: var(--muted); overflow-wrap: anywhere; min-width: 6rem; }
.fields tbody th { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .82rem; }
.events th { min-width: 0; font-variant-numeric: tabular-nums; }
.events th, .events .run { white-space: nowrap; }
.events td:last-child { min-width: 11rem; width: 100%; }
mark { background: var(--mark); color: inherit; border-radius: .25rem; padding: .05rem .3rem; }
details { margin: .7rem 0; }
summary { cursor: pointer; color: var(--accent); padding: .3rem 0; }
.sample { margin: 0 0 .7rem; }
.sample blockquote {
  margin: .3rem 0 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .82rem/1.5 ui-monospace, Menlo, Consolas, monospace;
}
.sample blockquote b { color: var(--accent); }
@media (max-width: 42rem) {
  .curves { order: -1; margin-top: 1rem; }
  th, td { padding: .35rem .6rem; }
}
@media (max-width: 30rem) {
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  td { min-width: 5rem; }
  .events .run { white-space: normal; min-width: 7rem; }
}
"""
