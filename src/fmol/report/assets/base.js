"use strict";
// What everything else uses: elements, numbers in words, scales, colours, and what is shown.

const data = JSON.parse(document.getElementById("payload").textContent);
const objectives = data.objectives;
const comparing = data.groups.length > 1;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

const shown = {
  theme: null, // "light", "dark", or null for what the system prefers
  hiddenObjectives: new Set(),
  hiddenGroups: new Set(),
};
const visibleObjectives = () => objectives.map((_, s) => s).filter((s) => !shown.hiddenObjectives.has(s));
const visibleGroups = () => data.groups.map((_, g) => g).filter((g) => !shown.hiddenGroups.has(g));

// ---- elements --------------------------------------------------------------------------------

// Control characters and halves of characters would make an exported SVG unreadable.
const clean = (text) =>
  String(text)
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd")
    .replace(/[\ud800-\udbff](?![\udc00-\udfff])|(^|[^\ud800-\udbff])[\udc00-\udfff]/g, "$1\ufffd");

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : clean(value));
  }
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(clean(child)));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const sv = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** A sentence in which `names` between backticks are set as code. */
function prose(text) {
  return clean(text)
    .split(/`([^`]*)`/)
    .map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

// ---- numbers and words -----------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** A number in a few digits, with a real minus sign. */
function fmt(value, digits = 4) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 1e6 || size < 1e-4)
    text = value
      .toExponential(Math.max(digits - 2, 0))
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  else if (size >= 1000) text = Math.round(value).toLocaleString("en-US");
  else text = String(Number(value.toPrecision(digits)));
  return text.replace(/-/g, "−");
}
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : "–");
const percent = (value) => (known(value) ? `${fmt(100 * value, 3)} %` : "–");
const many = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
const listed = (words) =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;

const canvas = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 12, weight = 400) {
  canvas.font = `${weight} ${size}px ${FONT}`;
  return canvas.measureText(clean(text)).width;
}
/** The text, cut with an ellipsis where it is wider than `room`. */
function cut(text, room, size = 12) {
  text = clean(text);
  if (textWidth(text, size) <= room) return text;
  const letters = Array.from(text);
  let low = 0,
    high = letters.length;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (textWidth(letters.slice(0, middle).join("") + "…", size) <= room) low = middle;
    else high = middle - 1;
  }
  return low ? letters.slice(0, low).join("") + "…" : "…";
}

/** Names without what all of them begin or end with, where one has no room: cut off they read alike. */
function elide(names, room, size = 12) {
  if (names.length < 2 || names.every((name) => textWidth(name, size) <= room)) return names;
  const parts = names.map((name) => clean(name).split(/(?<=[\s,_/=-])/));
  const fewest = Math.min(...parts.map((p) => p.length));
  let front = 0,
    back = 0;
  while (front < fewest - 1 && parts.every((p) => p[front] === parts[0][front])) front += 1;
  const fromEnd = (p) => p[p.length - 1 - back];
  while (back < fewest - 1 - front && parts.every((p) => fromEnd(p) === fromEnd(parts[0]))) back += 1;
  return parts.map(
    (p) => (front ? "…" : "") + p.slice(front, p.length - back).join("") + (back ? "…" : ""),
  );
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
function deviation(values) {
  const middle = mean(values);
  return Math.sqrt(mean(values.map((v) => (v - middle) ** 2)));
}
const last = (values) => {
  for (let i = values.length - 1; i >= 0; i--) if (known(values[i])) return values[i];
  return null;
};
const first = (values) => {
  const found = values.find(known);
  return found === undefined ? null : found;
};

// ---- scales ----------------------------------------------------------------------------------

function niceStep(span, count) {
  const rough = span / Math.max(count, 1),
    power = 10 ** Math.floor(Math.log10(rough)),
    part = rough / power;
  return power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
}

/** A scale with `at(value)`, `ticks` and `text(tick)`. `from`, `to` are pixels, `room` pixels per tick. */
function scale({ values, log = false, zero = false, whole: integer = false, from, to, room = 60, min, max }) {
  let usable = values.filter((v) => known(v) && (!log || v > 0));
  if (!usable.length) usable = log ? [0.1, 1] : [0, 1];
  let low = Infinity,
    high = -Infinity;
  for (const v of usable) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (known(min)) low = min;
  if (known(max)) high = max;
  if (zero && !log) {
    low = Math.min(low, 0);
    high = Math.max(high, 0);
  }
  const count = Math.max(2, Math.floor(Math.abs(to - from) / room));
  let ticks = [],
    map;
  if (log) {
    if (low === high) {
      low /= 2;
      high *= 2;
    }
    const a = Math.log10(low),
      b = Math.log10(high),
      pad = known(max) ? 0 : (b - a) * 0.04;
    const la = a - pad,
      lb = b + pad;
    map = (v) => from + ((Math.log10(v) - la) / (lb - la)) * (to - from);
    const decades = Math.floor(lb) - Math.ceil(la) + 1;
    if (decades >= 2) {
      const every = Math.ceil(decades / count);
      for (let k = Math.floor(la); k <= lb; k++) if (k % every === 0) ticks.push(10 ** k);
      if ((lb - la) * 2 <= count) ticks = ticks.flatMap((t) => [t, 2 * t, 5 * t]);
    } else {
      const l = 10 ** la,
        h = 10 ** lb,
        step = niceStep(h - l, count);
      for (let k = Math.ceil(l / step); k * step <= h; k++) ticks.push(k * step);
      if (h / l > 4) {
        // Equal steps crowd at the top of a log axis.
        ticks = [];
        for (let k = Math.floor(la); k <= lb; k++) for (const m of [1, 2, 5]) ticks.push(m * 10 ** k);
      }
    }
    ticks = ticks
      .map((t) => Number(t.toPrecision(6)))
      .filter((t) => Math.log10(t) >= la - 1e-9 && Math.log10(t) <= lb + 1e-9);
  } else {
    if (low === high) {
      const around = Math.abs(low) || 1;
      if (!zero || low === 0) {
        low -= integer ? 1 : around / 2;
        high += integer ? 1 : around / 2;
      }
    }
    let step = niceStep(high - low, count);
    if (integer) step = Math.max(1, Math.round(step));
    if (!integer && !known(max)) {
      // Axes of measured values end on ticks; those of rounds where the run does.
      low = Math.floor(low / step + 1e-9) * step;
      high = Math.ceil(high / step - 1e-9) * step;
    }
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++)
      ticks.push(Number((k * step).toPrecision(12)));
    map = (v) => from + ((v - low) / (high - low)) * (to - from);
  }
  return { at: map, ticks, log, text: (t) => fmt(t, 6), fits: (v) => known(v) && (!log || v > 0) };
}

// ---- colours ---------------------------------------------------------------------------------

const THEMES = {
  light: {
    name: "light",
    paper: "#ffffff",
    ink: "#1b2027",
    soft: "#56606c",
    faint: "#8a94a1",
    grid: "#e8ebf0",
    axis: "#b4bcc7",
    mute: "#d3d8df",
    low: [0.965, -0.004, -0.012],
    high: [0.36, -0.03, -0.13],
    better: [0.48, -0.04, -0.13],
    worse: [0.6, 0.12, 0.12],
  },
  dark: {
    name: "dark",
    paper: "#171b21",
    ink: "#eceff3",
    soft: "#a9b3bf",
    faint: "#7d8895",
    grid: "#2a3039",
    axis: "#4a5461",
    mute: "#3a424d",
    low: [0.26, -0.005, -0.02],
    high: [0.88, -0.05, -0.08],
    better: [0.72, -0.06, -0.12],
    worse: [0.72, 0.1, 0.12],
  },
};
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
const theme = () => THEMES[shown.theme || (prefersDark.matches ? "dark" : "light")];

// Okabe and Ito's colours, told apart with every kind of colour vision; black and yellow, blue and
// orange are shifted where they would not stand out from the paper.
const EIGHT = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#9a8f00"],
  dark: ["#4aa8e8", "#ff8a3d", "#2cc89b", "#e59ac3", "#ffc04d", "#9bd4f7", "#f2f2f2", "#f0e442"],
};
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2", "1 2.5", "10 2 2 2 2 2"];
// Viridis, in order of lightness, for what has an order and too many members for a colour each.
const ORDER = [
  "#440154",
  "#482777",
  "#3f4a8a",
  "#31678e",
  "#26838f",
  "#1f9d8a",
  "#6cce5a",
  "#b6de2b",
  "#fee825",
];

function mixHex(stops, part) {
  const place = Math.min(Math.max(part, 0), 1) * (stops.length - 1),
    i = Math.min(Math.floor(place), stops.length - 2);
  const channel = (hex, c) => parseInt(hex.slice(1 + 2 * c, 3 + 2 * c), 16);
  return (
    "#" +
    [0, 1, 2]
      .map((c) => {
        const a = channel(stops[i], c),
          b = channel(stops[i + 1], c);
        return Math.round(a + (b - a) * (place - i))
          .toString(16)
          .padStart(2, "0");
      })
      .join("")
  );
}
/** The colour of member `i` of `count`: one of eight, or its place in an order. */
function colour(i, count, look) {
  if (count <= 8) return EIGHT[look.name][i % 8];
  const part = i / (count - 1);
  return look.name === "light" ? mixHex(ORDER, part * 0.82) : mixHex(ORDER, 0.42 + part * 0.58);
}
const dash = (i, count) => (count <= 8 ? DASHES[i % 8] : "");
const ofObjective = (s, look) => colour(s, objectives.length, look);
const ofGroup = (g, look) => colour(g, data.groups.length, look);

function oklab([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return (
    "#" +
    [
      4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
    ]
      .map((v) => {
        const c = v <= 0.0031308 ? 12.92 * v : 1.055 * Math.max(v, 0) ** (1 / 2.4) - 0.055;
        return Math.round(Math.min(Math.max(c, 0), 1) * 255)
          .toString(16)
          .padStart(2, "0");
      })
      .join("")
  );
}
const between = (a, b, part) => oklab(a.map((v, i) => v + (b[i] - v) * part));
/** From the paper's own shade to a deep one, for 0 … 1. */
const amount = (part, look) => between(look.low, look.high, Math.min(Math.max(part, 0), 1));
/** Orange for −1, the paper's shade for 0, blue for 1. */
const balance = (part, look) =>
  between(look.low, part < 0 ? look.worse : look.better, Math.min(Math.abs(part), 1));
/** Ink that can be read on a colour. */
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
  return 0.299 * r + 0.587 * g + 0.114 * b > 0.55 ? "#1b2027" : "#ffffff";
}

// ---- series of a group of runs ---------------------------------------------------------------

/** Mean, lowest and highest over a group's seeds at each round all of them measured.
 *  `pick(run)` gives [rounds, values, x] per run; x, the horizontal place, is the round without it. */
function gather(group, pick) {
  const tables = group.runs
    .map((r) => {
      const [rounds, values, xs] = pick(data.runs[r]);
      const table = new Map();
      (values || []).forEach((v, i) => {
        if (known(v)) table.set(rounds[i], [v, xs ? xs[i] : rounds[i]]);
      });
      return table;
    })
    .filter((table) => table.size);
  if (!tables.length) return { points: [], band: [] };
  const points = [],
    band = [];
  for (const at of tables[0].keys()) {
    const found = tables.map((table) => table.get(at));
    if (found.some((f) => f === undefined)) continue;
    const values = found.map((f) => f[0]),
      x = mean(found.map((f) => f[1]));
    points.push([x, mean(values), at]);
    band.push([x, Math.min(...values), Math.max(...values)]);
  }
  return { points, band: tables.length > 1 ? band : [] };
}
/** What of a run a measure means: `loss`, or a held-out metric as `held_out:accuracy`. */
const tableOf = (run, measure) => (measure === "loss" ? run.loss : run.held_out[measure.slice(9)]);
const measureName = (measure) =>
  measure === "loss"
    ? "training loss"
    : measure === "held_out:loss"
      ? "held-out loss"
      : `held-out ${measure.slice(9)}`;
const betterOf = (measure) =>
  measure === "loss" ? "lower" : (data.metrics.find((m) => m.name === measure.slice(9)) || {}).better;
const lossOf = (group, s, measure, x) =>
  gather(group, (run) => {
    const table = tableOf(run, measure);
    return [
      run.at,
      table ? table[s] : null,
      x === "MB" ? run.at.map((_, i) => run.up[i] + run.down[i]) : null,
    ];
  });
const measures = ["loss", ...data.metrics.map((m) => `held_out:${m.name}`)];
const seeds = Math.max(...data.groups.map((g) => g.runs.length));
const bandWords =
  seeds > 1 ? " Lines are means over seeds; bands reach from the lowest to the highest seed." : "";
