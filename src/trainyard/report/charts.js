"use strict";
// Draws each chart of the page's JSON with uPlot. Colours are read when drawn: they follow dark mode.
(() => {
  const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const shade = (name, alpha) => () => css(name) + alpha;
  const PREFIXES = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const format = digits => value => {
    if (value == null) return "";
    const [size, prefix] = PREFIXES.find(([size]) => Math.abs(value) >= size) || [1, ""];
    return String(+(value / size).toPrecision(digits)) + prefix;
  };
  const LOOKS = {
    line: {width: 1.6}, thin: {width: 1, dash: [4, 3]}, dashed: {width: 1.2, dash: [8, 4]},
    faint: {width: 1, alpha: "66"}, points: {width: 2.2, points: {show: true, size: 6, fill: shade("card", "")}},
    low: {width: 0, class: "edge"}, high: {width: 0, class: "edge"},
  };
  const ticks = (plot, axis, low, high) => {
    const steps = high > 20 * low ? [1] : high > 6 * low ? [1, 2, 3, 5] : [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
    const found = [];
    for (let size = 10 ** Math.floor(Math.log10(low)); size <= high; size *= 10)
      found.push(...steps.map(step => step * size).filter(at => low <= at && at <= high));
    return found;
  };
  const drawMarks = marks => ({ctx, bbox, valToPos}) => {
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const {x, dash, colour} of marks) {
      ctx.strokeStyle = css(colour);
      ctx.setLineDash(dash.map(length => length * devicePixelRatio));
      const foot = bbox.top + bbox.height, top = dash.length ? bbox.top : foot - 9 * devicePixelRatio;
      for (const at of x.map(value => valToPos(value, "x", true))) {
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath(), ctx.moveTo(at, top), ctx.lineTo(at, foot), ctx.stroke();
      }
    }
    ctx.restore();
  };
  const draw = ({name, series, marks, is_logarithmic, from_zero}) => {
    const figure = document.getElementById("chart-" + name);
    const size = () => {
      const width = figure.clientWidth;
      return {width, height: figure.classList.contains("large") ? Math.min(420, 200 + width / 5) : 210};
    };
    const named = marks.filter((mark, i) => !i || marks[i - 1].label !== mark.label);
    const seen = new Set();
    const lines = series.map(({label, colour, style}) => {
      const {alpha = "", ...look} = LOOKS[style], again = style === "faint" && seen.has(label);
      seen.add(label);
      return {label, stroke: shade(colour, alpha), value: (_, v) => format(5)(v), points: {show: false},
        ...look, ...(again ? {class: "edge"} : {})};
    });
    const legend = named.map(({label, colour, dash}) =>
      ({label, class: "mark", stroke: shade(colour, ""), dash, value: () => ""}));
    const data = uPlot.join(series.map(({x, y}) => [x, y]));
    const bands = series.flatMap(({style, colour}, i) =>
      style === "high" ? [{series: [i + 1, i + 2], fill: shade(colour, "40")}] : []);
    const axis = {stroke: shade("muted", ""), font: "12px system-ui, sans-serif",
      grid: {stroke: shade("grid", ""), width: 1}, ticks: {stroke: shade("grid", ""), width: 1}};
    const values = (_, all) => all.map(value => value === 0 ? "0" : format(3)(value));
    const range = from_zero ? (_, low, high) => [0, 1.08 * high || 1]
      : is_logarithmic ? (_, low, high) => [low / 1.03, high * 1.03] : undefined;
    const scale = {...(is_logarithmic ? {distr: 3} : {}), ...(range ? {range} : {})};
    const logarithmic = is_logarithmic ? {splits: ticks, filter: (_, all) => all} : {};
    const plot = new uPlot({
      ...size(), bands, legend: {markers: {width: 2}},
      cursor: {sync: {key: "tokens", setSeries: false, scales: ["x", null]},
        focus: {prox: -1}, hover: {skip: [null, undefined]}},
      scales: {x: {time: false}, y: scale}, axes: [{...axis, values}, {...axis, ...logarithmic, values, size: 56}],
      series: [{label: "tokens", value: (_, v) => format(4)(v)}, ...lines, ...legend],
      hooks: {draw: [drawMarks(marks)]},
    }, [...data, ...named.map(() => data[0].map(() => null))], figure);
    new ResizeObserver(() => figure.clientWidth !== plot.width && plot.setSize(size())).observe(figure);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  };
  JSON.parse(document.getElementById("charts").textContent).filter(({series}) => series.length).forEach(draw);
})();
