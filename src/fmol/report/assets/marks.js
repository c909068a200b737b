// Charts as SVG. Each takes (what, width, look, exporting) and gives {svg, probe}: `probe(x, y)` says
// what is at a place. Colours are attributes, not style sheets, so that an exported figure stands alone.

function sheet(what, width, height, look, exporting) {
  const svg = sv("svg", {
    xmlns: "http://www.w3.org/2000/svg",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": what.label || what.title,
    "font-family": FONT,
    "font-size": 12,
  });
  if (exporting) svg.append(sv("rect", { width, height, fill: look.paper }));
  return svg;
}
const write = (x, y, text, look, more = {}) => sv("text", { x, y, fill: look.soft, ...more }, text);

/** A legend's lines, and the height it takes. */
function legend(entries, x, y, width, look) {
  const group = sv("g", { class: "legend" });
  let dx = 0,
    dy = 0;
  const names = elide(entries.map((entry) => entry.name), Math.min(width - 34, 240));
  for (const [i, entry] of entries.entries()) {
    const name = cut(names[i], Math.min(width - 34, 480));
    const wide = 30 + textWidth(name) + 16;
    if (dx && dx + wide > width) {
      dx = 0;
      dy += 19;
    }
    const at = { x: x + dx, y: y + dy + 8 };
    if (entry.area)
      group.append(sv("rect", { x: at.x, y: at.y - 6, width: 16, height: 11, rx: 2, fill: entry.color }));
    else
      group.append(
        sv("line", {
          x1: at.x,
          x2: at.x + 24,
          y1: at.y,
          y2: at.y,
          stroke: entry.color,
          "stroke-width": 2.2,
          "stroke-dasharray": entry.dash || null,
        }),
      );
    group.append(write(at.x + (entry.area ? 21 : 30), at.y + 4, name, look, { fill: look.ink }));
    dx += wide;
  }
  return { group, height: entries.length ? dy + 26 : 0 };
}

/** Title (in an export) and legend on top of a sheet: what they are, and where the chart begins. */
function heading(what, entries, width, look, exporting) {
  const group = sv("g");
  let y = exporting ? 14 : 2;
  if (exporting && what.title) {
    group.append(
      write(14, y + 12, what.title, look, { fill: look.ink, "font-size": 15, "font-weight": 600 }),
    );
    y += 28;
  }
  // On the page the bar of names serves for many; a figure of its own needs them all.
  const side = exporting ? 14 : 0;
  const key = legend(entries.length <= 8 || exporting ? entries : [], side, y, width - 2 * side, look);
  group.append(key.group);
  return { group, top: y + key.height };
}

/** Grid, ticks and labels of a panel. */
function axes(box, xs, ys, look, { xLabel, yLabel }) {
  const group = sv("g", { class: "axes" });
  for (const t of ys.ticks) {
    const y = ys.at(t);
    group.append(sv("line", { x1: box.left, x2: box.right, y1: y, y2: y, stroke: look.grid }));
    group.append(write(box.left - 7, y + 4, ys.text(t), look, { "text-anchor": "end", class: "tick y" }));
  }
  let free = -Infinity;
  for (const t of xs.ticks) {
    const x = xs.at(t),
      half = textWidth(xs.text(t)) / 2;
    group.append(sv("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4, stroke: look.axis }));
    if (x - half < free + 6) continue;
    free = x + half;
    group.append(
      write(Math.min(x, box.page - half - 1), box.bottom + 18, xs.text(t), look, {
        "text-anchor": "middle",
        class: "tick x",
      }),
    );
  }
  group.append(
    sv("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: look.axis }),
  );
  if (xLabel)
    group.append(
      write((box.left + box.right) / 2, box.bottom + 37, xLabel, look, {
        "text-anchor": "middle",
        class: "axis-label",
      }),
    );
  if (yLabel) {
    const y = (box.top + box.bottom) / 2;
    group.append(
      write(0, 0, yLabel, look, {
        "text-anchor": "middle",
        class: "axis-label",
        transform: `translate(${box.outer + 11} ${y}) rotate(-90)`,
      }),
    );
  }
  return group;
}
const path = (points) =>
  points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

/** Places of panels side by side and under one another. */
function panels(count, width, top, height, least) {
  const columns = Math.max(1, Math.min(count, Math.floor(width / least), 3));
  const wide = width / columns;
  return Array.from({ length: count }, (_, i) => ({
    x: (i % columns) * wide,
    y: top + Math.floor(i / columns) * height,
    width: wide,
    height,
    leftmost: i % columns === 0,
    lowest: i + columns >= count,
  }));
}

/** Lines over a common horizontal axis, in one panel or several.
 *  what: {title, panels: [{title, series: [{name, color, dash, points: [[x, y]], band, keys}]}],
 *         x: {label, log, whole}, y: {label, log, zero, min, max}, marks: [{x, name}]} */
function drawLines(what, width, look, exporting) {
  const single = what.panels.length === 1,
    side = exporting ? 12 : 0;
  const entries = [...new Map(what.panels.flatMap((p) => p.series.map((s) => [s.name, s]))).values()];
  const most = Math.max(...what.panels.map((p) => p.series.length));
  const head = heading(what, entries, width, look, exporting);
  const height = single ? Math.max(240, Math.min(360, width * 0.45)) : 226;
  const cells = panels(what.panels.length, width - 2 * side, head.top, height, 300);
  const total = cells[cells.length - 1].y + height + (single ? 26 : 12);
  const svg = sheet(what, width, total, look, exporting);
  svg.append(head.group);
  const probes = what.panels.map((panel, i) => {
    const cell = cells[i],
      group = sv("g", { class: "panel" });
    const all = panel.series.flatMap((s) => s.points);
    const bands = panel.series.flatMap((s) => s.band || []);
    const top = cell.y + (panel.title ? 24 : 8),
      bottom = cell.y + height - (single ? 18 : 32);
    const ys = scale({
      values: [...all.map((p) => p[1]), ...bands.flatMap((b) => [b[1], b[2]])],
      ...what.y,
      from: bottom,
      to: top,
      room: single ? 42 : 34,
    });
    const outer = cell.x + side,
      ticks = Math.max(...ys.ticks.map((t) => textWidth(ys.text(t))), 10);
    const box = {
      page: width,
      outer,
      left: outer + ticks + (cell.leftmost ? 30 : 22),
      right: cell.x + side + cell.width - 14,
      top,
      bottom,
    };
    const xs = scale({
      values: all.map((p) => p[0]),
      ...what.x,
      from: box.left,
      to: box.right,
      room: width < 500 ? 56 : 80,
    });
    group.append(
      axes(box, xs, ys, look, { xLabel: cell.lowest && what.x.label, yLabel: cell.leftmost && what.y.label }),
    );
    if (panel.title)
      group.append(
        write(box.left, cell.y + 14, cut(panel.title, box.right - box.left), look, {
          fill: look.ink,
          "font-weight": 600,
        }),
      );
    const dotted = panel.series.every((s) => s.points.length <= 12);
    const drawn = panel.series.map((series) => {
      const mark = sv("g", { class: "mark", ...series.keys });
      const good = series.points
        .filter((p) => xs.fits(p[0]) && ys.fits(p[1]))
        .map((p) => [xs.at(p[0]), ys.at(p[1]), p[0], p[1]]);
      const band = (series.band || []).filter((b) => ys.fits(b[1]) && ys.fits(b[2]));
      if (band.length > 1) {
        const upper = band.map((b) => [xs.at(b[0]), ys.at(b[2])]),
          lower = band.map((b) => [xs.at(b[0]), ys.at(b[1])]).reverse();
        mark.append(
          sv("path", { d: path([...upper, ...lower]) + "Z", fill: series.color, "fill-opacity": 0.16 }),
        );
      }
      mark.append(
        sv("path", {
          d: path(good),
          fill: "none",
          stroke: series.color,
          "stroke-width": most > 8 ? 1.4 : 2,
          "stroke-linejoin": "round",
          "stroke-dasharray": series.dash || null,
          class: "line",
        }),
      );
      if (dotted)
        for (const [x, y] of good) mark.append(sv("circle", { cx: x, cy: y, r: 2.6, fill: series.color }));
      group.append(mark);
      return { series, mark, good };
    });
    const cross = sv("g", { class: "cross", "pointer-events": "none" });
    group.append(cross);
    svg.append(group);
    const stops = [...new Set(drawn.flatMap((d) => d.good.map((p) => p[2])))].sort((a, b) => a - b);
    const clear = () => {
      cross.replaceChildren();
      for (const d of drawn) {
        d.mark.removeAttribute("opacity");
        d.mark.querySelector(".line").setAttribute("stroke", d.series.color);
      }
    };
    const show = (stop, y) => {
      clear();
      const x = xs.at(stop),
        spacing =
          stops.length > 1
            ? Math.abs(xs.at(stops[stops.length - 1]) - xs.at(stops[0])) / (stops.length - 1)
            : 20;
      const rows = [];
      for (const d of drawn) {
        let best = null;
        for (const p of d.good) if (!best || Math.abs(p[0] - x) < Math.abs(best[0] - x)) best = p;
        if (best && Math.abs(best[0] - x) <= Math.max(spacing * 0.75, 1))
          rows.push({
            name: d.series.name,
            color: d.series.color,
            value: best[3],
            d,
            py: best[1],
            px: best[0],
          });
      }
      if (!rows.length) return null;
      cross.append(
        sv("line", {
          x1: x,
          x2: x,
          y1: box.top,
          y2: box.bottom,
          stroke: look.faint,
          "stroke-dasharray": "3 3",
        }),
      );
      let nearest = null;
      if (known(y))
        for (const r of rows) if (!nearest || Math.abs(r.py - y) < Math.abs(nearest.py - y)) nearest = r;
      if (nearest && drawn.length > 8) {
        for (const d of drawn)
          if (d !== nearest.d) {
            d.mark.setAttribute("opacity", 0.5);
            d.mark.querySelector(".line").setAttribute("stroke", look.mute);
          }
        nearest.first = true;
      }
      for (const r of rows)
        if (drawn.length <= 8 || r === nearest)
          cross.append(
            sv("circle", {
              cx: r.px,
              cy: r.py,
              r: 4,
              fill: r.color,
              stroke: look.paper,
              "stroke-width": 1.5,
            }),
          );
      rows.sort((a, b) => (b.first ? 1 : 0) - (a.first ? 1 : 0) || b.value - a.value);
      return {
        x,
        y: box.top + 10,
        title: `${panel.title ? panel.title + ", " : ""}${what.x.word || what.x.label} ${fmt(stop, 5)}`,
        rows: rows.map((r) => ({ ...r, text: fmt(r.value) })),
      };
    };
    return { box, stops, xs, show, clear };
  });
  let at = [0, -1];
  const clear = () => probes.forEach((p) => p.clear());
  return {
    svg,
    clear,
    probe(x, y) {
      clear();
      const p = probes.find(
        ({ box }) => x >= box.left - 12 && x <= box.right + 12 && y >= box.top - 12 && y <= box.bottom + 24,
      );
      if (!p || !p.stops.length) return null;
      let best = p.stops[0];
      for (const stop of p.stops) if (Math.abs(p.xs.at(stop) - x) < Math.abs(p.xs.at(best) - x)) best = stop;
      return p.show(best, y);
    },
    step(by) {
      // With the arrow keys.
      clear();
      const stops = probes[at[0]].stops;
      if (!stops.length) return null;
      at[1] += by;
      if (at[1] < 0 || at[1] >= stops.length) {
        at[0] = (at[0] + by + probes.length) % probes.length;
        at[1] = by > 0 ? 0 : probes[at[0]].stops.length - 1;
      }
      return probes[at[0]].show(probes[at[0]].stops[at[1]], null);
    },
  };
}

/** Areas on top of one another. what: {title, rounds, series: [{name, color, values, keys}], x, y} */
function drawStack(what, width, look, exporting) {
  const side = exporting ? 12 : 0;
  const head = heading(
    what,
    what.series.map((s) => ({ ...s, area: true })),
    width,
    look,
    exporting,
  );
  const bottom = head.top + 8 + Math.max(210, Math.min(300, width * 0.42));
  const svg = sheet(what, width, bottom + 46, look, exporting);
  svg.append(head.group);
  const ys = scale({ values: [0, 1], min: 0, max: 1, from: bottom, to: head.top + 8, room: 40 });
  const box = {
    page: width,
    outer: side,
    left: side + 54,
    right: width - side - 14,
    top: head.top + 8,
    bottom,
  };
  const steps = what.rounds.length,
    ends = [what.rounds[0], what.rounds[steps - 1] + 1];
  const xs = scale({
    values: ends,
    min: ends[0],
    max: ends[1],
    whole: true,
    from: box.left,
    to: box.right,
    room: 64,
  });
  svg.append(axes(box, xs, ys, look, { xLabel: what.x.label, yLabel: what.y.label }));
  const base = new Array(steps).fill(0),
    areas = [];
  for (const series of what.series) {
    const upper = [],
      lower = [];
    series.values.forEach((value, i) => {
      // A weight holds for the whole of its round, so areas have steps.
      const next = i + 1 < steps ? what.rounds[i + 1] : ends[1],
        low = base[i],
        high = low + (value || 0);
      lower.push([xs.at(what.rounds[i]), ys.at(low)], [xs.at(next), ys.at(low)]);
      upper.push([xs.at(what.rounds[i]), ys.at(high)], [xs.at(next), ys.at(high)]);
      base[i] = high;
    });
    const area = sv("path", {
      class: "mark",
      ...series.keys,
      d: path([...upper, ...lower.reverse()]) + "Z",
      fill: series.color,
      stroke: look.paper,
      "stroke-width": what.series.length > 12 ? 0.3 : 0.8,
    });
    areas.push(area);
    svg.append(area);
  }
  const cross = sv("g", { "pointer-events": "none" });
  svg.append(cross);
  const clear = () => {
    cross.replaceChildren();
    areas.forEach((a) => a.removeAttribute("opacity"));
  };
  const show = (i, share) => {
    clear();
    let sum = 0,
      hit = -1;
    what.series.forEach((s, k) => {
      sum += s.values[i] || 0;
      if (hit < 0 && known(share) && share <= sum) hit = k;
    });
    if (hit >= 0)
      areas.forEach((a, k) => {
        if (k !== hit) a.setAttribute("opacity", 0.35);
      });
    const x = xs.at(what.rounds[i] + 0.5);
    cross.append(
      sv("line", { x1: x, x2: x, y1: box.top, y2: box.bottom, stroke: look.ink, "stroke-dasharray": "3 3" }),
    );
    const rows = what.series
      .map((s, k) => ({
        name: s.name,
        color: s.color,
        value: s.values[i],
        text: fmt(s.values[i]),
        first: k === hit,
      }))
      .sort((a, b) => (b.first ? 1 : 0) - (a.first ? 1 : 0) || b.value - a.value);
    return { x, y: box.top + 10, title: `round ${what.rounds[i]}`, rows };
  };
  let at = -1;
  return {
    svg,
    clear,
    probe(x, y) {
      if (!steps || x < box.left || x > box.right || y < box.top - 8 || y > box.bottom + 20) {
        clear();
        return null;
      }
      let best = 0;
      what.rounds.forEach((r, i) => {
        if (xs.at(r) <= x) best = i;
      });
      return show(best, (box.bottom - y) / (box.bottom - box.top));
    },
    step(by) {
      at = (at + by + steps) % steps;
      return show(at, null);
    },
  };
}

/** A table of coloured cells, with a bar at each row if there is an amount to show.
 *  what: {title, rows, columns, value(r, c), color(v, look), text(v), key: {from, to, words}, rowLabel, columnLabel,
 *         bars: {label, values}, tip(r, c), keys(r, c)}; a value that is null leaves its cell empty. */
function drawHeat(what, width, look, exporting) {
  const side = exporting ? 14 : 0;
  const head = heading(what, [], width, look, exporting);
  const rows = what.rows.length,
    columns = what.columns.length;
  const nameRoom = Math.min(
    Math.max(...what.rows.map((r) => textWidth(r, 11)), 10),
    width < 360 ? 84 : width < 600 ? 120 : 190,
  );
  const left = side + nameRoom + (what.rowLabel ? 26 : 10);
  const barRoom = what.bars ? Math.min(130, width * 0.2) : 0;
  const cellWide = Math.min(
    (width - left - side - barRoom - (barRoom ? 14 : 4)) / Math.max(columns, 1),
    what.widest || 74,
  );
  const square = what.square ? cellWide : 24;
  const cellTall = Math.max(
    3,
    Math.min(rows > 60 ? 620 / rows : rows > 24 ? 15 : 24, Math.max(square, what.square ? 3 : 24)),
  );
  const flat = what.columns.every((c) => textWidth(c, 11) <= cellWide - 5);
  const upright = !flat && cellWide >= 12 && !what.sequence;
  const columnRoom =
    flat || !upright ? 16 : Math.min(Math.max(...what.columns.map((c) => textWidth(c, 11))), 110) + 6;
  const keyTall = what.key ? 40 : 0;
  const top = head.top + (what.columnLabel ? 18 : 2) + columnRoom + 4;
  const svg = sheet(what, width, top + rows * cellTall + 14 + keyTall, look, exporting);
  svg.append(head.group);
  if (what.columnLabel)
    svg.append(write(left, head.top + 12, what.columnLabel, look, { class: "axis-label" }));
  if (what.rowLabel)
    svg.append(
      write(0, 0, what.rowLabel, look, {
        class: "axis-label",
        "text-anchor": "middle",
        transform: `translate(${side + 11} ${top + (rows * cellTall) / 2}) rotate(-90)`,
      }),
    );
  // Where cells are narrow, columns are numbered: every one, or every fifth, tenth, …
  const widest = textWidth(String(columns), 10) + 5;
  const every = [1, 2, 5, 10, 20, 50, 100, 200].find((n) => n * cellWide >= widest) || 500;
  what.columns.forEach((name, c) => {
    const x = left + (c + 0.5) * cellWide;
    if (flat)
      svg.append(
        write(x, top - 7, name, look, { "text-anchor": "middle", "font-size": 11, class: "tick x" }),
      );
    else if (upright)
      svg.append(
        write(0, 0, cut(name, 110, 11), look, {
          "font-size": 11,
          class: "tick x",
          transform: `translate(${x + 4} ${top - 6}) rotate(-90)`,
        }),
      );
    else if (
      what.sequence
        ? Number(name) % (every * what.sequence) === 0
        : (c + 1) % every === 0 || (c === 0 && every > 2)
    ) {
      svg.append(
        write(x, top - 6, what.sequence ? name : c + 1, look, {
          "text-anchor": "middle",
          "font-size": 10,
          class: "tick x",
        }),
      );
    }
  });
  const rowEvery = Math.ceil(13 / cellTall);
  what.rows.forEach((name, r) => {
    if (r % rowEvery) return;
    svg.append(
      write(left - 7, top + (r + 0.5) * cellTall + 4, cut(name, nameRoom, 11), look, {
        "text-anchor": "end",
        "font-size": 11,
        class: "tick y",
      }),
    );
  });
  const gap = cellWide > 10 && cellTall > 10 ? 1 : cellWide > 4 && cellTall > 4 ? 0.5 : 0;
  // Numbers in all cells or in none: a few would look like a statement.
  const worded =
    what.text &&
    cellTall >= 14 &&
    what.rows.every((_, r) =>
      what.columns.every((_, c) => {
        const v = what.value(r, c);
        return !known(v) || textWidth(what.text(v, r, c), 10.5) <= cellWide - 4;
      }),
    );
  const cells = sv("g", { class: "cells" });
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const value = what.value(r, c),
        x = left + c * cellWide,
        y = top + r * cellTall;
      if (!known(value)) {
        if (gap === 1)
          cells.append(
            sv("rect", {
              x: x + cellWide / 2 - 1,
              y: y + cellTall / 2 - 1,
              width: 2,
              height: 2,
              fill: look.mute,
            }),
          );
        continue;
      }
      const shade = what.color(value, look);
      cells.append(
        sv("rect", {
          class: "mark",
          ...(what.keys ? what.keys(r, c) : {}),
          x: x + gap / 2,
          y: y + gap / 2,
          width: cellWide - gap,
          height: cellTall - gap,
          rx: gap === 1 ? 2 : 0,
          fill: shade,
        }),
      );
      if (worded) {
        const words = what.text(value, r, c);
        cells.append(
          sv(
            "text",
            {
              x: x + cellWide / 2,
              y: y + cellTall / 2 + 3.8,
              "text-anchor": "middle",
              "font-size": 10.5,
              fill: inkOn(shade),
            },
            words,
          ),
        );
      }
    }
  }
  svg.append(cells);
  if (what.bars) {
    const start = left + columns * cellWide + 10,
      most = Math.max(...what.bars.values.filter(known), 1),
      room = barRoom - 44;
    svg.append(write(start, top - 7, cut(what.bars.label, barRoom, 11), look, { "font-size": 11 }));
    what.bars.values.forEach((value, r) => {
      if (!known(value)) return;
      const y = top + r * cellTall,
        long = Math.max(1, (value / most) * room);
      svg.append(
        sv("rect", {
          class: "mark",
          x: start,
          y: y + cellTall * 0.2,
          width: long,
          height: cellTall * 0.6,
          fill: look.faint,
          rx: 1,
        }),
      );
      if (cellTall >= 12)
        svg.append(write(start + long + 4, y + cellTall / 2 + 4, whole(value), look, { "font-size": 10.5 }));
    });
  }
  if (what.key) {
    const y = top + rows * cellTall + 14,
      wide = Math.min(180, width - left - 10),
      n = 36;
    for (let i = 0; i < n; i++) {
      const v = what.key.from + ((i + 0.5) / n) * (what.key.to - what.key.from);
      svg.append(
        sv("rect", {
          x: left + (i * wide) / n,
          y,
          width: wide / n + (i + 1 < n ? 1 : 0),
          height: 9,
          fill: what.color(what.key.value ? what.key.value(v) : v, look),
        }),
      );
    }
    const ends = what.key.ends || [fmt(what.key.from, 3), fmt(what.key.to, 3)];
    svg.append(write(left, y + 23, ends[0], look, { "font-size": 11 }));
    svg.append(write(left + wide, y + 23, ends[1], look, { "font-size": 11, "text-anchor": "end" }));
    if (what.key.words)
      svg.append(
        write(left + wide + 10, y + 9, cut(what.key.words, width - left - wide - 14, 11), look, {
          "font-size": 11,
        }),
      );
  }
  const frame = sv("rect", {
    fill: "none",
    stroke: look.ink,
    "stroke-width": 1.5,
    width: cellWide,
    height: cellTall,
    visibility: "hidden",
    "pointer-events": "none",
  });
  svg.append(frame);
  const clear = () => frame.setAttribute("visibility", "hidden");
  const show = (r, c) => {
    frame.setAttribute("x", left + c * cellWide);
    frame.setAttribute("y", top + r * cellTall);
    frame.setAttribute("visibility", "visible");
    return { x: left + (c + 0.5) * cellWide, y: top + (r + 1) * cellTall, ...what.tip(r, c) };
  };
  let at = -1;
  return {
    svg,
    clear,
    probe(x, y) {
      const c = Math.floor((x - left) / cellWide),
        r = Math.floor((y - top) / cellTall);
      if (c < 0 || r < 0 || c >= columns || r >= rows) {
        clear();
        return null;
      }
      return show(r, c);
    },
    step(by) {
      at = (at + by + rows * columns) % (rows * columns);
      return show(Math.floor(at / columns), at % columns);
    },
  };
}

/** Shapes over spokes. what: {title, spokes: [{name, number}], shapes: [{name, color, dash, values, fill, keys}], log, word} */
function drawRadar(what, width, look, exporting) {
  const count = what.spokes.length,
    numbered = count > 12;
  const head = heading(what, what.shapes, width, look, exporting);
  const labelRoom = numbered
    ? 24
    : Math.min(Math.max(...what.spokes.map((s) => textWidth(s.name, 11))), width * 0.24) + 12;
  const radius = Math.max(60, Math.min(width / 2 - labelRoom - 6, 210)),
    cx = width / 2,
    cy = head.top + radius + 26;
  // In an exported figure numbers need their names beside them.
  const columns = Math.max(1, Math.floor(width / 190)),
    keyRows = numbered && exporting ? Math.ceil(count / columns) : 0;
  const height = cy + radius + 30 + keyRows * 15;
  const svg = sheet(what, width, height, look, exporting);
  svg.append(head.group);
  const values = what.shapes.flatMap((s) => s.values).filter((v) => known(v) && v > 0);
  const high = Math.max(1, ...values),
    low = what.log ? Math.min(0.1, ...values) : 0;
  const distance = (v) =>
    !known(v)
      ? null
      : what.log
        ? v <= 0
          ? 0
          : (radius * Math.log10((v / low) * 1.25)) / Math.log10((high / low) * 1.25)
        : (radius * v) / high;
  const angle = (i) => -Math.PI / 2 + (2 * Math.PI * i) / count;
  const place = (i, v) => [cx + distance(v) * Math.cos(angle(i)), cy + distance(v) * Math.sin(angle(i))];
  const rings = what.log
    ? scale({ values: [low, high], log: true, from: 0, to: radius, room: 34 }).ticks.filter((t) => t <= high)
    : scale({ values: [0, high], min: 0, max: high, from: 0, to: radius, room: 34 }).ticks.filter(
        (t) => t > 0,
      );
  for (const t of rings)
    svg.append(
      sv("circle", { cx, cy, r: distance(t), fill: "none", stroke: t === 1 ? look.axis : look.grid }),
    );
  for (let i = 0; i < count; i++) {
    const [x, y] = place(i, high);
    svg.append(
      sv("line", { x1: cx, y1: cy, x2: x, y2: y, stroke: look.grid, "stroke-width": count > 20 ? 0.6 : 1 }),
    );
    const cos = Math.cos(angle(i)),
      sin = Math.sin(angle(i));
    const anchor = numbered || Math.abs(cos) < 0.2 ? "middle" : cos > 0 ? "start" : "end";
    const away = numbered ? 13 : 9;
    const label = numbered
      ? String(what.spokes[i].number)
      : cut(
          what.spokes[i].name,
          Math.abs(cos) < 0.2 ? width * 0.3 : width / 2 - radius * Math.abs(cos) - 14,
          11,
        );
    svg.append(
      write(
        cx + (radius + away) * cos,
        cy + (radius + away) * sin + 4 + (numbered ? 0 : sin * 4),
        label,
        look,
        {
          "text-anchor": anchor,
          "font-size": numbered ? 10 : 11,
          class: "tick spoke",
          fill: look.ink,
        },
      ),
    );
  }
  const nodes = what.shapes.map((shape) => {
    const mark = sv("g", { class: "mark", ...shape.keys });
    const corners = shape.values.map((v, i) => (known(v) ? place(i, v) : null));
    if (corners.every(Boolean))
      mark.append(
        sv("path", {
          d: path(corners) + "Z",
          fill: shape.color,
          "fill-opacity": shape.fill || 0,
          stroke: shape.color,
          "stroke-width": 2,
          "stroke-dasharray": shape.dash || null,
          "stroke-linejoin": "round",
        }),
      );
    corners.forEach((c) => {
      if (c && (count <= 12 || !corners.every(Boolean)))
        mark.append(sv("circle", { cx: c[0], cy: c[1], r: 2.4, fill: shape.color }));
    });
    svg.append(mark);
    return mark;
  });
  for (const t of rings)
    svg.append(
      sv(
        "text",
        {
          x: cx + 3,
          y: cy - distance(t) + 11,
          "font-size": 10,
          fill: look.faint,
          class: "ring",
          stroke: look.paper,
          "stroke-width": 3,
          "paint-order": "stroke",
        },
        fmt(t, 3),
      ),
    );
  for (let i = 0; keyRows && i < count; i++) {
    svg.append(
      write(
        14 + Math.floor(i / keyRows) * ((width - 20) / columns),
        cy + radius + 40 + (i % keyRows) * 15,
        cut(`${what.spokes[i].number}  ${what.spokes[i].name}`, (width - 20) / columns - 10, 11),
        look,
        { "font-size": 11 },
      ),
    );
  }
  const ray = sv("g", { "pointer-events": "none" });
  svg.append(ray);
  const clear = () => ray.replaceChildren();
  const show = (i) => {
    clear();
    const [x, y] = place(i, high);
    ray.append(sv("line", { x1: cx, y1: cy, x2: x, y2: y, stroke: look.ink, "stroke-width": 1.2 }));
    const rows = what.shapes
      .map((s) => ({ name: s.name, color: s.color, value: s.values[i], text: fmt(s.values[i]) }))
      .filter((r) => known(r.value))
      .sort((a, b) => b.value - a.value);
    return {
      x: (cx + x) / 2,
      y: (cy + y) / 2,
      title: `${numbered ? what.spokes[i].number + "  " : ""}${what.spokes[i].name}`,
      rows,
    };
  };
  let at = -1;
  return {
    svg,
    clear,
    nodes,
    probe(x, y) {
      const far = Math.hypot(x - cx, y - cy);
      if (far > radius + labelRoom + 8) {
        clear();
        return null;
      }
      const turn = (Math.atan2(y - cy, x - cx) + Math.PI / 2 + 2 * Math.PI) % (2 * Math.PI);
      return show(Math.round((turn / (2 * Math.PI)) * count) % count);
    },
    step(by) {
      at = (at + by + count) % count;
      return show(at);
    },
  };
}

/** Dots per row: a radar's numbers where there are too few spokes for one. Same `what` as drawRadar. */
function drawDots(what, width, look, exporting) {
  const side = exporting ? 14 : 0,
    head = heading(what, what.shapes, width, look, exporting);
  const nameRoom = Math.min(Math.max(...what.spokes.map((s) => textWidth(s.name))), width * 0.3) + 12;
  const tall = 46,
    box = {
      page: width,
      outer: 0,
      left: side + nameRoom,
      right: width - side - 16,
      top: head.top + 6,
      bottom: head.top + 12 + what.spokes.length * tall,
    };
  const svg = sheet(what, width, box.bottom + 46, look, exporting);
  svg.append(head.group);
  const values = what.shapes.flatMap((s) => s.values);
  const xs = scale({
    values: [...values, 1],
    log: what.log,
    zero: !what.log,
    from: box.left,
    to: box.right,
    room: 60,
  });
  svg.append(axes(box, xs, { ticks: [], at: () => 0 }, look, { xLabel: what.word }));
  for (const t of xs.ticks)
    svg.append(sv("line", { x1: xs.at(t), x2: xs.at(t), y1: box.top, y2: box.bottom, stroke: look.grid }));
  what.spokes.forEach((spoke, i) => {
    const y = box.top + (i + 0.5) * tall;
    svg.append(
      write(box.left - 10, y + 4, cut(spoke.name, nameRoom - 12), look, {
        "text-anchor": "end",
        class: "tick y",
        fill: look.ink,
      }),
    );
    const row = what.shapes
      .map((s) => s.values[i])
      .filter((v) => xs.fits(v))
      .map(xs.at);
    if (row.length > 1)
      svg.append(
        sv("line", {
          x1: Math.min(...row),
          x2: Math.max(...row),
          y1: y,
          y2: y,
          stroke: look.mute,
          "stroke-width": 2,
        }),
      );
  });
  const dots = [];
  for (const shape of what.shapes) {
    const mark = sv("g", { class: "mark", ...shape.keys });
    shape.values.forEach((v, i) => {
      if (!xs.fits(v)) return;
      const dot = { x: xs.at(v), y: box.top + (i + 0.5) * tall, i };
      mark.append(
        sv("circle", {
          cx: dot.x,
          cy: dot.y,
          r: 6,
          fill: shape.color,
          stroke: look.paper,
          "stroke-width": 1.5,
        }),
      );
      dots.push(dot);
    });
    svg.append(mark);
  }
  const show = (i) => ({
    x: xs.at(1) * 0 + (box.left + box.right) / 2,
    y: box.top + (i + 1) * tall - 6,
    title: what.spokes[i].name,
    rows: what.shapes
      .map((s) => ({ name: s.name, color: s.color, value: s.values[i], text: fmt(s.values[i]) }))
      .filter((r) => known(r.value))
      .sort((a, b) => b.value - a.value),
  });
  let at = -1;
  return {
    svg,
    clear() {},
    probe(x, y) {
      const i = Math.floor((y - box.top) / tall);
      return i >= 0 && i < what.spokes.length ? show(i) : null;
    },
    step(by) {
      at = (at + by + what.spokes.length) % what.spokes.length;
      return show(at);
    },
  };
}

/** Paths of one value against another. what: {title, paths: [{name, color, dash, points: [[x, y, round]], keys}], x, y} */
function drawPaths(what, width, look, exporting) {
  const side = exporting ? 12 : 0;
  const entries = [...new Map(what.paths.map((p) => [p.name, p])).values()];
  const head = heading(what, entries.length > 1 || exporting ? entries : [], width, look, exporting);
  const bottom = head.top + 8 + Math.max(240, Math.min(400, width * 0.62));
  const svg = sheet(what, width, bottom + 48, look, exporting);
  svg.append(head.group);
  const all = what.paths.flatMap((p) => p.points);
  const ys = scale({ values: all.map((p) => p[1]), ...what.y, from: bottom, to: head.top + 8, room: 36 });
  const ticks = Math.max(...ys.ticks.map((t) => textWidth(ys.text(t))), 10);
  const box = {
    page: width,
    outer: side,
    left: side + ticks + 30,
    right: width - side - 16,
    top: head.top + 8,
    bottom,
  };
  const xs = scale({ values: all.map((p) => p[0]), ...what.x, from: box.left, to: box.right, room: 64 });
  svg.append(axes(box, xs, ys, look, { xLabel: what.x.label, yLabel: what.y.label }));
  const places = [];
  for (const one of what.paths) {
    const mark = sv("g", { class: "mark", ...one.keys });
    const good = one.points
      .filter((p) => xs.fits(p[0]) && ys.fits(p[1]))
      .map((p) => ({ x: xs.at(p[0]), y: ys.at(p[1]), p, one }));
    mark.append(
      sv("path", {
        d: path(good.map((g) => [g.x, g.y])),
        fill: "none",
        stroke: one.color,
        "stroke-width": 1.6,
        "stroke-opacity": 0.75,
        "stroke-dasharray": one.dash || null,
      }),
    );
    if (good.length <= 60)
      good.forEach((g) => mark.append(sv("circle", { cx: g.x, cy: g.y, r: 1.8, fill: one.color })));
    if (good.length) {
      mark.append(
        sv("circle", {
          cx: good[0].x,
          cy: good[0].y,
          r: 4.5,
          fill: look.paper,
          stroke: one.color,
          "stroke-width": 1.8,
        }),
      );
      const end = good[good.length - 1];
      mark.append(
        sv("circle", {
          class: "end",
          cx: end.x,
          cy: end.y,
          r: 6,
          fill: one.color,
          stroke: look.paper,
          "stroke-width": 1.5,
        }),
      );
    }
    svg.append(mark);
    places.push(...good);
  }
  const ring = sv("circle", {
    r: 8,
    fill: "none",
    stroke: look.ink,
    "stroke-width": 1.5,
    visibility: "hidden",
    "pointer-events": "none",
  });
  svg.append(ring);
  const clear = () => ring.setAttribute("visibility", "hidden");
  const show = (best) => {
    ring.setAttribute("cx", best.x);
    ring.setAttribute("cy", best.y);
    ring.setAttribute("visibility", "visible");
    return {
      x: best.x,
      y: best.y,
      title: `${best.one.name}, round ${best.p[2]}`,
      rows: [
        { name: what.x.word || what.x.label, text: fmt(best.p[0]), color: best.one.color },
        { name: what.y.word || what.y.label, text: fmt(best.p[1]), color: best.one.color },
      ],
    };
  };
  return byPlace(svg, places, show, clear);
}

/** A chart of places that can be pointed at, or gone through one by one; `show` says what is there. */
function byPlace(svg, places, show, clear) {
  let at = -1;
  return {
    svg,
    clear,
    probe(x, y) {
      let best = null,
        near = 40;
      for (const place of places) {
        const far = Math.hypot(place.x - x, place.y - y);
        if (far < near) {
          near = far;
          best = place;
        }
      }
      if (!best) {
        clear();
        return null;
      }
      return show(best);
    },
    step(by) {
      if (!places.length) return null;
      at = (at + by + places.length) % places.length;
      return show(places[at]);
    },
  };
}

/** Bars made of parts. what: {title, rows: [{name, parts: [{name, value, color}]}], x} */
function drawBars(what, width, look, exporting) {
  const side = exporting ? 14 : 0;
  const entries = [
    ...new Map(what.rows.flatMap((r) => r.parts.map((p) => [p.name, { ...p, area: true }]))).values(),
  ];
  const head = heading(what, entries, width, look, exporting);
  const nameRoom = Math.min(Math.max(...what.rows.map((r) => textWidth(r.name))), width * 0.3) + 12;
  const tall = what.rows.length > 12 ? 22 : 32;
  const box = {
    page: width,
    outer: 0,
    left: side + nameRoom,
    right: width - side - 62,
    top: head.top + 4,
    bottom: head.top + 8 + what.rows.length * tall,
  };
  const svg = sheet(what, width, box.bottom + 46, look, exporting);
  svg.append(head.group);
  const sums = what.rows.map((r) => r.parts.reduce((a, p) => a + p.value, 0));
  const xs = scale({ values: sums, zero: true, from: box.left, to: box.right, room: 70 });
  for (const t of xs.ticks)
    svg.append(sv("line", { x1: xs.at(t), x2: xs.at(t), y1: box.top, y2: box.bottom, stroke: look.grid }));
  svg.append(axes(box, xs, { ticks: [], at: () => 0 }, look, { xLabel: what.x.label }));
  const names = elide(
    what.rows.map((row) => row.name),
    nameRoom - 10,
  );
  what.rows.forEach((row, r) => {
    const y = box.top + r * tall + 5;
    svg.append(
      write(box.left - 8, y + (tall - 10) / 2 + 4, cut(names[r], nameRoom - 10), look, {
        "text-anchor": "end",
        class: "tick y",
        fill: look.ink,
      }),
    );
    let sum = 0;
    for (const part of row.parts) {
      const x = xs.at(sum),
        long = xs.at(sum + part.value) - x;
      svg.append(
        sv("rect", {
          class: "mark",
          ...row.keys,
          x,
          y,
          width: Math.max(long, 0),
          height: tall - 10,
          fill: part.color,
        }),
      );
      sum += part.value;
    }
    svg.append(write(xs.at(sum) + 6, y + (tall - 10) / 2 + 4, fmt(sum, 3), look));
  });
  const show = (r) => ({
    x: box.left + 20,
    y: box.top + (r + 1) * tall,
    title: what.rows[r].name,
    rows: what.rows[r].parts
      .map((p) => ({ name: p.name, color: p.color, text: fmt(p.value), value: p.value }))
      .sort((a, b) => b.value - a.value),
  });
  let at = -1;
  return {
    svg,
    clear() {},
    probe(x, y) {
      const r = Math.floor((y - box.top) / tall);
      return r >= 0 && r < what.rows.length && x > box.left - nameRoom ? show(r) : null;
    },
    step(by) {
      at = (at + by + what.rows.length) % what.rows.length;
      return show(at);
    },
  };
}

/** A row of dots per name, with their median. what: {title, rows: [{name, color, dots: [{name, value}], keys}], x, line} */
function drawStrip(what, width, look, exporting) {
  const side = exporting ? 14 : 0,
    head = heading(what, [], width, look, exporting);
  const nameRoom =
    Math.min(Math.max(...what.rows.map((r) => textWidth(r.name, 11))), Math.max(width * 0.26, 84)) + 12;
  const tall = what.rows.length > 12 ? 17 : what.rows.length > 3 ? 40 : 58;
  const box = {
    page: width,
    outer: 0,
    left: side + nameRoom,
    right: width - side - 16,
    top: head.top + 6,
    bottom: head.top + 12 + what.rows.length * tall,
  };
  const svg = sheet(what, width, box.bottom + 46, look, exporting);
  svg.append(head.group);
  const values = what.rows.flatMap((r) => r.dots.map((d) => d.value));
  const xs = scale({
    values: known(what.line) ? [...values, what.line] : values,
    log: what.x.log,
    from: box.left + 6,
    to: box.right - 6,
    room: 60,
  });
  for (const t of xs.ticks)
    svg.append(sv("line", { x1: xs.at(t), x2: xs.at(t), y1: box.top, y2: box.bottom, stroke: look.grid }));
  if (known(what.line))
    svg.append(
      sv("line", {
        x1: xs.at(what.line),
        x2: xs.at(what.line),
        y1: box.top,
        y2: box.bottom,
        stroke: look.faint,
        "stroke-width": 1.5,
      }),
    );
  svg.append(axes(box, xs, { ticks: [], at: () => 0 }, look, { xLabel: what.x.label }));
  const places = what.rows.map((row, r) => {
    const y = box.top + 3 + (r + 0.5) * tall,
      mark = sv("g", { class: "mark", ...row.keys });
    svg.append(
      write(box.left - 10, y + 4, cut(row.name, nameRoom - 12, 11), look, {
        "text-anchor": "end",
        "font-size": 11,
        class: "tick y",
        fill: look.ink,
      }),
    );
    const dots = row.dots
      .filter((d) => xs.fits(d.value))
      .map((d) => ({ ...d, x: xs.at(d.value) }))
      .sort((a, b) => a.value - b.value);
    for (const d of dots)
      mark.append(
        sv("circle", {
          cx: d.x,
          cy: y,
          r: tall > 20 ? 5 : 3.5,
          fill: row.color,
          "fill-opacity": 0.45,
          stroke: row.color,
          "stroke-width": 0.8,
        }),
      );
    if (dots.length) {
      const middle =
        (dots[Math.floor((dots.length - 1) / 2)].x + dots[Math.ceil((dots.length - 1) / 2)].x) / 2;
      mark.append(
        sv("line", {
          x1: middle,
          x2: middle,
          y1: y - tall * 0.34,
          y2: y + tall * 0.34,
          stroke: look.ink,
          "stroke-width": 2,
        }),
      );
    }
    svg.append(mark);
    return dots;
  });
  const show = (r) => ({
    x: box.left + 30,
    y: box.top + (r + 1) * tall,
    title: what.rows[r].name,
    rows: [...places[r]]
      .reverse()
      .map((d) => ({ name: d.name, color: what.rows[r].color, text: fmt(d.value) })),
  });
  let at = -1;
  return {
    svg,
    clear() {},
    probe(x, y) {
      const r = Math.floor((y - box.top - 3) / tall);
      if (r < 0 || r >= what.rows.length) return null;
      const near = places[r].filter((d) => Math.abs(d.x - x) < 7);
      if (!near.length) return null;
      return {
        x: near[0].x,
        y: box.top + (r + 1) * tall,
        title: what.rows[r].name,
        rows: near.reverse().map((d) => ({ name: d.name, color: what.rows[r].color, text: fmt(d.value) })),
      };
    },
    step(by) {
      at = (at + by + what.rows.length) % what.rows.length;
      return show(at);
    },
  };
}
