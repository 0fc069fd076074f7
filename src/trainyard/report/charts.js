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
  const drawMap = (edges, {values, first, most}) => ({ctx, bbox, valToPos}) => {
    const [none, under, over] = ["text", "run-0", "run-1"].map(css);
    const at = edges.map(x => Math.round(valToPos(x, "x", true)));
    ctx.save();
    ctx.beginPath(), ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height), ctx.clip();
    values.forEach((row, i) => {
      const [top, foot] = [-.5, .5].map(half => Math.round(valToPos(first + i + half, "y", true)));
      row.forEach((value, j) => {
        ctx.fillStyle = !value ? none : value < 1 ? under : over;
        ctx.globalAlpha = !value ? 1 : Math.min(1, Math.abs(Math.log(value)) / Math.log(most));
        ctx.fillRect(at[j], top, at[j + 1] - at[j], foot - top);
      });
    });
    ctx.restore();
  };
  // What of uPlot's options is other for a map: rows from top to foot, and the load under the cursor.
  const mapOptions = (edges, {row, first, values}) => ({
    scale: {dir: -1, range: [first - .5, first + values.length - .5]},
    axis: {grid: {show: false}}, rows: {incrs: [1, 2, 5, 10, 20, 50, 100, 200]},
    line: {label: row, width: 0, value: (plot, _, __, i) => {
      const {left, top} = plot.cursor, column = edges.findIndex(x => x > plot.posToVal(left, "x")) - 1;
      const number = Math.round(plot.posToVal(top, "y")), load = values[number - first]?.[column];
      return i == null || top < 0 || load == null ? "" : `${number}: ${format(3)(load)} times the mean`;
    }},
  });
  const draw = ({name, series, marks, is_logarithmic, from_zero, load_map}) => {
    const map = load_map ? mapOptions(series[0].x, load_map) : {};
    const figure = document.getElementById("chart-" + name);
    const size = () => {
      const width = figure.clientWidth;
      return {width, height: figure.classList.contains("large") ? Math.min(420, 200 + width / 5)
        : load_map ? Math.min(420, Math.max(210, 3 * load_map.values.length)) : 210};
    };
    const named = marks.filter((mark, i) => !i || marks[i - 1].label !== mark.label);
    const seen = new Set();
    const lines = series.map(({label, colour, style}) => {
      const {alpha = "", ...look} = LOOKS[style], again = style === "faint" && seen.has(label);
      seen.add(label);
      return {label, stroke: shade(colour, alpha), value: (_, v) => format(5)(v), points: {show: false},
        ...look, ...(again ? {class: "edge"} : {}), ...map.line};
    });
    const legend = named.map(({label, colour, dash}) =>
      ({label, class: "mark", stroke: shade(colour, ""), dash, value: () => ""}));
    const data = uPlot.join(series.map(({x, y}) => [x, y]));
    const bands = series.flatMap(({style, colour}, i) =>
      style === "high" ? [{series: [i + 1, i + 2], fill: shade(colour, "40")}] : []);
    const axis = {stroke: shade("muted", ""), font: "12px system-ui, sans-serif",
      grid: {stroke: shade("grid", ""), width: 1}, ticks: {stroke: shade("grid", ""), width: 1}, ...map.axis};
    const values = (_, all) => all.map(value => value === 0 ? "0" : format(3)(value));
    const range = from_zero ? (_, low, high) => [0, 1.08 * high || 1]
      : is_logarithmic ? (_, low, high) => [low / 1.03, high * 1.03] : undefined;
    const scale = {...(is_logarithmic ? {distr: 3} : {}), ...(range ? {range} : {}), ...map.scale};
    const logarithmic = is_logarithmic ? {splits: ticks, filter: (_, all) => all} : {};
    const plot = new uPlot({
      ...size(), bands, legend: {markers: {width: 2}},
      cursor: {sync: {key: "tokens", setSeries: false, scales: ["x", null]},
        focus: {prox: -1}, hover: {skip: [null, undefined]}},
      scales: {x: {time: false}, y: scale}, axes: [{...axis, values}, {...axis, ...logarithmic, values, size: 56, ...map.rows}],
      series: [{label: "tokens", value: (_, v) => format(4)(v)}, ...lines, ...legend],
      hooks: {draw: [...(load_map ? [drawMap(series[0].x, load_map)] : []), drawMarks(marks)]},
    }, [...data, ...named.map(() => data[0].map(() => null))], figure);
    new ResizeObserver(() => figure.clientWidth !== plot.width && plot.setSize(size())).observe(figure);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
  };
  JSON.parse(document.getElementById("charts").textContent).filter(({series}) => series.length).forEach(draw);
})();
