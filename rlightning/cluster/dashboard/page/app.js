// Shows what /events sends: the newest state of the cluster, and points for the charts. It only looks.
"use strict";

const SILENT_MS = 6000; // an event is due every second
const KEPT = 4000; // points; when there are more, every second one of the older half goes
const CHARTS = [
  { title: "Throughput", unit: "steps/s", series: [["steps_per_s", ""]] },
  { title: "Return", unit: "", series: [["mean_return", "mean of the last episodes"]], signed: true },
  {
    title: "Round trip of an answer", unit: "s", log: true,
    series: [["round_trip_p50", "p50"], ["round_trip_p90", "p90"], ["round_trip_p99", "p99"]],
  },
  { title: "Buffer fill", unit: "%", series: [["buffer_fill", "of the capacity"]] },
  {
    title: "Staleness", unit: "versions",
    series: [["staleness", "last batch"], ["staleness_p50", "p50"], ["staleness_p99", "p99"]],
  },
  {
    title: "Waiting", unit: "",
    series: [["queue_rows", "rows for inference"], ["inserts_waiting", "inserts for room"]],
  },
];
const COLOURS = ["--one", "--two", "--three"];
const GOOD = { SERVING: "good", NOT_SERVING: "warn", DOWN: "bad", UNKNOWN: "warn", running: "good" };
const WORDS = { SERVING: "SERVING", NOT_SERVING: "NOT SERVING", DOWN: "down", UNKNOWN: "unknown" };

const $ = (id) => document.getElementById(id);
let columns = [];
let points = [];
let state = null;
let range = 600;
let stream = null;
let heardAt = 0;
let charts = [];
const rows = new Map(); // of the table, by stage
const nothing = $("stages").firstElementChild; // its row while there are none

// Text of figures, with their units.

function plain(value) {
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function duration(seconds) {
  const size = Math.abs(seconds);
  const [factor, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return size && size < 1e-7 ? "<0.1 µs" : `${Number((seconds / factor).toPrecision(3))} ${unit}`;
}

function clock(seconds) {
  const s = Math.max(0, Math.round(seconds));
  const part = (n) => String(n).padStart(2, "0");
  const rest = `${part(Math.floor(s / 60) % 60)}:${part(s % 60)}`;
  return s >= 3600 ? `${Math.floor(s / 3600)}:${rest}` : rest;
}

function figure(value, unit) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (unit === "s") return duration(value);
  if (unit === "clock") return clock(value);
  if (!unit) return plain(value);
  return `${plain(value)} ${value === 1 && /[a-z]s$/.test(unit) ? unit.slice(0, -1) : unit}`;
}

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// The parts of the page.

function showStream(what, text) {
  $("stream").dataset.state = what;
  document.body.dataset.stream = what;
  setText($("stream"), text);
}

function showBanner() {
  const lost = $("stream").dataset.state === "lost";
  let kind = "bad";
  let text = "";
  if (lost && state) {
    const at = new Date(state.time * 1000).toLocaleTimeString("en-GB");
    text = `The dashboard does not answer. This is the state of ${at}; trying again every few seconds.`;
    if (state.notice) text = `${state.notice.text} ${text}`;
  } else if (lost) {
    text = "The dashboard does not answer; trying again every few seconds.";
  } else if (state && state.notice) {
    ({ kind, text } = state.notice);
  }
  const banner = $("banner");
  banner.dataset.kind = kind;
  banner.hidden = !text;
  setText(banner, text);
  // Of a tab in the background, its title is all that people see.
  const name = state && state.run ? `${state.run} – RLightning` : "RLightning";
  document.title = text && kind === "bad" ? `(!) ${name}` : name;
}

function showFacts() {
  const list = $("facts");
  const wanted = state.facts.map(([name]) => name).join();
  if (list.dataset.names !== wanted) {
    list.dataset.names = wanted;
    list.replaceChildren(...state.facts.map(([name]) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd"));
      return pair;
    }));
  }
  state.facts.forEach(([, value, unit], i) => {
    const node = list.children[i].lastChild;
    const long = !unit && Math.abs(value) >= 1e7; // more digits than a phone is wide
    setText(node, long ? value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 }) : figure(value, unit));
    node.title = figure(value, unit);
  });
}

function showNode(role, label) {
  const node = $(`node-${role}`);
  const services = state.services.filter((service) => service.role === role);
  node.className = services.length ? "node" : "node absent";
  node.dataset.state = services.some((one) => one.state === "DOWN") ? "bad" : "";
  if (!services.length) {
    const alone = state.services.length && state.services.every((one) => one.role === "learner");
    node.replaceChildren(make("h3", "", label), make("p", "where", alone ? "in the learner's process" : "none is known"));
    return;
  }
  node.replaceChildren(...services.map((service, i) => {
    const part = make("div", i ? "more" : "");
    const head = make("div", "head");
    const health = make("span", "state", WORDS[service.state] || service.state);
    health.dataset.state = GOOD[service.state] || "";
    if (service.state !== "SERVING" && service.state_s !== null) health.append(` for ${clock(service.state_s)}`);
    head.append(make("h3", "", service.label), health);
    part.append(head);
    if (service.address) part.append(make("p", "where", service.address));
    if (service.error) part.append(make("p", "error", service.error));
    const list = make("ul");
    for (const [name, value, unit] of service.figures) {
      const item = make("li", "", `${name} `);
      item.append(make("b", "", figure(value, unit)));
      list.append(item);
    }
    part.append(list);
    return part;
  }));
}

function showTopology() {
  for (const [role, label] of [["env", "env server"], ["policy", "policy server"], ["buffer", "buffer server"], ["learner", "learner"]]) {
    showNode(role, label);
  }
  for (const [name, what, value, unit] of state.links) {
    const number = figure(value, unit);
    $(`link-${name}`).replaceChildren(make("b", "", number), what);
  }
  $("link-insert").append(make("span", "narrow", " from the env server"));
}

function showStages() {
  const names = state.latency.map((stage) => stage.name);
  const body = $("stages");
  if (names.join() !== [...rows.keys()].join()) {
    rows.clear();
    for (const name of names) {
      const row = make("tr");
      row.dataset.stage = name;
      const head = make("th", "", name);
      head.scope = "row";
      row.append(head, ...["", "", "", "wide", "wide", "wide", "axis"].map((kind) => make("td", kind)));
      row.children[1].append(make("span"), make("small", "narrow"));
      const track = make("div", "track");
      track.append(make("i"));
      row.lastChild.append(track);
      rows.set(name, row);
    }
    body.replaceChildren(...(rows.size ? rows.values() : [nothing]));
  }
  const lows = state.latency.map((stage) => stage.p50).filter((value) => value > 0);
  const low = lows.length ? Math.max(-6, Math.floor(Math.log10(Math.min(...lows)))) : -6;
  const high = lows.length ? Math.max(low + 1, Math.ceil(Math.log10(Math.max(...state.latency.map((stage) => stage.p99))))) : 0;
  $("axis").replaceChildren(make("span", "", duration(10 ** low)), make("span", "", duration(10 ** high)));
  const place = (value) => 100 * Math.min(1, Math.max(0, (Math.log10(Math.max(value, 1e-9)) - low) / (high - low)));
  for (const stage of state.latency) {
    const cells = rows.get(stage.name).children;
    const text = (value) => (value === undefined || value === null ? "" : duration(value));
    const within = text(stage.uncertainty);
    const [median, below] = cells[1].children;
    setText(median, text(stage.p50));
    setText(below, within && `±${within}`);
    [stage.p90, stage.p99, stage.max].forEach((value, i) => setText(cells[i + 2], text(value)));
    setText(cells[5], within);
    setText(cells[6], plain(stage.count));
    const bar = cells[7].firstChild.firstChild;
    bar.style.left = `${place(stage.p50)}%`;
    bar.style.width = `${place(stage.p99) - place(stage.p50)}%`;
  }
}

// Charts.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function buildCharts() {
  for (const chart of charts) chart.plot.destroy();
  charts = CHARTS.map((spec, i) => {
    let box = $("charts").children[i];
    if (!box) {
      box = make("figure");
      const caption = make("figcaption");
      const values = make("div", "values");
      spec.series.forEach(([, label], n) => {
        const one = make("span");
        one.append(make("i"), make("b"), label ? ` ${label}` : "");
        one.firstChild.dataset.colour = COLOURS[n];
        values.append(one);
      });
      caption.append(make("h3", "", spec.title), values);
      const plot = make("div", "plot");
      plot.setAttribute("role", "img");
      box.append(caption, plot);
      $("charts").append(box);
    }
    for (const mark of box.querySelectorAll("[data-colour]")) mark.style.background = colour(mark.dataset.colour);
    const target = box.lastChild;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const plot = new uPlot({
      width: target.clientWidth, height: 170, legend: { show: false }, padding: [8, 26, 0, 0],
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { range: (u, min, max) => timeRange(min, max) },
        y: spec.log ? { distr: 3 } : { range: (u, min, max) => valueRange(spec, min, max) },
      },
      axes: [
        { ...axis, size: 26, space: 80, values: (u, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB")) },
        { ...axis, size: 62, grid: { ...axis.grid, filter: (u, ticks) => (spec.log ? ticks.map(decade) : ticks) }, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick, spec.unit === "s" || spec.unit === "%" ? spec.unit : ""))) },
      ],
      series: [{}, ...spec.series.map((_, n) => ({ stroke: colour(COLOURS[n]), width: 1.75, points: { show: false } }))],
      hooks: { setCursor: [(u) => showValues(i, u.cursor.idx)] },
    }, data(spec), target);
    return { spec, plot, box };
  });
  charts.forEach((_, i) => showValues(i, null));
}

// Of a scale of powers of ten, lines at those alone.
function decade(value) {
  const power = Math.log10(value);
  return Math.abs(power - Math.round(power)) < 1e-6 ? value : null;
}

function timeRange(min, max) {
  if (max === null || max === undefined) return [Date.now() / 1000 - 60, Date.now() / 1000];
  const first = range ? Math.max(points[0][0], max - range) : points[0][0];
  return [Math.min(first, max - 10), max];
}

function valueRange(spec, min, max) {
  if (spec.unit === "%") return [0, 104];
  if (max === null || max === undefined) return [0, 1];
  const room = 0.08 * (max - min || Math.abs(max) || 1);
  return [spec.signed && min < 0 ? min - room : 0, max > 0 ? max + room : room];
}

function data(spec) {
  if (!points.length) return [[], ...spec.series.map(() => [])];
  const column = (name) => {
    const at = columns.indexOf(name);
    const scale = spec.unit === "%" ? 100 : 1;
    // What a logarithm has no place for was not measured in any way that a chart could tell.
    return points.map((point) => {
      const value = at < 0 ? null : point[at];
      return value === null || (spec.log && value <= 0) ? null : value * scale;
    });
  };
  return [points.map((point) => point[0]), ...spec.series.map(([name]) => column(name))];
}

function showValues(i, at) {
  const { spec, plot, box } = charts[i] || {};
  if (!plot) return;
  const texts = spec.series.map((_, n) => {
    const line = plot.data[n + 1];
    const value = at === null || at === undefined ? line[line.length - 1] : line[at];
    return figure(value, spec.unit);
  });
  box.querySelectorAll(".values b").forEach((node, n) => setText(node, texts[n]));
  if (at === null || at === undefined) {
    const told = spec.series.map(([, label], n) => `${label} ${texts[n]}`.trim()).join(", ");
    box.lastChild.setAttribute("aria-label", `${spec.title} over time; now: ${told}`);
  }
}

function drawCharts() {
  if (document.hidden) return;
  charts.forEach(({ spec, plot }, i) => {
    plot.setData(data(spec));
    const at = plot.cursor.idx;
    showValues(i, plot.cursor.left >= 0 ? at : null);
  });
}

// The stream.

function take(message) {
  const told = JSON.parse(message.data);
  heardAt = performance.now();
  if (told.fresh) points = [];
  columns = told.columns;
  points.push(...told.points);
  if (points.length > KEPT) points = points.filter((_, i) => i % 2 === 0 || i > KEPT / 2);
  state = told.state;
  showStream("live", "live");
  setText($("run"), state.run || "");
  setText($("version"), state.version ? `rlightning ${state.version}` : "");
  showBanner();
  showFacts();
  showTopology();
  showStages();
  drawCharts();
}

function lose() {
  showStream("lost", "no connection");
  showBanner();
}

function connect() {
  if (stream) stream.close();
  heardAt = performance.now();
  stream = new EventSource("/events");
  stream.onmessage = take;
  stream.onerror = lose;
}

for (const button of document.querySelectorAll("#ranges button")) {
  button.addEventListener("click", () => {
    range = Number(button.dataset.range);
    for (const one of document.querySelectorAll("#ranges button")) one.setAttribute("aria-pressed", String(one === button));
    drawCharts();
  });
}
document.addEventListener("visibilitychange", drawCharts);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", buildCharts);
new ResizeObserver(() => {
  for (const { plot, box } of charts) plot.setSize({ width: box.lastChild.clientWidth, height: 170 });
}).observe($("charts"));
buildCharts();
connect();
// A browser gives up after some errors, and does not notice a server that says nothing.
setInterval(() => {
  if (performance.now() - heardAt > SILENT_MS || stream.readyState === EventSource.CLOSED) {
    lose();
    connect();
  }
}, 2000);
